"""Writes to a parameter in forward: weights kept within bounds (``weight.data.clamp_``), averages of other weights.

What such a write computes of parameters alone is no operator of the program: it is done before a call, once, whatever
the micro-batches are. That is the same if nothing else reads the parameter before it is written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from passes.canonicalise.fx import is_random, is_tensor, shape, writes
from passes.ir.errors import CaptureError
from passes.ir.graph import ParameterWrite
from passes.ir.value_guards import GuardStep, StepResult
from passes.torch_compat.operators import OpOverload

#: Of a graph module: its writes to parameters, in order, which name placeholders.
WRITES = "writes_before_call"

#: Operators that write each element from that element alone, and that torch does not mark as pointwise.
_ALONE = ("aten.fill_.Scalar", "aten.zero_.default", "aten.copy_.default")

#: Views that show the whole of a tensor as it lies.
_WHOLE = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def note_parameter_write(node: fx.Node, parameter: fx.Node, views: Mapping[fx.Node, fx.Node]) -> None:
    """Take a write out of the graph and note it on the graph's module.

    Args:
        views: view node → the node it views, of all that were seen up to the write.

    Raises:
        CaptureError: if it is not done the same before the call.
    """
    computed = _computed_for(node)
    reason = (
        _on_a_part(node, parameter, views)
        or _not_of_parameters(node, computed)
        or _read_before(node, parameter, views, computed)
    )
    if reason is not None:
        raise CaptureError(
            f"the model writes to parameter {parameter.name[2:]!r} in its forward, {reason}: write to it between steps "
            "(under torch.no_grad(), by parallel.named_parameters()), or register it as a buffer"
        )
    module = node.graph.owning_module
    assert module is not None
    module.meta.setdefault(WRITES, []).append(_write(node, parameter, computed))
    target = node.args[0]
    assert isinstance(target, fx.Node)
    node.replace_all_uses_with(target)
    node.graph.erase_node(node)
    for each in reversed(computed):
        if each.op != "placeholder" and not each.users:
            each.graph.erase_node(each)


def _computed_for(node: fx.Node) -> list[fx.Node]:
    """What the written values are computed from, in the order of the graph."""
    upstream: set[fx.Node] = set()
    pending = [each for each in node.all_input_nodes if each is not node.args[0]]
    while pending:
        each = pending.pop()
        if each not in upstream:
            upstream.add(each)
            pending += each.all_input_nodes
    return sorted(upstream)


def _on_a_part(node: fx.Node, parameter: fx.Node, views: Mapping[fx.Node, fx.Node]) -> str | None:
    target = node.args[0]
    while target is not parameter:
        assert isinstance(target, fx.Node)
        if target.target not in _WHOLE:
            return f"through {target.target}, a part or another order of it"
        target = views[target]
    return None


def _not_of_parameters(node: fx.Node, computed: Collection[fx.Node]) -> str | None:
    assert isinstance(node.target, OpOverload)
    if torch.Tag.inplace_view in node.target.tags:
        return f"by {node.target}, which gives it another memory or shape"
    for each in (*computed, node):
        if each.op == "placeholder" and each.name.startswith("p_"):
            continue
        if not isinstance(each.target, OpOverload) or not is_tensor(each) or is_random(each):
            return f"by {node.target}, from {each.name!r}, which is not computed of parameters alone"
        if each is not node and writes(each):
            return f"by {node.target}, from what {each.target} writes in place"
    return None


def _read_before(
    node: fx.Node, parameter: fx.Node, views: Mapping[fx.Node, fx.Node], computed: Collection[fx.Node]
) -> str | None:
    shown = {parameter: None}
    for view, source in views.items():  # in the order of the graph: a source stands before its views
        if source in shown:
            shown[view] = None
    own = {node, *computed}
    of_it = dict(shown)
    for each in computed:
        if any(source in of_it for source in each.all_input_nodes):
            of_it[each] = None
    for each in of_it:
        for user in each.users:
            if user not in shown and user not in own and user < node:
                return f"after it was read by {user.target}"
            if each not in shown and user not in own:
                return f"of what {user.target} reads of it too"
    return None


def _write(node: fx.Node, parameter: fx.Node, computed: Collection[fx.Node]) -> ParameterWrite:
    """Steps that end in the write itself, on the parameter."""
    results: dict[fx.Node, StepResult] = {}
    steps: list[GuardStep] = []
    for each in dict.fromkeys((*computed, parameter)):
        results[each] = StepResult(len(steps))
        if each.op == "placeholder":
            steps.append(GuardStep("parameter", (each.name,)))
        else:
            steps.append(GuardStep(str(each.target), _plain(each.args, results), _named(each, results)))
    arguments = (results[parameter], *_plain(node.args[1:], results))
    steps.append(GuardStep(str(node.target), arguments, _named(node, results), writes=True))
    elementwise = all(_is_elementwise(each, shape(parameter)) for each in (*computed, node))
    return ParameterWrite(parameter.name, tuple(steps), elementwise)


def _plain(argument: Any, results: Mapping[fx.Node, StepResult]) -> Any:
    """Arguments with results of steps for nodes."""
    if isinstance(argument, fx.Node):
        return results[argument]
    return tuple(_plain(each, results) for each in argument) if isinstance(argument, (list, tuple)) else argument


def _named(node: fx.Node, results: Mapping[fx.Node, StepResult]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, _plain(entry, results)) for name, entry in node.kwargs.items())


def _is_elementwise(node: fx.Node, sizes: tuple[int, ...]) -> bool:
    """Whether each element of a tensor of these sizes is computed from the same element of others."""
    if any(shape(each) != sizes for each in (node, *node.all_input_nodes)):
        return False
    if node.op == "placeholder" or node.target in _WHOLE or str(node.target) in _ALONE:
        return True
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags
