"""How a mixture's experts may be cut (``meshwright.experts``), and what they compute."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from passes.ir.conversions import ALL_GATHER, ALL_TO_ALL
from passes.ir.graph import ITEM_SIZE, Node, Value
from passes.rules.operator_call import OperatorCall, bind, named_dims
from passes.rules.rule import Dims, Factor, Reduction, ShardingRule

EXPERTS = "meshwright.experts.default"
EXPERT_LINEAR = "meshwright.expert_linear"
#: How capture writes that it stacked the weights of a loop's experts; where a model stacks it leaves a dim of 0 out.
STACKED_BY_LOOP: Mapping[str, int] = {"dim": 0}
_PER_EXPERT = {"aten.stack.default": 1, "aten.cat.default": 2}
#: Factors: experts, entries of an expert's inner vector; with the number of a dim behind it, the tokens along a leading
#: dim, and tokens and experts at once: expert parallelism, where a rank has some tokens and some experts, and tokens
#: travel to their experts and back.
EXPERT, INNER, TOKENS, PARALLEL = "e", "f", "t", "p"
#: Activations whose first product has two rows for an inner entry, and how these lie.
BEHIND, IN_TURNS = "behind", "in turns"
GATED = {
    **dict.fromkeys(("swiglu", "geglu", "geglu_tanh", "reglu", "glu"), BEHIND),
    "swiglu_clamped": IN_TURNS,
}


def exchange_label(label: str) -> str:
    """The choice of expert parallelism beside one that cuts tokens along a leading dim; others are as they are."""
    return f"cut {PARALLEL}{label.removeprefix(_CUT_TOKENS)}" if label.startswith(_CUT_TOKENS) else label


_CUT_TOKENS = f"cut {TOKENS}"


def experts(call: OperatorCall) -> ShardingRule:
    """Tokens; experts (each rank computes the rows of its own, partial sums); inner entries; tokens with experts.

    Gate and up rows that lie one behind the other cannot be cut along the inner entries, which every rank has a piece
    of in both: they are whole there, and each rank takes its rows.
    """
    (*lead, hidden), k = call.shape("x"), call.shape("expert_ids")[-1]
    count, _, inner = call.shape("down")
    tokens = named_dims(lead, prefix=TOKENS)
    e, f = _factor(EXPERT, count), _factor(INNER, inner)
    factors: dict[str, Dims] = {
        **dict.fromkeys(("x", "expert_ids", "scores"), (*tokens, ())),
        "gate_up": (e, _first_rows(call, f), ()),
        "gate_up_bias": (e, _first_rows(call, f)),
        "down": (e, (), f),
        "down_bias": (e, ()),
    }
    exchanged = {
        f"{PARALLEL}{dim}": (f"{TOKENS}{dim}", EXPERT) for dim, size in enumerate(lead) if math.gcd(size, count) > 1
    }
    sizes = {EXPERT: count, INNER: inner}
    sizes |= {factor: math.gcd(lead[int(factor.removeprefix(PARALLEL))], count) for factor in exchanged}
    slots = call.slots
    products = tuple(slots.index(name) for name in ("x", "scores", "gate_up", "down"))
    return call.rule(
        call.by_slot(factors),
        [(*tokens, ())],
        terms=(products,),  # each rank of a cut inner dim adds its share of the bias
        passes_partial=False,
        sizes={factor: size for factor, size in sizes.items() if size > 1},
        reductions=_exchanges(exchanged, tokens, k * hidden, call),
        exchanged=exchanged,
    )


def _factor(name: Factor, size: int) -> tuple[Factor, ...]:
    return (name,) if size != 1 else ()


def _first_rows(call: OperatorCall, inner: tuple[Factor, ...]) -> tuple[Factor, ...]:
    """Factors of the rows of the first matrix: those of gate and up in turns are two for every inner entry."""
    return () if GATED.get(call["activation"]) == BEHIND else inner


def _exchanges(exchanged: Iterable[Factor], tokens: Dims, elements: int, call: OperatorCall) -> tuple[Reduction, ...]:
    """Every token's ``k`` rows to their experts and back, forward and backward: routed evenly, none dropped.

    Before them every rank tells how many rows it has for each expert. Where another axis cuts the experts too, a group
    exchanges the rows for its own part of them.
    """
    item_size = ITEM_SIZE[call.outputs[0].dtype]
    every_token = tuple(factor for dim in tokens for factor in dim)
    phases = ("forward", "forward", "backward", "backward")
    return tuple(
        item
        for factor in exchanged
        for item in (
            Reduction(factor, ALL_GATHER, (EXPERT,), 1, ITEM_SIZE["int64"], "forward", is_gathered=True),
            *(
                Reduction(factor, ALL_TO_ALL, every_token, elements, item_size, phase, shared_among=EXPERT)
                for phase in phases
            ),
        )
    )


def grouped_products(
    node: Node, inputs: Sequence[tuple[int, ...]], rows: float
) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
    """(batch, m, n, k) of the two grouped products of ``rows`` rows, from the local shapes of the operands.

    Every expert has equally many rows (uniform routing): a product for each, of at least one row.
    """
    call_names = dict(zip(_OPERANDS, inputs))
    (count, outer, hidden), (_, _, inner) = call_names["gate_up"], call_names["down"]
    gated = 2 if _activation(node) in GATED else 1
    m = max(1, round(rows / count))
    return (count, m, min(outer, gated * inner), hidden), (count, m, hidden, inner)


#: Tensor operands in order, before the biases.
_OPERANDS = ("x", "expert_ids", "scores", "gate_up", "down")


def _activation(node: Node) -> str:
    """The activation of a call, by place or by name."""
    place = 7
    return str(node.args[place] if len(node.args) > place else node.kwargs.get("activation", "swiglu"))


def experts_flops(call: OperatorCall) -> float:
    """Two products of every token with each of its experts."""
    rows = math.prod(call.shape("expert_ids"))
    _, outer, hidden = call.shape("gate_up")
    return 2.0 * rows * hidden * (outer + call.shape("down")[2])


def num_experts(node: Node, values: Mapping[str, Value]) -> int:
    """How many experts a mixture has."""
    call = bind(node, values)
    assert call is not None, "an operator of ours"
    return call.shape("gate_up")[0]


def stacked_by_loop(node: Node) -> list[tuple[str, ...]]:
    """For each expert what ``node`` stacks of it, if that is weights that a loop over experts used one by one.

    A stack has one of each expert; what is laid one behind the other has two, the gate's and that of what it gates.
    """
    per_expert = _PER_EXPERT.get(node.op) if dict(node.kwargs) == STACKED_BY_LOOP else None
    return [] if per_expert is None else list(zip(*(node.inputs[first::per_expert] for first in range(per_expert))))


def is_experts(node: Node) -> bool:
    """Whether ``node`` is a mixture's experts."""
    return node.op == EXPERTS
