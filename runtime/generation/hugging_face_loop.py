"""``generate`` of transformers with its model replaced: what it calls runs sharded, on all ranks."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from typing import Any

import torch
from torch import nn
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast, ModelOutput, Seq2SeqLMOutput

from passes.torch_compat.module_tables import buffers_of, parameters_of
from runtime.calls.skeleton import skeleton
from runtime.execution.engine import Engine
from runtime.generation.expanded_images import images_of, with_images_expanded
from runtime.generation.generating_part import OTHERWISE, generating_part, refuse_adapters_by_row
from runtime.generation.generation_session import GenerationSession
from runtime.generation.phase_models import ENCODED, LAST, POSITION, encoded_without_values
from runtime.generation.phase_programs import Prompt
from runtime.generation.sharded_cache import ASSISTED, ShardedCache
from runtime.generation.slot_check import BY_TOKEN, check_same_logits, last_token
from runtime.torch_compat.model_internals import expand_inputs_by, generates_with_cache, prepare_cache_by

#: Slots of a cache are a multiple of this, so that few lengths have programs of their own.
SLOTS = 32
#: What ``generate`` would compute of images first, if the model said that it takes it: the program of the prompt does.
_ENCODED_AHEAD = ("mm_encoder_outputs",)
#: Caches that ``generate`` may be told to make which change no token: the sharded one stands in for any of them.
_SAME_TOKENS = (
    *("dynamic", "static", "offloaded", "offloaded_static", "sliding_window"),
    *("hybrid", "hybrid_chunked", "offloaded_hybrid", "offloaded_hybrid_chunked"),
)
_OPTIONS = ("past_key_values", "use_cache", "return_dict", "encoder_outputs", "logits_to_keep", "cache_position")


def check_generates(whole: nn.Module) -> None:
    """Raise ValueError for a model whose generation cannot be sharded."""
    model = generating_part(whole)
    if not isinstance(model, GenerationMixin):
        raise ValueError(f"generate of {type(model).__name__} is not transformers', whose loop is run: {OTHERWISE}")
    if not generates_with_cache(model):
        raise ValueError(f"{type(model).__name__} keeps another state than keys and values for each token: {OTHERWISE}")
    config: Any = model.config
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    if any("linear" in kind or "mamba" in kind or "conv" in kind for kind in kinds):
        raise ValueError(f"{type(model).__name__} has layers with a recurrent state: {OTHERWISE}")


class GeneratingModel:
    """A copy of the original, without data, whose ``generate`` runs on the programs of ``session``."""

    def __init__(self, engine: Engine, session: GenerationSession) -> None:
        self.session = session
        self.whole: Any = engine.model
        self.lean: Any = generating_part(engine.model)
        model: Any = skeleton(self.lean)
        self.model = model.eval()
        self.device = engine.layout.device
        #: Inputs of the encoder in this generation; None before it is called.
        self._source: dict[str, Any] | None = None
        self._encoded: dict[Any, Any] = {}
        for module in self.model.modules():
            tables: tuple[dict[str, Any], ...] = (parameters_of(module), buffers_of(module))
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None:  # transformers reads a model's device from these
                        empty = torch.empty(0, dtype=tensor.dtype, device=self.device)
                        table[name] = nn.Parameter(empty, False) if isinstance(tensor, nn.Parameter) else empty
        self._replace_forward()
        prepare_cache_by(self.model, self._new_cache)
        expand_inputs_by(self.model, functools.partial(with_images_expanded, self.model))
        self.has_encoder = bool(self.model.config.is_encoder_decoder)
        #: The input with a number for each token so far.
        self.mask = "decoder_attention_mask" if self.has_encoder else "attention_mask"
        if self.has_encoder:
            self.model.get_encoder = lambda *_, **__: self._encoder()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the original's, with a cache in any case; without the cache in what it returns."""
        self._source = None
        self.model.generation_config = copy.deepcopy(self.whole.generation_config)
        if self.lean is not self.whole:
            refuse_adapters_by_row(kwargs)
        result = self.model.generate(*args, **kwargs)
        if isinstance(result, ModelOutput):  # which keeps a field that is set to None
            return type(result)(**{name: value for name, value in result.items() if name != "past_key_values"})
        return result

    def _replace_forward(self) -> None:
        kind = type(self.model)
        signature = inspect.signature(kind.forward)
        names = tuple(signature.parameters)[1:]

        @functools.wraps(kind.forward)
        def forward(_: Any, *args: Any, **inputs: Any) -> Any:
            return self._forward({**dict(zip(names, args)), **inputs})

        parameters = [one for name, one in signature.parameters.items() if name not in _ENCODED_AHEAD]
        forward.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        self.model.forward = types.MethodType(forward, self.model)

    def _new_cache(self, *args: Any, **kwargs: Any) -> None:
        names = ("generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length")
        call = {**dict(zip(names, args)), **kwargs}
        config, inputs = call["generation_config"], call["model_kwargs"]
        if inputs.get("past_key_values") is not None:
            raise ValueError(f"past_key_values is a cache of another generation: {OTHERWISE}")
        if call["generation_mode"] == GenerationMode.ASSISTED_GENERATION:
            raise ValueError(f"assistant_model and prompt_lookup_num_tokens: {ASSISTED}")
        if config.cache_implementation not in (None, *_SAME_TOKENS):
            raise ValueError(
                f"cache_implementation={config.cache_implementation!r} rounds what it keeps, or is no cache of one "
                f"call, and a sharded cache stands in for others alone: drop it, or {OTHERWISE}"
            )
        # With these the tokens are the same.
        config.use_cache, config.cache_implementation, config.prefill_chunk_size = True, None, None
        inputs["past_key_values"] = ShardedCache(
            self.session,
            length=int(call["max_cache_length"]) + 1,
            num_layers=self.model.config.get_text_config(decoder=True).num_hidden_layers,
        )

    def _encoder(self) -> nn.Module:
        """The encoder, which only notes its inputs: the program of the prompt runs it."""
        lean: Any = self.lean
        real = lean.get_encoder()
        encoder = copy.copy(real)
        first = next(iter(self.model.parameters()))
        names = tuple(inspect.signature(real.forward).parameters)

        @functools.wraps(type(real).forward)
        def forward(_: Any, *args: Any, **inputs: Any) -> Any:
            named = {**dict(zip(names, args)), **inputs}
            named.pop("labels", None)  # Seq2SeqTrainer passes whole batches
            self._source = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
            key = repr({name: _description(value) for name, value in named.items()})
            if key not in self._encoded:
                self._encoded[key] = encoded_without_values(self.lean, named)
            outputs = copy.copy(self._encoded[key])
            state = outputs.last_hidden_state
            outputs.last_hidden_state = torch.zeros(state.shape, dtype=state.dtype, device=first.device)
            return outputs

        encoder.forward = types.MethodType(forward, encoder)
        return encoder

    def _forward(self, inputs: dict[str, Any]) -> Any:
        cache = inputs.get("past_key_values")
        name = "decoder_input_ids" if self.has_encoder else "input_ids"
        tokens = inputs.get(name)
        if cache is None and inputs.get("use_cache") is False and tokens is not None and tokens.shape[1] == 1:
            # Whisper asks so for the language: a prompt behind which nothing comes.
            cache = ShardedCache(self.session, length=1, num_layers=0)
            self._source = None if inputs.get("encoder_outputs") is None else self._source
        if not isinstance(cache, ShardedCache):
            raise ValueError(f"generate called the model with another cache, as guidance_scale does: {OTHERWISE}")
        if inputs.get("output_attentions") or inputs.get("output_hidden_states"):
            raise ValueError(
                "output_attentions and output_hidden_states (return_token_timestamps of Whisper asks for the first) "
                f"stay in the programs: {OTHERWISE}"
            )
        if tokens is None:
            raise ValueError(f"inputs_embeds begin no sharded generation: pass {name}, or {OTHERWISE}")
        encoded = inputs.get("encoder_outputs")
        tensors = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor) and n not in _OPTIONS}
        constants = {n: v for n, v in inputs.items() if n not in _OPTIONS and n not in tensors and v is not None}
        if cache.num_tokens == 0:
            cache.num_rows = len(tokens)
            logits = self._prompt(tensors, constants, tokens, encoded, cache.length)
            cache.begun = None if self.session.is_checked else (tensors, logits)
        elif tokens.shape[1] != 1:
            raise ValueError(f"{tokens.shape[1]} tokens at once behind a prompt: {OTHERWISE}")
        else:
            self._check(tensors, cache)
            logits = self._token(tensors, cache.num_tokens, cache.length)
        cache.num_tokens += tokens.shape[1]
        kind: Any = Seq2SeqLMOutput if self.has_encoder else CausalLMOutputWithPast
        return kind(logits=logits, past_key_values=cache)

    def _prompt(
        self, tensors: dict[str, Any], constants: dict[str, Any], tokens: torch.Tensor, encoded: Any, length: int
    ) -> torch.Tensor:
        rows, count = tokens.shape
        if self.has_encoder:
            tensors = {**self._expanded_source(rows, encoded), **tensors}
        plain = not set(tensors) - {*BY_TOKEN, "attention_mask", "decoder_attention_mask"}
        tensors = {
            name: self._filled(name, tensor, count, _rounded_prompt(count, length))
            if plain or self.has_encoder
            else tensor
            for name, tensor in tensors.items()
        }
        uneven = rows % self.session.rows_divisor != 0
        per_row = {n: len(v) // rows for n, v in images_of(self.model, tokens, tensors).items()} if uneven else {}
        tensors[LAST] = torch.tensor([count - 1])
        shape = None if encoded is None else tuple(encoded[0].shape)
        slots = -(-length // SLOTS) * SLOTS
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        return self.session.prompt(Prompt(on_host, constants, rows, slots, shape, per_row))

    def _token(self, tensors: dict[str, Any], position: int, length: int) -> torch.Tensor:
        slots = -(-length // SLOTS) * SLOTS
        if self.mask not in tensors and getattr(self.model.config, "alibi", False):
            # A mask that Falcon makes itself is not as long as the cache.
            rows = len(next(iter(tensors.values())))
            tensors = {**tensors, self.mask: torch.ones(rows, position + 1, dtype=torch.long, device=self.device)}
        tensors = {
            name: self._filled(name, tensor, position + 1, slots) if name == self.mask else tensor
            for name, tensor in tensors.items()
        }
        tensors[POSITION] = torch.tensor(position)
        return self.session.token({name: tensor.cpu() for name, tensor in tensors.items()})

    def _check(self, tensors: dict[str, Any], cache: ShardedCache) -> None:
        """Before the first token behind a prompt: whether the model may have more slots than tokens."""
        begun, cache.begun = cache.begun, None
        inputs = None if begun is None else last_token(begun[0], tensors, mask=self.mask, rows=cache.rows)
        if begun is None or inputs is None:
            return
        expected = begun[1] if cache.rows is None else begun[1].index_select(0, cache.rows)
        check_same_logits(
            expected,
            self._token(inputs, cache.num_tokens - 1, cache.length),
            dtype=self.lean.dtype,
            what=f"{type(self.lean).__name__} has other logits for a token over a cache with free slots than at the "
            f"end of a prompt: {OTHERWISE}",
        )
        self.session.is_checked = True

    def _filled(self, name: str, tensor: torch.Tensor, count: int, length: int) -> torch.Tensor:
        """An input of ``count`` tokens as one of ``length``; later tokens than all queries are never attended to."""
        is_of_encoder = self.has_encoder and not name.startswith("decoder_")
        if is_of_encoder or not (name in BY_TOKEN or name == self.mask):
            return tensor
        if name == self.mask and tensor.dim() != 2:
            raise ValueError(
                f"{name} of shape {list(tensor.shape)}: sharded generation takes [rows, tokens]; {OTHERWISE}"
            )
        return torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], length - count)], dim=-1)

    def _expanded_source(self, rows: int, encoded: Any) -> dict[str, torch.Tensor]:
        """The encoder's inputs, with a row for each beam; what it gave, where the caller passed that."""
        if self._source is None:
            if encoded is None:  # its inputs are those of the call
                return {}
            if encoded[0].is_meta:
                raise ValueError(
                    "encoder_outputs have no values, as those of a part of a parallel module: pass the encoder's "
                    "inputs to generate, whose first program runs it"
                )
            return {ENCODED: encoded[0]}
        return {
            name: tensor.repeat_interleave(rows // len(tensor), dim=0) if tensor.dim() else tensor
            for name, tensor in self._source.items()
        }


def _description(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _rounded_prompt(count: int, length: int) -> int:
    """Tokens of the program for prompts of ``count``: a power of two, so that few lengths have programs."""
    return count if count == 1 else min(length, max(16, 1 << (count - 1).bit_length()))
