"""Rotary embedding against its definitions: half-rotated as in Llama, interleaved as in GPT-J."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import kernels
from tests.cells import cells
from tests.kernels_behaviour import check_autocast, check_behaviour, check_layouts
from tests.kernels_harness import DTYPES, IMPLEMENTATIONS, check_accuracy, random_tensor

layouts = pytest.mark.parametrize("interleaved", (False, True))
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
EVERY = tuple(itertools.product(DTYPES, (False, True), IMPLEMENTATIONS))
#: Every two values together.
PAIRS = tuple(
    (dtype, interleaved, IMPLEMENTATIONS[(number + interleaved) % len(IMPLEMENTATIONS)])
    for number, dtype in enumerate(DTYPES)
    for interleaved in (False, True)
)
cases = pytest.mark.parametrize(
    ("dtype", "interleaved", "implementation"), cells(PAIRS, [cell for cell in EVERY if cell not in PAIRS]), ids=str
)


def _rotate_half(tensor: torch.Tensor) -> torch.Tensor:
    first, second = tensor.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _rotate_every_two(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack((-tensor[..., 1::2], tensor[..., ::2]), dim=-1).flatten(-2)


def _definition(tensor: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    turned, rest = tensor[..., : cos.shape[-1]], tensor[..., cos.shape[-1] :]
    other = _rotate_every_two(turned) if interleaved else _rotate_half(turned)
    return torch.cat((turned * cos + other * sin, rest), dim=-1)


def _pair_definition(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return _definition(query, cos, sin, interleaved), _definition(key, cos, sin, interleaved)


def _tables(shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [random_tensor(shape, 10), random_tensor(shape, 11)]


@cases
@settings(max_examples=10, deadline=None)
@given(
    sizes=st.tuples(*[st.sampled_from((0, 1, 2, 5))] * 3),
    shared=st.tuples(*[st.booleans()] * 3),
    half=st.sampled_from((1, 2, 3, 8)),
    rest=st.sampled_from((0, 1, 4)),
)
def test_rotary(
    implementation: str,
    dtype: torch.dtype,
    interleaved: bool,
    sizes: tuple[int, ...],
    shared: tuple[bool, ...],
    half: int,
    rest: int,
) -> None:
    table_sizes = [1 if one else size for size, one in zip(sizes, shared, strict=True)]
    check_accuracy(
        lambda query, cos, sin: kernels.rotary(query, cos, sin, interleaved),
        lambda query, cos, sin: _definition(query, cos, sin, interleaved),
        [random_tensor((*sizes, 2 * half + rest), 0), *_tables((*table_sizes, 2 * half))],
        dtype=dtype,
        implementation=implementation,
    )


@cases
@settings(max_examples=6, deadline=None)
@given(heads=st.tuples(*[st.sampled_from((0, 1, 3, 8))] * 2), rest=st.sampled_from((0, 2)))
def test_rotary_pair(
    implementation: str, dtype: torch.dtype, interleaved: bool, heads: tuple[int, int], rest: int
) -> None:
    query, key = (random_tensor((2, count, 5, 6 + rest), count) for count in heads)
    check_accuracy(
        lambda query, key, cos, sin: kernels.rotary_pair(query, key, cos, sin, interleaved),
        lambda query, key, cos, sin: _pair_definition(query, key, cos, sin, interleaved),
        [query, key, *_tables((1, 1, 5, 6))],
        dtype=dtype,
        implementation=implementation,
    )


@implementations
@pytest.mark.parametrize(
    ("query", "key", "table"),
    (
        ((2, 3, 4), (2, 3, 4), (3, 4)),
        ((2, 3, 4), (3, 4), (3, 4)),
        ((2, 3, 4), (5, 3, 4), (4,)),
        ((2, 3, 4), (5, 2, 4), (4,)),
        ((2, 3, 2, 3, 6), (2, 3, 2, 3, 6), (3, 1, 3, 4)),
        ((6,), (4,), (4,)),
    ),
)
def test_shapes_of_pairs(
    implementation: str, query: tuple[int, ...], key: tuple[int, ...], table: tuple[int, ...]
) -> None:
    check_accuracy(
        kernels.rotary_pair,
        _pair_definition,
        [random_tensor(query, 0), random_tensor(key, 1), *_tables(table)],
        dtype=torch.float64,
        implementation=implementation,
    )


@implementations
def test_many_heads_and_positions(implementation: str) -> None:
    tensors = [random_tensor((1, 40, 3, 66), 0), random_tensor((1, 2, 3, 66), 1), *_tables((3, 64))]
    check_accuracy(kernels.rotary_pair, _pair_definition, tensors, dtype=torch.float64, implementation=implementation)
    flat = [random_tensor((300, 8), 0), *_tables((300, 8))]
    check_accuracy(kernels.rotary, _definition, flat, dtype=torch.float64, implementation=implementation)


def _as_projected(tensor: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, length, width]`` as a view of ``[batch, length, heads, width]``."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@layouts
def test_layouts_give_the_same(interleaved: bool) -> None:
    query, key = (random_tensor((2, heads, 5, 8), heads).float() for heads in (4, 2))
    cos, sin = (table.float() for table in _tables((2, 1, 5, 8)))
    packed = torch.cat((query, key), dim=1).transpose(1, 2).contiguous().split((4, 2), dim=2)
    turned = torch.stack((cos, sin), dim=-1).unbind(-1)
    straight = [query, key, cos, sin, interleaved]
    for others in (
        [_as_projected(query), _as_projected(key), cos, sin, interleaved],
        [query, _as_projected(key), cos.expand(2, 1, 5, 8), sin, interleaved],
        [*(part.transpose(1, 2) for part in packed), *turned, interleaved],
        [query.transpose(2, 3).contiguous().transpose(2, 3), key, cos, sin, interleaved],
    ):
        check_layouts(kernels.rotary_pair, straight, others, IMPLEMENTATIONS)


@implementations
def test_what_is_laid_out_by_length_stays_so(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_KERNELS", implementation)
    query = _as_projected(random_tensor((2, 4, 5, 8), 0)).requires_grad_()
    cos, sin = _tables((5, 8))
    out = kernels.rotary(query, cos, sin)
    (grad,) = torch.autograd.grad(out, [query], torch.empty_like(out).fill_(1.0))
    assert out.stride() == query.stride() == grad.stride()


def test_only_tables_are_kept() -> None:
    saved_shapes: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved_shapes.append(tuple(tensor.shape))
        return tensor

    query, (cos, sin) = random_tensor((2, 4, 5, 8), 0).requires_grad_(), _tables((5, 8))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kernels.rotary_pair(query, query, cos, sin)
    assert saved_shapes == [(5, 8), (5, 8)]


@implementations
def test_dtypes_promote(implementation: str) -> None:
    check_accuracy(
        lambda query, cos, sin: kernels.rotary(query, cos.float(), sin.float()),
        lambda query, cos, sin: _definition(query, cos.float(), sin.float()),
        [random_tensor((3, 8), 0), *_tables((3, 8))],
        dtype=torch.float64,
        implementation=implementation,
    )


@layouts
def test_behaviour(interleaved: bool) -> None:
    query, key = (_as_projected(random_tensor((2, heads, 5, 8), heads)).float() for heads in (4, 2))
    tables = [table.float() for table in _tables((1, 1, 5, 6))]
    one, both = [query, *tables, interleaved], [query, key, *tables, interleaved]
    check_behaviour(kernels.rotary, torch.ops.meshwright.rotary.default, one)
    check_behaviour(kernels.rotary_pair, torch.ops.meshwright.rotary_pair.default, both)
    check_autocast(kernels.rotary, _definition, one)
    check_autocast(kernels.rotary_pair, _pair_definition, both)


def test_shapes_that_do_not_fit_are_refused() -> None:
    query = torch.ones(2, 4, 5, 8)
    with pytest.raises(ValueError, match=r"cos is \(2, 5, 8\) and the input \(2, 4, 5, 8\): expected all dims"):
        kernels.rotary(query, torch.ones(2, 5, 8), torch.ones(2, 5, 8))
    with pytest.raises(ValueError, match=r"give 10 and 10 entries of a row of 8: expected the same even number"):
        kernels.rotary(query, torch.ones(10), torch.ones(10))
    with pytest.raises(ValueError, match=r"give 3 and 3 entries"):
        kernels.rotary(query, torch.ones(3), torch.ones(3))
