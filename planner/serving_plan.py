"""What generating with a model costs on a mesh: seconds to the first token and for each one more, bytes, and bounds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cost_models import Cluster
from passes.ir.types import MeshShape, local_shape
from passes.plan.serving import ServingPlan

if TYPE_CHECKING:
    import torch

    from cost_models.hardware import Device
    from passes.ir.graph import Graph, Value
    from passes.plan import Plan
    from planner.graph_cache.planned_graph import PlannedGraph
    from runtime.generation.cache_layout import CacheTensor


def plan_serving(
    model: Any,
    cluster: Cluster | str | None = None,
    *,
    prompt_len: int,
    new_tokens: int,
    batch: int,
    mesh: MeshShape | Mapping[str, int] | str | None = None,
    dtype: str | None = None,
) -> ServingPlan:
    """Price generation with ``model``; see ``planner.plan`` for ``model``, ``cluster`` and ``dtype``.

    The weights' placement is that of the forward pass of a prompt or of one token, whichever makes the answer faster;
    of those within a hundredth of the fastest, the one with the fewest bytes on a device.

    Args:
        prompt_len, new_tokens: tokens of a sample before and after; ``batch``: samples at once.
        mesh: axis sizes without a pipeline; None: tensor parallelism over all devices.

    Raises:
        ValueError: for sizes below one or beyond the model's positions, a model that does not generate over such a
            cache, and one that does not fit.
    """
    from planner.planning import as_cluster, as_mesh_shape, config_name_of

    for name, value in {"prompt_len": prompt_len, "new_tokens": new_tokens, "batch": batch}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number above zero, got {value!r}")
    shape = None if mesh is None else as_mesh_shape(mesh)
    hardware = as_cluster(cluster, num_devices=1 if shape is None else shape.num_devices)
    shape = MeshShape(("tp",), (hardware.num_devices,)) if shape is None else shape
    if "pp" in shape.names:
        raise ValueError("generation is priced on a mesh without a pipeline: drop pp")
    phases = Phases(generating_module(model, dtype=dtype), hardware, shape, prompt_len, new_tokens, batch)
    phases.check_positions()
    plans = [plan for tokens in phases.forward_lengths for plan in phases.priced(tokens)]
    room = hardware.device.usable_bytes
    fitting = [plan for plan in plans if plan.device_bytes <= room]
    if not fitting:
        raise ValueError(
            f"{min(plan.device_bytes for plan in plans) / 2**30:.1f} GiB of weights and cache do not fit in the "
            f"{room / 2**30:.1f} GiB of a device: use more devices, fewer samples or shorter answers"
        )
    best, name = fastest(fitting), config_name_of(model)
    return dataclasses.replace(
        best,
        prompt=dataclasses.replace(best.prompt, config_name=name),
        token=dataclasses.replace(best.token, config_name=name),
    )


def generating_module(model: Any, *, dtype: str | None) -> torch.nn.Module:
    """The module of a model that generates over a cache.

    Raises:
        ValueError: for one that does not.
    """
    from planner.planning import as_module
    from runtime.generation.hugging_face_loop import check_generates

    module = as_module(model, dtype=dtype).eval()
    if not callable(getattr(module, "generate", None)):
        raise ValueError(f"{type(module).__name__} has no generate: give a language model")
    check_generates(module)
    return module


def _check_positions(config: Any, prompt_len: int, new_tokens: int) -> None:
    """Raise ValueError for a sample that is longer than the model's positions; its last token is not read again."""
    from planner.library.batch_fields import check_positions

    if config.is_encoder_decoder:
        check_positions(config, prompt_len, "prompt_len")
        check_positions(config, new_tokens, "new_tokens")
    else:
        check_positions(config, prompt_len + new_tokens - 1, "prompt_len + new_tokens - 1 =")


class Phases:
    """The calls of a model in generation, as graphs on one mesh."""

    def __init__(
        self, module: torch.nn.Module, cluster: Cluster, mesh: MeshShape, prompt_len: int, new_tokens: int, batch: int
    ) -> None:
        self.module, self.cluster, self.mesh = module, cluster, mesh
        self.prompt_len, self.new_tokens, self.batch = prompt_len, new_tokens, batch
        config: Any = module.config
        self.has_encoder = bool(config.is_encoder_decoder)
        if getattr(module, "main_input_name", "input_ids") != "input_ids":
            raise ValueError(
                f"{type(module).__name__} begins with {module.main_input_name}, not with tokens: not priced"
            )
        self.encoder_shape = (batch, prompt_len, int(config.hidden_size)) if self.has_encoder else None

    def check_positions(self) -> None:
        """Raise ValueError for samples that are longer than the model's positions."""
        _check_positions(self.module.config, self.prompt_len, self.new_tokens)

    @property
    def forward_lengths(self) -> tuple[int, ...]:
        """Tokens of the forward passes that weights may be placed for; with an encoder one pass has both."""
        return (self.prompt_len,) if self.has_encoder or self.prompt_len == 1 else (self.prompt_len, 1)

    def priced(self, tokens: int) -> list[ServingPlan]:
        """Under the placements of weights that a forward pass of ``tokens`` tokens has: where a device has room for
        any, and where each has no more than its share of the weights."""
        from passes.capture import capture

        forward = capture(self.module, kwargs=self._inputs(tokens), training=False, copy_repeats=True)
        share = 1.05 * _share_of_weights(forward, self.mesh.num_devices)
        limits = dict.fromkeys((self.cluster.device.usable_bytes, min(share, self.cluster.device.usable_bytes)))
        return [plan for limit in limits if (plan := self._under(forward, limit)) is not None]

    def _under(self, forward: Graph, memory_limit: float) -> ServingPlan | None:
        from planner.planning import plan_graph
        from runtime.generation.cache_layout import bytes_of

        try:
            base = plan_graph(forward, self.cluster, mesh=self.mesh, fuse=True, memory_limit=memory_limit)
        except ValueError:
            if memory_limit == self.cluster.device.usable_bytes:
                raise
            return None  # weights that cannot be shared equally
        tensors, prompt, token = self.planned
        whole_cache = sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors)
        return ServingPlan(
            self.mesh,
            self.batch,
            self.prompt_len,
            self.new_tokens,
            self._pinned(prompt, base, tensors),
            self._pinned(token, base, tensors),
            _weight_bytes(base),
            bytes_of(tensors, base),
            first_token_bound=self._bound(self.phases[1], 0),
            token_bound=self._bound(self.phases[2], whole_cache),
        )

    @functools.cached_property
    def planned(self) -> tuple[tuple[CacheTensor, ...], PlannedGraph, PlannedGraph]:
        """The cache, and the graphs of a prompt and of a token as they are planned: with fused operators."""
        from planner.fusing import fused_for_planning
        from planner.graph_cache.planned_graph import PlannedGraph

        tensors, prompt, token = self.phases
        return tensors, PlannedGraph(*fused_for_planning(prompt)), PlannedGraph(*fused_for_planning(token))

    @functools.cached_property
    def phases(self) -> tuple[tuple[CacheTensor, ...], Graph, Graph]:
        """The cache, and the graphs of a prompt and of a token over it."""
        import torch

        from passes.capture import capture
        from runtime.generation.phase_models import LAST, POSITION, cache_tensors, prompt_model, token_model

        slots = self.new_tokens + (1 if self.has_encoder else self.prompt_len)
        inputs = self._inputs(self.prompt_len)
        tensors = cache_tensors(self.module, inputs, {}, length=slots)
        prompt = prompt_model(self.module, tensors, {})
        last = torch.zeros(1, dtype=torch.long, device="meta")
        token = token_model(self.module, tensors, {}, encoder_shape=self.encoder_shape)
        position = torch.zeros((), dtype=torch.long, device="meta")
        name = "decoder_input_ids" if self.has_encoder else "input_ids"
        return (
            tensors,
            capture(prompt, kwargs={**inputs, LAST: last}, training=False),
            capture(token, kwargs={name: self._tokens(1), POSITION: position}, training=False),
        )

    def _bound(self, graph: Graph, num_bytes: int) -> float:
        """Seconds in which all devices together read the matrices and ``num_bytes``, and multiply by the matrices."""
        device, (matrix_bytes, seconds) = self.cluster.device, _matrix_products(graph, self.cluster.device)
        return max((matrix_bytes + num_bytes) / device.memory_bandwidth, seconds) / self.mesh.num_devices

    def _tokens(self, count: int) -> torch.Tensor:
        import torch

        return torch.zeros(self.batch, count, dtype=torch.long, device="meta")

    def _inputs(self, tokens: int) -> dict[str, Any]:
        if self.has_encoder:
            return {"input_ids": self._tokens(self.prompt_len), "decoder_input_ids": self._tokens(1)}
        return {"input_ids": self._tokens(tokens)}

    def _pinned(self, planned: PlannedGraph, base: Plan, tensors: tuple[CacheTensor, ...]) -> Plan:
        """The plan of a graph over the weights as ``base`` places them, and the cache as ranks hold it."""
        from planner.planning import plan_graph
        from runtime.execution.replanning import as_seen_by
        from runtime.generation.cache_layout import planned_buffers

        pinned = dataclasses.replace(base, states={**base.states, **planned_buffers(tensors, base)})
        plan = plan_graph(planned.graph, self.cluster, mesh=self.mesh, pinned=as_seen_by(planned.graph, pinned))
        return dataclasses.replace(plan, fusion=planned.fusion)


def _weight_bytes(plan: Plan) -> int:
    import torch

    return sum(
        torch.Size(local_shape(state.shape, state.placement, plan.mesh)).numel() * getattr(torch, state.dtype).itemsize
        for state in plan.states.values()
    )


def fastest(plans: Sequence[ServingPlan]) -> ServingPlan:
    """Of those within a hundredth of the least seconds the one with the fewest bytes."""
    least = min(plan.seconds for plan in plans)
    return min((plan for plan in plans if plan.seconds <= 1.01 * least), key=lambda plan: plan.device_bytes)


def _share_of_weights(graph: Graph, num_devices: int) -> float:
    """Bytes on each device if the matrices are cut over all."""
    parameters = [state.value for state in graph.states if state.value.kind == "parameter"]
    return sum(_num_bytes(value) / (num_devices if len(value.shape) > 1 else 1) for value in parameters)


def _matrix_products(graph: Graph, device: Device) -> tuple[int, float]:
    """Bytes of the matrices (no experts, no embeddings that rows are picked from) that a call reads, and the seconds
    that one device takes to multiply by them at its peak."""
    from passes.rules import forward_flops

    matrices = {
        state.value.name: state.value
        for state in graph.states
        if state.value.kind == "parameter" and len(state.value.shape) <= 2
    }
    products = [
        node for node in graph.nodes if "embedding" not in node.op and not matrices.keys().isdisjoint(node.inputs)
    ]
    read = {name for node in products for name in node.inputs if name in matrices}
    seconds = 0.0
    for node in products:
        dtype = next(matrices[name].dtype for name in node.inputs if name in matrices)
        seconds += forward_flops(node, graph.values) / device.peak_flops(dtype)
    return sum(_num_bytes(matrices[name]) for name in read), seconds


def _num_bytes(value: Value) -> int:
    import torch

    return torch.Size(value.shape).numel() * getattr(torch, value.dtype).itemsize  # type: ignore[no-any-return]
