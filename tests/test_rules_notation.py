"""The notation of rules, views, and the operation counts: what the data says, without running an operator."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from passes.ir.graph import Node, Ref, Value
from passes.rules import forward_flops, rule_for
from passes.rules.rule import axis_choices, pieces_of_work
from passes.rules.rule_notation import parse
from passes.rules.view_rules import reshape_dims
from tests.patience import calls_made


def node_of(op: str, shapes: list[tuple[int, ...]], output: tuple[int, ...], **kwargs: object) -> tuple[Node, dict]:
    values = {f"t{place}": Value(f"t{place}", shape, "float32") for place, shape in enumerate(shapes)}
    node = Node("n", op, tuple(Ref(name) for name in values), kwargs, (Value("o", output, "float32"),))
    return node, values


def test_a_line_says_terms_factors_and_markers() -> None:
    line = parse("...k, nk + n -> ...n")
    assert line.operands == ((("...",), ("k",)), (("n",), ("k",)), (("n",),))
    assert line.terms == ((0, 1), (2,)) and line.passes_partial
    assert parse("vd / ... => ...d").terms == ((0,),) and not parse("vd / ... => ...d").passes_partial
    assert parse("~ (h d)k!, _[v] -> (h d)").whole == {"k"}
    assert parse("~ (h d)k!, _[v] -> (h d)").reduced == {"v"}
    assert parse("~ (h d)k!, _[v] -> (h d)").operands[0] == (("h", "d"), ("k",))


@pytest.mark.parametrize("line", ["ij, jk", "i?j -> ij", "...i... -> i"])
def test_a_line_that_cannot_be_read_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="sharding rule"):
        parse(line)


def test_choices_of_a_linear() -> None:
    rule = rule_for(*node_of("aten.linear.default", [(4, 2, 8), (6, 8), (6,)], (4, 2, 6)))
    assert rule is not None
    choice_table = {
        c.label: (c.inputs, c.outputs) for c in axis_choices(rule, input_grads=[True] * 3, output_grads=[True])
    }
    assert choice_table == {
        "replicate": (("R", "R", "R"), ("R",)),
        "invariant": (("I", "I", "I"), ("I",)),
        "cut b1": (("S(0)", "R", "R"), ("S(0)",)),
        "cut b0": (("S(1)", "R", "R"), ("S(1)",)),
        "cut k": (("S(2)", "S(1)", "P"), ("P",)),
        "cut n": (("R", "S(0)", "S(0)"), ("S(2)",)),
        "partial 0,2": (("P", "R", "P"), ("P",)),
        "partial 1,2": (("R", "P", "P"), ("P",)),
        "cut n from b0": (("S(1)", "S(0)", "S(0)"), ("S(2)",)),
        "cut k to b0": (("S(2)", "S(1)", "R"), ("S(1)",)),
    }


def test_an_unknown_operator_has_no_rule() -> None:
    assert rule_for(*node_of("aten.dist.default", [(4, 4), (4, 4)], ())) is None
    assert rule_for(*node_of("nowhere.nothing.default", [(4, 4)], (4, 4))) is None


@pytest.mark.parametrize(
    ("source", "target", "cuttable"),
    [
        ((4, 16, 64), (4, 16, 8, 8), {(0, 0): 4, (1, 1): 16, (2, 2): 8}),  # heads
        ((4, 16, 8, 8), (64, 64), {(0, 0): 4, (2, 1): 8}),  # merged: only the outer dim
        ((6, 4), (4, 6), {(0, 0): 2}),  # neither divides the other
        ((1, 4, 1, 6), (4, 6, 1), {(1, 0): 4, (3, 1): 6}),  # ones do not count
    ],
)
def test_what_a_view_lets_through(
    source: tuple[int, ...], target: tuple[int, ...], cuttable: dict[tuple[int, int], int]
) -> None:
    ins, outs, sizes = reshape_dims(source, target)
    choice_table = {
        (in_dim, out_dim): sizes[in_factors[0]]
        for in_dim, in_factors in enumerate(ins)
        for out_dim, out_factors in enumerate(outs)
        if in_factors and in_factors[:1] == out_factors[:1]
    }
    assert choice_table == cuttable


@given(st.lists(st.integers(1, 6), max_size=4), st.randoms(use_true_random=False))
def test_factors_of_a_view_fit_its_dims(source: list[int], random: object) -> None:
    target = sorted(source, key=lambda _: random.random())  # type: ignore[attr-defined]
    for dims, shape in zip(reshape_dims(source, target)[:2], (source, target)):
        sizes = reshape_dims(source, target)[2]
        assert all(size % math.prod(sizes[f] for f in factors) == 0 for factors, size in zip(dims, shape))


@pytest.mark.parametrize(
    ("op", "shapes", "output", "kwargs", "flops"),
    [
        ("aten.linear.default", [(4, 2, 8), (6, 8), (6,)], (4, 2, 6), {}, 2 * 4 * 2 * 8 * 6),
        ("aten.addmm.default", [(6,), (4, 8), (8, 6)], (4, 6), {}, 2 * 4 * 8 * 6),
        ("aten.matmul.default", [(3, 4, 8), (3, 8, 6)], (3, 4, 6), {}, 2 * 3 * 4 * 8 * 6),
        ("aten.scaled_dot_product_attention.default", [(2, 4, 5, 8)] * 3, (2, 4, 5, 8), {}, 4 * 2 * 4 * 5 * 5 * 8),
        (
            "aten.scaled_dot_product_attention.default",
            [(2, 4, 5, 8)] * 3,
            (2, 4, 5, 8),
            {"is_causal": True},
            2 * 2 * 4 * 5 * 5 * 8,
        ),
        (
            "aten.scaled_dot_product_attention.default",
            [(2, 4, 6, 8), (2, 4, 4, 8), (2, 4, 4, 8)],
            (2, 4, 6, 8),
            {"is_causal": True},
            4 * 2 * 4 * (4 * 4 / 2 + 2 * 4) * 8,
        ),
        ("aten._grouped_mm.default", [(12, 8), (3, 8, 6), (3,)], (12, 6), {}, 2 * 12 * 8 * 6),
        ("aten.conv2d.default", [(2, 3, 8, 8), (5, 3, 3, 3)], (2, 5, 6, 6), {}, 2 * 2 * 5 * 6 * 6 * 3 * 9),
        ("aten.gelu.default", [(4, 4)], (4, 4), {}, 0),
    ],
)
def test_operations_are_counted(
    op: str, shapes: list[tuple[int, ...]], output: tuple[int, ...], kwargs: dict[str, object], flops: float
) -> None:
    assert forward_flops(*node_of(op, shapes, output, **kwargs)) == flops


def test_the_last_of_cut_causal_queries_works_most() -> None:
    shapes = [(2, 4, 8, 16)] * 3
    for is_causal, expected in ((True, 2 * 16 / 7), (False, 8)):
        node, values = node_of("aten.scaled_dot_product_attention.default", shapes, shapes[0], is_causal=is_causal)
        rule = rule_for(node, values)
        assert rule is not None
        grads = [value.requires_grad for value in values.values()]
        choices = {c.label: c for c in axis_choices(rule, input_grads=grads[:3], output_grads=grads[:1])}
        cut = [choices["cut b0"], choices["cut l"], choices["cut l"], choices["replicate"]]
        assert pieces_of_work(rule, cut, (2, 2, 2, 3)) == pytest.approx(expected)


def test_a_rule_is_read_in_a_few_hundred_calls() -> None:
    """Also when no two nodes are alike."""
    calls = [node_of("aten.linear.default", [(4, size, 8), (6, 8)], (4, size, 6)) for size in range(2, 1002)]
    rule_for(*calls[0])
    assert calls_made(lambda: [rule_for(node, values) for node, values in calls]) < 400 * len(calls)
