"""Hugging Face models by name, built from small config files in this folder: nothing is downloaded."""

from __future__ import annotations

from planner.library.configs import config_names, load_config
from planner.library.example_batches import example_batch, example_ids, random_batch
from planner.library.models import build_model

__all__ = ["build_model", "config_names", "example_batch", "example_ids", "load_config", "random_batch"]
