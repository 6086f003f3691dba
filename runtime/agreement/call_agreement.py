"""Whether all ranks make the same call, found out before any of them runs it.

Every call costs one collective of a few bytes, which says whether the ranks' calls are of a kind that they have agreed
on before. If one is not, on every rank what each passes is compared in full; so it is now and then (after 1, 2, 4, …
256 calls, then every 256), and the values of the inputs with it.

Where collectives of the model wait on a device, not in this process, a rank that makes a call of a known kind runs
ahead: it starts the call while the vote is under way, and counts it at the call's end. What the vote then shows is
raised on all ranks just the same, but what they queued cannot be taken back: the module refuses further calls.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from passes.capture.nested_values import Container
from runtime.agreement.call_contents import Argument, arguments_of, digest, passed_together
from runtime.agreement.joinable_calls import JoinableCall, join, joined, next_number
from runtime.agreement.ranks_together import Ranks
from runtime.agreement.vote import Vote
from runtime.calls.model_call import ModelCall, Path
from runtime.calls.model_watch import ModelWatch

Result = TypeVar("Result")

#: The longest interval, in calls, between two comparisons of values.
_RARELY = 256
#: The largest number of kinds of calls that are remembered.
_MAX_KINDS = 1024
TRAIN_STEP, FORWARD = "runs train_step", "calls the model"
_NOTHING = ModelCall((), {}, (Container(tuple, (), ()), Container(dict, (), ())), {})


@dataclass(frozen=True)
class AgreedCall:
    """A call that all ranks make.

    Attributes:
        own: what this rank passes.
        whole: what all ranks pass together: the same as ``own``, unless this rank left out what others pass.
        is_compared: whether the ranks compared it in full this time.
    """

    own: ModelCall
    whole: ModelCall
    is_compared: bool


@dataclass(frozen=True)
class _Message:
    """The message by which a rank describes its call to the others.

    Attributes:
        count: calls that it has made.
        begun: number of the call that it ran ahead with; None if it waited.
        joinable: its call, if the others may join in.
    """

    error: str | None
    action: str
    weight: float
    arguments: Mapping[int | str, Argument]
    digests: Mapping[Path, int]
    group: int
    count: int
    begun: int | None = None
    joinable: JoinableCall | None = None


@dataclass(frozen=True)
class _Ahead:
    """A call that this rank has begun while the others were voting; ``compare`` settles it if they disagree."""

    vote: Vote
    compare: Callable[[], Any]


def describe(verb: str, model: nn.Module, watch: ModelWatch, *, local_inputs: bool) -> str:
    """What a rank does with a call, in words: the ``verb``, modes, and what changed since the model was compiled."""
    gradients = "" if verb == TRAIN_STEP or torch.is_grad_enabled() else " without gradients"
    local = " on local inputs" if local_inputs else ""
    differences = watch.differences
    attributes = f" with {', '.join(differences)}" if differences else ""
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
        #: Of the module whose calls these are.
        self.number = next_number(ranks.numbers)
        self._count = 0
        #: By what this rank called: the number of the agreed call, and the call itself if it is not this rank's own.
        self._kinds: OrderedDict[Any, tuple[int, ModelCall | None]] = OrderedDict()
        self._ahead: _Ahead | None = None
        self._some_ran_ahead = False
        self._broken: str | None = None

    def check(self, action: str, *, may_run_ahead: bool = False, joinable: JoinableCall | None = None) -> None:
        """Make sure that every rank does ``action``, which takes nothing that could differ.

        Args:
            may_run_ahead: as for a call; ``settle`` must follow.
            joinable: the call, where ranks that are about to make another one join in first.
        """
        self.agree(action, lambda: _NOTHING, values=False, may_run_ahead=may_run_ahead, joinable=joinable)

    def together(self, prepare: Callable[[], Result]) -> Result:
        """``prepare()``, which costs nothing where it succeeds.

        What it raises on this rank alone is raised on the others, as a ValueError, at the call that they make next
        (this rank waits for it): else they would wait in that call for ever.
        """
        try:
            return prepare()
        except Exception as error:
            if not self.ranks.is_alone and self._broken is None:
                self.settle()
                # If the other ranks have ended, nobody can be told.
                with contextlib.suppress(RuntimeError):
                    self._vote(None, 1.0).is_unanimous()
                    self._compare(self._message("raises", _NOTHING, error=error), _NOTHING, local=False, error=error)
            raise

    def settle(self) -> None:
        """Wait until all ranks are known to make the call that this one began ahead of the vote, if it did.

        Raises:
            ValueError: on every rank, as ``agree``; the module is of no use then.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.vote.is_unanimous():
            ahead.compare()

    def confirm(self, check: Callable[[], None]) -> None:
        """Where ranks may leave out inputs, what ``check`` raises on one rank is raised on all; after a comparison.

        Raises:
            ValueError: on every rank.
        """
        if not self.may_leave_out:
            return
        try:
            self.ranks.together(check)
        except Exception as error:
            self._note_broken(error)
            raise

    def agree(
        self,
        action: str,
        read: Callable[[], ModelCall],
        *,
        reads: Collection[str] | None = None,
        local: bool = False,
        weight: float = 1.0,
        values: bool = True,
        may_run_ahead: bool = True,
        joinable: JoinableCall | None = None,
    ) -> AgreedCall:
        """The call that all ranks make, each of them passing what ``read`` returns.

        Before it this rank makes those that others make alone and may be joined in. Where this rank may run ahead,
        ``settle`` says in the end whether they did.

        Args:
            action: what is to be done with it, in words; it must be the same on all ranks.
            reads: names of the inputs whose values matter on this rank; None for all.
            local: whether data groups pass samples of their own.
            weight: a number that must be the same on all ranks, and may be another one at each call.
            values: whether to compare the inputs' values now and then.
            may_run_ahead: whether what is done waits for other ranks on the device alone.
            joinable: as in ``check``.

        Raises:
            ValueError: on every rank, if they call different things or pass different inputs, or ``read`` raised on one
                of them (which raises its own error).
        """
        if self.ranks.is_alone:
            own_call = _with_values(read(), reads)
            return AgreedCall(own_call, own_call, is_compared=True)
        while True:
            agreed = self._agreed(
                action,
                read,
                reads=reads,
                local=local,
                weight=weight,
                values=values,
                may_run_ahead=may_run_ahead,
                joinable=joinable,
            )
            if not isinstance(agreed, JoinableCall):
                return agreed
            join(agreed)

    def _agreed(
        self,
        action: str,
        read: Callable[[], ModelCall],
        *,
        reads: Collection[str] | None,
        local: bool,
        weight: float,
        values: bool,
        may_run_ahead: bool,
        joinable: JoinableCall | None,
    ) -> AgreedCall | JoinableCall:
        """As ``agree``, on several ranks; or the call of others that comes first."""
        self.settle()
        if self._broken is not None:
            raise ValueError(f"{_OUT_OF_STEP}: {self._broken}")
        own_call, error = _NOTHING, None
        try:
            own_call = _with_values(read(), reads)
            key = (action, own_call.signature)
        except Exception as problem:
            error, key = problem, None
        kind = self._kinds.get(key) if error is None else None
        is_due = values and self._is_due()
        vote = self._vote(None if kind is None or is_due else kind[0], weight)
        if kind is not None and not is_due:
            number, whole = kind[0], own_call if kind[1] is None else kind[1]
            if self.ranks.run_ahead and may_run_ahead:

                def compare() -> None:
                    message = self._message(action, own_call, weight=weight, local=local, begun=number)
                    self._compare(message, own_call, local=local)
                    if values:
                        self.confirm(lambda: None)

                self._ahead = _Ahead(vote, compare)
                return AgreedCall(own_call, whole, is_compared=False)
            if vote.is_unanimous():
                return AgreedCall(own_call, whole, is_compared=False)
        else:
            vote.is_unanimous()
        digests: dict[Path, int] = {}
        if error is None and is_due:
            digests = {
                path: digest(tensor)
                for path, tensor in own_call.tensors.items()
                if reads is None or str(path[0]) in reads
            }
        message = self._message(
            action, own_call, weight=weight, local=local, digests=digests, error=error, joinable=joinable
        )
        compared = self._compare(message, own_call, local=local, error=error)
        if isinstance(compared, JoinableCall):
            is_own = joinable is not None and (joinable.module, joinable.name) == (compared.module, compared.name)
            return AgreedCall(own_call, own_call, is_compared=True) if is_own else compared
        number, whole = compared
        self._kinds[key] = number, None if whole is own_call else whole
        if len(self._kinds) > _MAX_KINDS:
            self._kinds.popitem(last=False)
        return AgreedCall(own_call, whole, is_compared=True)

    def _vote(self, number: int | None, weight: float) -> Vote:
        return Vote(self.ranks.group, number, weight)

    def _message(
        self,
        action: str,
        own_call: ModelCall,
        *,
        weight: float = 1.0,
        local: bool = False,
        digests: Mapping[Path, int] | None = None,
        error: Exception | None = None,
        begun: int | None = None,
        joinable: JoinableCall | None = None,
    ) -> _Message:
        return _Message(
            error=None if error is None else str(error),
            action=action,
            weight=weight,
            arguments=arguments_of(own_call),
            digests=digests or {},
            group=self.data_rank if local else 0,
            count=self._count,
            begun=begun,
            joinable=joinable,
        )

    def _compare(
        self, message: _Message, own_call: ModelCall, *, local: bool, error: Exception | None = None
    ) -> tuple[int, ModelCall] | JoinableCall:
        """Number of the call that all ranks make, and what they pass together, once each has told what it does.

        Or the call in which ranks join that make another one.

        Raises:
            ValueError: as ``agree``.
        """
        messages = self.ranks.gathered(message)
        self._count = max(one.count for one in messages)
        self._some_ran_ahead = any(one.begun is not None for one in messages)
        is_alike = all(one.action == message.action for one in messages)
        if not is_alike and not self._some_ran_ahead and all(one.error is None for one in messages):
            first = joined([one.joinable for one in messages])
            if first is not None:
                return first
        try:
            if error is not None:
                raise error
            self._check(messages, local=local)
            number, whole = passed_together(own_call, messages[0].action, [one.arguments for one in messages])
            apart = [place for place, one in enumerate(messages) if one.begun not in (None, number)]
            if apart:
                raise ValueError(
                    f"{self.ranks.names(apart)} began with what ranks passed together before, which is not what they "
                    "pass now"
                )
        except Exception as problem:
            self._note_broken(problem)
            raise
        return number, whole

    def _note_broken(self, error: Exception) -> None:
        """Mark the module unusable: the queued work of ranks that ran ahead waits for ranks that will not come."""
        if self._some_ran_ahead:
            self._broken = str(error)

    def _is_due(self) -> bool:
        self._count += 1
        return self._count % _RARELY == 0 if self._count > _RARELY else self._count.bit_count() == 1

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


_OUT_OF_STEP = "ranks are out of step since a call that some had begun when others refused it: start them again"
_GLOBAL = "every rank must pass the same global batch (with local_inputs=True, its data-parallel group's samples)"


def _with_values(call: ModelCall, reads: Collection[str] | None) -> ModelCall:
    """Return ``call``; raise ValueError if an input that is read has no values."""
    for path, tensor in call.tensors.items():
        if tensor.is_meta and (reads is None or str(path[0]) in reads):
            raise ValueError(
                f"input {'.'.join(map(str, path))!r} is on the meta device, so it has no values: pass real tensors "
                "(those without values serve as example_inputs of planner.compile)"
            )
    return call
