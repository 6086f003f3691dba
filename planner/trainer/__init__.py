"""Training in three functions: ``planner.Trainer`` with ``fit``, ``evaluate`` and ``predict``."""

from planner.trainer.optimizers import decay_groups, warmup_cosine
from planner.trainer.trainer import FitResult, Trainer

__all__ = ["FitResult", "Trainer", "decay_groups", "warmup_cosine"]
