"""Rotary position embedding (Su et al., "RoFormer", 2021).

Pairs of elements are turned: ``(a, b) -> (a·cos_a - b·sin_a, b·cos_b + a·sin_b)``, with each element's own cos and sin.
The gradient is turned back by the transposed rotation: ``(a, b) -> (a·cos_a + b·sin_b, b·cos_b - a·sin_a)``, so nothing
but cos and sin is kept for it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from runtime.kernels.library import (
    WIDE,
    differentiable,
    differentiable_again,
    gradients_of,
    in_dtype,
    promoted,
    register,
    wide_dtype,
)
from runtime.kernels.rotary_kernels import Rotation, rotate

#: Up to so many elements, fewer operators are faster than fewer temporaries.
_FEW = 2**13


def rotary(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first entries of each row of ``input``; the others pass through.

    Args:
        input: ``[..., width]``, in any layout; the result is laid out likewise, with whole rows.
        cos, sin: ``[..., rotated]`` with ``rotated <= width`` even; broadcast against the other dims of ``input``.
        interleaved: pairs are the entries 2i and 2i + 1 (as in GPT-J) instead of i and i + rotated / 2 (as in Llama).

    Returns:
        ``input``'s shape, rounded once to the type to which the three promote.

    Raises:
        ValueError: if the shapes do not fit.
    """
    check(input, cos, sin)
    result: torch.Tensor = _forward(input, cos, sin, interleaved)
    return result


def check(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raises ValueError unless cos and sin can rotate the input."""
    for name, table in (("cos", cos), ("sin", sin)):
        if not 0 < table.dim() <= input.dim() or not _broadcasts(table.shape[-2::-1], input.shape[-2::-1]):
            raise ValueError(
                f"{name} is {tuple(table.shape)} and the input {tuple(input.shape)}: expected all dims but the last to "
                "broadcast to the input's; unsqueeze the dim of the heads"
            )
    rotated = cos.shape[-1]
    if sin.shape[-1] != rotated or rotated % 2 or rotated > input.shape[-1]:
        raise ValueError(
            f"cos and sin give {rotated} and {sin.shape[-1]} entries of a row of {input.shape[-1]}: expected the same "
            "even number, at most the row's"
        )


def _broadcasts(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Whether sizes, the last dim's first, broadcast to others; of a table of one dim there are none."""
    return all(size in (1, other) for size, other in zip(sizes, others))


def _pairs(tensor: torch.Tensor, rotated: int, *, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return tensor[..., 0:rotated:2], tensor[..., 1:rotated:2]
    first, second = _first_entries(tensor, rotated).chunk(2, -1)
    return first, second


def _first_entries(tensor: torch.Tensor, count: int) -> torch.Tensor:
    return tensor if tensor.shape[-1] == count else tensor[..., :count]


def like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Room for a rotated tensor: laid out as that is, so that a later reshape copies nothing, but with whole rows."""
    room = torch.empty_like(tensor, dtype=dtype)
    return room if room.stride(-1) == 1 else tensor.new_empty(tensor.shape, dtype=dtype)


def aten_rotate(
    inputs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    *,
    dtypes: Sequence[torch.dtype],
) -> list[torch.Tensor]:
    """``inputs`` rotated, in ``dtypes``, laid out as they were."""
    dtype = cos.dtype
    if dtype in WIDE and sin.dtype is dtype and all(_is_few(tensor, cos) for tensor in inputs):
        signed, turned = _signed(sin, rotation), _turned_pairs if rotation.interleaved else _turned_halves
        return [
            in_dtype((tensor * cos).addcmul_(turned(tensor), signed), dtype_of_result)
            for tensor, dtype_of_result in zip(inputs, dtypes)
        ]
    return [
        _rotated(tensor, cos, sin, rotation, dtype=dtype_of_result)
        for tensor, dtype_of_result in zip(inputs, dtypes, strict=True)
    ]


def _is_few(tensor: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether fewer operators are faster than fewer temporaries, and whole rows of the tables' dtype are rotated."""
    shape = tensor.shape
    return (
        tensor.dtype is cos.dtype
        and shape[-1] == cos.shape[-1]
        and tensor.stride(-1) == 1
        and 0 < tensor.numel() <= _FEW
    )


def _rotated(
    input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotation: Rotation, *, dtype: torch.dtype
) -> torch.Tensor:
    computed = wide_dtype(input, cos, sin)
    input, cos, sin = in_dtype(input, computed), in_dtype(cos, computed), in_dtype(sin, computed)
    rotated = cos.shape[-1]
    out = like(input, computed)
    torch.mul(_first_entries(input, rotated), cos, out=_first_entries(out, rotated))
    first, second = _pairs(input, rotated, interleaved=rotation.interleaved)
    out_first, out_second = _pairs(out, rotated, interleaved=rotation.interleaved)
    first_sin, second_sin = _pairs(sin, rotated, interleaved=rotation.interleaved)
    if rotation.transposed:
        out_first.addcmul_(second, second_sin)
        out_second.addcmul_(first, first_sin, value=-1)
    else:
        out_first.addcmul_(second, first_sin, value=-1)
        out_second.addcmul_(first, second_sin)
    if rotated < input.shape[-1]:
        out[..., rotated:] = input[..., rotated:]
    return in_dtype(out, dtype)


def _turned_halves(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the entries of every pair swapped."""
    return tensor.roll(tensor.shape[-1] // 2, -1)


def _turned_pairs(tensor: torch.Tensor) -> torch.Tensor:
    """The same for pairs of neighbouring entries."""
    return tensor.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _signed(sin: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """What the other entry of a pair is multiplied by: ``(-sin_a, sin_b)`` or, transposed, ``(sin_b, -sin_a)``."""
    signed = sin * _signs(sin.shape[-1], rotation.interleaved, sin.dtype, sin.device)
    if not rotation.transposed:
        return signed
    return _turned_pairs(signed) if rotation.interleaved else _turned_halves(signed)


@functools.cache
def _signs(width: int, interleaved: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """-1 for the first entries of pairs, 1 for the second."""
    signs = torch.tensor([-1.0, 1.0], dtype=dtype, device=device)
    return signs.repeat(width // 2) if interleaved else signs.repeat_interleave(width // 2)


def triton_rotate(
    inputs: Sequence[torch.Tensor],
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotation: Rotation,
    *,
    dtypes: Sequence[torch.dtype],
) -> list[torch.Tensor]:
    """As ``aten_rotate`` of each, in one kernel."""
    outputs = [like(tensor, dtype) for tensor, dtype in zip(inputs, dtypes, strict=True)]
    rotate(inputs, outputs, cos, sin, rotation)
    return outputs


def _aten(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    return aten_rotate([input], cos, sin, Rotation(interleaved), dtypes=[promoted(input, cos, sin)])[0]


def _triton(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    dtypes = [promoted(input, cos, sin)]
    return triton_rotate([input], cos, sin, Rotation(interleaved), dtypes=dtypes)[0]


def _shape(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    return like(input, promoted(input, cos, sin))


def _aten_backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, dtype: torch.dtype
) -> torch.Tensor:
    return aten_rotate([grad], cos, sin, Rotation(interleaved, transposed=True), dtypes=[dtype])[0]


def _triton_backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, dtype: torch.dtype
) -> torch.Tensor:
    return triton_rotate([grad], cos, sin, Rotation(interleaved, transposed=True), dtypes=[dtype])[0]


def _shape_backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, dtype: torch.dtype
) -> torch.Tensor:
    return like(grad, dtype)


def _tables(
    grad: torch.Tensor, input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of cos and sin, in the type computed in. Tables are seldom learned, so torch's operators will do.

    Terms lie in the order of their dims before they are summed: the sum is the same however ``grad`` lies in memory.
    """
    dtype, rotated = wide_dtype(grad, input, cos, sin), cos.shape[-1]
    grad, input = grad[..., :rotated].to(dtype), input[..., :rotated].to(dtype)
    first, second = _pairs(input, rotated, interleaved=interleaved)
    grad_cos, grad_sin = (torch.empty_like(grad, memory_format=torch.contiguous_format) for _ in range(2))
    first_sin, second_sin = _pairs(grad_sin, rotated, interleaved=interleaved)
    first_grad, second_grad = _pairs(grad, rotated, interleaved=interleaved)
    torch.mul(first_grad, second, out=first_sin).neg_()
    torch.mul(second_grad, first, out=second_sin)
    torch.mul(grad, input, out=grad_cos)
    return grad_cos.sum_to_size(cos.shape).contiguous(), grad_sin.sum_to_size(sin.shape).contiguous()


def _shapes_tables(
    grad: torch.Tensor, input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = wide_dtype(grad, input, cos, sin)
    return cos.new_empty(cos.shape, dtype=dtype), sin.new_empty(sin.shape, dtype=dtype)


def _definition(input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    rotated = cos.shape[-1]
    first, second = _pairs(input, rotated, interleaved=interleaved)
    swapped = torch.stack((-second, first), -1).flatten(-2) if interleaved else torch.cat((-second, first), -1)
    return torch.cat((input[..., :rotated] * cos + swapped * sin, input[..., rotated:]), -1)


def plain_backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, dtype: torch.dtype
) -> torch.Tensor:
    """As the backward operator, to be differentiated: whatever was rotated, its gradient is the same."""
    computed = wide_dtype(grad, cos, sin)
    upstream = grad.to(computed)
    (result,) = gradients_of(
        lambda input: _definition(input, cos.to(computed), sin.to(computed), interleaved),
        (torch.zeros_like(upstream),),
        upstream,
    )
    assert result is not None
    return result.to(dtype)


def _plain_tables(
    grad: torch.Tensor, input: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor | None, ...]:
    dtype = wide_dtype(grad, input, cos, sin)
    tables = cos.to(dtype), sin.to(dtype)
    return gradients_of(lambda cos, sin: _definition(input.to(dtype), cos, sin, interleaved), tables, grad.to(dtype))


_forward = register(
    "rotary(Tensor input, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor",
    aten=_aten,
    triton=_triton,
    shapes=_shape,
)
_backward = register(
    "rotary_backward(Tensor grad, Tensor cos, Tensor sin, bool interleaved, ScalarType dtype) -> Tensor",
    aten=_aten_backward,
    triton=_triton_backward,
    shapes=_shape_backward,
)
_tables_backward = register(
    "rotary_tables_backward(Tensor grad, Tensor input, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor)",
    aten=_tables,
    triton=_tables,
    shapes=_shapes_tables,
)


def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep cos and sin; what was rotated only where these are learned."""
    *tensors, cos, sin, ctx.interleaved = inputs
    ctx.dtypes = [tensor.dtype for tensor in tensors]
    ctx.learned = any(ctx.needs_input_grad[len(tensors) : len(tensors) + 2])
    ctx.save_for_backward(cos, sin, *(tensors if ctx.learned else ()))


def table_gradients(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of cos and sin, from those of all that they rotated."""
    if not ctx.learned:
        return None, None
    cos, sin, *tensors = ctx.saved_tensors
    parts = [
        _tables_backward(grad, tensor, cos, sin, ctx.interleaved) for grad, tensor in zip(grads, tensors, strict=True)
    ]
    grad_cos, grad_sin = (sum(part[1:], start=part[0]) for part in zip(*parts, strict=True))
    return grad_cos.to(cos.dtype), grad_sin.to(sin.dtype)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    cos, sin = ctx.saved_tensors[:2]
    grad_input = _backward(grad, cos, sin, ctx.interleaved, *ctx.dtypes) if ctx.needs_input_grad[0] else None
    return grad_input, *table_gradients(ctx, grad), None


differentiable(_forward, save=save, backward=_gradient)
differentiable_again(_backward, plain_backward)
differentiable_again(_tables_backward, _plain_tables)
