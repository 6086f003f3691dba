"""Functions of models that loop over tokens, which tracing would unroll: for its time, what they compute at once.

A function of ``LOOPS`` is replaced if its form (``recurrent_forms``) gives the same values and gradients in a trial on
small random numbers in float64: another version of a library, or a function that happens to have the name, keeps its
loop.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from passes.capture.float64 import keep_float64
from passes.capture.recurrent_forms import (
    delta_rule_by_token,
    delta_rule_in_chunks,
    gated_linear_recurrence,
    selective_scan,
    weighted_key_values,
)
from passes.capture.watch import WatchedForward
from passes.torch_compat.operators import tree_leaves
from passes.torch_compat.transforms import apart_from_trace

#: Largest difference of values or gradients in a trial, relative to the largest entry.
_TOLERANCE = 1e-9
_BATCH, _TOKENS, _WIDTH, _STATES = 2, 6, 3, 4

#: Arguments of a call by name.
Arguments = dict[str, Any]


@dataclass(frozen=True)
class TokenLoop:
    """A function that loops over tokens.

    Attributes:
        form: computes the same for all tokens at once, from the same arguments.
        examples: small calls of it, of random numbers that ``normal`` draws.
        owner: the class that has it; None for a function of a module.
        declined: arguments of calls that the function gets itself, if they are not None.
    """

    form: Callable[..., Any]
    examples: Callable[[Callable[..., torch.Tensor]], list[Arguments]]
    owner: str | None = None
    declined: frozenset[str] = frozenset()


@contextlib.contextmanager
def traced_token_loops(model: nn.Module) -> Iterator[None]:
    """Inside the block, on this thread, the loops that classes of ``model`` call are computed at once."""
    with contextlib.ExitStack() as replaced:
        for owner, name in _loops_of(model):
            replaced.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, _replaced(getattr(owner, name), LOOPS[name]))
        yield


def _loops_of(model: nn.Module) -> list[tuple[Any, str]]:
    """Modules of Python and classes that have a function of ``LOOPS``, and its name."""
    classes = dict.fromkeys(
        kind for module in model.modules() for kind in type(module).__mro__ if kind is not nn.Module
    )
    files = dict.fromkeys(sys.modules[kind.__module__] for kind in classes if kind.__module__ in sys.modules)
    return [
        (owner, name)
        for name, loop in LOOPS.items()
        for owner in (files if loop.owner is None else classes)
        if (loop.owner is None or owner.__name__ == loop.owner)
        and inspect.isfunction(function := vars(owner).get(name))
        and is_computed_by(inspect.unwrap(function), name)
    ]


def _replaced(original: Callable[..., Any], loop: TokenLoop) -> Callable[..., Any]:
    tracing = threading.get_ident()
    signature = inspect.signature(loop.form)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != tracing or any(kwargs.get(name) is not None for name in loop.declined):
            return original(*args, **kwargs)
        try:
            signature.bind(*args, **kwargs)
        except TypeError:  # an argument that the form does not know
            return original(*args, **kwargs)
        return loop.form(*args, **kwargs)

    return call


@functools.cache
def is_computed_by(function: Callable[..., Any], name: str) -> bool:
    """Whether the form of ``LOOPS[name]`` gives the values and gradients of ``function`` on its examples.

    That is on each that the function takes, and it must take one: earlier versions lack an argument or a shape.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").requires_grad_()

    with apart_from_trace(WatchedForward), torch.enable_grad(), keep_float64(new_too=True):
        calls = LOOPS[name].examples(normal)
        agreements = {_gives_the_same(function, LOOPS[name].form, call) for call in calls}
    return True in agreements and False not in agreements


def _gives_the_same(function: Callable[..., Any], form: Callable[..., Any], arguments: Arguments) -> bool | None:
    """None if the function does not take the arguments."""
    try:
        expected = _values_and_gradients(function, arguments)
    except Exception:  # whatever a function of anybody's raises
        return None
    actual = _values_and_gradients(form, arguments)
    return len(expected) == len(actual) and all(map(_is_close, actual, expected))


def _values_and_gradients(function: Callable[..., Any], arguments: Arguments) -> list[torch.Tensor]:
    outputs = [output for output in tree_leaves(function(**arguments)) if isinstance(output, torch.Tensor)]
    sources = [tensor for tensor in tree_leaves(arguments) if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
    generator = torch.Generator().manual_seed(1)
    options: Arguments = {"generator": generator, "device": "cpu"}
    above = [torch.randn(output.shape, dtype=output.dtype, **options) for output in outputs]
    gradients = torch.autograd.grad(outputs, sources, above, allow_unused=True)
    none = torch.zeros((), device="cpu")
    return [*(output.detach() for output in outputs), *(none if one is None else one for one in gradients)]


def _is_close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return bool((actual - expected).abs().max() <= _TOLERANCE * max(1.0, float(expected.abs().max())))


def _scans(normal: Callable[..., torch.Tensor]) -> list[Arguments]:
    def call(**more: Any) -> Arguments:
        return {
            "hidden_states": normal(_BATCH, _WIDTH, _TOKENS), "dt": normal(_BATCH, _WIDTH, _TOKENS),
            "A": normal(_WIDTH, _STATES), "B": normal(_BATCH, _STATES, _TOKENS), "C": normal(_BATCH, _STATES, _TOKENS),
            **more,
        }  # fmt: skip

    gated = {"D": normal(_WIDTH), "z": normal(_BATCH, _WIDTH, _TOKENS), "delta_bias": normal(_WIDTH)}
    return [call(), call(**gated, delta_softplus=True, return_last_state=True)]


def _gated(normal: Callable[..., torch.Tensor]) -> list[Arguments]:
    reset = torch.zeros(_BATCH, _TOKENS, 1, dtype=torch.bool, device="cpu")
    reset[0, 0] = reset[1, 3] = True
    return [
        {
            "self": None, "hidden_states": normal(_BATCH, tokens, _WIDTH),
            "recurrent_gate": normal(_BATCH, tokens, _WIDTH), "reset": reset[:, :tokens], "recurrent_states": state,
        }
        for tokens, state in ((_TOKENS, None), (_TOKENS, normal(_BATCH, _WIDTH)), (1, normal(_BATCH, _WIDTH)))
    ]  # fmt: skip


def _weighted(normal: Callable[..., torch.Tensor]) -> list[Arguments]:
    def call(**more: Any) -> Arguments:
        tensors = {"key": normal(_BATCH, _TOKENS, _WIDTH), "value": normal(_BATCH, _TOKENS, _WIDTH)}
        return {"time_decay": normal(_WIDTH), "time_first": normal(_WIDTH), **tensors, **more}

    before = [normal(_BATCH, _WIDTH), normal(_BATCH, _WIDTH).exp().detach(), normal(_BATCH, _WIDTH)]
    return [call(), call(return_state=True), call(state=before)]


def _delta_rules(normal: Callable[..., torch.Tensor], *, by_channel: bool = False, **options: Any) -> list[Arguments]:
    """Without a state before; with one, of normed vectors; with a head of queries and keys for two of values."""

    def call(heads: int = 2, **more: Any) -> Arguments:
        width = (_STATES,) if by_channel else ()
        return {
            "query": normal(_BATCH, _TOKENS, heads, _STATES), "key": normal(_BATCH, _TOKENS, heads, _STATES),
            "value": normal(_BATCH, _TOKENS, 2, _WIDTH), "g": -normal(_BATCH, _TOKENS, 2, *width).exp(),
            "beta": normal(_BATCH, _TOKENS, 2).sigmoid(), "initial_state": None, "output_final_state": False,
            **options, **more,
        }  # fmt: skip

    state: Arguments = {"initial_state": normal(_BATCH, 2, _STATES, _WIDTH), "output_final_state": True}
    return [call(), call(**state, use_qk_l2norm_in_kernel=True), call(heads=1)]


def _delta_loop(form: Callable[..., Any], **options: Any) -> TokenLoop:
    # Packed samples, which only kernels keep apart: the functions refuse them.
    packed = frozenset({"cu_seqlens", "seq_idx"})
    return TokenLoop(form, functools.partial(_delta_rules, **options), declined=packed)


#: Name of a function → what it computes.
LOOPS: dict[str, TokenLoop] = {
    "mamba_selective_scan": TokenLoop(selective_scan, _scans),
    "_rnn_scan": TokenLoop(gated_linear_recurrence, _gated, owner="RecurrentGemmaRglru"),
    "rwkv_linear_attention_cpu": TokenLoop(weighted_key_values, _weighted),
    "torch_chunk_gated_delta_rule": _delta_loop(delta_rule_in_chunks, chunk_size=4),
    "torch_recurrent_gated_delta_rule": _delta_loop(delta_rule_by_token),
    "chunk_kimi_delta_attention": _delta_loop(delta_rule_in_chunks, chunk_size=4, by_channel=True),
    "recurrent_kimi_delta_attention": _delta_loop(delta_rule_by_token, by_channel=True),
}
