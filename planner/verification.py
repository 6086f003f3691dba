"""``planner.verify``: every rank of a plan in one process, against the model on one device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cost_models import Cluster
from passes.capture import keep_float64
from passes.ir.graph import Graph
from passes.ir.types import I, MeshShape
from passes.plan import CollectivePlan, Plan
from planner.comparison import (
    ADAM_EPSILON,
    ADAM_EPSILON_LOW_PRECISION,
    NEGLIGIBLE,
    NEGLIGIBLE_LOW_PRECISION,
    Comparison,
    difference,
    differences,
    gradients_of,
    largest_of,
    make_gradients_dense,
    single_loss,
)
from planner.compilation import parallelise, parallelise_step
from planner.planning import as_cluster, as_mesh_shape, plan_graph
from planner.planning import plan as make_plan
from planner.targets import asks_for_step, fixed_axes
from planner.verify_report import VerifyReport
from runtime.counter import CommunicationCounter
from runtime.layout import VirtualLayout, virtual_ranks
from runtime.parallel_module import ParallelModule
from runtime.step.places import VirtualPlaces

#: Largest relative error that passes, by dtype of the parameters.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
MAX_RANKS = 64


def verify(
    model: Any,
    mesh: MeshShape | Mapping[str, int] | str | Plan | Path,
    *,
    batch: Mapping[str, torch.Tensor] | tuple[Any, ...] | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    steps: int = 3,
    dtype: str | torch.dtype = "float64",
    loss_fn: Callable[..., Any] | None = None,
    cluster: Cluster | str | None = None,
    seed: int = 0,
    learning_rate: float = 1e-3,
    fuse: bool = True,
    **options: Any,
) -> VerifyReport:
    """Train ``model`` for some steps on one device and, sharded, on every rank of ``mesh``, all in this process.

    Args:
        model: an ``nn.Module`` with real weights, a Hugging Face config, or a name from the config library.
        mesh: the mesh to plan for, or a plan (or the path of one). At most 64 ranks. With a pipeline axis, or
            ``fix`` or ``forbid`` among the options, a whole step is planned.
        batch: one global batch, arguments by name or a tuple; made up for Hugging Face models from ``batch_size``
            (default 8) and ``seq_len`` (default 16), with uneven numbers of ignored labels.
        steps: AdamW steps after which the weights are compared.
        dtype: of the parameters in this run.
        cluster: the hardware to plan for (default: slow devices on fast links, so that a tiny model is split too).
        fuse: plan and run fused operators; a plan that is given says so itself.
        options: constraints, memory_limit and the like, for the search.

    Returns:
        a report; ``.ok`` says whether loss, all gradients and all weights agree, ``.table()`` shows it.

    Raises:
        ValueError: for more than 64 ranks, and whatever planning refuses.
    """
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    given = _given_plan(mesh)
    if given is None:
        shape = as_mesh_shape(mesh)  # type: ignore[arg-type]
        _check_size(shape.num_devices, shape)
    single = real_module(model, dtype=wanted, seed=seed)
    if batch is None:
        batch = _random_batch(single, batch_size=batch_size or 8, seq_len=seq_len or 16, seed=seed)
    batch = _cast(batch, wanted)
    if given is None:
        hardware = slow_devices(shape.num_devices)
        if cluster is not None:
            hardware = as_cluster(cluster, num_devices=shape.num_devices)
        if asks_for_step(shape, options):
            fix = {**fixed_axes(shape), **options.pop("fix", {})}
            with keep_float64():
                given = make_plan(
                    single, hardware, example_inputs=batch, loss_fn=loss_fn, fix=fix, fuse=fuse, **options
                )
    if given is not None:
        _check_size(given.step.num_devices if given.step is not None else given.mesh.num_devices, given.mesh)

    def find_plan(graph: Graph, pinned: Plan | None) -> Plan:
        return plan_graph(graph, hardware, mesh=shape, pinned=pinned, fuse=fuse and pinned is None, **options)

    with keep_float64(), virtual_ranks(shape if given is None else given.mesh) as layout:
        whole = copy.deepcopy(single)
        if given is not None and given.step is not None:
            places = VirtualPlaces(layout, num_stages=given.step.axes["pp"])
            parallel = parallelise_step(whole, places, plan=given, loss_fn=loss_fn, example_inputs=batch)
        else:
            parallel = parallelise(whole, layout, plan=given, planner=find_plan, loss_fn=loss_fn, example_inputs=batch)
        comparisons, disagreement, counted = _compare(
            single, parallel, batch, steps=steps, loss_fn=loss_fn, learning_rate=learning_rate
        )
        return VerifyReport(
            type(single).__name__,
            parallel.plan,
            TOLERANCES.get(wanted, 1e-4),
            tuple(comparisons),
            disagreement,
            counted,
            parallel.source,
        )


def _check_size(num_ranks: int, mesh: MeshShape) -> None:
    if num_ranks > MAX_RANKS:
        raise ValueError(f"verify runs at most {MAX_RANKS} ranks in one process, mesh {mesh} has {num_ranks}")


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch), {})


def slow_devices(num_devices: int) -> Cluster:
    """A cluster on which splitting always pays: without latency or launches, computing slower than communicating."""
    return Cluster.uniform(num_devices, flops=1e9, memory_bandwidth=1e9, latency=0.0, bandwidth=1e10)


def _compare(
    single: nn.Module,
    parallel: ParallelModule,
    batch: Any,
    *,
    steps: int,
    loss_fn: Callable[..., Any] | None,
    learning_rate: float,
) -> tuple[list[Comparison], float, tuple[CollectivePlan, ...]]:
    """Both models trained side by side."""
    layout = parallel.layout
    assert isinstance(layout, VirtualLayout)
    args, kwargs = _arguments(batch)
    found: list[Comparison] = []
    counted: tuple[CollectivePlan, ...] = ()
    exact = all(tensor.dtype == torch.float64 for tensor in single.parameters())
    negligible = NEGLIGIBLE if exact else NEGLIGIBLE_LOW_PRECISION
    epsilon = ADAM_EPSILON if exact else ADAM_EPSILON_LOW_PRECISION
    single_optimizer, optimizer = (
        torch.optim.AdamW(module.parameters(), lr=learning_rate, eps=epsilon, foreach=False)
        for module in (single, parallel)
    )
    for step in range(steps):
        with layout.plain():
            loss = single_loss(single, args, kwargs, loss_fn)
            loss.backward()
            make_gradients_dense(single)
        counter = CommunicationCounter(layout.device_mesh) if step == 0 else None
        with counter or contextlib.nullcontext():
            sharded = parallel.train_step(*args, **kwargs)
        found.append(difference("loss", f"loss {step}", _whole(sharded, layout), loss.detach()))
        if counter is not None:
            counted = counter.collectives
            gradients = parallel.full_gradients()
            wanted = gradients_of(single)
            found += differences("gradients", gradients, wanted, floor=negligible * largest_of(wanted))
        with layout.plain():
            single_optimizer.step()
            single_optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    # A step moves a weight by about the learning rate, whatever its gradient: errors count against at least that.
    state = parallel.full_state_dict()
    found += differences(f"weights after {steps} steps", state, single.state_dict(), floor=learning_rate)
    return found, parallel._shards.disagreement(), counted


def _whole(loss: torch.Tensor, layout: VirtualLayout) -> torch.Tensor:
    """A loss that virtual ranks hold, or that has left them already."""
    return loss if type(loss) is torch.Tensor else layout.join(loss, _invariant(layout))


def _invariant(layout: VirtualLayout) -> tuple[str, ...]:
    return (I,) * len(layout.mesh.names)


def real_module(model: Any, *, dtype: torch.dtype, seed: int) -> nn.Module:
    """The model with real weights, without dropout, on the CPU, in ``dtype``."""
    if isinstance(model, nn.Module):
        module = copy.deepcopy(model)
    else:
        from planner.library import build_model, load_config

        config = load_config(str(model)) if isinstance(model, (str, Path)) else model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = build_model(config, dtype=str(dtype).removeprefix("torch."), device="cpu")
    if any(tensor.is_meta for tensor in module.parameters()):
        raise ValueError("verify compares numbers: the model has parameters on the meta device, give it real weights")
    module = module.to("cpu", dtype=dtype)
    for part in module.modules():
        # Dropout draws other numbers on each layout: no comparison is possible with it.
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0
    _without_dropout(module)
    return module.train()


def _without_dropout(module: nn.Module) -> None:
    """Also the dropout probabilities that models keep as plain attributes or in their config."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)
    config = getattr(module, "config", None)
    for name, value in list(vars(config).items()) if config is not None else []:
        if isinstance(value, float) and ("drop" in name or name.endswith("_pdrop")):
            setattr(config, name, 0.0)


def _random_batch(module: nn.Module, *, batch_size: int, seq_len: int, seed: int) -> dict[str, torch.Tensor]:
    if not hasattr(module, "config"):
        raise ValueError(
            f"batch is missing: {type(module).__name__} is not a Hugging Face model, so none can be made up"
        )
    from planner.library import random_batch

    return random_batch(module, batch_size=batch_size, seq_len=seq_len, seed=seed)


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return (
        {name: cast(value) for name, value in batch.items()} if isinstance(batch, Mapping) else tuple(map(cast, batch))
    )


def _given_plan(mesh: Any) -> Plan | None:
    if isinstance(mesh, Path) or (isinstance(mesh, str) and mesh.endswith(".json")):
        return Plan.load(mesh)
    return mesh if isinstance(mesh, Plan) else None
