"""Values that tracing read in Python, and how to read them again from the inputs of another call.

A program that was traced with ``mask.sum().item() == 7`` is right for calls whose mask has that sum. The operators that
led to the number are kept as steps, and each reading says what it was: a call with another reading needs another
program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: Where a tensor is in a call.
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class StepResult:
    """The result of an earlier step, by its number."""

    step: int


@dataclass(frozen=True)
class GuardStep:
    """One operator on results of earlier steps.

    Attributes:
        op: ``aten.sum.default``; ``input`` (of a path), ``buffer`` (of a name), ``literal`` (shape, dtype, bytes),
            ``held`` (a ``HeldTensor``), ``blank`` (shape, dtype: only these matter), ``item`` (of several results, by
            number) and ``tolist`` (all numbers of a tensor) are no operators.
        args, kwargs: with ``StepResult`` for tensors.
        writes: whether it changes an argument in place; of an input, buffer or held tensor: whether a later step does.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    writes: bool = False


@dataclass(frozen=True, eq=False)
class HeldTensor:
    """A tensor that a script holds and may change: equal to itself alone, whatever it holds."""

    tensor: Any = field(repr=False)


@dataclass(frozen=True)
class GuardReading:
    """A value that Python saw.

    Attributes:
        source: what was read.
        expected: a number or flag, or tuples of them; of a size that depends on values, the shapes of all results.
        place: module and line of code that read it.
    """

    source: StepResult
    expected: Any
    place: str = field(compare=False)


@dataclass(frozen=True)
class ValueGuards:
    """Steps and readings in the order of the call; a ``StepResult`` counts steps alone."""

    entries: tuple[GuardStep | GuardReading, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.entries)

    @property
    def steps(self) -> tuple[GuardStep, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, GuardStep))

    @property
    def readings(self) -> tuple[GuardReading, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, GuardReading))

    @property
    def counts(self) -> tuple[GuardReading, ...]:
        """The readings of how many entries of a mask are true."""
        steps = self.steps
        return tuple(one for one in self.readings if steps[one.source.step].op == "aten.nonzero.default")

    @property
    def input_paths(self) -> tuple[Path, ...]:
        """The inputs whose values are read."""
        return tuple(dict.fromkeys(step.args[0] for step in self.steps if step.op == "input"))

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers whose values are read."""
        return tuple(dict.fromkeys(step.args[0] for step in self.steps if step.op == "buffer"))
