"""Records every collective and every point-to-point call of this rank, in the order in which it is issued."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

#: All-to-alls whose parts may be of unequal sizes.
_OF_PARTS = ("all_to_all_single", "alltoall_base_")
#: Tensors as their shapes and dtypes.
Tensors = tuple[tuple[tuple[int, ...], str], ...]


@dataclass(frozen=True)
class Call:
    """One call of a rank.

    Attributes:
        kind: "send", "recv", or the collective's name in torch.
        group: name of its group, the same on all members.
        members: global ranks of its group.
        peer: global rank of the other side of a send or receive; −1 of a collective.
        batch: number of the ``batch_isend_irecv`` that issued it on this rank; −1 outside of one.
        tensors: what it is called with on this rank.
        after: earlier calls of this rank (their numbers) that were waited for since the call before this one.
        splits: of an all-to-all of unequal parts: rows that this rank gets from each member, and that it sends to each.
    """

    kind: str
    group: str
    members: tuple[int, ...]
    peer: int
    batch: int
    tensors: Tensors
    after: tuple[int, ...]
    splits: tuple[tuple[int, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Call:
        tensors = tuple((tuple(shape), dtype) for shape, dtype in data["tensors"])
        names = {name: tuple(data[name]) for name in ("members", "after")}
        return Call(**{**data, **names, "tensors": tensors, "splits": tuple(map(tuple, data["splits"]))})


class Recorder(TorchDispatchMode):
    """``with recorded() as recorder`` fills ``recorder.calls``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.batch = -1
        self._num_batches = 0
        #: Waited for since the latest call.
        self._waited: set[int] = set()
        #: Call that a ``Work`` (by id; kept, so that ids stay unique) or a result (by address) belongs to.
        self._works: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self._results: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        kwargs = kwargs or {}
        group = None
        if namespace in ("c10d", "_c10d_functional") and name != "wait_tensor":
            group = next(
                (
                    process_group
                    for process_group in map(_group, (*args, *kwargs.values()))
                    if process_group is not None
                ),
                None,
            )
        for tensor in _tensors(args) if group is None else ():
            if isinstance(tensor, AsyncCollectiveTensor) and not name.startswith("_wrap_tensor"):
                self._wait_for(self._results.pop(tensor.elem.data_ptr(), None))
        if name == "wait_tensor":
            self._wait_for(self._results.pop(args[0].data_ptr(), None))
        if group is None or dist.get_backend(group) == "fake":  # a new program's types are checked
            return func(*args, **kwargs)
        number = self._record(name, args, group)
        result = func(*args, **kwargs)
        if namespace == "_c10d_functional":
            for tensor in result if isinstance(result, (list, tuple)) else (result,):
                self._results[tensor.data_ptr()] = number
        elif name not in ("send", "recv_"):
            self._wait_for(number)  # torch's own calls of these wait at once unless asked otherwise
        return result

    def _record(self, name: str, args: tuple[Any, ...], group: ProcessGroup) -> int:
        members = tuple(dist.get_process_group_ranks(group))
        point_to_point = name in ("send", "recv_")
        tensors = tuple((tuple(tensor.shape), str(tensor.dtype)) for tensor in _tensors(args))
        after, self._waited = tuple(sorted(self._waited)), set()
        self.calls.append(
            Call(
                kind=name.rstrip("_"),
                group=group.group_name,
                members=members,
                peer=members[args[2]] if point_to_point else -1,
                batch=self.batch if point_to_point else -1,
                tensors=tensors,
                after=after,
                splits=tuple(_splits(args)) if name in _OF_PARTS else (),
            )
        )
        return len(self.calls) - 1

    def _wait_for(self, *numbers: int | None) -> None:
        self._waited.update(number for number in numbers if number is not None)

    def in_batch(self, issue: Callable[..., Any]) -> Callable[..., Any]:
        """``batch_isend_irecv`` that notes which calls it issues together."""

        def issued(operations: list[Any]) -> Any:
            self.batch, first = self._num_batches, len(self.calls)
            self._num_batches += 1
            try:
                works = issue(operations)
            finally:
                self.batch = -1
            for work in works:
                self._works[id(work)] = (work, tuple(range(first, len(self.calls))))
            return works

        return issued

    def noted(self, issue: Callable[..., Any]) -> Callable[..., Any]:
        """``isend`` or ``irecv`` whose work is known to belong to its call."""

        def issued(*args: Any, **kwargs: Any) -> Any:
            work = issue(*args, **kwargs)
            if work is not None and self.batch < 0:
                self._works[id(work)] = (work, (len(self.calls) - 1,))
            return work

        issued.__name__ = issue.__name__
        return issued

    def waiting(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        """``Work.wait`` that notes what was waited for."""

        def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
            self._wait_for(*self._works.pop(id(work), (None, ()))[1])
            return wait(work, *args, **kwargs)

        return waited


@contextlib.contextmanager
def recorded() -> Iterator[Recorder]:
    """Record what this rank sends inside the block."""
    recorder = Recorder()
    c10d, work = dist.distributed_c10d, dist.Work
    replaced: list[tuple[Any, str, Any]] = []

    def replace(place: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        replaced.append((place, name, getattr(place, name)))
        setattr(place, name, wrap(getattr(place, name)))

    for name in ("isend", "irecv"):
        replace(c10d, name, recorder.noted)
        replaced.append((dist, name, getattr(dist, name)))
        setattr(dist, name, getattr(c10d, name))  # torch compares the two by identity
    replace(dist, "batch_isend_irecv", recorder.in_batch)
    replace(work, "wait", recorder.waiting)
    try:
        with recorder:
            yield recorder
    finally:
        for place, name, original in reversed(replaced):
            setattr(place, name, original)


def _group(argument: Any) -> ProcessGroup | None:
    if isinstance(argument, str) and argument not in ("sum", "max", "min", "avg", "product"):
        return _resolve_process_group(argument)
    if isinstance(argument, ProcessGroup):
        return argument
    if isinstance(argument, torch.ScriptObject):
        with contextlib.suppress(RuntimeError, TypeError):
            return ProcessGroup.unbox(argument)
    return None


def _splits(arguments: Any) -> Iterator[tuple[int, ...]]:
    for argument in arguments:
        if isinstance(argument, (list, tuple)) and argument and all(isinstance(one, int) for one in argument):
            yield tuple(argument)


def _tensors(arguments: Any) -> Iterator[torch.Tensor]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)
