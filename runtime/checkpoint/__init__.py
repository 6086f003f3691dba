"""Training checkpoints that any plan can resume: whole tensors by name, stored as the rectangles that ranks hold."""

from runtime.checkpoint.manager import Checkpoint, CheckpointManager
from runtime.checkpoint.stock_optimizer import load_optimizer, whole_optimizer_state

__all__ = ["Checkpoint", "CheckpointManager", "load_optimizer", "whole_optimizer_state"]
