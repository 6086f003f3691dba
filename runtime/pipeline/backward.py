"""The backward pass of one chunk for one micro-batch: whole ("B"), or input gradients ("I") and weight gradients ("W").

Splitting follows the autograd graph from outputs to leaves. Nodes that lead to a received tensor are the *activation
side*; nodes that lead to other leaves only (weights, and what is made of weights) are the *weight side*. An edge from
the first to the second is a *crossing*, the node that it leaves a *joint*: a matrix product, say, with its two factors.

I runs the activation side, in which autograd leaves out the weight gradients of every joint, and notes what comes into
each joint. W runs the joints again for their crossings only, all that lead to none of each other at once, and then the
weight side, once. So W costs the weight gradients and nothing else. (``torch.distributed.pipelining`` in W goes from
joint to joint through the activation side, wherever one leaf is behind several joints, as one token is behind all
weights of a layer; and it can detach no output that is a view.)

Autograd skips nodes, not edges: what leads to a node asked for runs. So some weight gradients are taken in I already:

* where saved tensors are behind hooks (``torch.utils.checkpoint``): W would run the region again for each joint, and
  selective checkpoints refuse to run twice. These weights' gradients are complete after I.
* where an operator says that it makes all its gradients in one pass (``gradients_together`` on its autograd context):
  W would pay for the whole pass again. Complete after I.
* where one crossing leads to another (weights straight from one node, some by way of others): complete after I too.
  Where each weight has a node of its own (``runtime.zero.uses``), none does.
* where several joints share the node behind their crossing: this gradient waits for the rest in W.

If no received tensor needs a gradient, I does nothing and W is the whole backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from runtime.torch_compat.autograd_engine import functions_keep_their_nodes, has_saved_tensors_hooks

#: A gradient, or None where autograd has none (zero).
Gradient = torch.Tensor | None
#: Nodes, each after all that it leads to, with what it leads to directly.
Graph = dict[Node, tuple[Node, ...]]


def backward(
    outputs: Sequence[torch.Tensor], gradients: Sequence[Gradient], received: Sequence[torch.Tensor]
) -> tuple[Gradient, ...]:
    """Gradients of ``received``; those of all other leaves are added to their ``.grad``.

    Args:
        outputs: of the chunk; one may be a received tensor, or need no gradient.
        gradients: of the outputs, None for those without.
        received: leaves; those that need no gradient get None.
    """
    roots, root_gradients = _differentiable(outputs, gradients)
    if roots:
        torch.autograd.backward(roots, root_gradients)
    gradients_received = tuple(tensor.grad for tensor in received)
    for tensor in received:
        tensor.grad = None
    return gradients_received


def input_backward(
    outputs: Sequence[torch.Tensor], gradients: Sequence[Gradient], received: Sequence[torch.Tensor]
) -> tuple[tuple[Gradient, ...], Callable[[], None]]:
    """As ``backward`` for the gradients of ``received``, and a function that adds the others to their ``.grad``.

    Saved tensors are held until that function has run, which is to be called once.
    """
    roots, root_gradients = _differentiable(outputs, gradients)
    differentiable = [tensor for tensor in received if tensor.requires_grad]
    if not roots or not differentiable:
        return (None,) * len(received), lambda: _whole_weight_backward(roots, root_gradients)
    split = _Split(roots, root_gradients, differentiable)
    by_tensor = {id(tensor): gradient for tensor, gradient in zip(differentiable, split.run_inputs())}
    return tuple(by_tensor.get(id(tensor)) for tensor in received), split.run_weights


def _differentiable(
    outputs: Sequence[torch.Tensor], gradients: Sequence[Gradient]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = [(output, g) for output, g in zip(outputs, gradients) if output.requires_grad and g is not None]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _whole_weight_backward(roots: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
    if roots:
        torch.autograd.backward(roots, gradients)


@dataclass
class _Joint:
    """A node of the activation side with edges to the weight side.

    Attributes:
        level: how many joints lie on the longest way from here to a received tensor: those of one level lead to none
            of each other.
        incoming: the gradients that came in.
    """

    node: Node
    crossings: list[GradientEdge]
    level: int
    incoming: tuple[Gradient, ...] = ()


class _Split:
    """One graph, split: what I runs at once, and what is left for W."""

    def __init__(self, roots: list[torch.Tensor], gradients: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        starts = [(get_gradient_edge(root), gradient) for root, gradient in zip(roots, gradients)]
        graph = _graph([edge.node for edge, _ in starts])
        inner = _leading_to(graph, {get_gradient_edge(tensor).node for tensor in inputs})
        leaves = _leaves_behind(graph, inner)
        joints = _joints(graph, inner, leaves)
        loose = [edge.node for edge, _ in starts if edge.node not in inner]
        at_once = _leaves_taken_at_once(joints, loose, graph, leaves)
        shared = _shared(joints)

        def in_first_run(node: Node) -> bool:
            return node in inner or leaves[node] <= at_once

        self._inputs = inputs
        #: What keeps the nodes of autograd functions alive until W, where their Python objects do not; with them all
        #: that the activation side saved.
        self._owners = () if functions_keep_their_nodes() else tuple(edge for edge, _ in starts)
        self._leaves_at_once = [GradientEdge(leaf, 0) for leaf in at_once]
        self._starts = [(edge, gradient) for edge, gradient in starts if in_first_run(edge.node)]
        #: Gradients at the weight side; at first those of outputs that depend on no received tensor.
        self._arrived: list[tuple[GradientEdge, Gradient]] = [
            (edge, gradient) for edge, gradient in starts if not in_first_run(edge.node)
        ]
        self._captured: list[GradientEdge] = []
        self._joints: list[_Joint] = []
        for joint in joints:
            later = [edge for edge in joint.crossings if not in_first_run(edge.node)]
            self._captured += [edge for edge in later if edge.node in shared]
            joint.crossings = [edge for edge in later if edge.node not in shared]
            if joint.crossings:
                self._joints.append(joint)
        self._captured = list(dict.fromkeys(self._captured))

    def run_inputs(self) -> tuple[Gradient, ...]:
        """Gradients of the received tensors."""
        handles = [joint.node.register_prehook(_remember(joint)) for joint in self._joints]
        targets: list[Any] = [*self._inputs, *self._leaves_at_once, *self._captured]
        edges, gradients = zip(*self._starts)
        try:
            results = torch.autograd.grad(edges, targets, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        leaves_end = len(self._inputs) + len(self._leaves_at_once)
        _accumulate(list(zip(self._leaves_at_once, results[len(self._inputs) : leaves_end])))
        self._arrived += zip(self._captured, results[leaves_end:])
        self._starts = []
        return results[: len(self._inputs)]

    def run_weights(self) -> None:
        """Add what ``run_inputs`` left to the leaves' ``.grad``."""
        levels: dict[int, list[_Joint]] = defaultdict(list)
        for joint in self._joints:
            levels[joint.level].append(joint)
        for joints in levels.values():
            crossings = [edge for joint in joints for edge in joint.crossings]
            starts = [(GradientEdge(joint.node, i), g) for joint in joints for i, g in enumerate(joint.incoming)]
            starts = [(edge, gradient) for edge, gradient in starts if gradient is not None]
            for joint in joints:
                joint.incoming = ()
            if starts:
                edges, gradients = zip(*starts)
                self._arrived += zip(crossings, torch.autograd.grad(edges, crossings, gradients, allow_unused=True))
        _accumulate(self._arrived)
        self._joints, self._arrived, self._owners = [], [], ()


def _remember(joint: _Joint) -> Callable[[tuple[Gradient, ...]], None]:
    def hook(gradients: tuple[Gradient, ...]) -> None:
        joint.incoming = gradients

    return hook


def _accumulate(arrived: Sequence[tuple[GradientEdge, Gradient]]) -> None:
    """Run the graph behind the edges and accumulate into ``.grad`` of its leaves."""
    pairs = [(edge, gradient) for edge, gradient in arrived if gradient is not None]
    if pairs:
        edges, gradients = zip(*pairs)
        torch.autograd.backward(edges, gradients)


def _graph(roots: Sequence[Node]) -> Graph:
    """Every node reachable from the roots."""
    graph: Graph = {}
    visited: set[Node] = set()
    stack: list[tuple[Node, tuple[Node, ...] | None]] = [(root, None) for root in reversed(roots)]
    while stack:
        node, children = stack.pop()
        if children is not None:
            graph[node] = children
        elif node not in visited:
            visited.add(node)
            children = tuple(child for child, _ in node.next_functions if child is not None)
            stack.append((node, children))
            stack += [(child, None) for child in children if child not in visited]
    return graph


def _leading_to(graph: Graph, targets: set[Node]) -> set[Node]:
    inner: set[Node] = set()
    for node, children in graph.items():
        if node in targets or not inner.isdisjoint(children):
            inner.add(node)
    return inner


def _leaves_behind(graph: Graph, inner: set[Node]) -> dict[Node, frozenset[Node]]:
    """For every node of the weight side, the leaves (nodes that accumulate into ``.grad``) that it leads to."""
    behind: dict[Node, frozenset[Node]] = {}
    for node, children in graph.items():
        if node in inner:
            continue
        if len(children) == 1:
            behind[node] = behind[children[0]]
        elif children:
            behind[node] = frozenset().union(*(behind[child] for child in children))
        else:
            behind[node] = frozenset((node,)) if hasattr(node, "variable") else frozenset()
    return behind


def _joints(graph: Graph, inner: set[Node], leaves: dict[Node, frozenset[Node]]) -> list[_Joint]:
    joints = []
    levels: dict[Node, int] = {}
    for node, children in graph.items():
        if node not in inner:
            continue
        levels[node] = max((levels[child] for child in children if child in inner), default=0)
        if not inner.issuperset(children):
            edges = [(child, nr) for child, nr in node.next_functions if child is not None]
            crossings = [GradientEdge(child, nr) for child, nr in edges if leaves.get(child)]
            if crossings:
                levels[node] += 1
                joints.append(_Joint(node, list(dict.fromkeys(crossings)), levels[node]))
    return joints


def _leaves_taken_at_once(
    joints: Sequence[_Joint], loose: Sequence[Node], graph: Graph, leaves: dict[Node, frozenset[Node]]
) -> frozenset[Node]:
    """Leaves that W cannot reach separately, and all leaves connected with them."""
    crossed = {edge.node for joint in joints for edge in joint.crossings}
    hooked: dict[Node, bool] = {}
    passes: dict[Node, bool] = {}  # whether a crossing is behind it
    for node, behind in leaves.items():
        children = graph[node]
        hooked[node] = bool(behind) and (has_saved_tensors_hooks(node) or any(hooked[child] for child in children))
        passes[node] = any(child in crossed or passes[child] for child in children)
    at_once: set[Node] = set()
    for node in crossed.union(loose):
        if hooked[node] or passes[node]:
            at_once |= leaves[node]
    for joint in joints:
        if has_saved_tensors_hooks(joint.node) or getattr(joint.node, "gradients_together", False):
            at_once = at_once.union(*(leaves[edge.node] for edge in joint.crossings))
    parts = {leaves[node] for node in crossed.union(loose)}
    while touched := [part for part in parts if part & at_once and not part <= at_once]:
        at_once.update(*touched)
    return frozenset(at_once)


def _shared(joints: Sequence[_Joint]) -> set[Node]:
    """Nodes of the weight side behind more than one joint."""
    used_by: dict[Node, set[Node]] = defaultdict(set)
    for joint in joints:
        for edge in joint.crossings:
            used_by[edge.node].add(joint.node)
    return {node for node, users in used_by.items() if len(users) > 1}
