"""Single numbers drawn from [0, 1) that Python reads: what is compared with them has to decide it whatever is drawn.

``random.random()`` and ``torch.rand(()).item()`` give a ``DrawnNumber`` while a model is traced. A comparison answers
where its bound decides it for all numbers (``drawn_ranges``): ``torch.rand(()).item() >= 0.0``. All else is refused.
"""

from __future__ import annotations

from typing import Any, NoReturn

from passes.capture.drawn_ranges import compared
from passes.capture.replaced_builtins import with_builtin
from passes.capture.value_reads import ValueReads
from passes.ir.errors import CaptureError

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
#: What else may be done with a number.
_OTHER_USES = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "divmod", "rdivmod", "neg", "pos", "abs", "round", "trunc", "floor", "ceil"),
    *("float", "int", "index", "complex", "bool", "str", "repr", "format", "hash", "torch_function"),
)


class DrawnNumber:
    """A number from [0, 1), of which nothing else is known.

    Args:
        refusal: what is raised if it matters which number it is.
    """

    def __init__(self, refusal: CaptureError) -> None:
        self.refusal = refusal


def _comparison(name: str) -> Any:
    def compare(drawn: DrawnNumber, bound: Any) -> bool:
        answer = compared(name, bound, is_single=True) if isinstance(bound, (int, float)) else None
        if answer is None:
            raise drawn.refusal
        return answer

    return compare


def _refuse(drawn: DrawnNumber, *_: Any, **__: Any) -> NoReturn:
    raise drawn.refusal


for _name in _OTHER_USES:
    setattr(DrawnNumber, f"__{_name}__", _refuse)
for _name in _COMPARISONS:
    setattr(DrawnNumber, f"__{_name}__", _comparison(_name))

_REFUSAL = (
    "forward draws a number and reads it in Python, where it decides what this call alone computes, so that no program "
    "does what the model does at each call: make it certain (a probability of 0 or 1), or compute both and choose with "
    "torch.where"
)


def read_drawn_number(reads: ValueReads, name: str, args: tuple[Any, ...]) -> DrawnNumber | None:
    """What ``item`` gives of a number that ``torch.rand`` drew; None for other calls.

    Raises:
        CaptureError: for ``float(tensor)``; it asks for a trace with another ``float`` if the line can have one.
    """
    if name not in ("item", "__float__") or args[0].numel() != 1 or not reads.is_drawn(args[0]):
        return None
    refusal = CaptureError(_REFUSAL)
    if name == "__float__":
        raise with_builtin("float", refusal)
    return DrawnNumber(refusal)
