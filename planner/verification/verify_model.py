"""``planner.verify``: every rank of a plan in one process, against the model on one device."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cost_models import Cluster
from cost_models.checked_numbers import check_whole_number
from cost_models.efficiency import PERFECT, Curve, Efficiency
from cost_models.hardware import DeviceGroup
from passes.capture import keep_float64
from passes.capture.call_arguments import CallArguments, ExampleInputs, arguments_of
from passes.capture.independent_copy import independent_copy
from passes.ir.graph import Graph
from passes.ir.types import I, MeshShape
from passes.pipeline_cut import DATA_AXES
from passes.plan import Plan
from passes.plan.parameter_dtype import float_dtype
from passes.torch_compat.operators import tree_map
from passes.torch_compat.random_seeds import seeds_without_effect
from planner.compilation import parallelise
from planner.planning import as_cluster, as_mesh_shape, plan_graph
from planner.planning import plan as make_plan
from planner.targets import check_options
from planner.verification.comparison import Comparison
from planner.verification.draws_of_plans import unused_draws
from planner.verification.rounding import judged_by_rounding
from planner.verification.training_run import Results, TrainingCase, compare, run_alone, run_sharded
from planner.verification.verify_report import VerifyReport
from planner.whole_step.candidates.demands import asks_for_step, fixed_axes, without_defaults
from runtime.execution.expert_load import DroppedTokens
from runtime.execution.mixed_precision import cast_floats
from runtime.execution.rank_mapping import VirtualPlaces
from runtime.kernels.routing_listeners import listening
from runtime.mesh.communication_counter import CommunicationCounter
from runtime.mesh.layout import VirtualLayout, virtual_ranks
from runtime.module.parallel_module import ParallelModule

#: Largest relative error that passes, by dtype of the parameters.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}
MAX_RANKS = 64
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def verify(
    model: Any,
    mesh: MeshShape | Mapping[str, int] | str | Plan | Path | None = None,
    *,
    batch: ExampleInputs | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    steps: int = 3,
    dtype: str | torch.dtype | None = None,
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
        mesh: the mesh to plan for, or a plan (or the path of one); None for whatever mesh is best on ``cluster``. At
            most 64 ranks. Without it, with a pipeline axis, or ``fix`` or ``forbid`` among the options, a whole step is
            planned.
        batch: one global batch, arguments by name or a tuple; made up for Hugging Face models from ``batch_size``
            (default 8) and ``seq_len`` (default 16), with uneven numbers of ignored labels.
        steps: AdamW steps after which the weights are compared, at least one.
        dtype: of the parameters in this run. Default: a plan's own; else float64, or float32 if the model cannot
            compute in float64 (the report says so).
        cluster: the hardware to plan for (default: slow devices on fast links, so that a tiny model is split too).
        fuse: plan and run fused operators; a plan that is given says so itself.
        seed: of weights and batches that are made up, and of the random numbers that forward draws: on one device, too,
            those of plans. (Modules of dropout are switched off.)
        options: constraints, memory_limit and the like, for the search.

    Returns:
        a report; ``.ok`` says whether losses, norms, all gradients and all weights agree, ``.table()`` shows it. An
        error above the tolerance is let pass only if the model alone shows as much when the last bits of its weights
        are changed (``planner.verification.rounding``).

    Raises:
        ValueError: for more than 64 ranks, less than one step, a plan of 16-bit parameters, a model that draws random
            numbers that one device cannot draw as plans do, and whatever planning refuses.
    """
    for name, value in (("steps", steps), ("batch_size", batch_size), ("seq_len", seq_len)):
        if value is not None:
            check_whole_number(name, value, at_least=1)
    if "example_inputs" in options:
        raise ValueError("verify takes the global batch that it trains on as batch=, not example_inputs=")
    own = {"constraints", "memory_limit"}
    options = without_defaults(options)
    check_options({name: value for name, value in options.items() if name not in own}, step=None, of="verify")
    user_plan = _given_plan(mesh)
    if user_plan is not None and dtype is None:
        dtype = dtype_to_compare_in(user_plan)
    shape: MeshShape | None = None
    hardware = None if cluster is None else as_cluster(cluster, num_devices=_size_of(mesh))
    if user_plan is None and mesh is None:
        if hardware is None:
            raise ValueError("there is nothing to verify on: give a mesh, a plan, or a cluster to plan a step for")
        _check_size(hardware.num_devices, f"cluster {hardware.name}")
    elif user_plan is None:
        shape = as_mesh_shape(mesh)  # type: ignore[arg-type]
        _check_size(shape.num_devices, f"mesh {shape}")
        hardware = hardware or slow_devices(shape.num_devices)

    def subject_in(dtype: torch.dtype) -> _Subject:
        single = real_module(model, dtype=dtype, seed=seed)
        own_batch = batch
        if own_batch is None:
            own_batch = _random_batch(single, batch_size=batch_size or 8, seq_len=seq_len or 16, seed=seed)
        training = TrainingCase(_cast(own_batch, dtype), loss_fn, steps, learning_rate, seed)
        # The graph of a plan that is given was captured with torch's own default.
        return _Subject.trained(single, training, dtype, widens=user_plan is None and dtype == torch.float64)

    subject = _in_widest_dtype(subject_in, dtype)
    single, training = subject.model, subject.training
    if user_plan is None and (shape is None or asks_for_step(shape.names, options)):
        fix = options.pop("fix", None)
        fix = fix if shape is None else fixed_axes(shape.as_dict(), fix)
        with subject.precision():
            user_plan = make_plan(
                single, hardware, example_inputs=training.batch, loss_fn=loss_fn, fix=fix, fuse=fuse, **options
            )
    if user_plan is not None:
        _check_size(user_plan.step.num_devices, f"mesh {user_plan.mesh}")

    def find_plan(graph: Graph, pinned: Plan | None) -> Plan:
        assert shape is not None and hardware is not None
        return plan_graph(graph, hardware, mesh=shape, pinned=pinned, fuse=fuse and pinned is None, **options)

    def on_all_ranks(subject: _Subject) -> VerifyReport:
        single, training = subject.model, subject.training
        mesh_of_ranks = shape if user_plan is None else user_plan.mesh
        assert mesh_of_ranks is not None
        with subject.precision(), virtual_ranks(mesh_of_ranks) as layout:
            num_stages = 1 if user_plan is None else user_plan.step.axes.get("pp", 1)
            places = VirtualPlaces(layout, num_stages=num_stages)
            parallel = parallelise(
                independent_copy(single),
                places,
                plan=user_plan,
                planner=find_plan if user_plan is None else None,
                loss_fn=loss_fn,
                example_inputs=training.batch,
            )
            zero_ranks = 0 if user_plan is None else user_plan.step.zero_ranks
            counter = CommunicationCounter(layout.device_mesh, data_axes=DATA_AXES, zero_ranks=zero_ranks)
            drops = DroppedTokens()
            results = run_sharded(
                parallel,
                training,
                subject.alone,
                like=single,
                whole=lambda value: _whole(value, layout),
                first_step=_counting(counter, drops),
            )
            disagreement = parallel._state.disagreement()
            if training.draws_as_plans:
                _check_draws(parallel, training, subject.alone)
        return VerifyReport(
            type(single).__name__,
            parallel.plan,
            subject.tolerance,
            tuple(subject.judged(results)),
            disagreement,
            counter.collectives,
            parallel.source,
            subject.note,
            drops_tokens=drops.any,
        )

    try:
        return on_all_ranks(subject)
    except _UnusedDraws as found:
        return on_all_ranks(subject.without_draws(found.places))


@contextlib.contextmanager
def _counting(counter: CommunicationCounter, drops: DroppedTokens) -> Iterator[None]:
    with counter, listening(drops.note):
        yield


class NotFiniteError(ValueError):
    """The model trains to infinities or NaN on one device."""


@dataclass(frozen=True)
class _Subject:
    """The subject of a verification: a model with its weights before training, and results of unsharded training.

    Attributes:
        widens: tensors that the model makes without a dtype are float64.
    """

    model: nn.Module
    training: TrainingCase
    alone: Results
    dtype: torch.dtype
    widens: bool
    note: str = ""

    @classmethod
    def trained(cls, model: nn.Module, training: TrainingCase, dtype: torch.dtype, *, widens: bool) -> _Subject:
        with keep_float64(new_too=widens):
            subject = cls(model, *_trained_alone(model, training), dtype, widens)
        unusable = next((loss for loss in (*subject.alone.losses, *subject.alone.norms) if not loss.isfinite()), None)
        if unusable is not None:
            raise NotFiniteError(
                f"on one device the loss of {type(model).__name__} or the norm of its gradients is {float(unusable):g} "
                f"in {str(dtype).removeprefix('torch.')}, with which nothing can be compared: "
                "give a batch, or weights, of a finite loss"
            )
        return subject

    def without_draws(self, unused: frozenset[int]) -> _Subject:
        """The same subject trained anew, where the draws that programs leave out have no numbers."""
        training = dataclasses.replace(self.training, unused_draws=unused)
        with self.precision():
            alone = run_alone(independent_copy(self.model), training)
        return dataclasses.replace(self, training=training, alone=alone)

    def precision(self) -> keep_float64:
        """What the sharded run is computed in, as the unsharded one was."""
        return keep_float64(new_too=self.widens)

    @property
    def tolerance(self) -> float:
        return TOLERANCES.get(self.dtype, 1e-4)

    def judged(self, results: Results) -> list[Comparison]:
        """Compare a sharded run with the unsharded one."""
        exact = self.dtype == torch.float64
        with self.precision():
            return judged_by_rounding(
                compare(results, self.alone, self.training, exact=exact),
                self.model,
                self.training,
                self.alone,
                tolerance=self.tolerance,
                exact=exact,
            )


def _trained_alone(model: nn.Module, training: TrainingCase) -> tuple[TrainingCase, Results]:
    """The results of training on one device; of a model that draws, of numbers that plans draw.

    Raises:
        ValueError: if it draws what cannot be compared.
    """
    for case in (training, dataclasses.replace(training, draws_as_plans=True)):
        before = torch.get_rng_state()
        with seeds_without_effect():
            results = run_alone(independent_copy(model), case)
        if torch.equal(torch.get_rng_state(), before):
            return case, results
        torch.set_rng_state(before)
    raise ValueError(
        f"{type(model).__name__} draws random numbers in forward that on one device cannot be those of a plan (dropout "
        "inside of attention, or an operator that torch alone has), so verify cannot compare them. Pass the numbers as "
        'inputs, or compare with planner.compile on the mesh "dp=1", which draws what every plan draws'
    )


class _UnusedDraws(Exception):
    """A program leaves out the draws at these places of one device's, which were counted there."""

    def __init__(self, places: frozenset[int]) -> None:
        super().__init__(places)
        self.places = places


def _check_draws(parallel: ParallelModule, training: TrainingCase, alone: Results) -> None:
    """Raise if random operators are not those of one device, in the same order: then numbers differ.

    Raises:
        _UnusedDraws: if they are those of one device without some.
        ValueError: if they are others, or if it is not known which are left out.
    """
    graph = parallel._engine.graph_of(*training.arguments)
    shapes = tuple(tuple(node.outputs[0].shape) for node in graph.nodes if node.draw is not None)
    unused = unused_draws(alone.draws, shapes)
    if unused is not None and unused == training.unused_draws:
        return
    if unused is not None and not training.unused_draws:
        raise _UnusedDraws(unused)
    raise ValueError(
        f"{graph.model_name} draws tensors of shapes {list(alone.draws)} in forward on one device, but its program "
        f"{list(shapes)} (what nothing depends on is left out), so verify cannot compare them: drop the draws that "
        "nothing uses"
    )


def dtype_to_compare_in(plan: Plan) -> torch.dtype | None:
    """The dtype of a plan's parameters: in another one a model casts elsewhere, and its program is another.

    Raises:
        ValueError: for a plan of 16-bit parameters.
    """
    name = float_dtype(plan)
    if name in ("bfloat16", "float16"):
        raise ValueError(
            f"the plan is of {name} parameters, in which equal programs differ too much to be told from wrong ones: "
            "verify its mesh and choices (--mesh, --fix), or a plan made with --dtype float64"
        )
    return None if name is None else getattr(torch, name)


def _in_widest_dtype(subject_in: Callable[[torch.dtype], _Subject], dtype: str | torch.dtype | None) -> _Subject:
    """The subject in ``dtype``; without one in float64, or in float32 if the model runs in that alone.

    Raises:
        RuntimeError: if the model does not run in the dtype that was asked for, or in any.
        NotFiniteError: if it trains to infinities or NaN there.
    """
    if dtype is not None:
        return subject_in(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    try:
        return subject_in(torch.float64)
    except (RuntimeError, NotImplementedError, NotFiniteError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        try:
            subject = subject_in(torch.float32)
        except (RuntimeError, NotImplementedError, NotFiniteError):
            raise error from None
    note = f"compared in float32, as the model does not train in float64 on one device either: {reason}"
    return dataclasses.replace(subject, note=note)


def _size_of(mesh: Any) -> int:
    """Devices of a mesh; 1 for what says nothing of them."""
    if mesh is None or _is_plan(mesh):
        return 1
    return as_mesh_shape(mesh).num_devices


def _check_size(num_ranks: int, where: str) -> None:
    if num_ranks > MAX_RANKS:
        raise ValueError(f"verify runs at most {MAX_RANKS} ranks in one process, {where} has {num_ranks}")


def slow_devices(num_devices: int) -> Cluster:
    """A cluster on which splitting always pays: without latency or launches, computing slower than communicating.

    Operators read and write 1 GB/s; what is copied beside collectives runs at the bandwidth of the memory, for nothing.
    """
    cluster = Cluster.uniform(num_devices, flops=1e9, memory_bandwidth=1e13, latency=0.0, bandwidth=1e10)
    slow = Efficiency(bytes=Curve.constant(1e-4))
    efficiency = {"matmul": slow, "elementwise": slow, "exchange_copy": PERFECT}
    device = dataclasses.replace(cluster.device, efficiency=efficiency)
    return dataclasses.replace(cluster, groups=(DeviceGroup(device, num_devices),))


def _whole(loss: torch.Tensor, layout: VirtualLayout) -> torch.Tensor:
    """The value of a loss, on virtual ranks or as a plain tensor."""
    return loss if type(loss) is torch.Tensor else layout.join(loss, _invariant(layout))


def _invariant(layout: VirtualLayout) -> tuple[str, ...]:
    return (I,) * len(layout.mesh.names)


def real_module(model: Any, *, dtype: torch.dtype, seed: int) -> nn.Module:
    """The model with real weights, without dropout, on the CPU, in ``dtype``."""
    if isinstance(model, nn.Module):
        module = independent_copy(model)
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
        # On one device torch would draw other masks.
        if isinstance(part, _DROPOUTS):
            part.p = 0.0
    _without_dropout(module)
    return module.train()


def _without_dropout(module: nn.Module) -> None:
    """Set dropout probabilities to 0, also those in plain attributes or in the config."""
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


def _cast(batch: ExampleInputs, dtype: torch.dtype) -> CallArguments:
    """A batch on the CPU whose floating-point tensors, in nested entries too (a detector's labels), have this dtype."""

    def on_cpu(leaf: Any) -> Any:
        return leaf.cpu() if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf

    args, kwargs = cast_floats(tree_map(on_cpu, arguments_of(batch)), dtype)
    return CallArguments(*args, **kwargs)


def _given_plan(mesh: Any) -> Plan | None:
    if not _is_plan(mesh):
        return None
    return mesh if isinstance(mesh, Plan) else Plan.load(mesh)


def _is_plan(mesh: Any) -> bool:
    return isinstance(mesh, (Plan, Path)) or (isinstance(mesh, str) and mesh.endswith(".json"))
