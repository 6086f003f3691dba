"""Regions whose saved tensors are on the host: what is sent, when it comes back, and how long it stays."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from runtime.program_tools.offloaded_activations import use_link
from runtime.program_tools.recompute import recomputed

CPU = torch.device("cpu")


class RecordingLink:
    """Copies at once, and notes what was asked in which order: bytes down, bytes up, waits for either."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.brought: list[weakref.ref[torch.Tensor]] = []

    def to_host(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        mark = ("sent", len(self.asked))
        self.asked.append(("down", data.numel()))
        return data.clone(), mark

    def to_device(self, host: torch.Tensor, mark: Any) -> tuple[torch.Tensor, Any]:
        assert mark[0] == "sent"
        self.asked.append(("up", host.numel()))
        data = host.clone()
        self.brought.append(weakref.ref(data))
        return data, ("brought", len(self.asked))

    def wait(self, mark: Any) -> None:
        self.asked.append((f"wait {mark[0]}", 0))


@pytest.fixture
def link() -> RecordingLink:
    link = RecordingLink()
    use_link(CPU, link)
    return link


def sines(x: torch.Tensor) -> torch.Tensor:
    """Keeps what goes in, and one tensor of its own."""
    return x.sin().exp().view(-1)


def chain(num_regions: int, x: torch.Tensor) -> torch.Tensor:
    region = recomputed(sines, "offload")
    for _ in range(num_regions):
        x = region(x)
    return x


def test_a_region_waits_for_what_the_one_before_the_last_sent(link: RecordingLink) -> None:
    """Each sends its one output, which the exponential keeps."""
    chain(3, torch.ones(4, requires_grad=True))
    assert link.asked == [("down", 16), ("down", 16), ("wait sent", 0), ("down", 16), ("wait sent", 0)]


def test_a_region_is_brought_back_with_the_one_before_it(link: RecordingLink) -> None:
    y = chain(3, torch.ones(4, requires_grad=True))
    link.asked.clear()
    y.sum().backward()
    assert [what for what, _ in link.asked] == ["up", "up", "wait brought", "up", "wait brought", "wait brought"]


def test_views_of_one_storage_are_sent_once_and_writes_between_make_two(link: RecordingLink) -> None:
    def views(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        return h[:2].sin().sum() + h.view(2, 2).t().cos().sum()

    def writes(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        first = h.detach().requires_grad_().sin()
        return (h.sin() + first).sum()

    x = torch.linspace(-1.0, 1.0, 4, dtype=torch.float64, requires_grad=True)
    for function in (views, writes):
        link.asked.clear()
        x.grad = None
        recomputed(function, "offload")(x).backward()
        expected = torch.autograd.grad(function(x), x)[0]
        assert x.grad is not None and torch.equal(x.grad, expected)
        assert [what for what, _ in link.asked].count("down") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_tensors_of_all_dtypes_come_back_as_they_were(link: RecordingLink, dtype: torch.dtype) -> None:
    """A conjugate view and a mask among them."""

    def function(x: torch.Tensor) -> torch.Tensor:
        if dtype.is_complex:
            h = torch.complex(x.sin(), x.cos()).conj()
            return (h * h.t()).abs().sum()
        if dtype is torch.bool:
            return x.exp().masked_fill(x.exp() > 1.0, 0.5).sum()
        return (x.to(dtype).exp() * x.to(dtype).sin()).float().sum()

    x = torch.linspace(-1.0, 1.0, 9).reshape(3, 3).requires_grad_()
    recomputed(function, "offload")(x).backward()
    assert x.grad is not None and torch.equal(x.grad, torch.autograd.grad(function(x), x)[0])
    assert ("down", 9) in link.asked or dtype is not torch.bool


def test_a_graph_that_is_kept_can_run_again(link: RecordingLink) -> None:
    x = torch.linspace(-1.0, 1.0, 4, requires_grad=True)
    y = chain(2, x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    assert link.brought and all(data() is None for data in link.brought)
    assert torch.equal(torch.autograd.grad(y, x)[0], first)


def test_nothing_is_left_on_the_device_or_the_host(link: RecordingLink) -> None:
    """Of ten million bytes that a region keeps, none after its forward, none after its backward."""

    def held(profile: Any) -> int:
        return sum(event.self_cpu_memory_usage for event in profile.key_averages())

    x = torch.ones(1_250_000, dtype=torch.float64, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        y = recomputed(lambda x: x.sin().exp().sum(), "offload")(x)
        y.backward()
        x.grad = None
        del y
    assert abs(held(profile)) < 1_000
