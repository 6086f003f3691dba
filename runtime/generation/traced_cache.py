"""Layers of a transformers cache over buffers of a model, as programs of generation are traced with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin, EncoderDecoderCache

from runtime.generation.cache_layout import CacheTensor


class _TracedLayer(CacheLayerMixin):
    """One layer without sliding or lazy state: its length is that of the whole cache."""

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        pass

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> Any:
        return 0

    def get_max_length(self) -> int:
        return -1


class NotedLayer(_TracedLayer):
    """Tells ``note`` of the keys and values that a model caches."""

    def __init__(self, note: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self.note = note

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys, self.values = key_states, value_states
        self.note(key_states, value_states)
        return key_states, value_states


class FilledLayer(_TracedLayer):
    """The layer of a prompt: attention sees the prompt alone, and the buffers' first slots are written."""

    def __init__(self, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.buffers = buffers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for buffer, states in zip(self.buffers, (key_states, value_states)):
            buffer[:, :, : states.shape[2]] = states
        self.keys, self.values = key_states, value_states
        return key_states, value_states


class ExtendedLayer(_TracedLayer):
    """The layer of one more token: written into slot ``position`` of the buffers, attention sees all slots."""

    #: Masks must not be left out for one query: slots behind the position hold nothing.
    is_compileable = True

    def __init__(self, buffers: tuple[torch.Tensor, torch.Tensor], position: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = self.buffers = buffers
        self.position = position

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        slot = self.position.reshape(1)
        keys, values = self.buffers
        self.keys = keys.index_copy_(2, slot, key_states)
        self.values = values.index_copy_(2, slot, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.buffers[0].shape[2], 0

    def get_seq_length(self) -> Any:
        return self.position

    def get_max_length(self) -> int:
        return self.buffers[0].shape[2]


class ReadLayer(_TracedLayer):
    """The layer of cross-attention after the prompt: read only."""

    def __init__(self, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.keys, self.values = self.buffers = buffers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise ValueError("the model computes its cross-attention's keys again at every token: generate(gathered=True)")

    def get_seq_length(self) -> Any:
        return self.buffers[0].shape[2]


def noted_cache(note: Callable[..., None], *, with_encoder: bool) -> Cache:
    """A cache that calls ``note(layer, is_cross, keys, values)``."""

    def noted(is_cross: bool) -> Cache:
        numbers = iter(range(1 << 30))

        def layer() -> NotedLayer:
            number = next(numbers)
            return NotedLayer(lambda keys, values: note(number, is_cross, keys, values))

        return Cache(layer_class_to_replicate=layer)  # type: ignore[arg-type]

    return EncoderDecoderCache(noted(False), noted(True)) if with_encoder else noted(False)


def traced_cache(
    model: nn.Module, tensors: Sequence[CacheTensor], position: torch.Tensor | None, *, with_encoder: bool
) -> Cache:
    """A cache over the buffers that ``model`` has for ``tensors``.

    Args:
        position: tokens there are already; None for a prompt.
    """

    def layers(is_cross: bool) -> Cache:
        buffers: dict[int, dict[str, torch.Tensor]] = {}
        for tensor in tensors:
            if tensor.is_cross == is_cross:
                buffers.setdefault(tensor.layer, {})[tensor.part] = model.get_buffer(tensor.path)
        pairs = [(parts["keys"], parts["values"]) for _, parts in sorted(buffers.items())]
        if position is None:
            return Cache(layers=[FilledLayer(pair) for pair in pairs])
        return Cache(layers=[ReadLayer(pair) if is_cross else ExtendedLayer(pair, position) for pair in pairs])

    return EncoderDecoderCache(layers(False), layers(True)) if with_encoder else layers(False)
