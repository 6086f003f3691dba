"""The rule that an operator obeys, found by running it on small shards.

For each dim of its inputs, sets of dims that may be cut together are tried, small sets first. By the shapes of what
comes out, a cut gives shards or partial sums; it is accepted if every kind of input, every number of ranks and several
sizes give one device's values and gradients. Arguments that are no tensors stay as they are: what needs other sizes in
them when it is cut is never accepted. The same call gives the same rule in every process.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from passes.ir.graph import Node, Value
from passes.ir.types import P, SpmdType, shard_dim
from passes.rules.probing.candidate_cuts import CandidateCut, candidate_cuts
from passes.rules.probing.clean_thread import on_clean_thread
from passes.rules.probing.probe_call import ProbeCall, ProbeFailure, Shapes
from passes.rules.probing.probe_samples import samples
from passes.rules.probing.sharded_trial import WholeRun, mismatch, sharded_outputs, whole_run
from passes.rules.probing.small_shapes import nearly_full_size, small_shapes, takes
from passes.rules.rule import PROBED, Dims, ShardingRule

#: Dims in which an operator must have this many numbers to be worth a probe.
MIN_NUMBERS = 16
#: Sizes, as multiples of the smallest piece, in which a cut is proved beside the first.
_MULTIPLES = (6, 2, 10)


@dataclass(frozen=True)
class ProvedCut:
    """A cut that was proved: the types of the outputs, and the smallest piece of its dims."""

    cut: CandidateCut
    outputs: tuple[SpmdType, ...]
    piece: int


def is_worth_probing(node: Node, values: Mapping[str, Value]) -> bool:
    """Whether an operator computes or moves enough to be run for a rule."""
    numbers = [value.num_elements for value in (*(values[name] for name in node.inputs), *node.outputs)]
    return not node.constant and bool(node.inputs) and max(numbers, default=0) >= MIN_NUMBERS


def probe(node: Node, values: Mapping[str, Value]) -> ShardingRule | None:
    """The rule that ``node`` obeys, or None if it cannot be run or nothing in it may be cut.

    The operator runs on a thread of its own, where no mode of the caller's (no gradients, tracing, a device) is on.
    """
    return on_clean_thread(lambda: _probe(node, values), name=f"probe of {node.op}")


def _probe(node: Node, values: Mapping[str, Value]) -> ShardingRule | None:
    call = ProbeCall.of(node, values)
    if call is None:
        return None
    shapes = tuple(values[name].shape for name in node.inputs)
    in_graph = tuple(values[name].requires_grad for name in node.inputs)
    for attempt in (call, call.in_single_precision()):
        small = small_shapes(attempt, shapes)
        if small is None:
            continue
        wholes = whole_runs(attempt, small)
        if not wholes:  # Not all inputs may have a derivative: ask for those that the model needs.
            attempt = dataclasses.replace(attempt, differentiable=in_graph)
            wholes = whole_runs(attempt, small)
        if wholes:
            cuts = _together(attempt, small, list(_proved_cuts(attempt, shapes, small, wholes)))
            return _rule(node, shapes, cuts)
    return None


def whole_runs(call: ProbeCall, shapes: Shapes, *, count: int = 99) -> list[WholeRun]:
    """At most ``count`` runs on whole tensors of ``shapes``; none unless they can be repeated and one is finite."""
    runs: list[WholeRun] = []
    for tensors in itertools.islice(samples(call, shapes), count):
        try:
            runs.append(whole_run(call, tensors))
        except ProbeFailure:
            return []
    return runs if any(_is_finite(run) for run in runs) else []


def _is_finite(run: WholeRun) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in run.outputs)


def _proved_cuts(call: ProbeCall, shapes: Shapes, small: Shapes, wholes: Sequence[WholeRun]) -> Iterator[ProvedCut]:
    """Cuts that hold by themselves, at most one for each dim."""
    cut_dims: set[tuple[int, int]] = set()
    for tensor, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if size == 1 or (tensor, dim) in cut_dims:
                continue
            for cut in candidate_cuts(call, shapes, tensor, dim):
                places = {(number, place) for number, place in enumerate(cut.dims) if place is not None}
                proved = None if places & cut_dims else _proved(call, cut, shapes, small, wholes)
                if proved is not None:
                    cut_dims |= places
                    yield proved
                    break


def _proved(
    call: ProbeCall, cut: CandidateCut, shapes: Shapes, small: Shapes, wholes: Sequence[WholeRun]
) -> ProvedCut | None:
    """``cut`` with the smallest piece that holds in all samples, at ``small`` and other sizes; None if none does."""
    size = cut.size(small)
    outputs = _types_of_outputs(cut, size, wholes)
    if outputs is None:
        return None
    for piece in (divisor for divisor in range(1, size) if size % divisor == 0):
        proved = ProvedCut(cut, outputs, piece)
        if _holds(proved, wholes, size) and _holds_at_other_sizes(call, proved, small):
            return proved if _holds_at_full_size(call, proved, shapes, small) else None
    return None


def _types_of_outputs(cut: CandidateCut, size: int, wholes: Sequence[WholeRun]) -> tuple[SpmdType, ...] | None:
    """What ``cut`` makes of the outputs, if it holds for the first sample and some number of ranks."""
    for pieces in (n for n in range(2, size) if size % n == 0):
        outputs = sharded_outputs(wholes[0], cut.types(), pieces)
        if outputs is None or (P in outputs and not any(map(_has_numbers, wholes))):
            continue
        if mismatch(wholes[0], cut.types(), outputs, pieces) is None:
            return outputs
    return None


def _has_numbers(whole: WholeRun) -> bool:
    return any(bool((tensor != 0).any()) for tensor in whole.outputs)


def _holds(proved: ProvedCut, wholes: Sequence[WholeRun], size: int) -> bool:
    """Whether every number of ranks whose pieces are multiples of the smallest gives the same as one device."""
    pieces = [n for n in range(2, size // proved.piece + 1) if size % n == 0 and size // n % proved.piece == 0]
    return all(mismatch(whole, proved.cut.types(), proved.outputs, n) is None for n in pieces for whole in wholes)


def _holds_at_other_sizes(call: ProbeCall, proved: ProvedCut, small: Shapes) -> bool:
    for multiple in _MULTIPLES:
        size = proved.piece * multiple
        resized = proved.cut.resized(small, size)
        if size != proved.cut.size(small) and takes(call, resized):
            wholes = whole_runs(call, resized, count=2)
            return bool(wholes) and _holds(proved, wholes, size)
    return False


def _holds_at_full_size(call: ProbeCall, proved: ProvedCut, shapes: Shapes, small: Shapes) -> bool:
    """Whether two ranks give the same as one device where the dims of the cut are about as large as in the call."""
    resized = nearly_full_size(shapes, small, proved.cut.dims, proved.piece)
    if resized is None:
        return True
    wholes = whole_runs(call, resized, count=1)
    return bool(wholes) and mismatch(wholes[0], proved.cut.types(), proved.outputs, 2) is None


def _together(call: ProbeCall, small: Shapes, cuts: list[ProvedCut]) -> list[ProvedCut]:
    """The cuts that hold beside each other: each of them on shapes of which the others have cut off all but a piece or
    two."""
    accepted: list[ProvedCut] = []
    for candidate in cuts:
        trial = [*accepted, candidate]
        shapes = small
        for proved in trial:
            shapes = proved.cut.resized(shapes, 2 * proved.piece)
        wholes = whole_runs(call, shapes, count=2) if takes(call, shapes) else []
        if wholes and all(_holds(proved, wholes, 2 * proved.piece) for proved in trial):
            accepted = trial
    return accepted


def _rule(node: Node, shapes: Shapes, cuts: Sequence[ProvedCut]) -> ShardingRule | None:
    """The cuts as a rule of the call's own shapes; None if nothing is left to cut.

    A dim is (pieces, what stays together in each); of an operator that gives partial sums none may come in.
    """
    inputs: list[list[tuple[str, ...]]] = [[()] * len(shape) for shape in shapes]
    outputs: list[list[tuple[str, ...]]] = [[()] * len(value.shape) for value in node.outputs]
    sizes: dict[str, int] = {}
    for proved in cuts:
        pieces, remainder = divmod(proved.cut.size(shapes), proved.piece)
        places = [(outputs[place], shard_dim(kind), place) for place, kind in enumerate(proved.outputs)]
        extents = [node.outputs[place].shape[dim] for _, dim, place in places if dim is not None]
        if remainder or pieces < 2 or any(extent % pieces for extent in extents):
            continue
        factor = f"p{len(sizes)}"
        sizes[factor] = pieces
        for dims, dim in zip(inputs, proved.cut.dims):
            if dim is not None:
                dims[dim] = _dim(factor, proved.piece)
        for dims, dim, place in places:
            if dim is not None:
                dims[dim] = _dim(factor, node.outputs[place].shape[dim] // pieces)
    if not sizes:
        return None
    contracts = any(P in proved.outputs for proved in cuts)
    return ShardingRule(
        tuple(map(_frozen, inputs)),
        tuple(map(_frozen, outputs)),
        sizes,
        terms=(tuple(range(len(shapes))),) if contracts else None,
        passes_partial=False,
        source=PROBED,
    )


def _dim(factor: str, inside: int) -> tuple[str, ...]:
    return (factor,) if inside == 1 else (factor, f"{factor}_piece")


def _frozen(dims: list[tuple[str, ...]]) -> Dims:
    return tuple(dims)
