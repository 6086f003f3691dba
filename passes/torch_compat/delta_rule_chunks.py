"""The gated delta rule in chunks of tokens: products of matrices, one triangular solution, and a scan over chunks.

Of the tokens of a chunk (rows of ``q``, ``k``, ``v``; ``beta`` a column, ``c`` the sums of the log decays so far, ``n``
the chunk's last token), from the state ``S`` before it (Yang et al. 2025, "Gated Delta Networks", section 3.3):

    A[i, j] = beta[i] sum(k[i] * k[j] * exp(c[i] - c[j]))   for j < i
    P[i, j] = sum(q[i] * k[j] * exp(c[i] - c[j]))           for j <= i
    U, W = (1 + A)⁻¹ (beta * v), (1 + A)⁻¹ (beta * k * exp(c))
    N = U - W S                                             what each token writes
    output = (q * exp(c)) S + P N
    S' = exp(c[n]) * S + (k * exp(c[n] - c))ᵀ N

N and S' are computed chunk after chunk, all else for all chunks at once. Tensors are [chunks, batch · heads, tokens of
a chunk, width]. No exponent is above 0, so long as no log decay is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from passes.torch_compat.delta_rule_sizes import CHUNKS


class DeltaRuleInputs(NamedTuple):
    """The arguments of ``gated_delta_rule``.

    Attributes:
        query, key: [batch, tokens, heads, K]; ``value``: [batch, tokens, heads, V].
        log_decay: [batch, tokens, heads], or one for each entry of a key, [batch, tokens, heads, K].
        beta: [batch, tokens, heads].
        initial: the first state, [batch, heads, K, V]; None for zeros.
        scale: of the queries.
        epsilon: added to the squared length that queries and keys are normed by; None: they are taken as they are.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    initial: torch.Tensor | None
    scale: float
    epsilon: float | None

    @property
    def by_token(self) -> tuple[torch.Tensor, ...]:
        """All but the state, of which each token has its own."""
        return self.query, self.key, self.value, self.log_decay, self.beta


class _Chunks(NamedTuple):
    """The inputs, in the wide type; queries and keys normed, queries scaled. ``decay``: ``c``, of width 1 or K.

    ``norms``: what queries and keys were multiplied by to be normed; None where they are as they came.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor] | None = None


class _Products(NamedTuple):
    """``pairs``: A before beta, and P (dim 2 of [.., 2, tokens, tokens]); ``system``: A; ``solution``: U and W."""

    pairs: torch.Tensor
    system: torch.Tensor
    solution: torch.Tensor


class _Scanned(NamedTuple):
    """The state before each chunk, that behind the last one, and what each token writes: S, S', N."""

    states: torch.Tensor
    final: torch.Tensor
    written: torch.Tensor


def wide_type(*tensors: torch.Tensor) -> torch.dtype:
    """What is computed in: at least float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def delta_rule(inputs: DeltaRuleInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """``gated_delta_rule``, by operators that have a gradient."""
    chunks, products, scanned = _computed(inputs)
    read = torch.matmul(chunks.query * chunks.decay.exp(), scanned.states)
    output = read + torch.matmul(products.pairs[:, :, 1], scanned.written)
    batch, tokens, heads, _ = inputs.value.shape
    return _by_token(output, batch, tokens, heads), scanned.final.unflatten(0, (batch, heads))


def delta_rule_gradients(
    of_output: torch.Tensor, of_final: torch.Tensor, inputs: DeltaRuleInputs
) -> tuple[torch.Tensor, ...]:
    """Gradients of the six tensors, in their dtypes. All but the inputs is computed again."""
    batch, tokens, heads, _ = inputs.value.shape
    chunks, products, scanned = _computed(inputs)
    above = _in_chunks(of_output, chunks.key.shape[2], chunks.key.dtype)
    of_written, of_behind, of_initial = _scan_gradients(chunks, products, above, of_final.flatten(0, 1))
    gradients = _chunk_gradients(chunks, products, scanned, above, of_written, of_behind)
    of_query, of_key = gradients.query * inputs.scale, gradients.key
    if chunks.norms is not None:
        of_query = _of_normed(of_query, chunks.query / inputs.scale, chunks.norms[0])
        of_key = _of_normed(of_key, chunks.key, chunks.norms[1])
    by_chunk = (of_query, of_key, *gradients[2:5])
    results = [_by_token(gradient, batch, tokens, heads) for gradient in by_chunk]
    of_first = of_initial.unflatten(0, (batch, heads)).to(
        (of_final if inputs.initial is None else inputs.initial).dtype
    )
    return *(result.view(source.shape).to(source.dtype) for result, source in zip(results, inputs.by_token)), of_first


def _computed(inputs: DeltaRuleInputs) -> tuple[_Chunks, _Products, _Scanned]:
    """What outputs and gradients are made of."""
    chunks = _chunked(inputs)
    products = _products(chunks)
    return chunks, products, _scan(chunks, products, _first_state(inputs, chunks.key.dtype))


def _scan_gradients(
    chunks: _Chunks, products: _Products, above: torch.Tensor, of_state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of what each token writes, of the state behind each chunk, and of the first state.

    Args:
        above: gradient of the output, in chunks.
        of_state: of the last state.
    """
    _, weights = _split(products.solution, chunks)
    decayed, whole = _decayed_to_last(chunks)
    of_written = torch.matmul(products.pairs[:, :, 1].mT, above)
    of_states = torch.matmul((chunks.query * chunks.decay.exp()).mT, above)
    of_behind, of_state = torch.empty_like(of_states), of_state.to(of_states.dtype)
    for place in reversed(range(len(of_states))):
        of_behind[place] = of_state
        of_written[place].baddbmm_(decayed[place], of_state)
        of_state = of_states[place].addcmul_(whole[place], of_state)
        of_state = of_state.baddbmm_(weights[place].mT, of_written[place], alpha=-1)
    return of_written, of_behind, of_state


def _chunk_gradients(
    chunks: _Chunks,
    products: _Products,
    scanned: _Scanned,
    above: torch.Tensor,
    of_written: torch.Tensor,
    of_behind: torch.Tensor,
) -> _Chunks:
    """Gradients of the inputs in chunks; that of ``decay`` is the log decays'."""
    states, written = scanned.states, scanned.written
    grown, left = chunks.decay.exp(), (chunks.decay[:, :, -1:] - chunks.decay).exp()
    of_solution = torch.cat([of_written, -torch.matmul(of_written, states.mT)], -1)
    of_right = torch.linalg.solve_triangular(products.system.mT, of_solution, upper=True, unitriangular=True)
    of_system = -torch.matmul(of_right, products.solution.mT).tril_(-1)
    of_value, of_grown = _split(of_right, chunks)

    of_pairs = torch.stack([chunks.beta * of_system, torch.matmul(above, written.mT).tril_(-1)], 2)
    of_rows, of_columns = _pair_gradients(of_pairs, _rows(chunks), chunks.key, chunks.decay)
    of_query = torch.addcmul(of_rows[:, :, 1], grown, torch.matmul(above, states.mT))
    of_grown = grown * of_grown
    of_key = torch.addcmul(of_rows[:, :, 0], chunks.beta, of_grown)
    of_left = left * torch.matmul(written, of_behind.mT)
    of_beta = _sum_of(chunks.value * of_value) + _sum_of(chunks.key * of_grown)
    of_beta += _sum_of(products.pairs[:, :, 0] * of_system)

    of_last = grown[:, :, -1] * (states * of_behind).sum(-1)
    of_decay = _decay_gradient(chunks, of_query, of_key - of_columns, of_left, of_last)
    own = _sum_of(above * written)
    of_key = torch.addcmul(of_key.add_(of_columns).add_(of_left), own, chunks.query)
    of_query = torch.addcmul(of_query, own, chunks.key)
    return _Chunks(of_query, of_key, chunks.beta * of_value, of_decay, of_beta)


def _decay_gradient(
    chunks: _Chunks, of_query: torch.Tensor, of_key: torch.Tensor, of_left: torch.Tensor, of_last: torch.Tensor
) -> torch.Tensor:
    """The gradient of the log decays, which needs no derivation of its own.

    c[i] stands beside row i of ``q`` and of ``k`` as a row, -c[j] beside row j of ``k`` as a column, so what each
    exponent gets is entry times gradient of these. What a token has with itself, and the last one with the state, has
    exponents of 0: it is left out, as it would cancel but for rounding, which is more than the rest where decays are
    strong.

    Args:
        of_query, of_key: gradients of rows less those of columns, without what tokens have with themselves.
        of_left: of keys that go into the state.
        of_last: of the chunk's whole decay, by the state's.
    """
    moved = chunks.key * of_left
    moved[:, :, -1] = 0.0
    gradient = torch.addcmul(chunks.query * of_query, chunks.key, of_key).sub_(moved)
    gradient[:, :, -1] += moved.sum(2) + of_last
    if chunks.decay.shape[-1] == 1:
        gradient = _sum_of(gradient)
    return gradient.flip(2).cumsum(2).flip(2)


def _sum_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.sum(-1, keepdim=True)


def _first_state(inputs: DeltaRuleInputs, dtype: torch.dtype) -> torch.Tensor:
    """The state before the first token, [batch · heads, K, V]."""
    if inputs.initial is not None:
        return inputs.initial.flatten(0, 1).to(dtype)
    batch, _, heads, width = inputs.value.shape
    return torch.zeros(batch * heads, inputs.key.shape[-1], width, dtype=dtype, device=inputs.value.device)


def _chunked(inputs: DeltaRuleInputs) -> _Chunks:
    size = min(CHUNKS[inputs.log_decay.dim()], max(1, inputs.key.shape[1]))
    dtype, epsilon, norms = wide_type(*inputs.by_token), inputs.epsilon, None
    query, key, value, log_decay, beta = (_in_chunks(tensor, size, dtype) for tensor in inputs.by_token)
    if epsilon is not None:
        norms = _inverse_norm(query, epsilon), _inverse_norm(key, epsilon)
        query, key = query * norms[0], key * norms[1]
    return _Chunks(query * inputs.scale, key, value, log_decay.cumsum(2), beta, norms)


def _in_chunks(tensor: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[batch, tokens, heads(, width)] → [chunks, batch · heads, size, width (1)]; missing tokens are zeros."""
    if tensor.dim() == 3:
        tensor = tensor[..., None]
    batch, tokens, heads, width = tensor.shape
    chunks = max(1, math.ceil(tokens / size))
    if chunks * size > tokens:
        tensor = F.pad(tensor, (0, 0, 0, 0, 0, chunks * size - tokens))
    tensor = tensor.reshape(batch, chunks, size, heads, width).permute(1, 0, 3, 2, 4)
    return tensor.to(dtype).reshape(chunks, batch * heads, size, width)


def _by_token(tensor: torch.Tensor, batch: int, tokens: int, heads: int) -> torch.Tensor:
    """[chunks, batch · heads, size, width] → [batch, tokens, heads, width]."""
    chunks, _, size, width = tensor.shape
    tensor = tensor.reshape(chunks, batch, heads, size, width).permute(1, 0, 3, 2, 4)
    return tensor.reshape(batch, chunks * size, heads, width)[:, :tokens].contiguous()


def _inverse_norm(tensor: torch.Tensor, epsilon: float) -> torch.Tensor:
    return torch.rsqrt(_sum_of(tensor.square()) + epsilon)


def _of_normed(gradient: torch.Tensor, normed: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The gradient of what was multiplied by ``inverse`` to be normed."""
    return inverse * torch.addcmul(gradient, normed, _sum_of(normed * gradient), value=-1)


def _rows(chunks: _Chunks) -> torch.Tensor:
    """Rows of A, which are keys, and of P: [chunks, batch · heads, 2, tokens, K]."""
    return torch.stack([chunks.key, chunks.query], 2)


def _split(solution: torch.Tensor, chunks: _Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    """What stands for values, and what for keys."""
    values, keys = solution.split([chunks.value.shape[-1], chunks.key.shape[-1]], -1)
    return values, keys


def _products(chunks: _Chunks) -> _Products:
    pairs = _pairs(_rows(chunks), chunks.key, chunks.decay)
    system = (chunks.beta * pairs[:, :, 0]).tril(-1)
    right = torch.cat([chunks.value * chunks.beta, chunks.key * (chunks.beta * chunks.decay.exp())], -1)
    # The diagonal is taken to be ones.
    return _Products(pairs, system, torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True))


def _decayed_to_last(chunks: _Chunks) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys as the last token of their chunk sees them, and what is left of a state behind it, [.., K or 1, 1]."""
    last = chunks.decay[:, :, -1:]
    return chunks.key * (last - chunks.decay).exp(), last.mT.exp()


def _scan(chunks: _Chunks, products: _Products, state: torch.Tensor) -> _Scanned:
    values, weights = _split(products.solution, chunks)
    decayed, whole = _decayed_to_last(chunks)
    states, written = [], []
    for place in range(len(values)):
        states.append(state)
        written.append(torch.baddbmm(values[place], weights[place], state, alpha=-1))
        state = torch.baddbmm(whole[place] * state, decayed[place].mT, written[-1])
    return _Scanned(torch.stack(states), state, torch.stack(written))


def _pairs(rows: torch.Tensor, columns: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    """sum(rows[i] * columns[j] * exp(decay[i] - decay[j])) for j <= i: [..., 2, tokens, tokens], zeros above."""
    tokens = rows.shape[-2]
    if decay.shape[-1] == 1:
        products = torch.matmul(rows.flatten(2, 3), columns.mT).unflatten(2, (2, tokens))
        return products * _weights(decay)[:, :, None]
    by_column = []
    for place in range(tokens):
        weighed = columns[:, :, place, None] * (decay[:, :, place:] - decay[:, :, place, None]).exp()
        by_column.append(F.pad((rows[:, :, :, place:] * weighed[:, :, None]).sum(-1), (place, 0)))
    return torch.stack(by_column, -1)


def _pair_gradients(
    gradient: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, decay: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of rows and columns from those of pairs, which are zeros above the diagonal."""
    if decay.shape[-1] == 1:
        gradient = (gradient * _weights(decay)[:, :, None]).flatten(2, 3)
        of_rows = torch.matmul(gradient, columns).unflatten(2, (2, rows.shape[-2]))
        return of_rows, torch.matmul(gradient.mT, rows.flatten(2, 3))
    of_rows, of_columns = torch.zeros_like(rows), torch.empty_like(columns)
    for place in range(rows.shape[-2]):
        weights = (decay[:, :, place:] - decay[:, :, place, None]).exp()
        weighed = gradient[:, :, :, place:, place, None] * weights[:, :, None]
        of_rows[:, :, :, place:] += weighed * columns[:, :, None, place, None]
        of_columns[:, :, place] = (weighed * rows[:, :, :, place:]).sum((2, 3))
    return of_rows, of_columns


def _weights(decay: torch.Tensor) -> torch.Tensor:
    """exp(decay[i] - decay[j]) for j <= i."""
    size = decay.shape[2]
    hidden = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu(1)
    return (decay - decay.mT).masked_fill(hidden, -math.inf).exp()
