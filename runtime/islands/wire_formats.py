"""What crosses a slow link: numbers of fewer bits than the parameters', with a stated error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

#: Elements that share one scale in ``int8``.
BLOCK = 256


@dataclass(frozen=True)
class WireFormat:
    """One way to send numbers: ``encode`` to bytes, ``decode(bytes, count, dtype)`` back."""

    name: str
    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor, int, torch.dtype], torch.Tensor]


def _cast(dtype: torch.dtype) -> WireFormat:
    def decode(sent: torch.Tensor, count: int, result: torch.dtype) -> torch.Tensor:
        return sent.view(dtype).to(result)

    return WireFormat(str(dtype).removeprefix("torch."), lambda flat: flat.to(dtype).view(torch.uint8), decode)


def _encode_int8(flat: torch.Tensor) -> torch.Tensor:
    num_blocks = -(-flat.numel() // BLOCK)
    blocks = torch.nn.functional.pad(flat.float(), (0, num_blocks * BLOCK - flat.numel())).view(num_blocks, BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    rounded = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
    return torch.cat([scales.view(torch.uint8).view(-1), rounded.view(-1)[: flat.numel()].view(torch.uint8)])


def _decode_int8(sent: torch.Tensor, count: int, result: torch.dtype) -> torch.Tensor:
    num_blocks = -(-count // BLOCK)
    # A copy: bytes at the beginning of a message need not lie where numbers of four bytes may.
    scales = sent[: 4 * num_blocks].clone().view(torch.float32)
    values = sent[4 * num_blocks :].view(torch.int8).to(result)
    return values * scales.to(result).repeat_interleave(BLOCK)[:count]


#: By name. Largest error of an element: a relative 2⁻⁸ (bfloat16), 2⁻¹¹ (float16, of numbers from 6e-5 to 65504), and
#: 1/254 of the largest element of its block of 256 (int8, of numbers that are finite).
WIRE_FORMATS = {
    **{wire.name: wire for wire in map(_cast, (torch.float32, torch.bfloat16, torch.float16))},
    "int8": WireFormat("int8", _encode_int8, _decode_int8),
}
