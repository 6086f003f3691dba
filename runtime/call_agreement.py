"""Whether all ranks make the same call, found out before any of them runs it.

Every call costs one collective of a few bytes, which says whether the ranks' calls are of a kind that they have agreed
on before. If one is not, on every rank what each passes is compared in full; so it is now and then (after 1, 2, 4, …
256 calls, then every 256), and the values of the inputs with it.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from passes.capture.structure import Container, Leaf, Structure, flatten, leaf_paths, rebuild
from runtime.agreement import Ranks
from runtime.calls import Call, Path
from runtime.compat import without_dispatch_modes
from runtime.model_watch import ModelWatch

#: After so many calls values are compared each time that many more were made.
_RARELY = 256
#: Kinds of calls that are remembered.
_MAX_KINDS = 1024
TRAIN_STEP, FORWARD = "runs train_step", "calls the model"
_NOTHING = Call((), {}, (Container(tuple, (), ()), Container(dict, (), ())), {})


@dataclass(frozen=True)
class AgreedCall:
    """A call that all ranks make.

    Attributes:
        own: what this rank passes.
        whole: what all ranks pass together: the same as ``own``, unless this rank left out what others pass.
        is_compared: whether the ranks compared it in full this time.
    """

    own: Call
    whole: Call
    is_compared: bool


@dataclass(frozen=True)
class _Argument:
    """One argument without its tensors' values. ``structure`` is pickled; None if that cannot be."""

    text: str
    shapes: Mapping[Path, tuple[tuple[int, ...], torch.dtype, bool]]
    structure: bytes | None


@dataclass(frozen=True)
class _Message:
    """What a rank tells the others of its call."""

    error: str | None
    action: str
    weight: float
    arguments: Mapping[int | str, _Argument]
    digests: Mapping[Path, int]
    group: int


def describe(verb: str, model: nn.Module, watch: ModelWatch, *, local_inputs: bool) -> str:
    """What a rank does with a call, in words: the ``verb``, modes, and attributes of the model that changed."""
    gradients = "" if verb == TRAIN_STEP or torch.is_grad_enabled() else " without gradients"
    local = " on local inputs" if local_inputs else ""
    changed = [f"{'.'.join(filter(None, place))}={value!r}" for place, value in watch.changed.items()]
    attributes = f" with {', '.join(changed)}" if changed else ""
    return f"{verb} in {'training' if model.training else 'evaluation'} mode{gradients}{local}{attributes}"


class CallAgreement:
    """Compares the calls of ``ranks``.

    Args:
        data_rank: of the ranks with the same number, local inputs must be the same.
        may_leave_out: whether a rank may leave out arguments that others pass.
    """

    def __init__(self, ranks: Ranks, *, data_rank: int, may_leave_out: bool) -> None:
        self.ranks = ranks
        self.data_rank = data_rank
        self.may_leave_out = may_leave_out
        self._count = 0
        #: By what this rank called: the number of the agreed call, and the call itself if it is not this rank's own.
        self._kinds: OrderedDict[Any, tuple[int, Call | None]] = OrderedDict()

    def check(self, action: str) -> None:
        """Make sure that every rank does ``action``, which takes nothing that could differ."""
        self.agree(action, lambda: _NOTHING, values=False)

    def agree(
        self,
        action: str,
        read: Callable[[], Call],
        *,
        reads: Collection[str] | None = None,
        local: bool = False,
        weight: float = 1.0,
        values: bool = True,
    ) -> AgreedCall:
        """The call that all ranks make, each of them passing what ``read`` returns.

        Args:
            action: what is to be done with it, in words; it must be the same on all ranks.
            reads: names of the inputs whose values matter on this rank; None for all.
            local: whether data groups pass samples of their own.
            weight: a number that must be the same on all ranks, and may be another one at each call.
            values: whether to compare the inputs' values now and then.

        Raises:
            ValueError: on every rank, if they call different things or pass different inputs, or ``read`` raised on one
                of them (which raises its own error).
        """
        if self.ranks.is_alone:
            own = _with_values(read(), reads)
            return AgreedCall(own, own, is_compared=True)
        own, error = _NOTHING, None
        try:
            own = _with_values(read(), reads)
            key = (action, own.signature)
        except Exception as found:
            error, key = found, None
        kind = self._kinds.get(key) if error is None else None
        is_due = values and self._is_due()
        if self._all_know(None if kind is None or is_due else kind[0], weight):
            assert kind is not None
            return AgreedCall(own, own if kind[1] is None else kind[1], is_compared=False)
        digests: dict[Path, int] = {}
        if error is None and is_due:
            digests = {
                path: _digest(tensor) for path, tensor in own.tensors.items() if reads is None or str(path[0]) in reads
            }
        message = _Message(
            None if error is None else str(error),
            action,
            weight,
            _arguments(own),
            digests,
            self.data_rank if local else 0,
        )
        messages = self.ranks.gathered(message)
        if error is not None:
            raise error
        self._check(messages, local=local)
        number, whole = _together(own, messages)
        self._kinds[key] = number, None if whole is own else whole
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        return AgreedCall(own, whole, is_compared=True)

    def _is_due(self) -> bool:
        self._count += 1
        return self._count % _RARELY == 0 if self._count > _RARELY else self._count.bit_count() == 1

    def _all_know(self, number: int | None, weight: float) -> bool:
        """Whether all ranks make the call that they have agreed on under this number; None: this one wants to ask."""
        (bits,) = struct.unpack("q", struct.pack("d", weight))
        told = torch.tensor([int(number is None), number or 0, -(number or 0), bits, -bits])
        with without_dispatch_modes():
            dist.all_reduce(told, dist.ReduceOp.MAX, group=self.ranks.group)
        unknown, *pairs = told.tolist()
        return not unknown and pairs[0] == -pairs[1] and pairs[2] == -pairs[3]

    def _check(self, messages: Sequence[_Message], *, local: bool) -> None:
        ranks = self.ranks
        for place, message in enumerate(messages):
            if message.error is not None:
                raise ValueError(f"{ranks.names([place])}: {message.error}")
        apart = [place for place, message in enumerate(messages) if message.action != messages[0].action]
        if apart:
            raise ValueError(
                f"ranks call different things: {ranks.names([0])} {messages[0].action}, {ranks.names(apart)} "
                f"{messages[apart[0]].action}; every rank must make the same calls in the same order"
            )
        apart = [place for place, message in enumerate(messages) if message.weight != messages[0].weight]
        if apart:
            raise ValueError(
                f"{ranks.names([0])} weighs its call by {messages[0].weight:g}, {ranks.names(apart[:1])} by "
                f"{messages[apart[0]].weight:g}; every rank must give the same weight"
            )
        first: dict[int | str, int] = {}
        for place, message in enumerate(messages):
            for name, argument in message.arguments.items():
                other = first.setdefault(name, place)
                if messages[other].arguments[name].text != argument.text:
                    raise ValueError(
                        f"{ranks.names([other])} passes {name!r} as {messages[other].arguments[name].text}, "
                        f"{ranks.names([place])} as {argument.text}; "
                        + ("every data-parallel group must pass as many samples" if local else _GLOBAL)
                    )
        for name, place in first.items():
            apart = [other for other, message in enumerate(messages) if name not in message.arguments]
            cannot_be_sent = messages[place].arguments[name].structure is None
            if apart and (cannot_be_sent or not self.may_leave_out):
                raise ValueError(f"{ranks.names([place])} passes {name!r}, but not {ranks.names(apart)}; {_GLOBAL}")
        self._check_values(messages, local=local)

    def _check_values(self, messages: Sequence[_Message], *, local: bool) -> None:
        first: dict[tuple[int, Path], int] = {}
        for path in dict.fromkeys(path for message in messages for path in message.digests):
            apart = []
            for place, message in enumerate(messages):
                if path in message.digests:
                    other = first.setdefault((message.group, path), place)
                    if messages[other].digests[path] != message.digests[path]:
                        apart.append((other, place))
            if apart:
                name = ".".join(map(str, path))
                raise ValueError(
                    f"the values of input {name!r} differ: {self.ranks.names([place for _, place in apart])} did not "
                    f"pass what {self.ranks.names([apart[0][0]])} did; "
                    + ("ranks of one data-parallel group must pass the same samples" if local else _GLOBAL)
                )


_GLOBAL = "every rank must pass the same global batch (with local_inputs=True, its data-parallel group's samples)"


def _with_values(call: Call, reads: Collection[str] | None) -> Call:
    """``call``, or ValueError if an input that is read has no values."""
    for path, tensor in call.tensors.items():
        if tensor.is_meta and (reads is None or str(path[0]) in reads):
            raise ValueError(
                f"input {'.'.join(map(str, path))!r} is on the meta device, so it has no values: pass real tensors "
                "(those without values serve as example_inputs of planner.compile)"
            )
    return call


def _arguments(call: Call) -> dict[int | str, _Argument]:
    """The arguments of a call by place or name."""
    found: dict[int | str, _Argument] = {}
    for structure in call.structures:
        assert isinstance(structure, Container)
        for name, part in zip(structure.keys, structure.parts):
            tensors = {path: call.tensors[path] for path in leaf_paths(part)}
            shapes = {path: (tuple(one.shape), one.dtype, one.requires_grad) for path, one in tensors.items()}
            found[name] = _Argument(_text(part, shapes), shapes, _pickled(part))
    return found


def _text(structure: Structure, shapes: Mapping[Path, tuple[tuple[int, ...], torch.dtype, bool]]) -> str:
    tensors = [
        f"{'.'.join(map(str, path[1:]))}{' ' if path[1:] else ''}{list(shape)} {str(dtype).removeprefix('torch.')}"
        f"{' with a gradient' if with_gradient else ''}"
        for path, (shape, dtype, with_gradient) in shapes.items()
    ]
    if len(shapes) == 1 and not isinstance(structure, Container):
        return tensors[0]
    return f"{'; '.join(tensors)} in {in_words(structure)}" if tensors else in_words(structure)


def in_words(structure: Structure) -> str:
    """A structure in words that are the same in every process."""
    if isinstance(structure, Leaf):
        return "tensor"
    if isinstance(structure, Container):
        kind = structure.example if isinstance(structure.example, type) else type(structure.example)
        parts = [f"{key}={in_words(part)}" for key, part in zip(structure.keys, structure.parts)]
        return f"{kind.__name__}({', '.join(parts)})"
    value = structure.value
    if isinstance(value, np.ndarray):
        return f"array {list(value.shape)} {value.dtype} of checksum {zlib.crc32(np.ascontiguousarray(value).data):x}"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(repr, value)))})"
    # Objects print their address, which is another one on each rank.
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _pickled(structure: Structure) -> bytes | None:
    try:
        return pickle.dumps(structure)
    except Exception:  # any object may stand in a call, and refuse in any way
        return None


def _digest(tensor: torch.Tensor) -> int:
    if tensor.is_meta or tensor.layout is not torch.strided:
        return 0
    content = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(content.numpy().data)


def _together(own: Call, messages: Sequence[_Message]) -> tuple[int, Call]:
    """What the ranks pass together, and a number for it: ``own`` if this rank passes all of it in that order."""
    arguments: dict[int | str, _Argument] = {}
    for message in messages:
        for name, argument in message.arguments.items():
            arguments.setdefault(name, argument)
    text = repr([messages[0].action, *((name, argument.text) for name, argument in arguments.items())])
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    if list(_arguments(own)) == list(arguments):
        return number, own
    values = {name: _value(name, argument, own) for name, argument in arguments.items()}
    args = tuple(values[place] for place in sorted(name for name in values if isinstance(name, int)))
    kwargs = {name: value for name, value in values.items() if isinstance(name, str)}
    args_structure, tensors = flatten(args)
    kwargs_structure, more = flatten(kwargs)
    return number, Call(args, kwargs, (args_structure, kwargs_structure), {**tensors, **more}).with_shapes({})


def _value(name: int | str, argument: _Argument, own: Call) -> Any:
    for given in (dict(enumerate(own.args)), own.kwargs):
        if name in given:
            return given[name]  # type: ignore[index]
    assert argument.structure is not None
    tensors = {
        path: torch.empty(shape, dtype=dtype, device="meta", requires_grad=with_gradient)
        for path, (shape, dtype, with_gradient) in argument.shapes.items()
    }
    return rebuild(pickle.loads(argument.structure), tensors)
