"""Peak memory while a stretch of the model runs, beyond its state and what it saves for the backward pass.

Forward: storages live from the node that makes them to the last that takes them; what leaves the stretch lives to its
end; what is made inside an operator lives while that runs. What is kept anyway is not counted twice.

Backward, mirrored: what was not kept but autograd needs is made again first, all of it alive at the end; what was kept
for that alone is gone by then. Then, node by node in reverse, the gradient of a storage lives from the backward of its
last user to that of its maker, a second contribution exists beside the sum it is added to, an operator's backward makes
the gradient of what was made inside its forward, and kept storages go when the earliest node that needs them is
through. Logits that only cross-entropy reads become their own gradient.

``compiled=True`` leaves out what fused kernels never write: values and gradients between cheap operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence

from passes.autograd.recompute_policies import Activations, Recompute, Stretch, kept_under
from passes.autograd.saved import Extra
from passes.autograd.working import LocalBytes, working

ExtraBytes = Callable[[Extra], float]


def working_peak(
    saved_activations: Activations,
    nodes: Sequence[str],
    policy: str = "none",
    *,
    local_bytes: LocalBytes,
    extra_bytes: ExtraBytes,
    compiled: bool = False,
) -> float:
    """Bytes on one device, forward or backward, whichever is more.

    Args:
        saved_activations, nodes, policy, compiled: as for ``kept_under``.
        local_bytes, extra_bytes: bytes on one device of a value, and of a tensor made inside an operator.
    """
    lifetimes = Lifetimes(saved_activations, nodes, policy, compiled=compiled)
    return lifetimes.peak(local_bytes=local_bytes, extra_bytes=extra_bytes)


class Lifetimes:
    """When storages of one stretch under one policy are made and freed, whatever their bytes: for many shardings.

    Arguments as for ``working_peak``.
    """

    def __init__(
        self, saved_activations: Activations, nodes: Sequence[str], policy: str = "none", *, compiled: bool = False
    ) -> None:
        self.activations = saved_activations
        self.stretch = Stretch(saved_activations, nodes)
        self.recompute: Recompute = kept_under(saved_activations, nodes, policy, compiled=compiled)
        self.compiled = compiled
        self.written = self._written()

    def peak(self, *, local_bytes: LocalBytes, extra_bytes: ExtraBytes) -> float:
        """Bytes on one device, forward or backward, whichever is more; see ``working_peak``."""
        walk = _Walk(self, local_bytes, extra_bytes)
        return max(walk.forward(), walk.backward())

    def _written(self) -> frozenset[str]:
        """Storages that are written to memory: all, or those that fused kernels write."""
        inside = set(self.stretch.names)
        if not self.compiled:
            return frozenset(self.activations.computed)
        crossing = {
            name
            for name in self.stretch.maker
            for user in self.activations.users.get(name, ())
            if user not in inside or self.stretch.saved_by_node[user].is_expensive
        }
        read = self.stretch.saved(expensive=True)
        return self.inputs | self.stretch.roots(crossing) | self.stretch.expensive_values() | read

    @functools.cached_property
    def inputs(self) -> frozenset[str]:
        """Storages of what the stretch takes from outside."""
        return self.stretch.inputs()

    @functools.cached_property
    def taken(self) -> dict[str, frozenset[str]]:
        """By node, storages of activations that it takes."""
        nodes = self.activations.nodes
        return {node: self.stretch.roots(nodes[node].inputs) for node in self.stretch.names}

    @functools.cached_property
    def of_outputs(self) -> dict[str, frozenset[str]]:
        """By node, storages of what it gives; those that a view shares with what it takes have one gradient."""
        nodes = self.activations.nodes
        return {node: self.stretch.roots([value.name for value in nodes[node].outputs]) for node in self.stretch.names}

    @functools.cached_property
    def allocated(self) -> dict[str, frozenset[str]]:
        """By node, storages that it allocates for its outputs."""
        nodes = self.activations.nodes
        return {
            node: storages & {value.name for value in nodes[node].outputs} for node, storages in self.of_outputs.items()
        }

    @functools.cached_property
    def leaving(self) -> frozenset[str]:
        """Storages that nodes outside the stretch take."""
        inside = set(self.stretch.names)
        users = self.activations.users
        return self.stretch.roots(
            {name for name in self.stretch.maker if any(user not in inside for user in users.get(name, ()))}
        )

    @functools.cached_property
    def needed(self) -> frozenset[str]:
        """Storages that the backward pass reads; a compiled one makes those of cheap operators as it goes."""
        return self.stretch.saved(expensive=True if self.compiled else None) & self.written

    @functools.cached_property
    def freed(self) -> dict[str, tuple[str, ...]]:
        """By node, the storages of ``needed`` that nobody reads behind its backward."""
        freed: dict[str, list[str]] = {}
        for root, node in self._first_readers().items():
            if root in self.needed:
                freed.setdefault(node, []).append(root)
        return {node: tuple(roots) for node, roots in freed.items()}

    @functools.cached_property
    def backward_nodes(self) -> tuple[str, ...]:
        """The nodes that a gradient comes back to, last first."""
        return tuple(node for node in reversed(self.stretch.names) if node in self.activations.live)

    def overwritten(self, node: str) -> frozenset[str]:
        """Storages that the backward of ``node`` makes into their own gradient."""
        if node not in self.activations.reusing:
            return frozenset()
        return self.stretch.roots((self.activations.nodes[node].inputs[0],)) & self.stretch.maker.keys()

    def held_extras(self, node: str) -> tuple[Extra, ...]:
        """Tensors made inside a node's forward that are still held when its backward starts."""
        saved = self.stretch.saved_by_node[node]
        return tuple(extra for extra in saved.extras if not self.compiled or extra in saved.expensive_extras)

    def has_gradient(self, root: str) -> bool:
        return self.activations.values[root].requires_grad

    def _first_readers(self) -> dict[str, str]:
        """Storage made inside → the earliest node whose backward reads it."""
        first: dict[str, str] = {}
        for node in reversed(self.backward_nodes):
            for root in self.stretch.roots(self.stretch.saved_by_node[node].values) - self.inputs:
                first.setdefault(root, node)
        return first


class _Walk:
    """One stretch under one policy, with the bytes of its storages."""

    def __init__(self, lifetimes: Lifetimes, local_bytes: LocalBytes, extra_bytes: ExtraBytes) -> None:
        self.lifetimes, self.stretch, self.activations = lifetimes, lifetimes.stretch, lifetimes.activations
        self.recompute = lifetimes.recompute
        self.local_bytes, self.extra_bytes = local_bytes, extra_bytes
        self._bytes: dict[str, float] = {}

    def bytes_of(self, root: str) -> float:
        num_bytes = self._bytes.get(root)
        if num_bytes is None:
            is_written = root in self.lifetimes.written
            num_bytes = self.local_bytes(self.activations.values[root]) if is_written else 0.0
            self._bytes[root] = num_bytes
        return num_bytes

    def inside_bytes(self, node: str, held: Collection[Extra] = (), *, backward: bool = False) -> float:
        """Bytes that an operator allocates while it runs, beyond its output and the ``held`` extras."""
        saved = self.stretch.saved_by_node[node]
        working_bytes = working(self.activations.nodes[node], self.activations.values, self.local_bytes)[backward]
        if self.lifetimes.compiled and not saved.is_expensive:
            return working_bytes
        if not saved.temporaries and not saved.extras:
            return max(working_bytes, 0.0)
        internal = (*saved.temporaries, *(extra for extra in saved.extras if extra not in held))
        return max(working_bytes, max(map(self.extra_bytes, internal), default=0.0))

    # -- forward ------------------------------------------------------------------------------------------------

    def forward(self) -> float:
        return self._run(self.stretch.names, stays=frozenset(), extras=self.recompute.extras)

    def _run(self, nodes: Sequence[str], *, stays: frozenset[str], extras: Collection[Extra]) -> float:
        """The peak of running ``nodes`` forward, beyond what is kept.

        Args:
            stays: storages that are not freed.
            extras: tensors made inside operators that are kept, so that they are not counted while those run.
        """
        held, lifetimes = self.recompute.values, self.lifetimes
        last = {root: place for place, node in enumerate(nodes) for root in lifetimes.taken[node]}
        outside = lifetimes.leaving | stays
        alive = {root: self.bytes_of(root) for root in lifetimes.inputs - held if root in last}
        peak = total = sum(alive.values())
        for place, node in enumerate(nodes):
            for root in lifetimes.allocated[node] - held:
                alive[root] = self.bytes_of(root)
                total += alive[root]
            peak = max(peak, total + self.inside_bytes(node, extras))
            if stays:
                total += sum(self.extra_bytes(extra) for extra in lifetimes.held_extras(node) if extra not in extras)
            for root in [root for root in alive if last.get(root, place) <= place and root not in outside]:
                total -= alive.pop(root)
        return max(peak, total)

    # -- backward -----------------------------------------------------------------------------------------------

    def backward(self) -> float:
        """The peak of the second forward (where there is one) and of the walk back."""
        lifetimes, again = self.lifetimes, self.recompute.recomputed
        remade = sum(self.bytes_of(root) for root in lifetimes.needed - self.recompute.values)
        walk_back = self._back()
        if not again:
            return remade + walk_back
        inside = [extra for name in self.stretch.names for extra in lifetimes.held_extras(name)]
        remade += sum(map(self.extra_bytes, inside)) - sum(map(self.extra_bytes, self.recompute.extras))
        entering = sum(self.bytes_of(root) for root in lifetimes.leaving if lifetimes.has_gradient(root))
        second = self._run(again, stays=lifetimes.needed, extras=self.recompute.extras)
        made_here = self.recompute.values & self.stretch.maker.keys()
        used_up = sum(map(self.bytes_of, made_here - lifetimes.needed))
        return max(entering + second, remade + walk_back - used_up)

    def _back(self) -> float:
        """The peak of gradients over the walk back, less the storages of ``needed`` that are freed on the way."""
        lifetimes = self.lifetimes
        grads = {root: self.bytes_of(root) for root in lifetimes.leaving if lifetimes.has_gradient(root)}
        peak = total = sum(grads.values())
        for node in lifetimes.backward_nodes:
            added = self._weights(node)  # before they are added to those of other micro-batches, or cast
            in_place = lifetimes.overwritten(node)
            for root in lifetimes.taken[node]:
                if not lifetimes.has_gradient(root) or root in lifetimes.of_outputs[node]:
                    continue
                if root in in_place:
                    grads[root] = self.bytes_of(root)
                elif root in grads:
                    added += self.bytes_of(root)
                else:
                    grads[root] = self.bytes_of(root)
                    total += grads[root]
            peak = max(peak, total + added + self.inside_bytes(node, backward=True))
            total += sum(self.bytes_of(root) for root in in_place)
            for root in lifetimes.allocated[node]:
                total -= grads.pop(root, 0.0)
            total -= sum(self.bytes_of(root) for root in lifetimes.freed.get(node, ()))
            total -= sum(map(self.extra_bytes, lifetimes.held_extras(node)))
        return peak

    def _weights(self, node: str) -> float:
        values = (self.activations.values[name] for name in dict.fromkeys(self.activations.nodes[node].inputs))
        return sum(self.local_bytes(value) for value in values if value.kind == "parameter" and value.requires_grad)
