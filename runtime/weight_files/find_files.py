"""Which files of a path hold a model's tensors, and under which of the model's names."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from cost_models.files import read_json

INDEX_SUFFIX = ".safetensors.index.json"
SUFFIX = ".safetensors"
#: What Hugging Face calls them.
STEM = "model"


def files_by_name(path: str | Path) -> dict[str, Path] | Path:
    """File of every tensor by the index, or the only file.

    Args:
        path: a safetensors file, an index, or a directory with either.

    Raises:
        ValueError: if there is none, or more than one that could be meant, or the index names files that are missing.
    """
    file_or_folder = Path(path)
    if file_or_folder.is_dir():
        file_or_folder = _in_directory(file_or_folder)
    if not file_or_folder.exists():
        raise ValueError(
            f"there is no {file_or_folder}: give a safetensors file, its index, or the directory they are in"
        )
    if not file_or_folder.name.endswith(".json"):
        return file_or_folder
    try:
        weight_map = read_json(file_or_folder)["weight_map"]
        files = {str(name): file_or_folder.parent / _plain_name(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file_or_folder} is not an index of safetensors files ({error})") from error
    absent = sorted({file.name for file in files.values() if not file.exists()})
    if absent:
        raise ValueError(f"{file_or_folder} names files that are not there: {', '.join(absent[:3])}")
    return files


def _plain_name(file: object) -> str:
    """The name of a file beside the index.

    Raises:
        ValueError: if it leads elsewhere: an index may come from a stranger.
    """
    if not isinstance(file, str) or file in ("", ".", "..") or os.path.basename(file) != file or "\0" in file:
        raise ValueError(f"it names {str(file)[:80]!r}, which is not the name of a file beside it")
    return file


def _in_directory(directory: Path) -> Path:
    for preferred in (directory / (STEM + SUFFIX), directory / (STEM + INDEX_SUFFIX)):
        if preferred.exists():
            return preferred
    matches = sorted(directory.glob("*" + INDEX_SUFFIX)) or sorted(directory.glob("*" + SUFFIX))
    if len(matches) != 1:
        what = "no safetensors files" if not matches else f"several ({', '.join(file.name for file in matches[:3])})"
        raise ValueError(f"{directory} has {what}: give the one to load, or the index of a set")
    return matches[0]


def model_names(stored: Collection[str], names: Collection[str], *, prefix: str | None = None) -> dict[str, str]:
    """The model's name of every stored name, which differ where one has the base model's prefix and the other not.

    A base model's file may be loaded into a model with a head (``layers.0`` for ``model.layers.0``), and the other way
    round. The prefix that matches most stored names is used; on a tie, names stay as they are.
    """
    own_names, stored_names = set(names), set(stored)
    if own_names <= stored_names:
        return {name: name for name in stored_names}
    adding = [
        _added(stored_names, own_names, head) for head in _heads(own_names - stored_names) if prefix in (None, head)
    ]
    stripping = [
        _stripped(stored_names, own_names, head) for head in _heads(stored_names - own_names) if prefix in (None, head)
    ]
    best, most, tied = {name: name for name in stored_names}, len(stored_names & own_names), False
    for renamed in (*adding, *stripping):
        # Two stored names for one of the model's: not the same model under a prefix.
        if len(set(renamed.values())) < len(renamed):
            continue
        count = len(set(renamed.values()) & own_names)
        if count > most:
            best, most, tied = renamed, count, False
        elif count == most and renamed != best:
            tied = True
    return {name: name for name in stored_names} if tied else best


def _heads(names: Iterable[str]) -> list[str]:
    return sorted({name.partition(".")[0] for name in names if "." in name})


def _added(stored: set[str], names: set[str], prefix: str) -> dict[str, str]:
    return {name: f"{prefix}.{name}" if name not in names and f"{prefix}.{name}" in names else name for name in stored}


def _stripped(stored: set[str], names: set[str], prefix: str) -> dict[str, str]:
    return {
        name: name.removeprefix(f"{prefix}.")
        if name not in names and name.removeprefix(f"{prefix}.") in names
        else name
        for name in stored
    }


def without(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that match none of the regular expressions, sorted."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return sorted(name for name in names if not any(pattern.search(name) for pattern in compiled))


def tensors_by_file(files: Mapping[str, Path], names: Iterable[str]) -> dict[Path, list[str]]:
    """Names grouped by the file that holds them."""
    grouped: dict[Path, list[str]] = {}
    for name in names:
        grouped.setdefault(files[name], []).append(name)
    return grouped
