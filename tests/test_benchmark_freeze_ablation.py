"""The simulated ablation of freezing: when the cache is read, what that costs, how the machines are cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from benchmarks.freeze_ablation import (
    BOXES,
    Variant,
    cache_passes,
    cached_layers,
    fastest,
    published_microbatches,
    resized,
)
from cost_models import Cluster

FROZEN = [0, 4, 7, 9, 9]


def _timeline(cached: list[int]) -> Any:
    """Ten steps an epoch, each as many seconds as there are layers of twelve to compute."""
    phases = [
        SimpleNamespace(
            phase=SimpleNamespace(num_steps=10),
            plan=SimpleNamespace(step=SimpleNamespace(costs=SimpleNamespace(simulated=float(12 - layers)))),
        )
        for layers in cached
    ]
    return SimpleNamespace(phases=phases, seconds=sum(10.0 * (12 - layers) for layers in cached))


def test_the_cache_is_read_from_the_epoch_on_that_is_best() -> None:
    assert cached_layers(FROZEN, None) == [0] * 5 and cached_layers(FROZEN, 3) == [0, 0, 0, 7, 9]
    # Epoch 1 writes what epoch 2 reads, epochs 2 and 3 read and write, the last one reads.
    assert cache_passes(cached_layers(FROZEN, 2)) == [0, 1, 2, 2, 1]
    assert cache_passes(cached_layers(FROZEN, 4)) == [0, 0, 0, 1, 1]

    beside, apart = Variant("", caches=True), Variant("", caches=True, prefetches=False)
    # 600 s without: 20 epochs' layers less from epoch 2 on are 200 s, for six passes; 160 s from 3 on, for four.
    for variant, pass_seconds, start, seconds in (
        (apart, 1.0, 2, 406.0),
        (apart, 25.0, 3, 540.0),
        (apart, 60.0, None, 600.0),
        (beside, 15.0, 2, 400.0),
        (beside, 60.0, 2, 400.0 + 40.0 + 70.0 + 30.0),
        (Variant(""), 1.0, None, 600.0),
    ):
        best = fastest(FROZEN, variant, _timeline, pass_seconds)
        assert (best.first_cached, best.seconds) == (start, seconds), (variant, pass_seconds)


def test_layouts_and_machines_of_the_paper() -> None:
    boxes = Cluster.from_toml(BOXES)
    variants = [Variant("", shortens=shortens, replicates=replicates) for shortens, replicates in
                ((False, False), (True, False), (True, True))]  # fmt: skip
    layouts = [[variant.layout(boxes, 12, frozen) for frozen in (0, 4, 7, 9, 10, 11)] for variant in variants]
    assert layouts == [
        [(8, 2)] * 6,
        [(8, 2), (8, 2), (4, 2), (2, 2), (2, 2), (1, 2)],
        [(8, 2), (8, 2), (4, 4), (2, 8), (2, 8), (1, 16)],
    ]
    assert [(level.group_size, level.shared_by) for level in resized(boxes, 4).levels] == [(2, 1), (4, 2)]
    assert resized(boxes, 16) == boxes
    assert [published_microbatches(8, 400), published_microbatches(4, 200), published_microbatches(2, 100)] == [
        8,
        20,
        10,
    ]
