"""Settings as the text of a file: a shell script, YAML, or JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from cost_models.text import printable
from planner.exports.framework import Framework

#: The key of a JSON file under which its comments stand; readers of the frameworks pass over it.
COMMENT_KEY = "_comment"


def arguments(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of a command line; ``True`` is a flag, each list of a list of lists a word: ``a,b c,d``."""
    words: list[str] = []
    for name, value in settings.items():
        words.append(name)
        if isinstance(value, list):
            words += [",".join(part) for part in value]
        elif value is not True:
            words.append(str(value))
    return words


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """``{"a.b": 1}`` as ``{"a": {"b": 1}}``."""
    tree: dict[str, Any] = {}
    for name, value in settings.items():
        *parents, last = name.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return tree


def _shell(framework: Framework, settings: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    lines = ["#!/usr/bin/env bash", *(f"# {printable(line)}" for line in comments), "arguments=("]
    for name, value in settings.items():
        words = arguments({name: value})
        lines.append("  " + " ".join(shlex.quote(word) for word in words))
    launcher, *rest = framework.command
    lines += [")", f"exec {launcher} ${{LAUNCH:---standalone}} {' '.join(rest)} " + '"${arguments[@]}" "$@"']
    return "\n".join(lines) + "\n"


def _yaml(framework: Framework, settings: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    return "\n".join([*(f"# {printable(line)}" for line in comments), *_branch(nested(settings), "")]) + "\n"


def _branch(tree: Mapping[str, Any], indent: str) -> list[str]:
    """YAML of nested mappings; scalars are written as JSON, which is YAML too."""
    lines = []
    for name, value in tree.items():
        if isinstance(value, Mapping):
            lines += [f"{indent}{name}:", *_branch(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(value)}")
    return lines


def _json(framework: Framework, settings: Mapping[str, Any], comments: tuple[str, ...]) -> str:
    data = {COMMENT_KEY: [printable(line) for line in comments], **nested(settings)}
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


#: Writers of each format.
FORMS: Mapping[str, Callable[[Framework, Mapping[str, Any], tuple[str, ...]], str]] = {
    "shell": _shell,
    "yaml": _yaml,
    "json": _json,
}
