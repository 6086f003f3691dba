"""``planner audit``: an honest plan's figures are found again, and a file that claims anything else is found out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import planner
from cost_models import Cluster
from passes.capture import CaptureError
from passes.plan import Plan
from planner.auditing.audit import audited
from planner.auditing.audit_report import AuditReport
from planner.auditing.subject import AuditSubject, subject_of
from planner.cli import main
from tests.expert_models import mixture, mixture_batch
from tests.small_models import Mlp, mlp_batch, squared_error

#: On one mesh with everything else open; a step with a pipeline, recomputation and ZeRO.
PLANS: Mapping[str, Mapping[str, Any]] = {
    "mesh": {"mesh": "dp=2,tp=2"},
    "step": {
        "fix": {"pp": 2, "dp": 2, "tp": 1, "cp": 1, "zero": 2, "recompute": "full", "schedule": "1f1b",
                "num_microbatches": 4},
    },
}  # fmt: skip
FIRST_UNIT = ("step", "chunks", 0, "costs", "layers", 0, 0)
Data = dict[str, Any]
Mutation = Callable[[Data], object]


def build() -> Mlp:
    return Mlp(layers=4)


@cache
def honest(kind: str) -> AuditSubject:
    """The model, its plan as a file has it, and its cluster."""
    cluster = Cluster.uniform(4, flops=1e9, memory_bandwidth=1e9, latency=0.0, bandwidth=1e10, memory_bytes=2**30)
    plan = planner.plan(build(), cluster, example_inputs=mlp_batch(batch=16), loss_fn=squared_error, **PLANS[kind])
    return subject_of(Plan.from_dict(json.loads(plan.to_json())), build(), loss_fn=squared_error)


@pytest.mark.parametrize("fix", [
    {"ep": 2, "dp": 2, "zero": 3, "num_microbatches": 2},
    {"ep": 2, "tp": 2, "zero": 1, "recompute": "selective"},
    {"ep": 2, "pp": 2, "zero": 2, "schedule": "1f1b", "num_microbatches": 4},
    {"ep": 4, "zero": 0, "recompute": "full"},
])  # fmt: skip
def test_steps_with_expert_parallelism_are_priced_again(fix: dict[str, Any]) -> None:
    cluster = Cluster.uniform(4, flops=1e12, memory_bandwidth=1e10, latency=1e-5, bandwidth=1e9, memory_bytes=2**30)
    model, batch = mixture(layers=3), mixture_batch(batch=16)
    fixed = {**dict.fromkeys(("pp", "dp", "cp", "tp"), 1), **fix}
    plan = planner.plan(model, cluster, example_inputs=batch, fix=fixed)
    subject = subject_of(Plan.from_dict(json.loads(plan.to_json())), model)
    report = audited(subject, prove_bound=False, time_limit=60.0)
    assert report.ok, report.table()


def audit_of(kind: str, mutation: Mutation, *, prove_bound: bool = False) -> AuditReport:
    data = json.loads(honest(kind).plan.to_json())
    mutation(data)
    subject = dataclasses.replace(honest(kind), plan=Plan.from_dict(data))
    return audited(subject, prove_bound=prove_bound, time_limit=60.0)


def times(factor: float, *path: Any) -> Mutation:
    """Multiplies one number of a plan file."""

    def mutate(data: Data) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] *= factor

    return mutate


@pytest.mark.parametrize("kind", PLANS)
def test_an_honest_plan_is_found_again(kind: str) -> None:
    report = audit_of(kind, lambda data: None, prove_bound=True)
    assert report.ok, report.table()
    assert {row.figure for row in report.unchecked} <= {"runners-up"}
    assert "lower bound" in {row.figure for row in report.rows} and "0 NOT ok" in report.table()


SMALLER: Mapping[str, tuple[Mutation, set[str]]] = {
    "objective": (times(0.9, "certificate", "objective"), {"objective (closed form of the step)", "gap"}),
    "closed form": (times(0.9, "step", "costs", "seconds"), {"step, closed form"}),
    "simulated": (times(0.9, "step", "costs", "simulated"), {"step, simulated"}),
    "utilisation": (times(1.1, "step", "costs", "utilisation"), {"utilisation"}),
    "unit": (times(0.9, *FIRST_UNIT, "backward"), {"chunk, backward", "units, backward"}),
    "unit's memory": (times(0.9, *FIRST_UNIT, "state_bytes"), {"units, state_bytes"}),
    "causes": (times(0.9, "step", "chunks", 0, "parts", 0, "compute_backward"), {"units, backward by cause"}),
    "compute": (times(0.9, "costs", "compute_forward"), {"one micro-batch, compute forward"}),
    "memory": (times(0.5, "step", "memory", 0, "optimizer"), {"memory at its peak", "memory at its peak, optimizer"}),
    "memory limit": (times(0.5, "step", "memory_limit"), {"memory limit"}),
    "interval": (
        lambda data: data["step"].update(interval=[1e-3, 1.0]),
        {"step, simulated, nine of ten from", "step, simulated, nine of ten to"},
    ),
    "lower bound": (times(0.9, "certificate", "bound"), {"gap"}),
    "gap": (lambda data: data["certificate"].update(gap=data["certificate"]["gap"] + 0.01), {"gap"}),
    "collectives": (lambda data: data["collectives"].pop(), {"collectives in one step", "bytes in collectives"}),
    "conversion": (times(2, "conversions", 0, "num_bytes"), {"conversions"}),
    "dtype": (lambda data: next(iter(data["inputs"].values())).update(dtype="float32"), {"inputs"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("figure", SMALLER)
def test_a_figure_that_was_changed_is_found_out_and_no_other(kind: str, figure: str) -> None:
    mutation, wrong = SMALLER[figure]
    assert {row.figure for row in audit_of(kind, mutation).wrong} == wrong


@pytest.mark.parametrize(
    ("name", "figure"), [("interval", "step, simulated"), ("memory_interval", "memory at its peak")]
)
def test_an_interval_is_made_again(name: str, figure: str) -> None:
    arguments: Any = {"example_inputs": mlp_batch(batch=16), "loss_fn": squared_error}
    plan = planner.plan(build(), Cluster.parse("dgx-h100"), **arguments)
    low, high = getattr(plan.step, name)
    for claimed, wrong in (((low, high), set()), ((low, 1.1 * high), {f"{figure}, nine of ten to"}), (None, set())):
        step = dataclasses.replace(plan.step, **{name: claimed})
        subject = subject_of(dataclasses.replace(plan, step=step), build(), loss_fn=squared_error)
        report = audited(subject, prove_bound=False, time_limit=60.0)
        assert {row.figure for row in report.wrong} == wrong
        assert (f"{figure}, nine of ten from" in {row.figure for row in report.rows}) == (claimed is not None)


def other_output_type(data: Data) -> None:
    """Of the first operator that gives a shard: partial sums."""
    node = next(node for node in data["nodes"].values() if "S(0)" in node["outputs"][0])
    node["outputs"][0] = ["P" if each == "S(0)" else each for each in node["outputs"][0]]


@pytest.mark.parametrize("kind", PLANS)
def test_a_wrong_type_is_found_out(kind: str) -> None:
    report = audit_of(kind, other_output_type)
    assert "price" in {row.figure for row in report.wrong}
    assert "does not hold together" in report.table()


@pytest.mark.parametrize(
    "group, wrong",
    [
        ({"recompute": "none"}, {"step, closed form", "memory at its peak, activations"}),
        ({"zero": 0}, {"memory at its peak, optimizer", "memory at its peak, gradients"}),
        ({"zero": 3}, {"step, closed form", "memory at its peak, parameters"}),
    ],
)
def test_a_step_that_does_other_than_it_was_priced_for_is_found_out(group: Data, wrong: set[str]) -> None:
    def mutate(data: Data) -> None:
        for chunk in data["step"]["chunks"]:
            for each in chunk["groups"]:
                each.update(group)

    assert wrong <= {row.figure for row in audit_of("step", mutate).wrong}


def test_a_bound_under_demands_that_nobody_made_is_found_out() -> None:
    """No pipeline of this model is as fast as its best plan: its bound does not hold if all plans may be taken."""
    report = audit_of("step", lambda data: data["certificate"]["demands"].update(fix={"pp": 1}), prove_bound=True)
    assert [(row.figure, row.why) for row in report.wrong] == [
        ("lower bound", "searched again: there is a faster plan than the bound allows")
    ]


def test_a_plan_of_another_model_or_of_none_is_no_subject() -> None:
    plan = honest("mesh").plan
    with pytest.raises(ValueError, match="of another model"):
        planner.audit(plan, Mlp(layers=5), loss_fn=squared_error)
    with pytest.raises(CaptureError, match="pass the loss_fn"):
        planner.audit(plan, build())
    with pytest.raises(ValueError, match="does not name its model: pass the model"):
        planner.audit(plan)


def test_the_command_says_what_is_wrong_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    honest("step").plan.save(path)
    model = ["--model", "tests.test_audit:build", "--loss-fn", "tests/small_models.py:squared_error", "--no-bound"]
    assert main(["audit", str(path), *model]) == 0
    assert "not asked for" in capsys.readouterr().out
    path.write_text(path.read_text().replace('"simulated": ', '"simulated": 1'))
    assert main(["audit", str(path), *model]) == 1
    assert "NOT ok" in capsys.readouterr().out
    assert main(["audit", str(path)]) == 2 and "--model" in capsys.readouterr().err
    assert main(["audit", str(path), "--model", "tests.test_audit:nothing"]) == 2
    assert "has no function 'nothing'" in capsys.readouterr().err
