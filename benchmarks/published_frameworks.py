"""What the software of a published run does that programs of ours do not: seconds and bytes that it adds to a step.

Each is an option of the run (``framework = {…}`` in its table) that the software's own source or version decides. One
constant is fitted, ``EARLY_HOPPER_SLOWDOWN``, to runs of the calibration half. Prices of plans know nothing of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cost_models import Cluster
from cost_models.efficiency import ATTENTION_KINDS, Curve, Efficiency
from cost_models.hardware import Device, DeviceGroup
from cost_models.step import LayerCosts, LayerSeconds, PipelineStep
from passes.plan.step_plan import StepPlan

#: Attention before FlashAttention-2: "1.3 to 2.5 times" slower in Triton (Dao, "FlashAttention-2", 2023, section 4.1);
#: the geometric mean of the two.
TRITON_SLOWDOWN = 1.8
#: Matrix products of CUDA 12.1, the first for Hopper, over those of 2024 and after that the presets know: fitted, the
#: median over the calibration half of MPT's runs on H100, of which each has products of other sizes (mean error 5%).
EARLY_HOPPER_SLOWDOWN = 1.22
#: Bytes that a float32 loss moves for each logit beyond a fused one's reading of 16 bits. Forward: cast (2 + 4),
#: log-softmax (4 + 4). Backward: gradient of the chosen entries (4 + 4), of log-softmax (4 + 4 + 4), cast (4 + 2).
FORWARD_LOGIT_BYTES, BACKWARD_LOGIT_BYTES = 14, 26
#: Bytes of each logit when a float32 loss holds most, in its backward pass: log-softmax, its gradient, the logits'.
#: Where the vocabulary is sharded also two temporaries of the formula in torch.distributed.tensor.parallel.loss.
LOSS_BYTES, SHARDED_LOSS_BYTES = 12, 20
#: Bytes of a parameter's state: itself, its gradient and AdamW's moments, in float32.
STATE_BYTES = 16
#: Bytes of a gathered weight, of the next one, and of its gradient in float32, for each element.
GATHERED_BYTES = 8


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
        triton_attention: attention is FlashAttention as written in Triton, before FlashAttention-2.
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
    triton_attention: bool = False
    early_hopper_products: bool = False
    flat_buffer_bytes: tuple[float, float] = (0.0, 0.0)

    def on_cluster(self, cluster: Cluster) -> Cluster:
        """``cluster`` as the framework's kernels run on it."""
        slowdowns: dict[str, float] = {}
        if self.triton_attention:
            slowdowns |= dict.fromkeys(ATTENTION_KINDS, TRITON_SLOWDOWN)
        if self.early_hopper_products:
            slowdowns["matmul"] = EARLY_HOPPER_SLOWDOWN
        groups = tuple(DeviceGroup(_slower(group.device, slowdowns), group.count) for group in cluster.groups)
        return dataclasses.replace(cluster, groups=groups)

    def on_step(self, step: StepPlan, graph: Any, config: Any, seq_len: int, device: Device) -> PipelineStep:
        """``step`` as the framework runs it.

        Args:
            step: a plan's step.
            graph: the captured graph of the model, whose matrix products are run again.
            config: the model's, for its vocabulary.
            seq_len: tokens of a sample.
            device: that prices what is added.
        """
        share = step.axes.get("tp", 1) * step.axes.get("cp", 1)
        tokens = step.local_batch * seq_len
        chunks = []
        for index, chunk in enumerate(step.chunks):
            layers = []
            for group, part, (costs, count) in zip(chunk.groups, chunk.parts, chunk.costs.layers):
                if self.reruns_whole_layers and group.recompute == "full":
                    costs = _whole_layer(costs, part)
                if self.reruns_second_products and group.recompute == "selective":
                    costs = _second_products(costs, graph, group.unit, tokens, share, device)
                if group.zero == 3 and any(self.flat_buffer_bytes):
                    costs = self._with_copies(costs, step, device)
                if self.reduces_after_backward:
                    update = costs.update_step + costs.reduce_step
                    costs = dataclasses.replace(costs, reduce_step=0.0, update_step=update)
                if self.gathers_beside_forward:
                    costs = _gathered_beside(costs, device.overlap_slowdown)
                layers.append((costs, count))
            if self.float32_logits and index == len(step.chunks) - 1:
                layers[-1] = (self._float32_loss(layers[-1][0], step, tokens, config, device), layers[-1][1])
            chunks.append(dataclasses.replace(chunk.costs, layers=tuple(layers)))
        return dataclasses.replace(step.pipeline, chunks=tuple(chunks))

    def _with_copies(self, costs: LayerCosts, step: StepPlan, device: Device) -> LayerCosts:
        parameters = costs.state_bytes / STATE_BYTES * step.axes.get("dp", 1) * step.axes.get("cp", 1)
        forward, backward = (
            device.seconds(flops=0.0, num_bytes=each * parameters, dtype="float32", kind="elementwise")
            for each in self.flat_buffer_bytes
        )
        return dataclasses.replace(costs, forward=costs.forward + forward, backward=costs.backward + backward)

    def _float32_loss(self, costs: LayerCosts, step: StepPlan, tokens: int, config: Any, device: Device) -> LayerCosts:
        shards = step.axes.get("tp", 1)
        logits = tokens / step.axes.get("cp", 1) * config.vocab_size / shards
        forward, backward = (
            device.seconds(flops=0.0, num_bytes=each * logits, dtype="float32", kind="elementwise")
            for each in (FORWARD_LOGIT_BYTES, BACKWARD_LOGIT_BYTES)
        )
        peak = (SHARDED_LOSS_BYTES if shards > 1 else LOSS_BYTES) * logits
        if 3 in step.zero:
            peak += GATHERED_BYTES * config.vocab_size * config.hidden_size / shards
        saves_logits = costs.saved_bytes >= 2 * logits
        return dataclasses.replace(
            costs,
            forward=costs.forward + forward,
            backward=costs.backward + backward,
            saved_bytes=costs.saved_bytes - (2 * logits if saves_logits else 0.0),
            peak_bytes=max(costs.peak_bytes, peak),
        )


def _slower(device: Device, slowdowns: Mapping[str, float]) -> Device:
    table = {kind: _slower_kind(row, slowdowns.get(kind, 1.0)) for kind, row in device.efficiency.items()}
    return dataclasses.replace(device, efficiency=table)


def _slower_kind(row: Efficiency, slowdown: float) -> Efficiency:
    points = tuple((size, share / slowdown) for size, share in row.flops.points)
    kernel = row.kernel
    if kernel is not None:
        kernel = dataclasses.replace(kernel, sustained=kernel.sustained / slowdown)
    return dataclasses.replace(row, flops=Curve(points), kernel=kernel)


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
