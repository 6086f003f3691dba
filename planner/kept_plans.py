"""Plans of one training for several numbers of ranks, kept in memory and as files, so that each is searched once.

A file is named by a hash of all that its plan depends on: the model's modules, tensors and source, the options, the
cluster, what is frozen, versions and this package's own source. It is plain data, and safe to delete at any time.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from cost_models import Cluster
from passes.plan import Plan
from planner.graph_cache.graph_store import keep, key_of, read_kept
from planner.rank_comparison import option_in_words, structure_of
from planner.targets import process_group_as_cluster

_SOURCES = ("cost_models", "passes", "planner", "runtime")


class KeptPlans:
    """Plans of ``model`` compiled with ``options``."""

    def __init__(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        classes = {type(module) for module in model.modules()}
        makers: list[Callable[..., Any] | type] = sorted(classes, key=lambda one: (one.__module__, one.__qualname__))
        if options.get("loss_fn") is not None:
            makers.append(options["loss_fn"])
        self._facts = {
            "model": structure_of(model),
            "sources": "\n".join(map(_source_of, makers)),
            "options": {name: option_in_words(value) for name, value in options.items() if name != "loss_fn"},
        }
        self._plans: dict[str, Plan] = {}

    def read(self, target: Any, trains: Mapping[str, bool], cluster: Cluster | None = None) -> Plan | None:
        """The plan for a target, if there is one.

        Args:
            cluster: of the job that it is for; None: of the present one.
        """
        key = self._key(target, trains, cluster)
        if key not in self._plans:
            content = read_kept("plans", key)
            if content is None:
                return None
            try:
                self._plans[key] = Plan.from_dict(content)
            except (KeyError, TypeError, ValueError):  # damaged: searched again
                return None
        return self._plans[key]

    def note(
        self, target: Any, trains: Mapping[str, bool], plan: Plan, *, writes: bool, cluster: Cluster | None = None
    ) -> None:
        """Keep a plan; ``writes``: in a file, too; ``cluster``: as of ``read``."""
        key = self._key(target, trains, cluster)
        if writes and key not in self._plans:
            keep("plans", key, json.loads(plan.to_json()))
        self._plans[key] = plan

    def _key(self, target: Any, trains: Mapping[str, bool], of_job: Cluster | None) -> str:
        cluster = (target if isinstance(target, Cluster) else of_job or process_group_as_cluster()).to_dict()
        frozen = sorted(name for name, is_trained in trains.items() if not is_trained)
        words = target.to_json() if isinstance(target, Plan) else "" if isinstance(target, Cluster) else str(target)
        return key_of(_SOURCES, {**self._facts, "target": words, "cluster": cluster, "frozen": frozen})


def _source_of(maker: Callable[..., Any] | type) -> str:
    """The text of a class or function; its name where there is none."""
    try:
        return inspect.getsource(maker)
    except (OSError, TypeError):
        return f"{maker.__module__}.{getattr(maker, '__qualname__', type(maker).__qualname__)}"
