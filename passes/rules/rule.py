"""What a sharding rule is, and the choices it gives one mesh axis.

A rule names the *factors* of an operator's index space, as an einsum does. Each tensor dim is a product of factors,
outermost first (``("h", "d")`` is a hidden dim that a view splits into heads and head dim). Cutting an operator on a
mesh axis means cutting one factor; what that does to each input and output follows from where the factor stands:

* in an input: that input is ``S(dim)``; it must be the outermost factor of that dim;
* not in an input: the input is ``R`` (its gradient is a partial sum), or ``P`` if the operator adds a term that does
  not contain the contracted factor (a bias beside a matmul whose contraction is cut);
* in an output: ``S(dim)``; not in it: the factor was contracted, and the output is ``P``; or ``I`` if the operator
  itself reduces over the factor (``reductions``), as cross-entropy does over the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from passes.ir.conversions import ALL_GATHER, REDUCE_SCATTER
from passes.ir.types import I, P, R, SpmdType, largest_part, shard

Factor = str
#: Factors of each dim, outermost first; () is a dim of size 1 or one that no cut reaches.
Dims = tuple[tuple[Factor, ...], ...]

#: Where a rule is from: the tables here, ``planner.register_rule``, or running the operator (``passes.rules.probing``).
TABLE, REGISTERED, PROBED = "table", "registered", "probed"

REPLICATE = "replicate"
INVARIANT = "invariant"


@dataclass(frozen=True)
class Reduction:
    """A collective that an operator issues itself when ``factor`` is cut.

    ``elements`` = ``multiple`` × the product of the local sizes of ``factors``, of ``item_size`` bytes each; where
    ``is_gathered`` every rank of the group has as many. ``shared_among`` is a factor by whose entries they are grouped,
    evenly: an axis that cuts it leaves each rank those of its own entries. ``in_pieces_of`` is the factor of rows that
    it sends a few at a time (``pieces_of_rows``).
    """

    factor: Factor
    collective: str
    factors: tuple[Factor, ...]
    multiple: int = 1
    item_size: int = 4
    phase: str = "forward"
    is_gathered: bool = False
    shared_among: Factor | None = None
    in_pieces_of: Factor | None = None


@dataclass(frozen=True)
class RowShards:
    """A matrix product that can gather or scatter the shards of its rows itself, in pieces, while it multiplies.

    Attributes:
        rows: factor of the last dim of rows.
        contracted, features: the other two factors: of both operands, of weight and output.
        item_size: bytes of an element.
    """

    rows: Factor
    contracted: Factor
    features: Factor
    item_size: int


@dataclass(frozen=True)
class ShardingRule:
    """How one operator call may be sharded.

    Attributes:
        inputs: factors of every tensor input, in the order of ``Node.inputs``.
        outputs: factors of every output.
        sizes: number of pieces each factor can be cut into at most (its extent).
        whole: factors that must not be cut (softmax's dim).
        terms: the operator as a sum of products, each term the indices of the inputs it multiplies; None if it is
            not linear in that sense (then it takes no ``P``). Inputs in no term (indices, masks) are never ``P``.
        reductions: collectives the operator issues itself, by factor.
        passes_partial: whether partial sums may come in (they may leave a contraction either way).
        growing: factors along which work grows from nothing, so that the last piece has the most (causal queries).
        inner: factors that may be cut though they stand inside a dim (after all cuts of what stands before them there):
            the operator itself finds which part of its whole inputs its piece of that dim needs.
        source: where the rule is from. A call under one that is not from the tables is made with its arguments as they
            are, and is handed no partial sums, through which the checker of types lets none but torch's operators.
        exchanged: factor → factors that it cuts at once, of which no tensor has two: the operator itself sends between
            the ranks what their pieces of one need of the other (tokens to the experts of other ranks).
        row_shards: of a product that may exchange the shards of its rows itself.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[Factor, int]
    whole: frozenset[Factor] = frozenset()
    terms: tuple[tuple[int, ...], ...] | None = None
    reductions: tuple[Reduction, ...] = ()
    passes_partial: bool = True
    growing: frozenset[Factor] = frozenset()
    inner: frozenset[Factor] = frozenset()
    source: str = TABLE
    exchanged: Mapping[Factor, tuple[Factor, ...]] = field(default_factory=dict)
    row_shards: RowShards | None = None


@dataclass(frozen=True)
class AxisChoice:
    """What one mesh axis does to one operator.

    ``label`` is ``"replicate"``, ``"invariant"``, ``"cut <factor>"``, ``"partial <i,…>"`` (the inputs that are P), or
    of a product that exchanges its rows' shards ``"cut <features> from <rows>"``, ``"cut <contracted> to <rows>"``.
    ``factor`` is the factor cut, or None; ``rows`` that of the rows exchanged.
    """

    label: str
    inputs: tuple[SpmdType, ...]
    outputs: tuple[SpmdType, ...]
    factor: Factor | None = None
    reductions: tuple[Reduction, ...] = field(default=())
    rows: Factor | None = None


def axis_choices(
    rule: ShardingRule, *, input_grads: Sequence[bool], output_grads: Sequence[bool]
) -> tuple[AxisChoice, ...]:
    """Every way one mesh axis may treat an operator, whatever the size of the axis.

    ``input_grads`` and ``output_grads`` say which inputs and outputs carry a gradient; those that do not are typed
    ``R`` where others are ``I``. Divisibility is for the caller to check against ``rule.sizes``.
    """
    choices = [_replicated(REPLICATE, R, input_grads, output_grads)]
    if any(input_grads):
        choices.append(_replicated(INVARIANT, I, input_grads, output_grads))
    for factor in rule.sizes:
        choice = _cut(rule, factor, output_grads) if factor not in rule.whole else None
        if choice is not None:
            choices.append(choice)
    if rule.terms and rule.passes_partial and rule.source == TABLE:
        choices.extend(_partial(rule))
    if rule.row_shards is not None:
        choices.extend(_exchanging_rows(rule, rule.row_shards, input_grads, output_grads))
    return tuple(choices)


def pieces_of_work(rule: ShardingRule | None, choices: Sequence[AxisChoice], sizes: Sequence[int]) -> float:
    """By how much the work of the busiest rank is less than the whole, when axes of ``sizes`` take ``choices``.

    Of n pieces of a factor along which work grows linearly the last has (2n - 1) / n² of it, not 1 / n. A factor that
    is cut unevenly is divided by less than n.
    """
    pieces: dict[Factor, int] = {}
    for choice, size in zip(choices, sizes, strict=True):
        if choice.factor is not None:
            pieces[choice.factor] = pieces.get(choice.factor, 1) * size
    growing = rule.growing if rule is not None else frozenset()
    sizes_of = rule.sizes if rule is not None else {}
    return math.prod(
        n * n / (2 * n - 1) if factor in growing else _times_less(sizes_of.get(factor, n), n)
        for factor, n in pieces.items()
    )


def _times_less(extent: int, count: int) -> float:
    """By how much the largest of ``count`` parts is less than ``extent``."""
    return count if extent % count == 0 else extent / largest_part(extent, count)


def own_collectives(
    rule: ShardingRule, choices: Sequence[AxisChoice], names: Sequence[str], sizes: Sequence[int]
) -> Iterator[tuple[Reduction, str, int]]:
    """The collectives that an operator issues itself: each with its axis and its bytes (as of ``Step.num_bytes``).

    Exchanges run over all axes that exchange at once; these stand side by side (``cuts_in_order``).
    """
    local = dict(rule.sizes)
    for size, choice in zip(sizes, choices):
        if choice.factor is not None:
            local[choice.factor] = largest_part(local[choice.factor], size)
    for axis, choice in zip(names, choices):
        group = {axis: sizes[names.index(axis)]}
        if choice.factor in rule.exchanged:
            group = {name: size for name, size, other in zip(names, sizes, choices) if other.factor in rule.exchanged}
            if axis != next(iter(group)):
                continue
        for item in choice.reductions:
            num_bytes = item.multiple * item.item_size * math.prod(local[factor] for factor in item.factors)
            if item.shared_among is not None:
                num_bytes = num_bytes * local[item.shared_among] // rule.sizes[item.shared_among]
            num_bytes *= math.prod(group.values()) if item.is_gathered else 1
            pieces = 1
            if item.in_pieces_of is not None:
                pieces = pieces_of_rows(local[item.in_pieces_of] // math.prod(group.values()))
            for _ in range(pieces):
                yield item, "_".join(group), num_bytes // pieces


def gathers_rows(choices: Sequence[AxisChoice]) -> bool:
    """Whether a product gathers the rows of its input itself: others of that input may share what it gathers."""
    return any(choice.rows is not None and choice.reductions[0].collective == ALL_GATHER for choice in choices)


def exchange_of(label: str) -> str | None:
    """What a product of this strategy does with its rows itself: ``"gather"``, ``"scatter"``, or neither."""
    return next((what for word, what in ((" from ", "gather"), (" to ", "scatter")) if word in label), None)


def pieces_of_rows(rows: int) -> int:
    """In how many equal pieces a product exchanges a shard of ``rows`` rows: in 4 if they divide into as many.

    More would hide more of the first and last piece, and make every product smaller.
    """
    return next(pieces for pieces in (4, 3, 2, 1) if rows % pieces == 0)


def _replicated(
    label: str, spmd_type: SpmdType, input_grads: Sequence[bool], output_grads: Sequence[bool]
) -> AxisChoice:
    return AxisChoice(
        label,
        tuple(spmd_type if grad else R for grad in input_grads),
        tuple(spmd_type if grad else R for grad in output_grads),
    )


def _cut(rule: ShardingRule, factor: Factor, output_grads: Sequence[bool]) -> AxisChoice | None:
    """The choice that cuts ``factor``, or None if it stands inside a dim or its contraction is not a sum."""
    reductions = tuple(reduction for reduction in rule.reductions if reduction.factor == factor)
    position_of = _position_inside if factor in rule.inner else _position
    members = rule.exchanged.get(factor, (factor,))
    positions = [_position_of_one(position_of, dims, members) for dims in (*rule.inputs, *rule.outputs)]
    if -1 in positions or all(position is None for position in positions):
        return None
    in_positions, out_positions = positions[: len(rule.inputs)], positions[len(rule.inputs) :]
    contracted = [position is None for position in out_positions]
    if any(contracted) and not reductions and rule.terms is None:
        return None
    if any(contracted) and not all(contracted):
        return None
    inputs: list[SpmdType] = [R if position is None else shard(position) for position in in_positions]
    if all(contracted) and rule.terms is not None:
        for term in rule.terms:
            if all(in_positions[index] is None for index in term):
                inputs[term[0]] = P
    if P in inputs and rule.source != TABLE:
        return None
    outputs = tuple(
        shard(position) if position is not None else (P if not reductions else (I if grad else R))
        for position, grad in zip(out_positions, output_grads)
    )
    return AxisChoice(f"cut {factor}", tuple(inputs), outputs, factor, reductions)


def _position_of_one(
    position_of: Callable[[Dims, Factor], int | None], dims: Dims, factors: Sequence[Factor]
) -> int | None:
    """The dim of the one of ``factors`` that a tensor has, None if it has none."""
    positions = [position_of(dims, factor) for factor in factors]
    return next((position for position in positions if position is not None), None)


def _position(dims: Dims, factor: Factor) -> int | None:
    """The dim that ``factor`` leads, None if it is absent, -1 if it stands inside a dim (or leads two)."""
    leading = [dim for dim, factors in enumerate(dims) if factors and factors[0] == factor]
    inside = any(factor in factors[1:] for factors in dims)
    if inside or len(leading) > 1:
        return -1
    return leading[0] if leading else None


def _position_inside(dims: Dims, factor: Factor) -> int | None:
    """The dim that ``factor`` is a part of, None if it is absent."""
    return next((dim for dim, factors in enumerate(dims) if factor in factors), None)


def cuts_in_order(rule: ShardingRule, choices: Sequence[AxisChoice]) -> bool:
    """Whether no axis cuts what stands before an inner factor in its dim once an outer axis has cut that factor, and
    the axes of an exchange stand side by side; whether the axis that exchanges rows is the last to cut them, and no
    other cuts what it contracts or makes."""
    if not _rows_in_order(rule, choices):
        return False
    places = [place for place, choice in enumerate(choices) if choice.factor in rule.exchanged]
    if places and places != list(range(places[0], places[0] + len(places))):
        return False
    cut_inside: set[Factor] = set()
    for choice in choices:
        if any(
            choice.factor in factors[: factors.index(inner)] for inner in cut_inside for factors in _dims(rule, inner)
        ):
            return False
        if choice.factor in rule.inner:
            cut_inside.add(choice.factor)
    return True


def _rows_in_order(rule: ShardingRule, choices: Sequence[AxisChoice]) -> bool:
    shards = rule.row_shards
    places = [place for place, choice in enumerate(choices) if choice.rows is not None]
    if shards is None or not places:
        return True
    others = [choice for place, choice in enumerate(choices) if place != places[0]]
    if len(places) > 1 or any(P in (*each.inputs, *each.outputs) for each in others):
        return False
    return not any(each.factor in (shards.contracted, shards.features) for each in others) and not any(
        each.factor == shards.rows for each in choices[places[0] + 1 :]
    )


def exchanges_equal_rows(rule: ShardingRule | None, choices: Sequence[AxisChoice], sizes: Sequence[int]) -> bool:
    """Whether the rows that an operator exchanges are cut into equal parts, if it exchanges any."""
    rows = next((choice.rows for choice in choices if choice.rows is not None), None)
    if rule is None or rows is None:
        return True
    return not rule.sizes[rows] % math.prod(
        size for size, choice in zip(sizes, choices, strict=True) if rows in (choice.factor, choice.rows)
    )


def _dims(rule: ShardingRule, factor: Factor) -> list[tuple[Factor, ...]]:
    return [factors for dims in (*rule.inputs, *rule.outputs) for factors in dims if factor in factors]


def _exchanging_rows(
    rule: ShardingRule, shards: RowShards, input_grads: Sequence[bool], output_grads: Sequence[bool]
) -> list[AxisChoice]:
    """Choices of a product whose input or output has its rows cut, and the weight its features or its other factor.

    Forward the rows are gathered, and once more backward for the weight's gradient; the input's gradient is scattered.
    Or the output is scattered, and its gradient gathered.
    """
    rows, contracted, features = shards.rows, shards.contracted, shards.features
    whole_input = tuple(factor for dim in rule.inputs[0] for factor in dim)
    whole_output = tuple(factor for dim in rule.outputs[0] for factor in dim)

    def sent(factor: Factor, collective: str, of: tuple[Factor, ...], phase: str, *, pieces: bool = True) -> Reduction:
        return Reduction(factor, collective, of, 1, shards.item_size, phase, in_pieces_of=rows if pieces else None)

    gathers = [sent(features, ALL_GATHER, whole_input, "forward")]
    if len(input_grads) > 1 and input_grads[1]:
        gathers.append(sent(features, ALL_GATHER, whole_input, "backward", pieces=False))
    if input_grads[0]:
        gathers.append(sent(features, REDUCE_SCATTER, whole_input, "backward"))
    scatters = [sent(contracted, REDUCE_SCATTER, whole_output, "forward")]
    if any(output_grads):
        scatters.append(sent(contracted, ALL_GATHER, whole_output, "backward"))

    def types(factor: Factor, first: Factor, last: Factor) -> tuple[tuple[SpmdType, ...], tuple[SpmdType, ...]]:
        places = [_position(dims, first if place == 0 else factor) for place, dims in enumerate(rule.inputs)]
        place = _position(rule.outputs[0], last)
        assert place is not None, "the output has rows and features"
        return tuple(R if each is None else shard(each) for each in places), (shard(place),)

    return [
        AxisChoice(label, *types(factor, first, last), factor, tuple(reductions), rows)
        for label, factor, first, last, reductions in (
            (f"cut {features} from {rows}", features, rows, features, gathers),
            (f"cut {contracted} to {rows}", contracted, contracted, rows, scatters),
        )
    ]


def _partial(rule: ShardingRule) -> list[AxisChoice]:
    """Choices that pass partial sums through: one factor of every term is ``P``, the others ``R``."""
    assert rule.terms is not None
    picks: list[tuple[int, ...]] = [()]
    for term in rule.terms:
        picks = [(*pick, index) for pick in picks for index in term]
    choices = []
    for pick in dict.fromkeys(tuple(sorted(set(pick))) for pick in picks):
        if all(sum(index in pick for index in term) == 1 for term in rule.terms):
            inputs = tuple(P if index in pick else R for index in range(len(rule.inputs)))
            outputs = (P,) * len(rule.outputs)
            choices.append(AxisChoice("partial " + ",".join(map(str, pick)), inputs, outputs))
    return choices
