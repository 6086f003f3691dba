"""What generating with a model costs on a mesh: seconds to the first token and for each one more, bytes, and bounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cost_models import Cluster
from passes.ir.types import MeshShape, local_shape

if TYPE_CHECKING:
    import torch

    from passes.ir.graph import Graph
    from passes.plan import Plan
    from runtime.generation.cache_layout import CacheTensor


@dataclass(frozen=True)
class ServingPlan:
    """One placement of the weights, and the programs of a prompt and of a token over it.

    Attributes:
        prompt, token: their plans; the cache is among the token plan's ``states``.
        weight_bytes, cache_bytes: on each device.
        first_token_bound, token_bound: seconds that no placement on this mesh can beat: each weight of a matrix product
            is read once, and (for a token) the cache; experts and looked-up embeddings are left out.
    """

    mesh: MeshShape
    batch: int
    prompt_len: int
    new_tokens: int
    prompt: Plan
    token: Plan
    weight_bytes: int
    cache_bytes: int
    first_token_bound: float
    token_bound: float

    @property
    def first_token_seconds(self) -> float:
        return self.prompt.costs.total

    @property
    def token_seconds(self) -> float:
        """Of one token for each sample."""
        return self.token.costs.total

    @property
    def seconds(self) -> float:
        """Of the whole answer."""
        return self.first_token_seconds + max(0, self.new_tokens - 1) * self.token_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all samples together."""
        return self.batch * self.new_tokens / self.seconds

    def summary(self) -> str:
        """The figures for people."""
        most = self.batch * self.new_tokens / (self.first_token_bound + (self.new_tokens - 1) * self.token_bound)
        return (
            f"{self.token.model} on {self.mesh}: {self.batch} × ({self.prompt_len} + {self.new_tokens}) tokens\n"
            f"  first token  {1e3 * self.first_token_seconds:.3f} ms (bound {1e3 * self.first_token_bound:.3f} ms)\n"
            f"  each token   {1e3 * self.token_seconds:.3f} ms (bound {1e3 * self.token_bound:.3f} ms)\n"
            f"  throughput   {self.tokens_per_second:,.0f} tokens/s (bound {most:,.0f})\n"
            f"  on a device  {self.weight_bytes / 2**30:.3f} GiB weights, {self.cache_bytes / 2**30:.3f} GiB cache\n"
        )


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

    The weights' placement is that of the forward pass of a prompt or of one token, whichever makes the answer faster.

    Args:
        prompt_len, new_tokens: tokens of a sample before and after; ``batch``: samples at once.
        mesh: axis sizes without a pipeline; None: tensor parallelism over all devices.

    Raises:
        ValueError: for sizes below one, a model that does not generate over such a cache, and one that does not fit.
    """
    from planner.planning import as_cluster, as_mesh_shape, as_module
    from runtime.generation.hugging_face_loop import check_generates

    for name, value in {"prompt_len": prompt_len, "new_tokens": new_tokens, "batch": batch}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number above zero, got {value!r}")
    shape = None if mesh is None else as_mesh_shape(mesh)
    hardware = as_cluster(cluster, num_devices=1 if shape is None else shape.num_devices)
    shape = MeshShape(("tp",), (hardware.num_devices,)) if shape is None else shape
    if "pp" in shape.names:
        raise ValueError("generation is priced on a mesh without a pipeline: drop pp")
    module = as_module(model, dtype=dtype).eval()
    if not callable(getattr(module, "generate", None)):
        raise ValueError(f"{type(module).__name__} has no generate: give a language model")
    check_generates(module)
    phases = _Phases(module, hardware, shape, prompt_len, new_tokens, batch)
    plans = [phases.priced(tokens) for tokens in dict.fromkeys((prompt_len, 1))]
    best = min(plans, key=lambda priced: priced.seconds)
    room = hardware.device.usable_bytes
    if best.weight_bytes + best.cache_bytes > room:
        raise ValueError(
            f"{(best.weight_bytes + best.cache_bytes) / 2**30:.1f} GiB of weights and cache do not fit in the "
            f"{room / 2**30:.1f} GiB of a device: use more devices, fewer samples or shorter answers"
        )
    return best


class _Phases:
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

    def priced(self, tokens: int) -> ServingPlan:
        """Under the placement of weights that a forward pass of ``tokens`` tokens has."""
        import torch

        from passes.capture import capture
        from planner.planning import plan_graph
        from runtime.generation.cache_layout import bytes_of
        from runtime.generation.phase_models import LAST, POSITION, cache_tensors, prompt_model, token_model

        inputs = self._inputs(tokens)
        forward = capture(self.module, kwargs=inputs, training=False, copy_repeats=True)
        limit = self.cluster.device.usable_bytes
        base = plan_graph(forward, self.cluster, mesh=self.mesh, fuse=True, memory_limit=limit)
        slots = self.new_tokens + (1 if self.has_encoder else self.prompt_len)
        tensors = cache_tensors(self.module, self._inputs(self.prompt_len), {}, length=slots)
        prompt = prompt_model(self.module, tensors, {})
        last = torch.zeros(1, dtype=torch.long, device="meta")
        prompt_graph = capture(prompt, kwargs={**self._inputs(self.prompt_len), LAST: last}, training=False)
        token = token_model(self.module, tensors, {}, encoder_shape=self.encoder_shape)
        position = torch.zeros((), dtype=torch.long, device="meta")
        name = "decoder_input_ids" if self.has_encoder else "input_ids"
        token_graph = capture(token, kwargs={name: self._tokens(1), POSITION: position}, training=False)
        token_plan = self._pinned(token_graph, base, tensors)
        weights = _weight_bytes(base)
        reads = _bytes_read(token_graph) / self.mesh.num_devices
        cached = bytes_of(tensors, base)
        whole_cache = sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in tensors)
        bandwidth = self.cluster.device.memory_bandwidth
        return ServingPlan(
            self.mesh,
            self.batch,
            self.prompt_len,
            self.new_tokens,
            self._pinned(prompt_graph, base, tensors),
            token_plan,
            weights,
            cached,
            first_token_bound=reads / bandwidth,
            token_bound=(reads + whole_cache / self.mesh.num_devices) / bandwidth,
        )

    def _tokens(self, count: int) -> torch.Tensor:
        import torch

        return torch.zeros(self.batch, count, dtype=torch.long, device="meta")

    def _inputs(self, tokens: int) -> dict[str, Any]:
        if self.has_encoder:
            return {"input_ids": self._tokens(self.prompt_len), "decoder_input_ids": self._tokens(1)}
        return {"input_ids": self._tokens(tokens)}

    def _pinned(self, graph: Graph, base: Plan, tensors: tuple[CacheTensor, ...]) -> Plan:
        """The plan of a graph over the weights as ``base`` places them, and the cache as ranks hold it."""
        from passes.fuse import as_planned
        from planner.planning import plan_graph
        from runtime.execution.replanning import as_seen_by
        from runtime.generation.cache_layout import planned_buffers

        pinned = dataclasses.replace(base, states={**base.states, **planned_buffers(tensors, base)})
        fused = as_planned(graph, base)
        return plan_graph(fused, self.cluster, mesh=self.mesh, pinned=as_seen_by(fused, pinned))


def _weight_bytes(plan: Plan) -> int:
    import torch

    return sum(
        torch.Size(local_shape(state.shape, state.placement, plan.mesh)).numel() * getattr(torch, state.dtype).itemsize
        for state in plan.states.values()
    )


def _bytes_read(graph: Graph) -> int:
    """Bytes of the matrices (no experts, no embeddings that rows are picked from) that a call reads."""
    import torch

    read = {name for node in graph.nodes if "embedding" not in node.op for name in node.inputs}
    return sum(
        torch.Size(state.value.shape).numel() * getattr(torch, state.value.dtype).itemsize
        for state in graph.states
        if state.value.kind == "parameter" and state.value.name in read and len(state.value.shape) <= 2
    )
