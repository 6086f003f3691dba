"""Building one section: a value is converted just before the first use that needs it, then shared."""

from __future__ import annotations

from collections.abc import Iterable

from passes.ir.conversions import step_between
from passes.ir.graph import ITEM_SIZE, Node
from passes.ir.types import Placement
from passes.plan import ConversionPlan
from passes.shard.context import Context, Tree, input_placement, output_placement
from passes.shard.sharded_graph import Compute, Convert, Local, Repeat


class Body:
    """Builds one section of ``nodes``; remembers the placements in which each value is already available."""

    def __init__(self, context: Context, nodes: Iterable[Node]) -> None:
        self.context = context
        self.makers = {value.name: node for node in nodes for value in node.outputs}
        self.computed: set[str] = set()
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
        """Compute ``node``, unless that is done; and with it the layers that gather rows with it."""
        if node.name in self.computed:
            return
        together = self.context.gathers.get(node.name, (node,))
        for other in together[1:]:
            for name in other.inputs[1:]:
                self._compute_ahead(name)
        for member in together:
            self._compute_alone(member, tuple(each.name for each in together) if len(together) > 1 else ())

    def _compute_ahead(self, name: str) -> None:
        """Compute a value that this section makes of states alone, if it is not there yet."""
        maker = self.makers.get(name)
        if maker is not None and maker.name not in self.computed:
            for source in maker.inputs:
                self._compute_ahead(source)
            self.compute(maker)

    def _compute_alone(self, node: Node, gathers_with: tuple[str, ...]) -> None:
        self.computed.add(node.name)
        self.context.check_runs(node)
        rule, choices = self.context.choices[node.name]
        inputs = tuple(self.get(name, input_placement(choices, index)) for index, name in enumerate(node.inputs))
        outputs = []
        for index, value in enumerate(node.outputs):
            local = self.context.local(value, self.context.normal(output_placement(choices, index), value))
            self.there[value.name] = {local.placement: local}
            outputs.append(local)
        self.body.append(Compute(node, inputs, tuple(outputs), choices, rule, gathers_with=gathers_with))
