"""DTensors made over a tensor that is there, taken apart, and given to optimizers as lists."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._C import TensorBase
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement
from torch.optim import optimizer as optimizer_module
from torch.utils._foreach_utils import _foreach_supported_types
from torch.utils._python_dispatch import return_and_correct_aliasing

__all__ = [
    "TensorBase",
    "are_subclasses_dispatched",
    "as_dtensors",
    "dtensor_over",
    "dtensor_spec",
    "has_no_rule",
    "has_step_hooks",
    "is_norm_part",
    "local_part",
    "local_parts",
    "part_on_mesh",
    "set_content",
    "set_local_part",
    "spec_of",
    "use_foreach_on",
    "with_sizes_of",
]


def dtensor_spec(
    shape: Sequence[int], dtype: torch.dtype, device_mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensorSpec:
    """How a contiguous DTensor of ``shape`` lies on a mesh."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    meta = TensorMeta(torch.Size(shape), tuple(reversed(strides)) if shape else (), dtype)
    return DTensorSpec(device_mesh, tuple(placements), tensor_meta=meta)


def are_subclasses_dispatched() -> bool:
    """Whether operators on a class derived from DTensor come to its ``__torch_dispatch__``: not in torch 2.11."""
    try:
        DTensor.__torch_dispatch__(lambda: None, (), ())  # type: ignore[arg-type]
    except NotImplementedError:
        return False
    return True


#: What DTensor says, before anything is computed, where no rule says how an operator is cut.
_NO_RULE = re.compile(
    "Sharding propagation failed|does not have a sharding strategy|require placement changes|without redistribution|"
    "not supported with DTensor|unevenly sharded"
)


def has_no_rule(error: Exception) -> bool:
    """Whether an error says that DTensor does not know how to cut an operator: the same on all ranks."""
    return _NO_RULE.search(str(error)) is not None


def as_dtensors() -> contextlib.AbstractContextManager[Any]:
    """Functions called inside do not come to ``__torch_function__`` of tensors' classes."""
    return torch._C.DisableTorchFunctionSubclass()


def dtensor_over(kind: type[DTensor], local: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> Any:
    """A DTensor of class ``kind`` whose part on this rank is ``local`` itself (``from_local`` needs even parts)."""
    if torch.compiler.is_exporting():
        return kind(local, spec, requires_grad=requires_grad)  # type: ignore[call-arg]
    # What ``__init__`` does otherwise is to keep compilers out, which takes as long as to make the tensor.
    return kind.__new__(kind, local, spec, requires_grad=requires_grad)  # type: ignore[call-arg]


def local_part(tensor: DTensor) -> torch.Tensor:
    """This rank's part itself, where ``to_local`` gives a view of it with a history."""
    return tensor._local_tensor


def local_parts(values: Iterable[Any]) -> list[Any]:
    """Every DTensor's part on this rank, and what else there is as it is."""
    return [value._local_tensor if isinstance(value, DTensor) else value for value in values]


def set_local_part(tensor: DTensor, local: torch.Tensor) -> None:
    """Put another part of the same shape into a DTensor."""
    tensor._local_tensor = local


def spec_of(tensor: DTensor) -> DTensorSpec:
    """How a DTensor lies on its mesh."""
    return tensor._spec


def set_content(tensor: DTensor, source: DTensor) -> None:
    """Let ``tensor`` be what ``source`` is, in its place."""
    tensor._local_tensor, tensor._spec = source._local_tensor, source._spec


def with_sizes_of(operator: Any, args: Any, kwargs: Any) -> Any:
    """``args[0]`` with the sizes that an operator in place gives it; what it holds is left as it is."""
    return return_and_correct_aliasing(operator, args, kwargs, args[0])


def is_norm_part(placement: Placement, order: float | None = None) -> bool:
    """Whether parts are norms of parts (of ``order``, if it is given), which make the norm of the whole by powers."""
    return isinstance(placement, _NormPartial) and order in (None, placement.norm_type)


def part_on_mesh(
    shape: Sequence[int], device_mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets of this rank's part of a DTensor."""
    sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), device_mesh, list(placements))
    return tuple(sizes), tuple(offsets)


def use_foreach_on(kind: type[torch.Tensor]) -> None:
    """Let optimizers and clipping work on lists of tensors of class ``kind``, as they do on DTensors."""
    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


def has_step_hooks(optimizer: torch.optim.Optimizer, *, of_all: int) -> bool:
    """Whether someone looks at steps of ``optimizer`` other than the first ``of_all`` who look at all optimizers'."""
    of_every_optimizer = (optimizer_module._global_optimizer_pre_hooks, optimizer_module._global_optimizer_post_hooks)
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or any(len(hooks) != of_all for hooks in of_every_optimizer)
    )
