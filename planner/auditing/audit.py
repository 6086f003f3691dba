"""``planner.audit``: what a saved plan claims, priced, counted, type-checked and bounded again from scratch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models import Cluster
from cost_models.text import counted
from passes.plan import Plan
from planner.auditing.audit_report import AuditReport, AuditRow, refuted, unchecked
from planner.auditing.certificate_rows import bound_rows, gap_row
from planner.auditing.figure_rows import figure_rows
from planner.auditing.program_rows import collective_rows, fusion_rows, tensor_rows, type_rows
from planner.auditing.subject import AuditSubject, subject_of
from planner.solvers.collection import no_collection

if TYPE_CHECKING:
    from passes.capture.call_arguments import ExampleInputs


@no_collection()
def audit(
    plan: Plan | str | Path,
    model: Any = None,
    *,
    example_inputs: ExampleInputs | None = None,
    loss_fn: Callable[..., Any] | None = None,
    cluster: Cluster | str | None = None,
    prove_bound: bool = True,
    time_limit: float | None = None,
) -> AuditReport:
    """Recompute every figure that ``plan`` claims from the plan, its model and its cluster alone.

    Args:
        plan: a plan, or the path of one.
        model: that the plan was made of: an ``nn.Module`` (meta tensors will do), a Hugging Face config, the path of
            a config, or a library name; None for the library name that the plan has.
        example_inputs, loss_fn: as in ``planner.plan``; without inputs, of the shapes that the plan has.
        cluster: hardware to price on; None for that in the plan.
        prove_bound: search again for the lower bound.
        time_limit: seconds for that search, as of ``planner.plan``.

    Returns:
        a report with a row a figure; ``.ok`` says whether none is wrong, ``.table()`` shows it.

    Raises:
        ValueError: if the plan cannot be read, is of another model, or does not say of which.
        CaptureError: if the model cannot be captured.
    """
    from planner.planning import as_cluster
    from planner.whole_step.candidates.demands import check_time_limit

    check_time_limit(time_limit)
    loaded = plan if isinstance(plan, Plan) else Plan.load(plan)
    hardware = None if cluster is None else as_cluster(cluster, num_devices=loaded.step.num_devices)
    subject = subject_of(loaded, model, example_inputs=example_inputs, loss_fn=loss_fn, cluster=hardware)
    return audited(subject, prove_bound=prove_bound, time_limit=time_limit)


def audited(subject: AuditSubject, *, prove_bound: bool, time_limit: float | None) -> AuditReport:
    """The report on a plan whose model is captured already."""
    step = subject.plan.step
    axes = ",".join(f"{axis}={size}" for axis, size in step.axes.items())
    where = f"{axes} ({counted(step.num_devices, 'device')} of {subject.cluster.name})"
    return AuditReport(subject.plan.model, where, tuple(_rows(subject, prove_bound=prove_bound, time_limit=time_limit)))


def _rows(subject: AuditSubject, *, prove_bound: bool, time_limit: float | None) -> Iterator[AuditRow]:
    step, certificate = subject.plan.step, subject.plan.certificate
    yield from _or_refuted("tensors", lambda: tensor_rows(subject))
    yield from _or_refuted("price", lambda: figure_rows(subject))
    yield from _or_refuted("types", lambda: type_rows(subject))
    yield from _or_refuted("collectives in one step", lambda: collective_rows(subject))
    yield from _or_refuted("fused operators", lambda: fusion_rows(subject))
    yield gap_row(certificate)
    yield from _or_refuted("lower bound", lambda: bound_rows(subject, prove=prove_bound, time_limit=time_limit))
    if step.alternatives:
        yield unchecked("runners-up", float(len(step.alternatives)), "a plan holds too little of them to price them")


def _or_refuted(figure: str, rows: Callable[[], Iterator[AuditRow]]) -> list[AuditRow]:
    """The rows of one check; of a plan that does not hold together, one row that says why."""
    try:
        return list(rows())
    except (ValueError, TypeError, LookupError) as error:
        text = " ".join(str(error).split()) or "no more is known"
        reason = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
        return [refuted(figure, "", f"the plan does not hold together: {reason}")]
