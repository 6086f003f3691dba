"""One unit's weights: gathered for use, with gradients that are reduced over the data ranks behind it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from runtime.mesh.communication_counter import ends_backward
from runtime.program_tools.recompute import can_be_made_again
from runtime.torch_compat.autograd_engine import FollowedPass, in_backward, when_done
from runtime.torch_compat.dispatcher import unseen_by_checkpoints
from runtime.zero.bundle_gradients import Gradients
from runtime.zero.flat_places import FlatTensor
from runtime.zero.group import StateGroup
from runtime.zero.state_pieces import piece_shape
from runtime.zero.uses import taken_together, used_at_once, used_in_groups
from runtime.zero.working_weights import Gathered, WorkingWeights

_REDUCED_PER_USE, _GATHERED_PER_USE = 2, 3


@dataclass(frozen=True)
class UnitWeight:
    """One parameter of a unit.

    Attributes:
        owner: what this rank owns of it: under ZeRO 1 to 3, if it is trained, the piece of ``pieces.piece_of``.
        shape: of the whole parameter, as it is on the rank without ZeRO.
        largest, piece_dim: as in ``FlatTensor``.
        compute: dtype of the working weight; None for the owner's.
        gradient: dtype in which gradients are reduced and added up; None for float32 where ``compute`` has 16 bits,
            else the owner's.
        shared: another unit uses the parameter, too: what is reduced of its gradient is added to the owner's at once.
    """

    name: str
    owner: nn.Parameter
    shape: tuple[int, ...]
    compute: torch.dtype | None = None
    gradient: torch.dtype | None = None
    shared: bool = False
    largest: tuple[int, ...] | None = None
    piece_dim: int | None = None

    @property
    def flat(self) -> FlatTensor:
        return FlatTensor(self.shape, self.largest, self.piece_dim)

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.compute or self.owner.dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        if self.gradient is not None:
            return self.gradient
        return torch.float32 if self.compute_dtype.itemsize <= 2 else self.owner.dtype


@dataclass(frozen=True)
class _Bundle:
    """Trained parameters of equal dtypes: ``places`` in the unit, what they compute with, their gradients."""

    places: tuple[int, ...]
    weights: WorkingWeights
    gradients: Gradients


class Unit:
    """The weights that one unit (a layer, or a stretch between layers) uses together, under ZeRO 0 to 3.

    A step is ``begin(num_uses)``, the forward and backward passes of its micro-batches, ``finish()``. Without
    ``begin`` the unit is *automatic*: the end of every backward pass finishes. Gradients that come out of a use are
    taken as partial on the ranks of ``group`` and are summed over them.

    Frozen parameters are whole, used as they are, and never sent.

    Args:
        weights: the unit's parameters, each once; owners of frozen ones are whole.
        zero: 0: all whole. 1: owners are pieces; weights gathered and gradients reduced once a step. 2: gradients
            reduced after every use, only pieces are kept. 3: weights gathered for every use, too.
        group: the data ranks or, from ZeRO 1 on, neighbours among them that hold all pieces together (``replicas``).
        splits_backward: backward passes are split, and must be able to tell large weights apart.

    Raises:
        ValueError: for an unknown stage, whole owners in several groups, and an owner that is not the piece it should
            be.
    """

    def __init__(
        self,
        weights: Sequence[UnitWeight],
        *,
        zero: int,
        group: StateGroup | None = None,
        splits_backward: bool = False,
    ) -> None:
        self.group = group or StateGroup()
        if zero not in (0, 1, 2, 3):
            raise ValueError(f"unknown ZeRO stage {zero!r}: expected 0, 1, 2 or 3")
        self.zero = zero if self.group.size > 1 else 0
        if not self.zero and self.group.replicas is not None:
            raise ValueError("ZeRO 0 reduces over all data ranks at once: expected a group without replicas")
        #: Whether other groups hold the same pieces.
        self._is_hybrid = self.group.replicas is not None
        self.weights = tuple(weights)
        self._check_shapes()
        self._bundles = self._make_bundles()
        self._token = nn.Parameter(torch.zeros(()))
        #: Whether owners are the working weights, and autograd alone does all there is to do.
        self.uses_owners = self.group.size == 1 and all(
            bundle.weights.as_owned and weight.gradient_dtype == weight.owner.dtype
            for bundle in self._bundles
            for weight in (self.weights[place] for place in bundle.places)
        )
        self._splits_backward = splits_backward
        #: How many neighbouring weights share a node of autograd; found out at the first use: owners may move before.
        self._groups: list[int] | None = None
        # The neighbours in the order of use, set by ``chained``.
        self.before: Unit | None = None
        self.after: Unit | None = None
        self._expected: int | None = None
        self._open_uses = 0
        #: Of an automatic unit: the backward pass whose end finishes, and the one that gathered ``_backward``.
        self._finishing_pass: FollowedPass | None = None
        self._gathering_pass: FollowedPass | None = None
        self._backward: list[Gathered] | None = None
        # Learnt by the first use, so that no step gathers ahead what its backward pass does not read.
        self._needed_backward = False
        self._gathered_backward = False

    @property
    def token(self) -> nn.Parameter:
        """The autograd leaf that stands for all parameters of a use; its gradient is zero.

        It is where the parameters are, which leave the meta device when they are loaded: autograd runs the nodes of
        each device in a thread of its own, so a token elsewhere would leave the order of collectives to chance.
        """
        if self.weights and self._token.device != self.weights[0].owner.device:
            self._token = nn.Parameter(torch.zeros((), device=self.weights[0].owner.device))
        return self._token

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The autograd leaves of a use: the token, or the parameters themselves where nothing needs doing."""
        if not self._bundles:
            return []
        return (
            [weight.owner for weight in self.weights if weight.owner.requires_grad]
            if self.uses_owners
            else [self.token]
        )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that are held between micro-batches (the owners' ``grad`` not counted)."""
        return sum(bundle.gradients.num_bytes for bundle in self._bundles)

    def begin(self, num_uses: int) -> None:
        """Start a step in which ``use`` is called ``num_uses`` times with gradients."""
        if self.uses_owners:
            return
        # A step that failed halfway may have left gradients.
        for bundle in self._bundles:
            bundle.gradients.discard()
        self._backward, self._finishing_pass = None, None
        self._expected = self._open_uses = num_uses
        self.refresh_needed()

    def refresh_needed(self) -> None:
        """The owners have changed: compute the working weights again at their next use. All ranks must call it."""
        for bundle in self._bundles:
            bundle.weights.stale()

    def prefetch(self) -> None:
        """Start gathering the weights for the next use; nothing where they are there. All ranks must call it."""
        if self.zero:
            for bundle in self._bundles:
                bundle.weights.prefetch()

    def use(self) -> list[torch.Tensor]:
        """Whole working weights, in the order of ``weights``; differentiable where gradients are enabled."""
        working: list[torch.Tensor] = [weight.owner for weight in self.weights]
        if self.uses_owners:
            return working
        # What a use gathers is let go after it, and may have been gathered ahead: no checkpoint can repeat that.
        with unseen_by_checkpoints():
            wholes = self._gathered() if self.zero == _GATHERED_PER_USE else self._kept()
            self._gather_ahead()
        if torch.is_grad_enabled() and self._bundles:
            if self._expected is None and not in_backward():
                self._forget_raised_pass()
                self._open_uses += 1
            flat = [whole for some in wholes for whole in some]
            if self._groups is None:
                self._groups = self._node_sizes()
            at_once = len(self._groups) == 1
            iterator = iter(used_at_once(self, flat) if at_once else used_in_groups(self, flat, self._groups))
            wholes = [[next(iterator) for _ in some] for some in wholes]
        for bundle, some in zip(self._bundles, wholes):
            for place, whole in zip(bundle.places, some):
                working[place] = whole
        return working

    def _node_sizes(self) -> list[int]:
        sizes = [size for bundle in self._bundles for size in bundle.weights.bytes_of_each]
        if self.zero == _GATHERED_PER_USE:
            return [len(sizes)]
        return taken_together(sizes, on_gpu=self.weights[0].owner.is_cuda, splits_backward=self._splits_backward)

    def finish(self) -> None:
        """End a step: gradients are complete and reduced in the owners' ``grad``. All ranks must call it."""
        if self.uses_owners:
            return
        at_end = ends_backward.set(True)
        try:
            for bundle in self._bundles:
                bundle.gradients.launch()
            if self._is_hybrid:
                self._spread()
            for bundle in self._bundles:
                bundle.gradients.finish()
                bundle.weights.drop_prefetched()
        finally:
            ends_backward.reset(at_end)
        self._expected, self._open_uses, self._backward = None, 0, None

    def drop_ahead(self) -> None:
        """Let go of weights that were gathered ahead of a use that did not come. All ranks must call it."""
        for unit in (self, self.after):
            for bundle in () if unit is None else unit._bundles:
                bundle.weights.drop_prefetched()

    def settle(self) -> None:
        """Wait for the reductions that have been started."""
        for bundle in self._bundles:
            bundle.gradients.settle()

    def _spread(self) -> None:
        """Sum what has been reduced over the groups that hold the same pieces, behind what computes meanwhile."""
        for bundle in self._bundles:
            bundle.gradients.spread()

    def _kept(self) -> list[list[torch.Tensor]]:
        are_saved = self._expected is None and self._open_uses > 0
        return [bundle.weights.kept_tensors(are_saved=are_saved) for bundle in self._bundles]

    def _gathered(self) -> list[list[torch.Tensor]]:
        """Whole weights for one use, which autograd need not keep."""
        wholes = [bundle.weights.gather().wholes() for bundle in self._bundles]
        can_be_made_again([whole for some in wholes for whole in some], self._make_again)
        return wholes

    def _make_again(self) -> list[torch.Tensor]:
        """Whole weights for the backward pass of a use, bundle by bundle."""
        return [whole for gathered in self._gathered_again() for whole in gathered.wholes()]

    def _gathered_again(self) -> list[Gathered]:
        """Gathered for the backward pass of a use: once, and let go after it."""
        if self._gathering_pass is not None and not self._gathering_pass.is_running:
            self._drop_backward()
        if self._backward is None:
            self._backward = [bundle.weights.gather() for bundle in self._bundles]
            self._gather_ahead()
            if in_backward():
                # A backward pass that ends without gradients of the weights must not keep them either.
                self._gathering_pass = FollowedPass()
                when_done(self._drop_backward)
        return self._backward

    def _drop_backward(self) -> None:
        self._backward, self._gathering_pass = None, None

    def _gather_ahead(self) -> None:
        """Let the unit that will be used next start gathering."""
        if not in_backward():
            if self.after is not None:
                self.after.prefetch()
            return
        self._gathered_backward = True
        before = self.before
        while before is not None and before._gathered_backward:
            # What runs again gathers its groups in forward order: those before this one are there.
            before = before.before
        if before is not None and before.zero == _GATHERED_PER_USE and before._needed_backward:
            before.prefetch()

    def take(self, start: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """The whole gradients of weights in one use: of those from ``start`` on in the order of the bundles."""
        arrived = {nr: gradient for nr, gradient in enumerate(gradients, start) if gradient is not None}
        if not arrived:
            return
        self._follow_pass()
        first = 0
        for bundle in self._bundles:
            end = first + len(bundle.places)
            bundle.gradients.add({nr - first: gradient for nr, gradient in arrived.items() if first <= nr < end})
            first = end

    def end_use(self, gradients: Sequence[torch.Tensor | None] = ()) -> None:
        """These gradients complete one use."""
        self._follow_pass()
        self._drop_backward()
        self._needed_backward, self._gathered_backward = self._gathered_backward, False
        if self.zero >= _REDUCED_PER_USE and self.after is not None:
            # One whole gradient at a time waits for its reduction.
            self.after.settle()
        if self._is_hybrid and self.after is not None and not self.after._open_uses:
            self.after._spread()
        self.take(0, gradients)
        if self.zero >= _REDUCED_PER_USE:
            for bundle in self._bundles:
                bundle.gradients.launch()
        self._open_uses -= 1
        if self._open_uses == 0:
            for bundle in self._bundles:
                bundle.gradients.launch()
            if self._is_hybrid and self.before is None:
                self._spread()  # no other unit's use is to come, behind which it could be summed

    def _follow_pass(self) -> None:
        """Finish at the end of this backward pass, if the unit is automatic."""
        if self._expected is not None:
            return
        self._forget_raised_pass()
        if self._finishing_pass is None:
            self._finishing_pass = FollowedPass()
            when_done(self._end_of_backward)

    def _forget_raised_pass(self) -> None:
        """What a backward pass that raised has added is part of no gradient."""
        if self._finishing_pass is None or self._finishing_pass.is_running:
            return
        for bundle in self._bundles:
            bundle.gradients.discard()
        self._finishing_pass, self._open_uses = None, 0

    def _end_of_backward(self) -> None:
        self._finishing_pass = None
        self.finish()

    def _make_bundles(self) -> tuple[_Bundle, ...]:
        places: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
        for place, weight in enumerate(self.weights):
            if weight.owner.requires_grad:
                places.setdefault((weight.compute_dtype, weight.gradient_dtype, weight.shared), []).append(place)
        bundles = []
        for (compute, gradient, shared), some in places.items():
            owners = [self.weights[place].owner for place in some]
            tensors = [self.weights[place].flat for place in some]
            weights = WorkingWeights(owners, tensors, zero=self.zero, group=self.group, compute=compute)
            gradients = Gradients(
                owners, weights.layout, zero=self.zero, group=self.group, dtype=gradient, at_once=shared
            )
            bundles.append(_Bundle(tuple(some), weights, gradients))
        return tuple(bundles)

    def _check_shapes(self) -> None:
        for weight in self.weights:
            if type(weight.owner.data) is not torch.Tensor:
                continue  # One tensor for many ranks has no single shape.
            expected = weight.shape
            if self.zero and weight.owner.requires_grad:
                expected = piece_shape(weight.shape, self.group.size, self.group.rank, weight.piece_dim)
            if tuple(weight.owner.shape) != tuple(expected):
                raise ValueError(
                    f"{weight.name} of shape {tuple(weight.shape)} is owned as {tuple(weight.owner.shape)} by rank "
                    f"{self.group.rank} of {self.group.size}; ZeRO {self.zero} expects {tuple(expected)}"
                )


def chained(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Tell units the order in which a micro-batch uses them, so that one's use starts gathering the next's weights."""
    for before, after in itertools.pairwise(units):
        before.after, after.before = after, before
    return tuple(units)
