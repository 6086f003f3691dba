"""State of an accelerator in a folder: models, optimizers, schedules, what scripts registered; any mesh can load it."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from planner.integrations.together import ModulesTogether, OptimizersTogether
from planner.integrations.torch_compat.framework_internals import (
    hooks_before_loading,
    hooks_before_saving,
    prepared_loaders,
    prepared_models,
    prepared_optimizers,
    stateful_objects,
)
from runtime.checkpoint import CheckpointManager
from runtime.checkpoint import directory as folders
from runtime.module.parallel_module import ParallelModule

#: In the folder of a project: where accelerate numbers its states.
NUMBERED, NUMBER = "checkpoints", re.compile(r"checkpoint_(\d+)")


def folder_to_save(accelerator: Any, output_dir: str | Path | None) -> Path:
    """``output_dir``, or the project's next one; of more than the project's limit the oldest are removed.

    Raises:
        ValueError: without either, and if the next one is there already.
    """
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming:
        return _given(output_dir)
    parent = Path(accelerator.project_dir) / NUMBERED
    folder = parent / f"checkpoint_{accelerator.save_iteration}"
    if folder.exists():
        raise ValueError(
            f"{folder} exists already: set accelerator.project_configuration.iteration to the number to go on with"
        )
    accelerator.wait_for_everyone()  # before the first rank makes room
    if accelerator.is_main_process and project.total_limit is not None:
        for old in _numbered(parent)[: max(len(_numbered(parent)) + 1 - project.total_limit, 0)]:
            shutil.rmtree(old)
    return folder


def folder_to_load(accelerator: Any, input_dir: str | Path | None) -> Path:
    """``input_dir``, or the project's last one.

    Raises:
        ValueError: without either.
    """
    if input_dir is not None or not accelerator.project_configuration.automatic_checkpoint_naming:
        return _given(input_dir)
    numbered = _numbered(Path(accelerator.project_dir) / NUMBERED)
    if not numbered:
        raise ValueError(f"there is no state in {Path(accelerator.project_dir) / NUMBERED}: save one, or give a folder")
    return numbered[-1]


def _given(folder: str | Path | None) -> Path:
    if folder is None:
        raise ValueError(
            "no folder is given for the state: give one, or let accelerate number them "
            "(ProjectConfiguration(automatic_checkpoint_naming=True))"
        )
    return Path(folder).expanduser()


def _numbered(parent: Path) -> list[Path]:
    """The states of a project, oldest first."""
    folders = {int(match[1]): path for path in parent.glob("*") if (match := NUMBER.fullmatch(path.name))}
    return [folders[number] for number in sorted(folders)]


def save(accelerator: Any, folder: Path) -> None:
    """Save all that is prepared or registered; hooks get whole weights, as accelerate's own do.

    Raises:
        ValueError: without a model, and as ``CheckpointManager.save``.
    """
    models = _models(accelerator)
    hooks = hooks_before_saving(accelerator)
    if hooks:
        folder.mkdir(parents=True, exist_ok=True)
        weights = [model.full_state_dict() for model in models]
        for hook in hooks:
            hook(list(models), weights, str(folder))
        accelerator.wait_for_models()  # a hook may save on the first rank alone
    extra: dict[str, Any] = {
        name: [item.state_dict() for item in items] for name, items in stateful_objects(accelerator).items()
    }
    extra["loaders"] = [loader.state_dict() for loader in _stateful_loaders(accelerator)]
    manager = CheckpointManager(folder, keep_last=1)
    manager.save(_one_model(models), _one_optimizer(accelerator), step=accelerator.step, extra=extra)
    accelerator.project_configuration.iteration += 1


def load(accelerator: Any, folder: Path) -> None:
    """Load what ``save`` saved; models that a hook takes out of its list keep what the hook gave them.

    Raises:
        ValueError: without a model, if other objects are registered, and as ``CheckpointManager.load``.
    """
    models = _models(accelerator)
    left = list(models)
    for hook in hooks_before_loading(accelerator):
        hook(left, str(folder))
    accelerator.wait_for_models()
    taken = [model for model in models if all(model is not one for one in left)]
    manager, model, optimizer = CheckpointManager(folder), _one_model(models), _one_optimizer(accelerator)
    must_wait = optimizer is not None and not all(one.is_planned for one in models)
    with _unchanged(taken):
        checkpoint = manager.load(model, None if must_wait else optimizer)
    if must_wait:
        _load_when_planned(manager, models, optimizer, folders.step_of(checkpoint.path.name))
    accelerator.step = checkpoint.step
    groups = {**stateful_objects(accelerator), "loaders": _stateful_loaders(accelerator)}
    for name, items in groups.items():
        states = checkpoint.extra.get(name, [])
        if len(states) != len(items):
            raise ValueError(
                f"{folder} has {len(states)} {name}, and here are {len(items)}: prepare or register as many"
            )
        for item, state in zip(items, states):
            item.load_state_dict(state)


def _load_when_planned(manager: CheckpointManager, models: Sequence[ParallelModule], optimizer: Any, step: int) -> None:
    """Take an optimizer's state, which is cut as a plan says, once all models have one; it must not step before."""
    optimizers = optimizer.optimizers if isinstance(optimizer, OptimizersTogether) else [optimizer]
    handles = [one.register_step_pre_hook(_refuse_step) for one in optimizers]

    def load() -> None:
        if not handles or not all(model.is_planned for model in models):
            return
        while handles:
            handles.pop().remove()
        manager.load_optimizer(_one_model(models), optimizer, step=step)

    for model in models:
        model.when_planned(load)


def _refuse_step(*_: Any) -> None:
    raise ValueError(
        "load_state has read this optimizer's state, which waits for the plans of all prepared models, and one has not "
        "been called yet: give plan_options={'example_inputs': …}, or prepare in one accelerator what trains together"
    )


@contextlib.contextmanager
def _unchanged(models: Sequence[ParallelModule]) -> Iterator[None]:
    """A context that ends with the weights that ``models`` begin with."""
    before = [[own.tensor.detach().clone() for own in model.owned()] for model in models]
    yield
    for model, tensors in zip(models, before):
        with torch.no_grad():
            for own, tensor in zip(model.owned(), tensors, strict=True):
                own.tensor.copy_(tensor)
        model.weights_changed()


def _models(accelerator: Any) -> list[ParallelModule]:
    models = [model for model in prepared_models(accelerator) if isinstance(model, ParallelModule)]
    if not models:
        raise ValueError("no model has been prepared yet, whose state this is: call accelerator.prepare first")
    return models


def _one_model(models: Sequence[ParallelModule]) -> Any:
    return models[0] if len(models) == 1 else ModulesTogether({str(place): one for place, one in enumerate(models)})


def _one_optimizer(accelerator: Any) -> Any:
    optimizers = [getattr(one, "optimizer", one) for one in prepared_optimizers(accelerator)]
    if len(optimizers) < 2:
        return next(iter(optimizers), None)
    return OptimizersTogether(optimizers)


def _stateful_loaders(accelerator: Any) -> list[Any]:
    return [loader for loader in prepared_loaders(accelerator) if getattr(loader, "use_stateful_dataloader", False)]
