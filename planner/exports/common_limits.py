"""Limits and settings that several frameworks share, as rows for their tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from passes.plan.step_plan import CHUNKED_LOSS
from planner.exports.framework import LimitRow, SettingRow
from planner.exports.plan_facts import PlanFacts, TensorLayer

#: What a plan calls what each layer does, in words.
_WORDS = {"whole": "whole", "tokens": "whole, the tokens are cut", "hidden": "cut along the hidden dim"}


def _uniform_recompute(facts: PlanFacts) -> Iterator[str]:
    if len(facts.layer_recompute) > 1:
        policies = ", ".join(
            f"{group.recompute} ×{facts.layers_of(group)}" for group in facts.groups if facts.layers_of(group)
        )
        yield f"recompute differs between layers ({policies}): all layers get {facts.exported_recompute!r}"
    elif facts.layer_recompute[0] != facts.exported_recompute:
        yield f"recompute={facts.layer_recompute[0]} of the layers: they get {facts.exported_recompute!r}"


def _whole_ends(facts: PlanFacts) -> Iterator[str]:
    for policy in facts.end_recompute:
        if policy not in ("none", CHUNKED_LOSS):
            yield f"recompute={policy} of what stands around the layers (embedding, loss): it is kept there"


def _chunked_loss(facts: PlanFacts) -> Iterator[str]:
    if any(group.recompute == CHUNKED_LOSS for group in facts.groups):
        yield "recompute=chunked_loss: the loss is computed at once, its logits are kept"


def _uniform_zero(facts: PlanFacts) -> Iterator[str]:
    if len(facts.zero) > 1:
        yield f"ZeRO stages differ between layers ({', '.join(map(str, facts.zero))}): all get {facts.main_zero}"


def _data_axes(facts: PlanFacts) -> Iterator[str]:
    cut = facts.cut_states("dp")
    if cut:
        yield f"axis dp cuts parameters ({cut[0]} and {len(cut) - 1} more), not samples alone"
    for step in facts.activations_converted("dp", "all_to_all")[:1]:
        yield f"axis dp cuts more than samples: {step.value} changes its type there"


def _own_samples(facts: PlanFacts) -> Iterator[str]:
    joined = [step for step in facts.joined_samples if not facts.is_batch_norm(step)]
    if joined:
        operator = joined[0].value.removeprefix("node:").strip(":")
        yield (
            f"the loss or a layer reads the samples of all data ranks ({joined[0].forward} of {operator}): "
            "there each rank reads its own alone, which is another loss"
        )


def _own_batch_norm(facts: PlanFacts) -> Iterator[str]:
    if any(map(facts.is_batch_norm, facts.joined_samples)):
        yield "batch norm is over the samples of all data ranks: there each rank norms its own alone"


def _experts_alone(facts: PlanFacts) -> Iterator[str]:
    for name in facts.cut_states("ep"):
        if "expert" not in name:
            yield f"axis ep cuts {name}, which is no expert"


def _heads_alike(facts: PlanFacts) -> Iterator[str]:
    """Query, key and value of one module, of which some are cut and some are whole: Python code counts heads."""
    by_parent: dict[str, set[str]] = {}
    for layer in facts.tensor_layers:
        parent = layer.pattern.rpartition(".")[0]
        if parent and layer.role in ("column", "whole", "tokens"):
            by_parent.setdefault(parent, set()).add("column" if layer.role == "column" else "whole")
    for parent, roles in by_parent.items():
        if roles == {"column", "whole"} and "attn" in parent.lower() + "attention":
            mixed = ", ".join(
                f"{layer.module.rpartition('.')[2]} {layer.role}"
                for layer in facts.tensor_layers
                if layer.pattern.rpartition(".")[0] == parent
            )
            yield f"tp: layers of {parent} are cut and whole side by side ({mixed})"


def _converted_activations(facts: PlanFacts) -> Iterator[str]:
    steps = facts.activations_converted("tp", "all_to_all")
    if steps:
        count = sum(step.copies for step in steps)
        yield f"tp: {count} all-to-all conversions of activations (the first: {steps[0].value})"


def megatron_split(*, vocabulary: bool) -> LimitRow:
    """Layers of blocks alternate between column and row; the head is a column, the embedding with most rows is cut
    along the vocabulary (``vocabulary``) or whole, as all others (of positions) are."""

    def lacks(facts: PlanFacts) -> Iterable[str]:
        if facts.size("tp") == 1:
            return
        most_rows = max((layer.rows for layer in facts.tensor_layers), default=0)
        for layer in {layer.pattern: layer for layer in facts.tensor_layers}.values():
            expected = ("column",) if layer.is_head else ("column", "row")
            if layer.rows:
                expected = ("vocabulary",) if vocabulary and layer.rows == most_rows else ("whole",)
            if layer.role not in expected:
                yield f"tp: {layer.pattern} is {_WORDS.get(layer.role, layer.role)}: it has {' or '.join(expected)}"
            elif layer.role == "column" and layer.gathered:
                yield f"tp: the output of {layer.pattern} is gathered{_gathered_pieces(layer)}"

    return LimitRow("layers split in columns and rows by turns", lacks)


def _gathered_pieces(layer: TensorLayer) -> str:
    """What the framework does instead; of a layer with several projections in one, in what it differs."""
    if not layer.in_pieces:
        return ": it stays cut there"
    return (
        " before it is split into pieces: it stays cut there, into heads of all pieces (query, key and value in one), "
        "for which this weight's rows are in another order; give the model a layer for each piece, or fix tp=1"
    )


def orders(*allowed: tuple[str, ...]) -> LimitRow:
    """Orders of the axes on the links, outermost first."""

    def lacks(facts: PlanFacts) -> Iterable[str]:
        if not any(_is_within(facts.order, order) for order in allowed):
            yield f"axes lie on the links as {' '.join(facts.order)}, outermost first: expected {' '.join(allowed[0])}"

    return LimitRow("order of the axes", lacks)


def _is_within(order: tuple[str, ...], whole: tuple[str, ...]) -> bool:
    return tuple(axis for axis in whole if axis in order) == order


def only_if(says: str, condition: Callable[[PlanFacts], bool], sentence: str) -> LimitRow:
    """A limit with one sentence."""
    return LimitRow(says, lambda facts: (sentence,) if condition(facts) else ())


UNIFORM_RECOMPUTE = LimitRow("one recompute policy for all layers", _uniform_recompute)
WHOLE_ENDS = LimitRow("nothing is recomputed around the layers", _whole_ends)
CHUNKED_LOSSES = LimitRow("no loss in chunks", _chunked_loss)
UNIFORM_ZERO = LimitRow("one ZeRO stage for all layers", _uniform_zero)
DATA_AXES = LimitRow("the data axis cuts samples alone", _data_axes)
OWN_SAMPLES = LimitRow("data ranks read their own samples alone", _own_samples)
OWN_BATCH_NORM = LimitRow("data ranks norm their own samples alone", _own_batch_norm)
EXPERT_AXIS = LimitRow("the expert axis cuts experts alone", _experts_alone)
HEADS_ALIKE = LimitRow("heads are cut alike", _heads_alike)
NO_EXCHANGE = LimitRow("no all-to-all on the tensor axis", _converted_activations)
PLAIN_ENDS = only_if(
    "stages of whole layers",
    lambda facts: not facts.has_plain_ends,
    "the pipeline is cut elsewhere than between layers: stages there are whole layers",
)
#: What every framework of data-parallel ranks shares.
EVERYWHERE = (UNIFORM_RECOMPUTE, WHOLE_ENDS, UNIFORM_ZERO, DATA_AXES, OWN_SAMPLES, EXPERT_AXIS)
#: Where the script makes the model, it lets batch norm be over the samples of all data ranks.
SYNC_BATCH_NORM = SettingRow(
    "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
    lambda facts: any(map(facts.is_batch_norm, facts.joined_samples)) or None,
    "batch norm over the samples of all data ranks",
    "script",
)
