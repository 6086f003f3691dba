"""The gated delta rule: linear attention whose state forgets and is corrected, for loops of one's own.

Without a kernel of its own: on every device it is products of matrices, a triangular solution and a scan over chunks of
tokens (``passes.torch_compat.delta_rule_chunks``).
"""

from __future__ import annotations

import torch

import passes.torch_compat.gated_delta_rule  # noqa: F401  (defines the operator)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    initial: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    epsilon: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear attention with a state that decays and is corrected towards each token's value.

    A head's state is a matrix from keys to values. For every token ``t``:

        S = exp(log_decay[t]) * S
        S = S + beta[t] * outer(key[t], value[t] - key[t] @ S)
        output[t] = scale * query[t] @ S

    One operator of the graph however many tokens there are. Samples and heads may be cut; tokens, and the widths of
    keys and values, may not. Computed in at least float32, in chunks of 64 tokens (16 with a decay for each entry of a
    key); backward computes the chunks again, so that only the inputs are kept. It has gradients of any order. One
    decay for a head is Gated DeltaNet (Yang, Kautz and Hatamizadeh 2025, "Gated Delta Networks", arXiv 2412.06464), one
    for each entry of a key Kimi Delta Attention (Kimi Team 2025, "Kimi Linear", arXiv 2510.26692).

        mixed, state = planner.gated_delta_rule(q, k, v, -F.softplus(a), torch.sigmoid(b), epsilon=1e-6)

    Args:
        query, key: [batch, tokens, heads, key_width]; or fewer heads, each for as many consecutive heads of ``value``.
        value: [batch, tokens, heads, value_width].
        log_decay: [batch, tokens, heads] or [batch, tokens, heads, key_width]: natural logarithms, at most 0.
        beta: [batch, tokens, heads]: how much of its error a state is corrected by, mostly between 0 and 1.
        initial: [batch, heads, key_width, value_width]: the state before the first token; None for zeros.
        scale: of the queries; None for ``key_width ** -0.5``.
        epsilon: queries and keys are divided by the root of this plus their squared length; None: they are taken as
            they are.

    Returns:
        the outputs, [batch, tokens, heads, value_width] in the dtype of ``value``, and the state behind the last token,
        [batch, heads, key_width, value_width] in at least float32.

    Raises:
        ValueError: if shapes do not fit together, or a dtype is not floating.
    """
    if key.dim() == value.dim() == 4 and key.shape[2] and value.shape[2] > key.shape[2]:
        members = value.shape[2] // key.shape[2]
        query, key = query.repeat_interleave(members, dim=2), key.repeat_interleave(members, dim=2)
    scale = key.shape[-1] ** -0.5 if scale is None else scale
    output, state = torch.ops.meshwright.gated_delta_rule(query, key, value, log_decay, beta, initial, scale, epsilon)
    return output.to(value.dtype), state
