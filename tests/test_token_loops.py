"""Layers that loop over tokens are captured as one operator each, and train under plans as on one device."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba import modeling_mamba
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru
from transformers.models.rwkv import modeling_rwkv

from benchmarks.parity import TOLERANCES, Case, case
from passes.capture import capture
from passes.capture.recurrent_forms import selective_scan
from passes.capture.token_loops import is_computed_by
from passes.rules.delta_rule_costs import GATED_DELTA_RULE
from passes.torch_compat.linear_recurrence import LINEAR_RECURRENCE
from runtime.kernels.recurrence import linear_recurrence
from tests.capture_parity import assert_parity
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks
from tests.recurrent_families import RECURRENT_FAMILIES, recurrent_batch, recurrent_model

#: Recurrences of each family's model: one a recurrent layer, two for RWKV's mean.
NUM_RECURRENCES = {"Mamba": 2, "FalconMamba": 2, "Jamba": 1, "Zamba": 8, "RecurrentGemma": 2, "Rwkv": 4}
#: Of gated delta rules: one a layer of linear attention; and more operators than the whole graph has.
NUM_DELTA_RULES = {"Qwen3Next": 1, "OlmoHybrid": 1, "KimiLinear": 1}
MOST_OPERATORS = {"Qwen3Next": 240, "OlmoHybrid": 200, "KimiLinear": 200}


DELTA_RULES = {
    modeling_qwen3_next: ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    modeling_kimi_linear: ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
}


def recurrences(model: nn.Module, tokens: int) -> tuple[int, int]:
    """How many operators the graph of a model has, and how many of them are recurrences."""
    graph = capture(model, kwargs=recurrent_batch(tokens))
    return len(graph.nodes), sum(node.op in (LINEAR_RECURRENCE, GATED_DELTA_RULE) for node in graph.nodes)


@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_a_model_of_transformers_has_its_loss_and_gradients(name: str) -> None:
    graph = assert_parity(recurrent_model(name), kwargs=recurrent_batch())
    operators = [node.op for node in graph.nodes]
    assert operators.count(LINEAR_RECURRENCE) == NUM_RECURRENCES.get(name, 0)
    assert operators.count(GATED_DELTA_RULE) == NUM_DELTA_RULES.get(name, 0)
    assert len(operators) <= MOST_OPERATORS.get(name, len(operators))


@pytest.mark.parametrize("name", RECURRENT_FAMILIES)
def test_a_graph_does_not_grow_with_the_tokens(name: str) -> None:
    model = recurrent_model(name)
    assert recurrences(model, 12) == recurrences(model, 300)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("mamba_selective_scan", inspect.unwrap(modeling_mamba.mamba_selective_scan)),
        ("_rnn_scan", RecurrentGemmaRglru._rnn_scan),
        ("rwkv_linear_attention_cpu", modeling_rwkv.rwkv_linear_attention_cpu),
        *((name, inspect.unwrap(getattr(module, name))) for module, names in DELTA_RULES.items() for name in names),
    ],
)
def test_a_form_is_tried_on_the_function_of_the_installed_library(name: str, function: Any) -> None:
    assert is_computed_by(function, name)
    with torch.device("meta"), torch.no_grad():
        assert is_computed_by.__wrapped__(function, name)


def without_gate(*args: Any, z: torch.Tensor | None = None, **options: Any) -> Any:
    return selective_scan(*args, **options)


def with_another_gradient(hidden_states: torch.Tensor, *args: Any, **options: Any) -> Any:
    return selective_scan(2 * hidden_states - hidden_states.detach(), *args, **options)


def of_other_arguments(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("function", [without_gate, with_another_gradient, of_other_arguments])
def test_a_function_of_the_name_that_computes_something_else_is_left_alone(function: Any) -> None:
    assert not is_computed_by(function, "mamba_selective_scan")


def test_functions_are_themselves_after_a_capture() -> None:
    before = modeling_mamba.mamba_selective_scan, RecurrentGemmaRglru._rnn_scan
    capture(recurrent_model("Mamba"), kwargs=recurrent_batch())
    assert (modeling_mamba.mamba_selective_scan, RecurrentGemmaRglru._rnn_scan) == before


def mamba_selective_scan(*args: Any, unroll: int = 1, **options: Any) -> Any:
    """Someone's copy of the function, with an option more."""
    return inspect.unwrap(modeling_mamba.mamba_selective_scan)(*args, **options)


class Scan(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        return mamba_selective_scan(x, x, -x[0, :, :2].exp(), pairs, pairs, **self.options)


@pytest.mark.parametrize(("options", "count"), [({}, 1), ({"delta_softplus": True}, 1), ({"unroll": 2}, 0)])
def test_a_call_with_an_argument_that_the_form_lacks_runs_the_loop(options: dict[str, Any], count: int) -> None:
    graph = capture(Scan(**options), args=(torch.randn(2, 3, 7), torch.randn(2, 2, 7)))
    assert sum(node.op == LINEAR_RECURRENCE for node in graph.nodes) == count


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("begins", [False, True])
def test_gradients_of_the_operator_of_first_and_second_order(dim: int, reverse: bool, begins: bool) -> None:
    shape = [3, 2, 4]
    state = [size for place, size in enumerate(shape) if place != dim % 3]
    tensors = [
        torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(place), requires_grad=True)
        for place, size in enumerate([shape, shape, state][: 2 + begins])
    ]
    run = functools.partial(linear_recurrence, dim=dim, reverse=reverse)
    assert torch.autograd.gradcheck(run, tensors) and torch.autograd.gradgradcheck(run, tensors)


def test_the_operator_rounds_as_a_loop_does() -> None:
    factors, inputs = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    state = inputs[:, 0]
    states = [state]
    for t in range(1, 5):
        state = factors[:, t] * state + inputs[:, t]
        states.append(state)
    assert torch.equal(linear_recurrence(factors, inputs, dim=1), torch.stack(states, dim=1))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ((torch.ones(2, 3), torch.ones(2, 4)), r"factors \[2, 3\] and inputs \[2, 4\] must have one shape"),
        ((torch.ones(2, 3), torch.ones(2, 3), torch.ones(3)), r"initial is \[3\], expected \[2\]"),
        ((torch.ones(2, 3), torch.ones(2, 3).double()), "one floating dtype, not torch.float32, torch.float64"),
        ((torch.ones(2, 3).int(), torch.ones(2, 3).int()), "one floating dtype, not torch.int32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: tuple[torch.Tensor, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        linear_recurrence(*tensors, dim=1)


PIPELINE = {"pp": 2, "num_microbatches": 4, "schedule": "1f1b"}
CASES: tuple[Case, ...] = (
    case("Mamba", "mamba, channels cut", tp=2),
    case("Mamba", "mamba, two stages", **PIPELINE),
    case("Jamba", "jamba, channels cut", tp=2),
    case("RecurrentGemma", "recurrent gemma, weights gathered", dp=2, zero=3),
    case("Rwkv", "rwkv, channels cut", tp=2),
    case("Qwen3Next", "qwen, heads cut", tp=2),
    case("Qwen3Next", "qwen, two stages", **PIPELINE),
    case("Qwen3Next", "qwen, weights gathered", dp=2, zero=3),
    case("KimiLinear", "kimi, heads cut", tp=2),
    case("OlmoHybrid", "olmo, heads cut", tp=2),
)


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    return run_on_ranks("step_parity_worker", 2, list(CASES), timeout=PATIENCE)


@pytest.mark.parametrize("entry", CASES, ids=lambda entry: entry["name"])
def test_three_steps_on_two_processes_are_those_of_one_device(entry: Case) -> None:
    result = results()[entry["name"]]
    assert "refused" not in result, result["refused"]
    assert result["error"] <= TOLERANCES["float64"], result["worst"]
    assert result["broken_rules"] == [] and result["unlike_plan"] == []
