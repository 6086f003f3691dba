"""The tree of parameters and buffers that users see, kept over the plain ones that programs run on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Shard

from passes.torch_compat.module_tables import parameters_of
from runtime.parameters.sharded import AllRanks, ShardedParameter
from runtime.state.exchange import exchange
from runtime.state.owned import Owned
from runtime.state.weight_tree import WeightTree
from runtime.torch_compat.dtensors import dtensor_over, dtensor_spec, local_part


class _Held(Protocol):
    """What a rank holds: ``StepState``."""

    #: The plain tensors.
    weights: WeightTree
    #: Counts how often tensors were cut or replaced.
    version: int

    def owned(self) -> tuple[Owned, ...]: ...


class ParameterTree:
    """The user's parameters (``ShardedParameter``) and buffers under the original names.

    Buffers that every rank holds whole are the programs' own tensors. Of virtual ranks all tensors are.

    Args:
        stages: pipeline stages of the model; with several, a rank has the parameters of its own, and hooks on them
            would not see complete gradients.
        ranks: all ranks that train the model; None for one alone.
        shown: parameters that users hold already, by name: they become those of this tree, the same objects.

    Attributes:
        weights: the tree.
    """

    def __init__(
        self,
        held: _Held,
        *,
        stages: int = 1,
        ranks: AllRanks | None = None,
        shown: Mapping[str, ShardedParameter] | None = None,
    ) -> None:
        self._held = held
        self._ranks = ranks
        self._shown_before = dict(shown or {})
        self._of_stage = stages > 1
        self._version = -1
        self._parameters: dict[int, ShardedParameter] = {}
        self._slots: list[tuple[dict[str, Any], str, ShardedParameter]] = []
        #: Of every parameter its part as users see it, and the plain one whose memory that is.
        self._memory: list[tuple[ShardedParameter, torch.Tensor, torch.Tensor]] = []
        #: Of every parameter that the plan trains.
        self._trained: list[tuple[str, torch.Tensor]] = []
        #: Every parameter, each once.
        self._seen: list[torch.Tensor] = []
        #: Those that a pipeline trains and that someone has frozen since: while a step runs, and at other times none.
        self._dropped: list[ShardedParameter] = []
        #: Of every module: its parameters, and its submodules with their number when that was looked up.
        self._tables: list[dict[str, Any]] = []
        self._modules: list[tuple[dict[str, Any], int]] = []
        self.weights = WeightTree()
        self.update()
        for parameter in self._shown_before.values():
            parameter.of_another_rank = True

    def shown(self) -> dict[str, ShardedParameter]:
        """The users' parameters by name."""
        return {parameter.path: parameter for parameter in self._parameters.values()}

    def shown_by_every_name(self) -> dict[str, ShardedParameter]:
        """The same, tied ones under each of their names."""
        names = {id(piece.tensor): (piece.name, *piece.aliases) for piece in self._held.owned()}
        return {name: shown for key, shown in self._parameters.items() for name in names.get(key, ())}

    def update(self) -> None:
        """Take up what was cut, moved or replaced; parameters stay the same objects, for their optimizers."""
        owned = self._held.owned()
        self._version = self._held.version
        self._slots = []
        for piece in owned:
            for name in (piece.name, *piece.aliases):
                self.weights.put(name, self._shown(piece), persistent=piece.persistent)
                self._note_slot(name)
        kept = [self._parameters.get(id(piece.tensor), piece.tensor) for piece in owned if piece.kind == "parameter"]
        self._seen = list({id(one): one for one in kept}.values())
        self._note_memory()

    def follow(self) -> None:
        """Take up changes since the last call, cheaply where there are none."""
        if self._version != self._held.version:
            self.update()
        moved = [one for one, part, owner in self._memory if part.data_ptr() != owner.data_ptr()]
        for parameter in moved:
            parameter.refresh()
        if moved:
            self._note_memory()

    def drop_gradients(self) -> None:
        """Set all gradients to None, also of parameters that someone has added, without showing them as DTensors."""
        if not self._tables or any([len(modules) != count for modules, count in self._modules]):  # noqa: C419 no calls
            nodes = list(self.weights.modules())
            self._tables = [node._parameters for node in nodes]
            self._modules = [(node._modules, len(node._modules)) for node in nodes]
        for parameter in self._parameters.values():
            parameter.drop_gradient()
        for table in self._tables:
            for tensor in table.values():
                if type(tensor) is not ShardedParameter and tensor is not None:
                    tensor.grad = None

    def take_gradients(self) -> None:
        """Hand gradients that autograd left at the DTensors to the plain parameters."""
        for parameter in self._parameters.values():
            parameter.take_gradient()

    def trained(self) -> list[torch.Tensor]:
        """The parameters as users see them, each once, without the frozen; what was cut anew is taken up first."""
        self.follow()
        dropped = set(map(id, self._dropped))
        return [one for one in self._seen if one.requires_grad and id(one) not in dropped]

    @contextmanager
    def stages_as_planned(self) -> Iterator[None]:
        """Run a pipeline's step as it was planned: gradients of what was frozen since are computed, and dropped.

        Stages exchange gradients of values, and of tied weights, whose owners another stage need not know as frozen.
        """
        if self._of_stage:
            parameters = self._parameters.values()
            self._dropped = [one for one in parameters if one.planned_to_train and not one.owner.requires_grad]
        before = [one.owner.grad for one in self._dropped]
        for one in self._dropped:
            one.owner.grad = None
            one.owner.requires_grad = True
        try:
            yield
        finally:
            for one, gradient in zip(self._dropped, before):
                one.owner.requires_grad = False
                one.owner.grad = gradient
            self._dropped = []

    def frozen(self) -> tuple[str, ...]:
        """Names of parameters that the plan trains and that someone has frozen since; none of a pipeline."""
        if self._of_stage:
            return ()
        return tuple([path for path, owner in self._trained if not owner.requires_grad])

    def frozen_or_thawed(self) -> tuple[tuple[str, bool], ...]:
        """Names of parameters that someone has frozen or thawed since the plan was made, and whether they train."""
        parameters = self._parameters.values()
        return tuple((one.path, one.requires_grad) for one in parameters if one.requires_grad != one.planned_to_train)

    def check(self) -> None:
        """Refuse parameters that someone has replaced, or has thawed under a plan that cannot follow.

        Raises:
            ValueError: naming one.
        """
        for table, name, parameter in self._slots:
            if self._of_stage and parameter.requires_grad and not parameter.planned_to_train:
                raise ValueError(
                    f"{parameter.path!r} was frozen when the step was planned, and is not any more: set requires_grad "
                    "before planner.compile, or call parallel.replan(target, optimizer) to train it from now on"
                )
            if table.get(name) is not parameter:
                raise ValueError(
                    f"{parameter.path!r} of this parallel module was replaced by another tensor, which it would not "
                    "train: write values into the parameter (load_full_state_dict, copy_; load_state_dict without "
                    "assign=True), and wrap the module in no other parallelism (DDP, FSDP, parallelize_module)"
                )

    def _shown(self, piece: Owned) -> torch.Tensor:
        if piece.device_mesh is None:
            return piece.tensor
        if piece.kind == "parameter":
            return self._parameter(piece)
        if any(isinstance(placement, Shard) for placement in piece.placements):
            spec = dtensor_spec(piece.shape, piece.tensor.dtype, piece.device_mesh, piece.placements)
            buffer: torch.Tensor = dtensor_over(DTensor, piece.tensor, spec)
            return buffer
        return piece.tensor

    def _parameter(self, piece: Owned) -> ShardedParameter:
        shown = self._parameters.get(id(piece.tensor))
        if shown is None:
            shown = self._made_of(piece)
            before = self._shown_before.pop(piece.name, None)
            if before is not None:
                exchange(before, shown)
                shown = before
                shown.placed_anew = True
            self._parameters[id(piece.tensor)] = shown
        elif _differs(shown, piece):
            exchange(shown, self._made_of(piece))
        shown.state_on_host = piece.state_on_host
        shown.ranks = self._ranks
        shown.refresh()
        return shown

    def _made_of(self, piece: Owned) -> ShardedParameter:
        return ShardedParameter.of(piece, of_stage=self._of_stage)

    def _note_memory(self) -> None:
        parameters = self._parameters.values()
        self._memory = [(one, local_part(one), one.owner) for one in parameters]
        self._trained = [(one.path, one.owner) for one in parameters if one.planned_to_train]

    def _note_slot(self, path: str) -> None:
        parent, _, name = path.rpartition(".")
        table = parameters_of(self.weights.node(parent))
        parameter = table.get(name)
        if isinstance(parameter, ShardedParameter):
            self._slots.append((table, name, parameter))


def _differs(shown: ShardedParameter, piece: Owned) -> bool:
    return (
        shown.device != piece.tensor.device
        or tuple(shown.placements) != tuple(piece.placements)
        or shown.device_mesh is not piece.device_mesh
    )
