"""What all normalizations share: how rows are laid on programs, and how torch treats the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from runtime import kernels
from runtime.kernels import normalization, rows
from runtime.kernels.dispatch import VARIABLE
from tests.kernels_harness import IMPLEMENTATIONS, check_accuracy, random_tensor

EPS = 1e-5
Function = Callable[..., Any]


def rms(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = input.double() if input.dtype == torch.float64 else input.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(input.dtype) * weight


def add_rms(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = input + residual
    return total, rms(total, weight)


def layer(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(input.to(torch.promote_types(input.dtype, weight.dtype)), weight.shape, weight, bias, EPS)


def add_layer(input: torch.Tensor, residual: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = input + residual
    return total, layer(total, *parameters)


#: name -> (operator without its eps, definition, tensors as large as the input, parameters as long as a row)
NORMS: dict[str, tuple[Function, Function, int, int]] = {
    "rms_norm": (lambda x, w: kernels.rms_norm(x, w, EPS), rms, 1, 1),
    "add_rms_norm": (lambda x, r, w: kernels.add_rms_norm(x, r, w, EPS), add_rms, 2, 1),
    "layer_norm": (lambda x, w, b: kernels.layer_norm(x, w, b, EPS), layer, 1, 2),
    "add_layer_norm": (lambda x, r, w, b: kernels.add_layer_norm(x, r, w, b, EPS), add_layer, 2, 2),
}
each_norm = pytest.mark.parametrize("name", NORMS)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def tensors_of(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    _, _, large, small = NORMS[name]
    shapes = [shape] * large + [shape[-1:]] * small
    return [random_tensor(one, place, scale=2.0).to(dtype) for place, one in enumerate(shapes)]


def outputs_of(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@each_norm
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16))
@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="kernels do not run here")
def test_rows_too_wide_to_be_held(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalization, "WIDEST_FORWARD", 64)
    monkeypatch.setattr(normalization, "WIDEST_BACKWARD", 64)
    monkeypatch.setattr(normalization, "_PARAMETERS_TILE", rows.Tile(rows=2, columns=16, num_warps=4, whole=False))
    monkeypatch.setattr(rows, "_MOVING_TILE", 8)
    fused, definition, *_ = NORMS[name]
    check_accuracy(fused, definition, tensors_of(name, 5, 19), dtype=dtype, implementation="triton")


@each_norm
@pytest.mark.skipif("triton" not in IMPLEMENTATIONS, reason="kernels do not run here")
def test_programs_that_walk_through_several_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_NARROW_TILE", 64)
    fused, definition, *_ = NORMS[name]
    tile = rows.tile_of(20, widest=2**15)
    assert rows.tiles_over(101, tile) > 2 * rows.walkers_over(101, tile, torch.device("cpu"))
    check_accuracy(fused, definition, tensors_of(name, 101, 20), dtype=torch.float32, implementation="triton")


@each_norm
def test_rows_taken_a_block_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ATEN_BLOCK", 64)
    fused, definition, *_ = NORMS[name]
    for dtype in (torch.float64, torch.bfloat16):
        check_accuracy(fused, definition, tensors_of(name, 5, 5, 20), dtype=dtype, implementation="aten")


@each_norm
@each_implementation
@pytest.mark.parametrize("width", (1, 2))
def test_the_gradient_of_the_narrowest_rows(name: str, implementation: str, width: int, monkeypatch: Any) -> None:
    monkeypatch.setenv(VARIABLE, implementation)
    fused, definition, *_ = NORMS[name]
    leaves = [tensor.requires_grad_() for tensor in tensors_of(name, 6, width)]
    grads = [
        torch.autograd.grad([output.cos().sum() for output in outputs_of(function(*leaves))], leaves)
        for function in (fused, definition)
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-11)


@each_norm
@each_implementation
def test_only_what_is_wanted_gets_a_gradient(name: str, implementation: str, monkeypatch: Any) -> None:
    monkeypatch.setenv(VARIABLE, implementation)
    fused, definition, *_ = NORMS[name]
    tensors = tensors_of(name, 3, 5, 12)
    for trained in range(len(tensors)):
        grads = []
        for function in (fused, definition):
            leaves = [tensor.clone().requires_grad_(place == trained) for place, tensor in enumerate(tensors)]
            outputs = [output for output in outputs_of(function(*leaves)) if output.requires_grad]
            torch.stack([output.cos().sum() for output in outputs]).sum().backward()
            assert [leaf.grad is not None for leaf in leaves] == [place == trained for place in range(len(leaves))]
            grads.append(leaves[trained].grad)
        torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [name for name in NORMS if name.startswith("add")])
@each_implementation
@pytest.mark.parametrize("used", (0, 1))
def test_either_result_may_go_unused(name: str, implementation: str, used: int, monkeypatch: Any) -> None:
    monkeypatch.setenv(VARIABLE, implementation)
    fused, definition, *_ = NORMS[name]
    leaves = [tensor.requires_grad_() for tensor in tensors_of(name, 4, 12)]
    grads = [
        torch.autograd.grad(function(*leaves)[used].cos().sum(), leaves, allow_unused=True)
        for function in (fused, definition)
    ]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-11)


@each_norm
@each_implementation
def test_weights_wider_than_the_input(name: str, implementation: str) -> None:
    fused, definition, large, _ = NORMS[name]

    def mixed(function: Function) -> Function:
        return lambda *tensors: function(
            *(tensor.to(torch.bfloat16) for tensor in tensors[:large]), *(tensor.float() for tensor in tensors[large:])
        )

    tensors = tensors_of(name, 5, 24, dtype=torch.bfloat16)
    check_accuracy(mixed(fused), mixed(definition), tensors, dtype=torch.bfloat16, implementation=implementation)


@each_norm
@each_implementation
def test_strided_tensors(name: str, implementation: str) -> None:
    fused, definition, large, _ = NORMS[name]

    def strided(function: Function) -> Function:
        return lambda *tensors: function(
            *(tensor.transpose(0, 2)[::2] for tensor in tensors[:large]), *(tensor[::3] for tensor in tensors[large:])
        )

    tensors = [random_tensor((5, 4, 6), place) for place in range(large)]
    tensors += [random_tensor((15,), 5 + place) for place in range(NORMS[name][3])]
    check_accuracy(strided(fused), strided(definition), tensors, dtype=torch.float32, implementation=implementation)


@each_norm
@pytest.mark.parametrize("shape", ((0, 4), (3, 0, 4), (3, 0), (7,)))
@each_implementation
def test_empty_tensors_and_single_rows(name: str, shape: tuple[int, ...], implementation: str) -> None:
    fused, definition, *_ = NORMS[name]
    check_accuracy(fused, definition, tensors_of(name, *shape), dtype=torch.float32, implementation=implementation)


@each_norm
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_torch_takes_the_operator_for_its_own(name: str, dtype: torch.dtype) -> None:
    operator = getattr(torch.ops.meshwright, name).default
    tensors = [tensor.requires_grad_() for tensor in tensors_of(name, 3, 8, dtype=dtype)]
    # of bfloat16, whose places are 8e-3 apart
    torch.library.opcheck(operator, (*tensors, EPS), rtol=1e-2, atol=1e-2)
    permuted = [
        (tensor.detach().expand(2, 3, 8).transpose(0, 1) if tensor.dim() == 2 else tensor.detach()).requires_grad_()
        for tensor in tensors
    ]
    torch.library.opcheck(operator, (*permuted, EPS), rtol=1e-2, atol=1e-2)


@each_norm
def test_compiled_without_breaks(name: str) -> None:
    fused, *_ = NORMS[name]
    leaves = [tensor.requires_grad_() for tensor in tensors_of(name, 3, 8)]
    results = []
    for function in (fused, torch.compile(fused, fullgraph=True, backend="aot_eager")):
        outputs = outputs_of(function(*leaves))
        results.append([*outputs, *torch.autograd.grad([output.cos().sum() for output in outputs], leaves)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@each_norm
def test_autocast_changes_nothing(name: str) -> None:
    fused, *_ = NORMS[name]
    leaves = [tensor.requires_grad_() for tensor in tensors_of(name, 3, 8, dtype=torch.float32)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = outputs_of(fused(*leaves))
            results.append([*outputs, *torch.autograd.grad([output.cos().sum() for output in outputs], leaves)])
    torch.testing.assert_close(*results, rtol=0, atol=0)


@each_norm
def test_shapes_and_dtypes_without_data(name: str) -> None:
    fused, definition, large, _ = NORMS[name]
    dtypes = [torch.bfloat16] * large + [torch.float32] * 2
    leaves = [
        tensor.to("meta", dtype).requires_grad_() for tensor, dtype in zip(tensors_of(name, 3, 8), dtypes, strict=False)
    ]
    results = []
    for function in (fused, definition):
        outputs = outputs_of(function(*leaves))
        tensors = [*outputs, *torch.autograd.grad([output.sum() for output in outputs], leaves)]
        results.append([(tensor.shape, tensor.dtype, tensor.device.type) for tensor in tensors])
    assert results[0] == results[1]


@each_norm
def test_misshapen_parameters_are_refused(name: str) -> None:
    fused, *_ = NORMS[name]
    *tensors, last = tensors_of(name, 3, 8)
    with pytest.raises(ValueError, match=r"has shape \(7,\), expected \(8,\)"):
        fused(*tensors, last[:7])
    if name.startswith("add"):
        input, residual, *parameters = [*tensors, last]
        with pytest.raises(ValueError, match=r"residual has shape \(1, 8\), expected .* \(3, 8\)"):
            fused(input, residual[:1], *parameters)
