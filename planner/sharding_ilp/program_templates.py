"""Sharding programs of one graph's cuts, whose rows are built once for all cuts that share them.

Sizes of axes and the prices of a cluster change what options and conversions cost, and now and then which there are.
Cuts that leave the same of both have the same program but for its costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.sharding_ilp.lattice import Lattice, Lattices
from planner.sharding_ilp.sharding_problem import Problem
from planner.sharding_ilp.sharding_program import (
    LatticeRequest,
    ShardingIlp,
    build_ilp,
    converted_streams,
    lattice_request,
    sharing_memory,
    stored_bytes,
)


@dataclass(frozen=True)
class _Structure:
    """What problems whose elements choose from the same placements have in common.

    ``requests`` are for the lattices of their streams; ``programs`` by the forms of these.
    """

    requests: dict[str, LatticeRequest]
    programs: dict[tuple[int, ...], ShardingIlp] = field(default_factory=dict)


class ProgramTemplates:
    """Builds programs (``build_ilp`` without a memory limit); all problems must be of one graph, differing in options.

    Programs that share rows share their arrays, which nobody may write into.
    """

    def __init__(self) -> None:
        self._structures: dict[tuple[object, ...], _Structure] = {}
        #: Forms of lattices, numbered.
        self._forms: dict[tuple[object, ...], int] = {}

    def program(self, problem: Problem, lattices: Lattices) -> ShardingIlp:
        """The program of ``problem``."""
        if problem.siblings:  # which groups of them share an exchange depends on more than placements
            return build_ilp(problem, lattices, memory_limit=None)
        structure = self._structure(problem)
        streams = problem.streams
        by_stream = {
            name: request.lattice(streams[name].value, lattices) for name, request in structure.requests.items()
        }
        forms = tuple(self._numbers(by_stream))
        template = structure.programs.get(forms)
        if template is None:
            template = build_ilp(problem, lattices, memory_limit=None, requests=structure.requests)
            template.program.settle()
            structure.programs[forms] = template
            return template
        return _with_prices(template, problem, by_stream)

    def _structure(self, problem: Problem) -> _Structure:
        placements = tuple(
            tuple((option.inputs, option.outputs) for option in element.options)
            for element in problem.elements.values()
        )
        key = (problem.settled, problem.sampled, placements)
        if key not in self._structures:
            requests = {name: lattice_request(problem, problem.streams[name]) for name in converted_streams(problem)}
            self._structures[key] = _Structure(requests)
        return self._structures[key]

    def _numbers(self, by_stream: Mapping[str, Lattice]) -> list[int]:
        distinct = {id(lattice): lattice for lattice in by_stream.values()}
        number_of = {key: self._forms.setdefault(each.form, len(self._forms)) for key, each in distinct.items()}
        return [number_of[id(lattice)] for lattice in by_stream.values()]


def _with_prices(template: ShardingIlp, problem: Problem, by_stream: dict[str, Lattice]) -> ShardingIlp:
    """The program of ``problem``, which has the rows of ``template``."""
    import numpy as np

    costs = np.zeros(template.program.num_variables)
    memory_terms: list[tuple[int, float]] = []
    for name, columns in template.x.items():
        element = problem.elements[name]
        costs[columns] = [element.copies * option.seconds for option in element.options]
        memory_terms.extend(stored_bytes(element, columns))
    for name, lattice in by_stream.items():
        forward, backward = lattice.seconds
        for sharing in template.sharings[name]:
            seconds = sharing.forward * forward + sharing.backward * backward
            if len(sharing.places) < len(seconds):
                seconds = seconds[sharing.places]
            costs[sharing.columns.start : sharing.columns.stop] = seconds
            memory_terms.extend(sharing_memory(sharing, lattice))
    program = replace(template.program, costs=costs.tolist())
    return replace(template, problem=problem, program=program, lattices=by_stream, memory_terms=memory_terms)
