"""While it is traced, a model is in a world of one process: its program is of the whole batch, on one device.

Losses of detectors divide by the number of processes, contrastive losses gather the features of all. Under torchrun a
trace would see the ranks that the program is to be divided over, and count them twice.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist

from passes.capture.namespaces import namespaces_with


class _Done:
    """The work of a collective that has nothing to wait for."""

    def wait(self, *_: Any, **__: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _leave(*_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    return _Done() if async_op else None


def _write(targets: Any, sources: Any, async_op: bool) -> _Done | None:
    """Copy the one process's tensors; collectives of ``torch.distributed`` have no gradients."""
    pairs = zip(targets, sources) if isinstance(targets, Sequence) else [(targets, sources)]
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source.reshape(target.shape))
    return _leave(async_op=async_op)


def _all_gather(tensor_list: Any, tensor: Any, *_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    return _write(tensor_list[:1], [tensor], async_op)


def _into_output(output: Any, input: Any, *_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    return _write(output, input, async_op)


def _reduce_scatter(output: Any, input_list: Any, *_: Any, async_op: bool = False, **__: Any) -> _Done | None:
    return _write(output, input_list[0], async_op)


def _all_gather_object(object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
    object_list[0] = obj


def _same(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor.clone()


def _tuple_of(tensor: Any, *_: Any, **__: Any) -> Any:
    return (tensor.clone(),)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


#: Name in ``torch.distributed`` → what it does in a world of one process.
_ALONE: dict[str, Callable[..., Any]] = {
    "is_initialized": _always(False),
    "get_world_size": _always(1),
    "get_rank": _always(0),
    "all_reduce": _leave,
    "reduce": _leave,
    "broadcast": _leave,
    "barrier": _leave,
    "broadcast_object_list": _leave,
    "all_gather": _all_gather,
    "all_gather_object": _all_gather_object,
    "all_gather_into_tensor": _into_output,
    "all_to_all": _into_output,
    "all_to_all_single": _into_output,
    "reduce_scatter_tensor": _into_output,
    "reduce_scatter": _reduce_scatter,
}
#: The same for ``torch.distributed.nn``, whose collectives have gradients.
_ALONE_WITH_GRADIENTS: dict[str, Callable[..., Any]] = {
    "all_reduce": _same,
    "broadcast": _same,
    "all_gather": _tuple_of,
}


_KEPT_IN = ("torch.distributed", "torch.distributed.nn", "torch.distributed.nn.functional")


@contextlib.contextmanager
def as_one_process() -> Iterator[None]:
    """On this thread, ``torch.distributed`` and accelerate answer whoever asks as on one device."""
    tracing = threading.get_ident()
    alone: dict[Callable[..., Any], Callable[..., Any]] = {}
    for home, table in _homes():
        for name, answer in table.items():
            original = getattr(home, name)
            alone[original] = _on_thread(tracing, original, answer)
    with contextlib.ExitStack() as stack:
        for namespace in _namespaces(alone):
            stack.enter_context(_replaced(namespace, alone))
        stack.enter_context(_accelerate_alone())
        yield


def _homes() -> Iterator[tuple[Any, dict[str, Callable[..., Any]]]]:
    yield dist, _ALONE
    if "torch.distributed.nn.functional" in sys.modules:  # it takes long to import
        yield sys.modules["torch.distributed.nn.functional"], _ALONE_WITH_GRADIENTS


def _on_thread(tracing: int, original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (answer if threading.get_ident() == tracing else original)(*args, **kwargs)

    return call


def _namespaces(alone: Collection[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Where the functions may be looked up: where torch keeps them, and whatever has imported them by their names.

    torch itself is left out: groups and meshes go on as they are.
    """
    names = {function.__name__ for function in alone}
    namespaces = []
    for path, namespace in namespaces_with(names):
        if path.startswith("torch.") and path not in _KEPT_IN:
            continue
        if any(type(namespace.get(name)) is FunctionType and namespace[name] in alone for name in names):
            namespaces.append(namespace)
    return namespaces


@contextlib.contextmanager
def _replaced(namespace: dict[str, Any], alone: dict[Callable[..., Any], Callable[..., Any]]) -> Iterator[None]:
    before = {name: value for name, value in namespace.items() if type(value) is FunctionType and value in alone}
    namespace.update({name: alone[value] for name, value in before.items()})
    try:
        yield
    finally:
        namespace.update(before)


@contextlib.contextmanager
def _accelerate_alone() -> Iterator[None]:
    """Accelerate's state, which all threads share, says that there is one process."""
    module = sys.modules.get("accelerate.state")
    if module is None or not module.is_initialized() or threading.current_thread() is not threading.main_thread():
        yield
        return
    state = module.PartialState()
    before = {name: getattr(state, name) for name in ("num_processes", "process_index", "local_process_index")}
    kind = state.distributed_type
    state.num_processes, state.process_index, state.local_process_index = 1, 0, 0
    state.distributed_type = module.DistributedType.NO
    try:
        yield
    finally:
        state.distributed_type = kind
        for name, value in before.items():
            setattr(state, name, value)
