"""Where tracing asks for a tensor's value, or for a size that depends on values: the questions, and their tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._C import DisableTorchFunction
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

#: Answers a question: ``answer(ask, stand_ins, operator, args, kwargs)``, where ``ask(*args)`` asks as torch does, and
#: tensors that are made inside of ``stand_ins`` are the tracer's own.
Answer = Callable[[Callable[..., Any], Any, Any, tuple[Any, ...], dict[str, Any]], Any]

_aten = torch.ops.aten
#: Operators that give a number of Python, or tensors of a size that depends on values (and others of their kind).
QUESTIONS = (
    _aten.item.default, _aten._local_scalar_dense.default, _aten.equal.default, _aten.allclose.default,
    _aten.nonzero.default, _aten.argwhere.default, _aten.masked_select.default, _aten.index.Tensor,
    _aten.repeat_interleave.Tensor, _aten.bincount.default, _aten._unique2.default, _aten._unique.default,
    _aten.unique_dim.default, _aten.unique_consecutive.default, _aten.unique_dim_consecutive.default,
    _aten._ctc_loss.Tensor,
)  # fmt: skip


@contextlib.contextmanager
def answered_reads(answer: Answer) -> Iterator[None]:
    """On this thread, the tracer's questions are answered by ``answer``, with stand-in tensors as arguments."""
    tracing = threading.get_ident()
    before = {operator: op_implementations_dict.get(operator) for operator in QUESTIONS}

    def replaced(original: Callable[..., Any] | None) -> Callable[..., Any]:
        def question(mode: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
            def ask(*asked: Any, **named: Any) -> Any:
                return NotImplemented if original is None else original(mode, operator, *asked, **named)

            if threading.get_ident() != tracing:
                return ask(*args, **kwargs)
            return answer(ask, mode, operator, args, kwargs)

        return question

    op_implementations_dict.update({operator: replaced(original) for operator, original in before.items()})
    try:
        yield
    finally:
        for operator, original in before.items():
            if original is None:
                del op_implementations_dict[operator]
            else:
                op_implementations_dict[operator] = original


@contextlib.contextmanager
def answered_lists(answer: Callable[[torch.Tensor], list[Any] | None]) -> Iterator[None]:
    """On this thread, ``tensor.tolist()`` of a stand-in is ``answer``'s, where that is not None."""
    original = FakeTensor.tolist
    tracing = threading.get_ident()

    def tolist(self: FakeTensor) -> Any:
        numbers = answer(self) if threading.get_ident() == tracing else None
        return original(self) if numbers is None else numbers

    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    try:
        yield
    finally:
        FakeTensor.tolist = original  # type: ignore[method-assign]


class CurrentTrace:
    """The graph that is being traced where this is made: of ``make_fx``, unfinished."""

    def __init__(self) -> None:
        mode: Any = get_proxy_mode()
        assert mode is not None, "only a trace has a graph"
        self._tracer = mode.tracer

    @property
    def graph(self) -> fx.Graph:
        graph: fx.Graph = self._tracer.graph
        return graph

    def constant(self, name: str) -> torch.Tensor:
        """The tensor that a ``get_attr`` node stands for."""
        tensor: torch.Tensor = getattr(self._tracer.root, name)
        return tensor

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node that gave a tensor; None for one that the trace does not know."""
        slot: Any = get_proxy_slot(tensor, self._tracer, None)
        return None if slot is None else slot.proxy.node


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Operators in the block run on real tensors and are not traced."""
    with DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield
