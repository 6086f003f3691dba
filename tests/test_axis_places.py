"""Shardings are shared by layouts whose axes have the same routes, and by no others."""

from __future__ import annotations

from typing import Any

import pytest

from cost_models import Cluster, CostModel
from planner.whole_step.candidates.mesh_layout import layouts
from planner.whole_step.costs.level_one import LevelOne


@pytest.mark.parametrize("name", ["dgx-h100:12", "dgx-a100-80g:6", "8x-rtx4090:4", "tpu-v4:64"])
def test_axes_share_a_place_exactly_if_they_are_priced_alike(name: str) -> None:
    cluster, nothing = Cluster.parse(name), Any
    level_one = LevelOne(cluster, nothing, nothing)
    spans: dict[tuple[object, ...], Any] = {}
    for layout in layouts(cluster, {}):
        prices = CostModel(cluster, layout.sizes)
        for axis, size in layout.sizes.items():
            if size > 1:
                place = (size, level_one._place(size, layout.stride(axis)))
                assert spans.setdefault(place, prices.spans(axis)) == prices.spans(axis)
    distinct = {(size, of_place) for (size, _), of_place in spans.items()}
    assert len(distinct) == len(spans)
