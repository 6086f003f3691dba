"""Which operators run on parts of unequal length, and what their axes cut."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from passes.ir.graph import Value
from passes.ir.types import can_cut, sharding_axes
from passes.rules.rule import AxisChoice, ShardingRule
from passes.rules.rule_table import RULES

#: The extent of a factor or of a tensor dim, and the axes (by index) that cut it together.
Cut = tuple[int, tuple[int, ...]]

#: Operators (without overload) that one line of notation does not rule, but whose emitted call takes the sizes of what
#: is cut from its operands. Not here: what counts positions over all ranks or writes local sizes out.
_TAKES_SIZES = {
    "aten": "matmul addmm baddbmm einsum embedding sum mean amax amin logsumexp softmax _softmax log_softmax view "
    "_unsafe_view reshape flatten transpose t mT numpy_T permute unsqueeze slice select split split_with_sizes chunk "
    "cat stack layer_norm rms_norm dropout",
    "meshwright": "cross_entropy embedding linear_cross_entropy rms_norm layer_norm add_rms_norm add_layer_norm swiglu "
    "geglu bias_gelu",
}
#: Operators with a line of notation that do not: they draw numbers, or make dims of their own.
_WRITES_SIZES = {
    "aten": "rand_like randn_like bernoulli randint_like expand_as one_hot bucketize searchsorted view_as_real "
    "view_as_complex cdist pixel_shuffle pixel_unshuffle empty_like tril triu"
}


def _named(table: Mapping[str, str]) -> frozenset[str]:
    return frozenset(f"{namespace}.{name}" for namespace, names in table.items() for name in names.split())


_TAKING, _WRITING = _named(_TAKES_SIZES), _named(_WRITES_SIZES)


def takes_uneven_parts(op: str) -> bool:
    """Whether an operator may run on parts that differ in length from rank to rank."""
    name = ".".join(op.split(".")[:2])
    return name in _TAKING or (op in RULES and name not in _WRITING)


def cuts_of(
    rule: ShardingRule | None, choices: Sequence[AxisChoice], inputs: Sequence[Value], outputs: Sequence[Value]
) -> tuple[Cut, ...]:
    """What the axes cut of an operator: factors of its rule, and dims of its tensors."""
    cuts: set[Cut] = set()
    by_factor: dict[str, tuple[int, ...]] = {}
    for axis, choice in enumerate(choices):
        if choice.factor is not None and rule is not None and choice.factor not in rule.inner:
            by_factor[choice.factor] = (*by_factor.get(choice.factor, ()), axis)
    if rule is not None:
        cuts.update((rule.sizes[factor], axes) for factor, axes in by_factor.items())
    for index, value in enumerate(inputs):
        cuts.update(_cuts_of_tensor(value.shape, tuple(choice.inputs[index] for choice in choices)))
    for index, value in enumerate(outputs):
        cuts.update(_cuts_of_tensor(value.shape, tuple(choice.outputs[index] for choice in choices)))
    return tuple(sorted(cuts))


def _cuts_of_tensor(shape: tuple[int, ...], placement: tuple[str, ...]) -> Iterator[Cut]:
    """A dim that is not there is divided by nothing."""
    for dim, axes in sharding_axes(placement).items():
        yield (shape[dim] if dim < len(shape) else 1, axes)


def can_run(op: str, cuts: Collection[Cut], sizes: Sequence[int]) -> bool:
    """Whether axes of ``sizes`` can make ``cuts``: all even, or one uneven that every tensor shares dim for dim."""
    uneven = [(extent, axes) for extent, axes in cuts if extent % math.prod([sizes[axis] for axis in axes])]
    if not uneven:
        return True
    if len(uneven) > 1 or not takes_uneven_parts(op):
        return False
    (extent, axes) = uneven[0]
    alike = all(cut == uneven[0] for cut in cuts if not set(axes).isdisjoint(cut[1]))
    return alike and can_cut(extent, [sizes[axis] for axis in axes])
