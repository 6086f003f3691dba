"""Reads a study from TOML or plain data; every error names the field, what was expected and what was found.

Fields of a study:

    title = "Llama on two generations"
    max_programs = 1000                       # integer programs that a row's search may solve
    target_tokens_per_second = [1e5]          # looks for the fewest devices that reach these
    price_per_device_hour = 2.5               # or a table: cluster (as in clusters) or preset → price

Fields of a grid, at the top for all grids, or in ``[[grids]]``, where they stand in the place of those at the top:

    models = ["llama-3-8b", "my-model/config.json"]
    clusters = ["dgx-h100:8", "my-cluster.toml"]
    devices = [8, 16, 32, 64]                 # default: all of each cluster
    global_batches = [256]                    # or samples_per_device = [4]
    seq_lens = [8192]                         # default: what the model takes without (images)
    options = ["compiled"]                    # default: all that the study has
    layouts = ["searched", "today"]           # default: searched, and all that the study has
    baselines = ["megatron", "fsdp"]          # default: none

Named options and layouts:

    [options.compiled]                        # fields: ``OPTION_FIELDS``
    compiled = true
    fix = { zero = [1, 3] }

    [layouts.today]                           # choices as for ``planner plan --fix``
    tp = 8
    pp = 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cost_models.fields import Table, as_table, check_keys, get_count, get_number, get_tables, get_text, shown, suggest
from cost_models.files import read_toml
from cost_models.presets import preset_names
from planner.sweeps.option_sets import check_layout, read_options
from planner.sweeps.study import DEFAULT_OPTIONS, MAX_PROGRAMS, SEARCHED, Study, StudyGrid, family_of

_GRID_FIELDS = (
    "models",
    "clusters",
    "devices",
    "global_batches",
    "samples_per_device",
    "seq_lens",
    "options",
    "layouts",
    "baselines",
)
#: Two ways to say how large batches are.
_BATCHES = ("global_batches", "samples_per_device")
_STUDY_FIELDS = ("title", "max_programs", "target_tokens_per_second", "price_per_device_hour", "grids")
#: Texts longer than this are no names.
_MOST_TEXT = 1000


def load_study(path: str | Path) -> Study:
    """The study in a TOML file; relative paths in it begin at its folder.

    Raises:
        ValueError: if it cannot be read, or a field is wrong.
    """
    return read_study(read_toml(path, what="study"), folder=str(Path(path).parent), title=Path(path).stem)


def read_study(data: Any, *, folder: str = ".", title: str = "study") -> Study:
    """The study in plain data.

    Raises:
        ValueError: if a field is unknown, missing or wrong.
    """
    table = as_table(data, "study")
    check_keys(table, (*_STUDY_FIELDS, *_GRID_FIELDS), "study")
    named = table.get("options", {})
    options = {} if _is_list_of_names(named) else _named_tables(named, "options", read_options)
    layouts = {} if _is_list_of_names(table.get("layouts", {})) else _layouts(table.get("layouts", {}))
    options = options or {DEFAULT_OPTIONS: {}}
    common = {name: table[name] for name in _GRID_FIELDS if name in table and isinstance(table[name], (list, str, int))}
    grid_tables = get_tables(table, "grids", "study") if "grids" in table else [{}]
    grids = tuple(
        _grid(
            _with_common(common, _checked_grid(grid, place)),
            options,
            layouts,
            f"grids[{place}]" if grid else "study",
        )
        for place, grid in enumerate(grid_tables)
    )
    return Study(
        title=get_text(table, "title", "study") if "title" in table else title,
        grids=grids,
        options=options,
        layouts=layouts,
        prices=_prices(table, [cluster for grid in grids for cluster in grid.clusters]),
        target_tokens_per_second=_values(table, "target_tokens_per_second", "study", get_number),
        max_programs=get_count(table, "max_programs", "study") if "max_programs" in table else MAX_PROGRAMS,
        folder=folder,
    )


def _is_list_of_names(value: Any) -> bool:
    return isinstance(value, (list, str))


def _checked_grid(grid: Table, place: int) -> Table:
    check_keys(grid, _GRID_FIELDS, f"grids[{place}]")
    return grid


def _with_common(common: Table, grid: Table) -> Table:
    """The fields of a grid, and those at the study's top that it has nothing in the place of."""
    replaced = set(_BATCHES) if not grid.keys().isdisjoint(_BATCHES) else set()
    return {**{name: value for name, value in common.items() if name not in replaced}, **grid}


def _grid(
    table: Table, options: Mapping[str, Mapping[str, Any]], layouts: Mapping[str, Mapping[str, Any]], where: str
) -> StudyGrid:
    if "global_batches" in table and "samples_per_device" in table:
        raise ValueError(f"{where} has global_batches and samples_per_device: give one of them")
    if "global_batches" not in table and "samples_per_device" not in table:
        raise ValueError(f"{where} needs 'global_batches' (samples of a step) or 'samples_per_device'")
    return StudyGrid(
        models=_values(table, "models", where, get_text, required=True),
        clusters=_values(table, "clusters", where, get_text, required=True),
        devices=_values(table, "devices", where, get_count),
        global_batches=_values(table, "global_batches", where, get_count),
        samples_per_device=_values(table, "samples_per_device", where, get_count),
        seq_lens=_values(table, "seq_lens", where, get_count) or (None,),
        options=_names(table, "options", where, tuple(options)),
        layouts=_names(table, "layouts", where, (SEARCHED, *layouts)),
        baselines=_baselines(table, where),
    )


def _values(
    table: Table, key: str, where: str, get: Callable[[Table, str, str], Any], *, required: bool = False
) -> tuple[Any, ...]:
    """One value or a list of them, each once; empty where the field is not there, unless ``required``."""
    if key not in table and not required:
        return ()
    if key not in table:
        raise ValueError(f"{where} needs {key!r}, a list such as {_EXAMPLES[key]}")
    values = table[key] if isinstance(table[key], list) else [table[key]]
    if not values:
        raise ValueError(f"{where}.{key} is an empty list: give at least one, such as {_EXAMPLES[key]}")
    read = tuple(get({f"{key}[{place}]": value}, f"{key}[{place}]", where) for place, value in enumerate(values))
    twice = next((value for value in read if read.count(value) > 1), None)
    if twice is not None:
        raise ValueError(f"{where}.{key} has {shown(twice)} twice")
    return read


_EXAMPLES: Mapping[str, str] = {
    "models": '["llama-3-8b"]',
    "clusters": '["dgx-h100:8"]',
    "devices": "[8, 16]",
    "global_batches": "[256]",
    "samples_per_device": "[4]",
    "seq_lens": "[8192]",
    "options": '["default"]',
    "layouts": '["searched"]',
    "baselines": '["megatron", "fsdp"]',
    "target_tokens_per_second": "[1e5]",
}


def _names(table: Table, key: str, where: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    names: tuple[str, ...] = _values(table, key, where, get_text) or choices
    for name in names:
        if name not in choices:
            hint = suggest(name, choices) or f": expected one of {', '.join(choices)}"
            raise ValueError(f"{where}.{key}: the study has no {key} {name!r}{hint}")
    return names


def _baselines(table: Table, where: str) -> tuple[str, ...]:
    from planner.inspection.baseline_comparison import baseline_names

    names = _values(table, "baselines", where, get_text)
    return baseline_names(",".join(names)) if names else ()


def _named_tables(value: Any, where: str, read: Callable[[Table, str], Mapping[str, Any]]) -> dict[str, Any]:
    tables = as_table(value, where)
    for name in tables:
        if not name or len(name) > _MOST_TEXT or not name.isprintable():
            raise ValueError(f"{where} has a name that is not one line of printable characters: {shown(name)}")
    return {name: read(as_table(item, f"{where}.{name}"), f"{where}.{name}") for name, item in tables.items()}


def _layouts(value: Any) -> dict[str, Any]:
    layouts = _named_tables(value, "layouts", check_layout)
    if SEARCHED in layouts:
        raise ValueError(f"layouts.{SEARCHED}: that name is of the rows whose choices are searched: take another")
    return layouts


def _prices(table: Table, clusters: Iterable[str]) -> dict[str, float]:
    """Price by name: of a cluster as the study has it, or of a preset, which no row may use."""
    prices = table.get("price_per_device_hour", {})
    if not isinstance(prices, Mapping):
        return {"": get_number(table, "price_per_device_hour", "study")}
    names = {*preset_names(), *(name for cluster in clusters for name in (cluster, family_of(cluster)))}
    for name in prices:
        if name not in names:
            hint = suggest(name, sorted(names)) or ": expected a cluster as the study names it, or its preset"
            raise ValueError(f"price_per_device_hour has an unknown cluster {shown(name)}{hint}")
    return {name: get_number(prices, name, "price_per_device_hour") for name in prices}
