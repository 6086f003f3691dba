"""Parameters and buffers of other pipeline stages: what is said, and shown, of them on a rank that has them not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


#: The pipeline stages that have the tensor at a path, counted from 0.
StagesOf = Callable[[str], Sequence[int]]


def elsewhere(tensor: torch.Tensor, path: str, stages_of: StagesOf) -> BufferElsewhere:
    """What is shown of a buffer that this rank has not.

    Raises:
        AttributeError: for a parameter.
    """
    if isinstance(tensor, nn.Parameter):
        raise AttributeError(missing_here(path, stages_of(path)))
    return BufferElsewhere.of(tensor, path, stages_of(path))


def missing_here(path: str, stages: Sequence[int]) -> str:
    """Where a tensor is, and how to come to its value.

    Args:
        stages: that have it, counted from 0.
    """
    where = " and ".join(str(stage + 1) for stage in stages)
    return (
        f"{path} is on the ranks of another pipeline stage, not on this one: stage {where} has it. Compute with it "
        "there, or with parallel.full_state_dict(), which all ranks call together; what the loss depends on goes into "
        "forward or loss_fn"
    )


class BufferElsewhere(torch.Tensor):
    """A buffer of another stage: a script that runs on all ranks may write it, as its owners do; it has no values."""

    _path: str
    _stages: tuple[int, ...]

    @classmethod
    def of(cls, meta: torch.Tensor, path: str, stages: Sequence[int]) -> BufferElsewhere:
        """The buffer at ``path`` as ``meta``, which has its shape and dtype."""
        buffer = meta.detach().as_subclass(cls)
        buffer._path, buffer._stages = path, tuple(stages)
        return buffer

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<buffer {self._path!r}, {list(self.shape)} {self.dtype}: {missing_here(self._path, self._stages)}>"

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        buffer = next((one for one in (*args, *kwargs.values()) if isinstance(one, BufferElsewhere)), None)
        if buffer is None:  # inside of a list
            return super().__torch_function__(function, kinds, args, kwargs)
        name = getattr(function, "__name__", "")
        if function == _SET_DATA and args[0] is buffer:
            return _check_data(buffer, args[1])
        if name.endswith("_") and not name.startswith("__") and args and args[0] is buffer:
            return buffer
        try:
            result = super().__torch_function__(function, kinds, args, kwargs)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise ValueError(missing_here(buffer._path, buffer._stages)) from error
        if isinstance(result, BufferElsewhere):
            result._path, result._stages = buffer._path, buffer._stages
        return result


def _check_data(buffer: BufferElsewhere, new: torch.Tensor) -> None:
    """Refuse new values of another shape or dtype, as the buffer's owners do."""
    if (new.shape, new.dtype) != (buffer.shape, buffer.dtype):
        raise ValueError(
            f"buffer {buffer._path!r} is {list(buffer.shape)} of {buffer.dtype}, and cannot become {list(new.shape)} "
            f"of {new.dtype}: programs were made for it"
        )
