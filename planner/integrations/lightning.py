"""A Lightning ``Strategy`` that plans: the modules of a ``LightningModule`` are sharded as the planner decides.

    from planner.integrations import lightning as planned

    trainer = lightning.Trainer(strategy=planned.Strategy())  # was: lightning.Trainer(strategy="ddp")

A step has as many samples as under DDP: those of a loader's batch on each process. Every process reads all of them, and
what modules return is whole on each, so ``training_step`` and what it logs are those of one process.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import strategies
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.metric import jit_distributed_available

from passes.ir.types import MeshShape
from planner.compilation import compile
from planner.integrations.global_batches import with_global_batches
from planner.integrations.planned_parts import PlannedParts
from planner.targets import Target, axis_sizes, read_target
from planner.whole_step.candidates.demands import fixed_axes
from runtime.agreement.ranks_together import gathered
from runtime.launch.process import Process, init


class PlannedStrategy(strategies.Strategy):  # type: ignore[misc]
    """Lightning's modules on a plan: dp, tp, cp, ZeRO and recomputation are the plan's choice.

    Processes are started from outside (``torchrun``), with ``devices=1`` and no other strategy. ``training_step``
    differentiates its own loss, so no pipeline is chosen; under one that ``mesh`` has it must be the module's loss.

    Args:
        mesh: as in ``planner.compile``; None for the mesh that is best for the processes there are.
        plan_options: other arguments of ``planner.compile``: ``fix``, ``constraints``, ``memory_limit``, …
        modules: names of the attributes of the ``LightningModule`` that are planned, each called as a whole; None for
            all its modules that have parameters.
    """

    def __init__(
        self,
        *,
        mesh: Target | None = None,
        plan_options: Mapping[str, Any] | None = None,
        modules: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__()
        self.plan_options = dict(plan_options or {})
        self.mesh = self._whole_step(mesh)
        self.parts = PlannedParts(modules)
        self._saved_state: list[Any] = []
        self._joined: Process | None = None
        self.global_rank = self.local_rank = 0
        self.world_size = 1

    def _whole_step(self, mesh: Target | None) -> Target | None:
        """None for axis sizes, which become fixed choices of a step that is planned at the first call."""
        target = None if mesh is None else read_target(mesh)
        if not isinstance(target, MeshShape):
            return mesh
        self.plan_options["fix"] = fixed_axes(axis_sizes(target), self.plan_options.get("fix"))
        return None

    # -- processes ------------------------------------------------------------------------------------------------

    @property
    def is_distributed(self) -> bool:
        """No: loaders keep their samplers, since every process reads all samples."""
        return False

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self._process().device

    def _process(self) -> Process:
        if self._joined is None:
            self._joined = init()
        return self._joined

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_environment(self) -> None:
        """Join the other processes; the first one logs and writes files."""
        process = self._process()
        self.global_rank, self.world_size, self.local_rank = process.rank, process.world_size, process.local_rank
        first_process: Any = rank_zero_only
        first_process.rank = self.global_rank
        super().setup_environment()

    def barrier(self, name: str | None = None) -> None:
        self.parts.wait_for_ranks()
        dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self.parts.wait_for_ranks()
        message = [obj]
        dist.broadcast_object_list(message, src=src)
        return message[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """``tensor``: outputs, and what is computed from them, are whole on every process."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """``tensor``, which every process has already."""
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether ``all`` processes decide so, or any of them."""
        self.parts.wait_for_ranks()
        decisions = gathered(bool(decision))
        return builtins.all(decisions) if all else any(decisions)

    def process_dataloader(self, dataloader: object) -> object:
        """A loader of global batches: ``batch_size`` samples for each process, in the first one's order."""
        return with_global_batches(dataloader, self.world_size) if isinstance(dataloader, DataLoader) else dataloader

    # -- planning -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Shard the modules, then make the optimizers over what they hold then."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._read_precision()
        self.model = self.precision_plugin.convert_module(self._module)
        _keep_metrics_apart(self._module)
        self.parts.plan(self._module, self._planned)
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:  # which the module may have made with itself
                self.parts.hand_over(getattr(optimizer, "optimizer", optimizer))
        self.setup_precision_plugin()

    @property
    def _module(self) -> nn.Module:
        module: nn.Module | None = self.lightning_module
        assert module is not None
        return module

    def _planned(self, module: nn.Module) -> Any:
        return compile(module, self.mesh, **self.plan_options)

    def _read_precision(self) -> None:
        """Let the plan compute in bf16, where Lightning would by autocast.

        Raises:
            ValueError: for fp16.
        """
        if isinstance(self.precision_plugin, MixedPrecision):
            if self.precision_plugin.precision != "bf16-mixed":
                raise ValueError(f"precision={self.precision_plugin.precision!r}: plans compute in bf16 (bf16-mixed)")
            self.precision_plugin = Precision()
            self.plan_options.setdefault("precision", "bfloat16")
        if (self.plan_options.get("fix") or {}).get("pp", 1) > 1:
            _clip_whole_modules(self.precision_plugin, self.parts)

    def model_to_device(self) -> None:
        """Nothing: shards are brought to their device when they are planned."""

    def teardown(self) -> None:
        """Leave the shards where they are."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights under the original names, on every process."""
        return self.parts.full_state_dict(self._module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.parts.load_full_state_dict(self._module, checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state that the optimizer would have on one process."""
        for saved, state in self._saved_state:
            if saved is optimizer:  # which has not stepped since
                return state  # type: ignore[no-any-return]
        return self.parts.optimizer_state(getattr(optimizer, "optimizer", optimizer))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep the state until the first step, when there is a plan to cut it by."""
        self._saved_state = list(zip(self.optimizers, checkpoint["optimizer_states"], strict=True))

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """A step, before which an optimizer that goes on takes its state."""

        def closure_then_state() -> Any:
            result = closure()
            for saved, state in self._saved_state:
                if saved is optimizer:  # the others' modules may have no plan yet
                    self.parts.load_optimizer(getattr(saved, "optimizer", saved), state)
            self._saved_state = [pair for pair in self._saved_state if pair[0] is not optimizer]
            return result

        return super().optimizer_step(optimizer, closure_then_state, model, **kwargs)


Strategy = PlannedStrategy


def _keep_metrics_apart(module: nn.Module) -> None:
    """Let torchmetrics in ``module`` add up nothing over processes: each has seen all samples already."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.distributed_available_fn is jit_distributed_available:
            metric.distributed_available_fn = _is_not_distributed


def _is_not_distributed() -> bool:
    return False


def _clip_whole_modules(plugin: Any, parts: PlannedParts) -> None:
    """Let ``plugin`` clip by the norm of whole modules, of which a rank has a stage, if it clips as Lightning does."""

    def clip_grad_by_norm(optimizer: Any, clip_val: float) -> None:
        parts.clip_grad_norm_(getattr(optimizer, "optimizer", optimizer), clip_val)

    if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
        plugin.clip_grad_by_norm = clip_grad_by_norm
