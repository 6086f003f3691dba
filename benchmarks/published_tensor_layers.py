"""Seconds that tensor-parallel layers of ``torch.distributed.tensor`` take beyond those that plans price.

Both cut a layer by Megatron's rules, with the sequence cut between products. A layer has C groups of column-parallel
products that share their input, of which E products are not the first of theirs, and R row-parallel products. Llama:
C = 2 (query, key and value; gate and up), E = 3, R = 2. Of one layer and micro-batch, recomputed in full:

    plans                  forward C gathers, R scatters; again C, R - 1; backward R, C
    each product reduces   its own gradient of the input: backward E scatters more (autograd adds three tensors up
                           behind the scatters that ``ColwiseParallel(input_layouts=Shard(1))`` makes of each)

Every tensor that is gathered or scattered along a dim that is not the first is copied once more (chunks concatenated).
Prices of plans have that, too (``passes.ir.conversions.Step.copied_bytes``), but not of published runs: Megatron-LM's
activations are [sequence, batch, width], and nothing is copied.
Counts of torch 2.11: the graphs of ``torch.compile`` have 6 gathers, 8 scatters and 14 concatenations for a layer, as
equal gathers are merged; eager programs gather for each product, 12 times.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from cost_models import Cluster
from cost_models.cost_model import CostModel
from passes.plan.step_plan import StepPlan

#: Bytes of an activation, and of copying it.
ITEM_BYTES, COPIED_BYTES = 2, 4


@dataclass(frozen=True)
class TensorLayer:
    """One layer's exchanges on the tensor axis.

    Attributes:
        gathers: groups of products that share their input (C); ``more``: products beyond the first of theirs (E).
        scatters: row-parallel products (R).
        scatter, copy: seconds to scatter the layer's rows, and to copy them once.
    """

    gathers: int
    more: int
    scatters: int
    scatter: float
    copy: float

    @staticmethod
    def of(graph: Any, unit: str, step: StepPlan, tokens: int, cluster: Cluster) -> TensorLayer:
        """The exchanges of module ``unit``, whose products take ``tokens`` rows; none where it has no such products."""
        linears = [
            node
            for node in graph.nodes
            if node.op.startswith("aten.linear") and (node.module_path + ".").startswith(unit + ".")
        ]
        readers = Counter(node.inputs[0] for node in linears)
        shared = [count for count in readers.values() if count > 1]
        if not shared:
            return TensorLayer(0, 0, 0, 0.0, 0.0)
        width = min(graph.values[node.inputs[1]].shape[0] for node in linears if readers[node.inputs[0]] == 1)
        elements = tokens * width
        prices = CostModel(cluster, step.axes)
        return TensorLayer(
            gathers=len(shared),
            more=sum(shared) - len(shared),
            scatters=len(linears) - sum(shared),
            scatter=prices.collective_seconds("reduce_scatter", num_bytes=ITEM_BYTES * elements, axis="tp"),
            copy=_copy_seconds(elements, cluster),
        )

    def extra_seconds(self, *, recomputes: bool, reduces_each: bool) -> tuple[float, float]:
        """Seconds forward and backward beyond those of plans."""
        more = self.more if reduces_each else 0
        forward, backward = self.gathers + self.scatters, self.gathers + self.scatters + more
        if recomputes and self.gathers:
            backward += self.gathers + self.scatters - 1
        return forward * self.copy, more * self.scatter + backward * self.copy


def gather_seconds(num_bytes: float, step: StepPlan, cluster: Cluster) -> float:
    """Seconds to gather a tensor of so many bytes on the tensor axis along its last dim, which copies it once more."""
    seconds = CostModel(cluster, step.axes).collective_seconds("all_gather", num_bytes=num_bytes, axis="tp")
    return seconds + _copy_seconds(num_bytes / ITEM_BYTES, cluster)


def _copy_seconds(elements: float, cluster: Cluster) -> float:
    return cluster.device.seconds(flops=0.0, num_bytes=COPIED_BYTES * elements, dtype="bfloat16", kind="elementwise")
