"""Keeping between forward and backward what the plan says, and making the rest again: the plan's recompute policies.

``none``       what autograd keeps.
``regather``   what autograd keeps, but of a tensor that a collective brought, the part it was brought from: the
               backward pass sends that collective again (once for all that kept its result), and nothing else.
``selective``  what goes in, and the outputs of matrix products, convolutions and fused attention
               (``passes.autograd.kernels.EXPENSIVE``); the rest runs again. Collectives run again where autograd would
               have kept what they bring (a gathered input of a matrix product), with those on the way there. The
               results of all others are kept: they are sent once.
``full``       what goes in; everything runs again, collectives too.
``offload``    what autograd keeps: what goes in on the device, the rest in the host's memory
               (``runtime.program_tools.offloaded_activations``); nothing runs again.

That is how the planner prices them (``planner.whole_step.costs.unit_costs``). It counts no bytes for what ``selective``
keeps of
reductions: a ``1 / axis`` part of the matrix product that is reduced, whose partial sums it does count.
``selective`` and ``full`` stop running again once the last kept tensor is there, which may spare the last collective.

Random draws of ``runtime.ops`` repeat: the number of the next draw is put back while a region runs again. Programs draw
no other random numbers, so the generators of torch are left alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import spmd_types as spmd
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from passes.autograd.kernels import EXPENSIVE, WRITE_OVER_PRODUCTS
from passes.torch_compat.operators import schema
from runtime.ops import get_random_state, running_again, set_random_state
from runtime.program_tools.offloaded_activations import offloading
from runtime.torch_compat.autograd_engine import saved_tensors_hooks_of_thread
from runtime.torch_compat.dispatcher import unseen_by_checkpoints, without_innermost_mode
from runtime.torch_compat.spmd_internals import mesh_of_thread, use_mesh

POLICIES = ("none", "selective", "regather", "full", "offload")
#: The functions by which programs communicate.
_COLLECTIVES = (spmd.all_gather, spmd.all_reduce, spmd.reduce_scatter, spmd.all_to_all, spmd.redistribute)


def recomputed(function: Callable[..., Any], policy: str, *, gathers_weights: bool = False) -> Callable[..., Any]:
    """``function(*tensors)`` that keeps for its backward pass what ``policy`` says (see the module's docstring).

    Args:
        function: reads nothing that changes before its backward pass but its arguments, weights, the current mesh and
            the state of ``runtime.ops``'s random draws; the last two are put back when it runs again.
        policy: one of ``POLICIES``.
        gathers_weights: it calls ``can_be_made_again``; without, ``none`` is ``function`` itself.

    Raises:
        ValueError: for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"unknown recompute policy {policy!r}: expected one of {', '.join(POLICIES)}")
    if policy == "none":
        return partial(_run_regathering, function, ()) if gathers_weights else function
    if policy == "offload":
        return partial(_run_offloading, function)
    if policy == "regather":
        return partial(_run_regathering, function, _COLLECTIVES)
    contexts = _full_contexts if policy == "full" else _selective_contexts
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class _RecomputeThread(threading.local):
    """What regions of this thread are in the middle of."""

    regathering: _Regathering | None = None
    always_again: bool = False


_thread = _RecomputeThread()


@contextlib.contextmanager
def always_again() -> Iterator[None]:
    """Under ``selective``, collectives sent inside run again: a unit's weights are gathered, used and let go."""
    before, _thread.always_again = _thread.always_again, True
    try:
        yield
    finally:
        _thread.always_again = before


def can_be_made_again(tensors: Sequence[torch.Tensor], make: Callable[[], Sequence[torch.Tensor]]) -> None:
    """Tell a region under ``none`` or ``regather`` not to keep ``tensors``: ``make()`` gives them anew, in order.

    For weights that are gathered for every use. Where autograd keeps one of them, or a view, the backward pass calls
    ``make``, once for all of them, under ``no_grad``. Elsewhere, nothing happens.
    """
    if _thread.regathering is not None:
        _thread.regathering.add(tensors, _ValueSource(make))


# -- keeping shards -------------------------------------------------------------------------------------------------


class _ValueSource:
    """Where tensors come from that are not kept: made again when the first is needed, let go after the last.

    ``origin`` is what they are made from, if that is itself part of a source.
    """

    def __init__(self, make: Callable[[], Sequence[torch.Tensor]], origin: _Part | None = None) -> None:
        self.make, self.origin = make, origin
        self.num_kept = self.open = 0
        self.tensors: Sequence[torch.Tensor] | None = None

    def keep(self) -> None:
        """One more of the tensors will be needed."""
        self.num_kept += 1
        if self.num_kept == 1 and self.origin is not None:
            self.origin.source.keep()

    def take(self) -> Sequence[torch.Tensor]:
        """The tensors, made now if they are not there."""
        if self.tensors is None:
            with torch.no_grad():
                self.tensors, self.open = self.make(), self.num_kept
        tensors = self.tensors
        self.open -= 1
        if not self.open:
            self.tensors = None
        return tensors


class _Part:
    """A tensor of a source, or a view of one, in place of it."""

    def __init__(self, source: _ValueSource, index: int, tensor: torch.Tensor) -> None:
        self.source, self.index = source, index
        self.geometry = (tensor.size(), tensor.stride(), tensor.storage_offset())

    def tensor(self) -> torch.Tensor:
        base = self.source.take()[self.index]
        whole = (base.size(), base.stride(), base.storage_offset())
        return base if self.geometry == whole else base.as_strided(*self.geometry)


class _Regathering(TorchFunctionMode):
    """Runs a region and notes where the results of ``collectives`` come from."""

    def __init__(self, collectives: Sequence[Callable[..., Any]], keep: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.collectives, self.keep = frozenset(collectives), keep
        self.sources: dict[StorageWeakRef, tuple[_ValueSource, int, torch.dtype]] = {}

    def add(self, tensors: Sequence[torch.Tensor], source: _ValueSource) -> None:
        self.sources |= {_storage(tensor): (source, index, tensor.dtype) for index, tensor in enumerate(tensors)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in self.collectives and result is not args[0]:
            part = self.part(args[0])
            operand = args[0].detach() if part is None else part
            self.add((result,), _ValueSource(lambda: (func(_unpack(operand), *args[1:], **kwargs),), part))
        return result

    def part(self, tensor: torch.Tensor) -> _Part | None:
        """``tensor`` as part of a source, if it is one."""
        source, index, dtype = self.sources.get(_storage(tensor), (None, 0, None))
        return None if source is None or dtype != tensor.dtype else _Part(source, index, tensor)

    def pack(self, tensor: torch.Tensor) -> Any:
        part = self.part(tensor)
        if part is None:
            return self.keep(tensor)
        part.source.keep()
        return part


def _unpack(packed: Any) -> torch.Tensor:
    return packed if isinstance(packed, torch.Tensor) else packed.tensor()


def _run_offloading(function: Callable[..., Any], *tensors: Any) -> Any:
    with offloading(tensors) as region:
        outputs = _run_regathering(function, (), *tensors, keep=region.keep)
    region.done(outputs)
    return outputs


def _run_regathering(
    function: Callable[..., Any],
    collectives: Sequence[Callable[..., Any]],
    *tensors: Any,
    keep: Callable[[torch.Tensor], Any] = lambda tensor: tensor,
) -> Any:
    """``keep`` is what is kept of a tensor that no collective brought: itself, or something with ``tensor()``."""
    outer, region = _thread.regathering, _Regathering(collectives, keep)
    _thread.regathering = region
    try:
        noting = region if collectives else contextlib.nullcontext()
        with torch.autograd.graph.saved_tensors_hooks(region.pack, _unpack), noting:
            return function(*tensors)
    finally:
        _thread.regathering = outer
        region.sources.clear()  # the hooks live as long as the graph, what nobody keeps must not


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """A key of a tensor's memory that stays valid after it is freed."""
    return StorageWeakRef(tensor.untyped_storage())


# -- running again --------------------------------------------------------------------------------------------------


class _Again:
    """Puts back, while a region runs again, what ``function`` read around it."""

    def __init__(self, *more: Callable[[], Any]) -> None:
        self.random_state, self.mesh, self.more = get_random_state(), mesh_of_thread(), more

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(set_random_state, get_random_state())
            set_random_state(self.random_state)
            stack.enter_context(use_mesh(self.mesh))
            stack.enter_context(running_again())
            for context in self.more:
                stack.enter_context(context())
            self.stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)


def _full_contexts() -> tuple[Any, Any]:
    return contextlib.nullcontext(), _Again()


def _selective_contexts() -> tuple[Any, Any]:
    keep, replay = create_selective_checkpoint_contexts(_Chosen())
    sent: list[_Sent] = []
    return _sending(sent, keep), _Again(lambda: _Replaying(sent), lambda: replay)


#: Operators whose results ``selective`` keeps, by namespace; programs send with ``_COLLECTIVES``, operators of
#: ``runtime.ops`` with these.
_KEPT = {
    "aten": EXPENSIVE,
    "meshwright": EXPENSIVE,
    "_c10d_functional": frozenset(
        {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"}
    ),
}


class _Chosen:
    """The policy table of ``selective``; refuses operators that write over what is kept."""

    def __init__(self) -> None:
        self.kept: set[StorageWeakRef] = set()

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if _is_kept(operator) and not (_thread.always_again and operator.namespace not in ("aten", "meshwright")):
            # torch 2.11 does not say what the operator gave: nothing is refused there
            self.kept |= {_storage(result) for result in _tensors_in(getattr(context, "op_output", ()))}
            return CheckpointPolicy.MUST_SAVE
        # torch sees this by the tensors' versions, which ``unsafe_chunk`` does not hand on.
        written = args[0] if args and _writes(operator) and not context.is_recompute else None
        if isinstance(written, torch.Tensor) and _storage(written) in self.kept:
            raise RuntimeError(
                f"{operator} writes over a result that selective recomputation keeps, so its gradients would be wrong: "
                "plan without it (forbid={'recompute': 'selective'})"
            )
        return CheckpointPolicy.PREFER_RECOMPUTE


def _tensors_in(result: Any) -> Iterator[torch.Tensor]:
    entries = result if isinstance(result, (list, tuple)) else (result,)
    return (entry for entry in entries if isinstance(entry, torch.Tensor))


@cache
def _is_kept(operator: Any) -> bool:
    return operator.overloadpacket.__name__ in _KEPT.get(operator.namespace, ())


#: They write what a tensor is, not its numbers; or, in Triton's interpreter, operands back as they were.
_UNCHANGING = frozenset({"set_", "resize_", "detach_", "requires_grad_", "copy_"})


@cache
def _writes(operator: Any) -> bool:
    return bool(schema(operator).is_mutable) and operator.overloadpacket.__name__ not in _UNCHANGING


def _writes_over_products(function: Any) -> bool:
    packet = getattr(function, "overloadpacket", function)
    name = getattr(packet, "__name__", "")
    return name in WRITE_OVER_PRODUCTS and packet is getattr(torch.ops.aten, name)


class _Sent:
    """A collective of a program and its result; None if it is to be sent again. ``before`` brought what it took."""

    def __init__(self, result: torch.Tensor, before: _Sent | None) -> None:
        self.result: torch.Tensor | None = result.detach()
        self.requires_grad, self.before = result.requires_grad, before

    def send_again(self) -> None:
        sent: _Sent | None = self
        while sent is not None:
            sent.result, sent = None, sent.before


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    if not _writes_over_products(function):
        return function(*args, **kwargs)
    with unseen_by_checkpoints():
        return function(*args, **kwargs)


class _Sending(TorchFunctionMode):
    """Runs a region and keeps the results of its collectives, unless autograd would keep them."""

    def __init__(self, sent: list[_Sent]) -> None:
        super().__init__()
        self.sent = sent
        self.sent_of: dict[StorageWeakRef, _Sent] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _COLLECTIVES or _thread.always_again:
            return _run(func, args, kwargs or {})
        with without_innermost_mode():  # its operators are not torch's to keep
            result = func(*args, **(kwargs or {}))
        sent = _Sent(result, self.sent_of.get(_storage(args[0])))
        self.sent.append(sent)
        if result is args[0]:
            sent.result = None  # nothing was sent, and nothing has to be kept
        else:
            self.sent_of[_storage(result)] = sent
        return result

    def see(self, saved: torch.Tensor) -> None:
        """Note that autograd would keep this tensor."""
        sent = self.sent_of.get(_storage(saved))
        if sent is not None:
            sent.send_again()


@contextlib.contextmanager
def _sending(sent: list[_Sent], keep: Any) -> Iterator[None]:
    hooks = saved_tensors_hooks_of_thread()
    assert hooks is not None, "there is a checkpoint around us"
    pack, unpack = hooks
    mode = _Sending(sent)

    def seen(tensor: torch.Tensor) -> Any:
        mode.see(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(seen, unpack), mode, keep:
        yield
    mode.sent_of.clear()  # the hooks live as long as the graph


class _Replaying(TorchFunctionMode):
    """Runs a region again with the results that were kept in place of collectives."""

    def __init__(self, sent: list[_Sent]) -> None:
        super().__init__()
        self.sent = iter(sent)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _COLLECTIVES or _thread.always_again:
            return _run(func, args, kwargs or {})
        sent = next(self.sent)
        if sent.result is None:
            with without_innermost_mode():
                return func(*args, **(kwargs or {}))
        result, sent.result = sent.result, None
        return result.requires_grad_(sent.requires_grad)
