"""``accelerate.Accelerator`` on a plan: ``prepare`` shards the model as the planner decides.

    from planner.integrations.accelerate import Accelerator  # was: from accelerate import Accelerator

A step has as many samples as under DDP: those of a loader's batch on each process. Every process reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from planner.compilation import compile
from planner.integrations.global_batches import with_global_batches
from planner.integrations.torch_compat.framework_internals import (
    prepared_loaders,
    prepared_models,
    prepared_optimizers,
    stateful_objects,
)
from planner.targets import Target
from runtime.agreement.ranks_together import gathered
from runtime.checkpoint import CheckpointManager
from runtime.module.parallel_module import ParallelModule
from runtime.parameters.adoption import adopt


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

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As accelerate's; a model becomes a ``ParallelModule``, and optimizers over its parameters train that."""
        models = [item for item in args if isinstance(item, nn.Module) and not isinstance(item, ParallelModule)]
        planned = {id(model): self._planned(model) for model in models}
        for optimizer in args:
            if isinstance(optimizer, torch.optim.Optimizer):
                for model in models:
                    _hand_over(optimizer, model, planned[id(model)])
        return super().prepare(*(planned.get(id(item), item) for item in args), device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> ParallelModule:
        """The model, sharded; a ``ParallelModule`` stays as it is."""
        parallel = model if isinstance(model, ParallelModule) else self._planned(model)
        if not any(parallel is other for other in prepared_models(self)):
            prepared_models(self).append(parallel)
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
        return compile(model, self.mesh, **options)

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
                data_loader, 1 if self.split_batches else self.num_processes, share_order=not is_seeded
            ),
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=gathered(torch.initial_seed())[0] if is_seeded and data_seed is None else data_seed,
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
        return any(gathered(bool(super().check_trigger())))

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
        """Save the model, its optimizer, schedulers and registered objects; any other mesh can load it.

        Raises:
            ValueError: without a folder, and for several models or optimizers.
        """
        model, optimizer = self._one_of_each(output_dir)
        extra = {name: [item.state_dict() for item in items] for name, items in stateful_objects(self).items()}
        return str(CheckpointManager(str(output_dir)).save(model, optimizer, step=self.step, extra=extra).parent)

    def load_state(self, input_dir: str | Path | None = None, **options: Any) -> None:  # type: ignore[override]
        """Load what ``save_state`` wrote, on whatever mesh; a model without a plan yet needs ``example_inputs``.

        Raises:
            ValueError: without a folder, and if what is there does not fit.
        """
        model, optimizer = self._one_of_each(input_dir)
        checkpoint = CheckpointManager(str(input_dir)).load(model, optimizer)
        self.step = checkpoint.step
        for name, items in stateful_objects(self).items():
            for item, state in zip(items, checkpoint.extra[name], strict=True):
                item.load_state_dict(state)

    def _one_of_each(self, folder: str | Path | None) -> tuple[ParallelModule, torch.optim.Optimizer | None]:
        models = [model for model in prepared_models(self) if isinstance(model, ParallelModule)]
        optimizers = prepared_optimizers(self)
        if folder is None or len(models) != 1 or len(optimizers) > 1:
            raise ValueError(
                f"the state of {len(models)} models and {len(optimizers)} optimizers in folder {folder!r}: give "
                "a folder, one prepared model and at most one optimizer, or use planner.CheckpointManager for each"
            )
        optimizer = next(iter(optimizers), None)
        return models[0], getattr(optimizer, "optimizer", optimizer)


def _hand_over(optimizer: torch.optim.Optimizer, model: nn.Module, parallel: ParallelModule) -> None:
    """Let ``optimizer`` train ``parallel``, if it holds parameters of ``model``."""
    own = {id(parameter) for parameter in model.parameters()}
    inner = getattr(optimizer, "optimizer", optimizer)  # as accelerate wraps it
    if any(id(parameter) in own for group in inner.param_groups for parameter in group["params"]):
        adopt(inner, model, dict(parallel.named_parameters(remove_duplicate=False)), parallel.owned())
