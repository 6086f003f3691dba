"""The emitted program: its source, and the manifest of what each rank holds, takes and gives."""

from __future__ import annotations

import hashlib
import itertools
import linecache
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cost_models.files import write_text
from cost_models.short_text import ShortRepr
from passes.emit.chains import ChainReport
from passes.ir.types import MeshShape, Placement

_numbers = itertools.count()

#: Class of the emitted source that runs a step.
ENTRY_POINT = "Program"


@dataclass(frozen=True)
class InputSpec:
    """A tensor input: its place in the call, global and local shape, and its type on each mesh axis."""

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    placement: Placement
    requires_grad: bool = False


@dataclass(frozen=True)
class StateSpec:
    """A parameter, buffer or literal constant: where it lives, and the part that a rank holds.

    ``kind`` is ``"parameter"``, ``"buffer"`` or ``"constant"``; ``data`` holds the tensor of a literal constant.
    """

    path: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    placement: Placement
    kind: str
    trainable: bool
    persistent: bool
    data: Any = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class OutputSpec:
    """An output: its path in what the model returns, global and local shape, type on each mesh axis."""

    path: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    placement: Placement
    requires_grad: bool


@dataclass(frozen=True, repr=False)
class Program(ShortRepr):
    """Python source that runs one rank's part of a step, and what is needed to feed it.

    Attributes:
        source: the whole file; its class ``Program`` takes local inputs and gives local outputs by path.
        constants: specs of the constants that the program computes once per shape, in order.
        loss: the output path that is the training loss, or None.
        unflatten: makes what the model returns from whole tensors by path; None for the mapping itself.
        chains: the kernels of elementwise operators that the source has.
    """

    source: str
    model_name: str
    mesh: MeshShape
    inputs: tuple[InputSpec, ...]
    states: tuple[StateSpec, ...]
    outputs: tuple[OutputSpec, ...]
    constants: tuple[OutputSpec, ...]
    loss: str | None
    training: bool
    unflatten: Callable[[dict[str, Any]], Any] | None = field(default=None, compare=False, repr=False)
    chains: tuple[ChainReport, ...] = ()

    @property
    def filename(self) -> str:
        """What tracebacks call the source."""
        digest = hashlib.sha256(self.source.encode()).hexdigest()[:8]
        return f"<meshwright {self.model_name} {self.mesh} {digest}>"

    def load(self) -> Mapping[str, Any]:
        """Execute the source and return its namespace; tracebacks show its lines."""
        lines = self.source.splitlines(keepends=True)
        linecache.cache[self.filename] = (len(self.source), None, lines, self.filename)
        module = types.ModuleType(f"meshwright_emitted_{self.model_name}_{next(_numbers)}")
        namespace = vars(module)
        namespace["_module"] = (
            module  # for runtime.program_tools.compiling: dynamo imports what it finds a function's names in
        )
        exec(compile(self.source, self.filename, "exec"), namespace)
        return namespace

    def save(self, path: str | Path) -> None:
        """Write the source as a Python file that can be imported.

        Raises:
            ValueError: if ``path`` cannot be written, or is no regular file (links are followed).
        """
        write_text(path, self.source)
