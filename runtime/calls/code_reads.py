"""What a function's code reads by name: globals, variables of functions around it, attributes."""

from __future__ import annotations

import dis
import functools
import types
from dataclasses import dataclass, field

#: A name and the attributes that are read of it in turn: ``settings.model.scale``.
Chain = tuple[str, ...]

_MUTATORS = frozenset(
    ("append", "extend", "insert", "pop", "remove", "clear", "add", "discard", "update", "setdefault", "popitem")
)


@dataclass
class CodeReads:
    """Names in a function's code and in the functions that are defined in it.

    Attributes:
        globals, enclosing: what is read of its module, and of the functions around it.
        attributes: names of attributes that are read of anything.
        written: globals, and names of attributes, that it sets itself.
        rebound: variables of functions around it that it sets itself.
        filled: names of what it puts entries into.
    """

    globals: set[Chain] = field(default_factory=set)
    enclosing: set[Chain] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    rebound: set[str] = field(default_factory=set)
    filled: set[str] = field(default_factory=set)


@functools.cache
def reads_of(code: types.CodeType) -> CodeReads:
    """The names that ``code`` reads."""
    reads, chain, is_global = CodeReads(), list[str](), False
    sets_entries = False

    def close() -> None:
        if chain:
            (reads.globals if is_global else reads.enclosing).add(tuple(chain))
            if chain[-1] in _MUTATORS:
                reads.filled.add(chain[0])
            chain.clear()

    for instruction in dis.get_instructions(code):
        name, argument = instruction.opname, instruction.argval
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            reads.attributes.add(argument)
            if chain:
                chain.append(argument)
            continue
        if name in ("PUSH_NULL", "COPY_FREE_VARS"):
            continue
        close()
        if name in ("LOAD_GLOBAL", "LOAD_DEREF"):
            chain.append(argument)
            is_global = name == "LOAD_GLOBAL"
        elif name in ("STORE_GLOBAL", "STORE_ATTR"):
            reads.written.add(argument)
        elif name == "STORE_DEREF":
            reads.rebound.add(argument)
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            sets_entries = True
    close()
    if sets_entries:  # of which of them is not told apart
        reads.filled |= {names[0] for names in reads.globals | reads.enclosing}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = reads_of(constant)
            reads.globals |= inner.globals
            reads.enclosing |= inner.enclosing
            reads.attributes |= inner.attributes
            reads.written |= inner.written
            reads.rebound |= inner.rebound
            reads.filled |= inner.filled
    # Its own variables are not enclosing variables.
    reads.rebound -= set(code.co_cellvars)
    reads.enclosing = {names for names in reads.enclosing if names[0] not in code.co_cellvars}
    return reads
