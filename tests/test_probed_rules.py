"""Rules found by running operators on small shards: never a wrong one, and at least what is known of an operator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rules_harness import Sample, fake_mesh, make_case, prove
from torch.distributed.device_mesh import DeviceMesh

import planner
from passes.rules import rule_for
from passes.rules.probing import probed_rules, rule_cache
from passes.rules.probing.probed_rules import probe
from passes.rules.registered_rules import REGISTRY
from passes.rules.rule import PROBED, REGISTERED, ShardingRule, axis_choices


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def indices(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh() as fake:
        yield fake


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "meshwright" / "rules"


def rule_of_run(op: str, *args: Any, **kwargs: Any) -> ShardingRule | None:
    case = make_case(Sample(op, args, kwargs))
    return probe(case.node, case.values)


def cuts(rule: ShardingRule | None) -> set[str]:
    """What the cuts of a rule do, inputs → output: ``"S0 R -> S0"``."""
    if rule is None:
        return set()
    grads = [True] * len(rule.inputs), [True] * len(rule.outputs)
    choices = axis_choices(rule, input_grads=grads[0], output_grads=grads[1])
    cutting = [choice for choice in choices if choice.factor is not None]
    return {f"{' '.join(choice.inputs)} -> {choice.outputs[0]}".replace("(", "").replace(")", "") for choice in cutting}


#: (operator, arguments, every cut that it allows).
KNOWN = [
    ("aten.mm.default", (normal(8, 6), normal(6, 4)), {"S0 R -> S0", "R S1 -> S1", "S1 S0 -> P"}),
    ("aten.mean.dim", (normal(8, 6), [1]), {"S0 -> S0"}),
    ("aten.sum.default", (normal(8, 6),), {"S0 -> P", "S1 -> P"}),
    ("aten.cumsum.default", (normal(8, 6), 1), {"S0 -> S0"}),
    ("aten.median.dim", (normal(8, 6), 0), {"S1 -> S0"}),
    ("aten.kron.default", (normal(4, 6), normal(4, 6)), {"S0 R -> S0", "S1 R -> S1"}),
    ("aten.embedding.default", (normal(10, 4), indices(10, 6)), {"S1 R -> S1", "R S0 -> S0"}),
    ("aten.index_add.default", (normal(8, 6), 0, indices(8, 4), normal(4, 6)), {"S1 R S1 -> S1"}),
    ("aten.pixel_shuffle.default", (normal(4, 8, 2, 6), 2), {"S0 -> S0", "S1 -> S1", "S2 -> S2", "S3 -> S3"}),
    ("aten.channel_shuffle.default", (normal(2, 8, 4), 2), {"S0 -> S0", "S2 -> S2"}),
    ("aten.renorm.default", (normal(8, 6), 2, 0, 1.0), {"S0 -> S0"}),
    ("aten.flip.default", (normal(8, 6), [0]), {"S1 -> S1"}),
    ("aten.hstack.default", ([normal(8, 6), normal(8, 6)],), {"S0 S0 -> S0"}),
    ("aten.linalg_eigvalsh.default", (normal(4, 6, 6),), {"S0 -> S0"}),
    # counts in its gradient how often an index comes in the whole batch
    ("aten.embedding.default", (normal(10, 4), indices(4, 6), -1, True), {"S1 R -> S1"}),
    ("aten.dist.default", (normal(8, 6), normal(8, 6)), set()),
    ("aten.mse_loss.default", (normal(8, 6), normal(8, 6)), set()),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "args", "expected"), KNOWN, ids=[f"{row[0]}-{place}" for place, row in enumerate(KNOWN)]
)
def test_every_cut_is_found_and_no_other(op: str, args: tuple[Any, ...], expected: set[str]) -> None:
    assert cuts(rule_of_run(op, *args)) == expected


def test_what_is_found_computes_and_trains_as_one_device_does(mesh: DeviceMesh) -> None:
    """The emitted call under every choice, on one mesh axis and on two, by the harness that proves the tables."""
    for op, args, expected in KNOWN:
        sample = Sample(op, args, {})
        rule = rule_of_run(op, *args)
        if rule is not None:
            pairs = [(2, 3), (3, 2), (2, 2)]
            assert prove(mesh, sample, rule=rule, pairs=pairs) > len(expected) // 2


LIBRARY = torch.library.Library("probed", "DEF")


def operator(name: str, schema: str, function: Any) -> str:
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return f"probed.{name}.default"


def counted() -> Any:
    calls = iter(range(10**9))
    return lambda x: x + next(calls)


REFUSED = {
    "draws": lambda x: x + torch.rand_like(x),
    "drops": lambda x: torch.dropout(x, 1e-4, True),
    "writes": lambda x: x.data.mul_(2.0) * 1.0,
    "counts": counted(),
    "raises": lambda x: torch.linalg.cholesky(x[0, 0] * -1.0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_gets_no_rule(name: str) -> None:
    op = operator(name, "(Tensor x) -> Tensor", REFUSED[name])
    node_of = Sample(op, (normal(4, 6).requires_grad_(),), {})
    try:
        case = make_case(node_of)
    except Exception:
        return
    assert probe(case.node, case.values) is None


#: Operators whose samples depend on each other, some hardly visibly: (function, cuts that are right).
DECEIVING = {
    "global_norm": (lambda x: x * torch.clamp(100.0 / (x.norm() + 1e-6), max=1.0), set()),
    "row_norm": (lambda x: x * torch.clamp(100.0 / (x.norm(dim=1, keepdim=True) + 1e-6), max=1.0), {"S0 -> S0"}),
    "detached_mean": (lambda x: x - x.detach().mean(0), {"S1 -> S1"}),
    "size": (lambda x: x / x.shape[0], {"S1 -> S1"}),
    "gradient_only": (lambda x: x + (x.sum() - x.sum().detach()), set()),
    "first_three": (lambda x: torch.cat([x[:3] * 2.0, x[3:]]), {"S1 -> S1"}),
    "pairs": (lambda x: x.unflatten(1, (-1, 2)).flip(2).flatten(1), {"S0 -> S0", "S1 -> S1"}),
}


def test_a_number_hidden_in_the_code_shows_at_the_size_of_the_call() -> None:
    """What is done to the first 128 entries is done to all entries of small tensors."""
    op = operator("first_block", "(Tensor x) -> Tensor", lambda x: torch.cat([x[:, :128] * 2.0, x[:, 128:]], 1))
    assert cuts(rule_of_run(op, normal(8, 512))) == {"S0 -> S0"}
    case = make_case(Sample(op, (normal(8, 512),), {}))
    planner.register_rule(op, "~ bn -> bn")
    with pytest.raises(ValueError, match=r"is wrong: under 'cut n', .*\(tensor\[\d+, 512\]\)"):
        rule_for(case.node, case.values)


@pytest.mark.parametrize("name", DECEIVING)
def test_no_wrong_rule_is_found(name: str) -> None:
    function, expected = DECEIVING[name]
    rule = rule_of_run(operator(name, "(Tensor x) -> Tensor", function), normal(8, 12))
    assert cuts(rule) == expected
    if name == "pairs":
        assert rule is not None and dict(rule.sizes) == {"p0": 8, "p1": 6}


def test_sizes_that_are_alike_by_chance_are_told_apart() -> None:
    assert cuts(rule_of_run("aten.mm.default", normal(8, 8), normal(8, 8))) == {
        "S0 R -> S0",
        "R S1 -> S1",
        "S1 S0 -> P",
    }
    assert rule_of_run("aten.cross.default", normal(8, 3), normal(8, 3)) is not None


def test_a_rule_is_kept_on_disk_and_a_broken_file_is_written_again(cache: Path) -> None:
    case = make_case(Sample("aten.renorm.default", (normal(12, 10), 2, 0, 1.0), {}))
    probes = []

    def find() -> ShardingRule | None:
        probes.append(1)
        return probe(case.node, case.values)

    def look_up() -> ShardingRule | None:
        return rule_cache.cached_rule(case.node, case.values, find)

    first = look_up()
    (file,) = cache.iterdir()
    assert first is not None and first.source == PROBED
    assert look_up() == first and len(probes) == 1
    content = json.loads(file.read_text())
    for broken in ("{", "[]", json.dumps({**content, "key": []}), json.dumps({**content, "rule": {"inputs": [["x"]]}})):
        file.write_text(broken)
        assert look_up() == first
        assert json.loads(file.read_text()) == content
    assert len(probes) == 5


def test_the_cache_does_not_grow_without_end(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_cache, "MAX_FILES", 4)
    cache.mkdir(parents=True, exist_ok=True)
    for place in range(4):
        (cache / f".{place}.json.1.partial").write_text("{")  # of processes that were killed
    for size in range(2, 12):
        case = make_case(Sample("aten.renorm.default", (normal(size, 10), 2, 0, 1.0), {}))
        rule_cache.cached_rule(case.node, case.values, lambda: None)
    assert len(list(cache.iterdir())) <= 4


def test_a_folder_that_cannot_be_written_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    case = make_case(Sample("aten.renorm.default", (normal(12, 10), 2, 0, 1.0), {}))
    assert rule_cache.cached_rule(case.node, case.values, lambda: probe(case.node, case.values)) is not None


def test_operators_that_end_the_process_on_wrong_shapes_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probed_rules, "small_shapes", lambda *_: pytest.fail("it was run"))
    weights = [normal(24, 8), normal(24, 8)]
    assert (
        rule_of_run("aten.gru.input", normal(4, 6, 8), normal(1, 4, 8), weights, False, 1, 0.0, True, False, True)
        is None
    )


def test_constants_and_tiny_operators_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probed_rules, "probe", lambda *_: pytest.fail("it was run"))
    case = make_case(Sample("aten.renorm.default", (normal(2, 3), 2, 0, 1.0), {}))
    assert rule_for(case.node, case.values) is None


# -- registered rules --------------------------------------------------------------------------------------------------

SCALED = "(Tensor a, Tensor b, float factor) -> Tensor"


def test_a_registered_rule_comes_first() -> None:
    op = operator("scaled_product", SCALED, lambda a, b, factor: a @ b * factor)
    case = make_case(Sample(op, (normal(4, 6, 8), normal(4, 8, 6), 2.0), {}))
    planner.register_rule("probed::scaled_product", "bmk, bkn => bmn")
    rule = rule_for(case.node, case.values)
    assert rule is not None and rule.source == REGISTERED
    assert cuts(rule) == {"S0 S0 -> S0", "S1 R -> S1", "S2 S1 -> P", "R S2 -> S2"}
    planner.register_rule(
        torch.ops.probed.scaled_product, lambda call: "b_k, bk_ => b__" if call["factor"] > 1 else None
    )
    assert cuts(rule_for(case.node, case.values)) == {"S0 S0 -> S0", "S2 S1 -> P"}
    planner.register_rule("probed.scaled_product.default", None)
    assert rule_for(case.node, case.values) is None


def test_a_wrong_rule_is_refused_with_the_example_that_shows_it() -> None:
    op = operator("shifted_product", SCALED, lambda a, b, factor: a @ b + factor)
    case = make_case(Sample(op, (normal(4, 6, 8), normal(4, 8, 6), 2.0), {}))
    planner.register_rule("probed::shifted_product", "bmk, bkn -> bmn")
    with pytest.raises(ValueError, match=r"shifted_product.*is wrong: under 'cut k'.*tensor\[\d+, \d+, \d+\].*differs"):
        rule_for(case.node, case.values)
    planner.register_rule("probed::shifted_product", "bmk, bkn -> bmn", check=False)
    assert len(cuts(rule_for(case.node, case.values))) == 4
    planner.register_rule("probed::shifted_product", "bm, bn -> bmn")
    with pytest.raises(ValueError, match=r"does not fit its call on \[4, 6, 8\], \[4, 8, 6\] -> \[4, 6, 6\]"):
        rule_for(case.node, case.values)


@pytest.mark.parametrize(
    ("op", "rule", "complaint"),
    [
        ("nowhere::nothing", "b -> b", "unknown operator 'nowhere::nothing'"),
        ("aten::relu; import os", "b -> b", "unknown operator"),
        ("aten::relu", "b b", "expected 'operands -> outputs'"),
        ("aten::relu", "[b] -> b", "says that the operator communicates"),
        ("aten::relu", 3, "expected a line of notation, a function or None"),
    ],
)
def test_bad_registrations(op: str, rule: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint.replace("[", r"\[")):
        planner.register_rule(op, rule)


# -- plans -------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("probed_models::mix", mutates_args=())
def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


@mix.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs, output)


def _gradients(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight, output = ctx.saved_tensors
    inner = upstream * (1 - output * output)
    return inner @ weight.t(), x.flatten(0, -2).t() @ inner.flatten(0, -2)


mix.register_autograd(_gradients, setup_context=_keep)


class WithCustomOperator(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, 32) / 4)
        self.down = torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(mix(x, self.weight)).square().mean()


def test_a_model_with_a_custom_operator_is_sharded_and_trains() -> None:
    report = planner.verify(WithCustomOperator(), "tp=2", batch=(torch.randn(8, 4, 16),))
    assert report.ok, report.table()
    assert report.plan.states["weight"].placement == ("S(1)",)
    note = "probed_models.mix.default: rule found by running it on small shards (1 of them)"
    assert note in report.plan.notes and note in report.plan.summary()


def test_a_registered_rule_is_planned_and_named() -> None:
    planner.register_rule(mix, "~ ..._, __ -> ..._")
    try:
        report = planner.verify(WithCustomOperator(), "tp=2", batch=(torch.randn(8, 4, 16),))
    finally:
        del REGISTRY["probed_models.mix.default"]
    assert report.ok, report.table()
    assert report.plan.states["weight"].placement == ("I",)
    assert "probed_models.mix.default: rule registered by the user (1 of them)" in report.plan.notes
