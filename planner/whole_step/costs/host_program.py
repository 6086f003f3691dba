r"""The sharding ILP where the host's launches count: each unit takes the longer of its device's and its host's seconds.

A unit u of n(u) copies takes in phase f (forward, backward) at least what its operators o and conversions a take on the
device, c, and at least what the host needs to launch their ℓ kernels and collectives at h seconds each. With a variable
for both, in units of h,

    minimise   Σ_u n(u) Σ_f h·t[u,f]  +  ε·seconds on the device  +  what belongs to no unit          (objective)

    t[u,f] ≥ Σ_o Σ_s c(o,s,f)/h · x[o,s] + Σ_a c(a,f)/h · w[a]·copies/n(u)            every u, f      (device)
    t[u,f] ≥ Σ_o Σ_s ℓ(o,s,f) · x[o,s]   + Σ_a ℓ(a,f) · w[a]·copies/n(u)              every u, f      (host)

beside the rows of ``planner.sharding_ilp.sharding_program``. Of shardings that hosts launch equally fast ε prefers the
faster one. A unit's seconds on the device are no more than its h·t, so that the optimum is at most 1 + ε times what any
plan of the cut takes for a micro-batch, summed over ranks: what recomputes and what ZeRO does come on top.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from passes.repeats.model_units import ModelUnit, unit_of_nodes
from planner.sharding_ilp.sharding_program import ShardingIlp
from planner.solvers.linear import LinearProgram
from planner.whole_step.costs.launch_counts import Launches, OptionLaunches
from planner.whole_step.costs.stream_units import unit_of_stream

PHASES = (0, 1)
#: ε
TIE = 1e-3


def host_program(
    ilp: ShardingIlp, units: Sequence[ModelUnit], launches: OptionLaunches, *, host_seconds: float
) -> ShardingIlp:
    """The program with the rows above and their objective."""
    return _Builder(ilp, units, launches, host_seconds).build()


class _Builder:
    def __init__(
        self, ilp: ShardingIlp, units: Sequence[ModelUnit], launches: OptionLaunches, host_seconds: float
    ) -> None:
        self.ilp, self.units, self.launches, self.host_seconds = ilp, units, launches, host_seconds
        self.program = _unshared(ilp.program)
        #: By unit and phase, (column, what it takes) of the rows (device) and (host).
        self.on_device: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        self.on_host: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)

    def build(self) -> ShardingIlp:
        unit_of = unit_of_nodes(self.units)
        for name in self.ilp.x:
            if name in unit_of:
                self._operator(name, unit_of[name])
        for name in self.ilp.lattices:
            unit = unit_of_stream(self.units, unit_of, self.ilp.problem.streams[name])
            if unit is not None:
                self._conversions(name, unit)
        for key in list(self.on_device):
            self._longer_of_both(*key)
        return replace(self.ilp, program=self.program)

    def _operator(self, name: str, unit: int) -> None:
        element = self.ilp.problem.elements[name]
        for column, option in zip(self.ilp.x[name], element.options, strict=True):
            communication, launched = option.communication, self.launches.of(name, element.node, option)
            self.program.costs[column] *= TIE
            seconds = option.compute[0] + communication[0], option.compute[1] + communication[1]
            self._count(unit, column, seconds, launched)

    def _conversions(self, name: str, unit: int) -> None:
        arcs, count = self.ilp.lattices[name].arcs, self.units[unit].count
        for sharing in self.ilp.sharings[name]:
            often = sharing.forward / count, sharing.backward / count
            for place, column in zip(sharing.places, sharing.columns, strict=True):
                arc = arcs[place]
                self.program.costs[column] *= TIE
                seconds = often[0] * arc.forward, often[1] * arc.backward
                self._count(unit, column, seconds, (often[0] * (arc.forward > 0), often[1] * (arc.backward > 0)))

    def _count(self, unit: int, column: int, seconds: tuple[float, float], launched: Launches) -> None:
        for phase in PHASES:
            self.on_device[unit, phase].append((column, seconds[phase] / self.host_seconds))
            self.on_host[unit, phase].append((column, launched[phase]))

    def _longer_of_both(self, unit: int, phase: int) -> None:
        """(device) and (host) of one unit in one phase."""
        longer = self.program.variable(self.host_seconds * self.units[unit].count)
        for terms in (self.on_device[unit, phase], self.on_host[unit, phase]):
            used = [(column, -amount) for column, amount in terms if amount]
            self.program.row([(longer, 1.0), *used], lower=0.0, upper=math.inf)


def _unshared(program: LinearProgram) -> LinearProgram:
    """A copy that rows may be added to: programs of one template share their arrays."""
    return LinearProgram(
        costs=list(program.costs),
        uppers=list(program.uppers),
        integers=list(program.integers),
        row_lowers=list(program.row_lowers),
        row_uppers=list(program.row_uppers),
        starts=array("i", program.starts),
        columns=array("i", program.columns),
        coefficients=array("d", program.coefficients),
    )
