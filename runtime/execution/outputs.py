"""What a parallel module returns: like the original's outputs, gathered only when they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import spmd_types as spmd
import torch

from passes.emit import OutputSpec, Program
from passes.ir.types import I, P, Placement, R, largest_part, shard_dim, uneven_dims
from runtime import ops
from runtime.calls.model_call import Path
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
    """The model's own container if every output is whole; else one like it that gathers on access."""
    pending = {spec.path: spec for spec in program.outputs if not is_whole(spec, program)}
    outputs = {path: local if path in pending else _differentiable(local, requested) for path, local in outputs.items()}
    rebuild: Callable[[dict[str, Any]], Any] = program.unflatten or dict
    if not pending:
        return rebuild(outputs)
    gatherer = _Gatherer(outputs, pending, layout, rebuild, requested)
    example = rebuild(dict(outputs))
    if isinstance(example, torch.Tensor):
        return gatherer.container(pending)
    return (
        ParallelSequence(gatherer, example) if isinstance(example, (list, tuple)) else ParallelOutput(gatherer, example)
    )


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

    def container(self, paths: Any) -> Any:
        """The model's container with the outputs at ``paths`` whole (the others may still be parts)."""
        for path in list(paths):
            spec = self.pending.pop(path, None)
            if spec is not None:
                whole = whole_output(self.outputs[path], spec.placement, self.layout, spec.shape)
                self.outputs[path] = _differentiable(whole, self.requested)
        return self.rebuild(dict(self.outputs))

    def below(self, key: str) -> list[str]:
        """Paths of the outputs that are, or are part of, what the container has at ``key``."""
        return [path for path in self.outputs if path == key or path.startswith(f"{key}.")]


class ParallelOutput(Mapping[str, Any]):
    """Like a Hugging Face ``ModelOutput`` or a dict: by attribute, key, index; gathered on access."""

    def __init__(self, gatherer: _Gatherer, example: Any) -> None:
        self._gatherer = gatherer
        self._keys = tuple(example.keys()) if isinstance(example, Mapping) else tuple(vars(example))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return self.to_tuple()[key]
        if key in self._keys:
            return _item(self._gatherer.container(self._gatherer.below(str(key))), key)
        if isinstance(key, str):
            raise KeyError(key)
        return self[self._keys[key]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name not in self._keys:
            attribute = getattr(self._gatherer.container(()), name, _MISSING) if not name.startswith("_") else _MISSING
            if attribute is _MISSING:
                raise AttributeError(f"the model's output has no {name!r}, only {', '.join(self._keys)}")
            return attribute
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __repr__(self) -> str:
        sharded = ", ".join(self._gatherer.pending) or "none"
        return f"ParallelOutput({', '.join(self._keys)}; sharded until looked at: {sharded})"

    def to_tuple(self) -> tuple[Any, ...]:
        """All values, gathered."""
        return tuple(self[key] for key in self._keys)


class ParallelSequence(Sequence[Any]):
    """Like the tuple (named or not) or list that the model returns; a sharded output is gathered on access."""

    def __init__(self, gatherer: _Gatherer, example: Sequence[Any]) -> None:
        self._gatherer = gatherer
        self._length = len(example)
        self._names: tuple[str, ...] = getattr(example, "_fields", ())

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self[position] for position in range(*index.indices(self._length)))
        position = range(self._length)[index]
        key = self._names[position] if self._names else str(position)
        return self._gatherer.container(self._gatherer.below(key))[position]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._names:
            raise AttributeError(
                f"the model's output has no {name!r}, only {', '.join(self._names) or 'numbered ones'}"
            )
        return self[self._names.index(name)]

    def __len__(self) -> int:
        return self._length


_MISSING = object()


def _item(container: Any, key: Any) -> Any:
    return container[key] if isinstance(container, Mapping) else getattr(container, key)
