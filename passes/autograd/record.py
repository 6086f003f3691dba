"""What one operator call does to memory, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecordedOperand:
    """An input of a call as far as memory is concerned; ``strides`` in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True)
class ComputedTensor:
    """A tensor made inside a call: bytes, and the ``"input"`` or ``"output"`` at ``place`` that is cut as it is."""

    num_bytes: int
    kind: str
    place: int


@dataclass(frozen=True)
class CallRecord:
    """One call; inputs and outputs are given by place (an input that is passed twice counts once).

    Attributes:
        kept_inputs, kept_outputs: whose storage autograd keeps.
        extras: what autograd keeps beyond them.
        expensive_outputs, expensive_made: outputs of the call's expensive kernels.
        is_expensive: whether it has any.
        temporary: the largest tensor made inside that is gone when the call returns, None if there is none.
        strides: of each output, in elements.
        alias_of: for each output, the input that it shares storage with, None if it has its own.
    """

    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    extras: tuple[ComputedTensor, ...]
    expensive_outputs: tuple[int, ...]
    expensive_made: tuple[ComputedTensor, ...]
    is_expensive: bool
    temporary: ComputedTensor | None
    strides: tuple[tuple[int, ...], ...]
    alias_of: tuple[int | None, ...]
