"""What transformers' Trainer and accelerate's Accelerator keep to themselves, read here alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from passes.torch_compat.module_tables import hooks_of


def prepared_models(accelerator: Any) -> list[Any]:
    """The models that an accelerator has prepared; appending counts as preparing."""
    models: list[Any] = accelerator._models
    return models


def prepared_loaders(accelerator: Any) -> list[Any]:
    """The data loaders that it has prepared; appending counts as preparing."""
    loaders: list[Any] = accelerator._dataloaders
    return loaders


def prepared_optimizers(accelerator: Any) -> list[Any]:
    """The optimizers that it has prepared."""
    optimizers: list[Any] = accelerator._optimizers
    return optimizers


def stateful_objects(accelerator: Any) -> dict[str, list[Any]]:
    """What an accelerator saves beside models and optimizers."""
    return {"schedulers": accelerator._schedulers, "objects": accelerator._custom_objects}


def hooks_before_saving(accelerator: Any) -> list[Callable[..., Any]]:
    """What scripts have registered by ``register_save_state_pre_hook``."""
    return list(accelerator._save_model_state_pre_hook.values())


def hooks_before_loading(accelerator: Any) -> list[Callable[..., Any]]:
    """What scripts have registered by ``register_load_state_pre_hook``."""
    return list(accelerator._load_model_state_pre_hook.values())


def train_batch_size(trainer: Any) -> int:
    """Samples of a batch on each process."""
    size: int = trainer._train_batch_size
    return size


def collator_for(trainer: Any) -> Callable[[Any], Any]:
    """The collator of a trainer, which drops what ``forward`` does not take."""
    collate: Callable[[Any], Any] = trainer._get_collator_with_removed_columns(trainer.data_collator)
    return collate


def count_labels(trainer: Any, batch: Any) -> Any:
    """What transformers divides the sum of a batch's losses by; None where it does not count."""
    return trainer._get_num_items_in_batch([batch], torch.device("cpu"))


def says_loss_is_scaled(trainer: Any) -> bool | None:
    """What a trainer's class says of a loss of its own: that it counts accumulated batches; None where it says nothing.

    transformers has the attribute from 5.19 on.
    """
    said: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
    return said


def on_device(trainer: Any, inputs: Any) -> dict[str, Any]:
    """A batch on the trainer's device."""
    return dict(trainer._prepare_inputs(inputs))


def moved_noise(handle: RemovableHandle, handed_over: Any, copy: Any) -> RemovableHandle:
    """NEFTune's hook on the copy of a planned model; the model that was handed over loses its own."""
    from transformers.integrations.neftune import deactivate_neftune, neftune_post_forward_hook

    deactivate_neftune(handed_over, handle)
    hooks = hooks_of(copy.get_input_embeddings(), "_forward_hooks")
    moved = RemovableHandle(hooks)
    moved.id = next(number for number, hook in hooks.items() if hook is neftune_post_forward_hook)
    return moved
