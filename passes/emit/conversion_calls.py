"""One change of type as one line of source: a call of ``spmd_types``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from passes.emit.quoting import literal
from passes.ir.conversions import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVES, REDUCE_SCATTER
from passes.ir.types import I, MeshShape, P, R, SpmdType, largest_part, shard_dim, uneven_dims
from passes.plan.text_tables import format_bytes
from passes.shard import Convert

#: Conversions that spmd_types only does when told that they are meant.
_EXPERT = {(I, P), (R, I)}
#: Collectives that reduce; in reduced precision spmd_types wants the dtype of such a backward said.
_REDUCING = (ALL_REDUCE, REDUCE_SCATTER)
_REDUCED_PRECISION = frozenset({"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})
#: What a value is called that is whole already and becomes of another type.
_PREFIXES = {P: "partial", R: "replicated", I: "invariant"}
_TITLES = {name: name.replace("_", "-") for name in COLLECTIVES}


def conversion_call(convert: Convert, source: str, mesh: MeshShape, *, batch_axis: str | None = None) -> str:
    """``spmd.all_gather(x, "tp", src=S(1), dst=R)``; ``batch_axis`` is one that stands for micro-batches too.

    Over several axes at once: ``spmd.all_gather(x, ops.joint("dp", "tp"), src=S(1), dst=R)``.
    """
    step = convert.step
    names = [mesh.names[axis] for axis in step.axes]
    axis = literal(names[0]) if len(names) == 1 else f"ops.joint({', '.join(map(literal, names))})"
    if names == [batch_axis] and step.source_type in (R, I):
        source = _in_microbatch(source, step.target_type, names[0])
    pair = (step.source_type, step.target_type)
    call = convert.forward if convert.forward in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL) else "convert"
    options = f"src={type_source(pair[0])}, dst={type_source(pair[1])}"
    if pair in _EXPERT:
        options += ", expert_mode=True"
    uneven = _uneven_dims(convert, mesh)
    source = _with_equal_parts(convert, source, uneven, mesh)
    return _without_padding(convert, f"spmd.{call}({source}, {axis}, {options})", uneven, mesh)


def _uneven_dims(convert: Convert, mesh: MeshShape) -> tuple[int, ...]:
    """The dims that the step cuts, or makes whole, of which ranks hold parts of unequal length."""
    shape, step = convert.source.value.shape, convert.step
    dims = {**uneven_dims(shape, step.source, mesh), **uneven_dims(shape, step.target, mesh)}
    return tuple(dim for dim, axis in dims.items() if axis in step.axes)


def _with_equal_parts(convert: Convert, source: str, uneven: Sequence[int], mesh: MeshShape) -> str:
    """``source`` with zeros behind, so that all ranks send and receive as much as the first."""
    step = convert.step
    for dim in uneven:
        part = largest_part(convert.source.value.shape[dim], mesh.sizes[step.axis])
        size = part if shard_dim(step.source_type) == dim else part * mesh.sizes[step.axis]
        source = f"ops.padded({source}, {dim}, {size})"
    return source


def _without_padding(convert: Convert, source: str, uneven: Sequence[int], mesh: MeshShape) -> str:
    """``source`` without the zeros: of a dim that is whole now, or of this rank's part of one that is cut."""
    step = convert.step
    for dim in uneven:
        axis = f", {literal(mesh.names[step.axis])}" if shard_dim(step.target_type) == dim else ""
        source = f"ops.trimmed({source}, {dim}, {convert.source.value.shape[dim]}{axis})"
    return source


def _in_microbatch(source: str, target: SpmdType, axis: str) -> str:
    """What one micro-batch takes of a value that is whole on the batch axis."""
    if target == P:  # one of all ranks and micro-batches keeps the value
        return f"ops.of_first_microbatch({source})"
    dim = shard_dim(target)
    return source if dim is None else f"ops.of_microbatch({source}, {literal(axis)}, {dim})"


def conversion_comment(convert: Convert) -> str:
    """``16.8 MB, backward reduce-scatter``; empty if nothing is sent."""
    parts = [format_bytes(convert.num_bytes)] if convert.forward or convert.backward else []
    if convert.backward and convert.backward != convert.forward:
        parts.append(f"backward {_TITLES[convert.backward]}")
    return ", ".join(parts)


def converted_name(convert: Convert, source: str) -> str:
    """``local_labels``: a name for a conversion of what is used as it was, too."""
    from_type, to_type = convert.step.source_type, convert.step.target_type
    if shard_dim(to_type) is not None:
        return f"local_{source}"
    return f"{'full' if shard_dim(from_type) is not None else _PREFIXES[to_type]}_{source}"


def reduced_dtypes(converts: Iterable[Convert]) -> list[str]:
    """The dtypes below float32 in which gradients are reduced."""
    dtypes_of_gradients = {
        convert.source.value.dtype
        for convert in converts
        if convert.source.value.requires_grad and convert.step.collectives[1] in _REDUCING
    }
    return sorted(dtypes_of_gradients & _REDUCED_PRECISION)


def type_source(spmd_type: SpmdType) -> str:
    """A type as source: the letters are imported from spmd_types."""
    dim = shard_dim(spmd_type)
    return spmd_type if dim is None else f"S({dim})"
