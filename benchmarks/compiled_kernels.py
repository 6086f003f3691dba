r"""Every kernel compiled to machine code for A100, H100 and B200, without a GPU: registers, shared memory, spills.

    python -m benchmarks.compiled_kernels                     # writes results/compiled_kernels.md
    python -m benchmarks.compiled_kernels --quick --only norm
    python -m benchmarks.compiled_kernels --models            # the chains of all models of the library too

Triton's compiler and NVIDIA's assembler (both come with ``pip install triton``) make the code that a GPU would run, at
sizes and dtypes of real models; nothing runs. The exit status is 1 if a kernel does not compile, spills registers to
memory, or needs more shared memory than the device has.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.compiled_cases import Case
    from benchmarks.compiled_gpu import Compiled

PAGE = Path(__file__).parent / "results" / "compiled_kernels.md"
#: Enough to see each kernel in its widest form: what the tests compile.
QUICK_WIDTHS, QUICK_VOCABULARIES, QUICK_HEAD_DIMS = (16384,), (128256,), (128,)


@dataclass
class Row:
    """Launches that share their machine code on every device."""

    kernel: str
    dtype: str
    compiled: dict[str, Compiled]
    operators: dict[str, None] = field(default_factory=dict)
    sizes: dict[str, None] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        return all(one.is_sound for one in self.compiled.values())

    def cells(self, devices: Sequence[str]) -> list[str]:
        kernel = self.kernel.removeprefix("runtime.kernels.").removeprefix("meshwright_emitted_")
        cells = [kernel, _listed(self.operators), _listed(self.sizes), self.dtype.removeprefix("torch.")]
        return [*cells, *(_figures(self.compiled.get(device)) for device in devices)]


def _figures(one: Compiled | None) -> str:
    if one is None:
        return ""
    return one.error or f"{one.num_warps} · {one.registers} · {one.shared / 1024:.1f} · {one.spilled}"


def _listed(names: Iterable[str]) -> str:
    return "; ".join(name for name in names if name)


class Table:
    """Compiles cases for some devices, and notes what came of it."""

    def __init__(self, devices: Sequence[str]) -> None:
        from benchmarks.compiled_gpu import OfflineGpu

        self.gpus = {device: OfflineGpu(device) for device in devices}
        self.rows: dict[tuple[Any, ...], Row] = {}

    def add(self, case: Case, devices: Sequence[str] | None = None) -> None:
        """Compile the kernels of one case for some devices, or for all."""
        launches: dict[str, list[Compiled]] = {}
        for device in devices or self.gpus:
            gpu = self.gpus[device]
            with gpu():
                case.run()
                gpu.take()
                case.run()  # as every call but the first: with more registers where that spilled
            launches[device] = gpu.take()
        for compiled in zip(*launches.values(), strict=True):
            key = (compiled[0].kernel, str(case.dtype), *launches, *(one.code or one.error for one in compiled))
            row = self.rows.setdefault(key, Row(compiled[0].kernel, str(case.dtype), dict(zip(launches, compiled))))
            row.operators[case.operator] = None
            row.sizes[case.sizes] = None

    @property
    def faults(self) -> list[Row]:
        return [row for row in self.rows.values() if not row.is_sound]

    def markdown(self, rows: Iterable[Row]) -> str:
        devices = list(self.gpus)
        lines = [["kernel", "operators", "sizes", "dtype", *devices], ["---"] * (4 + len(devices))]
        lines += [row.cells(devices) for row in rows]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def summary(self) -> str:
        count = sum(len(row.compiled) for row in self.rows.values())
        faults = sum(not one.is_sound for row in self.rows.values() for one in row.compiled.values())
        kernels = len({row.kernel for row in self.rows.values()})
        return f"{kernels} kernels in {count} forms of machine code; {faults} with a fault"


def cases(*, quick: bool) -> Iterator[Case]:
    """Operators, the golden files' chains, and some by hand."""
    from benchmarks.compiled_cases import DTYPES, WIDTHS, operator_cases
    from benchmarks.compiled_chains import golden_cases, sample_cases
    from passes.chains.place_chains import WIDEST_ROW

    if quick:
        forms = operator_cases(
            widths=QUICK_WIDTHS, vocabularies=QUICK_VOCABULARIES, head_dims=QUICK_HEAD_DIMS, dtypes=DTYPES[:1]
        )
        yield from {case.operator: case for case in forms}.values()  # of each operator the last form, which does most
        # Rows that forward passes move along, too.
        moved = operator_cases(widths=WIDTHS[-1:], vocabularies=(), head_dims=(), dtypes=DTYPES[:1])
        yield from (case for case in moved if case.operator in ("rms_norm", "layer_norm"))
    else:
        yield from operator_cases()
    whole_rows = [width for width in WIDTHS if width <= WIDEST_ROW]
    yield from golden_cases(whole_rows[-1:] if quick else whole_rows, DTYPES)
    yield from sample_cases()


def add_models(table: Table, models: Sequence[str]) -> list[list[str]]:
    """Compile the chains of models; a row of a table for each."""
    from benchmarks.compiled_chains import chains_of_model

    rows = []
    for model in models:
        try:
            chains = chains_of_model(model)
        except Exception as error:  # a table of many models survives one that cannot be captured
            rows.append([model, "", "", "", f"{type(error).__name__}: {error}".replace("\n", " ")[:120]])
            continue
        before = len(table.rows)
        for case in chains.cases:
            table.add(case)
        new = list(table.rows.values())[before:]
        faults = sum(not row.is_sound for row in new)
        rows.append([model, str(chains.triton), str(chains.inductor), str(len(new)), str(faults)])
        print(" | ".join(rows[-1]), flush=True)
    return rows


def page(table: Table, models: Sequence[Sequence[str]]) -> str:
    """The results as markdown."""
    import triton

    parts = [
        "# Kernels compiled for GPUs that are not here\n",
        f"{table.summary()}. Triton {triton.__version__}, its own assembler; `python -m benchmarks.compiled_kernels` "
        "makes this page. For each device: warps of a program · registers of a thread · KiB of shared memory · bytes "
        "that a thread spills.\n",
    ]
    parts.append(table.markdown(row for row in table.rows.values() if not models or not _is_of_model(row)) + "\n")
    if models:
        lines = [
            ["model", "Triton chains", "for torch.compile", "forms new here", "with a fault"],
            ["---"] * 5,
            *models,
        ]
        parts.append("## Chains of the library's models\n")
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n")
        if table.faults:
            parts.append(table.markdown(table.faults) + "\n")
    return "\n".join(parts)


def _is_of_model(row: Row) -> bool:
    return row.kernel.startswith("meshwright_emitted_") and not row.kernel.startswith("meshwright_emitted_golden")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="the widest form of each kernel, each for one of the devices"
    )
    parser.add_argument("--only", default="", help="operators whose name has this")
    parser.add_argument("--devices", nargs="+", default=["sm_80", "sm_90", "sm_100"])
    parser.add_argument("--models", nargs="*", help="the chains of these models of the library (default: of all)")
    parser.add_argument("--markdown", type=Path, help=f"where to write the page (default with all cases: {PAGE.name})")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined: none was yet
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        table = Table(options.devices)
        chosen = [case for case in cases(quick=options.quick) if options.only in case.operator]
        for number, case in enumerate(chosen):
            turn = options.devices[number % len(options.devices)]
            table.add(case, [turn] if options.quick else None)
        models: list[list[str]] = []
        if options.models is not None:
            from planner.library.configs import config_names

            models = add_models(table, options.models or config_names())
    print(table.markdown(table.faults) if table.faults else "no faults")
    print(table.summary())
    markdown = options.markdown or (None if options.quick or options.only else PAGE)
    if markdown is not None:
        markdown.write_text(page(table, models), encoding="utf-8")
    sys.exit(1 if table.faults else 0)


if __name__ == "__main__":
    main()
