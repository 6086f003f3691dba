r"""Linear layers of one input that gather its rows alike gather them once: what that costs.

Siblings (``passes.repeats.sibling_linears``) that choose options with the same strategy and the same placement of their
input share its collectives: the rows are gathered once forward and once more backward, for all weights' gradients, and
the sum of the input's gradients is scattered once. All arithmetic of the group runs beside them, so that its seconds
are no sum over its members; in the program every subset S of siblings with such options has a variable of its own::

    z[S] ≥ 0            the layers S share one exchange
    x[o,s] = Σ_{S ∋ o} z[S]                                            every o with such an option s     (share rows)

z[S] costs what S waits for together, x[o,s] its arithmetic alone. A larger group never costs more than two smaller
ones, so that where x is integer one z is one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from passes.ir.types import Placement
from planner.sharding_ilp.hidden_collectives import waited_for
from planner.sharding_ilp.options import Option
from planner.sharding_ilp.own_collective import Collective
from planner.sharding_ilp.sharding_problem import Problem
from planner.solvers.linear import LinearProgram

#: What options that share an exchange have in common: strategies, and the placement of the input.
Alike = tuple[tuple[str, ...], Placement]


def shared_collectives(
    sent: Sequence[Sequence[Collective]], compute: Sequence[tuple[float, float]], *, slowdown: float
) -> tuple[Collective, ...]:
    """The collectives of layers that exchange the same rows, with the seconds that they add to all of them.

    Args:
        sent: those of each layer alone, with all their seconds.
        compute: seconds of each, forward and backward.
    """
    once: Counter[Collective] = Counter()
    for collectives in sent:
        once |= Counter(collectives)
    forward, backward = (sum(seconds[phase] for seconds in compute) for phase in (0, 1))
    return waited_for(tuple(once.elements()), beside=(forward, backward), slowdown=slowdown)


def share_rows(problem: Problem, chosen: Mapping[str, Option]) -> dict[str, Option]:
    """``chosen`` with the collectives of siblings that share them at the first of these."""
    options = dict(chosen)
    for siblings in problem.siblings:
        alike: dict[Alike, list[str]] = {}
        for name in siblings:
            if chosen[name].sent:
                alike.setdefault(_alike(chosen[name]), []).append(name)
        for names in alike.values():
            if len(names) > 1:
                members = [chosen[name] for name in names]
                for name in names[1:]:
                    options[name] = replace(chosen[name], collectives=(), shared=tuple(names))
                options[names[0]] = replace(members[0], collectives=_together(problem, members), shared=tuple(names))
    return options


def add_shared_rows(problem: Problem, program: LinearProgram, x: Mapping[str, Sequence[int]]) -> None:
    """(share rows): what siblings gather is paid for once by each group of them; ``x``: columns of options."""
    for siblings in problem.siblings:
        for members in _with_alike_options(problem, siblings):
            subsets_of: dict[str, list[int]] = {name: [] for name in members}
            for subset in _subsets(list(members)):
                options = [problem.elements[name].options[members[name]] for name in subset]
                seconds = sum(item.seconds for item in _together(problem, options))
                column = program.variable(problem.elements[subset[0]].copies * seconds, upper=1.0)
                for name in subset:
                    subsets_of[name].append(column)
            for name, place in members.items():
                element, column = problem.elements[name], x[name][place]
                program.costs[column] -= element.copies * sum(element.options[place].communication)
                program.row(((column, 1.0), *((subset, -1.0) for subset in subsets_of[name])), lower=0.0, upper=0.0)


def _with_alike_options(problem: Problem, siblings: Sequence[str]) -> Iterator[dict[str, int]]:
    """For each kind of options that several siblings have: by name of those, the place of their option."""
    by_kind: dict[Alike, dict[str, int]] = {}
    for name in siblings:
        for place, option in enumerate(problem.elements[name].options):
            if option.sent:
                by_kind.setdefault(_alike(option), {})[name] = place
    return (members for members in by_kind.values() if len(members) > 1)


def _alike(option: Option) -> Alike:
    return option.labels, option.inputs[0]


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(1, len(names) + 1))


def _together(problem: Problem, options: Sequence[Option]) -> tuple[Collective, ...]:
    return shared_collectives(
        [option.sent for option in options],
        [option.compute for option in options],
        slowdown=problem.overlap_slowdown,
    )
