"""What every text and number in a plan may look like: checked once, when a plan is loaded.

A plan may come from a stranger, and names in it reach emitted source, error messages and terminals. So each field has a
grammar here; a text without one is a line that a person can read (``TEXT``). What a name refers to (an operator, a
parameter) is checked against the model where it is looked up.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from cost_models.dtypes import ITEM_SIZE
from cost_models.schedules import SCHEDULES
from passes.ir.conversions import COLLECTIVES
from passes.ir.types import AXIS_NAME
from passes.plan.plan_checks import SERVING
from passes.plan.step_plan import ACTIVATIONS, ALL, CHUNKED_LOSS, ON_HOST, OPTIMIZER

Grammar = Callable[[str], bool]

#: Larger numbers are no sizes or counts of anything, and cost time and memory to work with.
MAX_NUMBER = 2**63
MAX_TEXT = 10_000
#: Tables inside of tables in free-form data (the cluster, constraints).
MAX_DEPTH = 20


def _pattern(pattern: str) -> Grammar:
    compiled = re.compile(pattern, re.ASCII)
    return lambda text: compiled.fullmatch(text) is not None


def _one_of(*texts: str) -> Grammar:
    return frozenset(texts).__contains__


def _is_schedule(text: str) -> bool:
    return text == "none" or text in SCHEDULES


#: One line without control characters, ANSI sequences, or marks that turn the direction of writing.
TEXT: Grammar = str.isprintable
WORD = _pattern(r"\w{1,64}")
AXIS = _pattern(AXIS_NAME)
DTYPE = _one_of(*ITEM_SIZE)
TYPE = _pattern(r"[RIP]|S\((0|[1-9]\d?)\)")
OPERATOR = _pattern(r"[\w.:-]{1,200}")
COLLECTIVE = _one_of(*COLLECTIVES)
LABEL = _pattern(r"replicate|invariant|cut [\w.]{1,64}( (from|to) [\w.]{1,64})?|partial \d+(,\d+)*")
RECOMPUTE = _one_of("none", "regather", "selective", "full", CHUNKED_LOSS, ON_HOST)

#: Class and field → grammar of its texts, at any depth; ``{key}`` means the keys of a mapping.
GRAMMARS: Mapping[str, tuple[Grammar, str]] = {
    "Plan.fingerprint": (_pattern(r"[\w-]{0,64}"), "a hash"),
    "Plan.config_name": (_pattern(r"[\w.-]{0,64}"), "a name of the config library"),
    "ServingPlan.kind": (_one_of(SERVING), repr(SERVING)),
    "MeshShape.names": (AXIS, "the name of a mesh axis"),
    "TensorPlan.dtype": (DTYPE, "a dtype"),
    "TensorPlan.placement": (TYPE, "one of R, I, P and S(dim)"),
    "NodePlan.op": (OPERATOR, "an operator"),
    "NodePlan.strategy": (
        LABEL,
        "replicate, invariant, 'cut <factor>' ('… from <rows>', '… to <rows>') or 'partial <inputs>'",
    ),
    "NodePlan.outputs": (TYPE, "one of R, I, P and S(dim)"),
    "ConversionPlan.axis": (AXIS, "the name of a mesh axis"),
    "ConversionPlan.source": (TYPE, "one of R, I, P and S(dim)"),
    "ConversionPlan.target": (TYPE, "one of R, I, P and S(dim)"),
    "ConversionPlan.forward": (COLLECTIVE, "a collective"),
    "ConversionPlan.backward": (COLLECTIVE, "a collective"),
    "BlockPlan.carried": (TYPE, "one of R, I, P and S(dim)"),
    "CollectivePlan.collective": (WORD, "a collective"),
    "CollectivePlan.axis": (AXIS, "the name of a mesh axis"),
    "CollectivePlan.phase": (WORD, "a word"),
    "GroupPlan.recompute": (RECOMPUTE, "a recompute policy"),
    "StepPlan.axes{key}": (AXIS, "the name of a mesh axis"),
    "StepPlan.schedule": (_is_schedule, "a pipeline schedule of this package, or one that was registered before"),
    "StepPlan.optimizer": (WORD, "the name of an optimizer"),
    "StepPlan.offload": (_one_of("", OPTIMIZER, ACTIVATIONS, ALL), "'optimizer', 'activations', 'all', or nothing"),
    "StepPlan.gradient_dtype": (_one_of("", *ITEM_SIZE), "a dtype"),
}


def check_grammar(plan: Any) -> None:
    """Check every text and number of a plan, which is a tree of dataclasses, mappings and sequences.

    Raises:
        ValueError: naming the field, what it should be, and what it is.
    """
    _check(plan, type(plan).__name__, "plan", 0)


def _check(value: Any, field: str, where: str, depth: int) -> None:
    """``field`` is the key in ``GRAMMARS``, ``where`` the place for people."""
    if isinstance(value, str):
        _check_text(value, field, where)
    elif isinstance(value, (bool, type(None))):
        return
    elif isinstance(value, (int, float)):
        _check_number(value, where)
    elif dataclasses.is_dataclass(value):
        kind = type(value).__name__
        for name in (field.name for field in dataclasses.fields(value)):
            _check(getattr(value, name), f"{kind}.{name}", f"{where}.{name}", 0)
    elif depth == MAX_DEPTH:
        raise ValueError(f"{where}: more than {MAX_DEPTH} levels deep")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_text(key, f"{field}{{key}}", f"a name in {where}")
            _check(item, field, f"{where}.{key}", depth + 1)
    else:
        for index, item in enumerate(value):
            _check(item, field, f"{where}[{index}]", depth + 1)


def _check_text(text: str, field: str, where: str) -> None:
    grammar, expected = GRAMMARS.get(field, (TEXT, "a line of printable characters"))
    if len(text) > MAX_TEXT or not (text.isprintable() and grammar(text)):
        raise ValueError(f"{where}: expected {expected}, got {text[:60]!r}")


def _check_number(number: int | float, where: str) -> None:
    if isinstance(number, float) and math.isnan(number):
        raise ValueError(f"{where}: expected a number, got nan")
    if isinstance(number, int) and not 0 <= number < MAX_NUMBER:
        raise ValueError(
            f"{where}: expected a number from 0 to 2^63, got {number if number.bit_length() < 100 else 'more'}"
        )
