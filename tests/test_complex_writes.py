"""Writes to parts of complex tensors, of which torch has no gradient, and through the bits of numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from passes.capture import CaptureError, capture
from tests.capture_parity import assert_parity


class Squares(nn.Module):
    """The sum of squares of ``function(x * weight)``; the weight makes gradients flow."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight).square().sum()


def low_frequencies(y: torch.Tensor) -> torch.Tensor:
    """As neural operators write them."""
    spectrum = torch.fft.rfft2(y)
    kept = torch.zeros_like(spectrum)
    kept[:, :, :2] = spectrum[:, :, :2] * (1 + 2j)
    kept[:, -2] = spectrum[:, 0].conj()
    return torch.fft.irfft2(kept)


def on_a_diagonal(y: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.fft2(y)
    torch.diagonal(spectrum, 0, -2, -1).mul_(0.5 - 1j)
    spectrum[0].copy_(spectrum[1].conj())
    return torch.fft.ifft2(spectrum).real


@pytest.mark.parametrize("function", [low_frequencies, on_a_diagonal])
def test_parts_of_complex_tensors_are_written_with_gradients(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    graph = assert_parity(Squares(function, 2, 4, 6), args=(torch.randn(2, 4, 6, dtype=torch.float64),))
    operators = {node.op for node in graph.nodes}
    assert {"aten.view_as_real.default", "aten.view_as_complex.default"} < operators


def test_numbers_written_through_their_bits_are_refused() -> None:
    def write(y: torch.Tensor) -> torch.Tensor:
        result = y * 1
        result.detach().view(torch.int64).bitwise_and_(-2)
        return result

    with pytest.raises(CaptureError, match=r"in place through aten\.view\.dtype"):
        capture(Squares(write, 3), args=(torch.randn(3, dtype=torch.float64),))
