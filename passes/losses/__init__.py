"""Losses of a linear layer's output: in chunks that never hold all logits, or with the gradient in their memory."""

from passes.losses.chunked import ChunkedUnits
from passes.losses.loss_pairs import LossPair, loss_pairs
from passes.losses.reuse_marks import with_logits_reused
from passes.losses.strategies import Placed, strategies, with_chunked_losses

__all__ = [
    "ChunkedUnits",
    "LossPair",
    "Placed",
    "loss_pairs",
    "strategies",
    "with_chunked_losses",
    "with_logits_reused",
]
