"""Demands that contradict each other: which ones, why, and which values would be compatible."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from cost_models.simulator import MOST_PLAYED
from cost_models.text import counted
from planner.whole_step.best_first import Search
from planner.whole_step.candidates.candidates import candidates
from planner.whole_step.candidates.demands import CHOICES, CHUNKS_PER_RANK, ZERO_RANKS, Demands
from planner.whole_step.candidates.mesh_layout import AXES, ORDERS, divisors
from planner.whole_step.candidates.mixed_samples import mixed_samples

#: What ties the choices together, each for the names that it is about; filled in with the figures of the search.
_RULES: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset(AXES), "pp × dp × ep × cp × tp must be {devices} devices, so each must divide {devices}"),
    (
        frozenset(("dp", "micro_batch", "num_microbatches")),
        "dp × micro_batch × num_microbatches must be the global batch of {batch}",
    ),
    (
        frozenset(("pp", "schedule", "chunks_per_rank")),
        "pp × chunks_per_rank can be at most {units}, the parts (layers, embedding, head) that the model can be cut "
        "into; schedules and chunks are those of a pipeline of pp ≥ 2, and some need enough micro-batches "
        f"(v_half and registered ones at most {MOST_PLAYED:,})",
    ),
    (
        frozenset(("zero", ZERO_RANKS, "ep")),
        "zero_ranks are neighbours that ZeRO 1 to 3 divides over: they must divide the data ranks, dp × cp × ep "
        "(0: all), and be a multiple of ep, so that experts divide over them too",
    ),
)
#: Demands that users cannot make.
_HIDDEN = ("order",)


def conflict(search: Search) -> str | None:
    """The error message for demands that leave no candidate; None if some candidate meets them."""
    if not search.level_one.step_units.units:
        return "the model computes nothing that could be planned: its graph has no operators"
    if _possible(search, search.demands):
        return None
    if not search.level_one.global_batch:
        return "the inputs have no samples, and a step is planned for at least one: give example inputs that have some"
    names = _minimal(search)
    if not names:
        return (
            f"{_figures(search)} go together in no way: "
            f"{mixed_samples(search) or 'neither batch, sequence, tensors nor layers divide'}"
        )
    demands_text = ", ".join(_demand(search.demands, name) for name in names)
    reasons = [text.format(**_sizes(search)) for text in _reasons(search, names)]
    if not search.level_one.micro_batches and {"micro_batch", "num_microbatches"} & set(names):
        reasons.append(mixed_samples(search))
    if "ep" in names:
        reasons.append(_experts(search))
    options = [_options(search, name) for name in names]
    what = (
        f"{demands_text} cannot be met" if len(names) == 1 else f"these demands contradict each other: {demands_text}"
    )
    return f"{what}, for {_figures(search)}; {'; '.join(reasons)}. Possible: {'; '.join(options)}"


def _reasons(search: Search, names: Collection[str]) -> list[str]:
    """The rules about all of ``names``, else those about any; without the divisibility rule if it is met."""
    sizes = search.demands.fixed.get(next(iter(names)), frozenset()) if len(names) == 1 else frozenset()
    divides = bool(sizes) and not any(search.cluster.num_devices % size for size in sizes if isinstance(size, int))
    rules = [(about, text) for about, text in _RULES if about & set(names) and not (divides and about == _RULES[0][0])]
    if ZERO_RANKS not in names:
        rules = [(about, text) for about, text in rules if ZERO_RANKS not in about]
    return [text for about, text in rules if about >= set(names)] or [text for _, text in rules]


def _experts(search: Search) -> str:
    """What an axis of experts needs of the model."""
    if search.level_one.space.expert_nodes:
        return f"ep must divide {search.level_one.num_experts}, which divides the experts of every mixture"
    return (
        "the model has no experts that ep could cut: such are products of tokens with a matrix for each expert, in one "
        "stacked parameter or of modules in a loop, whose results meet scores or places of the tokens (top-k scores, "
        "one-hot dispatch, a dense sum by a softmax); cut other layers with tp, samples with dp"
    )


def _possible(search: Search, demands: Demands) -> bool:
    """Whether some candidate meets ``demands`` and can be divided."""
    matching = candidates(
        search.cluster,
        global_batch=search.level_one.global_batch,
        num_units=_sizes(search)["units"],
        demands=demands,
        micro_batches=search.level_one.micro_batches,
        num_experts=search.level_one.num_experts,
    )
    cuts = dict.fromkeys(candidate.cut for candidate in matching)
    return any(search.bounds.whole(cut) < float("inf") for cut in cuts)


def _minimal(search: Search) -> list[str]:
    """A minimal set of names whose demands contradict each other; empty if there is no candidate without demands.

    Sizes of 1, which a mesh demands of the axes that it does not have, are left out first.
    """
    conflicting = [name for name in (*CHOICES, *_HIDDEN) if name in {*search.demands.fixed, *search.demands.forbidden}]
    for name in sorted(conflicting, key=lambda name: search.demands.fixed.get(name) != frozenset((1,))):
        fewer = [other for other in conflicting if other != name]
        if not _possible(search, _only(search.demands, fewer)):
            conflicting = fewer
    return conflicting if _possible(search, _only(search.demands, ())) else []


def _only(demands: Demands, names: Collection[str]) -> Demands:
    """The demands on ``names`` alone."""
    return replace(
        demands,
        fixed={name: values for name, values in demands.fixed.items() if name in names},
        forbidden={name: values for name, values in demands.forbidden.items() if name in names},
    )


def without(demands: Demands, name: str) -> Demands:
    """The demands but for those on ``name``."""
    return _only(demands, {*demands.fixed, *demands.forbidden} - {name})


def _options(search: Search, name: str) -> str:
    """The values of one choice that are compatible with the other demands, as text."""
    free = without(search.demands, name)
    compatible = [
        v
        for v in _values(search, name)
        if _possible(search, replace(free, fixed={**free.fixed, name: frozenset((v,))}))
    ]
    return f"{name} = {_listed(compatible)}" if compatible else f"no {name} goes with the other demands"


def _values(search: Search, name: str) -> Iterator[Any]:
    choices = CHOICES.get(name)
    if choices is not None:
        yield from choices
    elif name in _HIDDEN:
        yield from ORDERS
    elif name == "chunks_per_rank":
        yield from (1, *CHUNKS_PER_RANK)
    elif name == ZERO_RANKS:
        yield from (0, *divisors(search.cluster.num_devices)[1:])
    else:
        yield from divisors(search.cluster.num_devices if name in AXES else search.level_one.global_batch)


def _sizes(search: Search) -> dict[str, int]:
    return {
        "devices": search.cluster.num_devices,
        "batch": search.level_one.global_batch,
        "units": sum(unit.count for unit in search.level_one.step_units.units),
    }


def _figures(search: Search) -> str:
    sizes = _sizes(search)
    parts = f"{sizes['units']} part{'s' if sizes['units'] != 1 else ''}"
    return f"{counted(sizes['devices'], 'device')}, a global batch of {sizes['batch']} and a model of {parts}"


def _demand(demands: Demands, name: str) -> str:
    parts = [f"{name}={_listed(demands.fixed[name], 'or')}"] if name in demands.fixed else []
    if name in demands.forbidden:
        parts.append(f"{name} not {_listed(demands.forbidden[name], 'or')}")
    return " and ".join(parts)


def _listed(values: Collection[Any], word: str = "") -> str:
    texts = [str(value) for value in sorted(values, key=lambda value: (str(type(value)), value))]
    if word and len(texts) > 1:
        return f"{', '.join(texts[:-1])} {word} {texts[-1]}"
    return ", ".join(texts)
