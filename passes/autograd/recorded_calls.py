"""Records of operator calls by what they depend on: each distinct call is observed once (see ``operator_records``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cost_models.records import from_plain
from passes.autograd.record import CallRecord, RecordedOperand
from passes.ir.graph import Node, Ref, map_refs
from passes.ir.recent_results import RecentResults
from passes.ir.torch_facts import asked

_records: RecentResults[CallRecord | None] = RecentResults(8192)
#: Options of fused operators that only say where a GPU's kernels write in the backward pass.
_BACKWARD_MARKS = ("reuse_logits",)


def record_call(node: Node, operands: Mapping[str, RecordedOperand], *, grad: bool, kernels: str) -> CallRecord | None:
    """The record of ``node``, None if torch cannot make the call without data.

    Args:
        operands: name → shape, strides, dtype and gradient of every input.
        grad: whether a gradient comes back to the call.
        kernels: whose kernels run (a key of ``passes.autograd.kernels.REPLACEMENTS``).
    """
    names = tuple(dict.fromkeys(node.inputs))
    places = {name: Ref(str(place)) for place, name in enumerate(names)}
    args = map_refs(node.args, lambda ref: places[ref.name])
    kwargs = {
        key: map_refs(value, lambda ref: places[ref.name])
        for key, value in node.kwargs.items()
        if kernels != "gpu" or key not in _BACKWARD_MARKS
    }
    shapes = tuple(operands[name] for name in names)
    entries = [(shape.shape, shape.strides, shape.dtype, shape.requires_grad) for shape in shapes]
    question = repr((node.op, args, kwargs, entries, grad, kernels))

    def observe() -> dict[str, Any] | None:
        from passes.autograd.operator_records import observed

        plain = dataclasses.replace(
            node, name="call", args=args, kwargs=kwargs, outputs=(), module_path="", module_class="", key=""
        )
        record = observed(plain, shapes, grad=grad, kernels=kernels)
        return None if record is None else dataclasses.asdict(record)

    answer = asked("call", question, observe)
    return _records.get(question, lambda: None if answer is None else from_plain(CallRecord, answer, where="record"))
