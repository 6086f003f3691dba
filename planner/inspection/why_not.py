"""Why a plan is not otherwise: the same search under a wish, or asked for something else, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.short_text import ShortRepr, fold
from passes.plan import Plan
from passes.plan.parameter_dtype import float_dtype
from passes.plan.step_summary import seq_len_of, stopped_by, tokens_per_sample
from passes.plan.text_tables import format_change, format_seconds
from planner.inspection.plan_difference import PlanDifference, difference
from planner.inspection.plan_graph import check_model, graph_of_plan, library_model, training_of
from planner.inspection.wishes import joined_demands

if TYPE_CHECKING:
    from cost_models import Cluster
    from passes.capture.call_arguments import ExampleInputs


@dataclass(frozen=True, repr=False)
class WhyNot(ShortRepr):
    """The answer: the best plan that meets the wish and how it differs, or why there is none."""

    wished: Plan | None
    changes: PlanDifference | None
    reason: str

    def __str__(self) -> str:
        return fold(self.reason) if self.changes is None else f"{fold(self.reason)}\n\n{self.changes}"

    def table(self, *, all_rows: bool = False) -> str:
        """The answer as text: one line, then what differs."""
        return self.reason if self.changes is None else f"{self.reason}\n\n{self.changes.table(all_rows=all_rows)}"


def why_not(
    plan: Plan,
    *,
    fix: Mapping[str, Any] | None = None,
    forbid: Mapping[str, Any] | None = None,
    memory_limit: float | None = None,
    seq_len: int | None = None,
    global_batch: int | None = None,
    cluster: Cluster | str | None = None,
    model: Any = None,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
    time_limit: float | None = None,
) -> WhyNot:
    """Search again for what ``plan`` was asked to be, and the wish besides.

    Args:
        fix, forbid: the wish, as ``planner.plan`` takes it. The plan's own demands that contradict it are left out,
            and named in the answer.
        memory_limit, seq_len, global_batch, cluster: what to ask for in the place of the plan's own (less memory,
            longer samples, other links), as ``planner.plan`` takes them.
        model, example_inputs, loss_fn: of a plan that is not of a config in the library, as ``planner.plan`` takes
            them. The graph of a config that was planned before is read from the cache.

    Raises:
        ValueError: without a wish, for a wish that cannot be read, for a plan on a given mesh, and if the plan does not
            name its model and none is passed.

    Example:
        >>> print(why_not(Plan.load("plan.json"), fix={"tp": 4}).table())
    """
    from cost_models import Cluster
    from planner.planning import as_cluster
    from planner.planning import plan as search_again
    from planner.whole_step.candidates.demands import FRAMEWORK, read_demands, refuse_beyond_devices
    from planner.whole_step.candidates.no_plan import NoPlan

    changed = {"memory_limit": memory_limit, "seq_len": seq_len, "global_batch": global_batch, "cluster": cluster}
    changed = {name: value for name, value in changed.items() if value is not None}
    if not fix and not forbid and not changed:
        raise ValueError(
            "there is no wish: give fix={'tp': 4}, forbid={'recompute': 'full'}, or another memory_limit, seq_len, "
            "global_batch or cluster"
        )
    if seq_len is not None and (example_inputs is not None or seq_len_of(plan) is None):
        raise ValueError("seq_len is of models whose samples are tokens and whose inputs the library makes: drop it")
    if not plan.step.decides_units:
        raise ValueError(
            "the plan is on a given mesh, where nothing but shardings was searched: plan a step on another mesh "
            "(planner plan --mesh …) and compare the two with planner diff"
        )
    demands = plan.certificate.demands
    step = plan.step
    hardware = Cluster.from_dict(dict(plan.cluster)) if cluster is None else as_cluster(cluster, num_devices=1)
    read_demands(fix or {}, forbid or {}, memory_limit=memory_limit)
    joined = joined_demands(demands, fix=fix or {}, forbid=forbid or {}, num_devices=hardware.num_devices)
    read_demands(joined.fix, joined.forbid, memory_limit=memory_limit)
    if memory_limit is not None:
        refuse_beyond_devices(memory_limit, hardware, instead="ask for a cluster whose devices have more")
    if isinstance(model, (str, Path)) and seq_len is None and global_batch is None:
        with graph_of_plan(plan, model, example_inputs=example_inputs, loss_fn=loss_fn):
            pass  # refuses another model before it is searched
    try:
        wished = search_again(
            library_model(plan) if model is None else model,
            hardware,
            global_batch=global_batch or step.global_batch,
            seq_len=(seq_len or seq_len_of(plan)) if example_inputs is None else None,
            example_inputs=example_inputs,
            loss_fn=loss_fn,
            dtype=float_dtype(plan),
            training=training_of(plan),
            fix=joined.fix,
            forbid=joined.forbid,
            constraints=plan.constraints or None,
            memory_limit=demands.get("memory_limit") if memory_limit is None else memory_limit,
            headroom=step.headroom,
            optimizer=step.optimizer,
            gradient_dtype=step.gradient_dtype or None,
            compiled=step.compiled,
            overlap_tensor=step.overlap_tensor,
            offload=step.offload or "never",
            fuse=plan.fusion is not None,
            time_limit=time_limit,
            framework=demands.get(FRAMEWORK),
        )
    except NoPlan as error:
        if not error.proved:
            raise
        return WhyNot(None, None, f"It cannot be: {error}{joined.remark}")
    if seq_len is None and global_batch is None:
        check_model(plan, wished.fingerprint)
    verdict = _changed_verdict(plan, wished) if changed else _verdict(plan, wished)
    return WhyNot(wished, difference(plan, wished), f"{verdict}{joined.remark}")


def _verdict(plan: Plan, wished: Plan) -> str:
    ours, theirs = plan.step.costs.simulated, wished.step.costs.simulated
    change = theirs / ours - 1.0 if ours else 0.0
    objective = plan.certificate.objective
    least = wished.certificate.bound / objective - 1.0 if objective else 0.0
    reason = stopped_by(wished)
    stopped = f" The search was stopped ({reason}): better plans that meet it may exist." if reason else ""
    if change <= 0.0:
        return f"The wish costs nothing: the best plan that meets it takes {change:+.2%} time, simulated.{stopped}"
    proved = f"; by the objective no plan that meets it takes less than {least:+.2%}" if least > 0.0 else ""
    return f"The wish costs {change:+.2%} time, simulated{proved}.{stopped}"


def _changed_verdict(plan: Plan, wished: Plan) -> str:
    """What the best plan for other circumstances takes, and its samples or tokens a second: a step may be longer
    because there is more in it."""
    seconds = [each.step.costs.simulated for each in (plan, wished)]
    rates = [each.step.costs.samples_per_second * (tokens_per_sample(each) or 1) for each in (plan, wished)]
    name = "tokens/s" if tokens_per_sample(plan) else "samples/s"
    return (
        f"So asked, the best plan takes {format_seconds(seconds[1])} a step, simulated "
        f"({format_change(seconds[1], seconds[0])}), for {rates[1]:,.4g} {name} ({format_change(rates[1], rates[0])}), "
        f"gap {wished.certificate.gap:.2%}{f' ({stopped_by(wished)})' * bool(stopped_by(wished))}."
    )
