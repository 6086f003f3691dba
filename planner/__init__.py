"""Meshwright: an auto-parallel planner for PyTorch.

``compile(model, mesh)`` gives a sharded module to train; ``plan(...)`` only decides, offline; ``verify(...)`` proves a
plan against one device, ``audit(...)`` recomputes what a saved plan claims;
``sweep(...)`` plans whole studies. Everything is imported at first use, so
that ``import planner`` stays quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.launch.last_words import leave_last_words

if TYPE_CHECKING:
    from cost_models import Cluster
    from cost_models.registered_schedules import register_schedule
    from passes.capture import CaptureError
    from passes.capture.call_arguments import CallArguments
    from passes.fuse.registered_fusions import register_fusion
    from passes.plan import Plan
    from passes.rules.registered_rules import register_rule
    from planner.activation_cache.activation_cache import ActivationCache
    from planner.auditing.audit import audit
    from planner.changing.freeze_policy import FreezePolicy
    from planner.changing.freezing import CacheRoom, Freezing
    from planner.compilation import compile
    from planner.elastic import Elastic
    from planner.joining import join
    from planner.planning import plan
    from planner.sweeps.run_sweep import sweep
    from planner.trainer import Trainer
    from planner.verification.verify_model import verify
    from runtime.checkpoint import CheckpointManager, load_optimizer
    from runtime.data.length_buckets import length_buckets
    from runtime.data.loader import DataLoader
    from runtime.data.packing import PackedDataset, sample_lengths
    from runtime.islands.island_ranks import Islands
    from runtime.islands.outer_training import DiLoCo
    from runtime.kernels.delta_rule import gated_delta_rule
    from runtime.kernels.recurrence import linear_recurrence
    from runtime.launch.process import init
    from runtime.module.expert_balance import balance_experts
    from runtime.module.parallel_module import ParallelModule
    from runtime.ops.random import seed
    from runtime.parameters.offloaded_optimizer import OffloadedOptimizer

#: Public name → the module that has it.
_HOMES = {
    "ActivationCache": "planner.activation_cache.activation_cache",
    "CacheRoom": "planner.changing.freezing",
    "CallArguments": "passes.capture.call_arguments",
    "CaptureError": "passes.capture",
    "CheckpointManager": "runtime.checkpoint",
    "Cluster": "cost_models",
    "DataLoader": "runtime.data.loader",
    "Elastic": "planner.elastic",
    "FreezePolicy": "planner.changing.freeze_policy",
    "Freezing": "planner.changing.freezing",
    "DiLoCo": "runtime.islands.outer_training",
    "Islands": "runtime.islands.island_ranks",
    "OffloadedOptimizer": "runtime.parameters.offloaded_optimizer",
    "PackedDataset": "runtime.data.packing",
    "ParallelModule": "runtime.module.parallel_module",
    "Plan": "passes.plan",
    "Trainer": "planner.trainer",
    "audit": "planner.auditing.audit",
    "balance_experts": "runtime.module.expert_balance",
    "compile": "planner.compilation",
    "join": "planner.joining",
    "gated_delta_rule": "runtime.kernels.delta_rule",
    "init": "runtime.launch.process",
    "length_buckets": "runtime.data.length_buckets",
    "linear_recurrence": "runtime.kernels.recurrence",
    "load_optimizer": "runtime.checkpoint",
    "plan": "planner.planning",
    "register_fusion": "passes.fuse.registered_fusions",
    "register_rule": "passes.rules.registered_rules",
    "register_schedule": "cost_models.registered_schedules",
    "sample_lengths": "runtime.data.packing",
    "seed": "runtime.ops.random",
    "sweep": "planner.sweeps.run_sweep",
    "verify": "planner.verification.verify_model",
}

# Before anything of a script's own can fail.
leave_last_words()

__all__ = [
    "ActivationCache",
    "CacheRoom",
    "CallArguments",
    "CaptureError",
    "CheckpointManager",
    "Cluster",
    "DataLoader",
    "DiLoCo",
    "Elastic",
    "FreezePolicy",
    "Freezing",
    "Islands",
    "OffloadedOptimizer",
    "PackedDataset",
    "ParallelModule",
    "Plan",
    "Trainer",
    "audit",
    "balance_experts",
    "compile",
    "gated_delta_rule",
    "init",
    "join",
    "length_buckets",
    "linear_recurrence",
    "load_optimizer",
    "plan",
    "register_fusion",
    "register_rule",
    "register_schedule",
    "sample_lengths",
    "seed",
    "sweep",
    "verify",
]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    exported = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = exported
    return exported


def __dir__() -> list[str]:
    return sorted(__all__)
