"""What transformers' loop holds in the place of a key-value cache."""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicCache

from runtime.generation.generating_part import OTHERWISE
from runtime.generation.generation_session import GenerationSession

ASSISTED = f"assisted generation takes tokens back, which a sharded cache does not: {OTHERWISE}"


class ShardedCache(Cache):
    """Knows how long a cache is; its tensors are in the ranks' programs.

    Attributes:
        begun: the prompt's inputs and logits until the programs are checked; ``rows``: what its rows were replaced by.
    """

    is_compileable = False

    def __init__(self, session: GenerationSession, *, length: int, num_layers: int) -> None:
        super().__init__(layers=[])
        self.session, self.length, self.num_layers = session, length, num_layers
        self.num_rows = self.num_tokens = 0
        self.begun: tuple[dict[str, torch.Tensor], torch.Tensor] | None = None
        self.rows: torch.Tensor | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.session.reorder(beam_idx)
        self.rows = beam_idx if self.rows is None else self.rows.index_select(0, beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        raise ValueError(ASSISTED)

    @property
    def self_attention_cache(self) -> DynamicCache:
        """Of no tokens: Whisper takes a cache apart for what it returns, from which it is left out."""
        nothing = torch.empty(self.num_rows, 1, 0, 1)
        return DynamicCache([(nothing, nothing)] * self.num_layers)

    cross_attention_cache = self_attention_cache
