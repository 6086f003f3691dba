"""The dtype of a plan's parameters."""

from __future__ import annotations

from passes.plan.plan import Plan


def float_dtype(plan: Plan) -> str | None:
    """The dtype that most parameters have."""
    dtypes = [tensor.dtype for tensor in plan.states.values() if tensor.trainable and "float" in tensor.dtype]
    return max(dict.fromkeys(dtypes), key=dtypes.count) if dtypes else None
