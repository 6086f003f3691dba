"""Branches on values that weights decide, any that ``selected_branches`` cannot rewrite: the program holds both.

The model is traced once more for each question that it asks (``decisions``), with the other answer to that one; what
the two traces compute differently is joined (``branch_pairs``, ``joined_branches``), and the flag selects at run time.
It is of global tensors, so that every rank selects alike. Where several questions are asked, a last trace with all the
other answers tells whether they are independent of each other.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from passes.capture.branch_pairs import exclusive_nodes, pairs_of, producers
from passes.capture.draws import number_draws
from passes.capture.flat_call import FlatCall
from passes.capture.joined_branches import JoinedBranches
from passes.capture.same_program import ValueNumbers
from passes.ir.errors import CaptureError
from passes.ir.graph import Graph, Node, Ref, assign_keys, map_refs
from passes.ir.value_guards import GuardReading, GuardStep, StepResult, ValueGuards

_DECIDED = "meshwright.decided.default"
_INSTEAD = "choose with torch.where"

#: Traces the model with the other answers to some of its questions.
TraceFlipped = Callable[[Collection[int]], tuple[Graph, FlatCall]]


@dataclass(frozen=True)
class _Asked:
    """A question in a graph: the value that decides, what the trace answered, and where it was asked."""

    condition: str
    answer: bool
    place: str


@dataclass(frozen=True)
class _Branch:
    """What a trace computes."""

    graph: Graph
    questions: tuple[_Asked, ...]
    changes: str

    @property
    def outputs(self) -> dict[object, str]:
        """The values that are asked for: outputs, the flags that decide, and what is written to buffers."""
        outputs: dict[object, str] = {}
        outputs.update(self.graph.outputs)
        outputs.update((("question", number), each.condition) for number, each in enumerate(self.questions))
        writes = [node.output.name for node in self.graph.nodes if node.writes_buffer]
        outputs.update((("write", number), name) for number, name in enumerate(writes))
        return outputs


def with_other_branches(graph: Graph, call: FlatCall, trace: TraceFlipped) -> Graph:
    """``graph`` with the branches that its trace did not take.

    Raises:
        CaptureError: if what a branch does cannot be selected.
    """
    branch = _branch_of(graph, call)
    if not branch.questions:
        return graph
    try:
        return _joined(branch, lambda flipped: _other_branch(flipped, trace))
    except CaptureError as refusal:
        return _checked(branch, refusal)


def _other_branch(flipped: Collection[int], trace: TraceFlipped) -> _Branch:
    try:
        return _branch_of(*trace(flipped))
    except Exception as error:  # a model raises what it likes
        text = re.sub(r"^cannot capture \w+: ", "", str(error))
        raise CaptureError(f"one of its branches cannot be traced ({text})") from error


def _branch_of(graph: Graph, call: FlatCall) -> _Branch:
    questions: list[_Asked] = []
    same: dict[str, str] = {}

    def source(ref: Ref) -> Ref:
        return Ref(same.get(ref.name, ref.name))

    nodes: list[Node] = []
    for node in graph.nodes:
        args, kwargs = map_refs((node.args, dict(node.kwargs)), source)
        if node.op == _DECIDED:
            same[node.output.name] = args[0].name
            questions.append(_Asked(args[1].name, args[3], args[4]))
        else:
            nodes.append(dataclasses.replace(node, args=args, kwargs=kwargs))
    outputs = {path: source(Ref(name)).name for path, name in graph.outputs.items()}
    changes = call.result.changes
    return _Branch(
        number_draws(graph.replace(nodes=assign_keys(tuple(nodes)), outputs=outputs)),
        tuple(questions),
        repr(
            [(place, type(new), new if isinstance(new, (int, float, str)) else "") for place, _, new in changes.entries]
        ),
    )


def _joined(branch: _Branch, trace: Callable[[Collection[int]], _Branch]) -> Graph:
    joined = JoinedBranches(branch.graph, branch.outputs)
    guards = branch.graph.guards
    for number, question in enumerate(branch.questions):
        other = trace({number})
        _check_alike(branch, other)
        pairs = pairs_of(
            branch.graph, other.graph, {key: (one, other.outputs[key]) for key, one in branch.outputs.items()}
        )
        ends = zip(*pairs.joins.values())
        for graph, names, common in zip((branch.graph, other.graph), ends, (pairs.names.values(), pairs.names)):
            _refuse_draws(exclusive_nodes(graph, names, common))
        joined.add(other.graph, pairs, joined.outputs["question", number], when=not question.answer)
        guards = _both(guards, other.graph.guards)
    if len(branch.questions) > 1:
        _check_independent(joined, trace(range(len(branch.questions))))
    graph = joined.graph()
    if [node.draw for node in graph.nodes if node.draw is not None] != list(range(_num_draws(branch.graph))):
        raise CaptureError("random numbers would be drawn in another order")
    return graph.replace(guards=guards)


def _check_alike(branch: _Branch, other: _Branch) -> None:
    if [each.place for each in branch.questions] != [each.place for each in other.questions]:
        raise CaptureError("its branches decide by other values themselves")
    if branch.outputs.keys() != other.outputs.keys() or branch.graph.loss != other.graph.loss:
        raise CaptureError("its branches give other outputs or write other buffers")
    if branch.changes != other.changes or branch.graph.parameter_writes != other.graph.parameter_writes:
        raise CaptureError("its branches change other attributes or parameters of the model")
    if _num_draws(branch.graph) != _num_draws(other.graph):
        raise CaptureError("one of its branches draws random numbers")
    alone = _trained(branch.graph) ^ _trained(other.graph)
    if alone:
        raise CaptureError(
            f"{min(alone)!r} has a gradient in one of its branches alone, and a program gives it zeros in the other, "
            "which move it under weight decay"
        )


def _trained(graph: Graph) -> set[str]:
    """The parameters that the loss (without one, any output) has a gradient for."""
    values, nodes_of = graph.values, producers(graph)
    waiting = list(graph.outputs.values()) if graph.loss is None else [graph.outputs[graph.loss]]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in reached and values[name].requires_grad:
            reached.add(name)
            waiting += nodes_of[name].inputs if name in nodes_of else ()
    return {state.path for state in graph.parameters if state.value.name in reached}


def _refuse_draws(nodes: list[Node]) -> None:
    if any(node.draw is not None for node in nodes):
        raise CaptureError("one of its branches draws random numbers")


def _num_draws(graph: Graph) -> int:
    return sum(node.draw is not None for node in graph.nodes)


def _check_independent(joined: JoinedBranches, flipped: _Branch) -> None:
    """Compare the trace with all the other answers with what is selected then."""
    selected = joined.with_others()
    numbers = ValueNumbers()
    here, there = numbers.of_values(selected), numbers.of_values(flipped.graph)
    if {key: here[name] for key, name in selected.outputs.items()} != {
        str(key): there[name] for key, name in flipped.outputs.items()
    }:
        raise CaptureError("what one branch computes depends on whether another one is taken")


def _both(first: ValueGuards, other: ValueGuards) -> ValueGuards:
    """The guards of both traces."""
    shorter, longer = sorted((first.entries, other.entries), key=len)
    if longer[: len(shorter)] == shorter:
        return ValueGuards(longer)
    count = len(first.steps)

    def moved(entry: Any) -> Any:
        if isinstance(entry, StepResult):
            return StepResult(entry.step + count)
        if isinstance(entry, GuardStep):
            return dataclasses.replace(entry, args=moved(entry.args), kwargs=moved(entry.kwargs))
        if isinstance(entry, GuardReading):
            return dataclasses.replace(entry, source=moved(entry.source))
        return tuple(map(moved, entry)) if isinstance(entry, tuple) else entry

    return ValueGuards((*first.entries, *map(moved, other.entries)))


def _checked(branch: _Branch, refusal: CaptureError) -> Graph:
    """The graph of one branch of each, which checks that tensors are not equal.

    Raises:
        CaptureError: if a question is another one.
    """
    graph, reason = branch.graph, str(refusal)
    output = graph.loss or min(
        (path for path, name in graph.outputs.items() if graph.values[name].dtype.startswith("float")),
        key=lambda path: graph.values[graph.outputs[path]].num_elements,
    )
    for number, each in enumerate(branch.questions):
        if each.answer:
            raise CaptureError(
                f"cannot capture {graph.model_name}: in {each.place}: control flow depends on a value that parameters "
                f"decide, and {reason}: {_INSTEAD}"
            ) from refusal
        text = (
            f"two tensors are equal, and the program has no branch for that ({reason}), at {each.place}: begin with "
            "weights that make them differ (train the first step on one device)"
        )
        source = graph.values[graph.outputs[output]]
        value = dataclasses.replace(source, name=f"{source.name}_checked_{number}", kind="node")
        args = (Ref(source.name), Ref(each.condition), False, text)
        node = Node(value.name, "meshwright.checked.default", args, {}, (value,), "", graph.model_name)
        graph = graph.replace(nodes=assign_keys((*graph.nodes, node)), outputs={**graph.outputs, output: value.name})
    return graph
