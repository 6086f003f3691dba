"""The experts of a mixture of experts: every token through the k experts that it was routed to, their outputs weighed.

    out[t] = Σ_j scores[t, j] · (activation(x[t] · gate_upᵀ + bias) · downᵀ + bias) of expert ids[t, j]

Rows are sorted by expert once, each product is one grouped matrix product. Backward keeps the first product of every
row ([T·k, out1]) and nothing else: the activation is computed again, and the gradient of a score is that of its
expert's inner vector times that vector.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
import torch.nn.functional as F

from runtime.kernels.cross_entropy import autocasts
from runtime.kernels.direct import apply_of, nobody_listens
from runtime.kernels.dispatch import runs_triton
from runtime.kernels.expert_activations import ACTIVATIONS
from runtime.kernels.expert_products import ExpertGroups, outer_products, products, sums
from runtime.kernels.expert_row_kernels import sums_of_choices
from runtime.kernels.library import differentiable_again, in_dtype, register, register_composed, wide
from runtime.kernels.routing_listeners import note_routing
from runtime.kernels.row_blocks import in_row_blocks
from runtime.kernels.type_rules import gets_gradient, product_type


def experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "swiglu",
) -> torch.Tensor:
    """Outputs of the experts that every token was routed to, weighed by their scores.

    Args:
        x: tokens [..., H].
        expert_ids: integers [..., k]; those outside [0, E) contribute nothing.
        scores: [..., k], of any floating dtype.
        gate_up, gate_up_bias: [E, out1, H] and [E, out1]; out1 is 2F with a gate, else F.
        down, down_bias: [E, H, F] and [E, H].
        activation: a key of ``expert_activations.ACTIVATIONS``.

    Returns:
        [..., H] in the dtype of ``x``; the sum over k is computed in at least float32.

    Raises:
        ValueError: if shapes or dtypes do not fit, or for an unknown activation.
    """
    check_experts(x, expert_ids, scores, gate_up, down, gate_up_bias, down_bias, activation)
    note_routing(expert_ids, len(gate_up))
    return own_experts(x, expert_ids, scores, gate_up, down, gate_up_bias, down_bias, activation)


def own_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """``experts`` of which nobody is told where tokens go: some of a mixture's."""
    function = _Experts.apply if torch.is_grad_enabled() or not nobody_listens() else _output
    return flattened(function, x, expert_ids, scores, gate_up, down, gate_up_bias, down_bias, activation)


def _output(*operands: Any) -> torch.Tensor:
    """What ``_Experts`` gives where no gradient is to come."""
    output: torch.Tensor = forward(*operands)[0]
    return output


def flattened(
    function: Callable[..., torch.Tensor], x: torch.Tensor, expert_ids: torch.Tensor, scores: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """``function`` of [..., H] and twice [..., k] by one of [T, H] and twice [T, k]."""
    rows = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (x, expert_ids, scores))
    return function(*rows, *rest).view(x.shape)


def check_experts(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
) -> None:
    """Raise ValueError unless the operands of ``experts`` fit together."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: expected one of {', '.join(ACTIVATIONS)}")
    if x.dim() < 1 or expert_ids.dim() < 1 or gate_up.dim() != 3 or down.dim() != 3:
        raise ValueError(
            f"x is {list(x.shape)}, expert_ids {list(expert_ids.shape)}, gate_up {list(gate_up.shape)}, down "
            f"{list(down.shape)}: expected [..., H], [..., k], [E, out1, H] and [E, H, F]"
        )
    (*tokens, hidden), (count, outer, _) = x.shape, gate_up.shape
    inner = outer // ACTIVATIONS[activation].halves
    expected: dict[str, tuple[torch.Tensor | None, tuple[int, ...]]] = {
        "expert_ids": (expert_ids, (*tokens, expert_ids.shape[-1])),
        "scores": (scores, tuple(expert_ids.shape)),
        "gate_up": (gate_up, (count, inner * ACTIVATIONS[activation].halves, hidden)),
        "down": (down, (count, hidden, inner)),
        "gate_up_bias": (gate_up_bias, (count, outer)),
        "down_bias": (down_bias, (count, hidden)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(shape)} with {activation!r}")
    for name in ("gate_up", "down", "gate_up_bias", "down_bias"):
        tensor, _ = expected[name]
        if tensor is not None and tensor.dtype != x.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, x is {x.dtype}: expected one dtype")
    if expert_ids.dtype.is_floating_point or not scores.dtype.is_floating_point:
        raise ValueError(f"expert_ids are {expert_ids.dtype} and scores {scores.dtype}: expected integers and floats")


class ExpertRouting(NamedTuple):
    """Rows sorted by expert: [R], all T·k, or on a processor, where to count them costs nothing, those of an expert.

    Attributes:
        order: for each sorted row its place among all T·k, [R].
        expert: its expert, E for none, [R].
        groups: how many rows every expert has.
        num_rows: T·k.
    """

    order: torch.Tensor
    expert: torch.Tensor
    groups: ExpertGroups
    num_rows: int

    @staticmethod
    def of(expert_ids: torch.Tensor, num_experts: int) -> ExpertRouting:
        """Sort [T, k] ids."""
        flat = expert_ids.reshape(-1)
        flat = torch.where((flat < 0) | (flat >= num_experts), num_experts, flat)
        expert, order = torch.sort(flat, stable=True)
        counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
        end = int(counts.sum()) if flat.is_cpu and not runs_triton(flat) else len(flat)
        return ExpertRouting(order[:end], expert[:end], ExpertGroups(counts), len(flat))

    def unsorted(self, rows: torch.Tensor) -> torch.Tensor:
        """Sorted rows [R, …] back where they were, [T·k, …]; zeros for others."""
        make = rows.new_empty if len(rows) == self.num_rows else rows.new_zeros
        result = make((self.num_rows, *rows.shape[1:]))
        result[self.order] = rows
        return result

    def padded(self, rows: torch.Tensor) -> torch.Tensor:
        """Sorted rows [R, N], and zeros behind them, [T·k, N]."""
        return rows if len(rows) == self.num_rows else F.pad(rows, (0, 0, 0, self.num_rows - len(rows)))

    def combined(self, rows: torch.Tensor, scores: torch.Tensor | None, *, ids: torch.Tensor) -> torch.Tensor:
        """Sorted rows [R, H] of each token, weighed by scores [T, k], like ``ids``, and added up: [T, H]."""
        if runs_triton(rows):
            return sums_of_choices(rows, self.order, scores, num_tokens=len(ids))
        by_token = self.unsorted(rows).view(*ids.shape, rows.shape[1])
        return combined(by_token, scores, rows.dtype).contiguous()


def _aten(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, and the first product of every sorted row; without scores each expert counts once."""
    k = expert_ids.shape[1]
    with without_autocast(x):
        routing = ExpertRouting.of(expert_ids, len(gate_up))
        hidden = products(x[routing.order // k], gate_up.transpose(1, 2), routing.groups)
        _add_bias(hidden, gate_up_bias, routing)
        inner, _ = ACTIVATIONS[activation].inner(hidden)
        rows = products(inner, down.transpose(1, 2), routing.groups)
        _add_bias(rows, down_bias, routing)
        return routing.combined(rows, scores, ids=expert_ids), routing.padded(hidden)


def combined(rows: torch.Tensor, scores: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Rows [T, k, H] weighed by scores [T, k] and added up in at least float32: [T, H]."""

    def plain_sums(rows: torch.Tensor) -> torch.Tensor:
        return in_dtype(wide(rows).sum(1), dtype)

    def weighed_sums(rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return in_dtype((wide(rows) * wide(scores).unsqueeze(-1)).sum(1), dtype)

    if scores is not None:
        return in_row_blocks(weighed_sums, rows, scores)
    return rows[:, 0] if rows.shape[1] == 1 else in_row_blocks(plain_sums, rows)


def _add_bias(rows: torch.Tensor, bias: torch.Tensor | None, routing: ExpertRouting) -> None:
    """Add each expert's bias [E, N] to its rows, in place; those of no expert get none."""
    if bias is not None:
        padded = torch.cat([bias, bias.new_zeros((1, bias.shape[1]))])
        rows.add_(padded[routing.expert])


def _aten_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    hidden: torch.Tensor,
    activation: str,
    needs_gradient: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    """Gradients of x, scores, gate_up, down and the biases; empty tensors for those not ``needs_gradient``."""
    k, kind = expert_ids.shape[1], ACTIVATIONS[activation]
    nothing = x.new_empty(0)
    results = [nothing] * 6
    with without_autocast(x):
        routing = ExpertRouting.of(expert_ids, len(gate_up))
        token, hidden = routing.order // k, hidden[: len(routing.order)]
        by_row = grad[token]
        by_inner = products(by_row, down, routing.groups)
        weights = None if scores is None else scores.reshape(-1)[routing.order]
        inner, by_score = kind.inner(hidden, weights=weights, by_inner=by_inner if needs_gradient[1] else None)
        if by_score is not None and scores is not None:
            results[1] = _score_gradient(by_score, by_row, down_bias, routing).view(scores.shape).to(scores.dtype)
        if needs_gradient[3]:
            results[3] = outer_products(by_row, inner, routing.groups)
        if needs_gradient[5] and down_bias is not None:
            weighed = by_row if weights is None else by_row.mul_(weights.unsqueeze(1))
            results[5] = sums(weighed, routing.groups, routing.expert).to(down_bias.dtype)
        del by_row, inner  # rows are the most that experts hold: each is let go behind its last use
        by_hidden = kind.by_hidden(by_inner, hidden, weights=weights)
        del by_inner
        if needs_gradient[2]:
            results[2] = outer_products(by_hidden, x[token], routing.groups)
        if needs_gradient[4] and gate_up_bias is not None:
            results[4] = sums(by_hidden, routing.groups, routing.expert).to(gate_up_bias.dtype)
        if needs_gradient[0]:
            results[0] = routing.combined(products(by_hidden, gate_up, routing.groups), None, ids=expert_ids)
    return tuple(results)


def _score_gradient(
    by_score: torch.Tensor, by_row: torch.Tensor, down_bias: torch.Tensor | None, routing: ExpertRouting
) -> torch.Tensor:
    """Gradients of all scores [T·k]: of each expert's output times that output, which is not computed again.

    Args:
        by_score: what the output without its bias gives, of sorted rows [R].
        by_row: gradients of the outputs, sorted [R, H].
    """
    if down_bias is not None:
        padded = torch.cat([down_bias, down_bias.new_zeros((1, down_bias.shape[1]))])
        by_score = by_score + in_row_blocks(
            lambda rows, expert: (wide(rows) * wide(padded[expert])).sum(1), by_row, routing.expert
        )
    return routing.unsorted(by_score)


def _shapes(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty((expert_ids.numel(), gate_up.shape[1]))


def _shapes_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    hidden: torch.Tensor,
    activation: str,
    needs_gradient: Sequence[bool],
) -> tuple[torch.Tensor, ...]:
    operands = (x, scores, gate_up, down, gate_up_bias, down_bias)
    return tuple(
        tensor.new_empty(tensor.shape) if needed and tensor is not None else x.new_empty(0)
        for tensor, needed in zip(operands, needs_gradient)
    )


_OPERANDS = (
    "Tensor x, Tensor expert_ids, Tensor? scores, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias"
)
forward = register(
    f"experts_forward({_OPERANDS}, str activation) -> (Tensor, Tensor)", aten=_aten, triton=_aten, shapes=_shapes
)
backward = register(
    f"experts_backward(Tensor grad, {_OPERANDS}, Tensor hidden, str activation, bool[6] needs_gradient) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    aten=_aten_backward,
    triton=_aten_backward,
    shapes=_shapes_backward,
)


def _plain_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor | None,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    hidden: torch.Tensor,
    activation: str,
    needs_gradient: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """As ``_aten_backward`` from operators that autograd differentiates: every expert sees every token."""
    operands = (x, scores, gate_up, down, gate_up_bias, down_bias)
    leaves = [
        tensor if tensor is None or tensor.requires_grad else tensor.detach().requires_grad_() for tensor in operands
    ]
    source, weights, first, second, first_bias, second_bias = leaves
    assert source is not None and first is not None and second is not None
    result = torch.zeros_like(source)
    for expert in range(len(first)):
        chosen = (expert_ids == expert).to(source.dtype)
        weight = (chosen if weights is None else weights * chosen).sum(1, keepdim=True)
        inner = source @ first[expert].t()
        inner = inner if first_bias is None else inner + first_bias[expert]
        outer = ACTIVATIONS[activation].definition(inner) @ second[expert].t()
        outer = outer if second_bias is None else outer + second_bias[expert]
        result = result + (weight * outer).to(source.dtype)
    needed = [tensor for tensor, use in zip(leaves, needs_gradient) if use and tensor is not None]
    gradients = iter(torch.autograd.grad(result, needed, grad, create_graph=True))
    return tuple(next(gradients) if use and tensor is not None else None for tensor, use in zip(leaves, needs_gradient))


differentiable_again(backward, _plain_backward)


class _Experts(torch.autograd.Function):
    """``experts`` with what it keeps."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        scores: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        activation: str,
    ) -> torch.Tensor:
        result, hidden = forward(x, expert_ids, scores, gate_up, down, gate_up_bias, down_bias, activation)
        ctx.save_for_backward(x, expert_ids, scores, gate_up, down, gate_up_bias, down_bias, hidden)
        ctx.activation = activation
        ctx.gradients_together = True  # for whoever would ask for them one by one
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        needs = ctx.needs_input_grad
        needs_gradient = [needs[0], *needs[2:7]]
        gradients = backward(grad, *ctx.saved_tensors, ctx.activation, needs_gradient)
        by_x, *rest = (gradient if needed else None for gradient, needed in zip(gradients, needs_gradient))
        return by_x, None, *rest, None

    @staticmethod
    def spmd_typecheck(
        *,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        scores: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
    ) -> Any:
        return output_type(x, expert_ids, scores, gate_up, down, gate_up_bias, down_bias)


def output_type(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> Any:
    """The type that ``spmd_types``' checker gives to the output: that of products of all operands, ids apart."""
    with_scores = gets_gradient(scores)
    spmd.rules.ignore(expert_ids, *(() if with_scores else (scores,)))
    named = [("th", x), *([("tk", scores)] if with_scores else []), ("eoh", gate_up), ("ehf", down)]
    named += [(dims, bias) for dims, bias in (("eo", gate_up_bias), ("eh", down_bias)) if bias is not None]
    return product_type(",".join(dims for dims, _ in named) + "->th", *(tensor for _, tensor in named))


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Operands are of the dtype to compute in; backward is not under autocast either."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if autocasts(device) else contextlib.nullcontext()


register_composed(
    "experts(Tensor x, Tensor expert_ids, Tensor scores, Tensor gate_up, Tensor down, Tensor? gate_up_bias=None, "
    'Tensor? down_bias=None, str activation="swiglu") -> Tensor',
    differentiable=partial(flattened, apply_of(_Experts)),  # the plain one: captures look into others
    plain=partial(flattened, lambda *operands: forward(*operands)[0]),
    shapes=lambda x, *operands: x.new_empty(x.shape),
)
