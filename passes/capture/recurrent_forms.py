"""What loops over tokens in models compute, for all tokens at once: a linear recurrence, or the gated delta rule.

Each form takes the arguments of the function that it stands for and gives the same values and gradients;
``token_loops`` tries it before it is used. A form may leave out what only steers kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

import passes.torch_compat.gated_delta_rule
import passes.torch_compat.linear_recurrence  # noqa: F401  (both define an operator)

#: What transformers adds to the squared length of queries and keys before it divides by the root.
_NORM_EPSILON = 1e-6


def _states(factors: torch.Tensor, inputs: torch.Tensor, initial: torch.Tensor | None = None) -> torch.Tensor:
    """All states along the tokens, which are dim 1."""
    states: torch.Tensor = torch.ops.meshwright.linear_recurrence(factors, inputs, initial, 1)
    return states


def selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
) -> Any:
    """``mamba_selective_scan`` of Mamba, FalconMamba, Jamba and Zamba: y[t] = <C[t], h[t]>, a state for each channel.

    Args:
        hidden_states, dt, z: [batch, channels, tokens].
        A: [channels, states].
        B, C: [batch, states, tokens].
        D, delta_bias: [channels].

    Returns:
        [batch, channels, tokens], and the last state, [batch, channels, states], if that is asked for.
    """
    dtype = hidden_states.dtype
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    steps = dt.transpose(1, 2)[..., None]
    factors = torch.exp(A * steps)
    inputs = steps * B.transpose(1, 2)[:, :, None].float() * hidden_states.transpose(1, 2)[..., None].float()
    wide = torch.promote_types(torch.promote_types(factors.dtype, inputs.dtype), dtype)
    states = _states(factors.to(wide), inputs.to(wide))
    output = (states.to(dtype) @ C.transpose(1, 2)[..., None])[..., 0].transpose(1, 2)
    if D is not None:
        output = output + hidden_states * D[None, :, None]
    if z is not None:
        output = output * F.silu(z)
    return (output, states[:, -1]) if return_last_state else output


def gated_linear_recurrence(
    self: Any,
    hidden_states: torch.Tensor,
    recurrent_gate: torch.Tensor,
    reset: torch.Tensor,
    recurrent_states: torch.Tensor | None,
    acc_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``RecurrentGemmaRglru._rnn_scan``: h[t] = a[t] * h[t-1] + x[t], where documents begin anew.

    Args:
        hidden_states, recurrent_gate: [batch, tokens, width].
        reset: [batch, tokens, 1], of truth values.
        recurrent_states: [batch, width].

    Returns:
        all states and the last one.
    """
    gate = recurrent_gate * ~reset
    states = _states(gate.type(acc_dtype), hidden_states.type(acc_dtype), recurrent_states)
    return states.type(hidden_states.dtype), states[:, -1]


def weighted_key_values(
    time_decay: torch.Tensor,
    time_first: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[torch.Tensor, Any]:
    """``rwkv_linear_attention_cpu``: a mean of all values so far, whose weights decay, exp(key) each.

    Numerator and denominator are recurrences, both divided by exp of the largest exponent so far, which is
    max(key[s] + (t - s) * decay), a running maximum of key[s] - s * decay. It cancels out.

    Args:
        time_decay, time_first: [width].
        key, value: [batch, tokens, width].
        state: numerator, denominator and largest exponent before the first token, [batch, width] each.
    """
    output_dtype = key.dtype
    decay = -torch.exp(time_decay)
    key = key.float()
    numerator, denominator, largest = state or (None, None, torch.zeros_like(key[:, 0], dtype=torch.float32) - 1e38)
    since = torch.arange(key.shape[1], device=key.device, dtype=decay.dtype)[:, None] * decay
    exponents = torch.cummax(key - since, dim=1).values
    exponents = torch.maximum(exponents, (largest + decay)[:, None]) + since
    before = torch.cat([largest[:, None].to(exponents.dtype), exponents[:, :-1]], dim=1)
    factors, weights = torch.exp(before + decay - exponents), torch.exp(key - exponents)
    weighted = weights * value
    numerators = _states(factors.to(weighted.dtype), weighted, numerator)
    denominators = _states(factors, weights, denominator)
    at_output = torch.maximum(before, key + time_first)
    old, new = torch.exp(before - at_output), torch.exp(key + time_first - at_output)
    above = old * _before(numerators, numerator) + new * value
    below = old * _before(denominators, denominator) + new
    output = (above / below).to(output_dtype)
    if return_state or state is not None:
        state = [numerators[:, -1], denominators[:, -1], exponents[:, -1]]
    return output, state


def _before(states: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
    """The state before each token."""
    first = torch.zeros_like(states[:, :1]) if initial is None else initial[:, None]
    return torch.cat([first, states[:, :-1]], dim=1)


def delta_rule_in_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_kernel_options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``torch_chunk_gated_delta_rule`` of Qwen and OLMo, ``chunk_kimi_delta_attention`` of Kimi, Bailing and GLM.

    Args:
        query, key: [batch, tokens, heads, key width]; fewer heads than values have serve as many of these each.
        value: [batch, tokens, heads, value width].
        g: logarithms of decays, [batch, tokens, heads], for each entry of a key [batch, tokens, heads, key width].
        beta: [batch, tokens, heads].
        chunk_size: does not change the result.
        initial_state: [batch, heads, key width, value width].

    Returns:
        [batch, tokens, heads, value width], and the last state if that is asked for.
    """
    members = value.shape[2] // key.shape[2]
    if members > 1:
        query, key = query.repeat_interleave(members, dim=2), key.repeat_interleave(members, dim=2)
    tensors = (query, key, value, g, beta, initial_state)
    epsilon = _NORM_EPSILON if use_qk_l2norm_in_kernel else None
    output, state = torch.ops.meshwright.gated_delta_rule(*map(_single, tensors), key.shape[-1] ** -0.5, epsilon)
    return output.to(query.dtype), state if output_final_state else None


def delta_rule_by_token(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_kernel_options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``torch_recurrent_gated_delta_rule``, ``recurrent_kimi_delta_attention``: the same, as it generates."""
    return delta_rule_in_chunks(
        query, key, value, g, beta, 64, initial_state, output_final_state, use_qk_l2norm_in_kernel
    )


def _single(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Float64 rounded to float32, which these functions compute in; the operator widens what is narrower."""
    return tensor.to(torch.float32) if tensor is not None and tensor.dtype == torch.float64 else tensor
