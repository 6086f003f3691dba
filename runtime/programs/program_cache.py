"""Programs kept by the kind of call they are for: the ones used last, up to a bound."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

#: Kinds of calls whose programs are kept.
MAX_PROGRAMS = 64
#: Programs for other constants (a number, a string, an array) at which a user is told.
CONSTANTS_ANNOUNCED = 8

Program = TypeVar("Program")


class ProgramCache(Generic[Program]):
    """Programs by the key of a call; with ``announces`` a user is told when some are dropped."""

    def __init__(self, *, max_programs: int | None = None, announces: bool = True) -> None:
        self.announces = announces
        self.max_programs = max_programs or MAX_PROGRAMS
        self._programs: OrderedDict[Hashable, Program] = OrderedDict()
        self._same_shapes: dict[Hashable, int] = {}
        self._announced: set[str] = set()

    def get(
        self, key: Hashable, make: Callable[[], Program], *, shapes: Hashable = None, announces: bool = True
    ) -> Program:
        """The program of ``key``; made if there is none.

        Args:
            shapes: the part of the key that is about tensors (None not to watch for constants that change).
            announces: False for one of many that somebody else tells of.
        """
        if key not in self._programs:
            self._programs[key] = make()
            self._announce_constants(shapes)
            self._drop_oldest(announces=announces)
        self._programs.move_to_end(key)
        return self._programs[key]

    def __contains__(self, key: Hashable) -> bool:
        return key in self._programs

    def __len__(self) -> int:
        return len(self._programs)

    def values(self) -> Iterator[Program]:
        return iter(self._programs.values())

    def _announce_constants(self, shapes: Hashable) -> None:
        if shapes is None:
            return
        self._same_shapes[shapes] = count = self._same_shapes.get(shapes, 0) + 1
        if count >= CONSTANTS_ANNOUNCED:
            self._announce(
                "constants",
                f"{count} programs were made for calls whose tensors have the same shapes: an argument that is no "
                "tensor, or an attribute of the model, changes from call to call, and each of its values is traced "
                "anew; pass it as a tensor",
            )

    def _drop_oldest(self, *, announces: bool) -> None:
        if len(self._programs) <= self.max_programs:
            return
        while len(self._programs) > self.max_programs:
            self._programs.popitem(last=False)
        if announces:
            self._announce(
                "bound",
                f"calls came in more than {self.max_programs} kinds (shapes, dtypes, constants): the programs used "
                "last are kept, the others are made again when their kind comes back; pad inputs to fewer shapes",
            )

    def _announce(self, kind: str, message: str) -> None:
        if self.announces and kind not in self._announced:
            self._announced.add(kind)
            warnings.warn(message, stacklevel=4)
