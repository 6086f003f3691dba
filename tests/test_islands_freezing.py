"""Islands that train by DiLoCo with frozen layers, and what they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.islands_freezing_worker import Shifted, freeze
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks
from tests.small_models import mlp_batch, seeded, squared_error

PLANS = ({"dp": 2}, {"tp": 2})
RESUMED = ({"dp": 2}, {"pp": 2, "dp": 1})


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    payload = {"plans": PLANS, "resumed": RESUMED, "folder": str(tmp_path_factory.mktemp("islands"))}
    return run_on_ranks("islands_freezing_worker", 4, payload, timeout=PATIENCE)


def diloco_alone() -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Both islands in one process: ``first`` is frozen from the start, ``layers.0`` after five steps; H = 4.

    What is frozen after five steps is exchanged after the eighth, and no more.
    """
    models = [seeded(Shifted) for _ in range(2)]
    for model in models:
        freeze(model, ("first.",))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    outer = {name: value.detach().clone() for name, value in models[0].named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in outer.items()}
    losses: list[list[float]] = [[], []]
    for step in range(13):
        for index, (model, optimizer) in enumerate(zip(models, optimizers)):
            if step == 5:
                freeze(model, ("layers.0.",))
            batch = mlp_batch(seed=1000 * index + step)
            loss = squared_error(model(batch[0]), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[index].append(loss.item())
        if step + 1 in (4, 8, 12, 13):
            for name in outer:
                if name.startswith("first.") or (name.startswith("layers.0.") and step + 1 > 8):
                    continue
                change = sum(outer[name] - dict(model.named_parameters())[name].detach() for model in models) / 2
                momentum[name] = 0.9 * momentum[name] + change
                outer[name] = outer[name] - 0.7 * (change + 0.9 * momentum[name])
                for model in models:
                    dict(model.named_parameters())[name].data.copy_(outer[name])
    return losses, models[0].state_dict()


def test_all_islands_begin_with_the_first_ones_frozen_weights_and_buffers(result: dict[str, Any]) -> None:
    first, second = result["begins"]
    assert first == second
    assert first["shift"] == [1.0] * 8


def test_frozen_layers_stay_and_are_not_exchanged(result: dict[str, Any]) -> None:
    losses, state = diloco_alone()
    assert result["losses"] == [pytest.approx(one, rel=1e-9) for one in losses]
    for weights in (result["weights"], result["resumed weights"]):
        assert weights[0] == weights[1]  # to the last bit
        for name, value in state.items():
            torch.testing.assert_close(
                torch.tensor(weights[0][name], dtype=torch.float64), value, rtol=1e-9, atol=1e-12
            )
    sizes = {name: value.numel() for name, value in Shifted().named_parameters() if not name.startswith("first.")}
    late = sum(size for name, size in sizes.items() if name.startswith("layers.0."))
    # Of eight bytes; four exchanges, the last two of them without what was frozen meanwhile.
    assert result["bytes"] == 8 * (4 * sum(sizes.values()) - 2 * late)


def test_a_checkpoint_and_a_state_dict_go_on_where_layers_were_frozen(result: dict[str, Any]) -> None:
    whole = [pytest.approx(one[6:], rel=1e-9) for one in result["losses"]]
    assert result["again"] == whole
    assert result["resumed"] == whole


def test_what_would_part_the_islands_is_refused(result: dict[str, Any]) -> None:
    assert "DiLoCo cannot go on under another plan: islands exchange the shards" in result["replan"]
    assert "meet after [13, 13, 14, 14] steps" in result["steps"]
    assert "is frozen on some ranks and trains on others" in result["differing"]
