"""What is kept for the backward pass, against PyTorch itself: on whole models, and on single operators.

Predictions are of the captured graph, measurements of the original model. They differ where the two do, by less than
0.5% on these models: masks and position tables that depend on shapes alone are made once for all steps by the program
and anew in each step by the model (T5: 0.3%), and torch's scalars. Batch norm is written out in the graph (so that it
can be cut), which keeps about twice what the fused operator does; no model here has it.
"""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from memory_truth import (
    CASES,
    Case,
    Prediction,
    allocations,
    held_activations,
    held_state,
    hooked_activations,
    peak_activations,
)
from torch import nn

from passes.autograd import (
    POLICIES,
    Activations,
    Extra,
    activations,
    kept_by_autograd,
    kept_under,
    storage_roots,
    working_peak,
)
from passes.autograd.kernels import attention_kernel
from passes.capture import capture
from passes.ir.graph import Graph
from planner.sharding_ilp.liveness import live_nodes
from runtime import ops

TOLERANCE = 0.05


@pytest.fixture(scope="module", params=CASES)
def measured(request: pytest.FixtureRequest) -> tuple[Case, Prediction]:
    case = CASES[request.param]()
    return case, Prediction(case)


def test_parameters_gradients_and_optimizer_state_are_those_that_pytorch_holds(measured):
    case, prediction = measured
    predicted, held = prediction.state(), held_state(case)
    assert (predicted.parameters, predicted.gradients) == (held.parameters, held.gradients)
    assert predicted.optimizer == pytest.approx(held.optimizer, rel=TOLERANCE)


def test_saved_activations_are_those_that_pytorch_packs_away(measured):
    case, prediction = measured
    assert prediction.activations("none") == pytest.approx(hooked_activations(case), rel=TOLERANCE)


@pytest.mark.parametrize("policy", POLICIES)
def test_held_activations_are_those_that_the_allocator_gave(measured, policy: str):
    case, prediction = measured
    assert prediction.activations(policy) == pytest.approx(held_activations(case, policy), rel=TOLERANCE)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_peak_is_that_of_the_allocator(measured, policy: str):
    case, prediction = measured
    assert prediction.peak(policy) == pytest.approx(peak_activations(case, policy), rel=0.08)


# -- single operators -------------------------------------------------------------------------------------------------


class Apply(nn.Module):
    """A function of an input with gradient, and of a weight."""

    def __init__(self, function, *, width: int = 8) -> None:
        super().__init__()
        self.function = function
        self.source = nn.Linear(width, width)

    def forward(self, x):
        return self.function(self.source(x)).sum()


def _captured(function, *shape: int) -> tuple[Graph, Activations]:
    graph = capture(Apply(function), args=(torch.zeros(*shape),))
    return graph, Activations.of(graph, live_nodes(graph))


def _names(graph: Graph, op: str) -> list[str]:
    return [node.name for node in graph.nodes if node.op.startswith(f"aten.{op}")]


@pytest.mark.parametrize(
    ("function", "op", "inputs", "outputs"),
    [
        (torch.exp, "exp", 0, 1),
        (torch.sigmoid, "sigmoid", 0, 1),
        (lambda x: x.softmax(-1), "softmax", 0, 1),
        (lambda x: x.log(), "log", 1, 0),
        (F.gelu, "gelu", 1, 0),
        (lambda x: x + 1.0, "add", 0, 0),
        (lambda x: x * 3.0, "mul", 0, 0),
        (lambda x: x * x.detach(), "mul", 1, 0),
        (F.relu, "relu", 0, 1),
    ],
    ids=lambda entry: entry if isinstance(entry, str) else None,
)
def test_pointwise_operators_keep_an_input_or_an_output_or_neither(function, op: str, inputs: int, outputs: int):
    graph, figures = _captured(function, 4, 8)
    (name,) = _names(graph, op)
    node, saved = figures.nodes[name], figures.saved_by_node[name]
    assert len(set(saved.values) & set(node.inputs)) == inputs
    assert len(set(saved.values) & {value.name for value in node.outputs}) == outputs


def test_layer_norm_keeps_its_input_and_two_statistics_a_row():
    graph, figures = _captured(lambda x: F.layer_norm(x, (8,)), 2, 3, 8)
    (name,) = _names(graph, "layer_norm")
    saved = figures.saved_by_node[name]
    assert saved.values == (figures.nodes[name].inputs[0],)
    assert saved.extras == (Extra(2 * 3 * 4, figures.nodes[name].output.name),) * 2


def test_dropout_keeps_a_byte_an_element_on_an_accelerator_and_a_float_on_a_processor():
    graph, figures = _captured(lambda x: F.dropout(x, 0.5), 4, 8)
    (name,) = _names(graph, "dropout")
    assert [extra.num_bytes for extra in figures.saved_by_node[name].extras] == [32]
    on_processor = kept_by_autograd(graph, live_nodes(graph), kernels="cpu")
    assert [extra.num_bytes for extra in on_processor[name].extras] == [4 * 32]


def test_fused_attention_keeps_a_statistic_a_row_where_unfused_keeps_the_probabilities():
    def attention(p: float):
        return lambda x: F.scaled_dot_product_attention(*(x.unflatten(1, (4, 16)),) * 3, dropout_p=p)

    graph, fused = _captured(attention(0.0), 2, 64, 8)
    (name,) = _names(graph, "scaled_dot_product_attention")
    assert sum(extra.num_bytes for extra in fused.saved_by_node[name].extras) < 2 * 4 * 32 * 4 + 32
    _, dropped = _captured(attention(0.1), 2, 64, 8)
    assert sum(extra.num_bytes for extra in dropped.saved_by_node[name].extras) >= 2 * 4 * 16 * 16 * (4 + 4 + 1)


def test_fused_attention_forms_no_probabilities_for_values_of_another_width_than_queries():
    def attention(x: torch.Tensor) -> torch.Tensor:
        q, k = (x.unflatten(1, (4, 64)),) * 2
        return F.scaled_dot_product_attention(q, k, q[..., :4])

    graph, saved = _captured(attention, 2, 256, 8)
    (name,) = _names(graph, "scaled_dot_product_attention")
    assert sum(extra.num_bytes for extra in saved.saved_by_node[name].extras) < 2 * 4 * 64 * 64 * 4


@pytest.mark.parametrize("masked", [False, True])
def test_the_stand_in_for_our_attention_keeps_what_ours_keeps(masked: bool):
    def saved(function, **changes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        query = torch.empty(2, 4, 16, 8, device="meta", requires_grad=True)
        packed: list[torch.Tensor] = []
        mask = torch.empty(16, 16, dtype=torch.bool, device="meta") if masked else None
        with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: query):
            function(query, query, query, attn_mask=mask, dropout_p=0.1, is_causal=not masked)
        return sorted((tuple(tensor.shape), tensor.element_size()) for tensor in packed)

    assert saved(attention_kernel("gpu")) == saved(ops.scaled_dot_product_attention)


def test_values_that_no_gradient_comes_back_to_are_not_kept():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return {"loss": self.used(x).exp().sum(), "other": self.unused(x).exp()}

    graph = capture(Two(), args=(torch.zeros(4, 8),))
    saved = kept_by_autograd(graph, live_nodes(graph))
    used, unused = _names(graph, "exp")
    assert saved[used].values and not saved[unused].values


def test_an_operator_that_torch_cannot_run_without_data_keeps_its_floating_inputs():
    graph, figures = _captured(F.gelu, 4, 8)
    (name,) = _names(graph, "gelu")
    node = figures.nodes[name]
    unknown = dataclasses.replace(node, op="aten.no_such_operator.default")
    graph = graph.replace(nodes=tuple(unknown if entry is node else entry for entry in graph.nodes))
    assert kept_by_autograd(graph, live_nodes(graph))[name].values == node.inputs


# -- storage ----------------------------------------------------------------------------------------------------------


def test_a_reshape_is_a_view_where_strides_allow_it_and_a_copy_where_they_do_not():
    def function(x):
        same = x.unflatten(1, (2, 2)).flatten(0, 1)
        moved = x.transpose(0, 1).reshape(-1)
        return same.exp().sum() + moved.exp().sum()

    graph, figures = _captured(function, 6, 4, 8)
    source = figures.nodes[_names(graph, "linear")[0]].output.name
    reshapes = {figures.nodes[name].output.shape: figures.nodes[name].output.name for name in _names(graph, "reshape")}
    roots = storage_roots(graph)
    assert roots[reshapes[12, 2, 8]] == source
    assert roots[reshapes[192,]] == reshapes[192,]


def test_parameters_inputs_and_constants_are_not_activations():
    graph, _ = _captured(lambda x: x + torch.arange(8), 4, 8)
    predicted_activations = activations(graph)
    assert not predicted_activations & {value.name for value in graph.inputs}
    assert not predicted_activations & {state.value.name for state in graph.states}
    assert not predicted_activations & {value.name for node in graph.nodes if node.constant for value in node.outputs}
    assert {value.name for node in graph.nodes if not node.constant for value in node.outputs} == predicted_activations


# -- recompute and peak -----------------------------------------------------------------------------------------------


def _mlp(x):
    for _ in range(2):
        x = F.gelu(F.linear(F.gelu(x), torch.ones(8, 8)))
    return x


def _bytes(figures: Activations, policy: str, *, compiled: bool = False) -> int:
    saved = kept_under(figures, tuple(figures.saved_by_node), policy, compiled=compiled)
    return sum(figures.values[name].num_bytes for name in saved.values) + sum(extra.num_bytes for extra in saved.extras)


@pytest.mark.parametrize("compiled", [False, True])
def test_more_recomputation_keeps_less(measured, compiled: bool):
    _, prediction = measured
    figures = prediction.figures
    totals = []
    for policy in POLICIES:
        saved = [kept_under(figures, nodes, used, compiled=compiled) for nodes, used in prediction.stretches(policy)]
        totals.append(prediction.num_bytes(saved))
    assert totals == sorted(totals, reverse=True)


def test_full_recomputation_stops_before_the_last_product():
    _, figures = _captured(lambda x: F.linear(F.gelu(x), torch.ones(8, 8)), 4, 8)
    names = tuple(name for name in figures.saved_by_node if figures.nodes[name].op != "aten.sum.default")
    inputs = kept_under(figures, names[1:], "full")
    assert inputs.values == {figures.nodes[names[0]].output.name}
    assert "aten.linear.default" not in {figures.nodes[name].op for name in inputs.recomputed}


def test_compiled_recomputes_pointwise_chains_for_free():
    _, figures = _captured(lambda x: x.exp().sin().cos().tanh(), 4, 8)
    assert _bytes(figures, "none") == 3 * 4 * 8 * 4
    assert _bytes(figures, "none", compiled=True) == 4 * 8 * 4
    assert kept_under(figures, tuple(figures.saved_by_node), "none", compiled=True).recomputed == ()


def test_an_unknown_policy_is_refused():
    _, figures = _captured(F.gelu, 4, 8)
    with pytest.raises(ValueError, match="unknown recompute policy 'half': expected one of none, selective, full"):
        kept_under(figures, tuple(figures.saved_by_node), "half")


def _peak(figures: Activations, policy: str = "none", *, compiled: bool = False) -> float:
    return working_peak(
        figures,
        tuple(figures.saved_by_node),
        policy,
        local_bytes=lambda value: value.num_bytes,
        extra_bytes=lambda extra: extra.num_bytes,
        compiled=compiled,
    )


def test_a_chain_needs_two_gradients_at_a_time_less_what_it_no_longer_keeps():
    """exp keeps its output: at each step back a gradient comes and one goes, and one output is let go."""
    size = 4 * 8 * 4
    _, figures = _captured(lambda x: x.exp().exp().exp(), 4, 8)
    assert _peak(figures) == 2 * size


class Head(nn.Module):
    """A linear layer and the loss of its output; ``twice``: the logits are also penalised."""

    def __init__(self, *, twice: bool = False, squashed: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 256, bias=False)
        self.twice, self.squashed = twice, squashed

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.layer(x)
        return torch.tanh(logits) if self.squashed else logits

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.logits(x)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum")
        return {"loss": loss + logits.square().sum() if self.twice else loss}


def _head(**options: bool) -> tuple[Head, tuple[torch.Tensor, torch.Tensor], Activations]:
    head, batch = Head(**options), (torch.randn(8, 512, 16), torch.randint(0, 256, (8, 512)))
    graph = capture(head, args=batch)
    return head, batch, Activations.of(graph, live_nodes(graph))


def test_cross_entropy_keeps_logits_and_two_numbers_for_each_token_as_the_operator_does():
    head, (x, target), figures = _head()
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ops.cross_entropy(head.logits(x), target).sum().backward()
    leaves = (x, target, head.layer.weight)
    measured = sum(size for place, size in saved.items() if place not in {each.data_ptr() for each in leaves})
    assert measured == 8 * 512 * (256 + 2) * 4
    assert _bytes(figures, "none") == measured


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_that_nobody_else_reads_become_their_own_gradient(policy: str):
    head, (x, target), figures = _head()
    logits = 8 * 512 * 256 * 4
    assert figures.reusing
    assert logits <= _peak(figures, policy) + _bytes(figures, policy) < 1.1 * logits
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ops.cross_entropy(head.logits(x), target, reuse_logits=True).sum().backward()
    assert max(accumulate(allocations(profile))) < 1.6 * logits


@pytest.mark.parametrize("options", [{"twice": True}, {"squashed": True}])
def test_logits_that_are_read_again_do_not(options: dict[str, bool]):
    _, _, figures = _head(**options)
    assert not figures.reusing
    assert _peak(figures) + _bytes(figures, "none") >= 2 * 8 * 512 * 256 * 4


def test_recomputing_makes_the_peak_of_what_was_not_kept():
    _, figures = _captured(_mlp, 16, 8)
    assert _peak(figures, "full") >= _bytes(figures, "none") - _bytes(figures, "full")
