"""Kernels are launched on the device of their operands, also where another is the current one (devices simulated)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.kernels import adamw_kernels, library
from runtime.kernels.chain_launch import Launch
from runtime.kernels.chain_layout import layout_of
from runtime.kernels.device import common_device, on_device


class OnGpu(torch.Tensor):
    """A tensor that says it is on the second GPU."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnGpu)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The current device of a host with two GPUs, and how often it was changed."""
    state = SimpleNamespace(index=0, switches=0)

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            self.before, state.index = state.index, self.index
            state.switches += 1

        def __exit__(self, *error: object) -> None:
            state.index = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.index)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(library, "runs_triton", lambda tensor: True)
    return state


class SeesDevice:
    """A kernel that notes on which device it is launched."""

    def __init__(self, current: SimpleNamespace) -> None:
        self.current, self.launched_on = current, []  # type: ignore[var-annotated]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launched_on.append(self.current.index)


def launch_chain(current: SimpleNamespace) -> int:
    x = torch.randn(6, 8)
    layout = layout_of([x], (6, 8), columns=1)
    assert layout is not None
    kernel = SeesDevice(current)
    # one tile, as for whole rows: to choose among several they would be measured
    Launch(kernel, layout, [on_gpu(x)], num_results=1, whole_rows=True, walks=False)([on_gpu(x)], [x.clone()])
    return int(kernel.launched_on[0])


def launch_operator(current: SimpleNamespace) -> int:
    run = library._dispatched("doubled", aten=lambda x: -1, triton=lambda x: current.index)
    return int(run(on_gpu(torch.randn(2))))


def launch_adamw(current: SimpleNamespace) -> int:
    kernel = SeesDevice(current)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw_kernels, "_kernel", kernel)
        owners = torch.zeros(1, dtype=torch.int32)
        patch.setattr(OnGpu, "is_cuda", False)  # no GPU to send the table to
        adamw_kernels.launch_table(torch.zeros(1, 14, dtype=torch.int64), on_gpu(owners))
    return int(kernel.launched_on[0])


@pytest.mark.parametrize("launch", [launch_chain, launch_operator, launch_adamw])
def test_a_kernel_runs_where_its_operands_are(launch: Any, current: SimpleNamespace) -> None:
    assert launch(current) == 1
    assert (current.index, current.switches) == (0, 1)


def test_the_current_device_is_not_set_again(current: SimpleNamespace) -> None:
    with on_device(torch.device("cuda", 0)), on_device(torch.device("cpu")):
        pass
    assert current.switches == 0


def test_operands_on_several_devices_are_refused() -> None:
    here, there = torch.randn(2), on_gpu(torch.randn(2))
    with pytest.raises(ValueError, match="swiglu was given tensors on cpu, cuda:1: expected all on one device"):
        common_device("swiglu", [here, there])
