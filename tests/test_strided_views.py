"""``as_strided`` inside of forward: the elements that it views on one device, however the tensor lies on a rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import planner
from passes.capture import CaptureError, capture
from tests.small_models import seeded

X = torch.linspace(-1, 1, 2 * 16 * 8, dtype=torch.float64).reshape(16, 2, 8)


class SlidingChunks(nn.Module):
    """Chunks that overlap by half of a tensor whose memory is ordered otherwise than its dims, as Longformer's are."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 8), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).view(16, 2, 2, 4).permute(1, 2, 0, 3).reshape(4, 4, 4, 4)
        assert not heads.is_contiguous()
        first, second, third, fourth = heads.stride()
        chunks = heads.as_strided((4, 7, 4, 4), (first, second // 2, third, fourth))
        return (self.out(chunks).softmax(-1) * torch.arange(7.0).view(7, 1, 1)).square().sum()


class Strided(nn.Module):
    """What ``view`` makes of a projection."""

    def __init__(self, view: object) -> None:
        super().__init__()
        self.project, self.view = nn.Linear(8, 8), view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.view(self.project(x)).square().mean()  # type: ignore[operator]


def zeroed(view: torch.Tensor) -> torch.Tensor:
    view[0] = 0.0
    return view


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_overlapping_chunks_have_the_gradients_of_one_device(mesh: str) -> None:
    report = planner.verify(seeded(SlidingChunks), mesh, batch=(X,), steps=2)
    assert report.ok, report.table()


@pytest.mark.parametrize(
    ("view", "message"),
    [
        (lambda x: x[:, :, ::2].as_strided((4,), (2,)), "not dense in memory"),
        (lambda x: x[0].as_strided((2, 16), (16, 1)), "reaches memory outside"),
        (lambda x: zeroed(x.as_strided((4, 4), (4, 1)).view(16)), "writes to a view by as_strided"),
    ],
)
def test_what_is_no_choice_of_its_elements_is_refused(view: object, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(seeded(Strided, view=view), args=(X,))
