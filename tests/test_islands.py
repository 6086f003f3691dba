"""Islands that train by DiLoCo compute what the paper says, under any plans; each parameter is sent once in H steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from runtime.islands.outer_state import JointState
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks
from tests.small_models import Mlp, mlp_batch, seeded, squared_error

H, FRAGMENTS, STEPS, SAVED = 4, 3, 11, 5
#: Plans of the two islands, and those under which they go on from a checkpoint.
PLANS = ({"dp": 2}, {"tp": 2})
RESUMED = ({"pp": 2, "dp": 1}, {"dp": 2, "zero": 3})
#: Three synchronous steps, and two rounds of two behind them.
SYNCHRONOUS_START = {"options": {"inner_steps": 2, "synchronous_steps": 3}, "steps": 7, "max_norm": 0.5}
COUNTED = (({"dp": 2}, None), ({"tp": 2}, None), ({"dp": 2}, "bfloat16"))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("islands")
    payload = {"H": H, "fragments": FRAGMENTS, "steps": STEPS, "saved": SAVED, "plans": PLANS, "resumed": RESUMED}
    payload["synchronous start"] = SYNCHRONOUS_START
    return run_on_ranks("islands_worker", 4, {**payload, "counted": COUNTED, "folder": str(folder)}, timeout=PATIENCE)


def diloco_alone(fragments: dict[str, int]) -> tuple[list[list[float]], list[dict[str, torch.Tensor]], Any]:
    """Both islands in one process, by the paper's equations; fragments by parameter name."""
    models = [seeded(Mlp) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    outer = {name: value.detach().clone() for name, value in models[0].named_parameters()}
    momentum = {name: torch.zeros_like(value) for name, value in outer.items()}
    losses: list[list[float]] = [[], []]

    def meet(name: str) -> None:
        change = sum(outer[name] - dict(model.named_parameters())[name].detach() for model in models) / 2
        momentum[name] = 0.9 * momentum[name] + change
        outer[name] = outer[name] - 0.7 * (change + 0.9 * momentum[name])
        for model in models:
            dict(model.named_parameters())[name].data.copy_(outer[name])

    for step in range(STEPS):
        for index, (model, optimizer) in enumerate(zip(models, optimizers)):
            batch = mlp_batch(seed=1000 * index + step)
            loss = squared_error(model(batch[0]), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[index].append(loss.item())
        for name, fragment in fragments.items():
            if step + 1 in {0: (4, 8), 1: (3, 7, 11), 2: (2, 6, 10)}[fragment]:
                meet(name)
    before = [copy.deepcopy(model.state_dict()) for model in models]
    for name, fragment in fragments.items():
        if fragment != 1:  # which has met after the last step
            meet(name)
    return losses, before, [model.state_dict() for model in models]


def fragments_by_name() -> dict[str, int]:
    """``first`` and the first layer's norm, up and down; the second layer; the third and ``last``: a third each."""
    names = {name: value.numel() for name, value in Mlp().named_parameters()}
    total, so_far, fragments = sum(names.values()), 0, {}
    for name, size in names.items():
        fragments[name] = so_far * 3 // total
        so_far += size
    return fragments


def test_losses_and_weights_are_those_of_one_process(result: dict[str, Any]) -> None:
    losses, before, after = diloco_alone(fragments_by_name())
    assert result["parity"]["losses"] == [pytest.approx(one, rel=1e-9) for one in losses]
    for moment, states in (("before", before), ("after", after)):
        for island, state in zip(result["parity"][moment], states):
            for name, value in state.items():
                torch.testing.assert_close(
                    torch.tensor(island[name], dtype=torch.float64), value, rtol=1e-9, atol=1e-12
                )
    first, second = result["parity"]["after"]
    assert first == second  # to the last bit


def test_a_checkpoint_goes_on_under_other_plans(result: dict[str, Any]) -> None:
    whole = result["parity"]["losses"]
    assert result["parity"]["resumed"] == [pytest.approx(one[SAVED:], rel=1e-9) for one in whole]


def synchronous_start_alone() -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Both islands in one process: AdamW on the mean of their gradients, then rounds of DiLoCo."""
    models = [seeded(Mlp) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    losses: list[list[float]] = [[], []]
    outer = torch.optim.SGD(
        [torch.zeros_like(one) for one in models[0].parameters()], lr=0.7, momentum=0.9, nesterov=True
    )
    copies = outer.param_groups[0]["params"]
    for step in range(7):
        for index, model in enumerate(models):
            batch = mlp_batch(seed=1000 * index + step)
            model.zero_grad()
            loss = squared_error(model(batch[0]), batch)
            loss.backward()
            losses[index].append(loss.item())
        both = list(zip(*(model.parameters() for model in models)))
        if step < 3:
            for one, other in both:
                mean = (one.grad + other.grad) / 2
                one.grad, other.grad = mean, mean.clone()
        for model, optimizer in zip(models, optimizers):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        if step == 2:
            for copy_, (one, _) in zip(copies, both):
                copy_.copy_(one.detach())
        if step in (4, 6):
            for copy_, (one, other) in zip(copies, both):
                copy_.grad = copy_ - (one.detach() + other.detach()) / 2
            outer.step()
            for copy_, pair in zip(copies, both):
                for own in pair:
                    own.data.copy_(copy_)
    return losses, models[0].state_dict()


def test_the_first_steps_are_those_of_one_that_sees_all_samples(result: dict[str, Any]) -> None:
    """Also where gradients are clipped; of each such step the gradients are sent, and then the weights once."""
    losses, weights = synchronous_start_alone()
    own = result["synchronous start"]
    assert own["losses"] == [pytest.approx(one, rel=1e-9) for one in losses]
    for name, value in weights.items():
        torch.testing.assert_close(
            torch.tensor(own["weights"][0][name], dtype=torch.float64), value, rtol=1e-9, atol=1e-12
        )
    assert own["weights"][0] == own["weights"][1]
    parameters = sum(value.numel() for value in Mlp().parameters())
    assert own["counted"] == own["said"] == (3 + 1 + 2) * 8 * parameters


def test_the_slow_link_carries_each_parameter_once_in_H_steps(result: dict[str, Any]) -> None:
    parameters = sum(value.numel() for value in Mlp().parameters())
    assert [case["counted"] for case in result["bytes"]] == [2 * 4 * parameters, 2 * 4 * parameters, 2 * 2 * parameters]
    assert [case["said"] for case in result["bytes"]] == [case["counted"] for case in result["bytes"]]


def test_what_cannot_be_is_refused(result: dict[str, Any]) -> None:
    differing, too_many, too_few, unknown, negative = result["refused"]
    assert "must be the same on all ranks" in differing
    assert "fragments=3" in too_many and "inner_steps=0" in too_few
    assert "float32, bfloat16, float16, int8" in unknown
    assert "synchronous_steps=-1: give a whole number, at least 0" in negative


def test_an_outer_optimizer_that_counts_its_steps_keeps_its_count() -> None:
    """Adam, stepped twice in seven inner steps, saved and loaded."""
    weight, counts = torch.nn.Parameter(torch.ones(3)), [7, 0]

    def joint(place: int) -> tuple[JointState, torch.optim.Optimizer, torch.nn.Parameter]:
        copy = torch.nn.Parameter(torch.zeros(3))
        outer = torch.optim.Adam([copy])

        def count(steps: int | None) -> int:
            counts[place] = counts[place] if steps is None else steps
            return counts[place]

        return JointState(torch.optim.SGD([weight]), outer, lambda _: copy, count, lambda: None), outer, copy

    (saved, before, copy), (loaded, after, other) = joint(0), joint(1)
    for _ in range(2):
        copy.grad = torch.ones(3)
        before.step()
    loaded[weight] = saved[weight]
    assert counts == [7, 7] and after.state[other]["step"] == 2
    assert torch.equal(other, copy) and torch.equal(after.state[other]["exp_avg"], before.state[copy]["exp_avg"])


def test_formats_of_the_wire_keep_their_errors() -> None:
    from runtime.islands.wire_formats import BLOCK, WIRE_FORMATS

    values = torch.randn(3 * BLOCK + 7, generator=torch.Generator().manual_seed(0)) * 10
    largest = torch.nn.functional.pad(values, (0, BLOCK - 7)).view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    errors = {"float32": 0 * values, "bfloat16": values / 2**8, "float16": values / 2**11}
    errors["int8"] = largest[: len(values)] / 253.9
    for name, error in errors.items():
        sent = WIRE_FORMATS[name].encode(values)
        returned = WIRE_FORMATS[name].decode(sent, len(values), torch.float32)
        assert ((returned - values).abs() <= error.abs()).all()
        assert sent.numel() == {"float32": 4, "int8": 1}.get(name, 2) * len(values) + (16 if name == "int8" else 0)
