"""``planner.DiLoCo``: islands train alone for H steps each, then move together along the mean of what they changed.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv 2311.08105). In fragments:
Douillard et al., "Streaming DiLoCo with overlapping communication" (arXiv 2501.18512), without its overlap. The paper
starts from weights that were trained synchronously; so does this with ``synchronous_steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from cost_models.checked_numbers import check_whole_number
from runtime.agreement.ranks_together import gathered, together
from runtime.islands.cell_exchange import CellExchange, Part
from runtime.islands.exchange_agreement import Agreement, ExchangeNote, agreed
from runtime.islands.fragments import due_fragments, fragments_of
from runtime.islands.island_ranks import Islands
from runtime.islands.outer_state import OUTER, JointState
from runtime.islands.shared_cells import SharedCell
from runtime.islands.shared_state import shared_state
from runtime.parameters import ShardedParameter, local_of
from runtime.state.owned import Owned

#: Makes the outer optimizer of copies of the parameters.
OuterOptimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


class _Trained(Protocol):
    """What is needed of a model: ``ParallelModule`` has it."""

    def owned(self) -> tuple[Owned, ...]: ...

    def weights_changed(self) -> None: ...


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

    Parameters that are frozen now are not exchanged. What is frozen later, on all islands after the same step, is
    exchanged once more, and then stays as it is.

    Args:
        parallel: this rank's, planned already, with its weights: they and the buffers become the first island's.
        optimizer: over its parameters; those that it does not have are not exchanged.
        islands: who is where.
        inner_steps: H, steps between two exchanges of a parameter.
        outer: makes the outer optimizer; it must update every element by itself, as SGD does.
        fragments: the parameters, in their order, are exchanged in so many parts of about equal size, H/``fragments``
            steps after each other.
        wire_format: what differences are sent as: None for the parameters' dtype, or ``"float32"``, ``"bfloat16"``,
            ``"float16"``, ``"int8"``, see ``runtime.islands.wire_formats`` for their errors.
        synchronous_steps: so many steps at first, in each of which the mean of the islands' gradients is taken (in the
            gradients' dtype) before the inner optimizer's step, so that all train as one; then the mean of the
            weights, from which the first round of H begins.

    Raises:
        ValueError: on all ranks, if arguments or the model's parameters differ between ranks, H is below 1,
            ``synchronous_steps`` below 0, ``fragments`` is not from 1 to H or more than the parameters, or the model
            has no plan or no weights yet.
    """

    #: Why ``parallel.replan`` refuses it.
    stays_with_plan = (
        "islands exchange the shards that they had when planner.DiLoCo was made, so that none can take another plan "
        "meanwhile: save a checkpoint, compile for the other plan, make DiLoCo again and load"
    )

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
        synchronous_steps: int = 0,
    ) -> None:
        arguments = (inner_steps, fragments, wire_format, synchronous_steps)
        self._exchange = together(lambda: _checked_exchange(parallel, *arguments))
        #: Of gradients, and of weights whose mean is taken.
        self._exact_exchange = CellExchange()
        self.inner, self.inner_steps, self.islands = optimizer, inner_steps, islands
        self.num_steps, self.synchronous_steps = 0, synchronous_steps
        self._averaged_for: int | None = None
        self._parallel, self._is_resumed = parallel, False
        #: Frozen parameters whose values all islands have alike, which are exchanged no more.
        self._settled: set[str] = set()
        pieces = {piece.name: piece for piece in parallel.owned() if piece.persistent}
        trained = self._in_training(pieces)
        state = shared_state(pieces, trained, islands, arguments)
        names = together(lambda: fragments_of(state.trained, fragments))
        self._numbers = {name: number for number, name in enumerate(state.trained)}
        self._fragments = [[cell for name in fragment for cell in state.cells[name]] for fragment in names]
        others = [cell for name, cells in state.cells.items() if name not in state.trained for cell in cells]
        with torch.no_grad():
            for cells in (*self._fragments, others):
                self._exchange.take_first(cells, {name: _part(piece) for name, piece in pieces.items()})
            parallel.weights_changed()
            self._copies = {name: nn.Parameter(pieces[name].tensor.detach().clone()) for name in trained}
        # An optimizer takes no empty list: where all of a stage is frozen, it has a parameter of no elements.
        self.outer = outer(list(self._copies.values()) or [nn.Parameter(torch.empty(0))])
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.state = JointState(optimizer, self.outer, self._copy_of, self._count, self._note_load)  # type: ignore[assignment]

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent to other islands, see ``CellExchange``; those of the start are not counted."""
        return self._exchange.bytes_sent + self._exact_exchange.bytes_sent

    @property
    def is_synchronous(self) -> bool:
        """Whether the next step is one of the ``synchronous_steps``."""
        return self.num_steps < self.synchronous_steps

    @torch.no_grad()
    def average_gradients(self) -> None:
        """In the synchronous steps, give all islands the mean of their gradients; later nothing.

        For what reads gradients before ``step``, as clipping their norm does; else ``step`` does it. All ranks must
        call it, once a step.

        Raises:
            ValueError: as ``step``.
        """
        self._take_up_load()
        if not self.is_synchronous:
            return
        pieces = {piece.name: piece for piece in self._parallel.owned()}
        own = [name for name in self._copies if pieces[name].tensor.grad is not None]
        agreement = self._agreed((), pieces, gradients=own)
        names = agreement.with_gradients - agreement.frozen
        gradients: dict[str, Part] = {}
        for name in names & self._copies.keys():
            tensor = pieces[name].tensor
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
            gradients[name] = tensor.grad, pieces[name].offsets
        self._exact_exchange.average([cell for cell in self._cells() if cell.name in names], gradients)
        self._averaged_for = self.num_steps

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """A step of the inner optimizer, and the exchange of the fragments that are due after it.

        Raises:
            ValueError: on all ranks, if they are not at the same step, or differ in what is frozen; for a closure in a
                synchronous step.
        """
        self._take_up_load()
        self.param_groups = self.inner.param_groups  # which makes new ones when it loads
        if self.is_synchronous:
            self._step_as_one(closure)
            return None
        result = self.inner.step() if closure is None else self.inner.step(closure)
        self.num_steps += 1
        self._move_together(self._due())
        return result

    def _step_as_one(self, closure: Callable[[], Any] | None) -> None:
        if closure is not None:
            raise ValueError(
                "a closure computes gradients within the inner optimizer's step, where islands cannot take their mean: "
                "compute them before outer.step() in the synchronous steps"
            )
        if self._averaged_for != self.num_steps:
            self.average_gradients()
        self.inner.step()
        self.num_steps += 1
        self._averaged_for = None
        if self.is_synchronous:
            self._copy_weights()
        else:
            self._meet_in_the_mean()

    def _due(self) -> list[int]:
        """The fragments that are exchanged after this step."""
        step = self.num_steps - self.synchronous_steps
        return due_fragments(step, inner_steps=self.inner_steps, count=len(self._fragments))

    def _cells(self) -> list[SharedCell]:
        return [cell for cells in self._fragments for cell in cells]

    @torch.no_grad()
    def _meet_in_the_mean(self) -> None:
        """Give all islands the mean of their weights, which differ in rounding alone: from here they are the same."""
        pieces = {piece.name: piece for piece in self._parallel.owned()}
        self._agreed(range(len(self._fragments)), pieces)
        self._exact_exchange.average(self._cells(), {name: _part(pieces[name]) for name in self._copies})
        self._copy_weights()

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """What the outer optimizer begins with are the weights: also what a checkpoint of a synchronous step has."""
        pieces = {piece.name: piece for piece in self._parallel.owned()}
        for name, copy in self._copies.items():
            copy.copy_(pieces[name].tensor)

    def synchronise(self) -> None:
        """Exchange now what has changed since its last exchange: then all islands have the same weights.

        At the end of training. Momentum moves what is exchanged, so that what has not changed is left alone.

        Raises:
            ValueError: as ``step``.
        """
        self._take_up_load()
        if self.is_synchronous:
            self._meet_in_the_mean()
        elif not self.synchronous_steps or self.num_steps > self.synchronous_steps:
            due = self._due() if self.num_steps else ()
            self._move_together([index for index in range(len(self._fragments)) if index not in due])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to ``state_dict()`` of the same plan, of both optimizers; for any plan there are checkpoints.

        Raises:
            ValueError: for other groups, or state that was saved without an outer optimizer.
        """
        saved, inner = state_dict["state"], {}
        for number, entry in saved.items():
            own = {key: value for key, value in entry.items() if not key.startswith(OUTER)}
            if own:
                inner[number] = own
        self.inner.load_state_dict({"state": inner, "param_groups": state_dict["param_groups"]})
        self.param_groups = self.inner.param_groups
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, list(self.state)):
            outer = {key: value for key, value in saved.get(number, {}).items() if key.startswith(OUTER)}
            self.state[parameter] = {**self.inner.state.get(parameter, {}), **outer}
        self._note_load()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the inner optimizer's."""
        self.inner.zero_grad(set_to_none)
        self._averaged_for = None

    @torch.no_grad()
    def _move_together(self, fragments: Sequence[int]) -> None:
        if not fragments:
            return
        pieces = {piece.name: piece for piece in self._parallel.owned()}
        frozen = self._agreed(fragments, pieces).frozen
        due = [cell for index in fragments for cell in self._fragments[index]]
        cells = [cell for cell in due if cell.name not in self._settled or cell.name not in frozen]
        names = {cell.name for cell in cells}
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
        self._settle({cell.name for cell in due}, frozen)

    def _agreed(
        self, fragments: Sequence[int], pieces: Mapping[str, Owned], gradients: Iterable[str] = ()
    ) -> Agreement:
        trained = self._in_training(pieces)
        thawed = next((name for name in trained if name not in self._copies), "")
        frozen = [name for name in self._copies if name not in trained]
        bits = self._bits(frozen), self._bits(self._copies.keys() - frozen)
        note = ExchangeNote(self.num_steps, tuple(fragments), *bits, thawed, self._bits(gradients))
        return agreed(note, self._numbers)

    def _bits(self, names: Iterable[str]) -> int:
        return sum(1 << self._numbers[name] for name in names)

    def _settle(self, names: Collection[str], frozen: Collection[str]) -> None:
        """Note which of ``names``, just exchanged, stay as they are; the outer optimizer forgets how these moved."""
        for name in names:
            if name not in frozen:
                self._settled.discard(name)
                continue
            self._settled.add(name)
            if name in self._copies:
                self.outer.state.pop(self._copies[name], None)

    def _in_training(self, pieces: Mapping[str, Owned]) -> list[str]:
        """Names of what this rank holds of the parameters that the inner optimizer has and that are not frozen."""
        of_optimizer = {id(local_of(parameter)) for group in self.inner.param_groups for parameter in group["params"]}
        return [
            name for name, piece in pieces.items() if id(piece.tensor) in of_optimizer and piece.tensor.requires_grad
        ]

    def _copy_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return self._copies.get(parameter.path) if isinstance(parameter, ShardedParameter) else None

    def _count(self, steps: int | None) -> int:
        if steps is not None:
            self.num_steps = steps
        return self.num_steps

    def _note_load(self) -> None:
        """State is loaded, on all ranks: also on one that has nothing to exchange, which is told no step."""
        self._is_resumed = True
        self._settled.clear()  # exchanged once more, which changes nothing where there is no momentum

    def _take_up_load(self) -> None:
        """After a checkpoint was loaded: see that all ranks are at the same step.

        Raises:
            ValueError: on all ranks, if they are not.
        """
        if not self._is_resumed:
            return
        steps = gathered(self.num_steps if self._copies else None)
        if len(set(steps) - {None}) > 1:
            raise ValueError(f"the ranks resumed at steps {steps}: load checkpoints of the same step on all islands")
        self.num_steps, self._is_resumed = next(step for step in steps if step is not None), False


def _part(piece: Owned) -> Part:
    return piece.tensor, piece.offsets


def _checked_exchange(
    parallel: _Trained, inner_steps: int, fragments: int, wire_format: str | None, synchronous_steps: int
) -> CellExchange:
    check_whole_number("synchronous_steps", synchronous_steps, at_least=0)
    if inner_steps < 1 or not 1 <= fragments <= inner_steps:
        raise ValueError(
            f"inner_steps={inner_steps}, fragments={fragments}: H must be at least 1, and of its steps each may "
            "exchange at most one fragment of 1 to H"
        )
    getattr(parallel, "plan", None)  # without a plan there are no shards yet; it raises what to do
    unloaded = next((piece.name for piece in parallel.owned() if piece.tensor.is_meta), None)
    if unloaded is not None:
        raise ValueError(f"{unloaded!r} has no values yet: load or initialise the weights before planner.DiLoCo")
    return CellExchange(wire_format)
