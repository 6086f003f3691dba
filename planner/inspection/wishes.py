"""A wish beside what a plan was asked to be: of the plan's own demands, those that contradict it are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planner.whole_step.candidates.mesh_layout import AXES


@dataclass(frozen=True)
class JoinedDemands:
    """What to search for: ``fix`` and ``forbid`` as ``planner.plan`` takes them, and the plan's own demands that were
    left out, as text."""

    fix: Mapping[str, Any]
    forbid: Mapping[str, Any]
    left_out: tuple[str, ...]

    @property
    def remark(self) -> str:
        """A sentence about what was left out; nothing where that is nothing."""
        return f" (Left out of the plan's own demands, for the wish: {', '.join(self.left_out)}.)" * bool(self.left_out)


def joined_demands(
    own: Mapping[str, Any], *, fix: Mapping[str, Any], forbid: Mapping[str, Any], num_devices: int
) -> JoinedDemands:
    """``fix`` and ``forbid`` together with a plan's own demands.

    A wish for a choice replaces the plan's own demand for it. Where the axes of a mesh cannot all be met on
    ``num_devices``, those of the wish are.

    Args:
        own: ``Plan.certificate.demands``.
    """
    own_fix, replaced = _own_fix(own.get("fix", {}), fix=fix, forbid=forbid, num_devices=num_devices)
    own_forbid, allowed = _own_forbid(own.get("forbid", {}), fix=fix)
    both = {
        name: list(dict.fromkeys((*_values(own_forbid.get(name, ())), *_values(forbid.get(name, ())))))
        for name in {**own_forbid, **forbid}
    }
    return JoinedDemands({**own_fix, **fix}, both, (*replaced, *allowed))


def _own_fix(
    own: Mapping[str, Any], *, fix: Mapping[str, Any], forbid: Mapping[str, Any], num_devices: int
) -> tuple[dict[str, Any], list[str]]:
    """What a plan fixes that the wish leaves as it is, and in words what it does not."""
    remaining: dict[str, Any] = {}
    left_out = []
    for name, value in own.items():
        is_forbidden = not set(_values(value)) - set(_values(forbid.get(name, ())))
        if name not in fix and not is_forbidden:
            remaining[name] = value
        elif name not in fix or set(_values(fix[name])) != set(_values(value)):
            left_out.append(f"fix {_text(name, value)}")
    axes = [name for name in remaining if name in AXES]
    if axes and num_devices % math.prod(_size(name, {**remaining, **fix}) for name in AXES):
        left_out += [f"fix {_text(name, remaining.pop(name))}" for name in axes]
    return remaining, left_out


def _own_forbid(own: Mapping[str, Any], *, fix: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What a plan forbids that the wish does not fix, and in words what it does."""
    remaining: dict[str, Any] = {}
    left_out = []
    for name, value in own.items():
        wished = set(_values(fix.get(name, ())))
        others = [each for each in _values(value) if each not in wished]
        if others:
            remaining[name] = others
        if len(others) < len(_values(value)):
            left_out.append(f"forbid {_text(name, [each for each in _values(value) if each in wished])}")
    return remaining, left_out


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)


def _size(axis: str, fix: Mapping[str, Any]) -> int:
    """The size that an axis is to have; 1 where several may be."""
    values = _values(fix.get(axis, 1))
    return values[0] if len(values) == 1 and isinstance(values[0], int) and values[0] > 0 else 1


def _text(name: str, value: Any) -> str:
    return f"{name}={','.join(map(str, _values(value)))}"
