"""What a stretch of the model keeps for its backward pass under a recompute policy, and what it runs again.

``none``       all that autograd keeps.
``selective``  what goes in, and the outputs of matrix products, convolutions and fused attention; the rest runs again.
``full``       what goes in; everything runs again.

These are ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`` on the stretch, for ``selective`` with
``create_selective_checkpoint_contexts`` and a policy that marks the kernels in ``kernels.EXPENSIVE`` ``MUST_SAVE``.
It keeps every output of those, needed or not, and stops running again once the last kept tensor is there.

``compiled=True`` is what ``torch.compile`` makes of the stretch, an approximation of its min-cut partitioner: only what
the backward pass reaches is kept. Under ``none`` that is what expensive kernels read in the backward pass (it would
have to be written to memory again) and, of what cheap ones read, what it can be computed from: that happens inside
fused backward kernels, at no price.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from passes.autograd.logits_memory import reusable_logits
from passes.autograd.saved import Extra, SavedForBackward, kept_by_autograd
from passes.autograd.shared_memory import activations, storage_roots
from passes.autograd.walk import Kernels
from passes.ir.graph import Graph, Node, Value

Policy = Literal["none", "selective", "full"]
POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(frozen=True)
class Recompute:
    """What one stretch keeps between forward and backward.

    Attributes:
        values: values whose memory is kept, one for each storage; activations only (no parameters, buffers, graph
            inputs or constants). Values from outside the stretch are among them: stretches that share one hold it once.
        extras: tensors made inside operators.
        recomputed: nodes that run again in the backward pass, in order.
    """

    values: frozenset[str]
    extras: tuple[Extra, ...]
    recomputed: tuple[str, ...]


@dataclass(frozen=True)
class Activations:
    """The facts that policies need, gathered once for a graph (or for the nodes of interest).

    ``roots`` is by value; ``computed`` are the values that are activations, ``users`` the nodes that take each value,
    ``live`` the nodes that a gradient comes back to, ``reusing`` the cross-entropies that write the gradient of their
    logits over these.
    """

    nodes: Mapping[str, Node]
    values: Mapping[str, Value]
    users: Mapping[str, tuple[str, ...]]
    saved_by_node: Mapping[str, SavedForBackward]
    roots: Mapping[str, str]
    computed: frozenset[str]
    live: frozenset[str]
    reusing: frozenset[str] = frozenset()

    @staticmethod
    def of(
        graph: Graph,
        live: frozenset[str],
        nodes: Collection[str] | None = None,
        *,
        kernels: Kernels = "gpu",
    ) -> Activations:
        """Gather them; the arguments are those of ``kept_by_autograd``. Beside a loss, outputs need not be kept."""
        users: dict[str, list[str]] = defaultdict(list)
        for node in graph.nodes:
            for name in dict.fromkeys(node.inputs):
                users[name].append(node.name)
        results = {name for path, name in graph.outputs.items() if graph.loss in (None, path)}
        return Activations(
            nodes={node.name: node for node in graph.nodes},
            values=graph.values,
            users={name: tuple(names) for name, names in users.items()},
            saved_by_node=kept_by_autograd(graph, live, nodes, kernels=kernels),
            roots=storage_roots(graph, nodes, kernels=kernels),
            computed=activations(graph),
            live=live,
            reusing=reusable_logits(graph, results=results) if graph.training and kernels == "gpu" else frozenset(),
        )


def kept_under(
    saved_activations: Activations, nodes: Sequence[str], policy: str, *, compiled: bool = False
) -> Recompute:
    """What the stretch ``nodes`` (names, consecutive, in graph order) keeps under ``policy``.

    Args:
        saved_activations: what is kept by node, from ``Activations.of`` on a graph that has these nodes.
        policy: one of ``POLICIES``.
        compiled: as ``torch.compile`` does it, rather than operator by operator.

    Raises:
        ValueError: for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown recompute policy {policy!r}: expected one of {', '.join(POLICIES)}")
    stretch = Stretch(saved_activations, nodes)
    return (_COMPILED if compiled else _EAGER)[policy](stretch)


class Stretch:
    """The nodes of a stretch and their values by storage."""

    def __init__(self, activations: Activations, names: Sequence[str]) -> None:
        self.activations = activations
        self.names = tuple(name for name in names if name in activations.saved_by_node)
        self.saved_by_node = {name: activations.saved_by_node[name] for name in self.names}
        self.maker = {value.name: name for name in self.names for value in activations.nodes[name].outputs}

    def roots(self, values: Collection[str]) -> frozenset[str]:
        """Storages of ``values`` that are activations."""
        storages = (self.activations.roots[name] for name in values)
        return frozenset(name for name in storages if name in self.activations.computed)

    def inputs(self) -> frozenset[str]:
        """Storages of what the stretch takes from outside."""
        consumed = {
            name for node in self.names for name in self.activations.nodes[node].inputs if name not in self.maker
        }
        return self.roots(consumed)

    def saved(self, expensive: bool | None = None) -> frozenset[str]:
        """Storages that autograd keeps, for all nodes or for the expensive or the cheap ones."""
        selected = (
            entry for entry in self.saved_by_node.values() if expensive is None or entry.is_expensive == expensive
        )
        return self.roots({name for entry in selected for name in entry.values})

    def extras(self) -> tuple[Extra, ...]:
        """Tensors made inside operators that autograd keeps."""
        return tuple(extra for saved in self.saved_by_node.values() for extra in saved.extras)

    def kept_expensive_extras(self) -> tuple[Extra, ...]:
        """Those of them that expensive kernels give."""
        return tuple(
            extra for saved in self.saved_by_node.values() for extra in saved.extras if extra in saved.expensive_extras
        )

    def remade_from(self) -> frozenset[str]:
        """What cheap operators make kept tensors of their own from (random masks apart: a seed makes those)."""
        nodes = self.activations.nodes
        return frozenset(
            value
            for name, saved in self.saved_by_node.items()
            if saved.extras and not saved.is_expensive and "dropout" not in nodes[name].op
            for value in nodes[name].inputs
        )

    def expensive_values(self) -> frozenset[str]:
        return self.roots({name for saved in self.saved_by_node.values() for name in saved.expensive_values})

    def expensive_extras(self) -> tuple[Extra, ...]:
        return tuple(extra for saved in self.saved_by_node.values() for extra in saved.expensive_extras)

    def until_all_is_there(self) -> tuple[str, ...]:
        """The nodes up to the last one that keeps something; that one too unless it keeps its inputs alone."""
        for place in reversed(range(len(self.names))):
            saved = self.saved_by_node[self.names[place]]
            if saved.values or saved.extras:
                outputs = {value.name for value in self.activations.nodes[self.names[place]].outputs}
                runs = bool(saved.extras) or not outputs.isdisjoint(saved.values)
                return self.names[: place + runs]
        return ()

    def computed_from(
        self, values: Collection[str], available: frozenset[str]
    ) -> tuple[frozenset[str], frozenset[str]]:
        """The storages, ``available`` or from outside, that ``values`` are computed from, and the nodes between."""
        needed: set[str] = set()
        between: set[str] = set()
        visited: set[str] = set()
        stack = list(values)
        while stack:
            name = stack.pop()
            if name in visited:
                continue
            visited.add(name)
            root = self.activations.roots[name]
            if root in available or name not in self.maker:
                needed |= self.roots((name,))
                continue
            between.add(self.maker[name])
            stack.extend(self.activations.nodes[self.maker[name]].inputs)
        return frozenset(needed), frozenset(between)

    def in_order(self, names: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in self.names if name in names)


def _none(stretch: Stretch) -> Recompute:
    return Recompute(stretch.saved(), stretch.extras(), ())


def _selective(stretch: Stretch) -> Recompute:
    again = (name for name in stretch.until_all_is_there() if not stretch.saved_by_node[name].is_expensive)
    values = stretch.inputs() | stretch.expensive_values()
    return Recompute(values, stretch.expensive_extras(), tuple(again))


def _full(stretch: Stretch) -> Recompute:
    return Recompute(stretch.inputs(), (), stretch.until_all_is_there())


def _none_compiled(stretch: Stretch) -> Recompute:
    written = stretch.saved(expensive=True)
    available = written | stretch.expensive_values()
    needed, _ = stretch.computed_from(stretch.saved(expensive=False) | stretch.remade_from(), available)
    return Recompute(written | needed, stretch.kept_expensive_extras(), ())


def _selective_compiled(stretch: Stretch) -> Recompute:
    needed, between = stretch.computed_from(stretch.saved() | stretch.remade_from(), stretch.expensive_values())
    return Recompute(needed, stretch.kept_expensive_extras(), stretch.in_order(between))


def _full_compiled(stretch: Stretch) -> Recompute:
    needed, between = stretch.computed_from(stretch.saved() | stretch.remade_from(), frozenset())
    return Recompute(needed, (), stretch.in_order(between))


_EAGER: dict[str, Callable[[Stretch], Recompute]] = {"none": _none, "selective": _selective, "full": _full}
_COMPILED: dict[str, Callable[[Stretch], Recompute]] = {
    "none": _none_compiled,
    "selective": _selective_compiled,
    "full": _full_compiled,
}
