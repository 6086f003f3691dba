"""The parameters and buffers of a parallel module: whole until there is a plan, then this rank's shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from passes.ir.types import I, Placement, R, shard_dim
from passes.plan import Plan
from runtime.initialise import initialised_tensors, still_on_meta
from runtime.layout import Layout, VirtualLayout
from runtime.owned import Owned, is_first_holder, rectangle, torch_placements
from runtime.weights import Weights


class Shards:
    """All tensors of a model by name, with their placements.

    Attributes:
        weights: the tree that holds them, under the original names.
        placements: of every name, aliases included; whole until ``place``.
        version: counts how often tensors were cut or replaced.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self.weights = Weights()
        self.weights.train(model.training)
        self.version = 0
        self.state_names = list(model.state_dict().keys())
        made: dict[int, torch.Tensor] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            self.weights.put(name, made[id(parameter)])
        persistent = set(self.state_names)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            self.weights.put(name, buffer.detach(), persistent=name in persistent)
        self.placements: dict[str, Placement] = {name: self._whole(tensor) for name, tensor in self.items()}
        self.placed = False

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of every parameter and buffer, aliases included."""
        yield from self.weights.named_parameters(remove_duplicate=False)
        yield from self.weights.named_buffers(remove_duplicate=False)

    def _whole(self, tensor: torch.Tensor) -> Placement:
        return (I if tensor.requires_grad else R,) * len(self.layout.mesh.names)

    def place(self, plan: Plan) -> None:
        """Cut every tensor of the first rank as the plan says; those that it does not name stay whole on every rank."""
        distinct = list({id(tensor): tensor for _, tensor in self.items()}.values())
        for tensor, whole in zip(distinct, self.layout.from_first(distinct)):
            names = [other for other, same in self.items() if same is tensor]
            planned = next((plan.states[other] for other in names if other in plan.states), None)
            placement = self._whole(tensor) if planned is None else tuple(planned.placement)
            self._replace(names, self.layout.split(whole.detach(), placement))
            self.placements.update((other, placement) for other in names)
        self.placed = True

    def adopt(self, plan: Plan, known: Plan) -> None:
        """Take up the placements of tensors that ``plan`` names and ``known`` did not use.

        Raises:
            ValueError: if ``plan`` places a tensor of ``known`` in another way.
        """
        for name, planned in plan.states.items():
            if name not in self.placements:
                continue
            placement = tuple(planned.placement)
            if self._same(placement, self.placements[name]):
                continue
            if name in known.states:
                raise ValueError(
                    f"the new plan places {name!r} as {placement}, but it is held as {self.placements[name]}"
                )
            tensor = self.weights.find(name)
            names = [other for other, same in self.items() if same is tensor]
            whole = self.layout.join(tensor, self.placements[name])
            self._replace(names, self.layout.split(whole, placement))
            self.placements.update((other, placement) for other in names)

    def _same(self, first: Placement, second: Placement) -> bool:
        """Whether a rank holds the same in both: R and I differ in the gradient only."""
        return all(size == 1 or a == b or {a, b} == {R, I} for size, a, b in zip(self.layout.mesh.sizes, first, second))

    def _replace(self, names: list[str], local: torch.Tensor) -> None:
        """Put ``local`` in place of the tensor at ``names``; a parameter stays the same object for its optimizer."""
        self.version += 1
        tensor = self.weights.find(names[0])
        if not isinstance(tensor, nn.Parameter):
            for name in names:
                self.weights.put(name, local, persistent=name in self.state_names)
            return
        new = nn.Parameter(local, requires_grad=tensor.requires_grad)
        if type(local) is torch.Tensor and local.is_meta == tensor.is_meta:
            tensor.data = local
        elif type(local) is torch.Tensor:
            torch.utils.swap_tensors(tensor, new)
        else:
            for name in names:
                self.weights.put(name, new)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole tensors under the names of the original's state dict."""
        self._refuse_meta()
        joined: dict[int, torch.Tensor] = {}
        state = {}
        for name in self.state_names:
            tensor = self.weights.find(name)
            if id(tensor) not in joined:
                joined[id(tensor)] = self._joined(tensor, name)
            state[name] = joined[id(tensor)]
        return state

    def owned(self) -> tuple[Owned, ...]:
        """What this rank holds of every tensor, each once."""
        names: dict[int, list[str]] = {}
        tensors: dict[int, torch.Tensor] = {}
        for name, tensor in self.items():
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        persistent = set(self.state_names)
        return tuple(self._owned(tensors[key], known, persistent) for key, known in names.items())

    def _owned(self, tensor: torch.Tensor, names: list[str], persistent: set[str]) -> Owned:
        placement, mesh = self.placements[names[0]], self.layout.mesh
        coordinate = self.layout.coordinate
        shape = list(tensor.shape)
        for size, spmd_type in zip(mesh.sizes, placement):
            dim = shard_dim(spmd_type)
            if dim is not None:
                shape[dim] *= size
        return Owned(
            name=names[0],
            aliases=tuple(names[1:]),
            tensor=tensor,
            shape=tuple(shape),
            offsets=rectangle(tuple(shape), placement, mesh, coordinate)[0],
            kind="parameter" if isinstance(tensor, nn.Parameter) else "buffer",
            trainable=tensor.requires_grad,
            persistent=any(name in persistent for name in names),
            primary=is_first_holder(placement, coordinate),
            virtual_primary=self.layout.marks(lambda place: is_first_holder(placement, place)),
            device_mesh=None if isinstance(self.layout, VirtualLayout) else self.layout.device_mesh,
            placements=torch_placements(placement),
        )

    def full_gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: self._joined(parameter.grad, name)
            for name, parameter in self.weights.named_parameters()
            if parameter.grad is not None
        }

    def _joined(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if not self.placed:
            (whole,) = self.layout.from_first([tensor])
            return whole.detach().clone()
        return self.layout.join(tensor, self.placements[name])

    def load_full_state_dict(self, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """See ``ParallelModule.load_full_state_dict``."""
        unknown = [name for name in state if name not in self.placements]
        given = {id(self.weights.find(name)) for name in state if name in self.placements}
        missing = [name for name in self.state_names if id(self.weights.find(name)) not in given]
        if strict and (unknown or missing):
            raise ValueError(
                f"the state dict does not fit the model: missing {_few(missing)}, unknown {_few(unknown)}; "
                "strict=False takes what fits"
            )
        for name, whole in state.items():
            if name in self.placements:
                self._load(name, whole)

    def _load(self, name: str, whole: torch.Tensor) -> None:
        tensor = self.weights.find(name)
        local = self.layout.split(whole.detach(), self.placements[name]) if self.placed else whole.detach().clone()
        if tuple(local.shape) != tuple(tensor.shape):
            raise ValueError(
                f"{name!r} has shape {list(whole.shape)} in the state dict, which does not fit the model's "
                f"(local part {list(tensor.shape)})"
            )
        local = local.to(tensor.dtype)
        if tensor.is_meta:
            self._replace([other for other, same in self.items() if same is tensor], local)
        else:
            with torch.no_grad():
                tensor.copy_(local)

    def initialise(self, model: nn.Module, *, seed: int, outside_of_state: bool = False) -> None:
        """See ``ParallelModule.initialise``; ``model`` is the original on meta.

        With ``outside_of_state`` only buffers that no state dict holds.
        """
        persistent = set(self.state_names) if outside_of_state else set()
        names = {name for name, tensor in self.items() if tensor.is_meta and name not in persistent}
        for name, whole in initialised_tensors(model, seed=seed, names=names):
            if self.weights.find(name).is_meta:
                self._load(name, whole)

    def _refuse_meta(self) -> None:
        meta = [name for name, tensor in self.items() if tensor.is_meta]
        if meta:
            raise ValueError(still_on_meta(meta, self.state_names))

    def disagreement(self) -> float:
        """Of virtual ranks: the largest difference between those that should hold the same."""
        assert isinstance(self.layout, VirtualLayout)
        return max((self.layout.disagreement(t, self.placements[name]) for name, t in self.items()), default=0.0)

    def check(self) -> None:
        """Raise ValueError if a tensor has no data yet."""
        self._refuse_meta()


def _few(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "none"
