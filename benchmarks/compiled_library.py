r"""Every fused operator and chain of every library model compiled for A100, H100 and B200, without a GPU.

    python -m benchmarks.compiled_library                        # all models; writes results/compiled_library.md
    python -m benchmarks.compiled_library --minutes 8            # stops after that long: call it again to go on
    python -m benchmarks.compiled_library --again                # capture all models anew: after a change of the passes
    python -m benchmarks.compiled_library --models gpt2 t5-base --page -

Each training step on one device, at the model's own widths and in bfloat16, forward and backward. What models share is
compiled once; what was compiled is kept beside the page, in ``--state``. The exit status is 1 if a kernel does not
compile, spills registers to memory or needs more shared memory than the device has, 3 if time ran out before all was
compiled.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.compiled_gpu import Compiled
    from benchmarks.compiled_state import Results

PAGE = Path(__file__).parent / "results" / "compiled_library.md"
STATE = PAGE.with_suffix(".json")
DEVICES = ("sm_80", "sm_90", "sm_100")


def compile_models(models: Sequence[str], results: Results, *, deadline: float) -> bool:
    """Compile what no earlier run has; whether all is there."""
    from benchmarks.compiled_gpu import OfflineGpu
    from benchmarks.compiled_state import ModelEntry
    from benchmarks.library_launches import launches_of

    gpus = [OfflineGpu(device, results.forms) for device in DEVICES]
    for model in models:
        if model in results.models and not results.models[model].error:
            continue
        if time.monotonic() > deadline:
            return False
        try:
            captured = launches_of(model)
        except Exception as error:  # a table of many models survives one that cannot be captured
            results.models[model] = ModelEntry(error=_said(error))
            continue
        for launch in captured.launches:
            if launch.key not in results.calls:
                results.calls[launch.key] = _compiled(gpus, launch, results)
            if time.monotonic() > deadline:
                results.save()
                return False
        keys = tuple(launch.key for launch in captured.launches)
        results.models[model] = ModelEntry(captured.num_chains, captured.num_for_torch, keys)
        results.save()
        print(f"{model}: {len(keys)} calls, {captured.num_chains} chains, {len(results.forms)} forms", flush=True)
    results.save()
    return True


def _compiled(gpus: Iterable[Any], launch: Any, results: Results) -> list[str]:
    """Names of the forms that one call launches on each device, each once."""
    codes: dict[str, None] = {}
    for gpu in gpus:
        for form in _launched(gpu, launch.run):
            code = form.code or f"{launch.key} {gpu.name}".replace(" ", "_")  # one that does not compile
            results.forms[code] = replace(form, kernel=_short(form.kernel), code=code)
            codes[code] = None
    return list(codes)


def _launched(gpu: Any, run: Any) -> list[Compiled]:
    from benchmarks.compiled_gpu import Compiled

    with gpu():
        try:
            run()
            gpu.take()
            run()  # as every call but the first: with more registers where that spilled
        except Exception as error:
            gpu.take()
            return [Compiled("none", "", gpu.name, error=_said(error))]
    launches: list[Compiled] = gpu.take()
    return launches


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:150]


def _short(kernel: str) -> str:
    name = kernel.removeprefix("runtime.kernels.")
    return name.rpartition(".")[2] if name.startswith("meshwright_emitted_") else name


def page(models: Sequence[str], results: Results) -> str:
    """The results as markdown."""
    import triton

    done = [model for model in models if model in results.models and not results.models[model].error]
    failed = [model for model in models if model in results.models and results.models[model].error]
    forms = {form.code for model in done for _, form in results.forms_of(model)}
    calls, faults = {call for model in done for call in results.models[model].calls}, results.faults(done)
    parts = [
        "# Kernels of the library's models compiled for GPUs that are not here\n",
        f"{len(done)} of {len(models)} models, {len(calls)} "
        f"different calls of fused operators and chains, {len(forms)} forms of machine code for "
        f"{', '.join(DEVICES)}; {len(faults)} with a fault. Triton {triton.__version__}, its own assembler; "
        "`python -m benchmarks.compiled_library` makes this page. A training step on one device at the model's widths, "
        "with a layer or more of each kind, in bfloat16. Kernels that `torch.compile` would make are counted, not "
        "compiled.\n",
        _kernel_table(done, results),
        "## Models\n",
        _model_table(models, results),
    ]
    if faults:
        parts.append("## Faults\n\n" + "\n".join(f"* {line}" for line in faults) + "\n")
    if failed:
        lines = (f"* {model}: {results.models[model].error}" for model in failed)
        parts.append("## Not captured\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _kernel_table(models: Sequence[str], results: Results) -> str:
    """By kernel: models that launch it, forms, and the most registers, shared memory and spills on each device."""
    users, forms = defaultdict(set), defaultdict(set)
    most: dict[str, dict[str, list[int]]] = defaultdict(lambda: {device: [0, 0, 0] for device in DEVICES})
    for model in models:
        for _, form in results.forms_of(model):
            users[form.kernel].add(model)
            forms[form.kernel].add(form.code)
            figures = form.registers, form.shared, form.spilled
            most[form.kernel][form.device] = [max(two) for two in zip(most[form.kernel][form.device], figures)]
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
        entry = results.models.get(model)
        if entry is None:
            lines.append(f"| {model} | not compiled yet | | | |")
        elif not entry.error:
            cells = len(entry.calls), entry.chains, entry.for_torch, len(results.faults([model]))
            lines.append(f"| {model} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", help="names of the library (default: all)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after that long")
    parser.add_argument("--state", type=Path, default=STATE, help=f"what was compiled so far (default: {STATE.name})")
    parser.add_argument("--again", action="store_true", help="also models that an earlier run compiled")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write the page; - for the terminal")
    options = parser.parse_args()
    os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined: none was yet
    deadline = time.monotonic() + 60 * options.minutes
    from benchmarks.compiled_state import Results
    from planner.library.configs import config_names

    models, results = options.models or config_names(), Results(options.state)
    if options.again:
        results.models, results.calls = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        complete = compile_models(models, results, deadline=deadline)
    text = page(models, results)
    if str(options.page) == "-":
        print(text)
    else:
        options.page.write_text(text, encoding="utf-8")
    faults = results.faults([model for model in models if model in results.models])
    print(f"{len(faults)} faults" if complete else "time ran out: call again to go on")
    sys.exit(1 if faults else 0 if complete else 3)


if __name__ == "__main__":
    main()
