"""Read a Plan back from JSON, and say clearly what is wrong with a file that is not one.

The checks follow the dataclasses' own annotations, so that a field added to the plan is checked without a word here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from pathlib import Path
from typing import Any

from passes.ir.types import parse_type
from passes.plan import PLAN_VERSION, Plan


def read_plan(path: str | Path) -> Plan:
    """Read the plan in the file ``path``.

    Raises:
        ValueError: if the file is missing, is not JSON, or is not a plan of this version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read plan file {path}: {error}") from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"plan file {path} is corrupted: not JSON at line {error.lineno} ({error.msg}); make it again"
        ) from error
    try:
        return plan_from_dict(data)
    except ValueError as error:
        raise ValueError(f"plan file {path} is corrupted or not a plan: {error}") from error


def plan_from_dict(data: Any) -> Plan:
    """Build a plan from plain data.

    Raises:
        ValueError: if a field is missing, unknown or of the wrong kind, or types do not fit the mesh.
    """
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, got {type(data).__name__}")
    if data.get("version") != PLAN_VERSION:
        raise ValueError(
            f"plan version {data.get('version')!r} is not supported: this program reads version {PLAN_VERSION}; "
            "plan again"
        )
    plan: Plan = _build(Plan, data, "plan")
    _check_placements(plan)
    return plan


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(hint: Any, data: Any, where: str) -> Any:
    """``data`` as the type ``hint``; ``where`` names the place in error messages."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _build_dataclass(hint, data, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return data
    if origin is dict:
        _expect(isinstance(data, dict), "an object", data, where)
        return {key: _build(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if origin is tuple:
        _expect(isinstance(data, (list, tuple)), "a list", data, where)
        return tuple(_build(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin in (typing.Union, types.UnionType):
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if data is None else _build(inner, data, where)
    if hint is float:
        _expect(isinstance(data, (int, float)) and not isinstance(data, bool), "a number", data, where)
        return float(data)
    _expect(isinstance(data, hint) and (hint is bool or not isinstance(data, bool)), hint.__name__, data, where)
    return data


def _build_dataclass(kind: type, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), "an object", data, where)
    fields = {item.name: item for item in dataclasses.fields(kind)}
    unknown = sorted(set(data) - set(fields))
    missing = sorted(
        name
        for name, item in fields.items()
        if name not in data and item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        raise ValueError(f"{where}: unknown fields {unknown}, missing fields {missing}")
    hints = _hints(kind)
    return kind(**{name: _build(hints[name], item, f"{where}.{name}") for name, item in data.items()})


def _expect(holds: bool, expected: str, data: Any, where: str) -> None:
    if not holds:
        raise ValueError(f"{where}: expected {expected}, got {type(data).__name__} {str(data)[:40]!r}")


def _check_placements(plan: Plan) -> None:
    """Every placement has one readable type for each mesh axis."""
    placements = [
        *((f"inputs.{name}", tensor.placement) for name, tensor in plan.inputs.items()),
        *((f"states.{name}", tensor.placement) for name, tensor in plan.states.items()),
        *((f"outputs.{name}", tensor.placement) for name, tensor in plan.outputs.items()),
        *((f"nodes.{key}", placement) for key, node in plan.nodes.items() for placement in node.outputs),
        *((f"conversions of {item.value}", p) for item in plan.conversions for p in (item.source, item.target)),
        *((f"blocks of {block.first_node}", placement) for block in plan.blocks for placement in block.carried),
    ]
    for where, placement in placements:
        if len(placement) != len(plan.mesh.names):
            raise ValueError(f"{where}: {len(placement)} types for the {len(plan.mesh.names)} axes of mesh {plan.mesh}")
        for spmd_type in placement:
            parse_type(spmd_type)
    for conversion in plan.conversions:
        if conversion.axis not in plan.mesh.names:
            raise ValueError(f"conversions of {conversion.value}: no axis {conversion.axis!r} in mesh {plan.mesh}")
