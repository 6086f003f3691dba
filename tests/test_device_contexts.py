"""Where tensors are made: models that name a GPU, tracing under a GPU's autocast, programs inside ``torch.device``."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import planner
import runtime.execution.binding
from passes.capture import capture
from runtime.program_tools.compiling import as_compiled
from runtime.torch_compat.allocator import grow_segments
from runtime.torch_compat.dispatcher import in_hidden_device_contexts, outside_device_contexts


class WrittenForOneGpu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(8, device="cuda").float() + torch.zeros(8).cuda()
        scales = torch.ones(8).to("cuda:0") + torch.tensor([1.0] * 8, device=torch.device("cuda", 0))
        eye = torch.eye(8).to(device="cuda", dtype=x.dtype)
        return (self.layer(x) * scales + places + x.cpu() @ eye).square().mean()


def test_a_model_that_names_a_gpu_is_planned_and_trained_without_one() -> None:
    model, x = WrittenForOneGpu(), torch.randn(4, 8)
    loss = planner.compile(model, "dp=1", example_inputs={"x": x}).train_step(x=x)
    expected = (model.layer(x) * 2 + torch.arange(8).float() + x).square().mean()
    torch.testing.assert_close(loss, expected)


class WritesNumbers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = x[:, :-1].clone()
        shifted[:, 0] = 5.0
        return self.layer(shifted).square().mean()


@pytest.mark.skipif(torch.version.cuda is None, reason="this torch was built without CUDA")
def test_under_the_autocast_of_a_gpu_dtypes_are_those_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan and program are traced there; a number that the model writes is on the processor."""
    monkeypatch.setattr(sys.modules["passes.capture.capture"], "trace_device", lambda: torch.device("cuda", 0))
    enabled, dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    try:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        graph = capture(WritesNumbers(), args=(torch.randn(4, 8),))
    finally:
        torch.set_autocast_enabled("cuda", enabled)
        torch.set_autocast_dtype("cuda", dtype)
    dtypes = {node.op: node.outputs[0].dtype for node in graph.nodes}
    assert dtypes["aten.linear.default"] == "bfloat16" and dtypes["aten.select_scatter.default"] == "float32"


class Classifies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x).relu()
        logits = self.layers[0](x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def test_calls_under_autocast_give_what_the_model_gives_there() -> None:
    torch.manual_seed(0)
    model, x, y = Classifies(), torch.randn(6, 8), torch.randint(8, (6,))
    parallel = planner.compile(copy.deepcopy(model), "dp=1", example_inputs={"x": x, "y": y})
    programs = []
    for surroundings in (torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext()):
        model.zero_grad()
        parallel.zero_grad()
        with surroundings:
            expected, outputs = model(x, y), parallel(x, y)
            loss = parallel.train_step(x=x, y=y)
        expected["loss"].backward()
        programs.append(parallel._engine._maker.latest)
        assert outputs["logits"].dtype == expected["logits"].dtype
        torch.testing.assert_close(outputs["logits"], expected["logits"])
        torch.testing.assert_close(loss, expected["loss"].detach())
        for name, parameter in parallel.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), model.get_parameter(name).grad)  # type: ignore[union-attr]
    assert programs[0] is not programs[1]  # stages of a pipeline send what was traced: bfloat16, float32


class SplitHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x).unflatten(-1, (2, 4)).transpose(1, 2).sin().flatten(1)
        return {"loss": x.square().sum()}


def test_compiled_blocks_run_inside_a_device_context() -> None:
    """Dynamo does not trace ``Tensor.unflatten`` through one; on a GPU all programs run in one."""
    model, x = SplitHeads().double(), torch.randn(4, 8, dtype=torch.float64)
    traced = functools.partial(as_compiled, backend="aot_eager")
    with mock.patch.object(runtime.execution.binding, "as_compiled", traced), torch.device("cpu"):
        parallel = planner.compile(model, "dgx-h100:1x1", example_inputs={"x": x}, compiled=True)
        loss = parallel.train_step(x=x)
    torch.testing.assert_close(loss, model(x)["loss"].detach())
    (gradient,) = torch.autograd.grad(model(x)["loss"], model.layers[0].weight)
    torch.testing.assert_close(parallel.full_gradients()["layers.0.weight"], gradient)


def test_device_contexts_are_left_and_entered_again() -> None:
    def device() -> str:
        return torch.empty(()).device.type

    with torch.device("meta"):
        with outside_device_contexts():
            with in_hidden_device_contexts():
                inside = device()
            between = device()
        assert (between, inside, device()) == ("cpu", "meta", "meta")


@pytest.mark.parametrize(
    ("name", "calls"), [("UNRELATED", 1), ("PYTORCH_ALLOC_CONF", 0), ("PYTORCH_CUDA_ALLOC_CONF", 0)]
)
def test_memory_grows_in_place_unless_the_user_says_how(monkeypatch: pytest.MonkeyPatch, name: str, calls: int) -> None:
    for chosen in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(chosen, raising=False)
    monkeypatch.setenv(name, "backend:native")
    grow_segments.cache_clear()
    with mock.patch.object(torch._C, "_accelerator_setAllocatorSettings") as settings:
        grow_segments()
        grow_segments()
    grow_segments.cache_clear()
    assert [call.args for call in settings.call_args_list] == [("expandable_segments:True",)] * calls
