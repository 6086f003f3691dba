"""Literal tensors in a model's code (``torch.tensor(8.0)``): those that every layer makes for itself become one."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from passes.capture.open_shapes import StaticProgram
from passes.torch_compat.tensor_fields import FakeTensor

#: Larger ones are left alone: comparing them would take long.
MAX_ELEMENTS = 4096


def merge_equal_literals(program: ExportedProgram | StaticProgram) -> None:
    """Give the users of a literal tensor the first one of the same dtype, shape and values.

    A literal that is used other than by copying it, and so may be written to, is left alone; so is one in the memory of
    an array (``torch.from_numpy``), which a script may write to.
    """
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    first: dict[Hashable, torch.fx.Node] = {}
    for spec in program.graph_signature.input_specs:
        data = program.constants.get(spec.target) if spec.target is not None else None
        if spec.kind is not InputKind.CONSTANT_TENSOR or not _is_own_and_small(data):
            continue
        assert data is not None
        node = placeholders[spec.arg.name]
        if all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users):
            key = (data.dtype, data.shape, tuple(data.flatten().tolist()))
            node.replace_all_uses_with(first.setdefault(key, node))


def _is_own_and_small(data: object) -> bool:
    real = isinstance(data, torch.Tensor) and not isinstance(data, FakeTensor)
    if not real or data.is_meta or data.numel() > MAX_ELEMENTS:  # type: ignore[attr-defined]
        return False
    return data.untyped_storage().resizable()  # type: ignore[attr-defined, no-any-return]
