"""Python source of what one rank computes for one operator.

``expression`` gives the right-hand side of an assignment: a public torch function where there is one, local sizes in
views, partial sums declared where a contraction was cut, and ``runtime.ops`` where the operator communicates or draws
random numbers. Its value has, under ``spmd_types``' local checker, the types that the plan gives the outputs.
"""

from __future__ import annotations

from passes.emit.expression_writers import WRITERS
from passes.emit.local_call import LocalCall, LocalTensor, Writer
from passes.rules.rule import TABLE

__all__ = ["LocalCall", "LocalTensor", "expression"]


def expression(call: LocalCall) -> str:
    """Source of the local computation of ``call``; a tuple if the operator has several outputs.

    Raises:
        ValueError: if the operator is unknown to torch.
    """
    writer = Writer(call)
    by_table = call.rule is None or call.rule.source == TABLE
    special = WRITERS.get(call.node.op) if by_table else None
    source = special(writer) if special is not None else writer.plain()
    return writer.typed(source)
