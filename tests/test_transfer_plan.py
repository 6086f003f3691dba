"""A plan of transfers is a pure function: every needed element comes once, from one who holds it, few between nodes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from passes.ir.types import MeshShape
from runtime.migration.tensor_regions import Region, num_elements, overlap, region_of, without
from runtime.migration.transfer_plan import MovingTensor, TransferPlan, plan_transfers
from runtime.state.owned import rectangle
from runtime.zero.state_pieces import piece_of

SHAPES = ((7, 4), (6,), (4, 6, 2), ())


def _slices(region: Region) -> tuple[slice, ...]:
    return tuple(slice(begin, end) for begin, end in region)


@st.composite
def plans(draw: st.DrawFn, num_ranks: int) -> list[dict[int, Region]]:
    """For each tensor what each rank holds under a random plan: a stage of a pipeline, shards, pieces of ZeRO."""
    size = draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 8) if size <= num_ranks]))
    stages = draw(st.sampled_from([stages for stages in (1, 2, 4) if size % stages == 0]))
    inner = size // stages
    columns = draw(st.sampled_from([columns for columns in (1, 2, 3, 4) if inner % columns == 0]))
    mesh = MeshShape(("dp", "tp"), (inner // columns, columns))
    first = draw(st.integers(0, num_ranks - size))  # more and fewer ranks: the others idle
    held = []
    for shape in SHAPES:
        stage = draw(st.integers(0, stages - 1))
        types = tuple(draw(st.sampled_from(["R", *(f"S({dim})" for dim in range(len(shape)))])) for _ in range(2))
        zero = bool(shape) and types[0] == "R" and draw(st.booleans())
        regions = {}
        for place in range(inner):
            coordinate = divmod(place, columns)
            offsets, sizes = rectangle(shape, types, mesh, coordinate)
            if zero:
                dim, offset, length = piece_of(sizes, mesh.sizes[0], coordinate[0])
                offsets = tuple(at + offset * (number == dim) for number, at in enumerate(offsets))
                sizes = tuple(length if number == dim else one for number, one in enumerate(sizes))
            regions[first + stage * inner + place] = region_of(offsets, sizes)
        held.append(regions)
    return held


@settings(max_examples=30)
@given(st.data())
def test_chains_of_random_plans(data: st.DataObject) -> None:
    """tp, pp, ZeRO and uneven cuts, more and fewer ranks: values arrive, and no byte moves twice or needlessly."""
    num_ranks = data.draw(st.sampled_from([2, 4, 6, 8]))
    ranks_per_node = data.draw(st.sampled_from([2, 4]))
    nodes = [rank // ranks_per_node for rank in range(num_ranks)]
    chain = [data.draw(plans(num_ranks)) for _ in range(3)]
    wholes = [np.arange(np.prod(shape, dtype=int)).reshape(shape) + 1 for shape in SHAPES]
    for before, after in itertools.pairwise(chain):
        tensors = [MovingTensor(name, 8, _as_one(before[name]), after[name]) for name in range(len(SHAPES))]
        plan = plan_transfers(tensors, nodes)
        assert sorted(moved.tensor.name for batch in plan.batches for moved in batch) == list(range(len(SHAPES)))
        least = least_between = 0
        for batch in plan.batches:
            for moved in batch:
                values = wholes[moved.tensor.name]
                arrived = _carried_out(moved.tensor, moved.transfers, values)
                for rank, region in moved.tensor.takers.items():
                    assert np.array_equal(arrived[rank][_slices(region)], values[_slices(region)])
                least += sum(np.sum(_lacking(moved.tensor, values, [rank])) for rank in moved.tensor.takers)
                for node in set(nodes):
                    least_between += np.sum(
                        _lacking(moved.tensor, values, [rank for rank in range(num_ranks) if nodes[rank] == node])
                    )
        assert (plan.num_bytes, plan.bytes_between_nodes) == (8 * least, 8 * least_between)
        assert sum(plan.bytes_by_pair.values()) == plan.num_bytes
        _check_peaks(plan, len(nodes))


def _as_one(held: dict[int, Region]) -> dict[int, tuple[Region, ...]]:
    return {rank: (region,) for rank, region in held.items()}


def _carried_out(tensor: MovingTensor, transfers: tuple, values: np.ndarray) -> dict[int, np.ndarray]:
    """What every rank has of the whole tensor afterwards (0: nothing); nobody sends what it has not."""
    start = {rank: np.zeros_like(values) for rank in {*tensor.holders, *tensor.takers}}
    for rank, regions in tensor.holders.items():
        for region in regions:
            start[rank][_slices(region)] = values[_slices(region)]
    arrived = {rank: state.copy() for rank, state in start.items()}
    for relayed in (False, True):
        for transfer in transfers:
            if transfer.relayed is not relayed:
                continue
            at = _slices(transfer.region)
            source = arrived if relayed else start
            assert np.all(source[transfer.source][at] == values[at])
            assert not np.any(arrived[transfer.destination][at])
            arrived[transfer.destination][at] = values[at]
    return arrived


def _lacking(tensor: MovingTensor, values: np.ndarray, ranks: list[int]) -> np.ndarray:
    """Which elements the ranks need together and none of them holds."""
    needed, held = np.zeros(values.shape, dtype=bool), np.zeros(values.shape, dtype=bool)
    for rank in ranks:
        if rank in tensor.takers:
            needed[_slices(tensor.takers[rank])] = True
        for region in tensor.holders.get(rank, ()):
            held[_slices(region)] = True
    return needed & ~held


def _check_peaks(plan: TransferPlan, num_ranks: int) -> None:
    moved = [one.tensor for batch in plan.batches for one in batch]
    for rank in range(num_ranks):
        totals = (sum(one.old_bytes(rank) for one in moved), sum(one.new_bytes(rank) for one in moved))
        assert plan.larger_shard_bytes[rank] == max(totals) <= plan.peak_bytes[rank]


def test_layers_that_change_places_do_not_pile_up() -> None:
    """Two ranks swap eight layers each: neither ever holds more than its shard and one layer."""
    layer: Region = ((0, 100),)
    tensors = [MovingTensor(place, 4, {place // 8: (layer,)}, {1 - place // 8: layer}) for place in range(16)]
    plan = plan_transfers(tensors, [0, 0])
    assert plan.bytes_by_pair == {(0, 1): 3200, (1, 0): 3200}
    assert plan.peak_bytes == (3200 + 400, 3200 + 400)


def test_what_a_node_lacks_enters_it_once() -> None:
    """Four ranks of another node need the same tensor: one gets it over the slow link, and passes it on."""
    whole: Region = ((0, 10), (0, 3))
    plan = plan_transfers([MovingTensor("w", 2, {0: (whole,)}, dict.fromkeys(range(5), whole))], [0, 1, 1, 1, 1])
    assert (plan.num_bytes, plan.bytes_between_nodes) == (4 * 60, 60)
    with pytest.raises(ValueError, match="no rank holds"):
        plan_transfers([MovingTensor("w", 2, {0: (((0, 9), (0, 3)),)}, {1: whole})], [0, 1])


@given(st.lists(st.tuples(*(st.integers(0, 6) for _ in range(4))), min_size=1, max_size=3))
def test_what_is_left_of_a_region_and_what_is_shared_are_the_region(bounds: list[tuple[int, ...]]) -> None:
    first = tuple((min(a, b), max(a, b)) for a, b, _, _ in bounds)
    second = tuple((min(c, d), max(c, d)) for _, _, c, d in bounds)
    counts = np.zeros((6,) * len(bounds), dtype=int)
    shared = overlap(first, second)
    for part in (*without(first, second), *([shared] if shared is not None else [])):
        counts[_slices(part)] += 1
    assert counts.sum() == num_elements(first) == counts[_slices(first)].sum() and counts.max(initial=0) <= 1
