"""What ``print`` and a debugger show of what the public API returns: a few lines of at most 80 columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

import planner
from cost_models import Cluster
from cost_models.short_text import WIDTH, ShortRepr, fold
from cost_models.text import counted
from passes.capture import capture
from passes.plan import CollectivePlan, Plan
from planner.auditing.audit_report import AuditReport, compared, refuted
from planner.inspection.operator_reasons import PlanReasons
from planner.inspection.plan_difference import difference
from planner.inspection.robustness import BreakEven
from planner.inspection.why_not import WhyNot
from planner.verification.comparison import Comparison
from planner.verification.verify_report import VerifyReport
from tests.small_models import Mlp
from tests.test_inspection import CALL, plan_of

pytestmark = pytest.mark.usefixtures("models_traced_once")


def returned() -> Iterator[Any]:
    """One of each kind that people are handed."""
    plan, other = plan_of("1f1b"), plan_of("zero 3")
    changes = difference(plan, other)
    yield from (plan, plan.step, plan.step.costs, plan.certificate, *plan.step.chunks, changes)
    yield BreakEven("bandwidth of pcie", True, 1.5, "dp=8; " + "none zero-0, " * 20, plan, proved_to=0.013)
    yield WhyNot(other, changes, "The wish costs 3% time.")
    comparisons = tuple(Comparison("gradient", f"layers.{index}.weight", 1e-12, 0.0) for index in range(40))
    issued = (CollectivePlan("all_reduce", "dp", "backward", 2, 64),)
    yield from (VerifyReport("Mlp", plan, 1e-9, comparisons, 0.0, issued), comparisons[0])
    yield AuditReport(
        "Mlp", "dp=2", (*(compared(f"figure {index}", 1.0, 1.0) for index in range(40)), refuted("x", 1, ""))
    )
    yield PlanReasons("layers", 1.0, (), {f"unit {index}": 0.1 for index in range(10)})
    cluster = Cluster.parse("dgx-h100:4")
    yield from (cluster, cluster.device, cluster.levels[0], plan.export("megatron"))
    module = planner.compile(Mlp(layers=2), "dp=1", **CALL)
    yield from (module, module.plan, module.program)
    yield capture(Mlp(layers=2), args=CALL["example_inputs"], loss_fn=CALL["loss_fn"])


def test_everything_prints_in_few_lines_of_80_columns() -> None:
    for thing in returned():
        for text, lines in ((repr(thing), 8), (str(thing), 30)):
            assert max(map(len, text.splitlines())) <= WIDTH or type(thing).__name__ == "ExportedLayout", text
            assert len(text.splitlines()) <= lines, text


def test_a_plan_says_what_where_and_how_long() -> None:
    plan = plan_of("1f1b")
    assert str(plan) == fold(plan.brief())
    assert repr(plan).startswith("Plan(Mlp on 4 devices of ") and " a step, gap " in " ".join(repr(plan).split())
    assert repr(dataclasses.replace(plan, model="x" * 300)).count("x") == 300  # folded, never cut


@pytest.mark.parametrize(
    ("status", "words"),
    [("optimal", ""), ("stopped by time limit", " (time limit)"), ("stopped by effort limit", " (max_programs)")],
)
def test_a_gap_says_what_stopped_the_search(status: str, words: str) -> None:
    plan = plan_of("1f1b")
    stopped = dataclasses.replace(plan, certificate=dataclasses.replace(plan.certificate, gap=0.1, status=status))
    assert f"gap 10.00%{words}\n" in stopped.brief()


def test_a_module_says_what_this_rank_has() -> None:
    model = Mlp(layers=2)
    module = planner.compile(model, "dp=1", **CALL)
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert f"16 parameters on this rank, {elements:,} of their {elements:,} elements" in " ".join(repr(module).split())


def test_an_audit_shows_what_is_wrong() -> None:
    text = str(AuditReport("Mlp", "dp=2", (compared("time", 1.0, 1.0), compared("memory", 1.0, 2.0))))
    assert "memory" in text and "time" not in text and text.endswith("2 figures, 1 NOT ok, 0 not checked")


@dataclasses.dataclass(frozen=True, repr=False)
class Record(ShortRepr):
    """A record with everything."""

    text: str
    entries: Any
    hidden: str = dataclasses.field(default="", repr=False)


@pytest.mark.parametrize(
    ("entries", "shown"),
    [
        ((1,), "(1,)"),
        ([1, 2], "[1, 2]"),
        ({"a": 1}, "{'a': 1}"),
        (frozenset({2, 1}), "{1, 2}"),
        (range(3), "range(0, 3)"),
        (list(range(9)), "<9 entries>"),
        (["x" * 70], "<1 entry>"),
        (bytes(90), "bytes(…)"),
    ],
)
def test_long_values_are_cut_and_counted(entries: Any, shown: str) -> None:
    assert repr(Record("short", entries, "no")) == f"Record(text='short', entries={shown})"
    assert "…" in repr(Record("long" * 30, ()))


def test_plurals() -> None:
    assert [counted(number, "batch") for number in (0, 1, 1024)] == ["0 batches", "1 batch", "1,024 batches"]
    assert counted(1, "device") == "1 device" and counted(2, "device") == "2 devices"


def test_a_loaded_plan_prints_no_control_characters() -> None:
    plan = dataclasses.replace(plan_of("1f1b"), model="a\x1b[2J")
    assert isinstance(plan, Plan) and "\x1b" not in repr(plan) + str(plan)
