"""Fused operators run at once on plain tensors, and through torch's dispatcher wherever somebody listens to it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from runtime import kernels
from runtime.kernels import dispatch, library
from runtime.kernels.direct import _plain_keys, are_plain, nobody_listens

RMS_NORM = torch.ops.meshwright.rms_norm.default


class Dispatches(TorchDispatchMode):
    """Notes what the dispatcher is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 8, generator=generator), torch.randn(8, generator=generator)
    return x.requires_grad_(), weight.requires_grad_()


def gradients(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    x, weight = leaves()
    y = function(x, weight, 1e-5, 0.0)
    return [y, *torch.autograd.grad(y.sum(), (x, weight))]


def test_plain_tensors_do_not_pass_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(library, "are_plain", lambda arguments: asked.append("plain") or are_plain(arguments))
    x, weight = leaves()
    y = kernels.rms_norm(x, weight, 1e-5)
    assert type(y.grad_fn).__name__ == "meshwright_rms_normBackward", "and not what torch generates for an operator"
    y.sum().backward()
    assert asked == ["plain", "plain"], "forward and backward"


def test_both_ways_give_the_same_bits() -> None:
    for one, other in zip(gradients(kernels.rms_norm), gradients(RMS_NORM), strict=True):
        assert torch.equal(one, other)


def test_modes_see_the_operator_and_its_gradient() -> None:
    with Dispatches() as mode:
        gradients(kernels.rms_norm)
    assert {RMS_NORM, torch.ops.meshwright.rms_norm_backward.default} <= set(mode.operators)
    with Functions() as functions:
        gradients(kernels.rms_norm)
    assert RMS_NORM in functions.functions


class Listening(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_transforms_see_the_operator() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        assert not nobody_listens()
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    assert nobody_listens()
    with torch.device("cpu"):
        assert nobody_listens()
        with Listening():
            assert not nobody_listens()


@pytest.mark.parametrize(
    "other",
    [
        torch.empty(3, 8, device="meta"),
        FakeTensorMode().from_tensor(torch.empty(3, 8)),
        torch.ones(3, 8).as_subclass(type("Subclass", (torch.Tensor,), {})),
    ],
    ids=["meta", "fake", "subclass"],
)
def test_tensors_of_other_kinds_are_not_plain(other: torch.Tensor) -> None:
    assert are_plain([torch.ones(1), torch.nn.Parameter(torch.ones(1)), None, 1.0, [True]])
    assert not are_plain([torch.ones(1), other])


def test_keys_of_plain_tensors_are_those_that_torch_gives_them() -> None:
    # Of a GPU's tensors the same with another backend: kernels read memory, so lazy bits must not be there.
    assert torch._C._dispatch_keys(torch.ones(1)).raw_repr() in _plain_keys()
    assert torch._C._dispatch_keys(torch._neg_view(torch.ones(1))).raw_repr() not in _plain_keys()


def test_checkpoints_run_the_operator_again() -> None:
    def region(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        return checkpoint(kernels.rms_norm, x, weight, eps, offset, use_reentrant=False)

    for one, other in zip(gradients(region), gradients(kernels.rms_norm), strict=True):
        assert torch.equal(one, other)


def test_small_losses_refuse_what_is_no_class() -> None:
    with pytest.raises(IndexError, match="target 7 is no class: expected 0 to 4"):
        kernels.cross_entropy(torch.zeros(2, 5), torch.tensor([1, 7]))
    losses = kernels.cross_entropy(torch.zeros(3, 5), torch.tensor([1, -100, 4]))
    assert losses.tolist() == pytest.approx([torch.tensor(5.0).log().item(), 0.0, torch.tensor(5.0).log().item()])


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    """What is asked of a tensor there, where there is no GPU."""
    tensor = torch.empty(shape, dtype=dtype, device="meta")
    return SimpleNamespace(is_cuda=True, dtype=dtype, numel=tensor.numel, itemsize=tensor.itemsize)


def test_torch_normalizes_few_bytes_of_one_dtype_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    few, weight = on_gpu(16, 512, 1024), on_gpu(1024)
    assert library.is_torchs_on_gpu(few, weight, None)
    assert not library.is_torchs_on_gpu(on_gpu(16, 512, 1025), None)
    assert not library.is_torchs_on_gpu(few, on_gpu(1024, dtype=torch.float32))
    assert not library.is_torchs_on_gpu(torch.ones(2))


@pytest.mark.parametrize("implementation", ["aten", "triton"])
def test_what_the_environment_forces_runs_on_a_gpu(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.VARIABLE, implementation)
    assert not library.is_torchs_on_gpu(on_gpu(2, 8))


def test_observed_tensors_are_not_normalized_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    with Dispatches():
        assert not library.is_torchs_on_gpu(on_gpu(2, 8))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert not library.is_torchs_on_gpu(on_gpu(2, 8))
    assert not library.is_torchs_on_gpu(on_gpu(2, 8), torch.ones(8, dtype=torch.bfloat16, device="meta"))


@pytest.mark.parametrize("added", [False, True])
def test_torchs_own_layer_norm_gives_what_ours_does(added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, run on a processor."""
    x, weight = (tensor.detach().double() for tensor in leaves())
    operands = [x[:, ::2], x[:, 1::2]][: 2 if added else 1]
    run = kernels.add_layer_norm if added else kernels.layer_norm

    def computed() -> list[torch.Tensor]:
        tensors = [one.clone().as_strided(one.shape, (1, 3)).requires_grad_() for one in operands]
        results = run(*tensors, weight[:4], weight[4:], 1e-5)
        results = results if added else (results,)
        assert all(one.is_contiguous() for one in results)
        return [*results, *torch.autograd.grad(sum(one.square().sum() for one in results), tensors)]

    expected = computed()
    module = importlib.import_module("runtime.kernels.layer_norm")
    monkeypatch.setattr(module, "is_torchs_on_gpu", lambda *tensors: True)
    for one, other in zip(computed(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
