"""AdamW steps over the parameters of one layer, for ``benchmarks.kernels``: eager, compiled, ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.kernels_cases import DTYPES, Size
from benchmarks.kernels_contestants import COMPILED, CONTESTANTS, EAGER, LIGER, OURS
from benchmarks.kernels_measure import Row
from benchmarks.kernels_timing import Clock, largest_error
from runtime.kernels import AdamW

NAME, STEP = "adamw", "step"
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
#: Bytes of an element that must be read or written: parameter (written; read too where it is its own master),
#: gradient, both moments and the master of a narrow parameter (read and written).
MOVED = {"bf16": 2 + 2 + 16 + 8, "fp32": 8 + 4 + 16}


class _Masters:
    """torch's AdamW on float32 copies of narrow parameters, as training loops keep them by hand."""

    def __init__(self, params: list[torch.Tensor], **options: Any) -> None:
        self.params = params
        self.narrow = params[0].dtype == torch.bfloat16
        self.masters = [param.detach().float() for param in params] if self.narrow else params
        self.inner = torch.optim.AdamW(self.masters, **OPTIONS, **options)

    def step(self) -> None:
        if self.narrow:
            for master, param in zip(self.masters, self.params, strict=True):
                assert param.grad is not None
                master.grad = param.grad.float()
        self.inner.step()
        if self.narrow:
            torch._foreach_copy_(self.params, self.masters)


def _eager(params: list[torch.Tensor]) -> Callable[[], Any]:
    return _Masters(params, fused=True).step


def _ours(params: list[torch.Tensor]) -> Callable[[], Any]:
    return AdamW(params, **OPTIONS).step


def measure_adamw(size: Size, dtype: str, clock: Clock, *, backend: str) -> list[Row]:
    """Rows of one step; the first step is compared with float64."""

    def compiled(params: list[torch.Tensor]) -> Callable[[], Any]:
        return torch.compile(_Masters(params, foreach=True).step, dynamic=False, backend=backend)

    torch.compiler.reset()
    makers = {EAGER: _eager, COMPILED: compiled, OURS: _ours, LIGER: None}
    exact = [param.double() for param in _params(size, dtype, clock.device)]
    for param, like in zip(exact, _params(size, dtype, clock.device), strict=True):
        assert like.grad is not None
        param.grad = like.grad.double()
    torch.optim.AdamW(exact, **OPTIONS).step()
    rows = []
    for name in CONTESTANTS:
        make = makers[name]
        rows.append(Row(NAME, "", size.name, dtype, STEP, name, **_found(make, exact, size, dtype, clock)))
        clock.release()
    return rows


def _found(
    make: Callable[[list[torch.Tensor]], Callable[[], Any]] | None,
    exact: list[torch.Tensor],
    size: Size,
    dtype: str,
    clock: Clock,
) -> dict[str, Any]:
    if make is None:
        return {"note": "has none"}
    try:
        params = _params(size, dtype, clock.device)
        step = make(params)
        with torch.no_grad():
            step()
            error = largest_error(params, exact)
            peak = clock.peak_bytes(step)
            timing = clock.time(lambda _: step())
    except Exception as problem:  # whatever a compiler raises: the others go on
        return {"note": f"failed: {type(problem).__name__}: {problem}".splitlines()[0][:200]}
    moved = sum(param.numel() for param in params) * MOVED[dtype]
    figures = {"seconds": timing.median, "low": timing.low, "high": timing.high}
    return {**figures, "num_bytes": moved, "peak_bytes": peak, "error": error}


def _params(size: Size, dtype: str, device: torch.device) -> list[torch.Tensor]:
    """The parameters of a Llama layer, with gradients, the same at every call."""
    width, inner, pair = size.hidden, size.intermediate, size.groups * size.head
    rows = size.heads * size.head
    shapes = [
        (rows, width),
        (pair, width),
        (pair, width),
        (width, rows),
        (inner, width),
        (inner, width),
        (width, inner),
    ]
    generator = torch.Generator(device).manual_seed(0)
    param_list = []
    for shape in [*shapes, (width,), (width,)]:
        param, grad = (torch.randn(shape, dtype=DTYPES[dtype], device=device, generator=generator) for _ in range(2))
        param.grad = grad
        param_list.append(param)
    return param_list
