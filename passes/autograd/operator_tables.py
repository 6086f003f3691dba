"""Tables of operators by name: what can be told without making the call."""

from __future__ import annotations

from passes.ir.graph import Node


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in names.split())


#: Operators that only rename memory: no time, and their output shares its input's storage.
VIEWS = _aten(
    "view reshape _unsafe_view transpose permute t numpy_T mT expand expand_as unsqueeze squeeze select slice narrow "
    "split split_with_sizes chunk unbind alias detach flatten unflatten view_as movedim swapaxes diagonal "
    "tensor_split unfold"
)

#: Operators whose backward needs none of their inputs or outputs (views need none either).
SAVES_NOTHING = _aten(
    "add sub rsub neg sum mean cat stack clone contiguous to _to_copy type_as pad constant_pad_nd roll flip embedding "
    "index index_select gather masked_fill where cumsum repeat zeros_like ones_like full_like new_zeros new_ones "
    "avg_pool2d upsample_nearest2d"
) | {"meshwright.embedding"}


def base_name(op: str) -> str:
    """``aten.linear`` for ``aten.linear.default``."""
    namespace, _, rest = op.partition(".")
    return f"{namespace}.{rest.split('.')[0]}"


def is_view(node: Node) -> bool:
    return base_name(node.op) in VIEWS


def saves_inputs(node: Node) -> bool:
    """Whether autograd keeps the operator's inputs (or as much) for the backward pass."""
    name = base_name(node.op)
    if name in ("aten.mul", "aten.div"):
        return len(node.inputs) > 1
    return name not in SAVES_NOTHING and name not in VIEWS
