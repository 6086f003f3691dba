"""The backward pass of one chunk for one micro-batch: whole ("B"), or input gradients ("I") and weight gradients ("W").

Splitting follows the autograd graph from outputs to leaves. Nodes that lead to a received tensor are the *activation
side*; nodes that lead to other leaves only (weights, and what is made of weights) are the *weight side*. An edge from
the first to the second is a *crossing*, the node that it leaves a *joint*: a matrix product, say, with its two factors.

I runs the activation side, in which autograd leaves out the weight gradients of every joint, and notes what comes into
each joint. W runs each joint again, alone and for its crossings only, then the weight side once with all of them. So W
costs the weight gradients and nothing else. (``torch.distributed.pipelining`` in W goes from joint to joint through the
activation side, wherever one leaf is behind several joints, as one token is behind all weights of a layer; and it can
detach no output that is a view.)

Two kinds of weight gradients are taken in I already:

* where saved tensors are behind hooks (``torch.utils.checkpoint``): W would run the region again, once for each joint,
  and selective checkpoints refuse to run twice. These weights' gradients are complete after I.
* where several joints share the node behind their crossing, as autograd cannot tell them apart.

If no received tensor needs a gradient, I does nothing and W is the whole backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from runtime.compat import has_saved_tensors_hooks

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
    found = tuple(tensor.grad for tensor in received)
    for tensor in received:
        tensor.grad = None
    return found


def input_backward(
    outputs: Sequence[torch.Tensor], gradients: Sequence[Gradient], received: Sequence[torch.Tensor]
) -> tuple[tuple[Gradient, ...], Callable[[], None]]:
    """As ``backward`` for the gradients of ``received``, and a function that adds the others to their ``.grad``.

    Saved tensors are held until that function has run, which is to be called once.
    """
    roots, root_gradients = _differentiable(outputs, gradients)
    wanted = [tensor for tensor in received if tensor.requires_grad]
    if not roots or not wanted:
        return (None,) * len(received), lambda: _whole_weight_backward(roots, root_gradients)
    split = _Split(roots, root_gradients, wanted)
    by_tensor = {id(tensor): gradient for tensor, gradient in zip(wanted, split.run_inputs())}
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
    """A node of the activation side, its edges to the weight side, and the gradients that came into it."""

    node: Node
    crossings: list[GradientEdge]
    incoming: tuple[Gradient, ...] = ()


class _Split:
    """One graph, split: what I runs at once, and what is left for W."""

    def __init__(self, roots: list[torch.Tensor], gradients: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
        starts = [(get_gradient_edge(root), gradient) for root, gradient in zip(roots, gradients)]
        graph = _graph([edge.node for edge, _ in starts])
        inner = _leading_to(graph, {get_gradient_edge(tensor).node for tensor in wanted})
        leaves = _leaves_behind(graph, inner)
        joints = _joints(graph, inner, leaves)
        loose = [edge.node for edge, _ in starts if edge.node not in inner]
        at_once = _leaves_taken_at_once(joints, loose, graph, leaves)
        shared = _shared(joints)

        def in_first_run(node: Node) -> bool:
            return node in inner or leaves[node] <= at_once

        self._wanted = wanted
        self._leaves_at_once = [GradientEdge(leaf, 0) for leaf in at_once]
        self._starts = [(edge, gradient) for edge, gradient in starts if in_first_run(edge.node)]
        #: Gradients at the weight side; at first those of outputs that depend on no received tensor.
        self._arrived: list[tuple[GradientEdge, Gradient]] = [
            (edge, gradient) for edge, gradient in starts if not in_first_run(edge.node)
        ]
        later = [(joint.node, [edge for edge in joint.crossings if not in_first_run(edge.node)]) for joint in joints]
        self._captured = list(dict.fromkeys(edge for _, edges in later for edge in edges if edge.node in shared))
        alone = [_Joint(node, [edge for edge in edges if edge.node not in shared]) for node, edges in later]
        self._joints = [joint for joint in alone if joint.crossings]

    def run_inputs(self) -> tuple[Gradient, ...]:
        """Gradients of the wanted tensors."""
        handles = [joint.node.register_prehook(_remember(joint)) for joint in self._joints]
        targets: list[Any] = [*self._wanted, *self._leaves_at_once, *self._captured]
        edges, gradients = zip(*self._starts)
        try:
            found = torch.autograd.grad(edges, targets, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        leaves_end = len(self._wanted) + len(self._leaves_at_once)
        _accumulate(list(zip(self._leaves_at_once, found[len(self._wanted) : leaves_end])))
        self._arrived += zip(self._captured, found[leaves_end:])
        self._starts = []
        return found[: len(self._wanted)]

    def run_weights(self) -> None:
        """Add what ``run_inputs`` left to the leaves' ``.grad``."""
        for joint in self._joints:
            incoming = [(GradientEdge(joint.node, i), g) for i, g in enumerate(joint.incoming) if g is not None]
            if incoming:
                edges, gradients = zip(*incoming)
                found = torch.autograd.grad(edges, joint.crossings, gradients, allow_unused=True)
                self._arrived += zip(joint.crossings, found)
            joint.incoming = ()
        _accumulate(self._arrived)
        self._joints, self._arrived = [], []


def _remember(joint: _Joint) -> Callable[[tuple[Gradient, ...]], None]:
    def hook(gradients: tuple[Gradient, ...]) -> None:
        joint.incoming = gradients

    return hook


def _accumulate(arrived: Sequence[tuple[GradientEdge, Gradient]]) -> None:
    """Run what is behind the edges, into ``.grad`` of its leaves."""
    pairs = [(edge, gradient) for edge, gradient in arrived if gradient is not None]
    if pairs:
        edges, gradients = zip(*pairs)
        torch.autograd.backward(edges, gradients)


def _graph(roots: Sequence[Node]) -> Graph:
    """Every node that the roots lead to."""
    graph: Graph = {}
    seen: set[Node] = set()
    stack: list[tuple[Node, tuple[Node, ...] | None]] = [(root, None) for root in reversed(roots)]
    while stack:
        node, children = stack.pop()
        if children is not None:
            graph[node] = children
        elif node not in seen:
            seen.add(node)
            children = tuple(child for child, _ in node.next_functions if child is not None)
            stack.append((node, children))
            stack += [(child, None) for child in children if child not in seen]
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
    for node, children in graph.items():
        if node in inner and not inner.issuperset(children):
            edges = [(child, nr) for child, nr in node.next_functions if child is not None]
            crossings = [GradientEdge(child, nr) for child, nr in edges if leaves.get(child)]
            if crossings:
                joints.append(_Joint(node, list(dict.fromkeys(crossings))))
    return joints


def _leaves_taken_at_once(
    joints: Sequence[_Joint], loose: Sequence[Node], graph: Graph, leaves: dict[Node, frozenset[Node]]
) -> frozenset[Node]:
    """Leaves some of whose gradient comes through hooked saved tensors, with all that hang together with them."""
    hooked: dict[Node, bool] = {}
    for node, behind in leaves.items():
        hooked[node] = bool(behind) and (has_saved_tensors_hooks(node) or any(hooked[c] for c in graph[node]))
    parts = {leaves[node] for node in loose}
    taken = {leaf for node in loose if hooked[node] for leaf in leaves[node]}
    for joint in joints:
        at_joint = has_saved_tensors_hooks(joint.node)
        for edge in joint.crossings:
            parts.add(leaves[edge.node])
            if at_joint or hooked[edge.node]:
                taken |= leaves[edge.node]
    while touched := [part for part in parts if part & taken and not part <= taken]:
        taken.update(*touched)
    return frozenset(taken)


def _shared(joints: Sequence[_Joint]) -> set[Node]:
    """Nodes of the weight side behind more than one joint."""
    used_by: dict[Node, set[Node]] = defaultdict(set)
    for joint in joints:
        for edge in joint.crossings:
            used_by[edge.node].add(joint.node)
    return {node for node, users in used_by.items() if len(users) > 1}
