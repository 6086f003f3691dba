"""Which layers of a model are frozen as training goes on: a schedule, PipeTransformer's adaptive rule, or a function.

The adaptive rule (He et al., PipeTransformer, 2021): at the t-th decision at most
L_t = L_{t−1} + α (L − L_{t−1}) of the L layers are frozen, where L_{t−1} are frozen before it: those before the first
whose gradient norm is not among the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cost_models.checked_numbers import check_whole_number

#: Number of the decision, layers that are frozen, gradient norms of all layers → layers to freeze, from the first on.
FreezeRule = Callable[[int, int, Sequence[float]], int]


@dataclass(frozen=True)
class FreezePolicy:
    """How many layers, from the first on, are frozen after each decision. Frozen layers stay frozen.

    Example:
        >>> policy = planner.FreezePolicy.adaptive(num_layers=12, alpha=1 / 3)
        >>> frozen = policy.next(decision, frozen, norms)

    Then set ``requires_grad`` of the layers' parameters to False and call ``parallel.replan``.

    Raises:
        ValueError: for less than one layer.
    """

    num_layers: int
    rule: FreezeRule

    def __post_init__(self) -> None:
        if self.num_layers < 1:
            raise ValueError(f"num_layers={self.num_layers}: a model has at least one layer to freeze")

    @staticmethod
    def scheduled(num_layers: int, frozen: Mapping[int, int]) -> FreezePolicy:
        """``frozen`` says how many layers are frozen from which decision on.

        Raises:
            ValueError: for numbers of layers that the model has not, and for fewer later on.
        """
        before = 0
        for decision, count in sorted(frozen.items()):
            if not 0 <= count <= num_layers or decision < 0:
                raise ValueError(
                    f"{count} layers are to be frozen from {decision} on: give numbers from 0 to {num_layers}, as many "
                    "layers as the model has, from 0 or later on"
                )
            if count < before:
                raise ValueError(
                    f"{count} layers are to be frozen from {decision} on, and {before} before it: frozen layers stay "
                    "frozen, so give as many or more each time"
                )
            before = count

        def rule(decision: int, before: int, norms: Sequence[float]) -> int:
            return max((count for start, count in frozen.items() if start <= decision), default=before)

        return FreezePolicy(num_layers, rule)

    @staticmethod
    def adaptive(num_layers: int, alpha: float) -> FreezePolicy:
        """The adaptive rule; without gradient norms its bound alone counts.

        Raises:
            ValueError: for an ``alpha`` that is not between 0 and 1.
        """
        if not 0 < alpha < 1:
            raise ValueError(f"alpha={alpha}: the share of the remaining layers that a decision may freeze, in (0, 1)")

        def rule(decision: int, before: int, norms: Sequence[float]) -> int:
            # Fewer may be frozen than the bound allowed so far: a share of those that are left may be from here.
            share = math.ceil(before + alpha * (num_layers - before) - 1e-9)
            bound = min(freeze_bound(num_layers, alpha, decision), share)
            if not norms or bound <= before:
                return bound
            smallest = sorted(range(before, num_layers), key=lambda layer: (norms[layer], layer))[: bound - before]
            return next(layer for layer in range(before, num_layers + 1) if layer not in smallest)

        return FreezePolicy(num_layers, rule)

    def next(self, decision: int, frozen: int, norms: Sequence[float] = ()) -> int:
        """How many layers are frozen after a decision.

        Args:
            frozen: before it.
            norms: of every layer's gradient, those of frozen layers are not looked at; empty if they are not known.

        Raises:
            ValueError: for another number of norms than of layers, or a rule that gives a number of layers that the
                model has not.
        """
        if norms and len(norms) != self.num_layers:
            raise ValueError(f"{len(norms)} gradient norms for {self.num_layers} layers: give one for each")
        count = self.rule(decision, frozen, norms)
        check_whole_number("the layers that the rule freezes", count, at_least=0)
        if not 0 <= count <= self.num_layers:
            raise ValueError(f"the rule freezes {count} layers of a model that has {self.num_layers}")
        return max(frozen, count)


def freeze_bound(num_layers: int, alpha: float, decision: int) -> int:
    """The most layers that may be frozen after a number of decisions: L (1 − (1 − α)^t), rounded up."""
    return min(num_layers, math.ceil(num_layers * (1 - (1 - alpha) ** decision) - 1e-9))


def halved_pipeline(num_layers: int, frozen: int, length: int) -> int:
    """PipeTransformer's pipeline for what is not frozen: halved while no stage has more than it had at first.

    Args:
        length: stages at first, of ``num_layers / length`` layers each.
    """
    stages = length
    while stages > 1 and (num_layers - frozen) / (stages // 2) <= num_layers / length:
        stages //= 2
    return stages
