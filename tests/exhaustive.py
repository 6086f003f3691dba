"""Everything a step could be, tried: every mesh shape, order, micro-batch, schedule, cut, and choice of every unit.

Nothing is pruned and no bound is taken. All assignments of one way to cut are priced at once, as arrays with an axis
for every chunk; a few of them, and the best, are priced again one by one by ``cost_models.step_time``. Of units that
are equal only how many make which choice is told apart, since seconds and bytes are sums over a chunk's layers and
largest peaks; but for the model's very first unit, whose gradients nothing hides.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from numpy.typing import NDArray

from cost_models.order_path import played_microbatches
from cost_models.schedules import SCHEDULES, reason_not
from cost_models.step import LayerCosts
from cost_models.step_time import step_memory, step_seconds
from planner.pipeline_ilp.stage_problem import Assignment, StageProblem, as_step
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.candidates import STEADY, Candidate, is_offered
from planner.whole_step.candidates.demands import CHUNKS_PER_RANK, Demands
from planner.whole_step.candidates.mesh_layout import AXES, ORDERS, Links, MeshLayout
from planner.whole_step.costs.byte_weights import ALL_WEIGHTS, STATE_WEIGHTS
from planner.whole_step.costs.level_one import Sharded
from tests.order_steps import order_steps, path_ends

Array = NDArray[numpy.float64]

#: Share of a device's memory that a limit may be passed by: what sums of bytes may be off by.
ROUNDING = 1e-9
#: How far a step priced by itself may be from its place in the arrays.
EXACT = 1e-12
#: Assignments in one array at most.
BLOCK = 1 << 21
#: What is summed over the layers of a chunk, as columns.
SUMS = (
    "forward",
    "backward",
    "weight",
    "reduce",
    "wait",
    "update",
    "state",
    "saved",
    "reductions",
    "ahead",
    "behind",
    "each_time",
)


@dataclass(frozen=True)
class Ways:
    """Ways to run the units of one chunk: one entry each. ``choices``: per run, how many units make which choice, and
    which choice its first unit makes; ``first``: of the first unit, seconds to reduce its gradients once a step, and of
    all its reductions beyond its backward."""

    sums: Array
    peak: Array
    first: Array
    choices: tuple[tuple[int, NDArray[numpy.int64], NDArray[numpy.int64]], ...]

    def __len__(self) -> int:
        return len(self.peak)

    def part(self, begin: int, end: int) -> Ways:
        picked = tuple((run, counts[begin:end], ahead[begin:end]) for run, counts, ahead in self.choices)
        return Ways(self.sums[begin:end], self.peak[begin:end], self.first[begin:end], picked)

    def groups(self, index: int) -> tuple[tuple[int, int, int], ...]:
        """One way as part of an assignment."""
        combined = []
        for run, counts, ahead in self.choices:
            first = int(ahead[index])
            order = [first, *(choice for choice in range(counts.shape[1]) if choice != first)]
            combined += [(run, choice, int(counts[index, choice])) for choice in order if counts[index, choice]]
        return tuple(combined)


@dataclass(frozen=True)
class Best:
    """The fastest of everything (seconds infinite if nothing fits), and how much was tried."""

    seconds: float = math.inf
    candidate: Candidate | None = None
    problem: StageProblem | None = None
    assignment: Assignment | None = None
    num_candidates: int = 0
    num_problems: int = 0
    num_assignments: int = 0


def every_candidate(search: Search) -> Iterator[Candidate]:
    """Mesh shapes, orders of their axes, micro-batches, schedules, chunks, data ranks that ZeRO divides over: as the
    demands allow and PyTorch can run."""
    level_one, demands = search.level_one, search.demands
    num_devices, batch = search.cluster.num_devices, level_one.global_batch
    num_units = sum(unit.count for unit in level_one.step_units.units)
    for sizes in itertools.product(range(1, num_devices + 1), repeat=len(AXES)):
        pipeline, data, expert, context, tensor = sizes
        if math.prod(sizes) != num_devices or pipeline > num_units or level_one.num_experts % expert:
            continue
        for order, m in itertools.product(ORDERS, range(1, batch + 1)):
            layout = MeshLayout(pipeline, data, context, tensor, order, expert)
            if batch % (layout.sample_groups * m) or (layout.context > 1 and order != ORDERS[0]):
                continue
            if m > 1 and not level_one.micro_batches:
                continue
            for schedule, chunks in _ways_to_pipeline(layout.pipeline, m, num_units, demands):
                candidate = Candidate(layout, batch // layout.sample_groups // m, m, schedule, chunks)
                if _is_allowed(candidate, demands):
                    for zero_ranks in _zero_ranks(search, layout):
                        yield replace(candidate, layout=replace(layout, zero_ranks=zero_ranks))


def _zero_ranks(search: Search, layout: MeshLayout) -> Iterator[int]:
    """All data ranks (0), and neighbours that fill a group of links: the data ranks lie ``inner`` devices apart."""
    sizes = layout.sizes
    inner = math.prod(size for axis, size in sizes.items() if list(sizes).index(axis) > list(sizes).index("cp"))
    yield 0
    for level in search.cluster.levels[:-1]:
        count, rest = divmod(level.group_size, inner)
        if layout.expert == 1 and not rest and 1 < count < layout.group and layout.group % count == 0:
            yield count


def _ways_to_pipeline(ranks: int, m: int, num_units: int, demands: Demands) -> Iterator[tuple[str, int]]:
    if ranks == 1:
        yield "1f1b", 1
        return
    for name, chunks in itertools.product(SCHEDULES, {1, *CHUNKS_PER_RANK}):
        total = ranks * chunks
        runs = reason_not(name, num_ranks=ranks, num_microbatches=m, num_chunks=total) is None
        shape = {"num_ranks": ranks, "num_units": num_units, "num_chunks": total}
        offered = "schedule" in demands.fixed or is_offered(name, **shape)
        if runs and offered and total <= num_units and m >= STEADY.get(name, 0.0) * ranks:
            yield name, chunks


def _is_allowed(candidate: Candidate, demands: Demands) -> bool:
    names = [*AXES, "order", "micro_batch", "num_microbatches"]
    if candidate.layout.pipeline > 1:
        names += ["schedule", "chunks_per_rank"]
    values: dict[str, Any] = {"order": candidate.layout.order}
    return all(demands.allows(name, values.get(name) or candidate.value_of(name)) for name in names)


def fastest_of_all(search: Search, *, seed: int = 0) -> Best:
    """The fastest of everything that the demands of ``search`` allow; ``seed``: which are priced one by one as well."""
    chooser = random.Random(seed)
    best, candidates, problems, assignments = Best(), 0, 0, 0
    for candidate in every_candidate(search):
        candidates += 1
        links = Links.of(search.cluster, candidate.layout)
        sharded: Sharded | None = None
        for weight in ALL_WEIGHTS:
            if weight in STATE_WEIGHTS and (sharded is None or not may_pay(search, candidate, sharded)):
                break
            sharded = search.level_one.sharded_with_host(candidate.cut, candidate.layout, links, weight=weight)
            if sharded is None:
                continue
            combined = fastest(search.problem(candidate, sharded), chooser)
            problems, assignments = problems + 1, assignments + combined.num_assignments
            if combined.seconds < best.seconds:
                best = replace(combined, candidate=candidate)
    return replace(best, num_candidates=candidates, num_problems=problems, num_assignments=assignments)


def may_pay(search: Search, candidate: Candidate, sharded: Sharded) -> bool:
    """Whether a sharding of fewer bytes may be faster, or the only one that fits."""
    return search.reduces_longer(candidate, sharded, 0.0) or search.lacks_memory(candidate, sharded)


def fastest(problem: StageProblem, chooser: random.Random) -> Best:
    """The fastest assignment of one problem that fits, if any does."""
    best, count = Best(), 0
    for ways in every_cut(problem):
        for block in _blocks(ways):
            shape = tuple(map(len, block))
            count += math.prod(shape)
            seconds, fit = _priced(problem, block)
            at = tuple(chooser.randrange(size) for size in shape)
            _check(problem, block, at, float(seconds[at]), bool(fit[at]))
            seconds[~fit] = math.inf
            at = tuple(map(int, numpy.unravel_index(numpy.argmin(seconds), shape)))
            if seconds[at] < best.seconds:
                _check(problem, block, at, float(seconds[at]), True)
                best = Best(float(seconds[at]), problem=problem, assignment=_assignment(block, at))
    return replace(best, num_assignments=count)


def every_cut(problem: StageProblem) -> Iterator[list[Ways]]:
    """For every way to cut the units into chunks, the ways to run each chunk."""
    units = [run for run, each in enumerate(problem.runs) for _ in range(each.count)]
    ways_of_split: dict[tuple[tuple[int, ...], bool], Ways] = {}
    for cuts in itertools.combinations(range(1, len(units)), problem.num_chunks - 1):
        stretches = [tuple(units[begin:end]) for begin, end in itertools.pairwise((0, *cuts, len(units)))]
        keys = [(stretch, index == 0) for index, stretch in enumerate(stretches)]
        for stretch, first in keys:
            if (stretch, first) not in ways_of_split:
                ways_of_split[stretch, first] = ways_of_chunk(problem, stretch, first=first)
        yield [ways_of_split[key] for key in keys]


def ways_of_chunk(problem: StageProblem, stretch: Sequence[int], *, first: bool) -> Ways:
    """Every way to run the units of ``stretch`` (runs of units in a row)."""
    combined: Ways | None = None
    for run in dict.fromkeys(stretch):
        more = _ways_of_run(problem, run, stretch.count(run), first=first and combined is None)
        combined = more if combined is None else _both(combined, more)
    assert combined is not None
    return combined


def _ways_of_run(problem: StageProblem, run: int, count: int, *, first: bool) -> Ways:
    choices = [choice.costs for choice in problem.runs[run].choices]
    ways: list[list[int]] = []
    ahead: list[int] = []
    for chosen in itertools.combinations_with_replacement(range(len(choices)), count):
        for leading in sorted(set(chosen)) if first else chosen[:1]:
            ways.append([chosen.count(choice) for choice in range(len(choices))])
            ahead.append(leading)
    counts, leads = numpy.array(ways), numpy.array(ahead)
    split = SCHEDULES[problem.schedule].splits_all
    sums = counts @ numpy.array([_sums(costs, split=split) for costs in choices])
    peaks = numpy.array([costs.peak_bytes for costs in choices])
    reduce, last = numpy.array([(costs.reduce_step, _last(costs)[1]) for costs in choices]).T
    first = numpy.stack((reduce[leads], last[leads]), axis=1)
    return Ways(sums, numpy.where(counts > 0, peaks, 0.0).max(axis=1), first, ((run, counts, leads),))


def _last(costs: LayerCosts) -> tuple[float, float]:
    """By how much what a unit communicates in its last backward outlasts that, and its reductions after its compute."""
    reductions = costs.reduce_backward + costs.reduce_step
    sent = costs.gather_backward + reductions
    lasts = max(costs.backward, costs.gather_backward + costs.reduce_backward, sent * bool(costs.gather_backward))
    return sent - lasts, costs.backward + reductions - lasts


def late(problem: StageProblem, ways: Ways) -> Array:
    """What the first runs of a model in one chunk leave to reduce behind a whole backward pass, at most."""
    most, excess = numpy.zeros(len(ways)), numpy.zeros(len(ways))
    for (run, counts, _), (following, next_counts, _) in itertools.pairwise(ways.choices):
        costs, next_costs = ([each.costs for each in problem.runs[index].choices] for index in (run, following))
        excess = excess + counts @ numpy.array([_last(each)[0] for each in costs])
        most = numpy.maximum(most, excess)
        gathers = counts @ numpy.array([each.gather_backward for each in costs])
        least = numpy.where(next_counts > 0, [_last(each)[1] for each in next_costs], numpy.inf).min(axis=1)
        most = numpy.maximum(most, least + excess - gathers)
    return most


def _sums(costs: LayerCosts, *, split: bool) -> tuple[float, ...]:
    backward, weight = max(costs.backward, costs.gather_backward + costs.reduce_backward), costs.backward_weight
    if split and costs.gather_backward:
        weight = max(costs.backward_weight, costs.reduce_backward)
        backward = max(costs.backward - costs.backward_weight, costs.gather_backward) + weight
    return (
        max(costs.forward, costs.gather_forward),
        backward,
        weight,
        costs.gather_backward + costs.reduce_backward + costs.reduce_step,
        max(0.0, costs.gather_backward + costs.reduce_backward + costs.reduce_step - backward)
        if costs.gather_backward and not split
        else 0.0,
        costs.update_step + costs.gather_step,
        costs.state_bytes,
        costs.saved_bytes,
        costs.reduce_backward + costs.reduce_step,
        max(0.0, backward - 2 * weight),
        max(0.0, 3 * weight - backward),
        costs.gather_backward + costs.reduce_backward,
    )


def _both(one: Ways, other: Ways) -> Ways:
    """Every way of ``one`` with every way of ``other``."""
    remaining, right = (part.ravel() for part in numpy.indices((len(one), len(other))))
    choices = [(run, counts[remaining], ahead[remaining]) for run, counts, ahead in one.choices]
    choices += [(run, counts[right], ahead[right]) for run, counts, ahead in other.choices]
    peak = numpy.maximum(one.peak[remaining], other.peak[right])
    return Ways(one.sums[remaining] + other.sums[right], peak, one.first[remaining], tuple(choices))


#: Under each schedule that ends in gradients of weights, what of other ranks hides the reductions of the chunk that a
#: rank does last, and of both.
SLACKS = {
    "zb_h1": ("ahead", "ahead"),
    "zb_h2": (None, None),
    "zbv": (None, "behind"),
    "v_half": ("ahead", "ahead"),
    "dualpipev": ("ahead", "ahead"),
}


def _behind_backward(figures: Sequence[Mapping[str, Any]], mine: list[list[int]], *, whole: bool) -> Any:
    """What waits, and what outlasts each rank's last backward passes and those of the ranks before it."""
    exposed: Any = 0.0
    before: Any = 0.0
    for chunks in mine:
        last = sum(figures[chunk]["backward"] + whole * figures[chunk]["wait"] for chunk in chunks)
        exposed = numpy.maximum(exposed, sum(figures[chunk]["reduce"] for chunk in chunks) - last - before)
        before = before + last / len(chunks)
    return exposed + sum(whole * each["wait"] for each in figures)


def _behind_rounds(figures: Sequence[Mapping[str, Any]], mine: list[list[int]], *, microbatches: int) -> Any:
    """The same where each chunk runs for so many micro-batches before the next, and the model's first chunks last."""
    tail: Any = 0.0
    before: Any = 0.0
    for chunks in mine:
        waits = sum(figures[chunk]["wait"] for chunk in chunks)
        for last, _ in enumerate(chunks, start=1):  # what the last chunks of the rank leave
            sent = sum(figures[chunk]["reduce"] - figures[chunk]["wait"] for chunk in chunks[:last])
            once = sum(figures[chunk]["backward"] for chunk in chunks[:last])
            free = sum(figures[chunk]["backward"] - figures[chunk]["each_time"] for chunk in chunks[: last - 1])
            tail = numpy.maximum(tail, waits + numpy.maximum(0.0, sent - once - (microbatches - 1) * free - before))
        before = before + figures[chunks[0]]["backward"] + figures[chunks[0]]["wait"]
    return tail


def _behind_weights(
    figures: Sequence[Mapping[str, Any]], mine: list[list[int]], of_last: str | None, of_both: str | None
) -> Any:
    """What the last gradients of weights do not hide: of the chunk that a rank does last, and of both."""
    left = [each["reductions"] - each["weight"] for each in figures]
    last, both = (
        [sum(figures[chunk][name] for chunk in chunks) / len(chunks) if name else 0.0 for chunks in mine]
        for name in (of_last, of_both)
    )
    exposed: list[Any] = [0.0]
    for rank, chunks in enumerate(mine):
        exposed.append(left[chunks[0]] - sum(last[:rank]))
        if len(chunks) > 1:
            others: Any = sum(both[other] for other in range(1, len(mine) - 1) if other != rank)
            if rank == 0:  # it has the model's last chunk
                others = others + sum(figures[chunk]["backward"] for each in mine[1:] for chunk in each) / 2
            exposed.append(left[chunks[0]] + left[chunks[1]] - others)
    return _most(exposed)


def _blocks(ways: list[Ways]) -> Iterator[list[Ways]]:
    """The ways of all chunks in parts that make arrays of at most ``BLOCK`` entries."""
    total = math.prod(map(len, ways))
    if total <= BLOCK:
        yield ways
        return
    longest = max(range(len(ways)), key=lambda index: len(ways[index]))
    size = max(1, len(ways[longest]) * BLOCK // total)
    for begin in range(0, len(ways[longest]), size):
        part = ways[longest].part(begin, begin + size)
        yield from _blocks([part if index == longest else each for index, each in enumerate(ways)])


def _priced(problem: StageProblem, ways: Sequence[Ways]) -> tuple[Array, NDArray[numpy.bool_]]:
    """Seconds of every assignment and whether it fits, by the closed form that ``cost_models.step_time`` states."""
    p, m, num_chunks, ranks = problem.num_ranks, problem.num_microbatches, problem.num_chunks, problem.ranks
    schedule, per_rank = SCHEDULES[problem.schedule], problem.num_chunks // problem.num_ranks

    def spread(values: Array, chunk: int) -> Array:
        return values.reshape([-1 if index == chunk else 1 for index in range(num_chunks)])

    figures = [
        {name: spread(each.sums[:, column], chunk) for column, name in enumerate(SUMS)}
        for chunk, each in enumerate(ways)
    ]
    for chunk in range(1, num_chunks):
        if ranks[chunk] != ranks[chunk - 1]:
            run = problem.runs[ways[chunk].choices[0][0]]
            figures[chunk]["forward"] = figures[chunk]["forward"] + run.receive_forward
            figures[chunk - 1]["backward"] = figures[chunk - 1]["backward"] + run.receive_backward
    mine = [[chunk for chunk in range(num_chunks) if ranks[chunk] == rank] for rank in range(p)]
    times = [each["forward"] + each["backward"] for each in figures]
    if schedule.divided:
        longest: Any = sum(_most([times[round_ * p + rank] for rank in range(p)]) for round_ in range(per_rank))
    else:
        longest = _most([sum(times[chunk] for chunk in chunks) for chunks in mine])
    if problem.schedule == "gpipe":
        slowest = _most([each["forward"] for each in figures]) + _most([each["backward"] for each in figures])
        pipeline = (m - 1) * slowest + sum(times)
    elif schedule.splits_backward:
        fills: list[Any] = [0.0] * num_chunks
        for on_forward, on_backward, on_weight in schedule.fills_on(p):
            for chunk, each in enumerate(figures):
                fill = on_forward * each["forward"] + on_backward * (each["backward"] - each["weight"])
                fills[chunk] = numpy.maximum(fills[chunk], fill + on_weight * each["weight"])
        filling = (p - 1) / p * sum(fills)
        pipeline = m * longest + filling
        if schedule.played:
            played = played_microbatches(problem.schedule, p, m)
            actions = [(each["forward"], each["backward"] - each["weight"], each["weight"]) for each in figures]
            steps = order_steps(problem.schedule, p, played, num_chunks)
            path = _most(path_ends(steps, actions, largest=numpy.maximum)) + (m - played) * longest
            pipeline = numpy.maximum(path, pipeline)
    else:
        rounds = [times[round_ * p : (round_ + 1) * p] for round_ in range(per_rank)]
        pipeline = m * longest + _most([sum(together) - _most(together) for together in rounds])
    opening, reductions = (spread(each, 0) for each in ways[0].first.T)
    if schedule.ends_in_weights:
        left = _behind_weights(figures, mine, *SLACKS[problem.schedule])
    elif schedule.divided and per_rank > 1:
        left = _behind_rounds(figures, mine, microbatches=m // (m // p))
    else:
        left = _behind_backward(figures, mine, whole=not schedule.splits_backward)
    if num_chunks == 1 and not schedule.splits_backward:
        left = _most([left, figures[0]["wait"] + _most([reductions, late(problem, ways[0])])])
    tail = numpy.maximum(opening, left)
    update = _most([sum(figures[chunk]["update"] for chunk in chunks) for chunks in mine])
    shape = tuple(map(len, ways))
    fit: Any = numpy.full((1,) * num_chunks, True)
    for rank, chunks in enumerate(mine):
        saved = [sum(count * figures[chunk]["saved"] for chunk, count in moment) for moment in problem.moments[rank]]
        held = sum(figures[chunk]["state"] for chunk in chunks) + _most(saved)
        peak = _most([spread(ways[chunk].peak, chunk) for chunk in chunks])
        fit = fit & (held + peak <= problem.memory[rank] * (1 + ROUNDING))
    return numpy.broadcast_to(pipeline + tail + update, shape).copy(), numpy.broadcast_to(fit, shape)


def _most(arrays: Sequence[Any]) -> Any:
    combined = arrays[0]
    for each in arrays[1:]:
        combined = numpy.maximum(combined, each)
    return combined


def _assignment(ways: Sequence[Ways], at: Sequence[int]) -> Assignment:
    return tuple(each.groups(index) for each, index in zip(ways, at))


def _check(problem: StageProblem, ways: Sequence[Ways], at: Sequence[int], seconds: float, fit: bool) -> None:
    """The arrays say of one assignment what ``cost_models.step_time`` says."""
    step = as_step(problem, _assignment(ways, at))
    alone = step_seconds(step).total
    assert abs(alone - seconds) <= EXACT * alone, (problem, at, alone, seconds)
    memory = step_memory(step)
    near = any(abs(used - limit) <= 2 * ROUNDING * limit for used, limit in zip(memory, problem.memory))
    assert near or fit == all(used <= limit for used, limit in zip(memory, problem.memory)), (problem, at)
