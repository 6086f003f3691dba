"""Functions of torch that look at values to check or to warn are traced, and give what they give on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
from tests.capture_parity import assert_parity

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WINDOW = torch.hann_window(16, dtype=torch.float64) + 0.1

Call = Callable[[torch.Tensor], torch.Tensor]


def spectrum(y: torch.Tensor) -> torch.Tensor:
    return torch.stft(y.repeat(1, 6), 16, 4, window=WINDOW, return_complex=True)


CALLS: dict[str, Call] = {
    "covariance": lambda y: torch.cov(y.t()),
    "covariance without a correction": lambda y: y.t().cov(correction=0),
    "variance": lambda y: torch.cov(y[:, 0]),
    "correlation": lambda y: torch.corrcoef(y.t()),
    "inverse Fourier transform": lambda y: torch.istft(spectrum(y), 16, 4, window=WINDOW),
    "to a length": lambda y: torch.istft(spectrum(y), 16, 4, window=WINDOW, length=40),
    "of one signal, scaled": lambda y: torch.istft(spectrum(y)[0], 16, 4, window=WINDOW, normalized=True, center=False),
}

PLACES = torch.tensor([[0, 1, 2, 3, 4, 5, 5, 5], [1, 1, 0, 2, 3, 4, 4, 0]])


class Calling(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.linear(x)).square().sum()


class Repeated(Calling):
    """Each row as often as the one number says, as pictures of one size are counted by Qwen2-VL."""

    def __init__(self) -> None:
        super().__init__(lambda y: y)

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return (torch.repeat_interleave(y, times, dim=0)[1:] * y.flatten().repeat_interleave(times)[:6]).sum()


@pytest.mark.parametrize("name", CALLS)
def test_it_is_traced_in_operators_that_do_not_look_at_values(name: str) -> None:
    assert_parity(Calling(CALLS[name]), args=(X,))


def test_one_number_of_repeats_is_read_like_several() -> None:
    assert_parity(Repeated(), args=(X, torch.tensor([2])))
    assert_parity(Repeated(), args=(X[:1], torch.tensor(3)))


def test_a_sparse_tensor_is_written_out() -> None:
    """Two numbers have one place; as PEFT's SHiRA adds them to a weight."""
    model = Calling(lambda y: y @ torch.sparse_coo_tensor(PLACES, y.mean(1), (6, 6)))
    report = planner.verify(model, "tp=2", batch=(X,), steps=1)
    assert report.ok, report.table()


def test_batch_statistics_that_all_count_alike_are_kept_under_a_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 2)).double()
    report = planner.verify(model, "dp=2", batch=(X,), loss_fn=lambda outputs, batch: F.softplus(outputs).mean())
    assert report.ok, report.table()
