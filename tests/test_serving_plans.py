"""Plans of generating text as files: saved, read back, shown, compared, explained; and refused where they do not go."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import planner
from passes.plan import Plan
from passes.plan.serving import ServingPlan, read_any_plan
from planner import serving_plan
from planner.cli import main
from planner.inspection.html_report.serving_page import serving_page
from planner.inspection.running_cost import running_cost
from planner.inspection.serving_difference import serving_difference
from planner.serving_plan import Phases, plan_serving
from tests.small_models import Mlp

pytestmark = pytest.mark.usefixtures("models_traced_once", "phases_traced_once")

SIZES = {"prompt_len": 8, "new_tokens": 4, "batch": 2}
WORDS = ["--cluster", "dgx-h100:1", "--serve", "--prompt-len", "8", "--new-tokens", "4", "--batch", "2"]


@pytest.fixture(scope="module")
def phases_traced_once() -> Iterator[None]:
    """The graphs of a prompt and of a token, which are the same on every mesh and read back."""
    graphs: dict[Any, Any] = {}

    def once(compute: Callable[[Phases], Any]) -> property:
        def shared(phases: Phases) -> Any:
            (dtype,) = {parameter.dtype for parameter in phases.module.parameters()}
            sizes = (phases.prompt_len, phases.new_tokens, phases.batch)
            key = (compute, type(phases.module), repr(phases.module.config), dtype, sizes)
            if key not in graphs:
                graphs[key] = compute(phases)
            return graphs[key]

        return property(shared)

    with (
        mock.patch.object(Phases, "phases", once(vars(Phases)["phases"].func)),
        mock.patch.object(Phases, "planned", once(vars(Phases)["planned"].func)),
    ):
        yield


@pytest.fixture(scope="module")
def served(models_traced_once: None, phases_traced_once: None) -> ServingPlan:
    return plan_serving("tiny-llama", "dgx-h100:1", mesh="dp=2,tp=4", **SIZES)


@pytest.fixture(scope="module")
def step(models_traced_once: None) -> Plan:
    return planner.plan("tiny-llama", mesh="tp=2", batch_size=4, seq_len=8)


def without_ids(page: str) -> str:
    """A report without the random names that Bokeh gives its charts."""
    return re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}|\bp\d{4,}\b", "", page)


def test_a_saved_plan_is_read_back_to_the_byte(served: ServingPlan, tmp_path: Path) -> None:
    served.save(tmp_path / "plan.json")
    again = ServingPlan.load(tmp_path / "plan.json")
    assert again == served == read_any_plan(tmp_path / "plan.json")
    assert again.to_json() == served.to_json() == (tmp_path / "plan.json").read_text(encoding="utf-8")
    assert again.summary(operators=True) == served.summary(operators=True) and str(again) == str(served)
    assert again.token.config_name == "tiny-llama" and again.token.states == again.prompt.states
    assert without_ids(serving_page(again)) == without_ids(serving_page(served))


def test_the_command_line_saves_shows_compares_and_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    assert main(["plan", "tiny-llama", *WORDS, "-o", first]) == 0
    brief = capsys.readouterr().out
    assert f"saved to {first}" in brief
    on_four = ["--cluster", "dgx-h100:1x4", *WORDS[2:], "--mesh", "tp=4"]
    assert main(["plan", "tiny-llama", *on_four, "-o", second, "--verbose"]) == 0
    planned = capsys.readouterr().out.partition("\n\nsaved to")[0]
    assert main(["show", second]) == 0
    assert capsys.readouterr().out.strip() == planned.strip()
    assert main(["show", first, "--price", "2.5", "--tokens", "1000000", "--operators"]) == 0
    shown = capsys.readouterr().out
    assert brief.splitlines()[:5] == shown.splitlines()[:5]
    cost = running_cost(ServingPlan.load(first), 2.5)
    assert f"{cost.per_million:,.4g} per million new tokens" in shown and "1,000,000 new tokens take" in shown
    assert main(["diff", first, second]) == 0
    assert re.search(r"each token +\S+ µs +\S+ µs +[+-]", capsys.readouterr().out)
    assert main(["report", first, "-o", str(tmp_path / "a.html"), "--price", "2"]) == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Cost per million new tokens" in page and not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", page)
    for section in ("summary", "time", "cluster", "collectives", "model", "assumptions"):
        assert f'<section id="{section}"' in page


def test_lines_of_a_plan_fit_into_a_terminal(
    served: ServingPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.save(tmp_path / "plan.json")
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["show"], ["show", "--operators"], ["diff", str(tmp_path / "plan.json")], ["explain", "lm_head"]):
        assert main([words[0], str(tmp_path / "plan.json"), *words[1:]]) == 0
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert max(map(len, f"{served}\n{served!r}".splitlines())) <= 80


def test_a_plan_differs_from_itself_in_nothing(served: ServingPlan) -> None:
    assert serving_difference(served, served).same


@pytest.mark.parametrize("command", ["trace", "why-not", "robustness", "audit", "export", "verify"])
def test_a_command_for_steps_names_those_that_take_the_plan(
    command: str, served: ServingPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.save(tmp_path / "plan.json")
    path = str(tmp_path / "plan.json")
    more = {"trace": ["-o", str(tmp_path / "t.json")], "why-not": ["--fix", "tp=4"], "export": ["--to", "megatron"]}
    words = ["verify", "tiny-llama", "--mesh", path] if command == "verify" else [command, path, *more.get(command, [])]
    assert main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "plan.json is of generating text" in error and "planner show, diff, explain and report take both" in error


def test_plans_of_two_kinds_are_not_compared_or_read_for_each_other(
    served: ServingPlan, step: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.save(tmp_path / "served.json")
    step.save(tmp_path / "step.json")
    assert read_any_plan(tmp_path / "step.json") == step
    assert main(["diff", str(tmp_path / "step.json"), str(tmp_path / "served.json")]) == 2
    assert "the second plan is of generating text and the first of a training step" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"step\.json is of a training step, and one of generating text is needed"):
        ServingPlan.load(tmp_path / "step.json")
    with pytest.raises(ValueError, match=r"served\.json is of generating text"):
        planner.compile(Mlp(layers=1), str(tmp_path / "served.json"))
    words = ["report", str(tmp_path / "served.json"), "-o", str(tmp_path / "r.html"), "--robustness"]
    assert main(words) == 2
    assert "--robustness is of plans of a training step" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def changed(data: Any, path: str, value: Any) -> Any:
    """``data`` with another value at a path of names; without it if the value is Ellipsis."""
    whole = copy.deepcopy(data)
    *outer, last = path.split(".")
    table = whole
    for name in outer:
        table = table[name]
    if value is ...:
        del table[last]
    else:
        table[last] = value
    return whole


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 99, r"plan version 99 is not supported: this program reads version 1; plan again"),
        ("token.version", 1, r"plan\.token version 1 is not supported: this program reads version 4"),
        ("kind", "other", r"plan version 1 is not supported: this program reads version 4"),
        ("extra", 1, r"plan has an unknown field 'extra'"),
        ("token", ..., r"plan needs 'token'"),
        ("token", 3, r"expected a JSON object, got int"),
        ("token.nodes", ..., r"plan\.token needs 'nodes'"),
        ("batch", 0, r"batch: expected a number above zero, got 0"),
        ("batch", True, r"plan\.batch must be an integer, got True"),
        ("new_tokens", -1, r"new_tokens: expected a number from 0"),
        ("weight_bytes", 1.5, r"weight_bytes must be an integer"),
        ("token_bound", float("inf"), r"token_bound: expected finite seconds, got inf"),
        ("token_bound", float("nan"), r"token_bound: expected a number, got nan"),
        ("token.model", "\x1b[31m", r"plan\.token\.model: expected a line of printable characters"),
        ("token.model", "Other", r"prompt and token: expected one model, got two"),
        ("token.training", True, r"token: expected a plan without training"),
        ("mesh.sizes", [4, 2], r"prompt: expected a plan on mesh dp=4,tp=2, got one on dp=2,tp=4"),
        ("prompt.step.num_microbatches", 0, r"step\.num_microbatches: expected 1 to"),
    ],
)
def test_a_corrupt_file_is_refused_with_what_is_wrong(
    served: ServingPlan, tmp_path: Path, path: str, value: Any, message: str
) -> None:
    data = changed(json.loads(served.to_json()), path, value)
    (tmp_path / "plan.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ValueError, match=f"plan.json.*{message}"):
        read_any_plan(tmp_path / "plan.json")


def test_a_weight_in_two_places_is_refused(served: ServingPlan) -> None:
    data = json.loads(served.to_json())
    data["token"]["states"]["lm_head.weight"]["placement"] = ["R", "S(1)"]
    with pytest.raises(ValueError, match=r"one place of 'lm_head\.weight', got two"):
        ServingPlan.from_dict(data)


def test_a_killed_write_loses_no_file(served: ServingPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    served.save(tmp_path / "plan.json")
    before = (tmp_path / "plan.json").read_bytes()
    monkeypatch.setattr(serving_plan, "plan_serving", lambda *_, **__: served)  # planned before: it is to be written
    monkeypatch.setattr(os, "replace", killed)
    assert main(["plan", "tiny-llama", *WORDS, "-o", str(tmp_path / "plan.json")]) == 130
    assert (tmp_path / "plan.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_only_the_prompt_of_a_model_with_an_encoder_has_its_weights() -> None:
    planned = plan_serving("tiny-t5", "dgx-h100:1", **SIZES)
    again = ServingPlan.from_dict(json.loads(planned.to_json()))
    assert again == planned and "encoder.block.*.layer.*.SelfAttention.q.weight" in again.summary()
    reasons = again.explain("encoder.block.0.*")
    assert list(reasons.phases) == ["prompt"]
    assert sum(reasons.phases["prompt"].prices.values()) == pytest.approx(planned.first_token_seconds, rel=1e-9)


def test_prices_of_a_prompt_and_of_a_token_sum_to_their_seconds(served: ServingPlan) -> None:
    reasons = served.explain("model.layers.1.self_attn")
    seconds = {"prompt": served.first_token_seconds, "token": served.token_seconds}
    for phase, expected in seconds.items():
        assert sum(reasons.phases[phase].prices.values()) == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match="lm_heat"):
        served.explain("lm_heat")


def test_a_rival_leaves_weights_and_cache_where_they_are(served: ServingPlan) -> None:
    """The cheapest other way to run a product of a token, as a plan that is pinned to it has it."""
    from cost_models import Cluster
    from planner.inspection.operator_reasons import Explainer
    from planner.inspection.rival_strategies import sharding_program
    from planner.inspection.serving_reasons import graphs_of_serving_plan

    cluster = Cluster.from_dict(dict(served.token.cluster))
    graph = graphs_of_serving_plan(served, None, cluster)["token"]
    walk = Explainer(graph, served.token, cluster).ledger.priced.walk
    program = sharding_program(graph, served.token, cluster, walk, states_stay=True)
    assert program is not None and program.chosen.keys() == program.problem.elements.keys()
    for element in program.problem.elements.values():
        if element.kind in ("parameter", "buffer"):
            path = element.key.removeprefix("state:")
            assert {option.outputs[0] for option in element.options} == {served.token.states[path].placement}
