"""Published training runs, each planned with everything fixed as its source says: predicted against published.

    python -m benchmarks.published                 # all runs of published_runs/: some minutes
    python -m benchmarks.published titan MPT-7B    # those whose name contains one of these

A row's ratios are predicted / published: speed (tokens/s of a device, whatever the source states converted to it), and
memory of the fullest device, as a caching allocator reserves it or of its tensors, whichever is published. Memory does
not bind unless the row says so: what a run needs is what is compared. Efficiency curves are one set a device; ``split``
says which runs they may be set by (``calibration``), and by which they are judged (``test``).
"""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.published_frameworks import Framework
from cost_models import Cluster
from cost_models.hardware import DeviceGroup
from cost_models.memory import reserved_bytes
from cost_models.simulator import simulate
from cost_models.step import PipelineStep
from cost_models.step_time import step_memory
from passes.ir.graph import Graph
from passes.plan.step_plan import StepPlan
from planner import planning
from planner.library import load_config
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.demands import Demands, read_demands
from planner.whole_step.candidates.expert_layouts import BaselineSpace, Splitter
from planner.whole_step.plan_step import plan_step
from planner.whole_step.result.plan_of_solution import extract, judge

RUNS_FOLDER = Path(__file__).with_name("published_runs")
#: Memory for devices of which too much is asked: the comparison is with what the run needs.
AMPLE_BYTES = 1e13
#: Seconds that one run's search may take: on a busy machine the largest need minutes.
TIME_LIMIT = 500.0


@dataclass(frozen=True)
class PublishedRun:
    """One run; fields as ``published_runs/README.md`` explains them."""

    name: str
    source: str
    software: int
    model: str
    cluster: str
    global_batch: int
    seq_len: int
    compiled: bool
    fix: Mapping[str, Any]
    published: Mapping[str, float]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    network_gbps: float | None = None
    memory_binds: bool = False
    tensor: Splitter | None = None
    overlap_tensor: bool = False
    fitted_before: bool = False
    framework: Mapping[str, Any] = field(default_factory=dict)
    second_hand: str = ""
    open: str = ""
    why: str = ""

    @property
    def split(self) -> Literal["calibration", "test"]:
        """Which half it belongs to: by a hash of its name, and what was looked at before there was one is no test."""
        is_even = hashlib.sha256(self.name.encode()).digest()[0] % 2 == 0
        return "calibration" if self.fitted_before or is_even else "test"

    @property
    def architecture(self) -> tuple[Any, ...]:
        """What runs of one model share: its name, and the sizes that the run gives it."""
        return self.model, *(self.overrides.get(name) for name in ("hidden_size", "num_hidden_layers"))

    @property
    def family(self) -> str:
        """``"fully sharded"``, ``"tensor/pipeline"``, or ``"replicated"`` (data parallelism alone)."""
        if self.fix["tp"] > 1 or self.fix["pp"] > 1:
            return "tensor/pipeline"
        return "fully sharded" if self.fix["zero"] == 3 else "replicated"

    @property
    def device(self) -> str:
        """``"A100"`` or ``"H100"``."""
        return "A100" if "a100" in self.cluster else "H100"


@dataclass(frozen=True)
class Comparison:
    """Predicted and published: tokens/s of one device, GiB of the fullest; None where the source says nothing."""

    run: PublishedRun
    predicted_speed: float
    published_speed: float | None
    predicted_gib: float
    published_gib: float | None

    @property
    def speed_ratio(self) -> float | None:
        return None if self.published_speed is None else self.predicted_speed / self.published_speed

    @property
    def memory_ratio(self) -> float | None:
        return None if self.published_gib is None else self.predicted_gib / self.published_gib


def published_runs() -> tuple[PublishedRun, ...]:
    """All runs of the table."""
    files = sorted(RUNS_FOLDER.glob("*.toml"))
    return tuple(PublishedRun(**row) for file in files for row in tomllib.loads(file.read_text("utf-8"))["runs"])


def compare(run: PublishedRun, *, gap: float = Demands.gap) -> Comparison:
    """Plan ``run``, to ``gap`` of the best, and set its step, as its software runs it, beside what was published."""
    config = config_of(run)
    cluster = cluster_of(run)
    graph = planning.capture_for_planning(config, batch_size=run.global_batch, seq_len=run.seq_len)
    if run.tensor is None:
        # Their own software ran these, without our kernels, and what ran fitted: no headroom.
        demands = read_demands(
            run.fix,
            compiled=run.compiled,
            headroom=0.0,
            gap=gap,
            time_limit=TIME_LIMIT,
            overlap_tensor=run.overlap_tensor,
        )
        step = plan_step(graph, cluster, demands).step
    else:
        step = split_by_rule(run, run.tensor, graph, config, cluster)
    assert step is not None
    played = Framework(**run.framework).on_step(step, graph, config, run.seq_len, cluster)
    return comparison(run, step, played, config, cluster.num_devices)


def split_by_rule(run: PublishedRun, tensor: Splitter, graph: Graph, config: Any, cluster: Cluster) -> StepPlan | None:
    """The step with layers split as the run's software splits them, where the planner would split otherwise."""
    space = BaselineSpace(graph, config=config, compiled=run.compiled, overlap_tensor=run.overlap_tensor)
    demands = read_demands(run.fix, compiled=run.compiled, time_limit=TIME_LIMIT, overlap_tensor=run.overlap_tensor)
    search = Search(space.level_one(tensor, cluster), cluster, demands)
    outcome = search.run()
    best = min((judge(solution) for solution in outcome.solutions), key=lambda each: each.report.seconds)
    return extract(search, outcome, best, [], cluster=cluster, constraints={}).step


def comparison(run: PublishedRun, step: StepPlan, played: PipelineStep, config: Any, num_devices: int) -> Comparison:
    """``step`` beside what was published, with the seconds and bytes of ``played``."""
    tokens = run.global_batch * run.seq_len
    seconds = published_seconds(run, step, config, num_devices)
    more = max(step_memory(played)) - max(step_memory(step.pipeline))
    tensors = max(rank.total for rank in step.memory) + more
    num_bytes = tensors if "allocated_gib" in run.published else reserved_bytes(tensors)
    return Comparison(
        run=run,
        predicted_speed=tokens / simulate(played).seconds / num_devices,
        published_speed=None if seconds is None else tokens / seconds / num_devices,
        predicted_gib=num_bytes / 2**30,
        published_gib=run.published.get("gib", run.published.get("allocated_gib")),
    )


def published_seconds(run: PublishedRun, step: StepPlan, config: Any, num_devices: int) -> float | None:
    """Seconds of a step, from whatever measure of speed the source gives."""
    measured = run.published
    if "seconds" in measured:
        return measured["seconds"]
    if "tokens_per_second" in measured:
        return run.global_batch * run.seq_len / (measured["tokens_per_second"] * num_devices)
    if "tflops" in measured:
        return step.costs.flops / (measured["tflops"] * 1e12 * num_devices)
    if "hardware_tflops" in measured:
        return recomputed_flops(run, config) / (measured["hardware_tflops"] * 1e12 * num_devices)
    return None


def recomputed_flops(run: PublishedRun, config: Any) -> float:
    """96·B·s·l·h²·(1 + s/6h + V/16lh): a step with all layers recomputed (Narayanan et al. 2021, equation 3)."""
    layers, width, vocabulary = config.num_hidden_layers, config.hidden_size, config.vocab_size
    share = 1 + run.seq_len / (6 * width) + vocabulary / (16 * layers * width)
    return float(96 * run.global_batch * run.seq_len * layers * width**2 * share)


def config_of(run: PublishedRun) -> Any:
    """The library's config with the run's overrides."""
    config = load_config(run.model)
    for name, value in run.overrides.items():
        setattr(config, name, value)
    return config


def cluster_of(run: PublishedRun) -> Cluster:
    """The run's cluster, with its own network, and ample memory unless memory binds."""
    cluster = Cluster.parse(run.cluster)
    groups = cluster.groups
    if not run.memory_binds:
        groups = tuple(
            DeviceGroup(dataclasses.replace(group.device, memory_bytes=AMPLE_BYTES), group.count) for group in groups
        )
    levels = cluster.levels
    if run.network_gbps is not None:
        levels = (*levels[:-1], dataclasses.replace(levels[-1], bandwidth=run.network_gbps * 1e9 / 8))
    return Framework(**run.framework).on_cluster(dataclasses.replace(cluster, groups=groups, levels=levels))


def table_row(result: Comparison) -> str:
    """One line of the table."""
    run = result.run
    speed = _cell(result.predicted_speed, result.published_speed)
    memory = _cell(result.predicted_gib, result.published_gib)
    notes = "; ".join(filter(None, (run.source, run.second_hand, run.open and f"open: {run.open}", run.why)))
    return f"{run.name:34} {run.split:11} {speed:>26} {memory:>22}  {notes}"


def _cell(predicted: float, published: float | None) -> str:
    if published is None:
        return f"{predicted:,.1f} /      -     -"
    return f"{predicted:,.1f} / {published:,.1f} {predicted / published:5.2f}"
