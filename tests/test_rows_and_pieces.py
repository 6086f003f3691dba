"""Tensors cut into pieces, put together, written part by part and looked up by row: what a graph keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import planner
from tests.capture_parity import assert_parity
from tests.test_capture_passes import check, ops


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y: torch.cat(y.split(2)), []),
        (lambda y: torch.stack(y.unbind(1), 1), []),
        (lambda y: torch.cat(y.unbind()), ["aten.reshape.default"]),
        (lambda y: torch.cat(y.split(2)[::-1]), ["aten.split_with_sizes.default", "aten.cat.default"]),
        (lambda y: torch.cat(y.split(1)[:3]), ["aten.split_with_sizes.default", "aten.cat.default"]),
        (lambda y: torch.cat(y.split(2), 1), ["aten.split_with_sizes.default", "aten.cat.default"]),
        (lambda y: torch.cat(y.unbind(1)), ["aten.unbind.int", "aten.cat.default"]),
    ],
)
def test_all_pieces_put_together_are_the_tensor(
    function: Callable[[torch.Tensor], torch.Tensor], expected: list[str]
) -> None:
    assert check(function, 4, 6) == expected


PLACES = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 0, 1], [0, 0, 1, 1, 0]], dtype=torch.bool)


def _scattered(y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return y.masked_scatter(places.unsqueeze(-1), y[:, :2].flatten(0, 1) * 2)


def _scattered_in_place(y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return y.clone().masked_scatter_(places.unsqueeze(-1).expand_as(y), y[:, :2].exp())


def _set(y: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    result = y.clone()
    result[places] = y[:, :2].reshape(6, 4).exp()
    return result


@pytest.mark.parametrize("function", [_scattered, _scattered_in_place, _set])
@pytest.mark.parametrize("other_numbers", [False, True])
def test_as_many_rows_placed_in_each_sample_keep_samples_apart(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], other_numbers: bool
) -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5, 4, dtype=torch.float64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return function(self.weight * 2, ids == 7).square().sum()

    places = PLACES.clone()
    if other_numbers:
        places[0, 0], places[1, 0] = True, False
    graph = assert_parity(Places(), args=(torch.where(places, 7, 1),))
    scatters = {"aten.masked_scatter.default", "aten.index_put.default"}
    assert bool(scatters & set(ops(graph))) == other_numbers


def test_a_tensor_written_part_by_part_is_its_parts_side_by_side() -> None:
    def write(y: torch.Tensor, split: int) -> torch.Tensor:
        result = y.new_zeros(y.shape)
        result[:, split:] = y[:, :-split].exp()
        result[:, :2] = y[:, -2:]
        return result

    assert {"aten.cat.default", "aten.slice_scatter.default"} & set(check(lambda y: write(y, 2), 3, 6)) == {
        "aten.cat.default"
    }
    assert "aten.slice_scatter.default" in check(lambda y: write(y, 1), 3, 6)  # entry 1 is written twice
    assert "aten.slice_scatter.default" in check(lambda y: write(y, 3), 3, 6)  # entry 2 is never written


@pytest.mark.parametrize(
    ("function", "looked_up"),
    [
        (lambda y: y[torch.arange(2)[:, None], torch.arange(3)], False),
        (lambda y: y[torch.arange(2)[:, None, None, None], torch.arange(3)], False),
        (lambda y: y[torch.arange(2), torch.arange(3)[:, None]], False),
        (lambda y: y[torch.arange(2)[:, None], torch.arange(1, 3)[None]], False),
        (lambda y: y[torch.arange(2)[:, None], torch.arange(2, 3)], False),
        (lambda y: y[torch.arange(2)[None], torch.arange(3)[:, None], torch.arange(8)[:, None, None]], False),
        (lambda y: y[torch.arange(2)], False),
        (lambda y: y[torch.arange(2)[:, None].expand(2, 5), torch.arange(1)], False),
        (lambda y: y[torch.arange(2), torch.arange(2)], True),
        (lambda y: y[torch.arange(2)[:, None], torch.arange(0, 3, 2)], True),
        (lambda y: y[:, torch.arange(3)[:, None], torch.arange(8)[None] // 2], True),
    ],
)
def test_a_look_up_of_rows_one_after_the_other_is_a_view(
    function: Callable[[torch.Tensor], torch.Tensor], looked_up: bool
) -> None:
    assert (not {"aten.index.Tensor", "aten.gather.default"}.isdisjoint(check(function, 2, 3, 8))) is looked_up


def _written(y: torch.Tensor, indices: tuple[torch.Tensor, ...], value: torch.Tensor, *, adds: bool = False) -> Any:
    return y.clone().index_put_(indices, value, accumulate=adds)


#: What is written at the places of a mask that weights decide.
FILLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda y: _written(y, torch.where(y.sum(-1) > 0), y.new_tensor(0.5)),
    "entries": lambda y: _written(y, torch.where(y > 0), y.mean()),
    "a vector in rows": lambda y: _written(y, torch.where(y.sum(-1) > 0), y[0, 0]),
    "a vector of one row": lambda y: _written(y, torch.where(y.sum(-1) > 0), y[0, :1]),
    "rows of one dim": lambda y: _written(y, ((y.sum((1, 2)) > 0).nonzero().squeeze(1),), y[:1].exp()),
    "added": lambda y: _written(y, torch.where(y.sum(-1) > 0), y[1, 1], adds=True),
    "none": lambda y: _written(y, torch.where(y.sum(-1) > 1e9), y.new_tensor(0.5)),
}


@pytest.mark.parametrize("name", FILLS)
def test_one_value_at_the_places_of_a_mask_is_a_choice_by_the_mask(name: str) -> None:
    operators = set(check(FILLS[name], 3, 5, 4))
    assert "aten.where.self" in operators
    assert not operators & {"aten.index_put.default", "aten.nonzero_static.default"}


class LossOfOneElement(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(x).square().mean(0)}


def test_a_loss_of_one_element_is_trained_on() -> None:
    """As ``backward`` takes it."""
    torch.manual_seed(0)
    assert planner.verify(LossOfOneElement(), "dp=2", batch={"x": torch.randn(8, 4)}).ok


def _set_at(y: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    result = y.clone()
    result[index] = value
    return result


def best(y: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """The place along a dim of [3, 5, 4] that weights decide, a tensor without dims."""
    return y.sum([other for other in range(3) if other != dim]).argmax()


PLACED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a row": lambda y: y[best(y)],
    "a column": lambda y: y[:, best(y, 1)],
    "from the end": lambda y: y[..., best(y, 2) - 4],
    "two": lambda y: y[best(y), :, best(y, 2)],
    "beside numbers and new dims": lambda y: y[None, 1, best(y, 1), None, ::2],
    "beside a tensor": lambda y: y[best(y), torch.tensor([0, 2, 2])],
    "each of several": lambda y: torch.stack([y[:, place] for place in y.sum((0, 2)).topk(3)[1]]),
    "select": lambda y: y.select(-2, best(y, 1)),
    "narrow": lambda y: torch.narrow(y, 1, best(y, 1).clamp(max=3), 2),
    "a number written": lambda y: _set_at(y, best(y), 0.5),
    "a row written": lambda y: _set_at(y, (slice(None), best(y, 1)), y[:, 0].exp()),
    "a row written, spread": lambda y: _set_at(y, (Ellipsis, best(y, 1), slice(None)), y[0, 0]),
    "behind a number": lambda y: _set_at(y, (1, best(y, 1)), y[0, 0]),
    "two written": lambda y: _set_at(y, (best(y), slice(None), best(y, 2)), y.mean()),
    "from the end, written": lambda y: _set_at(y, (slice(1, 3), best(y, 1) - 5), y[1:, 0]),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_place_that_weights_decide_is_looked_up(name: str) -> None:
    check(PLACED[name], 3, 5, 4)


def test_a_place_that_the_inputs_decide_is_a_number() -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))

        def forward(self, lengths: torch.Tensor) -> torch.Tensor:
            return self.weight[:, lengths.max() - 1].square().sum()

    assert "aten.index.Tensor" not in ops(assert_parity(Last(), args=(torch.tensor([2, 4, 1]),)))


def test_a_call_whose_error_the_model_catches_is_not_there() -> None:
    def reshaped(y: torch.Tensor) -> torch.Tensor:
        try:
            return y.reshape(5, -1)
        except RuntimeError:
            return y.exp()

    assert check(reshaped, 4, 6) == ["aten.exp.default"]


@pytest.mark.parametrize("sizes", [(5, 5), (3, 6), (6, 3)])
def test_a_diagonal_is_filled(sizes: tuple[int, int]) -> None:
    assert "aten.masked_fill.Scalar" in check(lambda y: (y * 2).fill_diagonal_(0.5), *sizes)
