"""What models of torch and transformers say of themselves: how they are built, initialised and stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def build_from_config(kind: Any, config: Any, **options: Any) -> Any:
    """A transformers model of class ``kind``; ``from_config``, which is public, takes the automatic classes alone."""
    return kind._from_config(config, **options)


def initialiser_of_model(model: nn.Module) -> Callable[[nn.Module], Any] | None:
    """What a transformers model fills the weights of one of its modules by."""
    return getattr(model, "_init_weights", None)


def initialiser_of_module(module: nn.Module) -> Callable[[], Any] | None:
    """What fills a module's own weights; ``nn.MultiheadAttention`` and the transformers of torch hide theirs."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def tensors_to_ignore(model: nn.Module) -> list[str]:
    """Patterns of names that a transformers model has no tensor for, though its files have."""
    return list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def prepare_cache_by(model: Any, prepare: Callable[..., None]) -> None:
    """Let ``prepare`` put the cache into the arguments of a transformers model's ``generate``."""
    model._prepare_cache_for_generation = prepare


def expand_inputs_by(model: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let what ``change`` makes of a transformers model's own function repeat rows for beams."""
    model._expand_inputs_for_generation = change(model._expand_inputs_for_generation)


def generates_with_cache(model: Any) -> bool:
    """Whether a transformers model generates with keys and values of all tokens alone."""
    return bool(model._supports_default_dynamic_cache()) and not getattr(model, "_is_stateful", False)
