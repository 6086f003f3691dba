"""AdamW over many tensors against torch's, in each implementation."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from runtime import kernels
from runtime.kernels import adamw_kernels
from runtime.kernels.dispatch import VARIABLE
from tests.kernels_harness import IMPLEMENTATIONS, random_tensor

SHAPES = ((3, 5), (), (2100,), (0, 4), (7,), (2, 3, 4))
OPTIONS = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(VARIABLE, request.param)
    return str(request.param)


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(random_tensor(shape, seed).to(dtype)) for seed, shape in enumerate(SHAPES)]


def steps(
    optimizer: torch.optim.Optimizer,
    params: Sequence[torch.nn.Parameter],
    *,
    numbers: range = range(5),
    rounded: torch.dtype = torch.float64,
    dtype: torch.dtype | None = None,
) -> None:
    """Step with random gradients, as ``rounded`` holds them, in ``dtype``; the last parameter has none at first."""
    for number in numbers:
        for place, param in enumerate(params):
            param.grad = None
            if place < len(params) - 1 or number >= 2:
                param.grad_dtype = dtype or param.dtype
                param.grad = random_tensor(param.shape, 50 * number + place).to(rounded).to(param.grad_dtype)
        optimizer.step()


def assert_alike(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], *, rtol: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_steps_are_those_of_torch(dtype: torch.dtype, rtol: float) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer, reference = kernels.AdamW(ours, **OPTIONS), torch.optim.AdamW(theirs, **OPTIONS)
    steps(optimizer, ours)
    steps(reference, theirs)
    assert_alike(ours, theirs, rtol=rtol)
    for one, other in zip(ours, theirs):
        for name, value in reference.state[other].items():
            torch.testing.assert_close(optimizer.state[one][name], value, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_step_in_float32(dtype: torch.dtype, implementation: str) -> None:
    ours = parameters(dtype)
    wide = [torch.nn.Parameter(param.detach().float()) for param in ours]
    optimizer, reference = kernels.AdamW(ours, **OPTIONS), torch.optim.AdamW(wide, **OPTIONS)
    steps(optimizer, ours, rounded=dtype)
    steps(reference, wide, rounded=dtype)
    masters = [optimizer.state[param]["master"] for param in ours]
    assert_alike(masters, wide, rtol=1e-6)
    # Triton's interpreter cuts bfloat16 off where a GPU rounds it
    places = torch.finfo(dtype).eps if implementation == "triton" else 0.0
    for param, master in zip(ours, masters):
        assert master.dtype == optimizer.state[param]["exp_avg"].dtype == torch.float32
        torch.testing.assert_close(param.detach(), master.to(dtype), rtol=places, atol=0.0)


@pytest.mark.parametrize(("dtype", "grads"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_gradients_of_another_dtype(dtype: torch.dtype, grads: torch.dtype) -> None:
    """Taken as they are: not rounded to the parameter's dtype before."""
    ours = parameters(dtype)
    wide = [torch.nn.Parameter(param.detach().float()) for param in ours]
    optimizer, reference = kernels.AdamW(ours, **OPTIONS), torch.optim.AdamW(wide, **OPTIONS)
    steps(optimizer, ours, rounded=grads, dtype=grads)
    steps(reference, wide, rounded=grads)
    assert_alike([optimizer.state[param].get("master", param) for param in ours], wide, rtol=1e-6)


def test_tensors_that_are_not_contiguous() -> None:
    """Transposed memory is walked through as it lies; with gaps, or in two orders, it still steps right."""

    def made() -> list[torch.nn.Parameter]:
        transposed, gaps = random_tensor((5, 3), 0).t(), random_tensor((4, 6), 1)[:, ::2]
        return [torch.nn.Parameter(transposed), torch.nn.Parameter(gaps), torch.nn.Parameter(random_tensor((3, 4), 2))]

    ours, theirs = made(), made()
    assert not ours[0].is_contiguous() and not ours[1].is_contiguous()
    for params, kind in ((ours, kernels.AdamW), (theirs, torch.optim.AdamW)):
        optimizer = kind(params, **OPTIONS)
        for number in range(3):
            for place, param in enumerate(params):
                param.grad = random_tensor(param.shape, 10 * number + place)
            params[2].grad = random_tensor((4, 3), 10 * number + 9).t()
            optimizer.step()
    assert_alike(ours, theirs, rtol=1e-12)


def test_groups_have_their_own_options() -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)

    def groups(params: list[torch.nn.Parameter]) -> list[dict[str, object]]:
        return [{"params": params[:2], "lr": 0.2, "weight_decay": 0.0}, {"params": params[2:], "betas": (0.5, 0.9)}]

    steps(kernels.AdamW(groups(ours), **OPTIONS), ours)
    steps(torch.optim.AdamW(groups(theirs), **OPTIONS), theirs)
    assert_alike(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("to_ours", [False, True])
def test_checkpoints_interchange_with_torch(to_ours: bool, fused: bool) -> None:
    """Two steps of one, three of the other: as five of torch's."""
    params, whole = parameters(torch.float64), parameters(torch.float64)
    kinds = (torch.optim.AdamW, kernels.AdamW) if to_ours else (kernels.AdamW, torch.optim.AdamW)
    first = kinds[0](params, **OPTIONS, fused=fused)
    steps(first, params, numbers=range(2))
    second = kinds[1](params, lr=1.0)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(second, params, numbers=range(2, 5))
    steps(torch.optim.AdamW(whole, **OPTIONS), whole)
    assert_alike(params, whole, rtol=1e-12)


def test_a_checkpoint_keeps_what_is_in_float32() -> None:
    straight, resumed = parameters(torch.bfloat16), parameters(torch.bfloat16)
    steps(kernels.AdamW(straight, **OPTIONS), straight)
    first = kernels.AdamW(resumed, **OPTIONS)
    steps(first, resumed, numbers=range(3))
    second = kernels.AdamW(resumed, **OPTIONS)
    second.load_state_dict(first.state_dict())
    steps(second, resumed, numbers=range(3, 5))
    assert_alike(resumed, straight, rtol=0.0)


def test_one_launch_for_each_dtype(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if implementation != "triton":
        pytest.skip("only kernels are launched")
    launches: list[int] = []
    launch = adamw_kernels.launch_table

    def counted(table: torch.Tensor, owners: torch.Tensor, **constants: object) -> None:
        launches.append(len(table))
        launch(table, owners, **constants)

    monkeypatch.setattr(adamw_kernels, "launch_table", counted)
    params = parameters(torch.float32) + parameters(torch.bfloat16)
    steps(kernels.AdamW(params, **OPTIONS), params, numbers=range(3))
    # all but the empty one; the last has no gradient at first
    assert launches == [5, 4, 5, 4, 5, 5]


def test_what_the_host_counts_is_there_whatever_the_default_device() -> None:
    parameter = torch.nn.Parameter(torch.ones(5))
    parameter.grad = torch.ones(5)
    optimizer = kernels.AdamW([parameter], lr=0.1, weight_decay=0.0)
    adamw_kernels._blocks.cache_clear()
    with torch.device("meta"):  # as ``torch.set_default_device("cuda")``, but without a GPU
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.full((5,), 0.9))
    assert float(optimizer.state[parameter]["step"]) == 1.0


def test_options_without_a_kernel_are_refused() -> None:
    for option in ("amsgrad", "maximize", "capturable", "differentiable"):
        with pytest.raises(ValueError, match=option):
            kernels.AdamW(parameters(torch.float32), **{option: True})
    optimizer = kernels.AdamW(params := parameters(torch.float32))
    optimizer.load_state_dict(torch.optim.AdamW(params, amsgrad=True).state_dict())
    with pytest.raises(ValueError, match="amsgrad"):
        optimizer.step()


def test_closure() -> None:
    param = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = kernels.AdamW([param])

    def closure() -> torch.Tensor:
        loss = param.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 4.0
    assert float(param) < 2.0
