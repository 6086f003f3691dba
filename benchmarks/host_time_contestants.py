"""What ``benchmarks.host_time`` compares: operators, chains, collectives, units of weights and whole training steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types import I, P, R, S
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import planner
from benchmarks.host_time import Comparison, Contestant
from benchmarks.kernels_cases import OPERATORS, Case, Size
from benchmarks.kernels_contestants import EAGER, OURS, contestants
from benchmarks.kernels_measure import Run
from passes.ir.types import MeshShape
from planner.library import build_model, load_config, random_batch
from planner.verification.verify_model import slow_devices
from runtime.kernels.chain_call import Chain, _ChainRun
from runtime.mesh.virtual import virtual_mesh
from runtime.program_tools.adapters import apply_adapters
from runtime.zero.group import StateGroup
from runtime.zero.unit import Unit, UnitWeight

#: So small that operators do nothing but be called.
SMALLEST = Size("smallest", 16, 32, 32, heads=2, groups=2, head=8, batch=1, length=4)
MODELS = ("tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-whisper", "tiny-clip", "tiny-opt",
          "tiny-bloom", "tiny-siglip")  # fmt: skip
SAMPLES, TOKENS = 2, 4
LAYERS, WIDTH = 7, 8


def operators(device: torch.device) -> Iterator[Comparison]:
    """Every fused operator against how model families spell it."""
    for operator in OPERATORS:
        case = Case(operator, SMALLEST, "fp32")
        functions = {one.name: one.function for one in contestants(operator.name, backend="eager")}
        runs = []
        for name in (OURS, EAGER):
            function = functions[name]
            assert function is not None
            runs.append(_differentiated(Run(function, case, device)))
        yield Comparison("operator", operator.name, *runs)


def _differentiated(run: Run) -> Contestant:
    def backward(results: list[tuple[torch.Tensor, ...]]) -> None:
        outputs = [output for result in results for output in result]
        torch.autograd.grad(outputs, run.leaves, run.grads * len(results))

    return Contestant(run.forward, backward)


def _of(forward: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], grad: torch.Tensor) -> Contestant:
    """A call with one output, and the gradient that comes into it."""
    return Contestant(forward, lambda results: torch.autograd.grad(results, inputs, [grad] * len(results)))


# -- chains --------------------------------------------------------------------------------------------------------


def _gelu_of_sum(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias)


class _NoKernel:
    """Stands in for a Triton kernel: what its launch costs besides Triton's own work.

    Attributes:
        fn: what tiles that are measured on a GPU are filed under, as a kernel's own source.
    """

    fn = _gelu_of_sum

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: None


def chains(device: torch.device) -> Iterator[Comparison]:
    """A chain in its plain form, and the launch of its kernels, against its operators one by one."""
    chain = Chain(
        plain=_gelu_of_sum, forward=_NoKernel(), backward=_NoKernel(),
        inputs={"x": "float32", "bias": "float32"}, outputs={"y": "float32"}, grads=["y"], saved=["x", "bias"],
        gradients={"x": "full", "bias": "row"},
    )  # fmt: skip
    x = torch.randn(4, 16, device=device, requires_grad=True)
    bias = torch.randn(16, device=device, requires_grad=True)
    grad = torch.randn(4, 16, device=device)

    def of(forward: Callable[[], torch.Tensor]) -> Contestant:
        return _of(forward, (x, bias), grad)

    eager = of(lambda: _gelu_of_sum(x, bias))
    launched = of(lambda: _launched(chain, (x, bias)))
    yield Comparison("chain", "gelu(x + bias), plain form", of(lambda: chain(x, bias)), eager)
    yield Comparison("chain", "gelu(x + bias), launch without Triton's own", launched, eager)


def _launched(chain: Chain, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    results: tuple[torch.Tensor, ...] = _ChainRun.apply(chain, *tensors)
    return results[0]


# -- collectives ---------------------------------------------------------------------------------------------------


def collectives() -> Iterator[Comparison]:
    """What programs write for a collective with its gradient, against torch's collectives alone; nothing is sent."""
    apply_adapters()
    with virtual_mesh(MeshShape(("tp",), (2,))) as mesh, spmd.set_current_mesh(mesh):
        x, name = torch.randn(4, 16, requires_grad=True), mesh.get_group("tp").group_name
        half, same, double = (torch.randn(rows, 16) for rows in (2, 4, 8))
        torchs = torch.ops._c10d_functional

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            return torchs.wait_tensor(torchs.all_gather_into_tensor(tensor, 2, name))

        def scatter(tensor: torch.Tensor) -> torch.Tensor:
            return torchs.wait_tensor(torchs.reduce_scatter_tensor(tensor, "sum", 2, name))

        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            return torchs.wait_tensor(torchs.all_reduce(tensor, "sum", name))

        def alone(forward: Callable[..., Any], backward: Callable[..., Any] | None, grad: torch.Tensor) -> Contestant:
            again = None if backward is None else lambda results: [backward(grad) for _ in results]
            return Contestant(lambda: forward(x.detach()), again)

        for label, ours, theirs in (
            (
                "all_gather S(0) → R",
                _of(lambda: spmd.all_gather(x, "tp", src=S(0), dst=R), [x], double),
                alone(gather, scatter, double),
            ),
            (
                "reduce_scatter P → S(0)",
                _of(lambda: spmd.reduce_scatter(x, "tp", src=P, dst=S(0)), [x], half),
                alone(scatter, gather, half),
            ),
            (
                "all_reduce P → I",
                _of(lambda: spmd.all_reduce(x, "tp", src=P, dst=I), [x], same),
                alone(reduce, None, same),
            ),
        ):
            yield Comparison("collective", label, ours, theirs, "torch.ops alone")


# -- units of weights ----------------------------------------------------------------------------------------------


def _stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


def units() -> Iterator[Comparison]:
    """Seven tiny layers, forward and backward, with a unit's weights against FSDP2's; nothing is sent."""
    with virtual_mesh(MeshShape(("dp",), (2,))) as mesh:
        x = torch.randn(2, WIDTH)
        for zero in (0, 1, 2, 3):
            plain = fully_shard(_stack(), mesh=mesh) if zero else _stack()

            def eager(module: nn.Module = plain) -> None:
                module(x).sum().backward()

            other = "FSDP2" if zero else "the layers alone"
            ours = Contestant(_of_unit(x, zero, mesh))
            yield Comparison("unit", f"7 linears, ZeRO {zero}", ours, Contestant(eager), other)


def _of_unit(x: torch.Tensor, zero: int, mesh: DeviceMesh) -> Callable[[], None]:
    group, shape = StateGroup.of(mesh.get_group("dp")), (WIDTH, WIDTH)
    piece = (WIDTH // 2, WIDTH) if zero else shape
    unit = Unit(
        [UnitWeight(f"w{place}", nn.Parameter(torch.randn(piece)), shape) for place in range(LAYERS)],
        zero=zero,
        group=group,
    )

    def run() -> None:
        unit.begin(1)
        y = x
        for weight in unit.use():
            y = F.linear(y, weight)
        y.sum().backward()
        unit.finish()

    return run


# -- whole steps ---------------------------------------------------------------------------------------------------


def steps(device: torch.device) -> Iterator[Comparison]:
    """A training step on one device: planned for a mesh, and as a step, against Hugging Face's own model."""
    for name in MODELS:
        config = load_config(name)
        torch.manual_seed(0)
        model = build_model(config, device="cpu").to(device)
        batch = random_batch(config, batch_size=SAMPLES, seq_len=TOKENS)
        own = {key: one.to(device) if isinstance(one, torch.Tensor) else one for key, one in batch.items()}
        eager = _training(model, lambda model=model, own=own: model(**own).loss.backward())
        fix = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, "num_microbatches": 1, "recompute": "none"}
        for label, target, options in (("mesh", "dp=1", {}), ("step", slow_devices(1), {"fix": fix})):
            parallel = planner.compile(copy.deepcopy(model), target, example_inputs=batch, **options)
            ours = _training(parallel, lambda parallel=parallel, own=own: parallel.train_step(**own))
            yield Comparison("step", f"{name}, plan of a {label}", ours, eager, "Hugging Face")
    if dist.is_initialized():
        dist.destroy_process_group()


def _training(module: nn.Module, step: Callable[[], Any]) -> Contestant:
    def run() -> None:
        module.zero_grad()
        step()

    return Contestant(run)
