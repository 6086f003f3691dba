"""Building one section: a value is converted just before the first use that needs it, then shared."""

from __future__ import annotations

from passes.ir.conversions import step_between
from passes.ir.graph import ITEM_SIZE, Node
from passes.ir.types import Placement
from passes.plan import ConversionPlan
from passes.shard.context import Context, Tree, input_placement, output_placement
from passes.shard.sharded_graph import Compute, Convert, Local, Repeat


class Body:
    """Builds one section; remembers the placements in which each value is already available."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.body: list[Compute | Convert | Repeat] = []
        self.there: dict[str, dict[Placement, Local]] = {}

    def tree(self, name: str) -> Tree:
        return self.context.trees[name]

    def origin(self, name: str, placement: Placement) -> Local | None:
        """A value that the section does not compute (a state, an argument), or None."""
        raise NotImplementedError

    def get(self, name: str, placement: Placement) -> Local:
        """``name`` in ``placement``, converted now if it is not available yet."""
        placement = self.context.normal(placement, self.context.values[name])
        available = self.there.setdefault(name, {})
        if placement in available:
            return available[placement]
        original = self.origin(name, placement)
        if original is not None:
            available[original.placement] = original
            if original.placement == placement:
                return original
        for conversion in self.tree(name).chain(placement, name):
            if conversion.target in available:
                continue
            source = available.get(conversion.source) or self.get(name, conversion.source)
            available[conversion.target] = self.convert(conversion, source, self.body)
        return available[placement]

    def convert(
        self, conversion: ConversionPlan, source: Local, body: list[Compute | Convert | Repeat] | list[Convert]
    ) -> Local:
        context = self.context
        step = step_between(conversion.source, conversion.target)
        target = context.local(source.value, step.target)
        num_bytes = step.num_bytes(source.value.shape, ITEM_SIZE[source.value.dtype], context.mesh)
        forward, _ = step.collectives
        body.append(Convert(step, source, target, forward, conversion.backward, num_bytes))
        return target

    def compute(self, node: Node) -> None:
        self.context.check_runs(node)
        rule, choices = self.context.choices[node.name]
        inputs = tuple(self.get(name, input_placement(choices, index)) for index, name in enumerate(node.inputs))
        outputs = []
        for index, value in enumerate(node.outputs):
            local = self.context.local(value, self.context.normal(output_placement(choices, index), value))
            self.there[value.name] = {local.placement: local}
            outputs.append(local)
        self.body.append(Compute(node, inputs, tuple(outputs), choices, rule))
