"""The gated delta rule, which torch has no operator of: linear attention whose state forgets and is corrected.

The state of a head is a matrix that maps keys to values. Each token lets it decay, then moves what it gives for the
token's key towards the token's value:

    S[t] = exp(g[t]) S[t-1];  S[t] += beta[t] k[t] (v[t] - k[t]ᵀ S[t])ᵀ;  output[t] = S[t]ᵀ q[t]

One decay for a head is Gated DeltaNet (Yang et al. 2025, eq. 10), one for each entry of a key is Kimi Delta Attention
(Kimi Team 2025, eq. 1), none is DeltaNet (Schlag et al. 2021).
"""

from __future__ import annotations

from typing import Any

import torch

from passes.torch_compat.delta_rule_chunks import DeltaRuleInputs, delta_rule, delta_rule_gradients, wide_type

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor log_decay, Tensor beta, Tensor? initial, float scale, "
    "float? epsilon"
)
_TENSORS = ("query", "key", "value", "log_decay", "beta", "initial")

_LIBRARY = torch.library.Library("meshwright", "FRAGMENT")
for _schema in (
    f"gated_delta_rule({_INPUTS}) -> (Tensor, Tensor)",
    f"gated_delta_rule_gradients(Tensor of_output, Tensor of_final, {_INPUTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def check_shapes(inputs: DeltaRuleInputs) -> None:
    """Refuse tensors that do not fit together.

    Raises:
        ValueError: says which, and the shape that it must have.
    """
    key, value = inputs.key, inputs.value
    if key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            f"gated_delta_rule: key {list(key.shape)} and value {list(value.shape)} must be "
            "[batch, tokens, heads, width]"
        )
    lead, width = list(key.shape[:3]), value.shape[-1]
    expected = {
        "query": [list(key.shape)],
        "value": [[*lead, width]],
        "log_decay": [lead, list(key.shape)],
        "beta": [lead],
        "initial": [[lead[0], lead[2], key.shape[-1], width]],
    }
    tensors: dict[str, torch.Tensor | None] = {name: getattr(inputs, name) for name in _TENSORS}
    for name, shapes in expected.items():
        tensor = tensors[name]
        if tensor is not None and list(tensor.shape) not in shapes:
            raise ValueError(
                f"gated_delta_rule: {name} is {list(tensor.shape)}, expected {' or '.join(map(str, shapes))} beside "
                f"key {list(key.shape)} and value {list(value.shape)}"
            )
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"gated_delta_rule: {name} is {tensor.dtype}, expected a floating dtype")


def _run(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = DeltaRuleInputs(*arguments)
    check_shapes(inputs)
    with torch.autocast(inputs.query.device.type, enabled=False):
        return delta_rule(inputs)


def _run_gradients(of_output: torch.Tensor, of_final: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    with torch.autocast(of_output.device.type, enabled=False):
        return delta_rule_gradients(of_output, of_final, DeltaRuleInputs(*arguments))


def _shapes(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = DeltaRuleInputs(*arguments)
    check_shapes(inputs)
    value, dtype = inputs.value, wide_type(*inputs.by_token)
    batch, _, heads, width = value.shape
    state = value.new_empty((batch, heads, inputs.key.shape[-1], width), dtype=dtype)
    return value.new_empty(value.shape, dtype=dtype), state


def _shapes_of_gradients(of_output: Any, of_final: Any, *inputs: Any) -> Any:
    tensors = (*inputs[:5], of_final if inputs[5] is None else inputs[5])
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.scale, ctx.epsilon = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, of_output: torch.Tensor, of_final: torch.Tensor) -> tuple[Any, ...]:
    tensors: tuple[Any, ...] = ctx.saved_tensors
    inputs = (*tensors, ctx.scale, ctx.epsilon)
    if not torch.is_grad_enabled():
        gradients = torch.ops.meshwright.gated_delta_rule_gradients(of_output, of_final, *inputs)
        return *(None if tensor is None else each for tensor, each in zip(tensors, gradients)), None, None
    # One that is differentiated again is made of operators that have a gradient.
    places = [place for place, needed in enumerate(ctx.needs_input_grad[:6]) if needed]
    outputs, above = delta_rule(DeltaRuleInputs(*inputs)), (of_output, of_final)
    sources = [tensors[place] for place in places]
    of_sources = torch.autograd.grad(outputs, sources, above, create_graph=True, allow_unused=True)
    by_place = dict(zip(places, of_sources))
    return tuple(by_place.get(place) for place in range(8))


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("gated_delta_rule", _run, _key)
    _LIBRARY.impl("gated_delta_rule_gradients", _run_gradients, _key)
torch.library.register_fake("meshwright::gated_delta_rule", _shapes, lib=_LIBRARY)
torch.library.register_fake("meshwright::gated_delta_rule_gradients", _shapes_of_gradients, lib=_LIBRARY)
torch.library.register_autograd("meshwright::gated_delta_rule", _backward, setup_context=_save, lib=_LIBRARY)
