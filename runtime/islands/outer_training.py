"""``planner.DiLoCo``: islands train alone for H steps each, then move together along the mean of what they changed.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105). In fragments:
Douillard et al., "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512), without its overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from runtime.agreement.ranks_together import gathered, together
from runtime.islands.cell_exchange import CellExchange, Part
from runtime.islands.fragments import due_fragments, fragments_of
from runtime.islands.island_ranks import Islands
from runtime.islands.outer_state import JointState
from runtime.islands.shared_cells import Extent, SharedCell, shared_cells
from runtime.parameters import ShardedParameter, local_of
from runtime.state.owned import Owned

#: Makes the outer optimizer of copies of the parameters.
OuterOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class _Trained(Protocol):
    """What is needed of a model: ``ParallelModule`` has it."""

    def owned(self) -> tuple[Owned, ...]: ...


def nesterov(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """The outer optimizer of the paper: SGD with learning rate 0.7 and Nesterov momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


class DiLoCo(torch.optim.Optimizer):
    """An optimizer for islands with slow links between them; all ranks of all islands must make one.

    Every island has a parallel module of its own (of the same model, under any plan) and trains it on samples of its
    own by ``optimizer``. After H inner steps θ_outer − mean over the islands of θ is the gradient of ``outer``, which
    updates θ_outer; all islands go on from there. What an inner optimizer keeps stays on its island.

    ``step`` takes the place of the inner optimizer's. ``CheckpointManager.save`` and ``load`` take this in the place of
    the inner optimizer, and store both, with θ_outer and the number of steps: one directory for each island, with
    ``CheckpointManager(…, ranks=islands.ranks)``.

    Args:
        parallel: this rank's, planned already: its weights become those of the first island.
        optimizer: over its parameters; those that it does not have are not exchanged.
        islands: who is where.
        inner_steps: H, steps between two exchanges of a parameter.
        outer: makes the outer optimizer; it must update every element by itself, as SGD does.
        fragments: the parameters, in their order, are exchanged in so many parts of about equal size, H/``fragments``
            steps after each other.
        wire_format: what differences are sent as: None for the parameters' dtype, or ``"float32"``, ``"bfloat16"``,
            ``"float16"``, ``"int8"``, see ``runtime.islands.wire_formats`` for their errors.

    Raises:
        ValueError: on all ranks, if arguments or the model's parameters differ between ranks, H is below 1,
            ``fragments`` is not from 1 to H or more than the parameters, or the model has no plan yet.
    """

    def __init__(
        self,
        parallel: _Trained,
        optimizer: torch.optim.Optimizer,
        *,
        islands: Islands,
        inner_steps: int,
        outer: OuterOptimizer = nesterov,
        fragments: int = 1,
        wire_format: str | None = None,
    ) -> None:
        self._exchange = together(lambda: _checked_exchange(parallel, inner_steps, fragments, wire_format))
        self.inner, self.inner_steps, self.islands = optimizer, inner_steps, islands
        self.num_steps = 0
        self._parallel, self._is_resumed = parallel, False
        pieces = self._pieces()
        cells, sizes = _cells_of_all_ranks(pieces, islands, (inner_steps, fragments, wire_format))
        names = together(lambda: fragments_of(sizes, fragments))
        self._fragments = [[cell for name in fragment for cell in cells[name]] for fragment in names]
        with torch.no_grad():
            for fragment in self._fragments:
                self._exchange.take_first(fragment, {name: _part(piece) for name, piece in pieces.items()})
            self._copies = {name: nn.Parameter(piece.tensor.detach().clone()) for name, piece in pieces.items()}
        self.outer = outer(list(self._copies.values()))
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.state = JointState(optimizer, self.outer, self._copy_of, self._count)  # type: ignore[assignment]

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent to other islands, see ``CellExchange``; those of the start are not counted."""
        return self._exchange.bytes_sent

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """A step of the inner optimizer, and the exchange of the fragments that are due after it.

        Raises:
            ValueError: on all ranks, if they are not at the same step after a checkpoint was loaded.
        """
        if self._is_resumed:
            self._check_same_step()
        result = self.inner.step() if closure is None else self.inner.step(closure)
        self.num_steps += 1
        due = due_fragments(self.num_steps, inner_steps=self.inner_steps, count=len(self._fragments))
        self._move_together(due)
        return result

    def synchronise(self) -> None:
        """Exchange now what has changed since its last exchange: then all islands have the same weights.

        At the end of training. Momentum moves what is exchanged, so that what has not changed is left alone.
        """
        count = len(self._fragments)
        due = due_fragments(self.num_steps, inner_steps=self.inner_steps, count=count) if self.num_steps else ()
        self._move_together(index for index in range(count) if index not in due)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def _move_together(self, fragments: Iterable[int]) -> None:
        cells = [cell for index in fragments for cell in self._fragments[index]]
        if not cells:
            return
        pieces, names = self._pieces(), {cell.name for cell in cells}
        here = [name for name in self._copies if name in names]
        differences: dict[str, Part] = {}
        for name in here:
            difference = self._copies[name].grad = self._copies[name] - pieces[name].tensor
            differences[name] = difference, pieces[name].offsets
        self._exchange.average(cells, differences)
        self.outer.step()
        for name in here:
            self._copies[name].grad = None
            pieces[name].tensor.copy_(self._copies[name])

    def _pieces(self) -> dict[str, Owned]:
        """What this rank holds of the parameters that the inner optimizer trains."""
        trained = {id(local_of(parameter)) for group in self.inner.param_groups for parameter in group["params"]}
        return {piece.name: piece for piece in self._parallel.owned() if id(piece.tensor) in trained}

    def _copy_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self._copies.get(parameter.path) if isinstance(parameter, ShardedParameter) else None

    def _count(self, steps: int | None) -> int:
        if steps is not None:
            self.num_steps, self._is_resumed = steps, True
        return self.num_steps

    def _check_same_step(self) -> None:
        steps = gathered(self.num_steps)
        if len(set(steps)) > 1:
            raise ValueError(f"the ranks resumed at steps {steps}: load checkpoints of the same step on all islands")
        self._is_resumed = False


def _part(piece: Owned) -> Part:
    return piece.tensor, piece.offsets


def _checked_exchange(parallel: _Trained, inner_steps: int, fragments: int, wire_format: str | None) -> CellExchange:
    if inner_steps < 1 or not 1 <= fragments <= inner_steps:
        raise ValueError(
            f"inner_steps={inner_steps}, fragments={fragments}: H must be at least 1, and of its steps each may "
            "exchange at most one fragment of 1 to H"
        )
    getattr(parallel, "plan", None)  # without a plan there are no shards yet; it raises what to do
    return CellExchange(wire_format)


def _cells_of_all_ranks(
    pieces: dict[str, Owned], islands: Islands, arguments: tuple[Any, ...]
) -> tuple[dict[str, list[SharedCell]], dict[str, int]]:
    """The cells of every parameter, and its elements, in the order in which the first island has them.

    Raises:
        ValueError: on all ranks, if they have other arguments, or other parameters.
    """
    own = {
        name: (piece.shape, (piece.offsets, tuple(piece.tensor.shape)))
        for name, piece in pieces.items()
        if piece.tensor.numel()
    }
    by_rank = gathered((islands.members, arguments, own))
    arguments_by_rank = [(members, others) for members, others, _ in by_rank]
    if len(set(arguments_by_rank)) > 1:
        rank = next(rank for rank, other in enumerate(arguments_by_rank) if other != arguments_by_rank[0])
        raise ValueError(
            "islands, inner_steps, fragments and wire_format must be the same on all ranks: rank 0 has "
            f"{arguments_by_rank[0]}, rank {rank} {arguments_by_rank[rank]}"
        )
    shapes: dict[str, tuple[int, ...]] = {}
    holders: dict[str, list[dict[Extent, tuple[int, ...]]]] = {}
    for rank, (_, _, rectangles) in enumerate(by_rank):
        for name, (shape, extent) in rectangles.items():
            if shapes.setdefault(name, shape) != shape:
                raise ValueError(f"{name!r} is {list(shapes[name])} on one island and {list(shape)} on another")
            around = holders.setdefault(name, [{} for _ in islands.members])[islands.island_of(rank)]
            around[extent] = (*around.get(extent, ()), rank)
    cells = {name: shared_cells(name, by_island) for name, by_island in holders.items()}
    return cells, {name: torch.Size(shape).numel() for name, shape in shapes.items()}
