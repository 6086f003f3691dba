"""Whether plans of whole steps are true to themselves: objective, priced again from scratch, and simulated.

    python -m benchmarks.step_truth                     # every model of the library at its full size: an hour
    python -m benchmarks.step_truth --by-turns          # two plans a model instead of five
    python -m benchmarks.step_truth --by-turns --record truth.jsonl --markdown benchmarks/results/step_truth.md
    python -m benchmarks.step_truth llama-3-8b t5-11b --global-batch 256 --seq-len 1024
    python -m benchmarks.step_truth llama-3-8b --fix '{"zero": 3, "zero_ranks": 4}'        # this plan alone

Each model is planned on as many H100 nodes as hold its training state twice: freely, and with pipelines, tensor and
context axes, ZeRO stages, recompute policies and schedules fixed that a free search might not take. One line a plan:
what was chosen, the objective, how far the plan priced again is from it (seconds, and bytes of the fullest rank), and
how far the simulator is. ``hidden`` is the time on the communication stream as a share of that on the compute stream,
on the rank with most of it: where it is 0 nothing overlaps.

With ``--record`` every model's rows are kept in a file, and models that are in it are not planned again. How good a
plan is does not matter here: ``--time-limit`` may be short.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.objective_sums import LENGTHS, length_for
from cost_models import Cluster
from cost_models.step import PipelineStep
from cost_models.step_time import layer_sum
from passes.ir.graph import Graph
from passes.plan import Plan
from planner.auditing.repriced_step import reprice
from planner.library import config_names
from planner.planning import capture_for_planning
from planner.whole_step.candidates.demands import read_demands
from planner.whole_step.plan_step import plan_step

#: Bytes of training state for each parameter, and what of a device's memory they may take.
STATE_BYTES, SHARE_OF_MEMORY = 18.0, 0.5
#: What is fixed, next to a free search.
FIXED: tuple[Mapping[str, Any], ...] = (
    {},
    {"pp": 2, "tp": 2, "zero": (0, 1), "schedule": "1f1b"},
    {"pp": 4, "tp": 2, "schedule": "interleaved_1f1b", "recompute": "selective"},
    {"pp": 2, "tp": 4, "schedule": "zbv", "recompute": ("none", "regather")},
    {"cp": 2, "pp": 2, "zero": 2, "recompute": "full"},
)
#: How far the plan priced again may be from its objective.
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Row:
    """One plan: seconds by the objective and priced again; relative differences of memory, and of simulated seconds."""

    model: str
    cluster: str
    what: str
    objective: float
    priced: float
    memory: float
    simulated: float
    hidden: float

    @property
    def difference(self) -> float:
        """Of the plan priced again to the objective, relative."""
        return self.priced / self.objective - 1

    def __str__(self) -> str:
        return (
            f"{self.model:20} {self.cluster:14} {self.objective * 1e3:12.3f} ms  priced {self.difference:+.0e}  "
            f"memory {self.memory:+.0e}  simulated {self.simulated:+7.2%}  hidden {self.hidden:5.1%}  {self.what}"
        )


def hidden_share(step: PipelineStep) -> float:
    """Seconds on the communication stream over those on the compute stream; the largest of all chunks."""
    shares = []
    for chunk in step.chunks:
        compute = step.num_microbatches * layer_sum(chunk, "forward", "backward")
        each_time = step.num_microbatches * layer_sum(chunk, "gather_forward", "gather_backward", "reduce_backward")
        shares.append((each_time + layer_sum(chunk, "reduce_step")) / compute if compute else 0.0)
    return max(shares)


def describe(plan: Plan) -> str:
    """Axes, micro-batches, schedule and policies in one line."""
    assert plan.step is not None
    step = plan.step
    axes = ",".join(f"{axis}={size}" for axis, size in step.axes.items() if size > 1)
    zero = "/".join(map(str, step.zero))
    return f"{axes} m={step.num_microbatches} {step.schedule} {'/'.join(step.recompute)} zero-{zero}"


def row(model: str, graph: Graph, plan: Plan, cluster: Cluster) -> Row:
    """The figures of one plan, which is first written to JSON and read back."""
    loaded = Plan.from_dict(json.loads(plan.to_json()))
    assert loaded.step is not None
    priced = reprice(graph, loaded, cluster)
    objective = loaded.certificate.objective
    memory = (again / rank.total - 1 for again, rank in zip(priced.memory, loaded.step.memory))
    return Row(
        model=model,
        cluster=f"{cluster.name}:{cluster.num_devices}",
        what=describe(loaded),
        objective=objective,
        priced=priced.seconds.total,
        memory=max(memory, key=abs),
        simulated=priced.simulated().seconds / objective - 1,
        hidden=hidden_share(priced.step),
    )


def rows(
    model: str, fixes: Sequence[Mapping[str, Any]], *, global_batch: int, seq_len: int, time_limit: float
) -> Iterator[Row | str]:
    """One row for each of ``fixes``, or a line that says why there is no plan."""
    try:
        graph = capture_for_planning(
            model, batch_size=global_batch, seq_len=length_for(model, lengths=(seq_len, *LENGTHS))
        )
    except ValueError as error:
        yield f"{model:20} {error}"
        return
    cluster = Cluster.parse(f"dgx-h100:{nodes_for(graph)}")
    for fixed in fixes:
        try:
            plan = plan_step(graph, cluster, read_demands(fixed, time_limit=time_limit))
        except ValueError as error:
            yield f"{model:20} {fixed}: {error}"
            continue
        yield row(model, graph, plan, cluster)


def nodes_for(graph: Graph) -> int:
    """Nodes of 8 H100s that hold the training state, a power of two."""
    device = Cluster.parse("dgx-h100").device
    needed = STATE_BYTES * sum(state.value.num_elements for state in graph.parameters)
    nodes = 1
    while 8 * nodes * device.usable_bytes * SHARE_OF_MEMORY < needed:
        nodes *= 2
    return nodes


def recorded(path: Path | None) -> dict[str, list[Row | str]]:
    """Model → its rows, of a file that ``record`` wrote; nothing if there is none yet."""
    truth_rows: dict[str, list[Row | str]] = {}
    if path is not None and path.exists():
        for text in path.read_text().splitlines():
            entry = json.loads(text)
            truth_rows[entry["model"]] = [each if isinstance(each, str) else Row(**each) for each in entry["rows"]]
    return truth_rows


def record(path: Path, model: str, lines: Iterable[Row | str]) -> None:
    """Add one model to the file."""
    rows = [each if isinstance(each, str) else asdict(each) for each in lines]
    with path.open("a") as file:
        file.write(json.dumps({"model": model, "rows": rows}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names from the config library (default: all)")
    parser.add_argument("--global-batch", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--by-turns", action="store_true", help="next to the free search one fixed set for each model")
    parser.add_argument("--fix", type=json.loads, metavar="JSON", help="one plan a model, with this fixed")
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="keep rows here, and go on from what it has")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write all rows as a table")
    arguments = parser.parse_args()
    done = recorded(arguments.record)
    model_names = arguments.models or config_names()
    for number, model in enumerate(model_names):
        if model in done:
            continue
        start = time.process_time()
        options = {"global_batch": arguments.global_batch, "seq_len": arguments.seq_len}
        fixes = (FIXED[0], FIXED[1 + number % (len(FIXED) - 1)]) if arguments.by_turns else FIXED
        fixes = fixes if arguments.fix is None else (arguments.fix,)
        done[model] = []
        for line in rows(model, fixes, **options, time_limit=arguments.time_limit):
            print(line, flush=True)
            done[model].append(line)
        if arguments.record:
            record(arguments.record, model, done[model])
        print(f"{model:20} {time.process_time() - start:.0f} s", flush=True)
    truth_rows = [line for model in model_names for line in done[model] if isinstance(line, Row)]
    without = [line for model in model_names for line in done[model] if isinstance(line, str)]
    if truth_rows:
        print("\n".join(summary(truth_rows)))
        if arguments.markdown:
            arguments.markdown.write_text(markdown(truth_rows, without))


def summary(truth_rows: Sequence[Row]) -> Iterator[str]:
    """The worst deviations."""
    apart = [each for each in truth_rows if each.hidden == 0]
    worst = max(abs(each.difference) for each in truth_rows)
    yield f"{len(truth_rows)} plans of {len({each.model for each in truth_rows})} models"
    yield f"priced again: at most {worst:.1e} from the objective (≤ {TOLERANCE:.0e}: {worst <= TOLERANCE})"
    yield f"memory again: at most {max(abs(each.memory) for each in truth_rows):.1e} from the plan"
    if apart:
        worst = max(abs(each.simulated) for each in apart)
        yield f"simulated, nothing hidden ({len(apart)} plans): at most {worst:.2%} from the objective"
    yield f"simulated, all: {min(e.simulated for e in truth_rows):+.2%} to {max(e.simulated for e in truth_rows):+.2%}"


def markdown(truth_rows: Sequence[Row], without: Sequence[str]) -> str:
    """The summary, every plan in a table, and the demands without one."""
    lines = ["# Objective against the plan priced again", "", *(f"* {line}" for line in summary(truth_rows)), ""]
    lines += ["| model | cluster | objective, s | priced again, s | difference | memory | simulated | hidden | plan |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|---|"]
    lines += [
        f"| {each.model} | {each.cluster} | {each.objective:.12g} | {each.priced:.12g} | {each.difference:+.1e} "
        f"| {each.memory:+.1e} | {each.simulated:+.2%} | {each.hidden:.1%} | {each.what} |"
        for each in truth_rows
    ]
    if without:
        lines += ["", "Demands without a plan:", "", *(f"* {' '.join(line.split())}" for line in without)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
