"""Prices of one micro-batch on one device, where the batch axis is followed and only ``cp`` and ``tp`` are searched.

The mesh has the axes ``dp``, ``cp`` and ``tp``; ``dp`` stands for data parallelism and micro-batches together: its size
is the number of pieces that the global batch is cut into, in space and in time. What divides or reduces parameters over
``dp`` and ``cp`` (ZeRO) is decided and priced above, so conversions of parameters on these axes are free here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from cost_models.dtypes import item_size
from cost_models.efficiency import ANY_ROWS
from passes.ir.conversions import Step
from passes.ir.graph import Node, Value
from passes.ir.types import I, MeshShape, Placement, R, SpmdType, local_shape, shard_dim
from passes.rules.delta_rule_costs import GATED_DELTA_RULE, DeltaRuleCall
from passes.rules.expert_rules import grouped_products
from passes.rules.kinds import (
    ATTENTION,
    COPY,
    ELEMENTWISE,
    FUSED_ELEMENTWISE,
    MATMUL,
    REDUCTION,
    kind_of,
    matmul_shape,
    row_step,
)
from passes.rules.linear_rows import LINEAR
from planner.sharding_ilp.sharding_prices import Pricing
from planner.whole_step.costs.delta_rule_prices import delta_rule_seconds
from planner.whole_step.costs.operator_facts import Fusion, OperatorFacts, OperatorTable
from planner.whole_step.costs.row_exchange import RowExchange, row_exchange

if TYPE_CHECKING:
    from planner.sharding_ilp.lattice import Lattice
    from planner.sharding_ilp.step_tables import StepTable

DATA, CONTEXT, TENSOR, PIPELINE = "dp", "cp", "tp", "pp"
#: The axis that divides samples as the data axis does, and experts (``passes.rules.expert_rules``).
EXPERT = "ep"
#: Axes over which parameters are reduced and divided by ZeRO; over ``ep`` all but experts.
STATE_AXES = frozenset((DATA, CONTEXT))
#: Flash attention computes the scores again: five matrix products backward for two forward (Dao 2023).
ATTENTION_BACKWARD = 2.5
#: Kinds of fused attention forward and backward; with a mask behind query, key and value; with one that has a gradient.
PLAIN_ATTENTION = "attention", "attention_backward"
MASKED_ATTENTION = "masked_attention", "masked_attention_backward"
BIASED_ATTENTION = "biased_attention", "biased_attention_backward"
_NUM_FACTORS = 3
#: Attention that forms its scores: times that it reads or writes them outside its products, forward and backward, by
#: whether elementwise chains are fused. One by one: scale, mask, softmax and dropout, each twice; a byte for a mask.
SCORE_PASSES: dict[bool, tuple[float, float]] = {False: (8.5, 9.5), True: (2.5, 3.5)}
#: Kernels of experts, and of attention that forms its scores (by whether elementwise chains are fused), forward and
#: backward: products, and passes over rows or scores.
EXPERT_LAUNCHES = 3, 5
FORMED_LAUNCHES: dict[bool, tuple[int, int]] = {False: (6, 8), True: (3, 5)}
#: Bytes up to which a sum over the batch counts as a scalar of the loss.
SCALAR_BYTES = 64
#: Seconds forward and backward of operators, by all that they depend on: one operator's parts of the same shapes take
#: equally long whatever axes made them.
ComputeTable = dict[tuple[object, ...], tuple[float, float]]


def weight_share(node: Node, values: Mapping[str, Value], states: frozenset[str]) -> float:
    """Share of an operator's backward that only makes gradients of parameters (a bias's takes no matrix product)."""
    grads = [name for name in dict.fromkeys(node.inputs) if values[name].requires_grad]
    if kind_of(node) == MATMUL:
        grads = [name for name in grads if len(values[name].shape) > 1]
    elif len(grads) > 1:
        return 0.0
    return sum(name in states for name in grads) / len(grads) if grads else 0.0


class StepPrices(Protocol):
    """What a cost model must price here: compute by kind and shape, collectives by axis, launches by the host."""

    @property
    def host_seconds(self) -> float: ...

    def compute_seconds(
        self,
        *,
        flops: float,
        num_bytes: float,
        dtype: str,
        kind: str | None = None,
        shape: tuple[int, int, int, int] | None = None,
        row_step: int = ANY_ROWS,
    ) -> float: ...

    def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float: ...


class StepPricing(Pricing):
    """Prices of operators and conversions for one way to cut the batch, the sequence and the tensors.

    ``of_states``: lattices of parameters, whose prices have nothing to do with ``dp`` where they are whole on it.
    ``operators``: facts of the operators, and ``computed`` what parts of them take on the devices of ``cost_model``, as
    other cuts have worked them out.
    ``cost_model`` prices compute, and collectives on ``cp`` and ``tp`` and of scalars on ``dp``; the values
    ``unconverted`` cannot be converted (infinite seconds), the values ``unpriced`` are converted for nothing.
    """

    sample_axes = frozenset((DATA, EXPERT))

    def __init__(
        self,
        cost_model: StepPrices,
        mesh: MeshShape,
        *,
        states: frozenset[str],
        fusion: Fusion,
        unconverted: frozenset[str] = frozenset(),
        unpriced: frozenset[str] = frozenset(),
        of_states: dict[tuple[object, ...], Lattice] | None = None,
        operators: OperatorTable | None = None,
        computed: ComputeTable | None = None,
    ) -> None:
        super().__init__(cost_model, mesh)
        self.of_states = of_states
        self.unconverted, self.unpriced = unconverted, unpriced
        self.prices = cost_model
        self.states = states
        self.fusion = fusion
        self._operators = OperatorTable(fusion) if operators is None else operators
        self._computed = {} if computed is None else computed

    def step(self, step: Step, value: Value) -> tuple[float, float]:
        if value.name in self.unconverted:
            return math.inf, 0.0
        if value.name in self.unpriced:
            return 0.0, 0.0
        if value.name in self.states and self._is_reduced_elsewhere(step):
            return 0.0, 0.0
        return super().step(step, value)

    def steps(self, table: StepTable, value: Value) -> tuple[list[float], list[float]]:
        count = len(table.steps)
        if value.name in self.unconverted:
            return [math.inf] * count, [0.0] * count
        if value.name in self.unpriced:
            return [0.0] * count, [0.0] * count
        forward, backward = super().steps(table, value)
        if value.name in self.states:
            for place, step in enumerate(table.steps):
                if self._is_reduced_elsewhere(step):
                    forward[place] = backward[place] = 0.0
        return forward, backward

    def _is_reduced_elsewhere(self, step: Step) -> bool:
        """Whether a parameter's conversion is what ZeRO decides and pays for; over ``ep`` of what is whole there."""
        axis = self.mesh.names[step.axis]
        return axis in STATE_AXES or (axis == EXPERT and {step.source_type, step.target_type} <= {I, R})

    def family(self, value: Value) -> str:
        if value.name in self.unconverted:
            return "unconverted"
        if value.name in self.unpriced:
            return "unpriced"
        return "state" if value.name in self.states else ""

    def shared_lattices(
        self, value: Value, types: tuple[tuple[SpmdType, ...], ...]
    ) -> dict[tuple[object, ...], Lattice] | None:
        is_whole = all(shard_dim(each) is None for each in types[self.mesh.names.index(DATA)])
        return self.of_states if is_whole and self.family(value) == "state" else None

    def likeness(self, node: Node, values: Mapping[str, Value]) -> object:
        return self._facts_of(node, values).likeness

    def compute(
        self,
        node: Node,
        values: Mapping[str, Value],
        inputs: Sequence[Placement],
        outputs: Sequence[Placement],
        *,
        flops: float,
        cut: float,
        live: bool,
    ) -> tuple[float, float]:
        """Seconds of one operator, forward and backward; equal parts of alike ones are priced once."""
        facts = self._facts_of(node, values)
        if facts.is_view:
            return 0.0, 0.0
        parts = [self._local_shape(values[name].shape, where) for name, where in zip(node.inputs, inputs)]
        results = [self._local_shape(value.shape, where) for value, where in zip(node.outputs, outputs)]
        key = (facts.likeness, *parts, *results, flops / cut, live)
        seconds = self._computed.get(key)
        if seconds is None:
            seconds = self._seconds(facts, values, inputs, outputs, flops=flops, cut=cut, live=live)
            self._computed[key] = seconds
        return seconds

    def _seconds(
        self,
        facts: OperatorFacts,
        values: Mapping[str, Value],
        inputs: Sequence[Placement],
        outputs: Sequence[Placement],
        *,
        flops: float,
        cut: float,
        live: bool,
    ) -> tuple[float, float]:
        """``compute`` of an operator that is no view, by its kind and local shape."""
        node = facts.node
        kind = facts.kind
        written = sum(self.local_bytes(value, outputs[place]) for place, value in facts.written)
        read = self._read(facts, inputs, written)
        dtype = node.output.dtype
        grads = facts.grads if live else ()
        price = self.prices.compute_seconds
        num_bytes, local_flops = written + read, flops / cut
        if facts.is_experts:
            return self._experts(node, values, inputs, written, flops=local_flops, live=bool(grads))
        if node.op == GATED_DELTA_RULE:
            return delta_rule_seconds(self.prices, self._delta_rule(node, values, inputs), dtype, live=bool(grads))
        if kind == MATMUL:
            return self._product(node, values, inputs, outputs, flops=local_flops, num_bytes=num_bytes, grads=grads)
        if kind == ATTENTION and forms_scores(node):
            seconds = self._formed_attention(node, values, inputs)
            return seconds if grads else (seconds[0], 0.0)
        if kind == ATTENTION:
            scores = self._scores(node, values, inputs)
            masks = set(node.inputs[_NUM_FACTORS:])
            kinds = BIASED_ATTENTION if masks & set(facts.grads) else MASKED_ATTENTION if masks else PLAIN_ATTENTION
            forward = price(flops=local_flops, num_bytes=num_bytes, dtype=dtype, kind=kinds[0], shape=scores)
            again, twice = ATTENTION_BACKWARD * local_flops, 2 * num_bytes
            backward = price(flops=again, num_bytes=twice, dtype=dtype, kind=kinds[1], shape=scores)
            return forward, backward if grads else 0.0
        forward = price(flops=local_flops, num_bytes=num_bytes, dtype=dtype, kind=kind)
        if not grads:
            return forward, 0.0
        if flops:
            return forward, len(grads) * price(flops=local_flops, num_bytes=num_bytes, dtype=dtype, kind=kind)
        gradient_bytes = sum(self.local_bytes(value, inputs[place]) for place, value in facts.with_gradient)
        return forward, price(flops=0.0, num_bytes=num_bytes + gradient_bytes, dtype=dtype, kind=kind)

    def launches(
        self,
        node: Node,
        values: Mapping[str, Value],
        inputs: Sequence[Placement],
        outputs: Sequence[Placement],
        *,
        flops: float,
        live: bool,
    ) -> tuple[int, int]:
        facts = self._facts_of(node, values)
        if facts.is_view or not facts.written:  # what is not written is computed inside of the kernel that reads it
            return 0, 0
        grads = facts.grads if live else ()
        if node.op == GATED_DELTA_RULE:
            forward, backward = self._delta_rule(node, values, inputs).launches
            return forward, backward if grads else 0
        if facts.kind == MATMUL and not facts.is_experts:
            return self._product_launches(node, values, inputs, outputs, grads=grads)
        forward, backward = 1, len(grads) if flops else 1
        if facts.is_experts:
            forward, backward = EXPERT_LAUNCHES
        elif facts.kind == ATTENTION:
            forward, backward = FORMED_LAUNCHES[self.fusion != Fusion()] if forms_scores(node) else (1, 1)
        return forward, backward if grads else 0

    def _product_launches(
        self,
        node: Node,
        values: Mapping[str, Value],
        inputs: Sequence[Placement],
        outputs: Sequence[Placement],
        *,
        grads: Sequence[str],
    ) -> tuple[int, int]:
        """A product forward, one for each matrix's gradient and a sum for a bias's, all pieces of those in pieces."""
        (_, pieces, copied), _ = self._matmul(node, values, inputs, outputs)
        copies = int(pieces > 1 or any(copied))
        return pieces + copies, len(grads) + pieces - 1 + copies if grads else 0

    def _facts_of(self, node: Node, values: Mapping[str, Value]) -> OperatorFacts:
        """What is the same for all choices of an operator, worked out once."""
        return self._operators.of(node, values)

    def _product(
        self,
        node: Node,
        values: Mapping[str, Value],
        inputs: Sequence[Placement],
        outputs: Sequence[Placement],
        *,
        flops: float,
        num_bytes: float,
        grads: Sequence[str],
    ) -> tuple[float, float]:
        """One matrix product forward, one for the gradient of each matrix backward."""
        (shape, pieces, copied), step = self._matmul(node, values, inputs, outputs)
        dtype = node.output.dtype
        price = functools.partial(self.prices.compute_seconds, dtype=dtype)
        multiply = functools.partial(price, kind=MATMUL, row_step=step)

        def in_pieces(shape: tuple[int, int, int, int]) -> float:
            batch, m, *rest = shape
            part = (batch, max(1, m // pieces), rest[0], rest[1])
            return pieces * multiply(flops=flops / pieces, num_bytes=num_bytes / pieces, shape=part)

        matrices = [name for name in grads if len(values[name].shape) > 1]
        of_source, of_weight = _turned(shape)
        forward = in_pieces(shape)
        backward = (in_pieces(of_source) if matrices else 0.0) + (
            multiply(flops=flops, num_bytes=num_bytes, shape=of_weight) if len(matrices) > 1 else 0.0
        )
        if len(grads) > len(matrices):  # a bias: the sum of the rows of the output's gradient
            gradient_bytes = sum(self.local_bytes(value, where) for value, where in zip(node.outputs, outputs))
            backward += price(flops=0.0, num_bytes=gradient_bytes, kind=REDUCTION)
        if pieces > 1 or any(copied):
            copies = [price(flops=0.0, num_bytes=each * item_size(dtype), kind=COPY) for each in copied]
            forward, backward = forward + copies[0], backward + (copies[1] if grads else 0.0)
        return forward, backward

    def _experts(
        self,
        node: Node,
        values: Mapping[str, Value],
        inputs: Sequence[Placement],
        written: int,
        *,
        flops: float,
        live: bool,
    ) -> tuple[float, float]:
        """Two grouped products forward, four backward, and passes over their rows: sorted, activated, combined."""
        parts = [local_shape(values[name].shape, where, self.mesh) for name, where in zip(node.inputs, inputs)]
        per_row = sum(2.0 * n * k for _, _, n, k in grouped_products(node, parts, 1.0))
        rows, dtype, size = flops / per_row, node.output.dtype, item_size(node.output.dtype)
        products = grouped_products(node, parts, rows)
        whole = grouped_products(node, [values[name].shape for name in node.inputs], rows)
        step = min(row_step(each) for each in (*products, *whole))
        forward = backward = 0.0
        for shape in products:
            count, _, n, k = shape
            of_product, moved = 2.0 * rows * n * k, size * (rows * (n + k) + count * n * k)
            prices = [
                self.prices.compute_seconds(
                    flops=of_product, num_bytes=moved, dtype=dtype, kind=MATMUL, shape=each, row_step=step
                )
                for each in (shape, *_turned(shape))
            ]
            forward, backward = forward + prices[0], backward + sum(prices[1:])
        (_, _, outer, hidden), (_, _, _, inner) = products
        passes = size * rows * (4 * hidden + outer + inner) + written
        forward += self.prices.compute_seconds(flops=0.0, num_bytes=passes, dtype=dtype, kind=FUSED_ELEMENTWISE)
        backward += self.prices.compute_seconds(flops=0.0, num_bytes=2 * passes, dtype=dtype, kind=FUSED_ELEMENTWISE)
        return forward, backward if live else 0.0

    def _delta_rule(self, node: Node, values: Mapping[str, Value], inputs: Sequence[Placement]) -> DeltaRuleCall:
        """This device's part of a gated delta rule."""
        parts = [local_shape(values[name].shape, where, self.mesh) for name, where in zip(node.inputs, inputs)]
        return DeltaRuleCall.of(*parts[1:4])

    def _formed_attention(
        self, node: Node, values: Mapping[str, Value], inputs: Sequence[Placement]
    ) -> tuple[float, float]:
        """Attention that no fused kernel does: two products of all scores forward, four backward, and the scores."""
        count, rows, columns, width = self._scores(node, values, inputs)
        dtype = node.output.dtype
        elements = count * rows * columns
        scores = elements * item_size(dtype)
        product = self.prices.compute_seconds(
            flops=2.0 * elements * width,
            num_bytes=scores + count * (rows + columns) * width * item_size(dtype),
            dtype=dtype,
            kind=MATMUL,
            shape=(count, rows, columns, width),
        )
        forward, backward = (
            self.prices.compute_seconds(flops=0.0, num_bytes=passes * scores, dtype=dtype, kind=ELEMENTWISE)
            for passes in SCORE_PASSES[self.fusion != Fusion()]
        )
        return 2 * product + forward, 4 * product + backward

    def _scores(
        self, node: Node, values: Mapping[str, Value], inputs: Sequence[Placement]
    ) -> tuple[int, int, int, int]:
        """(heads of samples, queries, keys, width) of an attention call's part: the product that makes its scores."""
        query, key = (
            local_shape(values[name].shape, where, self.mesh) for name, where in zip(node.inputs[:2], inputs[:2])
        )
        return math.prod(query[:-2]), query[-2], key[-2], query[-1]

    def _read(self, facts: OperatorFacts, inputs: Sequence[Placement], written: int) -> int:
        total = 0
        for place, value in facts.read:
            num_bytes = self.local_bytes(value, inputs[place])
            total += min(num_bytes, written) if value.name == facts.table else num_bytes
        return total

    def _matmul(
        self, node: Node, values: Mapping[str, Value], inputs: Sequence[Placement], outputs: Sequence[Placement]
    ) -> tuple[RowExchange, int]:
        """How a product's part runs, and the step of its rows: the whole's if less, as then some rank's is."""
        parts = [local_shape(values[name].shape, where, self.mesh) for name, where in zip(node.inputs, inputs)]
        output = local_shape(node.output.shape, outputs[0], self.mesh)
        part = matmul_shape(node, parts, output)
        exchange = row_exchange(part, parts[0], output) if node.op == LINEAR else RowExchange(part, 1, (0.0, 0.0))
        return exchange, min(row_step(part), self._facts_of(node, values).row_step)


def forms_scores(node: Node) -> bool:
    """Whether an attention call drops probabilities, so that it forms them (see ``passes.autograd.kernels``)."""
    dropped = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    return isinstance(dropped, (int, float)) and dropped > 0


def _turned(shape: tuple[int, int, int, int]) -> list[tuple[int, int, int, int]]:
    """Shapes of the products of a matmul's backward: for the first operand's gradient, and the second's."""
    batch, m, n, k = shape
    return [(batch, m, k, n), (batch, k, n, m)]
