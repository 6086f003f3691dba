"""``torch.compile`` of emitted blocks, with their collectives and their recomputation in the graph.

A block is compiled once for all its copies: weights are arguments. What runs again is marked in the graph, by the same
policies as ``runtime.program_tools.recompute``, and the partitioner of ``torch.compile`` decides as
``passes.autograd.recompute_policies`` says of ``compiled``: under ``none``, cheap operators may run again too; gathered
tensors and those exchanged are sent again under ``selective`` and ``regather``, reductions only under ``full``.

A block that calls ``runtime.ops`` (random draws, sharded cross-entropy: they look up groups) is compiled around those
calls, under ``none`` and ``full``; else it runs uncompiled. So do recurrent layers, which torch's compiler leaves alone
too. Nothing is compiled while a ``TorchDispatchMode`` is active
(``verify``'s ``LocalTensorMode``, a ``CommunicationCounter``).
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from passes.autograd.kernels import EXPENSIVE, WRITE_OVER_PRODUCTS
from passes.ir.types import I, P, R
from passes.plan.step_plan import ON_HOST
from runtime import ops
from runtime.program_tools.compiled_collectives import Collectives, joint_axis
from runtime.program_tools.recompute import POLICIES, recomputed
from runtime.programs.program import Block
from runtime.torch_compat.dispatcher import in_hidden_device_contexts, outside_device_contexts

#: Operators of ``runtime.ops`` that keep no count and know no group: plain torch, part of a graph.
_TRACED = frozenset({"grouped_query_attention"})
_numbers = itertools.count()
_Key = tuple[DeviceMesh, str, str]
_compiled: weakref.WeakKeyDictionary[type[Block], dict[_Key, Callable[..., Any]]] = weakref.WeakKeyDictionary()


def as_compiled(
    block: Block, device_mesh: DeviceMesh, *, recompute: str = "none", backend: str = "inductor"
) -> Callable[..., Any]:
    """``block(*tensors)``, compiled; all blocks of one class share what is compiled for their shapes and dtypes.

    Args:
        block: an emitted block with its weights.
        device_mesh: the mesh whose axes its collectives name; each rank compiles for its own place.
        recompute: one of ``runtime.program_tools.recompute.POLICIES``; do not wrap the result in ``recomputed``.
        backend: of ``torch.compile``.

    Raises:
        ValueError: for an unknown policy.
    """
    if recompute not in POLICIES:
        raise ValueError(f"unknown recompute policy {recompute!r}: expected one of {', '.join(POLICIES)}")
    if recompute == ON_HOST:
        return recomputed(as_compiled(block, device_mesh, backend=backend), recompute)
    if set(block.forward.__code__.co_names) & WRITE_OVER_PRODUCTS:
        return recomputed(block, recompute)
    if can_be_one_graph(block):
        return types.MethodType(_compiled_forward(type(block), device_mesh, recompute, backend), block)
    if recompute in ("none", "full"):
        compiled = types.MethodType(_compiled_forward(type(block), device_mesh, "none", backend), block)
        return recomputed(compiled, recompute)
    return recomputed(block, recompute)


def _compiled_forward(block: type[Block], device_mesh: DeviceMesh, recompute: str, backend: str) -> Callable[..., Any]:
    by_setting = _compiled.setdefault(block, {})
    key = (device_mesh, recompute, backend)
    if key not in by_setting:
        forward = _traceable(block.forward, device_mesh)
        by_setting[key] = _outside_device_contexts(
            torch.compile(
                _REMAKING[recompute](forward), fullgraph=_calls_no_operators(block), dynamic=False, backend=backend
            )
        )
    return by_setting[key]


def _outside_device_contexts(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Blocks make no tensors but by ``runtime.ops``: what depends on shapes alone is a constant of the program."""

    def run(*arguments: Any) -> Any:
        with outside_device_contexts():
            return compiled(*arguments)

    return run


_GATHERS = frozenset({"all_gather_into_tensor", "all_to_all_single"})
_REDUCTIONS = frozenset({"all_reduce", "reduce_scatter_tensor"})


def _selective(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _policy_of(operator.overloadpacket.__name__ in EXPENSIVE | _REDUCTIONS)


def _regather(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return _policy_of(operator.overloadpacket.__name__ not in _GATHERS | {"wait_tensor", "cat", "split"})


def _full(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Said of each operator: without, torch 2.11 keeps what functions with a backward of their own send."""
    return CheckpointPolicy.MUST_RECOMPUTE


def _policy_of(is_kept: bool) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def run(self: Block, *tensors: Any) -> Any:
        return checkpoint(forward, self, *tensors, use_reentrant=False, preserve_rng_state=False, **options)

    return run


_REMAKING: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "none": lambda forward: forward,
    "full": partial(_checkpointed, context_fn=partial(create_selective_checkpoint_contexts, _full)),
    "selective": partial(_checkpointed, context_fn=partial(create_selective_checkpoint_contexts, _selective)),
    "regather": partial(_checkpointed, context_fn=partial(create_selective_checkpoint_contexts, _regather)),
}


def can_be_one_graph(block: Block) -> bool:
    """Whether nothing in the block breaks the graph: it calls none of ``runtime.ops`` but those that are traced."""
    return _calls_no_operators(type(block))


def _calls_no_operators(block: type[Block]) -> bool:
    names = set(block.forward.__code__.co_names)
    return "ops" not in names or not names & set(ops.__all__) - _TRACED


def _traceable(function: Callable[..., Any], device_mesh: DeviceMesh) -> Callable[..., Any]:
    """An emitted function with names that mean what dynamo can trace."""
    names = {"spmd": Collectives(device_mesh), "ops": _UntracedOps(), "S": int, "R": R, "I": I, "P": P, "V": "V"}
    emitted = function.__globals__["_module"]
    module = types.ModuleType(f"{emitted.__name__}_traced_{next(_numbers)}")
    # Dynamo imports what it finds a function's names in: here those of the block, there those of the source's kernels.
    sys.modules.update({emitted.__name__: emitted, module.__name__: module})
    vars(module).update({**function.__globals__, **names, "__name__": module.__name__})
    traceable = types.FunctionType(function.__code__, vars(module), function.__name__, function.__defaults__)
    traceable.__kwdefaults__ = function.__kwdefaults__
    return traceable


class _UntracedOps:
    """``runtime.ops`` between graphs, but for what is traced."""

    def __init__(self) -> None:
        for name in ops.__all__:
            function = getattr(ops, name)
            setattr(self, name, function if name in _TRACED else torch.compiler.disable(_placed(function)))
        self.joint = torch.compiler.disable(joint_axis)


def _placed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        with in_hidden_device_contexts():
            return function(*arguments, **options)

    return run
