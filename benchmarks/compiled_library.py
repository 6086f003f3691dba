r"""Every fused operator and chain of every library model compiled for A100, H100 and B200, without a GPU.

    python -m benchmarks.compiled_library                        # all models; writes results/compiled_library.md
    python -m benchmarks.compiled_library --minutes 8            # stops after that long: call it again to go on
    python -m benchmarks.compiled_library --models gpt2 t5-base --page -

Each training step on one device, at the model's own widths and in bfloat16, forward and backward. What models share is
compiled once; what was compiled is kept in ``--state``. The exit status is 1 if a kernel does not compile, spills
registers to memory or needs more shared memory than the device has, 3 if time ran out before all was compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "results" / "compiled_library.md"
STATE = Path(tempfile.gettempdir()) / "meshwright_compiled_library.json"
DEVICES = ("sm_80", "sm_90", "sm_100")


class Results:
    """What was compiled so far: by model the calls that launch kernels, and by call what became of their kernels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.models: dict[str, dict[str, Any]] = content.get("models", {})
        self.calls: dict[str, dict[str, list[dict[str, Any]]]] = content.get("calls", {})

    def save(self) -> None:
        """Write everything, so that the next run goes on from here."""
        content = {"models": self.models, "calls": self.calls}
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(self.path)

    def kernels_of(self, model: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Call, device and kernel of all that a model launches."""
        for key in self.models[model].get("calls", ()):
            for device, kernels in self.calls.get(key, {}).items():
                for kernel in kernels:
                    yield key, device, kernel

    def faults(self, models: Sequence[str]) -> list[str]:
        """A line for each kernel that does not compile, spills, or does not fit."""
        lines = {
            f"{kernel['kernel']} of {key.partition('(')[0]} on {device}: "
            f"{kernel['error'] or str(kernel['spilled']) + ' bytes spilled'}; first in {model}"
            for model in reversed(models)
            for key, device, kernel in self.kernels_of(model)
            if kernel["error"] or kernel["spilled"]
        }
        return sorted(lines)


def compile_models(models: Sequence[str], results: Results, *, deadline: float) -> bool:
    """Compile what no earlier run has; whether all is there."""
    from benchmarks.compiled_gpu import OfflineGpu
    from benchmarks.library_launches import launches_of

    gpus = {device: OfflineGpu(device) for device in DEVICES}
    for model in models:
        if "calls" in results.models.get(model, {}):
            continue
        if time.monotonic() > deadline:
            return False
        try:
            captured = launches_of(model)
        except Exception as error:  # a table of many models survives one that cannot be captured
            results.models[model] = {"error": f"{type(error).__name__}: {error}".replace("\n", " ")[:150]}
            results.save()
            continue
        for launch in captured.launches:
            if launch.key not in results.calls:
                results.calls[launch.key] = {device: _compiled(gpu, launch.run) for device, gpu in gpus.items()}
                if time.monotonic() > deadline:
                    results.save()
                    return False
        results.models[model] = {
            "chains": captured.num_chains,
            "for torch.compile": captured.num_for_torch,
            "calls": [launch.key for launch in captured.launches],
        }
        results.save()
        print(f"{model}: {len(captured.launches)} calls, {captured.num_chains} chains", flush=True)
    return True


def _compiled(gpu: Any, run: Any) -> list[dict[str, Any]]:
    """The kernels that one call launches on a device, each once."""
    with gpu():
        try:
            run()
            gpu.take()
            run()  # as every call but the first: with more registers where that spilled
        except Exception as error:
            gpu.take()
            return [_entry("none", error=f"{type(error).__name__}: {error}".replace("\n", " ")[:150])]
    distinct = {(one.kernel, one.code, one.error): one for one in gpu.take()}
    return [
        _entry(one.kernel, one.code, one.num_warps, one.registers, one.shared, one.spilled, one.error)
        for one in distinct.values()
    ]


def _entry(
    kernel: str, code: str = "", warps: int = 0, registers: int = 0, shared: int = 0, spilled: int = 0, error: str = ""
) -> dict[str, Any]:
    name = kernel.removeprefix("runtime.kernels.")
    return {"kernel": name.rpartition(".")[2] if name.startswith("meshwright_emitted_") else name, "code": code,
            "warps": warps, "registers": registers, "shared": shared, "spilled": spilled, "error": error}  # fmt: skip


def page(models: Sequence[str], results: Results) -> str:
    """The results as markdown."""
    import triton

    done = [model for model in models if "calls" in results.models.get(model, {})]
    failed = [model for model in models if "error" in results.models.get(model, {})]
    forms = {(device, one["code"]) for model in done for _, device, one in results.kernels_of(model) if one["code"]}
    calls, faults = {key for model in done for key in results.models[model]["calls"]}, results.faults(done)
    parts = [
        "# Kernels of the library's models compiled for GPUs that are not here\n",
        f"{len(done)} of {len(models)} models, {len(calls)} "
        f"different calls of fused operators and chains, {len(forms)} forms of machine code for "
        f"{', '.join(DEVICES)}; {len(faults)} with a fault. Triton {triton.__version__}, its own assembler; "
        "`python -m benchmarks.compiled_library` makes this page. A training step on one device at the model's widths, "
        "of up to 8 layers, in bfloat16. Kernels that `torch.compile` would make are counted, not compiled.\n",
        _kernel_table(done, results),
        "## Models\n",
        _model_table(models, results),
    ]
    if faults:
        parts.append("## Faults\n\n" + "\n".join(f"* {line}" for line in faults) + "\n")
    if failed:
        lines = (f"* {model}: {results.models[model]['error']}" for model in failed)
        parts.append("## Not captured\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _kernel_table(models: Sequence[str], results: Results) -> str:
    """By kernel: models that launch it, forms, and the most registers, shared memory and spills on each device."""
    users, forms = defaultdict(set), defaultdict(set)
    most: dict[str, dict[str, list[int]]] = defaultdict(lambda: {device: [0, 0, 0] for device in DEVICES})
    for model in models:
        for _, device, one in results.kernels_of(model):
            kernel = one["kernel"]
            users[kernel].add(model)
            forms[kernel].add((device, one["code"]))
            figures = one["registers"], one["shared"], one["spilled"]
            most[kernel][device] = [max(two) for two in zip(most[kernel][device], figures)]
    lines = [
        f"The most on each device: registers of a thread · KiB of shared memory · bytes that a thread spills.\n\n"
        f"| kernel | models | forms | {' | '.join(DEVICES)} |\n|---|---:|---:|{'---|' * len(DEVICES)}"
    ]
    for kernel in sorted(users, key=lambda name: (-len(users[name]), name)):
        cells = (f"{one} · {shared / 1024:.1f} · {spilled}" for one, shared, spilled in most[kernel].values())
        lines.append(f"| {kernel} | {len(users[kernel])} | {len(forms[kernel])} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _model_table(models: Sequence[str], results: Results) -> str:
    lines = [
        "| model | calls | Triton chains | for torch.compile | with a fault |",
        "|---|---:|---:|---:|---:|",
    ]
    for model in models:
        entry = results.models.get(model, {})
        if "calls" in entry:
            faults = len(results.faults([model]))
            cells = len(entry["calls"]), entry["chains"], entry["for torch.compile"], faults
            lines.append(f"| {model} | {' | '.join(map(str, cells))} |")
        elif not entry:
            lines.append(f"| {model} | not compiled yet | | | |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="names of the library (default: all)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after that long")
    parser.add_argument("--state", type=Path, default=STATE, help=f"what was compiled so far (default: {STATE})")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write the page; - for the terminal")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined: none was yet
    deadline = time.monotonic() + 60 * options.minutes
    from planner.library.configs import config_names

    models, results = options.models or config_names(), Results(options.state)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        complete = compile_models(models, results, deadline=deadline)
    text = page(models, results)
    if str(options.page) == "-":
        print(text)
    else:
        options.page.write_text(text, encoding="utf-8")
    faults = results.faults([model for model in models if "calls" in results.models.get(model, {})])
    print(f"{len(faults)} faults" if complete else "time ran out: call again to go on")
    sys.exit(1 if faults else 0 if complete else 3)


if __name__ == "__main__":
    main()
