"""Spellings of a mixture's experts, once capture has brought them to ``meshwright.expert_linear``.

Two linear layers with a weight for each row's expert, an activation between them, and the sum of a token's rows by
their scores; or no sum: then every row is a token of one expert, whose score is one (scores before the experts, choices
one by one). One row for each activation, each with and without biases, and with gate and up as one layer or two.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

#: Name of the activation in ``fused.experts`` → what is computed of ``gate`` and ``up``.
_GATED = {
    "swiglu": "silu(gate) * up",
    "geglu": "gelu(gate) * up",
    "geglu_tanh": "gelu(gate, approximate='tanh') * up",
    "reglu": "relu(gate) * up",
    "glu": "sigmoid(gate) * up",
}
#: The same where ``gate`` and ``up`` take turns (GPT-OSS).
_IN_TURNS = {
    "swiglu_clamped": "(clamp(up, -7.0, 7.0) + 1) * (clamp(gate, None, 7.0) * sigmoid(clamp(gate, None, 7.0) * 1.702))"
}
#: The same of all of the first product.
_PLAIN = (
    ("gelu_tanh", "gelu({0}, approximate='tanh')"),
    ("relu2", "relu({0}) ** 2"),
    ("relu2", "square(relu({0}))"),
    *((name, f"{name}({{0}})") for name in ("silu", "gelu", "relu", "tanh", "leaky_relu", "elu", "mish", "hardswish")),
)
#: How the two halves are taken apart.
_HALVES = (
    ("split({0}, $halves, -1)[0]", "split({0}, $halves, -1)[1]"),
    ("slice({0}, -1, 0, $inner)", "slice({0}, -1, $inner, $all)"),
)
_TURNS = ("slice({0}, -1, 0, $all, 2)", "slice({0}, -1, 1, $all, 2)")


class _Form(NamedTuple):
    """What experts are given, and what is done with their rows.

    Attributes:
        rows: of the first layer; ``result``: around the second one; ``operands``: tokens, ids and scores.
    """

    rows: str
    result: str
    operands: str


_FORMS = (
    _Form("unsqueeze(x, -2)", "sum_dim({0} * unsqueeze(s, -1), -2)", "x, i, s"),
    _Form("x", "{0}", "x, unsqueeze(i, -1), ones_like(slice(x, -1, 0, 1))"),
)


def expert_spellings() -> Iterator[tuple[str, str]]:
    """Each pattern, and the fused operator that stands for it."""
    for form, biased in itertools.product(_FORMS, (False, True)):
        for name, inner, weight, bias in _activations(form.rows, biased):
            second = _linear(inner, "v", "c", biased)
            operands = f"{form.operands}, {weight}, v, {f'{bias}, c' if biased else 'None, None'}"
            yield form.result.format(second), f"fused.experts({operands}, '{name}')"


def _linear(rows: str, weight: str, bias: str, biased: bool) -> str:
    product = f"expert_linear({rows}, i, {weight})"
    return f"({product} + index({bias}, (i,)))" if biased else product


def _activations(rows: str, biased: bool) -> Iterator[tuple[str, str, str, str]]:
    """Names of activations and their values, with the weight and the bias of the first layer."""
    first, other = _linear(rows, "w", "b", biased), _linear(rows, "u", "d", biased)
    for name, value in _GATED.items():
        for gate, up in _HALVES:
            yield name, _of_halves(value, gate.format(first), up.format(first)), "w", "b"
        yield name, _of_halves(value, first, other), "cat((w, u), 1)", "cat((b, d), 1)"
    for name, value in _IN_TURNS.items():
        gate, up = (half.format(first) for half in _TURNS)
        yield name, _of_halves(value, gate, up), "w", "b"
    for name, value in _PLAIN:
        yield name, value.format(first), "w", "b"


def _of_halves(value: str, gate: str, up: str) -> str:
    return f"({value.replace('gate', gate).replace('up', up)})"
