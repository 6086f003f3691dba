"""The gated delta rule in chunks is the one token by token: values, gradients, what it counts and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from memory_truth import allocations
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers.models.qwen3_next import modeling_qwen3_next

import planner
from passes.autograd import kept_by_autograd
from passes.autograd.working import working
from passes.capture import capture
from passes.ir.graph import Graph, Node
from passes.rules import forward_flops
from passes.rules.delta_rule_costs import GATED_DELTA_RULE, SCAN_KERNELS, DeltaRuleCall
from passes.rules.kinds import matmul_shape
from passes.torch_compat import delta_rule_chunks
from passes.torch_compat.operators import TorchDispatchMode, tree_leaves
from planner.whole_step.costs.delta_rule_prices import delta_rule_seconds
from runtime.kernels.delta_rule import gated_delta_rule
from tests.recurrent_families import recurrent_batch, recurrent_model

BATCH, HEADS, KEYS, VALUES = 2, 3, 4, 5
Tensors = list[torch.Tensor]


def drawn(tokens: int, *, by_channel: bool = False, begins: bool = True, dtype: torch.dtype = torch.float64) -> Tensors:
    """query, key, value, log decays, beta and a state."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    lead = (BATCH, tokens, HEADS)
    decay = -normal(*lead, *([KEYS] if by_channel else [])).square()
    tensors = [normal(*lead, KEYS), normal(*lead, KEYS), normal(*lead, VALUES), decay, normal(*lead).sigmoid()]
    state = [normal(BATCH, HEADS, KEYS, VALUES)] if begins else []
    return [tensor.to(dtype).requires_grad_() for tensor in tensors + state]


def by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor | None = None,
    *,
    epsilon: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition."""
    if state is None:
        state = value.new_zeros(BATCH, HEADS, KEYS, VALUES)
    if epsilon is not None:
        query, key = (x / (x.square().sum(-1, keepdim=True) + epsilon).sqrt() for x in (query, key))
    outputs = []
    for t in range(key.shape[1]):
        decay = log_decay[:, t] if log_decay.dim() == 4 else log_decay[:, t, :, None]
        state = decay.exp()[..., None] * state
        error = value[:, t] - (key[:, t, :, None] @ state)[..., 0, :]
        state = state + beta[:, t, :, None, None] * key[:, t, ..., None] * error[..., None, :]
        outputs.append(KEYS**-0.5 * (query[:, t, :, None] @ state)[..., 0, :])
    return torch.stack(outputs, 1), state


def values_and_gradients(function: Callable[..., Any], tensors: Tensors, **options: Any) -> Tensors:
    outputs = function(*tensors, **options)
    generator = torch.Generator().manual_seed(7)
    above = [torch.randn(output.shape, generator=generator, dtype=output.dtype) for output in outputs]
    return [*outputs, *torch.autograd.grad(outputs, tensors, above)]


@pytest.mark.parametrize("tokens", [1, 16, 64, 70, 130])
@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("begins", "epsilon"), [(True, 1e-6), (False, None)])
def test_chunks_give_what_tokens_do(tokens: int, by_channel: bool, begins: bool, epsilon: float | None) -> None:
    tensors = drawn(tokens, by_channel=by_channel, begins=begins)
    if epsilon is None:  # else states grow without bound
        tensors[1] = (tensors[1] / tensors[1].norm(dim=-1, keepdim=True)).detach().requires_grad_()
    actual = values_and_gradients(gated_delta_rule, tensors, epsilon=epsilon)
    for one, other in zip(actual, values_and_gradients(by_token, tensors, epsilon=epsilon), strict=True):
        assert (one - other).abs().max() <= 1e-12 * other.abs().max()


@pytest.mark.parametrize("by_channel", [False, True])
def test_decays_that_leave_nothing_overflow_nowhere(by_channel: bool) -> None:
    tensors = drawn(70, by_channel=by_channel, dtype=torch.float32)
    tensors[3] = (tensors[3] - 50.0).detach().requires_grad_()
    assert all(tensor.isfinite().all() for tensor in values_and_gradients(gated_delta_rule, tensors, epsilon=1e-6))


@pytest.mark.parametrize("by_channel", [False, True])
def test_gradients_of_strong_decays_are_no_rounding(by_channel: bool) -> None:
    """They are some 1e-8 of the others."""
    tensors = drawn(70, by_channel=by_channel)
    tensors[3] = (tensors[3] - 10.0).float().double().detach().requires_grad_()
    single = [tensor.detach().float().requires_grad_() for tensor in tensors]
    exact = torch.autograd.grad(gated_delta_rule(*tensors, epsilon=1e-6)[0].sum(), tensors[3])[0]
    actual = torch.autograd.grad(gated_delta_rule(*single, epsilon=1e-6)[0].sum(), single[3])[0]
    assert ((actual - exact) / exact).abs().median() < 1e-3


@pytest.mark.parametrize("by_channel", [False, True])
def test_gradients_of_first_and_second_order(by_channel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule_chunks, "CHUNKS", {3: 2, 4: 2})
    tensors = [tensor.detach()[:1].requires_grad_() for tensor in drawn(3, by_channel=by_channel)]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gated_delta_rule(*tensors, epsilon=0.1)

    assert torch.autograd.gradcheck(run, tensors) and torch.autograd.gradgradcheck(run, tensors, fast_mode=True)


def test_the_operator_is_one_of_torchs() -> None:
    arguments = (*drawn(5, by_channel=True), 0.5, 1e-6)
    torch.library.opcheck(torch.ops.meshwright.gated_delta_rule.default, arguments)


def test_narrow_floats_are_computed_in_float32() -> None:
    tensors = [tensor.detach() for tensor in drawn(70, dtype=torch.bfloat16)]
    output, state = gated_delta_rule(*tensors, epsilon=1e-6)
    exact, final = gated_delta_rule(*(tensor.float() for tensor in tensors), epsilon=1e-6)
    assert torch.equal(output, exact.bfloat16()) and torch.equal(state, final)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gated_delta_rule(*tensors, epsilon=1e-6)[1], final)


def test_fewer_heads_of_queries_and_keys_serve_several_of_values() -> None:
    query, key, value, decay, beta, state = drawn(5)
    few = gated_delta_rule(query[:, :, :1], key[:, :, :1], value, decay, beta, state)
    many = gated_delta_rule(*(x[:, :, :1].expand_as(query) for x in (query, key)), value, decay, beta, state)
    assert all(map(torch.equal, few, many))


def test_without_tokens_the_state_stays() -> None:
    tensors = drawn(0)
    output, state = gated_delta_rule(*tensors)
    assert output.shape == (BATCH, 0, HEADS, VALUES) and torch.equal(state, tensors[-1])


@pytest.mark.parametrize(
    ("place", "change", "words"),
    [
        (0, lambda x: x[..., :3], r"query is \[2, 5, 3, 3\], expected \[2, 5, 3, 4\]"),
        (1, lambda x: x[0], r"key \[5, 3, 4\] and value .* must be \[batch, tokens, heads, width\]"),
        (3, lambda x: x[..., None], r"log_decay is .*, expected \[2, 5, 3\] or \[2, 5, 3, 4\] beside key"),
        (5, lambda x: x.mT, r"initial is \[2, 3, 5, 4\], expected \[2, 3, 4, 5\]"),
        (4, lambda x: x.int(), "beta is torch.int32, expected a floating dtype"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(place: int, change: Callable[[Any], Any], words: str) -> None:
    tensors: list[Any] = drawn(5)
    tensors[place] = change(tensors[place])
    with pytest.raises(ValueError, match=words):
        gated_delta_rule(*tensors)


class Layer(nn.Module):
    """A layer of one's own."""

    def __init__(self, by_channel: bool = False) -> None:
        super().__init__()
        self.proj = nn.Linear(8, HEADS * (2 * KEYS + VALUES + 1))
        self.gate = nn.Linear(8, HEADS * (KEYS if by_channel else 1))
        self.width = [HEADS, KEYS] if by_channel else [HEADS]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.proj(x).unflatten(-1, (HEADS, -1))
        query, key, value, beta = rows.split([KEYS, KEYS, VALUES, 1], -1)
        decay = -nn.functional.softplus(self.gate(x)).unflatten(-1, self.width)
        mixed, _ = planner.gated_delta_rule(query, key, value, decay, beta[..., 0].sigmoid(), epsilon=1e-6)
        return mixed.square().mean()


def captured(by_channel: bool, tokens: int = 256) -> tuple[Graph, Node]:
    graph = capture(Layer(by_channel), args=(torch.randn(BATCH, tokens, 8),))
    (node,) = (node for node in graph.nodes if node.op == GATED_DELTA_RULE)
    return graph, node


@pytest.mark.parametrize("by_channel", [False, True])
def test_only_its_inputs_are_kept_and_its_products_counted(by_channel: bool) -> None:
    graph, node = captured(by_channel)
    for_backward = kept_by_autograd(graph, frozenset(node.name for node in graph.nodes))[node.name]
    assert set(for_backward.values) == set(node.inputs)
    assert not for_backward.extras and for_backward.is_expensive
    chunk = 16 if by_channel else 64
    of_token = chunk * (2 * KEYS + (KEYS + VALUES) / 2 + VALUES) + 3 * KEYS * VALUES
    assert forward_flops(node, graph.values) == 2 * BATCH * HEADS * 256 * of_token
    shapes = [graph.values[name].shape for name in node.inputs]
    products = matmul_shape(node, shapes, node.output.shape)
    assert products == (BATCH * HEADS * 256 // chunk, chunk, VALUES, KEYS)


@pytest.mark.parametrize(("by_channel", "keys", "values"), [(False, 64, 64), (False, 32, 128), (True, 64, 64)])
def test_it_holds_what_is_counted(by_channel: bool, keys: int, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.KEYS", keys)
    monkeypatch.setattr(f"{__name__}.VALUES", values)
    graph, node = captured(by_channel)
    counted = working(node, graph.values, lambda value: float(value.num_bytes))
    tensors = [tensor.detach() for tensor in drawn(256, by_channel=by_channel, begins=False, dtype=torch.float32)]
    inputs = delta_rule_chunks.DeltaRuleInputs(*tensors, None, 1.0, 1e-6)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as forward:
        outputs = delta_rule_chunks.delta_rule(inputs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as backward:
        gradients = delta_rule_chunks.delta_rule_gradients(*outputs, inputs)
    for run, results, bytes_counted in ((forward, outputs, counted.forward), (backward, gradients, counted.backward)):
        held = max(accumulate(allocations(run))) - sum(result.nbytes for result in results)
        assert bytes_counted == pytest.approx(held, rel=0.15)  # one row of multiples for all widths


class Kernels(TorchDispatchMode):
    """Counts operators that are no views, and the elements that they take and give."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.moved = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and "empty" not in func.__name__:
            self.launches += 1
            leaves = tree_leaves((args, kwargs, result))
            self.moved += sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))
        return result


@pytest.mark.parametrize("by_channel", [False, True])
@pytest.mark.parametrize(("keys", "values"), [(64, 64), (128, 128), (32, 128)])
def test_kernels_and_passes_are_those_that_are_priced(
    by_channel: bool, keys: int, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.KEYS", keys)
    monkeypatch.setattr(f"{__name__}.VALUES", values)
    tensors = [tensor.detach() for tensor in drawn(256, by_channel=by_channel, begins=False, dtype=torch.float32)]
    inputs = delta_rule_chunks.DeltaRuleInputs(*tensors, None, 1.0, 1e-6)
    with Kernels() as forward:
        outputs = delta_rule_chunks.delta_rule(inputs)
    with Kernels() as backward:
        delta_rule_chunks.delta_rule_gradients(*outputs, inputs)
    call = DeltaRuleCall.of(tensors[1].shape, tensors[2].shape, tensors[3].shape)
    # one row of multiples for all widths and lengths: a few kernels and passes more or less
    assert call.launches == pytest.approx((forward.launches, backward.launches), rel=0.1)
    for place, counted in enumerate((forward.moved, backward.moved)):
        of_scan = SCAN_KERNELS[place] * call.num_chunks * call.scanned[place]
        assert call.moved[place] + of_scan == pytest.approx(counted, rel=0.05)


class Roofline:
    """Seconds of a device whose shortest kernel takes 5 µs."""

    host_seconds = 0.0

    def compute_seconds(
        self, *, flops: float, num_bytes: float, dtype: str, kind: str | None = None, **_: Any
    ) -> float:
        assert dtype == "float32" and kind in ("matmul", "elementwise")
        return max(flops / 60e12, num_bytes / 3e12, 5e-6)

    def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float:
        raise NotImplementedError


def test_heads_that_are_cut_leave_the_launches_of_the_scan() -> None:
    whole, half = (
        delta_rule_seconds(Roofline(), DeltaRuleCall(heads, 4096, 128, 128, 3), "float32", live=True)
        for heads in (32, 16)
    )
    assert all(part > one / 2 for part, one in zip(half, whole))
    assert 3 * 64 * 5e-6 < half[0] < whole[0] < whole[1]
    assert delta_rule_seconds(Roofline(), DeltaRuleCall(1, 64, 8, 8, 4), "float32", live=False)[1] == 0.0


@pytest.mark.parametrize("packed", [False, True])
def test_packed_samples_are_refused_as_by_the_library(packed: bool) -> None:
    class Rule(nn.Module):
        def forward(self, *tensors: torch.Tensor) -> Any:
            length = torch.tensor([0, 5]) if packed else None
            return modeling_qwen3_next.torch_chunk_gated_delta_rule(*tensors, cu_seqlens=length)[0]

    Rule.__module__ = modeling_qwen3_next.__name__
    tensors = tuple(drawn(5, begins=False))
    if packed:
        with pytest.raises(Exception, match="can't keep packed sequences apart"):
            capture(Rule(), args=tensors)
    else:
        assert [node.op for node in capture(Rule(), args=tensors).nodes].count(GATED_DELTA_RULE) == 1


@pytest.mark.parametrize("name", ["Qwen3Next", "KimiLinear"])
def test_generation_with_gathered_weights_runs_the_models_own_loops(name: str) -> None:
    model: Any = recurrent_model(name).float().eval()
    batch = recurrent_batch()
    parallel = planner.compile(recurrent_model(name).float(), "dp=1", example_inputs=batch)
    prompt, options = batch["input_ids"][:2, :5], {"max_new_tokens": 3, "do_sample": False}
    with torch.inference_mode():
        expected = model.generate(prompt, **options).tolist()
        assert parallel.generate(prompt, gathered=True, **options).tolist() == expected
