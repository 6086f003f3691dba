"""Cuts of a row of costs: the best one equals brute force, and the figures known for a vision transformer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.pipeline_ilp.cuts import greedy_partition, partition

COSTS = st.lists(st.integers(0, 50) | st.floats(0, 50), min_size=1, max_size=12)


def bottleneck(costs: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[begin:end]) for begin, end in itertools.pairwise([0, *cuts, len(costs)]))


def brute_force(costs: list[float], num_stages: int) -> float:
    return min(bottleneck(costs, cuts) for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1))


@settings(max_examples=100, deadline=None)
@given(COSTS, st.integers(1, 4))
def test_partition_equals_brute_force(costs: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    cuts, largest = partition(costs, num_stages)
    assert largest == pytest.approx(brute_force(costs, num_stages), rel=1e-9, abs=1e-9)
    assert bottleneck(costs, cuts) == pytest.approx(largest, rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(COSTS, st.integers(1, 12))
def test_both_rules_give_contiguous_stages_that_are_not_empty(costs: list[float], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    best = partition(costs, num_stages)[1]
    for rule in (partition, greedy_partition):
        cuts, largest = rule(costs, num_stages)
        ends = [0, *cuts, len(costs)]
        assert len(cuts) == num_stages - 1
        assert all(begin < end for begin, end in itertools.pairwise(ends))
        assert largest == pytest.approx(bottleneck(costs, cuts), rel=1e-9, abs=1e-9)
        assert largest >= best * (1 - 1e-9)


def test_many_units_are_cut_in_time_that_grows_with_their_number() -> None:
    cuts, largest = partition([1.0] * 1000, 64)
    assert len(cuts) == 63
    assert largest == 16.0


@pytest.mark.parametrize(("costs", "num_stages"), [([1.0, 2.0], 3), ([1.0], 0), ([1.0, -1.0], 1)])
def test_impossible_cuts_are_refused(costs: list[float], num_stages: int) -> None:
    for rule in (partition, greedy_partition):
        with pytest.raises(ValueError, match=r"expected 1 to|negative"):
            rule(costs, num_stages)


def vit_sub_layers() -> list[float]:
    """Parameters of ViT-B/16 with 100 classes: embedding, then attention and MLP with their norms, then the head."""
    import torch

    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=100))

    def parameters(*modules: torch.nn.Module) -> float:
        return float(sum(parameter.numel() for module in modules for parameter in module.parameters()))

    sub_layers = [
        size
        for layer in model.vit.layers
        for size in (
            parameters(layer.attention, layer.layernorm_before),
            parameters(layer.mlp, layer.layernorm_after),
        )
    ]
    ends = parameters(model.vit.embeddings), parameters(model.vit.layernorm, model.classifier)
    assert sum(sub_layers) + sum(ends) == parameters(model)
    return [ends[0], *sub_layers, ends[1]]


def test_vision_transformer_over_eight_stages() -> None:
    costs = vit_sub_layers()
    assert round(partition(costs, 8)[1] / 1e6, 3) == 11.890
    assert round(greedy_partition(costs, 8)[1] / 1e6, 3) == 14.176
