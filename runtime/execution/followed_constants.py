"""Constants of a program on this rank: they follow tensors that a script holds, and changes between calls."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch

from passes.emit.emitted_program import StateSpec
from runtime.mesh.layout import Layout
from runtime.torch_compat.host_state import num_writes

#: Elements up to which a tensor on the host is compared by its values.
_MAX_COMPARED = 4096


@dataclass
class _Constant:
    spec: StateSpec
    local: torch.Tensor
    stamp: Hashable


class FollowedConstants:
    """This rank's parts of a program's constants.

    A script may write into the tensor that a constant came from, or give it other memory; ``follow`` takes that up.

    Args:
        specs: of the constants.

    Attributes:
        local: this rank's part of each, by path; always the same tensors.
    """

    def __init__(self, specs: Iterable[StateSpec], layout: Layout) -> None:
        self._layout = layout
        self._constants = [_Constant(spec, self._part(spec), _stamp(spec.data)) for spec in specs]
        self.local = {constant.spec.path: constant.local for constant in self._constants}

    def follow(self) -> bool:
        """Take up what has changed since the last call; whether anything is known to have.

        Large tensors on the device are taken up anew each time: what is written by way of ``.data`` changes no version.

        Raises:
            ValueError: if a tensor has another shape or dtype than the program was made for.
        """
        changed = False
        for constant in self._constants:
            stamp = _stamp(constant.spec.data)
            if stamp == constant.stamp and self._is_told(constant.spec.data):
                continue
            self._check(constant.spec)
            with torch.no_grad():
                constant.local.copy_(self._part(constant.spec))
            changed |= stamp != constant.stamp
            constant.stamp = stamp
        return changed

    def _is_told(self, tensor: torch.Tensor) -> bool:
        """Whether the stamp tells all changes, or to look at the values each time would take too long."""
        return _is_compared(tensor) or tensor.device != self._layout.device

    def _part(self, spec: StateSpec) -> torch.Tensor:
        return self._layout.split(spec.data.detach(), spec.placement)

    @staticmethod
    def _check(spec: StateSpec) -> None:
        now, dtype = tuple(spec.data.shape), str(spec.data.dtype).removeprefix("torch.")
        if (now, dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"the tensor {spec.path!r}, which forward or loss_fn reads beside the model's weights, was of shape "
                f"{list(spec.shape)} and {spec.dtype} when its program was made, and is of {list(now)} and {dtype} "
                "now: put another tensor in its place, or keep its shape and dtype"
            )


def _is_compared(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() <= _MAX_COMPARED


def _stamp(tensor: torch.Tensor) -> Hashable:
    """What changes when ``tensor`` does, as far as that can be told at once."""
    if tensor.is_meta or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return id(tensor)
    memory = (tensor.data_ptr(), num_writes(tensor), tensor.shape, tensor.dtype)
    return (*memory, _content(tensor)) if _is_compared(tensor) else memory


def _content(tensor: torch.Tensor) -> bytes:
    content: bytes = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return content
