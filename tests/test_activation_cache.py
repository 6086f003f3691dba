"""Outputs of frozen layers are kept per sample, and training goes on as on one device that freezes then, too."""

from __future__ import annotations

import pytest
import torch

from planner.activation_cache.sample_ring import RingSizes, SampleRing
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

FIRST, SECOND = ["embedding", "layers.0"], ["layers.1"]


def test_a_training_whose_frozen_layers_are_cached_equals_one_device_and_computes_each_sample_once() -> None:
    """Shuffled, over epochs, in micro-batches: dp2 with ZeRO 3, tp2, the boundary moves, then dp2 again.

    Behind the second boundary outputs are made of those behind the first, in their places: the cache has room for
    twenty of sixteen.
    """
    payload = {
        "plans": [
            {"pp": 1, "dp": 2, "tp": 1, "num_microbatches": 2},
            {"pp": 1, "dp": 2, "tp": 1, "zero": 3, "num_microbatches": 2},
            {"pp": 1, "dp": 1, "tp": 2},
            {"pp": 1, "dp": 2, "tp": 1},
        ],
        "after": ["layers.0", "layers.1", "as before"],
        "frozen": [FIRST, SECOND, []],
        "accumulate": 1,
        "local": False,
        "price": True,
    }
    result = run_on_ranks("activation_cache_worker", 2, payload, timeout=PATIENCE)
    assert set(result["errors"]) == {"loss", "weights"}
    assert max(result["errors"].values()) < 1e-9
    read, computed, converted = [16, 0, 0], [0, 16, 0], [0, 0, 16]
    assert result["counts"] == [[0, 0, 0], computed, read, converted, read, read, read, computed]
    seconds, cached, reading, converting, after = result["prices"]
    assert (after == "layers.1") is (cached + reading < seconds) and 0 < cached < seconds and reading > 0
    assert cached + reading < converting < seconds  # one layer less than all that are frozen
    assert result["slow"] is None
    refused = result["refused"]
    assert "depends on 'embedding.weight', which trains" in refused["trains"]
    assert "no module 'layers.9'" in refused["no module"]
    assert "draws random numbers: put frozen layers into evaluation mode" in refused["draws"]
    assert "depends on the others of its batch" in refused["mixes"]


def test_a_pipeline_with_accumulation_and_local_samples() -> None:
    payload = {
        "plans": [{"pp": 2, "dp": 1, "tp": 1, "num_microbatches": 2}] * 2,
        "after": ["layers.1"],
        "frozen": [FIRST + SECOND],
        "accumulate": 2,
        "local": True,
    }
    result = run_on_ranks("activation_cache_worker", 2, payload, timeout=PATIENCE)
    assert max(result["errors"].values()) < 1e-9
    assert result["counts"] == [[0, 0, 0], [0, 16, 0], [16, 0, 0]]


def test_a_rank_that_joins_reads_what_others_have_kept() -> None:
    """2 → 3 → 2 ranks of data: each sample is computed once, and made deeper once; the first to leave was at work."""
    result = run_on_ranks("cache_joining_worker", 3, {}, timeout=PATIENCE)
    assert max(max(errors.values()) for errors in result["errors"]) < 1e-9
    computed, read, made, nothing = [0, 12, 0], [12, 0, 0], [0, 0, 12], [0, 0, 0]
    assert result["counts"] == [
        [computed, read, made, read],
        [computed, read, made, nothing],
        [nothing, read, made, read],
    ]


def test_the_oldest_rows_are_overwritten_and_other_processes_see_it() -> None:
    keys = [bytes([number]) * 16 for number in range(6)]
    rows = torch.arange(6, dtype=torch.uint8)[:, None].expand(6, 8)
    ring = SampleRing.create(RingSizes(8, memory_slots=2, disk_slots=2), None)
    other = SampleRing.opened(ring.address)
    assert other is not None
    ring.write(keys[:3], rows[:3])
    other.write(keys[2:5], rows[2:5])
    for each in (ring, other):
        assert each.read(keys[:1]) is None
        assert torch.equal(each.read(keys[1:5]), rows[1:5])
    ring.write(keys, rows)
    assert other.read(keys[1:2]) is None and torch.equal(other.read(keys[5:]), rows[5:])


def test_rows_take_the_places_of_those_that_they_were_made_of() -> None:
    """Also for a process that has not looked since more rows were written than there are places."""
    keys = [bytes([number + 1]) * 16 for number in range(12)]
    rows = torch.arange(12, dtype=torch.uint8)[:, None].expand(12, 8)
    ring = SampleRing.create(RingSizes(8, memory_slots=2, disk_slots=2), None)
    other = SampleRing.opened(ring.address)
    assert other is not None
    ring.write(keys[:4], rows[:4])
    assert other.has(keys[:4]) == [True] * 4
    ring.write(keys[4:6], rows[4:6], replaced=[keys[2], keys[0]])
    for each in (ring, other):
        assert each.has(keys[:6]) == [False, True, False, True, True, True]
        kept = each.read([keys[5], keys[1], keys[4], keys[3]])
        assert kept is not None and kept[:, 0].tolist() == [5, 1, 4, 3]
    ring.write(keys[6:11], rows[6:11], replaced=[keys[5], keys[6], keys[7], keys[8], keys[9]])
    assert other.has(keys) == [number in (1, 3, 4, 10) for number in range(12)]
    ring.write(keys[11:], rows[11:], replaced=[keys[0]])  # which is there no more: in the place of the oldest
    kept = other.read(keys[11:])
    assert kept is not None and kept[:, 0].tolist() == [11] and other.has(keys[10:11]) == [False]


def test_no_room_is_an_error_that_says_so() -> None:
    with pytest.raises(
        ValueError, match=r"no room for .* bytes in .*, which memory_bytes of the activation cache needs"
    ):
        SampleRing.create(RingSizes(2**40, memory_slots=2**14, disk_slots=0), None)


def test_a_trainer_freezes_by_the_policy_and_reads_the_cache_where_that_pays() -> None:
    """Shuffled epochs with a short last batch, clipped; stopped after five epochs and resumed under another plan."""
    result = run_on_ranks("freezing_trainer_worker", 2, {}, timeout=PATIENCE)
    assert result["losses"] == [21, 21]
    assert set(result["errors"]) == {"loss", "weights", "evaluation"}
    assert max(result["errors"].values()) < 1e-9
    assert result["frozen"] == [result["frozen alone"][2], result["frozen alone"][3]] == [1, 4]
    (hits, misses, trains), slow, tied = result["counts"]
    assert hits > 0 and misses > 0 and not trains
    assert slow is None  # a cache that takes a second for each byte
    assert tied == [2, None]  # frozen layers read an embedding that trains: they are computed
    assert "layers were frozen when the checkpoint was written: give the trainer the same freeze=" in result["refused"]
