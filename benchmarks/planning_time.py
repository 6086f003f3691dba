r"""How long planning a whole training step takes, against layers and against devices.

    python -m benchmarks.planning_time                                # both sweeps, and the three that must be fast
    python -m benchmarks.planning_time --sweep layers --sweep devices \
        --plot benchmarks/results/planning_time.png --markdown benchmarks/results/planning_time.md

Every point is a process of its own, from config to saved plan: seconds of the whole process and of its processor (one
thread; what a shared machine takes without others' work), of that the search alone, peak memory, gap, candidates, and
mesh shapes (layouts over which candidates range). Sweeps count processor seconds; on a busy machine give them a longer
``--time-limit``, which is by the clock. ``--plot`` needs matplotlib (``pip install 'meshwright[bench]'``).
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

#: Sweeps over depth and over devices, and the plans that must be fast: (at most so many seconds).
LAYERS = (8, 16, 32, 64, 126)
NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
#: A larger gap than this is worth a word.
GAP = 0.01


@dataclass(frozen=True)
class Point:
    """A model (of ``layers`` layers, if given) on a cluster of ``nodes`` nodes of eight H100."""

    model: str
    nodes: int
    global_batch: int
    seq_len: int = 8192
    layers: int | None = None
    limit: float | None = None


@dataclass(frozen=True)
class Measured:
    """Seconds by the clock, processor seconds in all and of the search, and bytes of one point."""

    seconds: float
    processor_seconds: float
    search_seconds: float
    peak_bytes: float
    step_seconds: float
    gap: float
    status: str
    enumerated: int
    shapes: int
    shardings: int


FAST = (
    Point("llama-3-8b", 8, 64, limit=10.0),
    Point("llama-3.1-70b", 64, 512, limit=20.0),
    Point("llama-3.1-405b", 2048, 2048, limit=60.0),
)


def sweep(name: str) -> tuple[Point, ...]:
    """The points of one sweep."""
    if name == "layers":
        return tuple(Point("llama-3.1-8b", 8, 64, layers=layers) for layers in LAYERS)
    if name == "devices":
        return tuple(Point("llama-3.1-8b", nodes, max(64, 8 * nodes)) for nodes in NODES)
    return FAST


def measure(point: Point, *, time_limit: float) -> Measured:
    """Plan one point in a process of its own."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.planning_time", "--one", json.dumps(asdict(point))]
    done = subprocess.run([*command, "--time-limit", str(time_limit)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{point} failed:\n{done.stderr[-2000:]}")
    return replace(Measured(**json.loads(done.stdout.splitlines()[-1])), seconds=time.perf_counter() - start)


def plan_one(point: Point, *, time_limit: float) -> Measured:
    """Plan one point here, as ``planner plan`` does, and save the plan."""
    import resource

    gc.disable()  # as the command line does: a plan is made once
    from cost_models import Cluster
    from planner import plan
    from planner.library import load_config
    from planner.whole_step.candidates.mesh_layout import layouts
    from planner.whole_step.result.search_progress import ANALYSING, Report

    config: Any = load_config(point.model)
    if point.layers is not None:
        config.num_hidden_layers = point.layers
    cluster = Cluster.parse(f"dgx-h100:{point.nodes}")
    began: dict[str, float] = {}

    def note(report: Report) -> None:
        began.setdefault(report.phase, time.process_time())

    new_plan = plan(
        config,
        cluster,
        global_batch=point.global_batch,
        seq_len=point.seq_len,
        time_limit=time_limit,
        progress=note,
    )
    done = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        new_plan.save(Path(folder) / "plan.json")
    assert new_plan.step is not None
    return Measured(
        seconds=0.0,
        processor_seconds=time.process_time(),
        search_seconds=done - began[ANALYSING],
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        step_seconds=new_plan.step.costs.seconds,
        gap=new_plan.certificate.gap,
        status=new_plan.certificate.status,
        enumerated=new_plan.step.search.get("enumerated", 0),
        shapes=sum(1 for _ in layouts(cluster, {})),
        shardings=new_plan.step.search["shardings searched"],
    )


def name_of(point: Point) -> str:
    """Model and depth."""
    return f"{point.model} × {point.layers} layers" if point.layers else point.model


def line(point: Point, timed: Measured) -> str:
    """One row for the terminal."""
    verdict = "" if point.limit is None else f"  (≤ {point.limit:g} s: {timed.seconds <= point.limit})"
    name = f"{name_of(point):28} {8 * point.nodes:6} devices"
    processor = f"processor {timed.processor_seconds:6.1f} s  search {timed.search_seconds:6.1f} s"
    time_taken = f"{timed.seconds:6.1f} s  {processor}  {timed.peak_bytes / 2**30:5.2f} GiB"
    quality = f"step {timed.step_seconds:8.3f} s  gap {timed.gap:6.2%} {timed.status:10}"
    size = f"{timed.shapes:5} mesh shapes  {timed.enumerated:6} candidates  {timed.shardings:4} shardings"
    return f"{name}  {time_taken}  {quality}  {size}{verdict}"


Results = dict[str, list[tuple[Point, Measured]]]


def markdown(results: Results) -> str:
    """A table for each sweep, and how the search grows over it."""
    head = ("model", "devices", "mesh shapes", "candidates", "shardings", "clock, s", "processor, s", "search, s",
            "search a mesh shape, ms", "peak, GiB", "step, s", "gap")  # fmt: skip
    lines = ["# Seconds to plan", "", "Processor seconds, one thread, but for the column by the clock."]
    for name, rows in results.items():
        lines += ["", f"## {name.capitalize()}", "", f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
        for point, timed in rows:
            cells = (
                name_of(point), f"{8 * point.nodes}", f"{timed.shapes}", f"{timed.enumerated}", f"{timed.shardings}",
                f"{timed.seconds:.1f}", f"{timed.processor_seconds:.1f}", f"{timed.search_seconds:.1f}",
                f"{1e3 * timed.search_seconds / timed.shapes:.0f}", f"{timed.peak_bytes / 2**30:.2f}",
                f"{timed.step_seconds:.3f}", f"{timed.gap:.2%}" + (f" ({timed.status})" if timed.gap > GAP else ""),
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", growth(name, rows)]
    return "\n".join(lines) + "\n"


def growth(name: str, rows: Sequence[tuple[Point, Measured]]) -> str:
    """How the search's seconds grow from the least point of a sweep to its largest, beside what they may grow with."""
    if name == "fast":
        within = sum(timed.seconds <= point.limit for point, timed in rows if point.limit is not None)
        return f"{within} of {len(rows)} within their limits by the clock."
    (first, least), (last, most) = rows[0], rows[-1]
    took = most.search_seconds / least.search_seconds
    if name == "layers":
        return f"{last.layers} layers take {took:.2f} times the search of {first.layers}."
    return (
        f"{8 * last.nodes} devices have {most.shapes / least.shapes:.1f} times the mesh shapes of {8 * first.nodes} "
        f"and take {took:.1f} times the search."
    )


def draw(results: Results, path: Path) -> None:
    """A picture of both sweeps."""
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install 'meshwright[bench]'") from error
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for axis, (name, label) in zip(axes, (("layers", "layers"), ("devices", "devices"))):
        rows = results.get(name, [])
        across = [point.layers if name == "layers" else 8 * point.nodes for point, _ in rows]
        axis.plot(across, [timed.processor_seconds for _, timed in rows], marker="o", label="config to saved plan")
        axis.plot(across, [timed.search_seconds for _, timed in rows], marker="s", label="search")
        if name == "devices" and rows:
            scale = rows[0][1].search_seconds / rows[0][1].shapes
            axis.plot(across, [scale * timed.shapes for _, timed in rows], "--", label="as mesh shapes grow")
            axis.set_xscale("log", base=2)
        axis.set_xlabel(label)
        axis.set_ylabel("processor seconds")
        axis.set_ylim(bottom=0)
        axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run(names: Iterable[str], *, time_limit: float, table: Path | None = None) -> Results:
    """Measure the sweeps, printing and writing ``table`` as it goes."""
    results: Results = {}
    for name in names:
        for point in sweep(name):
            timed = measure(point, time_limit=time_limit)
            results.setdefault(name, []).append((point, timed))
            print(line(point, timed), flush=True)
            if table is not None:
                table.write_text(markdown(results))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", choices=("layers", "devices", "fast"), action="append")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw both sweeps")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write tables")
    parser.add_argument("--time-limit", type=float, default=90.0, help="seconds for each search")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(asdict(plan_one(Point(**json.loads(arguments.one)), time_limit=arguments.time_limit))))
        gc.freeze()  # as the command line does
        return
    results = run(
        arguments.sweep or ("fast", "layers", "devices"), time_limit=arguments.time_limit, table=arguments.markdown
    )
    if arguments.plot:
        draw(results, arguments.plot)


if __name__ == "__main__":
    main()
