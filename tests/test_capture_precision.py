"""Capture leaves torch's precision of float32 as the user set it, and works whatever the user set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import backends, nn

from passes.capture.capture import capture

SWITCHES = (
    backends,
    backends.cuda.matmul,
    backends.cudnn,
    backends.cudnn.conv,  # type: ignore[attr-defined]
    backends.cudnn.rnn,  # type: ignore[attr-defined]
    backends.mkldnn,
    backends.mkldnn.conv,  # type: ignore[attr-defined]
)


def precisions() -> list[str]:
    return [switch.fp32_precision for switch in SWITCHES]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = precisions()
    for switch in SWITCHES[1:]:
        switch.fp32_precision = "none"  # follows torch.backends, whatever other tests have set
    yield
    for switch, precision in zip(SWITCHES, before, strict=True):
        switch.fp32_precision = precision
    assert backends.cudnn.allow_tf32  # raises where torch's older switches and these contradict each other


def capture_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1))
    capture(model, args=(torch.randn(4, 3, 8, 8),), loss_fn=lambda outputs, inputs: outputs.mean())


@pytest.mark.parametrize("precision", ["none", "ieee", "tf32"])
def test_capture_leaves_the_precision_of_all_libraries(precision: str) -> None:
    backends.fp32_precision = precision
    before = precisions()
    capture_convolution()
    assert precisions() == before


def test_capture_leaves_a_precision_of_convolutions_alone() -> None:
    backends.fp32_precision = "ieee"
    backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]
    before = precisions()
    capture_convolution()
    assert precisions() == before


def test_convolutions_follow_the_precision_set_after_capture() -> None:
    backends.fp32_precision = "ieee"
    capture_convolution()
    backends.fp32_precision = "tf32"
    assert set(precisions()) == {"tf32"}


def test_libraries_stay_on() -> None:
    capture_convolution()
    assert backends.cudnn.enabled
    assert backends.mkldnn.enabled
