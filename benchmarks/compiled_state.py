"""What ``benchmarks.compiled_library`` has compiled so far, in a file beside its page: models → calls → forms of code.

A form is one kernel as machine code for one device, named by a digest of its source, of the types of its arguments and
of its options: calls of several models share it, and it stays good until the kernel changes. Another version of Triton
or of this package starts with an empty file.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import triton

from benchmarks.compiled_gpu import Compiled

PACKAGE = "meshwright"


class ModelEntry(NamedTuple):
    """What became of one model: its Triton chains, those left to ``torch.compile``, its calls; or why it has none."""

    chains: int = 0
    for_torch: int = 0
    calls: tuple[str, ...] = ()
    error: str = ""


class Results:
    """What was compiled so far.

    Attributes:
        models: by name.
        calls: by call the names of the forms that it launches, on all devices.
        forms: by name (``Compiled.code``) the device and the figures.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models: dict[str, ModelEntry] = {}
        self.calls: dict[str, Sequence[str]] = {}
        self.forms: dict[str, Compiled] = {}
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if content.get("versions") == versions():
            self.models = {
                name: ModelEntry(chains, for_torch, tuple(calls), error)
                for name, (chains, for_torch, calls, error) in content["models"].items()
            }
            self.calls = {call: forms.split() for call, forms in content["calls"].items()}
            self.forms = {code: Compiled(figures[0], code, *figures[1:]) for code, figures in content["forms"].items()}

    def save(self) -> None:
        """Write everything, so that the next run goes on from here."""
        parts = {
            "versions": versions(),
            "models": self.models,
            "calls": {call: " ".join(forms) for call, forms in self.calls.items()},
            "forms": {code: _figures(form) for code, form in self.forms.items()},
        }
        lines = (f"{json.dumps(name)}: {{\n{_lines(table)}\n}}" for name, table in parts.items())
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
        temporary.replace(self.path)

    def forms_of(self, model: str) -> Iterator[tuple[str, Compiled]]:
        """Call and form of all that a model launches, on all devices."""
        for call in self.models[model].calls:
            for code in self.calls[call]:
                yield call, self.forms[code]

    def faults(self, models: Sequence[str]) -> list[str]:
        """A line for each kernel that does not compile, spills, or does not fit."""
        lines = {
            f"{form.kernel} of {call.partition(' #')[0]} on {form.device}: "
            f"{form.error or f'{form.spilled} bytes spilled'}; first in {model}"
            for model in reversed(models)
            for call, form in self.forms_of(model)
            if not form.is_sound
        }
        return sorted(lines)


def versions() -> dict[str, str]:
    """The compiler's and ours."""
    return {"triton": triton.__version__, PACKAGE: importlib.metadata.version(PACKAGE)}


def _figures(form: Compiled) -> list[Any]:
    """All of a form but its name, which is its key."""
    kernel, _, *figures = astuple(form)
    return [kernel, *figures]


def _lines(table: Mapping[str, Any]) -> str:
    return ",\n".join(f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in table.items())
