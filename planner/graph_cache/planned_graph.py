"""The graph that a model is planned on: from the cache if the model is a config by name or path, else captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cost_models.records import from_plain
from cost_models.registrations import registrations_in_words
from passes.ir.graph import Graph
from passes.ir.torch_facts import facts_at_hand, known_facts
from passes.plan import FusionPlan
from planner.graph_cache.graph_json import from_plain_graph, to_plain
from planner.graph_cache.graph_store import graph_key, keep_graph, read_graph
from runtime.program_tools.fused_operators import register_before_asking

if TYPE_CHECKING:
    from planner.whole_step.shared_spaces import Spaces

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class PlannedGraph:
    """A graph as it is planned: with fused operators if ``fusion`` (what the pattern pass did) is not None.

    ``spaces``: what its plans on several clusters have in common (``planner.whole_step.plan_step``).
    """

    graph: Graph
    fusion: FusionPlan | None
    spaces: Spaces = field(default_factory=dict, compare=False, repr=False)


@contextmanager
def planned_graph(model: Any, make: Callable[[], PlannedGraph], **options: Any) -> Iterator[PlannedGraph]:
    """The graph of a model to plan on inside of the ``with`` block: a kept one, or what ``make`` gives.

    A graph of a config by name or path is kept on disk at the end of the block, with what planning it asked of torch.
    One that was kept is planned without importing torch or transformers; it lacks the data of literal constants, so it
    can be planned, not emitted.

    Args:
        model: as ``planner.plan`` takes it.
        options: what the graph depends on beside the model; a graph is kept if all of it is plain data.
    """
    by_file = isinstance(model, (str, Path)) and all(isinstance(option, _PLAIN) for option in options.values())
    key = _key(str(model), options) if by_file else None
    cached = _read(key) if key is not None else None
    facts = cached.facts if cached is not None else {}
    register_before_asking()
    with facts_at_hand(facts) as questions:
        planned = cached.planned if cached is not None else make()
        try:
            yield planned
        finally:
            if key is not None:
                before, asked = (None, known_facts()) if cached is None else (facts, questions.facts())
                _keep(key, planned, before=before, asked=asked)


def _key(model: str, options: Mapping[str, Any]) -> str | None:
    """The key of a config's graph; None if the config cannot be read (capturing says why)."""
    from planner.library.configs import config_file

    try:
        text = config_file(model).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    return graph_key(config=text, registrations=registrations_in_words(), **options)


@dataclass(frozen=True)
class _CachedGraph:
    """What is kept: the graph, and what planning it has asked of torch."""

    planned: PlannedGraph
    facts: dict[str, dict[str, Any]]


#: The graph that was read last, and the plain data that it was made of: further clusters plan the same object.
_last: list[tuple[Any, PlannedGraph]] = []


def _read(key: str) -> _CachedGraph | None:
    content = read_graph(key)
    if content is None:
        return None
    try:
        facts = {kind: dict(answers) for kind, answers in content["facts"].items()}
        plain = content["graph"], content["fusion"]
        if not _last or _last[0][0] != plain:
            fusion = None if plain[1] is None else from_plain(FusionPlan, plain[1], where="fusion")
            _last[:] = [(plain, PlannedGraph(from_plain_graph(plain[0]), fusion))]
        return _CachedGraph(_last[0][1], facts)
    except (AttributeError, KeyError, TypeError, ValueError):  # damaged: captured again
        return None


def _keep(
    key: str, planned: PlannedGraph, *, before: dict[str, dict[str, Any]] | None, asked: dict[str, dict[str, Any]]
) -> None:
    """Keep the graph if it is new, or if something was asked that is not among the facts of ``before``."""
    facts = {kind: {**(before or {}).get(kind, {}), **asked.get(kind, {})} for kind in {**(before or {}), **asked}}
    if facts == before:
        return
    try:
        graph = to_plain(planned.graph)
    except ValueError:
        return
    fusion = None if planned.fusion is None else asdict(planned.fusion)
    keep_graph(key, {"graph": graph, "fusion": fusion, "facts": facts})
