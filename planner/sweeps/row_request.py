"""Rows of a study: what each is to be planned as, and the key that its result is kept under."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cost_models import Cluster
from cost_models.short_text import ShortRepr
from planner.library.configs import config_file, config_names
from planner.planning import as_cluster
from planner.sweeps.study import SEARCHED, Study, StudyGrid

#: Studies with more rows than this are mistakes.
MOST_ROWS = 100_000
#: Packages whose versions decide what a plan is.
_PACKAGES = ("meshwright", "torch", "transformers", "highspy", "pulp")
#: Folders of this package whose files decide what a plan is, those in them that do not, and what those files are.
_FOLDERS, _SUFFIXES = ("planner", "passes", "runtime", "cost_models"), (".py", ".toml")
_ELSEWHERE = {"cli", "html_report", "sweeps", "trainer"}
#: Raised when ``planner.sweeps.plan_row`` writes other records.
_FORMAT = 1


@dataclass(frozen=True, repr=False)
class RowRequest(ShortRepr):
    """One plan of a study, as plain data.

    Attributes:
        model, cluster, options, layout: as the study names them.
        model_path: a name of the config library, or the path of a config.
        cluster_data: the whole cluster; ``num_devices``: how many of its devices are planned for.
        batch: as the study says it, ``"256"`` samples or ``"4 a device"``.
        arguments: further ones of ``planner.plan``.
    """

    model: str
    cluster: str
    options: str
    layout: str
    batch: str
    model_path: str
    cluster_data: Mapping[str, Any]
    num_devices: int
    global_batch: int
    seq_len: int | None
    arguments: Mapping[str, Any]
    baselines: tuple[str, ...]
    max_programs: int

    @property
    def graph(self) -> tuple[Any, ...]:
        """What the captured graph depends on; rows that agree in it share one."""
        arguments = self.arguments
        return self.model_path, self.global_batch, self.seq_len, arguments.get("dtype"), arguments.get("fuse", True)

    @functools.cached_property
    def key(self) -> str:
        """The hash of all that the row's plan depends on, versions and sources of this package included."""
        content = {
            "format": _FORMAT,
            **asdict(self),
            "model_path": _config_text(self.model_path),
            "versions": _versions(),
            "sources": _sources(),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def plan_file(self) -> str:
        """The name of the file that the plan is saved in: what it is of, then its key."""
        length = () if self.seq_len is None else (f"s{self.seq_len}",)
        parts = (self.model, self.cluster, f"{self.num_devices}", f"b{self.global_batch}", *length)
        texts = (*parts, self.options, self.layout)
        name = "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", Path(text).name).strip("-.")[:40] for text in texts)
        return f"{name}_{self.key[:10]}.json"


def study_rows(study: Study) -> tuple[RowRequest, ...]:
    """The rows of a study in its order, each once.

    Raises:
        ValueError: for a model or a cluster that does not exist, and for too many rows.
    """
    clusters: dict[str, Cluster] = {}
    unique: dict[str, RowRequest] = {}
    for grid in study.grids:
        for row in _grid_rows(study, grid, clusters):
            unique.setdefault(json.dumps(asdict(row), sort_keys=True), row)
            if len(unique) > MOST_ROWS:
                raise ValueError(f"the study has more than {MOST_ROWS:,} rows: divide it")
    return tuple(unique.values())


def _grid_rows(study: Study, grid: StudyGrid, clusters: dict[str, Cluster]) -> Iterator[RowRequest]:
    paths = {model: _model_path(model, study.folder) for model in grid.models}
    for name in grid.clusters:
        if name not in clusters:
            clusters[name] = as_cluster(_beside(name, study.folder) if name.endswith(".toml") else name, num_devices=1)
    sizes = [(size, f"{size}") for size in grid.global_batches]
    weak = [(size, f"{size} a device") for size in grid.samples_per_device]
    for model, name in itertools.product(grid.models, grid.clusters):
        cluster = clusters[name]
        data = cluster.to_dict()
        combinations = itertools.product(
            grid.devices or (cluster.num_devices,), (*sizes, *weak), grid.seq_lens, grid.options, grid.layouts
        )
        for devices, (samples, batch), seq_len, options, layout in combinations:
            arguments = dict(study.options[options])
            if layout != SEARCHED:
                arguments["fix"] = {**arguments.get("fix", {}), **study.layouts[layout]}
            yield RowRequest(
                model=model,
                cluster=name,
                options=options,
                layout=layout,
                batch=batch,
                model_path=paths[model],
                cluster_data=data,
                num_devices=devices,
                global_batch=samples * devices if weak else samples,
                seq_len=seq_len,
                arguments=arguments,
                baselines=grid.baselines if layout == SEARCHED else (),
                max_programs=study.max_programs,
            )


def _model_path(model: str, folder: str) -> str:
    """``model`` if it is a name of the library, else the path of its config.

    Raises:
        ValueError: if there is no such config.
    """
    if model in config_names():
        return model
    return str(config_file(_beside(model, folder)))


def _beside(path: str, folder: str) -> str:
    """``path``, which begins at ``folder`` if it leads somewhere from there."""
    inside = Path(folder) / Path(path).expanduser()
    return str(inside) if inside.exists() else path


def _config_text(model_path: str) -> str:
    try:
        return config_file(model_path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


@functools.cache
def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


@functools.cache
def _sources() -> str:
    """The hash of this package's own files: where they are and when they were written does not matter."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for folder in _FOLDERS:
        for path in sorted(path for path in (root / folder).rglob("*") if path.suffix in _SUFFIXES):
            if _ELSEWHERE.isdisjoint(path.relative_to(root).parts):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
