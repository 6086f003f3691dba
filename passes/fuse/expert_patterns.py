"""Spellings of a mixture's experts, once capture has brought them to ``meshwright.expert_linear``.

Two linear layers with a weight for each row's expert, an activation between them, and the sum of a token's rows by
their scores. One row for each activation, each with and without biases.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Name of the activation in ``fused.experts`` → what is computed of ``gate`` and ``up``.
_GATED = {
    "swiglu": "silu(gate) * up",
    "geglu": "gelu(gate) * up",
    "geglu_tanh": "gelu(gate, approximate='tanh') * up",
}
#: The same where ``gate`` and ``up`` take turns (GPT-OSS).
_IN_TURNS = {
    "swiglu_clamped": "(clamp(up, -7.0, 7.0) + 1) * (clamp(gate, None, 7.0) * sigmoid(clamp(gate, None, 7.0) * 1.702))"
}
#: The same of all of the first product.
_PLAIN = {
    "silu": "silu({0})",
    "gelu": "gelu({0})",
    "gelu_tanh": "gelu({0}, approximate='tanh')",
    "relu": "relu({0})",
    "relu2": "relu({0}) ** 2",
}
#: How the two halves are taken apart.
_HALVES = (
    ("split({0}, $halves, -1)[0]", "split({0}, $halves, -1)[1]"),
    ("slice({0}, -1, 0, $inner)", "slice({0}, -1, $inner, $all)"),
)
_TURNS = ("slice({0}, -1, 0, $all, 2)", "slice({0}, -1, 1, $all, 2)")


def expert_spellings() -> Iterator[tuple[str, str]]:
    """Each pattern, and the fused operator that stands for it."""
    for biased in (False, True):
        first = _linear("unsqueeze(x, -2)", "w", "b", biased)
        for name, inner in _activations(first):
            second = _linear(inner, "v", "c", biased)
            fused = f"fused.experts(x, i, s, w, v, {'b, c' if biased else 'None, None'}, '{name}')"
            yield f"sum_dim({second} * unsqueeze(s, -1), -2)", fused


def _linear(rows: str, weight: str, bias: str, biased: bool) -> str:
    product = f"expert_linear({rows}, i, {weight})"
    return f"({product} + index({bias}, (i,)))" if biased else product


def _activations(first: str) -> Iterator[tuple[str, str]]:
    """Names of activations and their values for a first product."""
    for halves in _HALVES:
        for name, value in _GATED.items():
            yield name, _of_halves(value, halves, first)
    for name, value in _IN_TURNS.items():
        yield name, _of_halves(value, _TURNS, first)
    for name, value in _PLAIN.items():
        yield name, value.format(first)


def _of_halves(value: str, halves: tuple[str, str], first: str) -> str:
    gate, up = (half.format(first) for half in halves)
    return f"({value.replace('gate', gate).replace('up', up)})"
