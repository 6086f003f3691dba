"""Items about operators that ``benchmarks.kernels`` has no contestants for: experts and AdamW, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.gpu.operators import DTYPES, LEAST, SIZES, SLACK
from benchmarks.gpu.parts import Setting
from benchmarks.kernels_adamw import OPTIONS, _Masters, _params
from benchmarks.kernels_cases import DTYPES as TORCH_DTYPES
from benchmarks.kernels_cases import TINY
from benchmarks.kernels_timing import largest_error
from runtime.kernels import AdamW, experts

Row = dict[str, Any]
Tensors = list[torch.Tensor]


class ExpertSize(NamedTuple):
    """A layer of experts: ``chosen`` of them for every token."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    chosen: int


EXPERTS = (ExpertSize(4096, 1024, 768, 16, 4), ExpertSize(333, 200, 120, 7, 2))
TINY_EXPERTS = (ExpertSize(7, 16, 8, 3, 2),)


def expert_numerics(setting: Setting) -> Iterator[Row]:
    """Outputs and gradients of a mixture of experts, beside those of a loop over the experts."""
    for size in TINY_EXPERTS if setting.tiny else EXPERTS:
        for dtype in DTYPES:
            ids, grad, operands = _expert_operands(size, TORCH_DTYPES[dtype], torch.device(setting.device))
            truth = _expert_results(_loop, ids, grad.double(), [one.double() for one in operands])
            errors = [
                largest_error(_expert_results(function, ids, grad, operands), truth) for function in (experts, _loop)
            ]
            yield _row("experts", f"{size.tokens} tokens, {size.experts} experts", dtype, *errors)


def _expert_operands(
    size: ExpertSize, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, Tensors]:
    """Experts of every token, the gradient of the outputs; and tokens, scores, and both weights of the experts."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    ids = torch.rand(size.tokens, size.experts, device=device, generator=generator).argsort(-1)[:, : size.chosen]
    scores = torch.rand(size.tokens, size.chosen, device=device, generator=generator).to(dtype)
    gate_up = normal(size.experts, 2 * size.inner, size.hidden) / size.hidden**0.5
    down = normal(size.experts, size.hidden, size.inner) / size.inner**0.5
    x, grad = normal(size.tokens, size.hidden), normal(size.tokens, size.hidden)
    return ids, grad, [x, scores, gate_up, down]


def _expert_results(
    function: Callable[..., torch.Tensor], ids: torch.Tensor, grad: torch.Tensor, operands: Sequence[torch.Tensor]
) -> Tensors:
    """Output and gradients."""
    x, scores, gate_up, down = leaves = [one.detach().requires_grad_() for one in operands]
    output = function(x, ids, scores, gate_up, down)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def _loop(
    x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Every expert on its tokens, one after the other."""
    result = torch.zeros_like(x)
    for number in range(len(gate_up)):
        tokens, places = torch.where(ids == number)
        gate, up = (x[tokens] @ gate_up[number].T).chunk(2, -1)
        output = (F.silu(gate) * up) @ down[number].T
        result = result.index_add(0, tokens, output * scores[tokens, places].unsqueeze(-1))
    return result


def adamw_numerics(setting: Setting) -> Iterator[Row]:
    """The parameters of a layer after a step, beside those of torch's fused AdamW."""
    device = torch.device(setting.device)
    for size in (TINY,) if setting.tiny else SIZES[:2]:
        for dtype in DTYPES:
            exact = [param.double() for param in _params(size, dtype, device)]
            for param, like in zip(exact, _params(size, dtype, device), strict=True):
                assert like.grad is not None
                param.grad = like.grad.double()
            torch.optim.AdamW(exact, **OPTIONS).step()
            errors = []
            for make in (lambda params: AdamW(params, **OPTIONS), lambda params: _Masters(params, fused=True)):
                params = _params(size, dtype, device)
                with torch.no_grad():
                    make(params).step()
                errors.append(largest_error(params, exact))
            yield _row("adamw", size.name, dtype, *errors)


def _row(operator: str, size: str, dtype: str, ours: float, eager: float) -> Row:
    errors = {"Meshwright": float(f"{ours:.2e}"), "eager": float(f"{eager:.2e}")}
    ok = ours <= max(SLACK * eager, LEAST[dtype])
    return {"operator": operator, "size": size, "dtype": dtype, **errors, "ok": ok}
