"""Every sharding rule, proved: the operator on shards gives what it gives on whole tensors, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import rules_samples_fused  # noqa: F401  (registers its samplers)
import rules_samples_layers  # noqa: F401  (registers its samplers)
import rules_samples_matrices  # noqa: F401  (registers its samplers)
import rules_samples_parts  # noqa: F401  (registers its samplers)
import rules_samples_signals  # noqa: F401  (registers its samplers)
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rules_harness import WITHOUT_GRADIENT, Sample, fake_mesh, legal_choices, make_case, prove
from rules_samples import SAMPLERS, Draw
from torch.distributed.device_mesh import DeviceMesh

from passes.rules import known_operators, rule_for
from passes.rules.rule import ShardingRule
from tests.cells import cells

#: Operators that draw random numbers: proved in ``test_ops_random``.
RANDOM = {
    "aten.dropout.default", "aten.rand_like.default", "aten.randn_like.default", "aten.bernoulli.default",
    "aten.randint_like.low_dtype", "aten.rand.default", "aten.randn.default", "aten.randint.low",
}  # fmt: skip


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as fake:
        yield fake


def test_every_rule_has_a_sampler() -> None:
    assert known_operators() - RANDOM == set(SAMPLERS) - RANDOM


def _prove(op: str, mesh: DeviceMesh, data: st.DataObject) -> None:
    torch.manual_seed(0)
    draw = Draw(data)
    args, kwargs = SAMPLERS[op](draw)
    pairs = [(draw.int(0, 7), draw.int(0, 7)) for _ in range(2)]
    assert prove(mesh, Sample(op, args, kwargs), pairs=pairs)


# Shrinking runs a wrong rule hundreds of times: the first example that fails says enough.
_SETTINGS = settings(
    deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)
_POINTWISE = sorted(
    op for op, sample in SAMPLERS.items() if sample.__qualname__.startswith("_pointwise") and op not in RANDOM
)


@pytest.mark.parametrize("op", _POINTWISE)
@settings(_SETTINGS, max_examples=2)
@given(data=st.data())
def test_pointwise_rule(op: str, mesh: DeviceMesh, data: st.DataObject) -> None:
    _prove(op, mesh, data)


#: Operator → what the installed torch cannot do with it, where it cannot.
_LACKS: dict[str, tuple[Callable[[], bool], str]] = {
    "aten.aminmax.default": (
        lambda: "NotImplemented" in str(torch.aminmax(torch.ones(2, requires_grad=True)).max.grad_fn),
        "has no derivative of aminmax",
    ),
    "aten.norm.ScalarOpt_dim": (
        lambda: torch.ops.aten.norm.ScalarOpt_dim(torch.empty(1, device="meta"), 2.0, [-1]).shape != (),
        "keeps the dim of a norm over one element, without data alone",
    ),
}


def _skip_what_torch_lacks(op: str) -> None:
    lacks, what = _LACKS.get(op, (lambda: False, ""))
    if lacks():
        pytest.skip(f"torch {torch.__version__} {what}")


@pytest.mark.parametrize("op", sorted(set(SAMPLERS) - set(_POINTWISE) - RANDOM))
@settings(_SETTINGS, max_examples=len(cells(range(3), range(3, 4))))
@given(data=st.data())
def test_rule(op: str, mesh: DeviceMesh, data: st.DataObject) -> None:
    _skip_what_torch_lacks(op)
    _prove(op, mesh, data)


@pytest.mark.parametrize("keys", [4, 6, 8, 3])
@pytest.mark.parametrize("members", [1, 2])
def test_causal_attention_with_cut_queries(keys: int, members: int, mesh: DeviceMesh) -> None:
    """Each rank's queries see the keys up to their own place in the whole sequence, on one axis or two."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, length, 3, dtype=torch.float64)
        for heads, length in ((2 * members, 8), (2, keys), (2, keys))
    )
    sample = Sample(
        "aten.scaled_dot_product_attention.default",
        (query, key, value),
        {"is_causal": True, "enable_gqa": members > 1},
    )
    case = make_case(sample)
    rule = rule_for(case.node, case.values)
    assert rule is not None
    labels = [choice.label for choice in legal_choices(case, rule)]
    queries = labels.index("cut l")
    assert prove(mesh, sample, pairs=[(queries, place) for place in range(len(labels))] + [(0, queries)])


@pytest.mark.parametrize(("key_heads", "members"), [(2, 4), (4, 2), (3, 4), (2, 2), (1, 4)])
def test_query_heads_cut_further_than_key_heads(key_heads: int, members: int, mesh: DeviceMesh) -> None:
    """Each rank's query heads find their heads of keys: in one group, in several groups, or in groups torn apart."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, 3, 2, dtype=torch.float64) for heads in (key_heads * members, key_heads, key_heads)
    )
    sample = Sample("aten.scaled_dot_product_attention.default", (query, key, value), {"enable_gqa": True})
    case = make_case(sample)
    rule = rule_for(case.node, case.values)
    assert rule is not None
    labels = [choice.label for choice in legal_choices(case, rule)]
    queries = labels.index("cut m")
    assert prove(
        mesh, sample, pairs=[pair for place in range(len(labels)) for pair in ((queries, place), (place, queries))]
    )


@pytest.mark.parametrize("frozen", [(0,), (3, 4), (2, 3, 4)], ids=["inputs", "weights", "weights and scores"])
def test_experts_beside_operands_without_gradients(
    frozen: tuple[int, ...], mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen weights are R where inputs are I, and the other way around."""
    monkeypatch.setitem(WITHOUT_GRADIENT, "meshwright.experts.default", frozen)
    shapes = (4, 2, 3), (4, 2, 2), (4, 8, 3), (4, 3, 4)
    tokens, scores, gate_up, down = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    ids = torch.arange(16).view(4, 2, 2) * 3 % 4
    assert prove(mesh, Sample("meshwright.experts.default", (tokens, ids, scores, gate_up, down, None, None), {}))


def _wrong_softmax() -> tuple[Sample, ShardingRule]:
    """Softmax whose own dim may be cut."""
    rows = (("b",), ("n",))
    sample = Sample("aten.softmax.int", (torch.randn(2, 4, dtype=torch.float64), -1), {})
    return sample, ShardingRule((rows,), (rows,), {"b": 2, "n": 4})


def _wrong_bias() -> tuple[Sample, ShardingRule]:
    """A linear that adds its bias on every rank when the contraction is cut."""
    tensors = tuple(torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (2, 4), (2,)))
    dims = ((("b",), ("k",)), (("n",), ("k",)), (("n",),))
    sizes = {"b": 3, "k": 4, "n": 2}
    return Sample("aten.linear.default", tensors, {}), ShardingRule(
        dims, ((("b",), ("n",)),), sizes, terms=((0, 1, 2),)
    )


def _wrong_gradient() -> tuple[Sample, ShardingRule]:
    """A product whose second operand claims to be sharded along where the first one is: only values agree."""
    tensors = (torch.ones(4, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    rule = ShardingRule(((("m",), ("n",)), (("m",),)), ((("m",), ("n",)),), {"m": 4, "n": 4}, terms=((0, 1),))
    return Sample("aten.mul.Tensor", tensors, {}), rule


@pytest.mark.parametrize("wrong", [_wrong_softmax, _wrong_bias, _wrong_gradient])
def test_a_wrong_rule_is_caught(wrong: Callable[[], tuple[Sample, ShardingRule]], mesh: DeviceMesh) -> None:
    sample, rule = wrong()
    with pytest.raises((AssertionError, RuntimeError)):
        prove(mesh, sample, rule=rule)
