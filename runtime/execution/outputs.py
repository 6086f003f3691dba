"""What a parallel module returns: like the original's outputs, gathered only when they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import spmd_types as spmd
import torch

from passes.emit import OutputSpec, Program
from passes.ir.types import I, P, Placement, R, largest_part, shard_dim, uneven_dims
from runtime import ops
from runtime.calls.model_call import Path
from runtime.execution.deferred_entries import entry_keys
from runtime.execution.deferred_outputs import below, can_be_deferred, deferred
from runtime.execution.deferred_values import DeferredValue
from runtime.execution.gradients_of_parameters import GradientsOfParameters
from runtime.mesh.layout import Layout

Key = TypeVar("Key")


def whole_output(local: torch.Tensor, placement: Placement, layout: Layout, shape: tuple[int, ...]) -> torch.Tensor:
    """A whole tensor from a rank's part, differentiable: every rank computes the same with it from here on.

    ``shape`` is that of the whole; of a dim that is cut unevenly ranks send zeros behind their parts.
    """
    if all(size == 1 for size in layout.mesh.sizes):
        return local
    target = spmd.I if local.requires_grad else spmd.R
    steps = list(zip(layout.mesh.names, layout.mesh.sizes, placement))
    uneven = uneven_dims(shape, placement, layout.mesh)
    with spmd.set_current_mesh(layout.device_mesh):
        for name, size, spmd_type in reversed(steps):
            dim = shard_dim(spmd_type)
            if size == 1:
                continue
            if dim is not None:
                options = _reduced_options(local) if target is spmd.R else {}
                if dim in uneven:
                    local = ops.padded(local, dim, largest_part(shape[dim], size))
                local = spmd.all_gather(local, name, src=spmd.S(dim), dst=target, **options)
                if dim in uneven:
                    local = ops.trimmed(local, dim, shape[dim])
            elif spmd_type == P:
                local = spmd.all_reduce(local, name, src=spmd.P, dst=target)
            elif spmd_type == R and target is spmd.I:
                local = spmd.convert(local, name, src=spmd.R, dst=spmd.I, expert_mode=True)
    return local


def _reduced_options(local: torch.Tensor) -> dict[str, Any]:
    return {"backward_options": {"op_dtype": local.dtype}} if local.is_floating_point() else {}


def loss_of(outputs: Any) -> torch.Tensor:
    """The loss in what a model returns: the only tensor, ``loss`` by key or attribute, or the first of a tuple."""
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return outputs["loss"]
    return outputs.loss if hasattr(outputs, "loss") else outputs[0]


def is_whole(spec: OutputSpec, program: Program) -> bool:
    """Whether every rank has all of an output, with a gradient that needs no further thought."""
    plain = (I,) if spec.requires_grad else (I, R)
    return all(size == 1 or spmd_type in plain for size, spmd_type in zip(program.mesh.sizes, spec.placement))


def wrap_outputs(
    program: Program, outputs: dict[str, torch.Tensor], layout: Layout, requested: GradientsOfParameters
) -> Any:
    """The model's own container, whose sharded outputs are gathered when they are read."""
    pending = {spec.path: spec for spec in program.outputs if not is_whole(spec, program)}
    outputs = {path: local if path in pending else _differentiable(local, requested) for path, local in outputs.items()}
    rebuild: Callable[[dict[str, Any]], Any] = program.unflatten or dict
    if not pending:
        return rebuild(outputs)
    return _Gatherer(outputs, pending, layout, rebuild, requested).deferred()


def counted_once(outputs: Mapping[str, torch.Tensor], copies: int) -> dict[str, torch.Tensor]:
    """Outputs of which ``copies`` ranks have the same: gradients that come back are those ranks' shares of one sum."""
    return _with_gradients_times(1 / copies, outputs)


def with_all_shares(inputs: Mapping[Path, torch.Tensor], copies: int) -> dict[Path, torch.Tensor]:
    """Inputs that ``copies`` ranks compute the same with: the gradient of each is the sum of their equal shares."""
    return _with_gradients_times(copies, inputs)


def _with_gradients_times(factor: float, tensors: Mapping[Key, torch.Tensor]) -> dict[Key, torch.Tensor]:
    return {
        key: _with_gradient(tensor, lambda gradient: gradient * factor) if tensor.requires_grad else tensor
        for key, tensor in tensors.items()
    }


def _differentiable(output: Any, requested: GradientsOfParameters) -> Any:
    return requested.shown(output) if isinstance(output, torch.Tensor) and output.requires_grad else output


def _with_gradient(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with torch.enable_grad():
        alias = tensor.view_as(tensor)  # others may use the tensor itself, whose gradient is not changed
    alias.register_hook(change)
    return alias


class _Gatherer:
    """Makes outputs whole, each once."""

    def __init__(
        self,
        outputs: dict[str, torch.Tensor],
        pending: Mapping[str, OutputSpec],
        layout: Layout,
        rebuild: Callable[[dict[str, Any]], Any],
        requested: GradientsOfParameters,
    ) -> None:
        self.outputs = dict(outputs)
        self.pending = dict(pending)
        self.layout = layout
        self.rebuild = rebuild
        self.requested = requested

    def container(self, paths: Iterable[str]) -> Any:
        """The model's container with the outputs at ``paths`` whole (the others may still be parts)."""
        for path in paths:
            self.tensor(path)
        return self.rebuild(dict(self.outputs))

    def tensor(self, path: str) -> torch.Tensor:
        """The output at ``path``, whole."""
        spec = self.pending.pop(path, None)
        if spec is not None:
            whole = whole_output(self.outputs[path], spec.placement, self.layout, spec.shape)
            self.outputs[path] = _differentiable(whole, self.requested)
        return self.outputs[path]

    def entry(self, key: Any) -> Any:
        """What the model's container has at a key, field or place, whole."""
        container = self.container(())
        return item(self.container(below(container, key, self.outputs)), key)

    def missing(self, key: Any) -> Exception:
        return KeyError(key)  # no output is left out

    def deferred(self) -> Any:
        """The model's container, with stand-ins for what is not whole yet."""
        stand_ins = {
            path: DeferredValue(f"{list(spec.shape)}, sharded until it is read", partial(self.tensor, path))
            for path, spec in self.pending.items()
        }
        example = self.rebuild({**self.outputs, **stand_ins})
        if isinstance(example, DeferredValue):
            return self.tensor(next(iter(self.pending)))
        if not can_be_deferred(example):
            return self.container(list(self.pending))
        pending = [key for key in entry_keys(example) if below(example, key, self.pending)]
        return deferred(example, self, pending=pending)


def item(container: Any, key: Any) -> Any:
    """What a container has at a key, field or place."""
    return container[key] if isinstance(container, (Mapping, tuple, list)) else getattr(container, key)
