"""Efficiency curves as plain data, see ``cost_models.cluster_format``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cost_models.attention_kernel import AttentionKernel
from cost_models.efficiency import ATTENTION_KINDS, FULL, KIND_STAND_IN, TILED_KINDS, Curve, Efficiency, Tiling
from cost_models.fields import Table, as_table, check_keys, get_count, get_field, get_number, shown, suggest
from cost_models.matmul_kernel import MatmulKernel
from cost_models.presets import efficiency_names, load_efficiency
from cost_models.records import from_plain

Kernel = MatmulKernel | AttentionKernel
#: By kind, the kernel model that its table may have.
_KERNELS: dict[str, type[Kernel]] = {
    **dict.fromkeys(TILED_KINDS, MatmulKernel),
    **dict.fromkeys(ATTENTION_KINDS, AttentionKernel),
}
#: Shares of the rate, by field of ``Efficiency``.
_SHARES = ("odd_rows", "narrow_rows", "narrow_tf32_rows")
_TILING_KEYS = ("processors", "depth_overhead", "shapes")


def parse_efficiency(data: Any, where: str) -> dict[str, Efficiency]:
    """The ``efficiency`` table of a device, or the name of a set of curves that comes with the package.

    Raises:
        ValueError: naming the field that is missing, unknown or malformed, and what was expected.
    """
    if isinstance(data, str):
        if data not in efficiency_names():
            hint = suggest(data, efficiency_names()) or f": known are {', '.join(efficiency_names())}"
            raise ValueError(f"{where}: no set of curves {data!r}{hint}")
        data = load_efficiency(data)
    table = as_table(data, where)
    check_keys(table, tuple(KIND_STAND_IN), where)
    return {kind: _parse_kind(table[kind], f"{where}.{kind}", kind) for kind in table}


def format_efficiency(efficiency: Mapping[str, Efficiency]) -> dict[str, Any]:
    """The inverse of ``parse_efficiency``."""
    data = {}
    for kind, item in efficiency.items():
        curves = {"flops": item.flops, "bytes": item.bytes}
        data[kind] = {key: format_curve(curve) for key, curve in curves.items() if curve != FULL}
        if item.tiling is not None:
            data[kind]["tiles"] = {
                "processors": item.tiling.processors,
                "depth_overhead": item.tiling.depth_overhead,
                "shapes": [list(shape) for shape in item.tiling.shapes],
            }
        data[kind] |= {name: share for name in _SHARES if (share := getattr(item, name)) != 1.0}
        if item.kernel is not None:
            data[kind]["kernel"] = asdict(item.kernel)
    return data


def parse_curve(value: Any, where: str) -> Curve:
    """A number for all sizes, or a list of [size, efficiency].

    Raises:
        ValueError: if it is neither, or not a curve that a device can have.
    """
    if _is_number(value):
        points = [(1.0, float(value))]
    elif isinstance(value, list) and value and all(_is_row(item, 2) for item in value):
        points = [(float(size), float(efficiency)) for size, efficiency in value]
    else:
        raise ValueError(f"{where} must be a number or a list of [size, efficiency], got {shown(value)}")
    try:
        return Curve(tuple(points))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def format_curve(curve: Curve) -> Any:
    """The inverse of ``parse_curve``."""
    if len(curve.points) == 1:
        return curve.points[0][1]
    return [list(point) for point in curve.points]


def _parse_kind(data: Any, where: str, kind: str) -> Efficiency:
    table = as_table(data, where)
    kernel = _KERNELS.get(kind)
    more = ("tiles", *_SHARES) * (kind in TILED_KINDS) + ("kernel",) * (kernel is not None)
    check_keys(table, ("flops", "bytes", *more), where)
    return Efficiency(
        flops=parse_curve(table.get("flops", 1.0), f"{where}.flops"),
        bytes=parse_curve(table.get("bytes", 1.0), f"{where}.bytes"),
        tiling=_parse_tiling(as_table(table["tiles"], f"{where}.tiles"), f"{where}.tiles")
        if "tiles" in table
        else None,
        kernel=from_plain(kernel, table["kernel"], where=f"{where}.kernel")
        if kernel is not None and "kernel" in table
        else None,
        **{name: _parse_share(table.get(name, 1.0), f"{where}.{name}") for name in _SHARES},
    )


def _parse_share(value: Any, where: str) -> float:
    if not _is_number(value) or not 0 < value <= 1:
        raise ValueError(f"{where} must be a share above 0 and at most 1, got {shown(value)}")
    return float(value)


def _parse_tiling(table: Table, where: str) -> Tiling:
    check_keys(table, _TILING_KEYS, where)
    rows = get_field(table, "shapes", where)
    if not isinstance(rows, list) or not rows or not all(_is_tile(row) for row in rows):
        raise ValueError(
            f"{where}.shapes must be a list of [rows, columns, share of the rate], like [128, 256, 1.0], got "
            f"{shown(rows)}"
        )
    return Tiling(
        processors=get_count(table, "processors", where),
        shapes=tuple((row[0], row[1], float(row[2])) for row in rows),
        depth_overhead=get_number(table, "depth_overhead", where) if table.get("depth_overhead", 0) != 0 else 0.0,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_row(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(_is_number(item) for item in value)


def _is_tile(value: Any) -> bool:
    if not _is_row(value, 3):
        return False
    return all(isinstance(side, int) and side >= 1 for side in value[:2]) and 0 < value[2] <= 1
