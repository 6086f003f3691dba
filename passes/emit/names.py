"""Variable names of one emitted function: from the model, unique, never hiding what the source needs."""

from __future__ import annotations

import builtins
import keyword
import re

from passes.ir.graph import Node

#: Names that emitted source uses itself.
RESERVED = frozenset(
    (
        "torch", "F", "spmd", "ops", "kernels", "math", "I", "P", "R", "S", "V", "w", "self", "Block", "Program",
        "layer", "layers", "draw",
    )
)  # fmt: skip
#: Names for values whose operator is called like a builtin.
_INSTEAD = {
    "abs": "magnitude", "all": "all_true", "any": "any_true", "max": "largest", "min": "smallest", "pow": "power",
    "round": "rounded", "slice": "part", "sum": "total",
}  # fmt: skip
#: Names of the outputs of operators that give more than what their module is for.
_OUTPUTS = {"meshwright.add_rms_norm.default": ("residual",), "meshwright.add_layer_norm.default": ("residual",)}
#: In ASCII: Python takes some different letters for the same name.
_NOT_A_NAME = re.compile(r"\W+", re.ASCII)
_NUMBER_AT_END = re.compile(r"(_\d+)+$")


class Names:
    """Gives out names; the same base gets a number from the second time on."""

    def __init__(self, reserved: frozenset[str] = frozenset()) -> None:
        self.taken = set(RESERVED | reserved)

    def new(self, base: str) -> str:
        base = identifier(base)
        name, number = base, 1
        while name in self.taken:
            name, number = f"{base}_{number}", number + 1
        self.taken.add(name)
        return name


def identifier(text: str) -> str:
    """``text`` as an identifier that hides no keyword and no builtin."""
    name = _NOT_A_NAME.sub("_", text).strip("_") or "value"
    if name[0].isdigit():
        name = f"value_{name}"
    name = _INSTEAD.get(name, name)
    if keyword.iskeyword(name) or hasattr(builtins, name):
        name += "_"
    return name


def base_name(text: str) -> str:
    """A captured name without the number at its end: ``view_3`` → ``view``."""
    return _NUMBER_AT_END.sub("", text) or text


def name_of_output(node: Node, index: int, *, has_state: bool) -> str:
    """A name for an output: that of its module where the operator is what the module is for, else the operator's."""
    value = node.outputs[index]
    own = _OUTPUTS.get(node.op, ())
    if index < len(own):
        return own[index]
    if has_state and node.module_path:
        parts = [part for part in node.module_path.split(".") if not part.isdigit()]
        if parts:
            return parts[-1]
    return base_name(value.name)


def class_name(text: str) -> str:
    """A class name for a block."""
    name = _NOT_A_NAME.sub("", text)
    return name if name.isidentifier() and not keyword.iskeyword(name) else f"Block{name}"
