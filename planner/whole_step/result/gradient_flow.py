"""Which locals of a program get a gradient: a state may get one by what its unit hands on to others alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from passes.shard import Compute, Convert, Local, Repeat
from passes.shard.operations import Operation


@dataclass
class GradientFlow:
    """The locals of a section that get a gradient, and those of the copies of its blocks.

    Args:
        live: names of the nodes that receive a gradient.
    """

    live: frozenset[str]
    of_copies: dict[int, tuple[frozenset[Local], ...]] = field(default_factory=dict)

    def through(self, operations: Sequence[Operation], results: Iterable[Local] = ()) -> frozenset[Local]:
        """The locals to which operations hand a gradient, where ``results`` get one from outside."""
        reached = set(results)
        for operation in reversed(operations):
            if isinstance(operation, Compute):
                reached.update(operation.inputs if operation.node.name in self.live else ())
            elif isinstance(operation, Convert):
                reached.update((operation.source,) if operation.target in reached else ())
            else:
                reached |= self._through_copies(operation, reached)
        return frozenset(reached)

    def _through_copies(self, repeat: Repeat, reached: set[Local]) -> set[Local]:
        """The entries of the first copy that get a gradient, where results of the last one that are ``reached`` do."""
        section, copies = repeat.block.section, []
        outside: frozenset[Local] | set[Local] = reached
        for _ in repeat.block.roots:
            results = [own for own, given in zip(section.results, repeat.results, strict=True) if given in outside]
            copies.append(self.through(section.body, results))
            carried = {given for index, given in repeat.carried if section.arguments[index] in copies[-1]}
            outside = self.through(repeat.between, carried)
        self.of_copies[id(repeat)] = tuple(reversed(copies))
        own = {index for index, argument in enumerate(section.arguments) if argument in copies[-1]}
        every = {index for index, argument in enumerate(section.arguments) if any(argument in copy for copy in copies)}
        with_gradient = own | (every - {index for index, _ in repeat.carried})
        return {repeat.entries[index] for index in with_gradient}
