"""Which samples each data group reads: arithmetic that must hold for every size, seed and number of groups."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.data.order import Order, Sampler
from runtime.data.permutation import LISTED, Permutation

SIZES = st.one_of(st.integers(1, 200), st.integers(LISTED - 2, LISTED + 2), st.integers(LISTED, 3 * LISTED))


@st.composite
def epochs(draw: st.DrawFn) -> tuple[int, int, int]:
    """Samples, global batch, and a number of groups that divides the batch."""
    num_groups, share = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    return draw(st.integers(1, 100)), num_groups * share, num_groups


def batches(num_samples: int, batch_size: int, num_groups: int, **options: object) -> list[list[int]]:
    """Real samples of every global batch: the parts of all groups put together."""
    start = options.pop("start", 0)
    last = options.pop("last", "pad")
    parts = []
    for group in range(num_groups):
        order = Order(batch_size, group, num_groups, last)
        parts.append(list(Sampler(order, num_samples, shuffle=True, seed=5, epoch=2, start=start)))
    return [[index for part in step for index in part.indices[: part.num_real]] for step in zip(*parts, strict=True)]


@settings(max_examples=40, deadline=None)
@given(size=SIZES, seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
def test_every_sample_has_one_place(size: int, seed: int, epoch: int) -> None:
    permutation = Permutation(size, seed=seed, epoch=epoch)
    assert sorted(permutation(0, size)) == list(range(size))


@settings(max_examples=40, deadline=None)
@given(size=SIZES, data=st.data())
def test_a_stretch_of_an_order_is_that_of_the_whole(size: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    assert Permutation(size, seed=1, epoch=0)(start, stop) == Permutation(size, seed=1, epoch=0)(0, size)[start:stop]


def test_small_orders_are_all_equally_likely() -> None:
    seen = Counter(tuple(Permutation(4, seed=seed, epoch=0)(0, 4)) for seed in range(24 * 100))
    chi_squared = sum((seen[order] - 100) ** 2 / 100 for order in seen)
    assert len(seen) == 24
    assert chi_squared < 49.7  # 23 degrees of freedom: one run in a thousand lies above


@pytest.mark.parametrize("size", [1000, 3 * LISTED])
def test_where_a_sample_goes_says_nothing_about_its_neighbour(size: int) -> None:
    order = Permutation(size, seed=0, epoch=0)(0, size)
    rising = sum(first < second for first, second in pairwise(order)) / size
    distance = sum(abs(place - index) for place, index in enumerate(order)) / size**2
    # Four standard deviations of a random order.
    assert rising == pytest.approx(1 / 2, abs=4 * (12 * size) ** -0.5)
    assert distance == pytest.approx(1 / 3, abs=4 * (22.5 * size) ** -0.5)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(Permutation(50, seed=seed, epoch=epoch)(0, 50)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_a_trillion_samples_need_no_list() -> None:
    indices = Permutation(10**12, seed=0, epoch=0)(7 * 10**11, 7 * 10**11 + 1000)  # eight terabytes if it were listed
    assert len(set(indices)) == 1000 and max(indices) < 10**12


@settings(max_examples=150, deadline=None)
@given(epochs())
def test_all_groups_together_read_each_sample_once(epoch: tuple[int, int, int]) -> None:
    num_samples = epoch[0]
    assert sorted(chain.from_iterable(batches(*epoch))) == list(range(num_samples))


@settings(max_examples=150, deadline=None)
@given(epochs())
def test_a_global_batch_does_not_depend_on_the_number_of_groups(epoch: tuple[int, int, int]) -> None:
    num_samples, batch_size, num_groups = epoch
    assert batches(num_samples, batch_size, num_groups) == batches(num_samples, batch_size, 1)


@settings(max_examples=150, deadline=None)
@given(epoch=epochs(), data=st.data())
def test_the_rest_of_an_epoch_is_the_same_from_anywhere(epoch: tuple[int, int, int], data: st.DataObject) -> None:
    num_samples, batch_size, num_groups = epoch
    whole = batches(num_samples, batch_size, num_groups)
    done = data.draw(st.integers(0, len(whole)))
    assert batches(num_samples, batch_size, num_groups, start=min(done * batch_size, num_samples)) == whole[done:]


@settings(max_examples=150, deadline=None)
@given(epochs())
def test_parts_are_equal_and_filled_at_their_end(epoch: tuple[int, int, int]) -> None:
    num_samples, batch_size, num_groups = epoch
    for group in range(num_groups):
        sampler = Sampler(Order(batch_size, group, num_groups), num_samples, shuffle=True, seed=0)
        parts = list(sampler)
        assert len(parts) == len(sampler) == -(-num_samples // batch_size)
        assert all(len(part.indices) == batch_size // num_groups for part in parts)
        assert all(max(part.indices) < num_samples for part in parts)
        assert all(part.padded_epoch == (num_samples % batch_size != 0) for part in parts)


def test_ten_samples_by_four_in_two_groups() -> None:
    first, second = (list(Sampler(Order(4, group, 2), 10, shuffle=False, seed=0)) for group in (0, 1))
    assert [part.indices for part in first] == [(0, 1), (4, 5), (8, 9)]
    assert [part.indices for part in second] == [(2, 3), (6, 7), (8, 9)]
    assert [part.num_real for part in first] == [2, 2, 2]
    assert [part.num_real for part in second] == [2, 2, 0]


def test_what_is_left_out_is_only_the_end() -> None:
    assert batches(10, 4, 2, last="drop") == batches(10, 4, 2)[:2]
    assert Order(4, last="drop").num_dropped(10) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, "positive"),
        ({"batch_size": 2.0}, "whole number"),
        ({"batch_size": 6, "num_groups": 4}, "multiple of 4"),
        ({"batch_size": 4, "last": "skip"}, "pad, short, whole, drop"),
        ({"batch_size": 4, "group": 2, "num_groups": 2}, "0..1"),
    ],
)
def test_batches_that_cannot_be_cut(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Order(**options)


def test_a_short_batch_must_be_shared_equally() -> None:
    assert batches(10, 4, 2, last="short") == batches(10, 4, 1)
    with pytest.raises(ValueError, match="pad"):
        batches(11, 4, 2, last="short")
