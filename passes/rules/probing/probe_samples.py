"""Random inputs of a probe: normal, tied, positive, large and zero numbers; indices in the operator's ranges."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from passes.rules.probing.probe_call import ProbeCall, ProbeFailure, Shapes, is_differentiable

NORMAL, TIED, POSITIVE, LARGE, ZERO = "normal", "tied", "positive", "large", "zero"
KINDS = (NORMAL, TIED, POSITIVE, LARGE, ZERO)


def samples(call: ProbeCall, shapes: Shapes) -> Iterator[list[torch.Tensor]]:
    """Inputs of ``shapes`` that the operator takes; the first are the best for finding out what it does."""
    ranges = index_ranges(call, shapes)
    for high in reversed(ranges):
        for kind in KINDS:
            if high == ranges[-1] or kind == NORMAL:
                tensors = draw(call, shapes, kind, high)
                if runs(call, tensors):
                    yield tensors


def index_ranges(call: ProbeCall, shapes: Shapes) -> list[int]:
    """Exclusive upper ends for indices: sizes of dims in ascending order, up to the largest that the operator takes.

    They are tried upwards and the first refusal ends them, so that no operator is handed indices far out of range.
    """
    if all(is_differentiable(dtype) or dtype == "bool" for dtype in call.dtypes):
        return [1]
    ends: list[int] = []
    for high in sorted({1, *(size for shape in shapes for size in shape)}):
        if any(runs(call, draw(call, shapes, kind, high)) for kind in (NORMAL, POSITIVE)):
            ends.append(high)
        elif ends:
            break
    return ends or [1]


def draw(call: ProbeCall, shapes: Shapes, kind: str, high: int) -> list[torch.Tensor]:
    """Inputs of one kind: the same for the same operator and shapes, in every process."""
    text = f"{call.node.op}|{shapes}|{kind}|{high}"
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]))
    return [_tensor(shape, dtype, kind, high, generator) for shape, dtype in zip(shapes, call.dtypes, strict=True)]


def runs(call: ProbeCall, tensors: list[torch.Tensor]) -> bool:
    """Whether the operator takes these inputs."""
    try:
        call.run(tensors)
    except ProbeFailure:
        return False
    return True


def _tensor(shape: tuple[int, ...], dtype: str, kind: str, high: int, generator: torch.Generator) -> torch.Tensor:
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=generator, device="cpu").bool()
    if not is_differentiable(dtype):
        return torch.randint(0, high, shape, generator=generator, device="cpu").to(getattr(torch, dtype))
    wide = torch.complex128 if dtype.startswith("complex") else torch.float64
    if kind == TIED:
        numbers = torch.randint(-2, 3, shape, generator=generator, device="cpu").to(wide)
    elif kind == POSITIVE:
        numbers = (torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") * 0.8 + 0.1).to(wide)
    elif kind == ZERO:
        numbers = torch.zeros(shape, dtype=wide, device="cpu")
    else:
        numbers = torch.randn(shape, generator=generator, dtype=wide, device="cpu") * (50.0 if kind == LARGE else 1.0)
    return numbers.to(getattr(torch, dtype))
