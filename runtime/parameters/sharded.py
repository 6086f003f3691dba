"""Parameters that are DTensors, over the plain parameter that this rank's programs run on.

The plain one is the autograd leaf, so programs pay nothing for what users see: both share memory, and the gradient
that a user reads or sets is the plain one's, as a DTensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle

from cost_models.short_text import fold
from runtime.parameters.tensors import ParameterTensor, of_parameter_over
from runtime.state.owned import Owned
from runtime.torch_compat.dtensors import (
    TensorBase,
    dtensor_over,
    dtensor_spec,
    local_part,
    part_on_mesh,
    set_local_part,
    spec_of,
    use_foreach_on,
)

#: Optimizer state that counts steps or the like: one number for a parameter, whatever its shape.
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
_BASE: Any = TensorBase
_set_gradient = _BASE.grad.__set__


class AllRanks(Protocol):
    """The ranks that train a model, and a reduction over them (``StateGroup``)."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, buffer: torch.Tensor, operation: str = "sum") -> Any: ...

    def wait(self, result: Any) -> Any: ...


class ShardedParameter(ParameterTensor):
    """A parameter as a DTensor: of the whole shape, with the plan's placements, over this rank's ``owner``.

    Optimizers, ``torch.nn.utils`` and ``torch.distributed.checkpoint`` take it as FSDP2's parameters.

    Attributes:
        owner: the plain parameter that this rank's programs run on; its memory is this one's.
        planned_to_train: whether it required a gradient when the model was planned.
        of_another_rank: whether the plan, made at the first call, left it to other pipeline ranks: optimizers drop it.
        state_on_host: whether the plan has its optimizer state in the host's memory.
        left_by_replan: whether another plan left it to other pipeline ranks: optimizers that still have it are refused.
        placed_anew: whether a plan was made after it: state that an optimizer made before may be of another mesh.
        ranks: all ranks that train the model; None for one alone.
    """

    #: What makes ``isinstance(…, nn.Parameter)`` true.
    _is_param = True
    owner: nn.Parameter
    planned_to_train: bool
    of_another_rank: bool = False
    left_by_replan: bool = False
    state_on_host: bool = False
    placed_anew: bool = False
    ranks: AllRanks | None = None
    _shown_gradient: DTensor | None

    @classmethod
    def of(cls, owned: Owned, *, of_stage: bool) -> ShardedParameter:
        """The DTensor over an owned parameter.

        Args:
            of_stage: whether ranks of other pipeline stages have other parameters.
        """
        assert isinstance(owned.tensor, nn.Parameter) and owned.device_mesh is not None
        part = (tuple(owned.tensor.shape), tuple(owned.offsets))
        assert part_on_mesh(owned.shape, owned.device_mesh, owned.placements) == part or not owned.tensor.numel()
        use_foreach_on(ParameterTensor)  # what gradients are: torch's list of classes grows with the first parameter
        spec = dtensor_spec(owned.shape, owned.tensor.dtype, owned.device_mesh, owned.placements)
        parameter: ShardedParameter = dtensor_over(
            cls, owned.tensor.detach(), spec, requires_grad=owned.tensor.requires_grad
        )
        parameter.owner, parameter.path, parameter.of_stage = owned.tensor, owned.name, of_stage
        parameter.planned_to_train = owned.trainable
        parameter._shown_gradient = None
        return parameter

    def placed(self, local: torch.Tensor) -> DTensor:
        """``local``, shaped as ``owner``, as a DTensor of this parameter's placements."""
        spec = spec_of(self)
        if spec.tensor_meta is None or local.dtype != spec.tensor_meta.dtype:
            spec = dtensor_spec(self.shape, local.dtype, self.device_mesh, self.placements)
        return of_parameter_over(local, spec, self)

    def whole_beside(self, whole: torch.Tensor) -> DTensor:
        """``whole``, of any shape and the same on all ranks, as a DTensor on this parameter's mesh."""
        replicated = [Replicate()] * self.device_mesh.ndim
        return of_parameter_over(whole, dtensor_spec(whole.shape, whole.dtype, self.device_mesh, replicated), self)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part, in this parameter's placements, of a DTensor of this parameter's shape.

        Raises:
            ValueError: for a plain tensor, for another shape, and for parts on another mesh.
        """
        if not isinstance(tensor, DTensor) or tensor.shape != self.shape:
            kind = "DTensor" if isinstance(tensor, DTensor) else "plain tensor"
            raise ValueError(
                f"a {kind} of shape {list(tensor.shape)} is no gradient of {self.path!r}, which is a DTensor of shape "
                f"{list(self.shape)}: distribute it first (torch.distributed.tensor.distribute_tensor)"
            )
        if tensor.device_mesh != self.device_mesh:
            return self._part_of_whole(tensor)
        if tensor.placements != self.placements:
            tensor = tensor.redistribute(self.device_mesh, self.placements)
        return tensor.to_local()

    def _part_of_whole(self, tensor: DTensor) -> torch.Tensor:
        """This rank's part of a DTensor that is whole on all ranks of another mesh."""
        if not all(placement.is_replicate() for placement in tensor.placements):
            raise ValueError(
                f"a DTensor of {self.path!r} has parts on the mesh {tensor.device_mesh}, and the parameter on "
                f"{self.device_mesh}: make it whole first (full_tensor), or place it as the parameter is"
            )
        part = tensor.to_local()
        for dim, (size, offset) in enumerate(zip(*part_on_mesh(self.shape, self.device_mesh, self.placements))):
            part = part.narrow(dim, offset, size)
        return part.clone(memory_format=torch.contiguous_format)

    def refresh(self) -> None:
        """Follow ``owner`` to other memory."""
        set_local_part(self, self.owner.detach())

    def drop_gradient(self) -> None:
        """Set the gradient to None without showing it as a DTensor first."""
        _set_gradient(self, None)
        self.owner.grad = self._shown_gradient = None

    def take_gradient(self) -> None:
        """Move a gradient that autograd left at the DTensor itself to ``owner``."""
        gradient = _BASE.grad.__get__(self)
        if gradient is not None:
            _BASE.grad.__set__(self, None)
            local = self.local(gradient)
            self.owner.grad = local if self.owner.grad is None else self.owner.grad + local

    @property
    def grad(self) -> DTensor | None:  # type: ignore[override]
        self.take_gradient()
        local = self.owner.grad
        if local is None:
            self._shown_gradient = None
        elif self._shown_gradient is None or local_part(self._shown_gradient) is not local:
            self._shown_gradient = self.placed(local)
        return self._shown_gradient

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        _BASE.grad.__set__(self, None)
        self._shown_gradient = None  # whose memory would last through the next step
        self.owner.grad = None if gradient is None else self.local(gradient)

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Hold ``values`` in their memory, or in new memory: what was ``data`` before keeps what it is."""
        advice = "its plan was made for it; change the model before planner.compile"
        self.refuse_unlike(values, name=repr(self.path), advice=advice)
        self.owner.data = self.memory_of(values)
        self.refresh()

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return bool(self.owner.requires_grad)

    @requires_grad.setter
    def requires_grad(self, requires_grad: bool) -> None:
        _BASE.requires_grad.__set__(self, requires_grad)
        self.owner.requires_grad = requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> ShardedParameter:  # type: ignore[override]
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[Any], Any]) -> RemovableHandle:  # type: ignore[override]
        self._refuse_hook("register_hook")

        def on_local(local: torch.Tensor) -> torch.Tensor | None:
            changed = hook(self.placed(local))
            return None if changed is None else self.local(changed)

        return self.owner.register_hook(on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], Any]) -> RemovableHandle:  # type: ignore[override]
        self._refuse_hook("register_post_accumulate_grad_hook")
        return self.owner.register_post_accumulate_grad_hook(lambda _: hook(self))

    def _refuse_hook(self, method: str) -> None:
        if self.of_stage:
            raise ValueError(
                f"{method} of {self.path!r}: with a pipeline the gradient of a parameter may be a part of it until the "
                "step ends, and hooks would see that part: change the gradients after train_step instead"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A parameter of its own, which the parallel module does not use."""
        copied = nn.Parameter(self.detach().clone(), requires_grad=self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        words = f"{self.path!r}, shape={list(self.shape)}, placements={self.placements}"
        return f"{fold(f'ShardedParameter({words}), on this rank:')}\n{local_part(self)}"


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a parameter of a parallel module; any other is returned as it is."""
    return parameter.owner if isinstance(parameter, ShardedParameter) else parameter


def as_seen(parameter: torch.Tensor, local: torch.Tensor | None) -> torch.Tensor | None:
    """``local``, shaped as the plain tensor behind a parameter, as users see that parameter's gradient."""
    if local is None or not isinstance(parameter, ShardedParameter):
        return local
    return parameter.placed(local)
