"""What the software of a published run does that programs of ours do not: seconds and bytes that it adds to a step.

Each is an option of the run (``framework = {…}`` in its table) that the software's own source or version decides. One
constant is fitted, ``EARLY_HOPPER_SLOWDOWN``, to runs of the calibration half. Prices of plans know nothing of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.published_tensor_layers import TensorLayer, gather_seconds
from cost_models import Cluster
from cost_models.efficiency import ATTENTION_KINDS, Curve, Efficiency
from cost_models.hardware import Device, DeviceGroup
from cost_models.step import LayerCosts, LayerSeconds, PipelineStep
from passes.plan.step_plan import GroupPlan, StepPlan
from planner.whole_step.costs.step_prices import MASKED_ATTENTION

#: Attention before FlashAttention-2: "1.3 to 2.5 times" slower in Triton (Dao, "FlashAttention-2", 2023, section 4.1);
#: the geometric mean of the two.
TRITON_SLOWDOWN = 1.8
#: FlashAttention-2 on Hopper over cuDNN's, which the presets have (their comments say what was measured).
FLASH_SLOWDOWNS = {"attention": 1.92, "attention_backward": 1.63}
HOPPER = ("H100", "H200")
#: Matrix products of CUDA 12.1, the first for Hopper, over those of 2024 and after that the presets know: fitted, the
#: median over the calibration half of MPT's runs on H100, of which each has products of other sizes (mean error 5%).
EARLY_HOPPER_SLOWDOWN = 1.22
#: Logits' dtype → bytes that a loss, operator by operator, moves for each logit beyond a fused one's reading of 16
#: bits, forward and backward. Forward: cast (2 + 4), log-softmax (4 + 4); of 16 bits log-softmax (2 + 2, of which 2
#: are that reading). Backward: gradient of the chosen entries (4 + 4; of 16 bits written alone), of log-softmax (three
#: tensors), cast (4 + 2).
LOGIT_TRAFFIC = {"float32": (14, 26), "bfloat16": (2, 8)}
#: The same → bytes of each logit when the loss holds most, in its backward pass: log-softmax, its gradient, the
#: logits'; of 16 bits also the logits themselves, which the training loop still names.
LOSS_BYTES = {"float32": 12, "bfloat16": 8}
#: Besides where the vocabulary is sharded: two temporaries of the formula in torch.distributed.tensor.parallel.loss.
SHARDED_LOSS_BYTES = 8
#: Bytes of a parameter's state: itself, its gradient and AdamW's moments, in float32.
STATE_BYTES = 16
#: Bytes of a gathered weight, of the next one, and of its gradient in float32, for each element.
GATHERED_BYTES = 8
#: Bytes of an element of a gradient that is added up in float32.
FLOAT32 = 4
#: Share of the state that is a gradient, whatever the width of all four.
GRADIENT_SHARE = 0.25


@dataclass(frozen=True)
class Framework:
    """Options of the software that ran.

    Attributes:
        reruns_whole_layers: a recomputed layer runs to its end (``torch.utils.checkpoint`` before 2.1 and where it is
            re-entrant, Megatron, fairscale, DeepSpeed), not only to the last tensor that the backward pass needs.
        reruns_second_products: selective recomputation runs every second matrix product of a layer again (torchtitan,
            ``selective_ac_option = "op"``).
        reduces_after_backward: gradients are reduced once the last backward pass is done.
        gathers_beside_forward: updated parameters are gathered beside the next step's first forward pass, layer by
            layer (Megatron-LM's ``--overlap-param-gather``).
        float32_logits: the loss runs on logits cast to float32, operator by operator.
        plain_logits: the loss runs on the logits of 16 bits, operator by operator.
        gathers_logits: every tensor rank gathers all logits, and computes the whole loss.
        copies_shards, reduces_each_product: of tensor-parallel layers, see
            ``benchmarks.published_tensor_layers``.
        reduces_once: gradients of fully sharded parameters are added up whole, in float32, and reduced once a step
            (``set_requires_gradient_sync(False)`` but for the last micro-batch): there are no pieces of them meanwhile.
        replicates_embedding: every tensor rank holds the whole embedding.
        state_bytes: of a parameter, its gradient and AdamW's moments; 8 where all of them have 16 bits.
        triton_attention: attention is FlashAttention as written in Triton, before FlashAttention-2.
        cudnn_attention: attention on Hopper is cuDNN's, as torch 2.11 takes it; FlashAttention-2 for all others.
        early_hopper_products: matrix products are those of CUDA 12.1 on a Hopper device.
        flat_buffer_bytes: moved for each fully sharded parameter in each micro-batch, forward and backward, to copy in
            and out of flat buffers. torch's ``fully_shard``: [4, 10], gathered parameters copied out (2 + 2) in both
            passes, gradients copied in and cast to float32 (2 + 4). ``FullyShardedDataParallel``: gradients of views
            copied into the flat gradient (2 + 2), and cast where they are reduced in float32 (2 + 4).
    """

    reruns_whole_layers: bool = False
    reruns_second_products: bool = False
    reduces_after_backward: bool = False
    gathers_beside_forward: bool = False
    float32_logits: bool = False
    plain_logits: bool = False
    gathers_logits: bool = False
    copies_shards: bool = False
    reduces_each_product: bool = False
    reduces_once: bool = False
    replicates_embedding: bool = False
    state_bytes: int = STATE_BYTES
    triton_attention: bool = False
    cudnn_attention: bool = False
    early_hopper_products: bool = False
    flat_buffer_bytes: tuple[float, float] = (0.0, 0.0)

    def on_cluster(self, cluster: Cluster) -> Cluster:
        """``cluster`` as the framework's kernels run on it; what is copied beside collectives is ``copies_shards``."""
        groups = tuple(DeviceGroup(self._on_device(group.device), group.count) for group in cluster.groups)
        return dataclasses.replace(cluster, groups=groups)

    def _on_device(self, device: Device) -> Device:
        # Only cuDNN has rates of its own for a mask; other kernels add a bias (ALiBi's) as they go.
        left_out = () if self.cudnn_attention else MASKED_ATTENTION
        efficiency = {kind: row for kind, row in device.efficiency.items() if kind not in left_out}
        return _slower(dataclasses.replace(device, efficiency=efficiency), self._slowdowns(device))

    def _slowdowns(self, device: Device) -> dict[str, float]:
        """By kind, the seconds of the framework's kernels over those of the preset."""
        is_flash = not self.cudnn_attention and any(name in device.name for name in HOPPER)
        slowdowns = dict(FLASH_SLOWDOWNS) if is_flash else dict.fromkeys(ATTENTION_KINDS, 1.0)
        if self.triton_attention:
            slowdowns = {kind: slowdown * TRITON_SLOWDOWN for kind, slowdown in slowdowns.items()}
        if self.early_hopper_products:
            slowdowns["matmul"] = EARLY_HOPPER_SLOWDOWN
        return slowdowns

    def on_step(self, step: StepPlan, graph: Any, config: Any, seq_len: int, cluster: Cluster) -> PipelineStep:
        """``step`` as the framework runs it.

        Args:
            step: a plan's step.
            graph: the captured graph of the model, whose matrix products are run again.
            config: the model's, for its vocabulary.
            seq_len: tokens of a sample.
            cluster: that prices what is added.
        """
        tokens = step.local_batch * seq_len
        chunks = []
        for index, chunk in enumerate(step.chunks):
            layers = [
                (self._layer(costs, group, part, step=step, graph=graph, tokens=tokens, cluster=cluster), count)
                for group, part, (costs, count) in zip(chunk.groups, chunk.parts, chunk.costs.layers)
            ]
            if index == 0 and self.replicates_embedding:
                layers[0] = (self._with_embedding(layers[0][0], step, config), layers[0][1])
            if index == len(step.chunks) - 1:
                last = _kept_loss(layers[-1][0], chunk.groups[-1], chunk.parts[-1], self.reruns_whole_layers)
                layers[-1] = (self._loss(last, step, tokens, config, cluster), layers[-1][1])
            chunks.append(dataclasses.replace(chunk.costs, layers=tuple(layers)))
        return dataclasses.replace(step.pipeline, chunks=tuple(chunks))

    def _layer(
        self,
        costs: LayerCosts,
        group: GroupPlan,
        part: LayerSeconds,
        *,
        step: StepPlan,
        graph: Any,
        tokens: int,
        cluster: Cluster,
    ) -> LayerCosts:
        """A layer of ``group`` for a micro-batch of ``tokens``."""
        device, share = cluster.device, step.axes.get("tp", 1) * step.axes.get("cp", 1)
        planned = costs
        if self.reruns_whole_layers and group.recompute == "full":
            costs = _whole_layer(costs, part)
        if self.reruns_second_products and group.recompute == "selective":
            costs = _second_products(costs, graph, group.unit, tokens, share, device)
        if group.zero == 3 and any(self.flat_buffer_bytes):
            costs = self._with_copies(costs, step, device)
        if group.zero == 3 and self._adds_up_whole(step):
            costs = _reduced_once(costs, step, self.state_bytes)
        if step.axes.get("tp", 1) > 1 and self.copies_shards:
            layer = TensorLayer.of(graph, group.unit, step, tokens, cluster)
            extra = layer.extra_seconds(recomputes=group.recompute == "full", reduces_each=self.reduces_each_product)
            costs = _longer(costs, extra)
        if self.state_bytes != STATE_BYTES:
            costs = self._with_state(costs, planned)
        if self.reduces_after_backward:
            update = costs.update_step + costs.reduce_step
            costs = dataclasses.replace(costs, reduce_step=0.0, update_step=update)
        if self.gathers_beside_forward:
            costs = _gathered_beside(costs, device.overlap_slowdown)
        return costs

    def _with_copies(self, costs: LayerCosts, step: StepPlan, device: Device) -> LayerCosts:
        parameters = _whole_parameters(costs, step)
        return _longer(costs, tuple(_traffic_seconds(each * parameters, device) for each in self.flat_buffer_bytes))

    def _with_state(self, costs: LayerCosts, planned: LayerCosts) -> LayerCosts:
        share = self.state_bytes / STATE_BYTES
        state_bytes = costs.state_bytes - (1.0 - share) * planned.state_bytes
        return dataclasses.replace(costs, state_bytes=state_bytes, update_step=costs.update_step * share)

    def _with_embedding(self, costs: LayerCosts, step: StepPlan, config: Any) -> LayerCosts:
        """The first unit with the parts of the embedding that the plan has on other tensor ranks."""
        more = config.vocab_size * config.hidden_size * (1.0 - 1.0 / step.axes.get("tp", 1))
        pieces = step.axes.get("dp", 1) * step.axes.get("cp", 1) if 3 in step.zero else 1
        num_bytes = self.state_bytes * more / pieces
        if self._adds_up_whole(step):
            num_bytes += (FLOAT32 - self.state_bytes * GRADIENT_SHARE / pieces) * more
        peak = 0.0
        if pieces > 1:  # the last unit of ``fully_shard``: embedding and head, reduced when all else is let go
            gathered = GATHERED_BYTES - (FLOAT32 if self._adds_up_whole(step) else 0)
            peak = gathered * config.vocab_size * config.hidden_size * (1.0 + 1.0 / step.axes.get("tp", 1))
        return dataclasses.replace(
            costs, state_bytes=costs.state_bytes + num_bytes, peak_bytes=max(costs.peak_bytes, peak)
        )

    def _adds_up_whole(self, step: StepPlan) -> bool:
        return self.reduces_once and step.num_microbatches > 1

    def _loss(self, costs: LayerCosts, step: StepPlan, tokens: int, config: Any, cluster: Cluster) -> LayerCosts:
        """The unit of the loss where that runs operator by operator."""
        if not (self.float32_logits or self.plain_logits):
            return costs
        dtype, shards = "float32" if self.float32_logits else "bfloat16", step.axes.get("tp", 1)
        local = tokens / step.axes.get("cp", 1) * config.vocab_size / shards
        logits = local * shards if self.gathers_logits else local
        forward, backward = (_traffic_seconds(each * logits, cluster.device) for each in LOGIT_TRAFFIC[dtype])
        if self.gathers_logits and shards > 1:
            forward += gather_seconds(2 * logits, step, cluster)
        peak = LOSS_BYTES[dtype] * logits
        if shards > 1 and not self.gathers_logits:
            peak += SHARDED_LOSS_BYTES * logits
        if 3 in step.zero:
            gathered = GATHERED_BYTES - (FLOAT32 if self._adds_up_whole(step) else 0)
            peak += gathered * config.vocab_size * config.hidden_size / shards
        saves_logits = costs.saved_bytes >= 2 * local
        return dataclasses.replace(
            _longer(costs, (forward, backward)),
            saved_bytes=costs.saved_bytes - (2 * local if saves_logits else 0.0),
            peak_bytes=max(costs.peak_bytes, peak),
        )


def _longer(costs: LayerCosts, seconds: Sequence[float]) -> LayerCosts:
    """``costs`` with so many more seconds, forward and backward."""
    forward, backward = seconds
    return dataclasses.replace(costs, forward=costs.forward + forward, backward=costs.backward + backward)


def _traffic_seconds(num_bytes: float, device: Device) -> float:
    return device.seconds(flops=0.0, num_bytes=num_bytes, dtype="float32", kind="elementwise")


def _whole_parameters(costs: LayerCosts, step: StepPlan) -> float:
    """Parameters of a fully sharded layer that a rank holds once they are gathered."""
    return costs.state_bytes / STATE_BYTES * step.axes.get("dp", 1) * step.axes.get("cp", 1)


def _reduced_once(costs: LayerCosts, step: StepPlan, state_bytes: int) -> LayerCosts:
    """Gradients whole, in float32, from the first micro-batch to the last, in the place of pieces."""
    return dataclasses.replace(
        costs,
        reduce_backward=0.0,
        reduce_step=costs.reduce_step + costs.reduce_backward,
        state_bytes=costs.state_bytes
        + FLOAT32 * _whole_parameters(costs, step)
        - GRADIENT_SHARE * state_bytes / STATE_BYTES * costs.state_bytes,
    )


class _NoTraffic(Efficiency):
    """Of copies that are not there."""

    def busy_bytes(self, num_bytes: float) -> float:
        return 0.0


def _slower(device: Device, slowdowns: Mapping[str, float]) -> Device:
    table = {kind: _slower_kind(row, slowdowns.get(kind, 1.0)) for kind, row in device.efficiency.items()}
    table["exchange_copy"] = _NoTraffic()
    return dataclasses.replace(device, efficiency=table)


def _slower_kind(row: Efficiency, slowdown: float) -> Efficiency:
    points = tuple((size, share / slowdown) for size, share in row.flops.points)
    kernel = row.kernel
    if kernel is not None:
        kernel = dataclasses.replace(kernel, sustained=kernel.sustained / slowdown)
    return dataclasses.replace(row, flops=Curve(points), kernel=kernel)


def _kept_loss(costs: LayerCosts, group: GroupPlan, part: LayerSeconds, reruns_whole: bool) -> LayerCosts:
    """The unit of the loss, which no framework recomputes with the layers: they mark the layers alone."""
    if group.recompute != "full":
        return costs
    again = part.recompute + part.recommunicate
    if reruns_whole:
        again = max(again, part.compute_forward + part.communication_forward)
    return dataclasses.replace(costs, backward=costs.backward - again)


def _whole_layer(costs: LayerCosts, part: LayerSeconds) -> LayerCosts:
    rest = max(0.0, part.compute_forward - part.recompute)
    rest += max(0.0, part.communication_forward - part.recommunicate)
    return dataclasses.replace(costs, backward=costs.backward + rest)


def _second_products(costs: LayerCosts, graph: Any, unit: str, tokens: int, share: int, device: Device) -> LayerCosts:
    seconds = num_bytes = 0.0
    for width, depth in list(_products(graph, unit))[1::2]:
        seconds += device.seconds(
            flops=2.0 * tokens * width * depth / share,
            num_bytes=2.0 * (tokens * (width + depth) + width * depth) / share,
            dtype="bfloat16",
            kind="matmul",
            shape=(1, tokens, max(1, width // share), depth),
        )
        num_bytes += 2.0 * tokens * width / share
    return dataclasses.replace(
        costs, backward=costs.backward + seconds, saved_bytes=max(0.0, costs.saved_bytes - num_bytes)
    )


def _products(graph: Any, unit: str) -> Iterator[tuple[int, int]]:
    """(width, depth) of the linear layers in module ``unit``, in the order in which they run."""
    for node in graph.nodes:
        if node.op.startswith("aten.linear") and (node.module_path + ".").startswith(unit + "."):
            width, depth = graph.values[node.inputs[1]].shape[:2]
            yield width, depth


def _gathered_beside(costs: LayerCosts, slowdown: float) -> LayerCosts:
    """A layer whose parameters are gathered while the layer before it runs: what is hidden slows that down."""
    hidden = min(costs.gather_step, costs.forward)
    return dataclasses.replace(costs, gather_step=costs.gather_step - (1.0 - slowdown) * hidden)
