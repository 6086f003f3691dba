"""Experts that are planned operator by operator: what an axis ``ep`` cuts of mixtures that no operator stands for.

    buffers = einsum("bsec,bsh->ebch", dispatch, x)                    # places in each expert's buffer
    outputs = einsum("ebcf,efh->ebch", relu(einsum("ebch,ehf->ebcf", buffers, up)), down)
    y = einsum("bsec,ebch->bsh", combine, outputs)

A *region* is what has a dim of experts around products of rows with a matrix for each expert: from the operator that
makes the dim (dispatch) to those that take it away (combine). Over ``ep`` its products are cut along that dim, as their
weights are; what is around them either so or by samples, whichever is cheaper. The conversions at its ends carry tokens
to experts and back: all-to-alls of buffers, or gathered tokens and scattered sums where experts compute all of them.

Only a mixture is cut so: what its experts give meets values of samples that know the experts, too (scores, or places in
buffers). Block-diagonal layers and projections by heads are none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from passes.ir.graph import Graph, Node, Value
from passes.rules.expert_rules import EXPERT, EXPERT_LINEAR
from passes.rules.rule import Dims, ShardingRule, axis_choices

RuleFor = Callable[[Node, Mapping[str, Value]], ShardingRule | None]

#: Products in which each of several rows' groups may have a matrix of its own.
_PRODUCTS = frozenset(("aten.bmm.default", "aten.matmul.default", "aten.einsum.default", "aten.baddbmm.default"))


@dataclass(frozen=True)
class ExpertRegions:
    """What an axis of experts cuts.

    Attributes:
        labels: operator → its choice that cuts experts.
        demanded: those of them that take experts' parameters: they make no other choice.
        parameters: values of parameters, and of what is computed from these alone, with a dim of experts.
        num_experts: of each region.
    """

    labels: Mapping[str, str]
    demanded: frozenset[str]
    parameters: frozenset[str]
    num_experts: tuple[int, ...]


@dataclass
class ExpertRegion:
    """One region as it grows. ``dims``: value → its dim of experts."""

    num_experts: int
    labels: dict[str, str] = field(default_factory=dict)
    demanded: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    dims: dict[str, int] = field(default_factory=dict)
    is_routed: bool = False


def expert_regions(graph: Graph, states: Collection[str], *, rules: RuleFor) -> ExpertRegions:
    """The regions of ``graph``; ``states``: its parameters, buffers, and what is computed from them alone."""
    finder = _Finder(graph, states, rules)
    regions = [region for region in finder.regions() if region.is_routed]
    labels: dict[str, str] = {}
    for region in regions:
        labels |= region.labels
    return ExpertRegions(
        labels,
        frozenset(name for region in regions for name in region.demanded),
        frozenset(name for region in regions for name in region.parameters),
        tuple(region.num_experts for region in regions),
    )


class _Finder:
    def __init__(self, graph: Graph, states: Collection[str], rules: RuleFor) -> None:
        self.graph, self.states, self.values, self.rules = graph, states, graph.values, rules
        self.nodes = {node.name: node for node in graph.nodes}
        self.makers = {value.name: node for node in graph.nodes for value in node.outputs}
        self.users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.inputs):
                self.users.setdefault(name, []).append(node)
        self.constants = {value.name for node in graph.nodes if node.constant for value in node.outputs}

    def regions(self) -> Iterator[ExpertRegion]:
        """One region after the other, whether there is routing in it or not."""
        seen: set[str] = set()
        for node in self.graph.nodes:
            factor = None if node.name in seen else self._expert_factor(node)
            if factor is None:
                continue
            rule = self.rules(node, self.values)
            assert rule is not None
            region = ExpertRegion(rule.sizes[factor], is_routed=node.op == EXPERT_LINEAR)
            self._grow(region, node, factor)
            seen |= set(region.labels)
            yield region

    def _expert_factor(self, node: Node) -> str | None:
        """The factor of a product along which rows and matrices of parameters go together."""
        if node.constant or node.op not in (EXPERT_LINEAR, *_PRODUCTS):
            return None
        rule = self.rules(node, self.values)
        if rule is None:
            return None
        if node.op == EXPERT_LINEAR:
            return EXPERT if EXPERT in rule.sizes and node.inputs[2] in self.states else None
        weights = [dims for name, dims in zip(node.inputs, rule.inputs) if name in self.states]
        rows = [dims for name, dims in zip(node.inputs, rule.inputs) if self._is_of_samples(name)]
        if not weights or not rows:
            return None
        together = set.intersection(*(_leading(dims) for dims in (*weights, *rows, rule.outputs[0])))
        return min(together, default=None)

    def _is_of_samples(self, name: str) -> bool:
        return name not in self.states and name not in self.constants

    def _grow(self, region: ExpertRegion, node: Node, factor: str) -> None:
        """Take ``node`` into the region, then its users that keep the dim of experts, and what gives it its rows."""
        pending = [(node, factor)]
        while pending:
            node, factor = pending.pop()
            rule = self.rules(node, self.values)
            label = None if rule is None else self._label(node, rule, factor)
            if rule is None or label is None or node.name in region.labels:
                continue
            region.labels[node.name] = label
            of_states = {name for name, _ in _with_factor(node.inputs, rule.inputs, factor) if name in self.states}
            if of_states:
                region.demanded.add(node.name)
                region.parameters |= {each for name in of_states for each in self._computed_from(name)}
            for name, dim in _with_factor([value.name for value in node.outputs], rule.outputs, factor):
                region.dims[name] = dim
                pending += self._followers(region, name, dim)
            if node.name in region.demanded:
                pending += self._sources(node, rule, factor)
        region.is_routed |= any(self._meets_samples(region, self.nodes[name]) for name in region.labels)

    def _label(self, node: Node, rule: ShardingRule, factor: str) -> str | None:
        """The choice that cuts ``factor``, if there is one."""
        choices = axis_choices(
            rule,
            input_grads=[self.values[name].requires_grad for name in node.inputs],
            output_grads=[value.requires_grad for value in node.outputs],
        )
        return next((choice.label for choice in choices if choice.factor == factor and choice.rows is None), None)

    def _followers(self, region: ExpertRegion, name: str, dim: int) -> Iterator[tuple[Node, str]]:
        """Users of a value with a dim of experts, and their factor of that dim; that some cannot be cut may show that
        they choose among experts."""
        for user in self.users.get(name, ()):
            rule = self.rules(user, self.values)
            dims = () if rule is None else rule.inputs[user.inputs.index(name)]
            factors = dims[dim] if dim < len(dims) else ()
            if rule is not None and factors and self._label(user, rule, factors[0]) is not None:
                yield user, factors[0]
            else:
                others = [other for other in user.inputs if other != name and self._is_of_samples(other)]
                region.is_routed |= any("int" in self.values[other].dtype for other in others)

    def _sources(self, node: Node, rule: ShardingRule, factor: str) -> Iterator[tuple[Node, str]]:
        """What makes the rows of a product of experts, through operators all of whose operands have the dim."""
        pending, visited = [(node, rule, factor)], set[tuple[str, str]]()
        while pending:
            node, rule, factor = pending.pop()
            for name, dim in _with_factor(node.inputs, rule.inputs, factor):
                maker = self.makers.get(name)
                rule_of_maker = (
                    None if maker is None or maker.constant or name in self.states else self.rules(maker, self.values)
                )
                if maker is None or rule_of_maker is None:
                    continue
                place = [value.name for value in maker.outputs].index(name)
                factors = rule_of_maker.outputs[place][dim]
                if not factors or (maker.name, factors[0]) in visited:  # residual connections lead back many times over
                    continue
                visited.add((maker.name, factors[0]))
                if self._label(maker, rule_of_maker, factors[0]) is None:
                    continue
                yield maker, factors[0]
                rows = [each for each in maker.inputs if self._is_of_samples(each)]
                carried = {each for each, _ in _with_factor(maker.inputs, rule_of_maker.inputs, factors[0])}
                if carried.issuperset(rows):
                    pending.append((maker, rule_of_maker, factors[0]))

    def _meets_samples(self, region: ExpertRegion, node: Node) -> bool:
        """Whether an operator behind a product of experts takes something else of samples that knows the experts."""
        rule = self.rules(node, self.values)
        assert rule is not None
        factor = region.labels[node.name].removeprefix("cut ")
        along = [name for name, _ in _with_factor(node.inputs, rule.inputs, factor) if self._is_of_samples(name)]
        return any(name in region.dims for name in along) and any(name not in region.dims for name in along)

    def _computed_from(self, name: str) -> Iterator[str]:
        """A parameter, or what is computed from parameters alone, and all that it is computed from."""
        pending = [name]
        while pending:
            name = pending.pop()
            yield name
            maker = self.makers.get(name)
            pending += [each for each in maker.inputs if each in self.states] if maker is not None else []


def _leading(dims: Dims) -> set[str]:
    """Factors that lead a dim each."""
    return {factors[0] for factors in dims if factors}


def _with_factor(names: Collection[str], tensors: Collection[Dims], factor: str) -> list[tuple[str, int]]:
    """Those of ``names`` that have a dim that ``factor`` leads, and that dim."""
    return [
        (name, dim)
        for name, dims in zip(names, tensors)
        for dim, factors in enumerate(dims)
        if factors and factors[0] == factor
    ]
