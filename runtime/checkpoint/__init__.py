"""Training checkpoints that any plan can resume: whole tensors by name, stored as the rectangles that ranks hold."""

from runtime.checkpoint.manager import Checkpoint, CheckpointManager
from runtime.checkpoint.stock_files import NO_STATE, save, write_stock_optimizer
from runtime.checkpoint.stock_optimizer import load_optimizer, stock_order, whole_optimizer_state

__all__ = [
    "NO_STATE",
    "Checkpoint",
    "CheckpointManager",
    "load_optimizer",
    "save",
    "stock_order",
    "whole_optimizer_state",
    "write_stock_optimizer",
]
