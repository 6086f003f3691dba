"""A whole Llama layer, forward and backward, for ``benchmarks.kernels``: eager, compiled, as an emitted program."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import planner
from benchmarks.kernels_cases import BOTH
from benchmarks.kernels_contestants import COMPILED, EAGER, OURS
from benchmarks.kernels_measure import Row
from benchmarks.kernels_timing import Clock, largest_error
from planner.library import load_config

NAME = "layer"


@dataclass(frozen=True)
class LayerSize:
    """A model of the config library, and the batch that one of its layers gets."""

    config: str
    batch: int
    length: int
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.config}, {self.batch} × {self.length}"


LLAMA_3_8B = LayerSize("llama-3-8b", 1, 4096, "bf16")
TINY_LAYER = LayerSize("tiny-llama", 1, 32, "fp32")
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Layer(nn.Module):
    """One decoder layer of a Llama, with the angles of its rotary embedding."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        # Numbered, as in a model: what may be fused within a layer is told by that.
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        result: torch.Tensor = self.layers[0](hidden_states, position_embeddings=self.rotary(hidden_states, positions))
        return result


def build(size: LayerSize, device: torch.device) -> Layer:
    """A layer with random weights, the same at every call; frequencies of the angles stay float32."""
    config = load_config(size.config)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device(device):
        model = Layer(config)
    model.layers.to(_DTYPES[size.dtype])
    return model.train()


def measure_layer(size: LayerSize, clock: Clock, *, backend: str) -> list[Row]:
    """Rows of all contestants, forward and backward; gradients go to the parameters and to the input."""

    def compiled(model: Layer) -> Callable[..., Any]:
        return torch.compile(model, dynamic=False, backend=backend)

    def emitted(model: Layer) -> Callable[..., Any]:
        return planner.compile(model, "dp=1", example_inputs={"hidden_states": _input(size, clock.device)})

    torch.compiler.reset()
    rows = []
    truth = _truth(size, clock.device)
    for name, make in {EAGER: lambda model: model, COMPILED: compiled, OURS: emitted}.items():
        rows.append(Row(NAME, "", size.label, size.dtype, BOTH, name, **_found(make, size, clock, truth)))
        clock.release()
    if dist.is_initialized():
        dist.destroy_process_group()
    return rows


def _found(
    make: Callable[[Layer], Callable[..., Any]], size: LayerSize, clock: Clock, truth: torch.Tensor | None
) -> dict[str, Any]:
    try:
        model = build(size, clock.device)
        call, hidden = make(model), _input(size, clock.device)
        weights = list(getattr(call, "parameters", model.parameters)())
        grad = torch.ones_like(hidden, requires_grad=False)

        def step(_: Any = None) -> None:
            for tensor in (*weights, hidden):
                tensor.grad = None
            call(hidden_states=hidden).backward(grad)

        error = None if truth is None else largest_error([call(hidden_states=hidden)], [truth])
        step()
        for tensor in (*weights, hidden):
            tensor.grad = None
        peak = clock.peak_bytes(step)
        timing = clock.time(step)
    except Exception as problem:  # whatever a compiler raises: the others go on
        return {"note": f"failed: {type(problem).__name__}: {problem}".splitlines()[0][:200]}
    times = {"seconds": timing.median, "low": timing.low, "high": timing.high}
    return {**times, "peak_bytes": peak, "error": error}


def _input(size: LayerSize, device: torch.device) -> torch.Tensor:
    width = load_config(size.config).hidden_size
    generator = torch.Generator(device).manual_seed(1)
    shape = (size.batch, size.length, width)
    return torch.randn(shape, dtype=_DTYPES[size.dtype], device=device, generator=generator).requires_grad_()


def _truth(size: LayerSize, device: torch.device) -> torch.Tensor | None:
    """The layer's output in float64; None where the device's memory does not hold what that takes."""
    exact = copy.deepcopy(build(size, device).layers[0]).double()
    rotary = build(size, device).rotary
    hidden = _input(size, device).detach().double()
    positions = torch.arange(size.length, device=device)[None]
    try:
        with torch.no_grad():
            result: torch.Tensor = exact(hidden, position_embeddings=rotary(hidden, positions))
    except torch.OutOfMemoryError:
        return None
    return result
