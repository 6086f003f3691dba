"""``accelerate.Accelerator`` on a plan: ``prepare`` shards the model as the planner decides.

    from planner.integrations.accelerate import Accelerator  # was: from accelerate import Accelerator

A step has as many samples as under DDP: those of a loader's batch on each process. Every process reads all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from planner.compilation import compile
from planner.integrations import accelerate_state
from planner.integrations.global_batches import with_global_batches
from planner.integrations.process_count import ProcessCount
from planner.integrations.torch_compat.framework_internals import (
    prepared_loaders,
    prepared_models,
)
from planner.targets import Target
from runtime.agreement.ranks_together import gathered
from runtime.module.parallel_module import ParallelModule
from runtime.parameters.adoption import hand_over


class Accelerator(accelerate.Accelerator):
    """An accelerator that plans: dp, tp, ZeRO, recomputation are the plan's choice, and no model is wrapped.

    Args:
        args: of ``accelerate.Accelerator``.
        mesh: as in ``planner.compile``; None for the mesh that is best for the processes there are, planned at the
            model's first call.
        plan_options: other arguments of ``planner.compile``: ``example_inputs``, ``loss_fn``, ``fix``, …
        kwargs: of ``accelerate.Accelerator``; ``mixed_precision="bf16"`` is the plan's precision.

    Raises:
        ValueError: for a mixed precision that is not bf16, and for another framework's plugin.
    """

    def __init__(
        self, *args: Any, mesh: Target | None = None, plan_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        for name in (
            "deepspeed_plugin",
            "deepspeed_plugins",
            "fsdp_plugin",
            "megatron_lm_plugin",
            "parallelism_config",
        ):
            if kwargs.get(name) is not None:
                raise ValueError(f"{name} is another way to split a model, which the plan does: drop one of them")
        super().__init__(*args, **kwargs)
        if self.mixed_precision not in ("no", "bf16"):
            raise ValueError(
                f"mixed_precision={self.mixed_precision!r}: plans compute in bf16 or the model's own dtype"
            )
        self.mesh = mesh
        self.plan_options = dict(plan_options or {})
        atexit.register(_join_before_the_end, weakref.ref(self))

    @property
    def num_processes(self) -> int:
        """As accelerate's, to count samples; not to scale values, which are those of all processes already."""
        count = int(super().num_processes)
        return ProcessCount(count) if count > 1 else count

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As accelerate's; a model becomes a ``ParallelModule``, and optimizers over its parameters train that."""
        models = [item for item in args if isinstance(item, nn.Module) and not isinstance(item, ParallelModule)]
        planned = {id(model): self._planned(model) for model in models}
        for optimizer in args:
            if isinstance(optimizer, torch.optim.Optimizer):
                for model in models:
                    inner = getattr(optimizer, "optimizer", optimizer)  # as accelerate wraps it
                    hand_over(inner, dict(model.named_parameters()), planned[id(model)])
        return super().prepare(*(planned.get(id(item), item) for item in args), device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> ParallelModule:
        """The model, sharded; a ``ParallelModule`` stays as it is."""
        parallel = model if isinstance(model, ParallelModule) else self._planned(model)
        if not any(parallel is other for other in prepared_models(self)):
            prepared_models(self).append(parallel)
        parallel.let_join("save_state", self._save_state)
        return parallel

    @property
    def prepared_model(self) -> ParallelModule:
        """The parallel module that was prepared last.

        Raises:
            ValueError: if there is none.
        """
        for model in reversed(prepared_models(self)):
            if isinstance(model, ParallelModule):
                return model
        raise ValueError("no model has been prepared yet: call accelerator.prepare(model, …)")

    def _planned(self, model: nn.Module) -> ParallelModule:
        options = dict(self.plan_options)
        if self.mixed_precision == "bf16":
            options.setdefault("precision", "bfloat16")
        parallel = compile(model, self.mesh, **options)
        parallel.count_as_trained()
        return parallel

    def prepare_data_loader(
        self, data_loader: DataLoader[Any], device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> DataLoader[Any]:
        """A loader of global batches, the same on every process: ``batch_size`` samples for each of them."""
        if getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement=device_placement)
        sampler = getattr(data_loader.batch_sampler, "sampler", None)
        is_seeded = self.use_seedable_sampler and isinstance(sampler, RandomSampler)
        data_seed = self.dataloader_config.data_seed
        prepared = prepare_data_loader(
            with_global_batches(
                data_loader,
                1 if self.split_batches else int(self.num_processes),
                share_order=not is_seeded,
                before=self.wait_for_models,
            ),
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self._gathered(torch.initial_seed())[0] if is_seeded and data_seed is None else data_seed,
            non_blocking=self.non_blocking,
            use_stateful_dataloader=self.use_stateful_dataloader,
        )
        prepared_loaders(self).append(prepared)
        return prepared

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """By the norm of the whole model, if these are all parameters of one; on every process the same."""
        tensors = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for model in prepared_models(self):
            if isinstance(model, ParallelModule) and {*map(id, tensors)} == {*map(id, model.parameters())}:
                return model.clip_grad_norm_(max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(tensors, max_norm, norm_type)

    def gather(self, tensor: Any) -> Any:
        """What every process has already: batches and outputs are whole on each."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """``input_data``, of an epoch's last batch as many rows as that has samples."""
        remainder = self.gradient_state.remainder
        if not self.gradient_state.end_of_dataloader or remainder <= 0:
            return input_data
        if isinstance(input_data, list) and not any(isinstance(item, torch.Tensor) for item in input_data):
            return input_data[:remainder]
        return recursively_apply(lambda tensor: tensor[:remainder] if tensor.dim() else tensor, input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """``scale`` × what every process has already."""
        return recursively_apply(lambda one: one * scale, tensor)

    def check_trigger(self) -> bool:
        """Whether any process has set the trigger since it was checked."""
        return any(self._gathered(bool(super().check_trigger())))

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """``tensor``: it is of one size on all processes."""
        return tensor

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[None]:
        """A context in which nothing is done: every process has all batches."""
        return nullcontext()

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """``model``, which nothing wraps; of what stands for one, that."""
        if isinstance(model, ParallelModule):
            return model
        stands_for = getattr(model, "stands_for", None)
        return super().unwrap_model(model, *args, **kwargs) if stands_for is None else stands_for

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """Whole weights under the original names, on every process."""
        return model.full_state_dict() if isinstance(model, ParallelModule) else super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | Path | None = None, **options: Any) -> str:  # type: ignore[override]
        """Save models, optimizers, schedulers and registered objects; any other mesh can load them.

        All ranks must call it, or come to another call of the model or of this accelerator, where they join in.

        Raises:
            ValueError: without a folder or a model.
        """
        folder: Path = self._joined("save_state", self._save_state, output_dir=output_dir)
        return str(folder)

    def _save_state(self, output_dir: str | Path | None) -> Path:
        folder = accelerate_state.folder_to_save(self, output_dir)
        accelerate_state.save(self, folder)
        return folder

    def load_state(self, input_dir: str | Path | None = None, **options: Any) -> None:  # type: ignore[override]
        """Load what ``save_state`` wrote, on whatever mesh; what has no plan yet is loaded as far as it can be, and
        the optimizers when it has one.

        Raises:
            ValueError: without a folder, and if what is there does not fit.
        """
        accelerate_state.load(self, accelerate_state.folder_to_load(self, input_dir))

    def wait_for_everyone(self) -> None:
        """Wait for all ranks; meanwhile join in what one of them calls alone (``save_pretrained``, say)."""
        self.wait_for_models()
        super().wait_for_everyone()

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """As accelerate's; what the first process does alone of a model, the others join in."""
        with self._first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """As ``main_process_first``, with the first process of each host."""
        with self._first(self.is_local_main_process):
            yield

    @contextlib.contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.wait_for_everyone()
        yield
        if is_first:
            self.wait_for_everyone()

    def wait_for_models(self) -> None:
        """The part of ``wait_for_everyone`` that waits for ranks of the models' meshes."""
        for model in prepared_models(self):
            if isinstance(model, ParallelModule):
                model.wait_for_ranks()

    def end_training(self) -> None:
        """As accelerate's, once all ranks have come to it."""
        self.wait_for_everyone()
        super().end_training()

    def _gathered(self, value: Any) -> list[Any]:
        """``value`` of every rank, once all have joined in what one of them calls alone."""
        self.wait_for_models()
        return gathered(value)

    def _joined(self, name: str, function: Callable[..., Any], **arguments: Any) -> Any:
        """``function(**arguments)``, in which ranks join that make another call."""
        models = [model for model in prepared_models(self) if isinstance(model, ParallelModule)]
        if not models:
            return function(**arguments)
        return models[0].call_joined(name, function, **arguments)


def _join_before_the_end(accelerator: weakref.ref[Accelerator]) -> None:
    """Before a script ends by itself on this rank, join in what it saves on another one."""
    ended = accelerator()
    if ended is None or hasattr(sys, "last_value") or not dist.is_initialized():
        return
    with contextlib.suppress(RuntimeError, ValueError):  # others that failed say why
        ended.wait_for_models()
