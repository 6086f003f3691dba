"""Measures the fused operators on this machine's GPU: one command for everything that is claimed of them.

    python -m benchmarks.kernels [--quick] [--all-shapes] [--only rms_norm] [--minutes 9] [--output FOLDER]

Copy bandwidth; every operator at sizes of real models in bf16 and fp32, forward, backward and both, against eager
PyTorch, torch.compile and Liger Kernel (where ``pip install liger-kernel`` was done); AdamW; a whole Llama-3-8B layer
as an emitted program; times predicted by the cost model. Writes ``benchmarks/results/kernels.md`` and ``.json`` after
each case, so that a run that is cut short keeps what it has. The exit status is 0 if every goal holds.

Without a GPU the same runs on tiny shapes with the ATen implementations, to see that it runs: the figures mean nothing,
files are written only with ``--output``, and the exit status is 0 if nothing of ours failed.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

from benchmarks import kernels_adamw, kernels_layer
from benchmarks.kernels_cases import DEFAULT, EVERY, LLAMA_8B, OPERATORS, QUICK, TINY, TINY_CASES, Case, cases
from benchmarks.kernels_contestants import OURS
from benchmarks.kernels_measure import Row, measure_case
from benchmarks.kernels_prediction import cluster_of
from benchmarks.kernels_report import Results
from benchmarks.kernels_timing import Clock
from cost_models import Cluster
from runtime.kernels.dispatch import runs_triton

RESULTS = Path(__file__).parent / "results"
MINUTES, QUICK_MINUTES, ALL_MINUTES = 9.0, 2.5, 60.0
NAMES = (*(operator.name for operator in OPERATORS), kernels_adamw.NAME, kernels_layer.NAME)

#: A name, and what measures it, adds to the results, and gives the new rows.
Job = tuple[str, Callable[[], list[Row]]]


def jobs(arguments: argparse.Namespace, results: Results, clock: Clock) -> list[Job]:
    """All that is to be measured, what the goals are about first."""
    backend = "inductor" if clock.on_gpu else "aot_eager"
    only: Sequence[str] = arguments.only or ()

    def add_case(case: Case) -> list[Row]:
        results.cases.append((case, measure_case(case, clock, backend=backend)))
        return results.cases[-1][1]

    def add(measure: Callable[[], list[Row]]) -> list[Row]:
        rows = measure()
        results.others.extend(rows)
        return rows

    rows = TINY_CASES
    if clock.on_gpu:
        rows = EVERY if arguments.all_shapes else QUICK if arguments.quick else DEFAULT
    facts: list[Job] = [(case.label, partial(add_case, case)) for case in cases(rows, only)]
    others: list[Job] = []
    if not only or kernels_layer.NAME in only:
        size = kernels_layer.LLAMA_3_8B if clock.on_gpu else kernels_layer.TINY_LAYER
        measure_layer = partial(kernels_layer.measure_layer, size, clock, backend=backend)
        others.append((f"layer of {size.label}", partial(add, measure_layer)))
    if kernels_adamw.NAME in only or not (only or arguments.quick):
        size_of = LLAMA_8B if clock.on_gpu else TINY
        for dtype in ("bf16", "fp32"):
            measure = partial(kernels_adamw.measure_adamw, size_of, dtype, clock, backend=backend)
            others.append((f"adamw {size_of.name} {dtype}", partial(add, measure)))
    first = sum(1 for label, _ in facts if label.endswith(f"{LLAMA_8B.name} bf16"))
    return facts[:first] + others + facts[first:]


def run(arguments: argparse.Namespace) -> Results:
    """Measure, writing after each case."""
    deadline = time.monotonic() + 60 * _minutes(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    clock = Clock(device)
    folder = arguments.output or (RESULTS if clock.on_gpu else None)
    results = Results(machine(device), clock.on_gpu, clock.copy_bandwidth(), _cluster(device))
    print(f"{results.machine}\ncopy bandwidth {results.bandwidth / 1e9:,.0f} GB/s", flush=True)
    for label, measure in jobs(arguments, results, clock):
        if time.monotonic() > deadline:
            results.skipped.append(label)
            continue
        start = time.monotonic()
        rows = measure()
        print(f"{label}: {time.monotonic() - start:.1f} s\n{results.table(rows)}", flush=True)
        if folder is not None:
            results.write(folder)
    if folder is not None:
        results.write(folder)
    return results


def _minutes(arguments: argparse.Namespace) -> float:
    if arguments.minutes is not None:
        return float(arguments.minutes)
    return ALL_MINUTES if arguments.all_shapes else QUICK_MINUTES if arguments.quick else MINUTES


def _cluster(device: torch.device) -> Cluster | None:
    """None for a GPU that the cost model knows nothing of."""
    try:
        return cluster_of(device)
    except ValueError as error:
        print(f"no predictions: {error}", flush=True)
        return None


def machine(device: torch.device) -> dict[str, str]:
    """What this runs on."""
    facts = {"device": platform.processor() or platform.machine()}
    if device.type == "cuda":
        facts = {"device": torch.cuda.get_device_name(device), "driver": _driver(), "CUDA": str(torch.version.cuda)}
    implementation = "Triton" if runs_triton(torch.empty(0, device=device)) else "ATen"
    facts |= {"ours in": implementation, "torch": torch.__version__, "Python": platform.python_version()}
    for package in ("triton", "liger-kernel", "transformers"):
        try:
            facts[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
        return lines[0].strip() if lines else "unknown"
    return "unknown"


def succeeded(results: Results) -> bool:
    """Whether all goals hold; without a GPU, whether ours ran at all."""
    if results.comparable:
        return all(verdict.holds for verdict in results.verdicts() if verdict.counts)
    return all(row.seconds is not None for row in results.rows if row.contestant == OURS)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=NAMES, help="what to measure (default: all)")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--quick", action="store_true", help="what the goals are about, in three minutes")
    chosen.add_argument("--all-shapes", action="store_true", help="every operator at every size in every dtype")
    parser.add_argument("--minutes", type=float, help="start no case after so long (default: 9)")
    parser.add_argument("--output", type=Path, help="folder for kernels.md and kernels.json")
    results = run(parser.parse_args(arguments))
    print(results.verdict_table(), flush=True)
    return 0 if succeeded(results) else 1


if __name__ == "__main__":
    sys.exit(main())
