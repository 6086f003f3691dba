"""Probabilities by which models leave out whole layers at random (LayerDrop), which no program can follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_PARTS_OF_NAMES = ("layerdrop", "layer_drop")
#: At most so many are named.
_MOST = 4


def advice_on_layer_drops(model: nn.Module) -> str:
    """What to set to zero so that the model leaves out no layer, for the end of a sentence; "" if there is nothing."""
    places = [f"{where} (now {value:g})" for where, value in dict(_probabilities(model)).items()]
    named = ", ".join(places[:_MOST]) + (", …" if len(places) > _MOST else "")
    return f"; or leave out no layers: set {named} to 0 before planner.compile" if places else ""


def _probabilities(model: nn.Module) -> Iterator[tuple[str, float]]:
    seen = set()
    for path, module in model.named_modules():
        where = f"model.{path}" if path else "model"
        yield from _above_zero(where, vars(module))
        config = vars(module).get("config")
        if hasattr(config, "__dict__") and id(config) not in seen:
            seen.add(id(config))
            yield from _above_zero(f"{where}.config", vars(config))


def _above_zero(where: str, attributes: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in attributes.items():
        if any(part in name for part in _PARTS_OF_NAMES) and isinstance(value, float) and value > 0:
            yield f"{where}.{name}", value
