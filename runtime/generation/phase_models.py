"""Models as generation calls them: a prompt, or one token more, with the cache in buffers; logits come out."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from passes.capture import capture
from passes.capture.model_copy import copy_of
from passes.capture.stand_in import OneDevice, StandIns, trace_device
from passes.torch_compat.tracing import quiet_export
from runtime.calls.skeleton import skeleton
from runtime.generation.cache_layout import CacheTensor
from runtime.generation.generating_part import generating_part, generating_path
from runtime.generation.traced_cache import noted_cache, traced_cache

#: Names of the inputs that programs of generation have beside the model's own.
LAST, POSITION, ENCODED = "last_position", "position", "encoder_last_hidden_state"


def cache_tensors(
    lean: nn.Module, tensors: Mapping[str, torch.Tensor], constants: Mapping[str, Any], *, length: int
) -> tuple[CacheTensor, ...]:
    """What a model caches when it is called with a prompt, found by a call without values.

    Args:
        lean: without data.
        tensors: a prompt's call, with rows as in the cache.
        length: slots of self-attention.

    Raises:
        ValueError: if it caches something else than one pair of keys and values a layer.
    """
    stand_ins = StandIns(trace_device())
    notes = _CacheNotes(type(lean).__name__, length)
    inputs = without_values(tensors, stand_ins)
    call = _NotedCall(copy_of(lean, stand_ins.get), inputs, constants, notes)
    try:
        with stand_ins.mode, OneDevice(stand_ins.device), torch.no_grad(), quiet_export():
            call(*inputs.values())
    except (RuntimeError, NotImplementedError):  # of an operator that is for tracing alone, or a value that is read
        with _says_what_to_do(lean):
            capture(_NotedCall(skeleton(lean), tensors, constants, notes), args=tuple(tensors.values()), training=False)
    noted = notes.tensors
    for cross in {key[0] for key in noted}:
        layers = {layer for is_cross, layer, _ in noted if is_cross == cross}
        if layers != set(range(len(layers))):
            raise ValueError(f"{type(lean).__name__} caches nothing in some of its layers: {ONLY_PAIRS}")
    if not noted:
        raise ValueError(f"{type(lean).__name__} caches nothing: {ONLY_PAIRS}")
    return tuple(noted.values())


class _CacheNotes:
    """What a model caches in a call. It has slots, so that a model that is copied to be traced writes into the same."""

    __slots__ = ("length", "model_name", "path", "tensors")

    def __init__(self, model_name: str, length: int) -> None:
        self.model_name, self.length = model_name, length
        self.begin()

    def begin(self) -> None:
        """The model is called."""
        self.path: list[str] = []
        self.tensors: dict[tuple[bool, int, str], CacheTensor] = {}

    def follow(self, model: nn.Module) -> None:
        """Keep the path of the module that runs at the end of ``path``."""
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.path.append(name))  # type: ignore[misc]
            module.register_forward_hook(lambda *_: self.path.__delitem__(-1))

    def note(self, layer: int, is_cross: bool, keys: torch.Tensor, values: torch.Tensor) -> None:
        """A layer caches these."""
        for part, states in (("keys", keys), ("values", values)):
            if states.dim() != 4 or (is_cross, layer, part) in self.tensors:
                raise ValueError(f"{self.model_name} caches {part} of shape {list(states.shape)}: {ONLY_PAIRS}")
            rows, heads, tokens, size = states.shape
            shape = (rows, heads, tokens if is_cross else self.length, size)
            self.tensors[is_cross, layer, part] = CacheTensor(self.path[-1], layer, part, is_cross, shape, states.dtype)


class _NotedCall(nn.Module):
    """A call of ``model``, which is changed, with a prompt, of flat tensors; ``notes`` tell what it caches."""

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], constants: Mapping[str, Any], notes: _CacheNotes
    ) -> None:
        super().__init__()
        self.model, self.names, self.constants, self.notes = model.eval(), tuple(inputs), constants, notes
        notes.follow(model)

    def forward(self, *tensors: torch.Tensor) -> Any:
        self.notes.begin()
        part = generating_part(self.model)
        cache = noted_cache(self.notes.note, with_encoder=_with_encoder(part))
        inputs = _with_encoded(dict(zip(self.names, tensors)))
        return part(**inputs, **self.constants, past_key_values=cache, use_cache=True)[0]


def encoded_without_values(lean: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """What the encoder of a model gives, its tensors without values."""
    stand_ins = StandIns(trace_device())
    model: Any = copy_of(lean, stand_ins.get).eval()
    with stand_ins.mode, OneDevice(stand_ins.device), torch.no_grad(), quiet_export(), _says_what_to_do(lean):
        return model.get_encoder()(**without_values(inputs, stand_ins))


@contextlib.contextmanager
def _says_what_to_do(lean: nn.Module) -> Iterator[None]:
    """Turn what tracing raises into a ValueError."""
    try:
        yield
    except Exception as error:
        why = next(iter(str(error).splitlines()), "")
        raise ValueError(
            f"{type(lean).__name__} cannot be called without values ({type(error).__name__}: {why}); "
            "generate(gathered=True) generates with the whole model on the first rank"
        ) from error


def without_values(inputs: Mapping[str, Any], stand_ins: StandIns) -> dict[str, Any]:
    """Arguments without values; without masks of padding, which change no shape."""
    return {
        name: stand_ins.fresh(value) if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
        if not name.endswith("attention_mask")
    }


ONLY_PAIRS = (
    "sharded generation has caches of keys and values [rows, heads, tokens, size] in every layer; "
    "generate(gathered=True) generates with the whole model on the first rank"
)


def prompt_model(lean: nn.Module, tensors: Sequence[CacheTensor], constants: Mapping[str, Any]) -> nn.Module:
    """The model of a prompt: fills the cache and gives the logits [rows, 1, vocabulary] at ``LAST``."""
    path, generating = generating_path(lean), generating_part(lean)
    with_encoder = _with_encoder(generating)
    takes_places = "logits_to_keep" in inspect.signature(generating.forward).parameters

    def forward(self: Any, **inputs: Any) -> torch.Tensor:
        last = inputs.pop(LAST)
        cache = traced_cache(self, tensors, None, with_encoder=with_encoder)
        options = {"logits_to_keep": last} if takes_places else {}
        arguments = {**_with_encoded(inputs), **constants, **options}
        outputs = _called(self, path, **arguments, past_key_values=cache, use_cache=True, return_dict=True)
        return outputs.logits if takes_places else outputs.logits.index_select(1, last)

    return _with_cache(lean, tensors, forward)


def token_model(
    lean: nn.Module,
    tensors: Sequence[CacheTensor],
    constants: Mapping[str, Any],
    *,
    encoder_shape: tuple[int, ...] | None,
) -> nn.Module:
    """The model of one more token in slot ``POSITION``: its logits [rows, 1, vocabulary].

    Args:
        encoder_shape: of what the encoder gave, which attention has in its cache.
    """
    path, with_encoder = generating_path(lean), _with_encoder(generating_part(lean))

    def forward(self: Any, **inputs: Any) -> torch.Tensor:
        cache = traced_cache(self, tensors, inputs.pop(POSITION), with_encoder=with_encoder)
        if encoder_shape is not None:
            inputs["encoder_outputs"] = BaseModelOutput(last_hidden_state=torch.zeros(encoder_shape))
        outputs = _called(self, path, **inputs, **constants, past_key_values=cache, use_cache=True)
        return outputs.logits  # type: ignore[no-any-return]

    return _with_cache(lean, tensors, forward)


def _called(model: nn.Module, path: str, **inputs: Any) -> Any:
    """What the module at ``path`` gives, though ``forward`` of ``model`` was replaced."""
    part = model.get_submodule(path)
    return type(part).forward(part, **inputs)


def _with_encoded(inputs: dict[str, Any]) -> dict[str, Any]:
    """A model's arguments, of inputs that may have what an encoder gave."""
    if ENCODED not in inputs:
        return inputs
    others = {name: value for name, value in inputs.items() if name != ENCODED}
    return {**others, "encoder_outputs": BaseModelOutput(last_hidden_state=inputs[ENCODED])}


def _with_encoder(lean: nn.Module) -> bool:
    return bool(getattr(lean.config, "is_encoder_decoder", False))


def _with_cache(lean: nn.Module, tensors: Sequence[CacheTensor], forward: Any) -> nn.Module:
    """A copy of ``lean`` with buffers for the cache, called by ``forward``."""
    model = skeleton(lean).eval()
    for tensor in tensors:
        owner = model.get_submodule(tensor.owner)
        if not hasattr(owner, tensor.module):
            owner.register_module(tensor.module, nn.Module())
        buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        owner.get_submodule(tensor.module).register_buffer(tensor.part, buffer, persistent=False)
    model.forward = types.MethodType(forward, model)
    return model
