"""Values that a model's Python code reads while it is traced: taken from the example call, with a guard for others.

``.item()``, ``bool()``, ``.tolist()``, ``nonzero`` and boolean masks ask for values, which tracing has not. What leads
to the value in the unfinished graph is run on the example's tensors, and the answer is a constant of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from passes.capture.decisions import Decisions
from passes.capture.error_checks import harmless_answer
from passes.capture.guard_values import StepValues
from passes.capture.held_tensors import HeldTensors
from passes.capture.picked_rows import PickedRows
from passes.capture.selected_branches import can_be_rewritten
from passes.capture.shorten import NotRepeated
from passes.capture.tracing_errors import describe_stack, innermost_frame_of_model
from passes.capture.value_subgraph import Source, Subgraphs, UnknownValue
from passes.ir.errors import CaptureError, MissingValues
from passes.ir.value_guards import GuardReading, GuardStep, HeldTensor, Path, StepResult, ValueGuards
from passes.torch_compat.tracer_questions import CurrentTrace, outside_of_tracing

_aten = torch.ops.aten
_INSTEAD = "use torch.where and tensor operations of static shape, or decide from shapes and Python values"


class ValueReads:
    """Answers the questions of one trace.

    Attributes:
        guards: what was read so far.
        checks: flags that only raise errors, or tell whether numbers are finite; what they have to be, and the error if
            they are not.
        picked: the masks that pick an unknown number of rows.
        decisions: the questions whose answers weights decide.

    Args:
        inputs: values of the call's tensors by path; None or on meta where there are none.
        buffers: values of the model's buffers by name.
        modules: ``id(module)`` → path, to say where a value is read.
        whole: False if repeated layers are skipped: then a buffer of one layer says nothing about the next.
        held: finds the tensors of a script that are constants of the trace.
    """

    def __init__(
        self,
        inputs: Mapping[Path, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        modules: Mapping[int, str],
        *,
        whole: bool,
        picked: PickedRows,
        decisions: Decisions,
        held: HeldTensors,
    ) -> None:
        self._held = held
        self.picked = picked
        self.decisions = decisions
        self._inputs = inputs
        self._buffers = buffers
        self._modules = modules
        self._whole = whole
        self._entries: list[GuardStep | GuardReading] = []
        self._asked = ""
        self._begin_values()

    def _begin_values(self) -> None:
        self._entries.clear()
        self.decisions.begin()
        self.checks: list[tuple[torch.Tensor, bool, str]] = []
        self._values = StepValues(self._input, self._buffer)
        self._subgraphs: Subgraphs | None = None

    @property
    def guards(self) -> ValueGuards:
        return ValueGuards(tuple(self._entries))

    @property
    def num_entries(self) -> int:
        """How many steps and readings there are so far."""
        return len(self._entries)

    def readings_since(self, num_entries: int) -> list[GuardReading]:
        """The readings among the entries behind the first ones."""
        return [entry for entry in self._entries[num_entries:] if isinstance(entry, GuardReading)]

    def begin(self, tensors: Mapping[Source, torch.Tensor]) -> None:
        """The trace begins, with these tensors for inputs, parameters and buffers."""
        self._begin_values()
        self._subgraphs = Subgraphs(CurrentTrace(), tensors, self._held)

    def answer(
        self, ask: Callable[..., Any], stand_ins: Any, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What the tracer gets for an operator that reads values, or whose results' sizes depend on them.

        Args:
            ask: asks as torch does, where values do not matter.
            stand_ins: a context in which new tensors have no data.
        """
        self._asked = _words_for(operator, args)
        if operator is _aten.index.Tensor:
            return ask(args[0], self._places(args[1], stand_ins))
        if operator is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
            return ask(*args, **kwargs)
        if operator is _aten._ctc_loss.Tensor:
            with stand_ins:
                return _ctc_results(*args[:2])
        if operator is _aten.masked_select.default:
            source, mask = args
            sizes = torch.broadcast_shapes(source.shape, mask.shape)
            picked = self._picked_count(mask) if mask.shape == sizes else None
            count = self._count(mask, sizes) if picked is None else picked
            with stand_ins:
                return source.new_empty((count,))
        if operator in _NUMBERS and args[0].dtype == torch.bool:
            decided = None if self._subgraphs is None else self._subgraphs.answer_whatever_is_drawn(args[0])
            if decided is not None:
                return decided
            check = self.check(args[0])  # of a function of torch.nn, inside of which the model is not watched
            if check is not None:
                self.checks.append((args[0], *check))
                return check[0]
        if operator is _aten.bincount.default:
            size = self._number_of_bins(*args, **kwargs)
            if size is not None:
                with stand_ins:
                    weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
                    return (args[0] if weights is None else weights).new_empty((size,), dtype=_dtype_of_counts(weights))
        if operator is _aten.nonzero.default:
            picked = self._picked_count(args[0])
            if picked is not None:
                with stand_ins:
                    return args[0].new_empty((picked, args[0].dim()), dtype=torch.int64)
        number = self._number(args[0]) if operator in _NUMBERS else None
        if number is not None:
            return number
        asked = tuple(self._argument(argument) for argument in args)
        named = tuple((name, self._argument(argument)) for name, argument in kwargs.items())
        question = self._add(GuardStep(str(operator), asked, named))
        self._read(question)
        with stand_ins:
            return _without_data(self._values.results[question.step])

    def refusal_to_read(self, tensor: torch.Tensor) -> CaptureError | None:
        """What is raised if Python reads the number in ``tensor``; None if it is answered."""
        traced = self._subgraphs
        unknown = None if traced is None or traced.mask_counted(tensor) else traced.why_unknown(tensor)
        words = _words_for(_aten.item.default, (tensor,))
        return None if unknown is None else CaptureError(f"{words}, which {unknown}: {_INSTEAD}")

    def listed(self, tensor: torch.Tensor) -> list[Any] | None:
        """What ``tensor.tolist()`` gives, read as a whole, if inputs, buffers and constants decide it; None for others.

        Raises:
            MissingValues: if the example has no values for it.
        """
        if tensor.numel() < 2 or not self.is_settled(tensor):
            return None
        self._asked = _words_for(_aten.item.default, (tensor,))
        numbers = self._add(GuardStep("tolist", (self._step_of(tensor),)))
        self._read(numbers)
        return self._values.results[numbers.step]  # type: ignore[no-any-return]

    def note_held(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that Python has read all values of tensors that a script holds."""
        for tensor in tensors:
            step = self._add(GuardStep("held", (HeldTensor(self._held.of(tensor)),)))
            self._read(self._add(GuardStep("tolist", (step,))))

    def is_settled(self, tensor: torch.Tensor) -> bool:
        """Whether inputs, buffers and constants decide what a tensor is, so that reading it is no error."""
        return self._subgraphs is not None and self._subgraphs.is_settled(tensor)

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor holds numbers drawn from [0, 1)."""
        return self._subgraphs is not None and self._subgraphs.is_drawn(tensor)

    def check(self, flag: torch.Tensor) -> tuple[bool, str] | None:
        """What ``flag`` has to be for the program to do what the model does, and the error if it is not.

        None if it asks for what no check can settle, or if the example's values tell.

        Raises:
            NotRepeated: if layers are skipped, whose checks would be lost.
        """
        if self._subgraphs is None:
            return None
        place = describe_stack(self._modules)
        frame = innermost_frame_of_model()
        answer = None if frame is None else harmless_answer(frame)
        reason = f"the model raises an error here: what it checks came out {not answer} at {place}"
        if answer is None:
            answer = self._subgraphs.answer_if_finite(flag)
            reason = f"numbers are not finite, and the program has no branch for these, at {place}"
        if answer is None or self._subgraphs.is_settled(flag):
            return None
        if not self._whole:
            raise NotRepeated(place)
        return answer, reason

    def equal(self, first: torch.Tensor, second: torch.Tensor) -> bool | None:
        """Whether tensors of floats that weights decide are equal: if they are computed alike, else that is decided.

        None for others, whose values tell.

        Raises:
            NotRepeated: as ``check``.
        """
        if self._subgraphs is None or not first.is_floating_point() or first.shape != second.shape:
            return None
        alike = self._subgraphs.are_alike(first, second)
        return alike if alike is not False else self._decide((first.detach() == second.detach()).all(), usual=False)

    def decide(self, flag: torch.Tensor) -> bool | None:
        """Whether a flag that weights decide holds, as this trace has it; None for others, whose values tell.

        None also where both branches of the ``if`` that asks can be computed in place (``selected_branches``).

        Raises:
            NotRepeated: as ``check``.
        """
        if self._subgraphs is None or flag.numel() != 1 or not self._subgraphs.is_decided_by_weights(flag):
            return None
        if can_be_rewritten():
            return None
        flag = flag.clone()  # it may be written to
        return self._decide(flag if flag.dtype == torch.bool else flag != 0, usual=True)

    def _decide(self, flag: torch.Tensor, *, usual: bool) -> bool:
        place = describe_stack(self._modules)
        if not self._whole:
            raise NotRepeated(place)
        return self.decisions.answer(flag, usual, place)

    def _places(self, indices: list[torch.Tensor | None], stand_ins: Any) -> list[torch.Tensor | None]:
        """Indices with a mask as the places where it is true."""
        places: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
            else:
                picked = self._picked_count(index) if index.dtype == torch.bool else None
                count = self._count(index, index.shape) if picked is None else picked
                with stand_ins:
                    places += [index.new_empty((count,), dtype=torch.int64) for _ in range(index.dim())]
        return places

    def _picked_count(self, mask: torch.Tensor | fx.Node, *, is_size: bool = True) -> int | None:
        """How many rows a mask picks for the trace if that is left open; None if inputs decide it.

        Args:
            is_size: whether it is the size of a result; otherwise Python asks for it, or whether there are any.
        """
        traced = self._subgraphs
        node = None if traced is None else traced.unsettled_mask(mask)
        is_settled = node is None
        if traced is None or (is_settled and not (is_size and self.picked.any_number_at)):
            return None
        place = describe_stack(self._modules)
        if is_settled and place in self.picked.any_number_at:
            node = traced.open_mask(mask)
        if node is None:
            return None
        node = self.picked.known_as(node)
        hits = traced.hits_of(node)
        self.picked.hits |= hits
        is_looping = self.picked.is_looping(place) and not hits
        expert = traced.entry_number(node, self.picked.hits) if is_looping else None
        if is_looping and expert is None:
            raise CaptureError(
                "rows are picked inside of a loop over experts that were hit, by a mask that is not one of those whose "
                f"hits the loop runs over: {_INSTEAD}"
            )
        count = self.picked.count(node, expert, place, traced.most_hits(hits) if hits else None)
        if is_settled:
            self.picked.counts_of_inputs.add(count)
        return count

    def _number_of_bins(self, ids: torch.Tensor, weights: Any = None, minlength: int = 0) -> int | None:
        """How long ``bincount`` is of ids that weights decide, if that is known before their values are."""
        traced = self._subgraphs
        if traced is None or traced.is_settled(ids):
            return None
        bound = traced.bound_of(ids)
        return minlength if bound is not None and bound <= minlength else None

    def sizes_of_groups(self, counts: torch.Tensor) -> list[int] | None:
        """Made-up numbers for the entries of ``counts``, if inputs, buffers and constants do not decide them."""
        node = None if self._subgraphs is None else self._subgraphs.unsettled_mask(counts)
        if node is None:
            return None
        place = describe_stack(self._modules)
        return [self.picked.count((node, group), None, place) for group in range(len(counts))]

    def name_group(self, mask: torch.Tensor, counts: torch.Tensor, group: int) -> None:
        """``mask`` picks the rows of a group, as many as an entry of ``counts`` says."""
        assert self._subgraphs is not None
        masks = self._subgraphs.unsettled_mask(mask), self._subgraphs.unsettled_mask(counts)
        self.picked.name(masks[0], (masks[1], group))

    def depends_on(self, tensor: torch.Tensor, mask: torch.Tensor) -> bool:
        """Whether ``tensor`` is computed of ``mask``."""
        return self._subgraphs is not None and self._subgraphs.depends_on(tensor, mask)

    def _number(self, tensor: torch.Tensor) -> int | float | None:
        """A number that Python reads: one that was written out, or of the rows that a mask picks; None for others."""
        traced = self._subgraphs
        if traced is None:
            return None
        if self.picked.loops:
            constant = traced.constant(tensor)
            if constant is not None:
                return constant.item()
        of = traced.mask_counted(tensor)
        count = None if of is None else self._picked_count(of[0], is_size=False)
        if of is None or count is None:
            return None
        self.picked.bounds |= {of[2]} - {0}
        return of[1](count)

    def _count(self, mask: torch.Tensor, shape: tuple[int, ...]) -> int:
        """How many entries of a mask, spread to ``shape``, are true."""
        source = self._step_of(mask)
        spread = self._add(GuardStep("aten.expand.default", (source, tuple(shape))))
        (number, _) = self._read(self._add(GuardStep("aten.nonzero.default", (spread,))))
        return int(number)

    def each_row_picks(self, mask: torch.Tensor, count: int) -> bool:
        """Whether each row of a mask [rows, …] has ``count`` true entries; if so, calls with others need another trace.

        Raises:
            CaptureError: if more than inputs, buffers and constants decide the mask.
            MissingValues: if the example has no values for it.
        """
        if self._subgraphs is None:
            return False
        self._asked = "rows are placed by a mask"
        source = self._step_of(mask)
        dims = tuple(range(1, mask.dim()))
        counts = self._add(GuardStep("aten.sum.dim_IntList", (source, dims)))
        ends = [self._add(GuardStep(f"aten.{end}.default", (counts,))) for end in ("amin", "amax")]
        numbers = [self._add(GuardStep("aten.item.default", (end,))) for end in ends]
        if any(self._values.read(number) != count for number in numbers):
            return False
        for number in numbers:
            self._read(number)
        return True

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self._step_of(argument)
        return tuple(map(self._argument, argument)) if isinstance(argument, (list, tuple)) else argument

    def _read(self, source: StepResult) -> Any:
        """Read a result, and note that it was read."""
        value = self._values.read(source)
        self._entries.append(GuardReading(source, value, describe_stack(self._modules)))
        return value

    def _step_of(self, tensor: torch.Tensor) -> StepResult:
        assert self._subgraphs is not None
        try:
            return self._subgraphs.steps_to(tensor, self._add)
        except UnknownValue as unknown:
            raise CaptureError(f"{self._asked}, which {unknown}: {_INSTEAD}") from None

    def _add(self, step: GuardStep) -> StepResult:
        if step.op == "held" and not self._whole:
            raise NotRepeated("a tensor that is read in Python")
        with outside_of_tracing():
            self._values.run(step)
        self._entries.append(step)
        return StepResult(len(self._values.results) - 1)

    def _input(self, path: Path) -> torch.Tensor:
        tensor = self._inputs.get(path)
        if tensor is None or tensor.is_meta:
            raise MissingValues(path, describe_stack(self._modules))
        return tensor

    def _buffer(self, name: str) -> torch.Tensor:
        if not self._whole:
            raise NotRepeated(name)
        tensor = self._buffers.get(name)
        if tensor is None or tensor.is_meta:
            raise CaptureError(
                f"Python reads a value that depends on buffer {name!r}, which has none here (it is on the meta "
                f"device): build the model on the CPU, or {_INSTEAD}"
            )
        return tensor


_NUMBERS = (_aten.item.default, _aten._local_scalar_dense.default)


def _dtype_of_counts(weights: torch.Tensor | None) -> torch.dtype:
    if weights is None:
        return torch.int64
    return weights.dtype if weights.dtype == torch.float32 else torch.float64


def _words_for(operator: Any, args: tuple[Any, ...]) -> str:
    if torch.Tag.data_dependent_output not in operator.tags:
        return "the shape of a result depends on a value"
    is_flag = args[0].dtype == torch.bool or len(args) > 1
    return "control flow depends on a value" if is_flag else "a tensor's value is read in Python (.item(), .tolist())"


def _ctc_results(log_probabilities: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each sample, and what its backward needs: as long as the longest target, which is at most this."""
    num_frames, num_samples, _ = log_probabilities.shape
    longest = targets.shape[1] if targets.dim() == 2 else targets.numel()
    needed = log_probabilities.new_empty((num_samples, num_frames, 2 * longest + 1))
    return log_probabilities.new_empty((num_samples,)), needed


def _without_data(result: Any) -> Any:
    """Tensors as the tracer's own of the same shape; numbers as they are."""
    if isinstance(result, torch.Tensor):
        return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
    return tuple(map(_without_data, result)) if isinstance(result, (list, tuple)) else result


def drop_answered(program: ExportedProgram) -> None:
    """Take the operators out whose answers are constants of the program."""
    for node in reversed(program.graph.nodes):
        if node.op == "call_function" and node.target in _ANSWERED and not node.users:
            program.graph.erase_node(node)


_ANSWERED = (_aten.item.default, _aten._local_scalar_dense.default, _aten.equal.default, _aten.allclose.default)
