"""One change of type as one line of source: a call of ``spmd_types``."""

from __future__ import annotations

from passes.emit.quoting import literal
from passes.ir.conversions import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVES, REDUCE_SCATTER
from passes.ir.types import I, MeshShape, P, R, SpmdType, shard_dim
from passes.shard import Convert
from passes.tables import format_bytes

#: Conversions that spmd_types only does when told that they are meant.
_EXPERT = {(I, P), (R, I)}
#: Collectives that reduce; in reduced precision spmd_types wants the dtype of such a backward said.
_REDUCING = (ALL_REDUCE, REDUCE_SCATTER)
_REDUCED_PRECISION = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
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
    value = convert.source.value
    if value.dtype in _REDUCED_PRECISION and value.requires_grad and step.collectives[1] in _REDUCING:
        options += f', backward_options={{"op_dtype": torch.{value.dtype}}}'
    return f"spmd.{call}({source}, {axis}, {options})"


def _in_microbatch(source: str, target: SpmdType, axis: str) -> str:
    """What one micro-batch takes of a value that is whole on the batch axis."""
    if target == P:  # one of all ranks and micro-batches keeps the value
        return f"ops.of_first_microbatch({source})"
    dim = shard_dim(target)
    return source if dim is None else f"ops.of_microbatch({source}, {literal(axis)}, {dim})"


def conversion_comment(convert: Convert) -> str:
    """``all-gather 16.8 MB, backward reduce-scatter``; empty if nothing is sent."""
    parts = []
    if convert.forward:
        parts.append(_TITLES[convert.forward])
    if convert.backward:
        parts.append(f"backward {_TITLES[convert.backward]}")
    return f"{', '.join(parts)}: {format_bytes(convert.num_bytes)}" if parts else ""


def type_source(spmd_type: SpmdType) -> str:
    """A type as source: the letters are imported from spmd_types."""
    dim = shard_dim(spmd_type)
    return spmd_type if dim is None else f"S({dim})"
