"""Rows of an audit: tensors and operators, fused operators, and the types and collectives of the emitted programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from passes.ir.graph import Value
from passes.plan import CollectivePlan, TensorPlan
from passes.rules import rule_for
from planner.auditing.audit_report import BYTES, NUMBER, AuditRow, compared
from planner.auditing.subject import AuditSubject


def tensor_rows(subject: AuditSubject) -> Iterator[AuditRow]:
    """Shapes and dtypes of inputs, states and outputs; what the operators are."""
    plan, graph = subject.plan, subject.graph
    inputs = {".".join(map(str, path)): value for path, value in zip(graph.input_paths, graph.inputs)}
    states = {state.path: state.value for state in graph.states}
    outputs = {path: graph.values[name] for path, name in graph.outputs.items()}
    planned: dict[str, tuple[Mapping[str, TensorPlan], Mapping[str, Value]]] = {
        "inputs": (plan.inputs, inputs),
        "parameters and buffers": (plan.states, states),
        "outputs": (plan.outputs, outputs),
    }
    for what, (tensors, values) in planned.items():
        names = [name for name in {**tensors, **values} if not _alike(tensors.get(name), values.get(name), what)]
        why = f"{names[0]} has another shape or dtype" if names else ""
        yield AuditRow(what, float(len(tensors)), float(len(values)), NUMBER, not names, why)
    yield _operator_row(subject)


def _operator_row(subject: AuditSubject) -> AuditRow:
    """Operators of the plan under their names in the graph, and whether there is a rule to shard them."""
    values, planned = subject.graph.values, subject.plan.nodes
    nodes = {node.key: node for node in subject.graph.nodes if node.key in planned}
    rules = {key: rule_for(node, values) is not None for key, node in nodes.items()}
    wrong = [
        key
        for key, operator in planned.items()
        if key not in nodes or (operator.op, operator.has_rule) != (nodes[key].op, rules[key])
    ]
    why = f"{wrong[0]} is another operator" if wrong else ""
    return AuditRow(
        "operators (of a block: of its first copy)", float(len(planned)), float(len(nodes)), NUMBER, not wrong, why
    )


def _alike(planned: TensorPlan | None, value: Value | None, what: str) -> bool:
    if planned is None or value is None:
        return False
    trainable = what == "parameters and buffers" and value.requires_grad
    return (planned.shape, planned.dtype, planned.trainable) == (value.shape, value.dtype, trainable)


def fusion_rows(subject: AuditSubject) -> Iterator[AuditRow]:
    """What the pattern pass did, and the activations that it spares."""
    from planner.fusing import report

    claimed, fused = subject.plan.fusion, subject.fused
    if claimed is None or fused is None:
        return
    again = report(subject.captured, fused)
    yield compared("operators after fusing", claimed.operators[1], again.operators[1], NUMBER)
    yield compared("activations kept after fusing", claimed.saved_bytes[1], again.saved_bytes[1], BYTES)
    alike = (claimed.matches, claimed.near_misses) == (again.matches, again.near_misses)
    alike = alike and (claimed.operators[0], claimed.saved_bytes[0]) == (again.operators[0], again.saved_bytes[0])
    why = "" if alike else "other patterns match, or the graph was another before"
    yield AuditRow("patterns matched", float(len(claimed.matches)), float(len(again.matches)), NUMBER, alike, why)


def type_rows(subject: AuditSubject) -> Iterator[AuditRow]:
    """Emit the program of every chunk and run the type checker of ``spmd_types`` on it.

    Raises:
        ValueError: if no programs can be made of the plan.
        ProgramTypeError: if the checker refuses one.
    """
    from passes.chains import chain_up
    from passes.emit import emit
    from passes.fuse import pair_rotaries
    from passes.pipeline_cut import step_programs
    from runtime.program_tools.typecheck import typecheck

    graph, plan = subject.graph, subject.plan
    outputs = None if graph.loss is not None else tuple(graph.outputs)
    programs = step_programs(graph, plan, num_microbatches=None if graph.loss is not None else 1, outputs=outputs)
    sharded = [stage.sharded for stage in (*programs.stages, *programs.counting)]
    if programs.totals is not None:
        sharded.append(programs.totals)
    for program in sharded:
        typecheck(emit(chain_up(pair_rotaries(program))))
    text = f"{len(sharded)} program{'s' * (len(sharded) > 1)}"
    yield AuditRow("types", text, text, NUMBER, True, "emitted programs, by the checker of spmd_types")


def collective_rows(subject: AuditSubject) -> Iterator[AuditRow]:
    """Every collective of a step, counted in the programs that ranks run.

    Raises:
        ValueError: if no programs can be made of the plan.
    """
    from planner.whole_step.result.step_collectives import step_collectives

    claimed, counted = subject.plan.collectives, step_collectives(subject.graph, subject.plan)
    differing = sorted(
        set(claimed) ^ set(counted), key=lambda collective: (collective.collective, collective.axis, collective.phase)
    )
    why = ""
    if differing:
        first = differing[0]
        why = f"{first.collective} on {first.axis} {first.phase}"
    yield AuditRow("collectives in one step", _number(claimed), _number(counted), NUMBER, not differing, why)
    yield compared("bytes in collectives", _bytes(claimed), _bytes(counted), BYTES)


def _number(collectives: tuple[CollectivePlan, ...]) -> float:
    return float(sum(collective.count for collective in collectives))


def _bytes(collectives: tuple[CollectivePlan, ...]) -> float:
    return float(sum(collective.num_bytes for collective in collectives))
