"""Unit prices of the search: what one operator, one conversion step and one stored tensor cost on one device.

Both the ILP and the independent re-pricing of a plan ask here, so that they may differ only in what they count.
Seconds are of one copy of a block; bytes are of one device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from cost_models.memory import StateBytes, state_bytes
from passes.autograd.operator_tables import base_name, is_view, saves_inputs
from passes.ir.conversions import Step
from passes.ir.graph import ITEM_SIZE, Node, Value
from passes.ir.types import I, MeshShape, Placement, R, SpmdType, largest_local_shape
from passes.rules.flops import BACKWARD_PRODUCTS
from passes.rules.rule import AxisChoice, ShardingRule, own_collectives
from planner.sharding_ilp.hidden_collectives import exposed
from planner.sharding_ilp.own_collective import Collective

if TYPE_CHECKING:
    from planner.sharding_ilp.lattice import Lattice
    from planner.sharding_ilp.options import Option
    from planner.sharding_ilp.step_tables import StepTable

__all__ = ["Collective", "Prices", "Pricing", "base_name", "is_view", "saves_inputs"]

#: Operators that read only as many bytes of a table as they write: the table's place among their inputs.
READS_ROWS = {
    "aten.embedding": 0, "meshwright.embedding": 1, "aten.index_select": 0, "aten.gather": 0, "aten.index": 0,
}  # fmt: skip


#: Bytes of a copy at whose rate the copies beside collectives are priced, so many that its launch is nothing: compiled
#: code fuses many with what runs before or behind them.
LONG_COPY = 1 << 40


def table_read_by_rows(node: Node) -> str | None:
    """The input of which only the rows that are asked for are read, if there is one."""
    place = READS_ROWS.get(base_name(node.op))
    return None if place is None or place >= len(node.inputs) else node.inputs[place]


class Prices(Protocol):
    """What the search needs of a cost model."""

    def compute_seconds(self, *, flops: float, num_bytes: float, dtype: str, kind: str | None = None) -> float: ...

    def collective_seconds(self, collective: str, *, num_bytes: float, axis: str) -> float: ...


class Pricing:
    """Prices under one cost model and mesh, cached.

    Args:
        bundles: of parameters whose gradients are reduced together, the bytes of all: each is priced as its share of
            one collective over them.

    Attributes:
        sample_axes: axes that divide the dims outside of one that is laid out (``Step.copied_bytes``); None: all do.
            With those of the samples alone, one of n parts along another axis takes at least 1/n of the whole, on which
            bounds rest: a tensor that only such an axis cuts down to one element counts as copied.
    """

    sample_axes: frozenset[str] | None = None

    def __init__(self, cost_model: Prices, mesh: MeshShape, bundles: Mapping[str, int] | None = None) -> None:
        self.cost_model = cost_model
        self.mesh = mesh
        self.bundles = bundles or {}
        self.overlap_slowdown: float = getattr(cost_model, "overlap_slowdown", 0.0)
        self._collectives: dict[tuple[str, int, str], float] = {}
        #: Dtype → seconds of reading or writing a byte while copying.
        self._copies: dict[str, float] = {}
        self._elements: dict[tuple[tuple[int, ...], Placement], int] = {}
        self._shapes: dict[tuple[tuple[int, ...], Placement], tuple[int, ...]] = {}
        #: Options of operators that are priced alike, by ``likeness`` and by the id of what they may choose from, which
        #: is kept beside them.
        self.options: dict[tuple[object, ...], tuple[object, list[Option]]] = {}

    def collective(self, collective: str, num_bytes: int, axis: str) -> float:
        key = (collective, num_bytes, axis)
        if key not in self._collectives:
            self._collectives[key] = self.cost_model.collective_seconds(collective, num_bytes=num_bytes, axis=axis)
        return self._collectives[key]

    def likeness(self, node: Node, values: Mapping[str, Value]) -> object | None:
        """The same for operators that are priced alike where they are cut alike; None: nothing is known of that."""
        return None

    def family(self, value: Value) -> str:
        """A key that differs between values of equal shape whose conversions have different prices."""
        return str(self.bundles.get(value.name, ""))

    def shared_lattices(
        self, value: Value, types: tuple[tuple[SpmdType, ...], ...]
    ) -> dict[tuple[object, ...], Lattice] | None:
        """Lattices of all that price such a value alike where it has such types; None: nothing is known of that."""
        return None

    def step_bytes(self, step: Step, value: Value) -> int:
        """Bytes that a step's collectives move, see ``Step.num_bytes``."""
        return step.num_bytes_of(self._local_shape(value.shape, step.whole), ITEM_SIZE[value.dtype], self.mesh)

    def _local_shape(self, shape: tuple[int, ...], placement: Placement) -> tuple[int, ...]:
        key = (shape, placement)
        local = self._shapes.get(key)
        if local is None:
            local = self._shapes[key] = largest_local_shape(shape, placement, self.mesh)
        return local

    def step(self, step: Step, value: Value) -> tuple[float, float]:
        """Seconds of one conversion step, forward and backward (backward as if a gradient came)."""
        forward, backward = step.collectives
        if forward is None and (backward is None or not value.requires_grad):
            return 0.0, 0.0
        axis, num_bytes = step.axis_name(self.mesh), self.step_bytes(step, value)
        whole = self._local_shape(value.shape, step.whole)
        copying = [self._copying(dim, step, whole, num_bytes, value) for dim in step.laid_out_dims]
        return (
            self.collective(forward, num_bytes, axis) + copying[0] if forward else 0.0,
            self._backward(backward, step, value, num_bytes) + copying[1] if backward and value.requires_grad else 0.0,
        )

    def steps(self, table: StepTable, value: Value) -> tuple[list[float], list[float]]:
        """``step`` of all steps of a table, forward and backward."""
        item_size = ITEM_SIZE[value.dtype]
        wholes = [self._local_shape(value.shape, step.whole) for step in table.sizes]
        sizes = [step.num_bytes_of(whole, item_size, self.mesh) for step, whole in zip(table.sizes, wholes)]
        prices = [
            self.collective(name, sizes[size], axis)
            + self._copying(dim, table.sizes[size], wholes[size], sizes[size], value)
            if name
            else 0.0
            for name, axis, size, dim in table.collectives
        ]
        forward = [prices[place] for place in table.forward]
        if not value.requires_grad:
            return forward, [0.0] * len(forward)
        backward = [prices[place] for place in table.backward]
        if self.bundles.get(value.name, 0):
            for place in table.shared:
                _, backward[place] = self.step(table.steps[place], value)
        return forward, backward

    def _copying(self, dim: int | None, step: Step, whole: tuple[int, ...], num_bytes: int, value: Value) -> float:
        """Seconds of what is copied beside a collective of parts of ``dim``, see ``Step.copied_bytes``."""
        if dim is None:
            return 0.0
        copied = step.copied_bytes(whole, num_bytes, self.mesh, outer=self._outer(value.shape, step.whole, dim))
        return 2 * copied * self._second_per_copied_byte(value.dtype) if copied else 0.0  # read and written

    def _outer(self, shape: tuple[int, ...], placement: Placement, dim: int) -> int:
        """Elements of the dims outside of ``dim``; see ``sample_axes``."""
        if self.sample_axes is not None:
            is_cut = [axis in self.sample_axes for axis in self.mesh.names]
            placement = tuple(where if cut else R for where, cut in zip(placement, is_cut))
        return math.prod(self._local_shape(shape, placement)[:dim])

    def _second_per_copied_byte(self, dtype: str) -> float:
        if dtype not in self._copies:
            price = self.cost_model.compute_seconds
            self._copies[dtype] = price(flops=0.0, num_bytes=LONG_COPY, dtype=dtype, kind="exchange_copy") / LONG_COPY
        return self._copies[dtype]

    def _backward(self, collective: str, step: Step, value: Value, num_bytes: int) -> float:
        axis = step.axis_name(self.mesh)
        together = max(self.bundles.get(value.name, 0), num_bytes)
        if not num_bytes or (step.source_type, step.target_type) != (I, R):
            together = num_bytes
        share = num_bytes / together if together else 1.0
        return share * self.collective(collective, together, axis)

    def step_memory(self, step: Step, value: Value, *, saved: bool) -> int:
        """Bytes of the copy that a step leaves behind for the backward pass."""
        return self.local_bytes(value, step.target) if saved and step.collectives[0] else 0

    def local_elements(self, value: Value, placement: Placement) -> int:
        key = (value.shape, placement)
        count = self._elements.get(key)
        if count is None:
            count = self._elements[key] = math.prod(self._local_shape(value.shape, placement))
        return count

    def local_bytes(self, value: Value, placement: Placement) -> int:
        return self.local_elements(value, placement) * ITEM_SIZE[value.dtype]

    def state_bytes(self, value: Value, placement: Placement) -> StateBytes:
        """Parameter, gradient and AdamW state of one stored parameter or buffer."""
        return state_bytes(self.local_elements(value, placement), value.dtype, trainable=value.requires_grad)

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
        """Seconds of one operator, forward and backward.

        ``flops`` are the whole operator's, ``cut`` is the number of pieces its work is divided into, ``live`` says
        whether a gradient comes back. A matmul's backward is one matmul per input that needs a gradient; any other
        operator's is one pass over its inputs, outputs and their gradients.
        """
        if is_view(node):
            return 0.0, 0.0
        arguments = dict(zip(node.inputs, inputs))
        written = sum(self.local_bytes(value, where) for value, where in zip(node.outputs, outputs))
        read = {name: self.local_bytes(values[name], where) for name, where in arguments.items()}
        table = table_read_by_rows(node)
        if table is not None:
            read[table] = min(read[table], written)
        local_flops, num_bytes, dtype = flops / cut, written + sum(read.values()), node.output.dtype
        price = self.cost_model.compute_seconds
        forward = price(flops=local_flops, num_bytes=num_bytes, dtype=dtype)
        grads = [name for name in arguments if values[name].requires_grad]
        if not live or not grads:
            return forward, 0.0
        if flops:
            products = min(len(grads), BACKWARD_PRODUCTS.get(node.op, len(grads)))
            return forward, products * price(flops=local_flops, num_bytes=num_bytes, dtype=dtype)
        back = num_bytes + sum(self.local_bytes(values[name], arguments[name]) for name in grads)
        return forward, price(flops=0.0, num_bytes=back, dtype=dtype)

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
        """Kernels that an operator launches on one device, forward and backward; none where the host is not priced."""
        return 0, 0

    def reductions(
        self, rule: ShardingRule | None, choices: Sequence[AxisChoice], *, beside: tuple[float, float], live: bool
    ) -> tuple[Collective, ...]:
        """The collectives that an operator issues itself; backward ones only if a gradient comes back.

        ``beside``: seconds that it computes, forward and backward, beside which pieces of them may run.
        """
        return exposed(self.sent(rule, choices, live=live), choices, beside=beside, slowdown=self.overlap_slowdown)

    def sent(self, rule: ShardingRule | None, choices: Sequence[AxisChoice], *, live: bool) -> tuple[Collective, ...]:
        """The same with all their seconds, also those that nothing waits for."""
        if rule is None or not any(choice.reductions for choice in choices):
            return ()
        collectives = []
        for item, axis, num_bytes in own_collectives(rule, choices, self.mesh.names, self.mesh.sizes):
            if item.phase == "backward" and not live:
                continue
            seconds = self.collective(item.collective, num_bytes, axis)
            in_pieces = item.in_pieces_of is not None
            collectives.append(Collective(item.collective, axis, item.phase, num_bytes, seconds, in_pieces))
        return tuple(collectives)
