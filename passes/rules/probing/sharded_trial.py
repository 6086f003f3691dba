"""An operator run whole, then piece by piece as ranks would, and what differs: values, shapes or gradients."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from passes.ir.types import P, SpmdType, shard_dim
from passes.rules.probing.probe_call import ProbeCall, ProbeFailure, Shapes

#: Relative to the largest number of the tensor, by what the operator computes in.
_TOLERANCE = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4}


@dataclass
class WholeRun:
    """A call on whole tensors: what its shards must add up to."""

    call: ProbeCall
    tensors: list[torch.Tensor]
    outputs: list[torch.Tensor]
    upstream: list[torch.Tensor]
    gradients: list[torch.Tensor | None]

    @property
    def shapes(self) -> Shapes:
        return tuple(tuple(tensor.shape) for tensor in self.tensors)


def whole_run(call: ProbeCall, tensors: Sequence[torch.Tensor]) -> WholeRun:
    """Run a call on whole tensors, forward and backward.

    Raises:
        ProbeFailure: if it cannot be run, draws random numbers, changes its inputs, or is not the same twice.
    """
    before = random.getstate(), torch.random.get_rng_state()
    outputs, upstream, gradients = _run(call, tensors, None)
    if before[0] != random.getstate() or not torch.equal(before[1], torch.random.get_rng_state()):
        raise ProbeFailure("it draws random numbers")
    again, _, _ = _run(call, tensors, upstream)
    if any(_difference(one, two) for one, two in zip(again, outputs)):
        raise ProbeFailure("it gives other numbers when it is called again")
    return WholeRun(call, list(tensors), outputs, upstream, gradients)


def mismatch(whole: WholeRun, inputs: Sequence[SpmdType], outputs: Sequence[SpmdType], pieces: int) -> str | None:
    """What is wrong when ``pieces`` ranks hold ``inputs`` of these types and are said to give ``outputs``; None if
    nothing is.

    A gradient's type follows from its tensor's: sharded alike, summed up for R, the same on every rank for P.
    """
    held = [_pieces(tensor, spmd_type, pieces) for tensor, spmd_type in zip(whole.tensors, inputs)]
    upstream = [
        _pieces(tensor, spmd_type, pieces) if shard_dim(spmd_type) is not None else [tensor] * pieces
        for tensor, spmd_type in zip(whole.upstream, outputs)
    ]
    results, gradients = [], []
    for rank in range(pieces):
        try:
            local = _run(whole.call, [parts[rank] for parts in held], [parts[rank] for parts in upstream])
        except ProbeFailure as error:
            return f"on rank {rank} of {pieces}: {error}"
        results.append(local[0])
        gradients.append(local[2])
    for place, (expected, spmd_type) in enumerate(zip(whole.outputs, outputs)):
        wrong = _difference(_joined([result[place] for result in results], spmd_type), expected)
        if wrong:
            return f"output {place} of {pieces} ranks {wrong}"
    for place, (gradient, spmd_type) in enumerate(zip(whole.gradients, inputs)):
        if gradient is None:
            continue
        parts = [_known(local[place], like) for local, like in zip(gradients, held[place])]
        joined = parts if spmd_type == P else [_joined(parts, spmd_type if shard_dim(spmd_type) is not None else P)]
        for part in joined:
            wrong = _difference(part, gradient)
            if wrong:
                return f"the gradient of input {place} of {pieces} ranks {wrong}"
    return None


def sharded_outputs(whole: WholeRun, inputs: Sequence[SpmdType], pieces: int) -> tuple[SpmdType, ...] | None:
    """The types that the outputs can have by their shapes: all sharded, or all partial sums; None for neither."""
    tensors = [_pieces(tensor, spmd_type, pieces)[0] for tensor, spmd_type in zip(whole.tensors, inputs)]
    try:
        local = whole.call.run(tensors)
    except ProbeFailure:
        return None
    types: list[SpmdType] = []
    for part, expected in zip(local, whole.outputs):
        if part.dim() != expected.dim():
            return None
        cut = [dim for dim, size in enumerate(expected.shape) if part.shape[dim] != size]
        if len(cut) > 1 or any(part.shape[dim] * pieces != expected.shape[dim] for dim in cut):
            return None
        types.append(f"S({cut[0]})" if cut else P)
    if P in types and (set(types) != {P} or not all(output.is_floating_point() for output in whole.outputs)):
        return None
    return tuple(types)


def _run(
    call: ProbeCall, tensors: Sequence[torch.Tensor], upstream: Sequence[torch.Tensor] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor | None]]:
    """Outputs, the gradients that they are given, and the gradients of the inputs."""
    leaves = [tensor.detach().clone() for tensor in tensors]
    for leaf, differentiable in zip(leaves, call.differentiable):
        leaf.requires_grad_(differentiable)
    outputs = call.run(leaves)
    if any(not torch.equal(leaf.detach(), tensor) for leaf, tensor in zip(leaves, tensors) if not tensor.isnan().any()):
        raise ProbeFailure("it changes its inputs")
    if upstream is None:
        generator = torch.Generator("cpu").manual_seed(len(outputs))
        upstream = [_noise(output, generator) for output in outputs]
    pairs = [(output, grad) for output, grad in zip(outputs, upstream) if output.requires_grad]
    inputs = [leaf for leaf in leaves if leaf.requires_grad]
    gradients: list[torch.Tensor | None] = [None] * len(inputs)
    if pairs and inputs:
        try:
            gradients = list(
                torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
            )
        except Exception as error:  # an operator without a backward, or whose backward fails
            raise ProbeFailure(f"backward: {error}"[:200]) from None
    by_leaf = {id(leaf): _known(gradient, leaf) for leaf, gradient in zip(inputs, gradients) if pairs}
    return [output.detach() for output in outputs], list(upstream), [by_leaf.get(id(leaf)) for leaf in leaves]


def _noise(output: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not (output.is_floating_point() or output.is_complex()):
        return torch.zeros_like(output)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype, device="cpu")


def _known(gradient: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _pieces(tensor: torch.Tensor, spmd_type: SpmdType, pieces: int) -> list[torch.Tensor]:
    dim = shard_dim(spmd_type)
    if dim is not None:
        return list(tensor.chunk(pieces, dim))
    if spmd_type != P:
        return [tensor] * pieces
    generator = torch.Generator("cpu").manual_seed(pieces)
    others = [_noise(tensor, generator) for _ in range(pieces - 1)]
    return [tensor - sum(others), *others]


def _joined(parts: list[torch.Tensor], spmd_type: SpmdType) -> torch.Tensor:
    dim = shard_dim(spmd_type)
    if dim is None:
        return sum(parts[1:], parts[0])
    return torch.cat(parts, dim)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> str | None:
    """How ``actual`` is not ``expected``, in words; None if it is."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"has shape {list(actual.shape)} and dtype {actual.dtype}, not {list(expected.shape)}, {expected.dtype}"
    if not (expected.is_floating_point() or expected.is_complex()):
        return None if torch.equal(actual, expected) else "is not that of one device"
    tolerance = _TOLERANCE.get(str(expected.dtype).removeprefix("torch."), 1e-2)
    finite = expected[expected.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    if torch.allclose(actual, expected, rtol=tolerance, atol=tolerance * scale + 1e-300, equal_nan=True):
        return None
    error = float((actual - expected).abs().nan_to_num(nan=float("inf")).max())
    return f"differs from that of one device by {error:.3g} (its largest number is {scale:.3g})"
