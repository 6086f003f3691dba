"""Whether a model's logits behind a token read from the cache are those behind a whole prompt.

The cache has more slots than there are tokens. A model that takes the number of slots for that of tokens (as local
attention of GPT-Neo does) would generate something else, without an error: the last token of the first prompt is
therefore run a second time, by the program of a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

#: Inputs of the model with a number for each token of the prompt, and what prompts are filled up with: their last one.
BY_TOKEN = ("input_ids", "position_ids", "token_type_ids", "decoder_input_ids", "decoder_position_ids")


def last_token(
    prompt: Mapping[str, torch.Tensor], token: Mapping[str, torch.Tensor], *, mask: str, rows: torch.Tensor | None
) -> dict[str, torch.Tensor] | None:
    """The call that asks for the last token of a prompt, with the inputs that the token behind it has.

    Args:
        prompt, token: the two calls.
        mask: name of the input with a number for each token so far.
        rows: what the cache's rows were replaced by between the two; None: they were not.

    Returns:
        None where the calls tell too little.
    """
    inputs = {}
    for name, tensor in token.items():
        if name not in (*BY_TOKEN, mask):
            inputs[name] = tensor
            continue
        if name not in prompt:
            return None
        before = prompt[name] if name == mask else prompt[name][..., -1:]
        # Of position_ids there may be several kinds, before the rows.
        inputs[name] = before if rows is None or before.shape[-2] != len(rows) else before.index_select(-2, rows)
    return inputs


def check_same_logits(expected: torch.Tensor, logits: torch.Tensor, *, dtype: torch.dtype, what: str) -> None:
    """Raise ValueError if logits [rows, 1, vocabulary] differ by more than rounding in ``dtype`` explains."""
    expected, logits = expected.double(), logits.double()
    is_finite = expected.isfinite() & logits.isfinite()
    difference = torch.where(is_finite, logits - expected, 0).norm(dim=-1)
    spread = torch.where(is_finite, expected - expected[is_finite].mean(), 0).norm(dim=-1)
    if bool((difference > _tolerance(dtype) * spread).any()):
        raise ValueError(what)


def _tolerance(dtype: torch.dtype) -> float:
    """0.0017 in float32, which models compute parts in that are called float64; 0.44 in bfloat16."""
    return float(5 * max(torch.finfo(torch.float32).eps, torch.finfo(dtype).eps) ** 0.5)
