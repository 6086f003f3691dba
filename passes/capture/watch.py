"""What a model's forward must not do while it is traced: gradients would be other than the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from passes.capture.computed_indices import look_up
from passes.capture.drawn_numbers import read_drawn_number
from passes.capture.numbers_as_places import IndexNumbers
from passes.capture.operator_count import OperatorCount, calls_operator
from passes.capture.placed_rows import placed_rows
from passes.capture.row_groups import RowGroups
from passes.capture.selected_branches import with_selection
from passes.capture.strided_views import StridedViews
from passes.capture.value_free_forms import call_without_values
from passes.capture.value_reads import ValueReads
from passes.capture.without_gradients import call_without_gradients
from passes.ir.errors import CaptureError
from passes.ir.value_guards import GuardReading
from passes.torch_compat import fake_quantization, host_operators  # noqa: F401
from passes.torch_compat.tensor_fields import FakeTensor, is_inside_transform, layout_of, saved_tensors_hooks_of_thread

#: Methods that change or look at gradients as they pass, by what to do instead.
_METHODS = {
    "register_hook": "change the gradient with an operator: x.detach() + (x - x.detach()) * factor scales it",
    "register_post_accumulate_grad_hook": "look at the gradients after train_step",
    "retain_grad": "look at the gradients after train_step",
    "backward": "torch.autograd.grad(..., create_graph=True) gives gradients inside a model",
}

_PACKED = (
    "pack_padded_sequence makes shapes of the lengths' values, which differ from batch to batch: run the layer on the "
    "padded batch and pick its outputs by length (outputs.gather(1, …), torch.where with a mask)"
)


class WatchedForward(TorchFunctionMode):
    """Raises CaptureError where a model does what tracing would lose.

    Attributes:
        checkpoints: whether part of the model ran under ``torch.utils.checkpoint``.
        row_groups: answers what it asks of groups of rows.

    Args:
        originals: names of the tensors that the copy of the model must not come across, by identity.
        reads: answers what the model asks of values.
        operators: counts what the model calls.
    """

    def __init__(self, originals: Mapping[torch.Tensor, str], reads: ValueReads, operators: OperatorCount) -> None:
        super().__init__()
        self.checkpoints = False
        self._originals = originals
        self._reads = reads
        self._operators = operators
        self.row_groups = RowGroups(reads)
        #: What masks picked and nothing but a CTC loss has seen, by identity: its tensor, the readings of its size.
        self._targets: dict[int, tuple[torch.Tensor, list[GuardReading]]] = {}
        #: Readings of sizes that only CTC losses depend on.
        self.sizes_of_targets: list[GuardReading] = []
        self._index_numbers = IndexNumbers(reads)
        self._strided = StridedViews()
        self._hooks_outside = _pack_hook()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if not name.endswith("_nesting"):  # entering and leaving a transform go in pairs
            self._check_regions()
        if name in _METHODS and getattr(torch.Tensor, name, None) is func:
            raise CaptureError(f"Tensor.{name} inside of forward would be lost by tracing: {_METHODS[name]}")
        if name == "_pack_padded_sequence":
            raise CaptureError(_PACKED)
        self._reads.picked.note_call(name, args, kwargs or {})
        same = call_without_gradients(func, name, args, kwargs or {})
        if same is None:
            same = self._strided.call(name, args, kwargs or {})
        if same is None:
            same = call_without_values(name, args, kwargs or {})
        if same is not None:
            return same
        if any(isinstance(arg, DTensor) for arg in args):
            raise CaptureError(
                f"{name} is called on a DTensor: forward or the loss reaches a parallel module, or what stands in one; "
                "let it reach the model that planner.compile is given, whose parameters stand for the parallel module's"
            )
        if func == _DATA:
            return args[0].detach()  # whatever is written to it is found where writes are made functional
        if func == _SET_DATA:
            return _write_data(*args)
        if func == _SET_GRADIENT and args[1] is not None:
            raise CaptureError(f"x.grad = … inside of forward would be lost by tracing: {_METHODS['backward']}")
        if func in _FREEZES and isinstance(args[0], torch.nn.Parameter):
            _refuse_freezing(args[0], *args[1:], **(kwargs or {}))
        if func in _FROM_DATA and args and isinstance(args[0], (list, tuple)):
            args = (_with_numbers(args[0]), *args[1:])
        if name in ("__getitem__", "__setitem__") and len(args) > 1:
            args = (args[0], _joined(args[1]), *args[2:])
        drawn = read_drawn_number(self._reads, name, args)
        if drawn is not None:
            return drawn
        number = self._index_numbers.read(name, args)
        if number is not None:
            return number
        has_numbers, entries = self._index_numbers.look_up(name, args, kwargs or {})
        if has_numbers:
            return entries
        is_looked_up, entries = look_up(name, args, kwargs or {}, self._reads.is_settled)
        if is_looked_up:
            return entries
        if name == "__bool__":
            check = self._reads.check(args[0])
            if check is not None:
                self._reads.checks.append((args[0].clone(), *check))
                return check[0]
        if func in _EQUAL and len(args) == 2:
            equal = self._reads.equal(*args)
            if equal is not None:
                return equal
        if name == "__format__" and args[0].dim() == 0 and self._reads.is_settled(args[0]):
            return format(args[0].item(), *args[1:])  # f"expert_{index}" names a module; what is only logged is left
        placed = placed_rows(self._reads, name, args) if not kwargs else None
        if placed is not None:
            return placed
        grouped = self.row_groups.call(name, args, kwargs or {})
        if grouped is not None:
            return grouped
        decided = self._reads.decide(args[0]) if name == "__bool__" else None
        if decided is not None:
            return decided
        num_entries = self._reads.num_entries
        places = self._reads.picked.rows_of(name, args[0] if args else None)
        if places is not None:
            return places
        try:
            result = _array(args[0]) if func in _AS_ARRAY else func(*args, **(kwargs or {}))
        except CaptureError as refusal:
            need = with_selection(refusal) if name == "__bool__" else None
            if need is None:
                raise
            raise need from refusal
        if name in _READ_BY and all(map(_is_held, args)):
            self._reads.note_held([tensor for tensor in args if isinstance(tensor, torch.Tensor)])
        if calls_operator(name, result):
            self._operators.note()
        self._reads.picked.note(name, args[0] if args else None, result)
        self._follow_targets(name, args, result, self._reads.readings_since(num_entries))
        if isinstance(result, torch.Tensor):
            if layout_of(result) not in _LAYOUTS:
                raise CaptureError(
                    f"{name} makes a sparse tensor, which no plan can cut: write its zeros out (to_dense, index_put)"
                )
            self._check_origin(name, args)
            if result.requires_grad:
                _refuse_learners(name, args)
        return result

    def _follow_targets(self, function: str, args: tuple[Any, ...], result: Any, readings: list[GuardReading]) -> None:
        """Note which readings are of sizes that only a CTC loss depends on, where no code asked for the size."""
        if function in ("masked_select", "__getitem__") and readings and isinstance(result, torch.Tensor):
            self._targets[id(result)] = (result, readings)
            return
        for arg in args:
            _, sizes = self._targets.pop(id(arg), (None, []))
            if function == "ctc_loss":
                self.sizes_of_targets += sizes

    def listed(self, tensor: torch.Tensor) -> list[Any] | None:
        """What ``tensor.tolist()`` gives as a whole; None if it is read number by number."""
        sizes = self.row_groups.sizes(tensor)
        return self._reads.listed(tensor) if sizes is None else sizes

    def checked(self, output: torch.Tensor) -> torch.Tensor:
        """``output``, which at run time is there only if every check comes out as it was traced."""
        for condition, expected, reason in self._reads.checks:
            output = torch.ops.meshwright.checked(output, condition, expected, reason)
        return self._reads.decisions.marked(output)

    def _check_origin(self, function: str, args: tuple[Any, ...]) -> None:
        for arg in args:
            for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(tensor, torch.Tensor) and tensor in self._originals:
                    raise CaptureError(
                        f"{function} is called on {self._originals[tensor]!r} of the model itself, not of the "
                        "copy that is traced: forward or the loss reaches it through something that cannot be followed "
                        "(a global of a library, __slots__); hold it as an attribute of a module"
                    )

    def _check_regions(self) -> None:
        if torch.is_inference_mode_enabled():
            raise CaptureError("torch.inference_mode inside of forward cannot be traced: use torch.no_grad")
        if is_inside_transform():
            raise CaptureError(
                "a transform of torch.func (grad, jvp, …) inside of forward cannot be traced: use "
                "torch.autograd.grad(..., create_graph=True)"
            )
        pack = _pack_hook()
        if pack is None or pack is self._hooks_outside:
            return
        if getattr(pack, "__module__", "") != "torch.utils.checkpoint":
            raise CaptureError(
                "saved_tensors_hooks (and save_on_cpu) inside of forward would be lost by tracing: leave them out; "
                "what is kept for the backward pass is planned (memory_limit, fix={'recompute': …})"
            )
        self.checkpoints = True


#: Tensors that a program may have.
_LAYOUTS = (torch.strided, torch.jagged)
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SET_GRADIENT = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_FREEZES = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
#: Functions that read the values of tensors in a list, which have none.
_FROM_DATA = (torch.tensor, torch.as_tensor)
_EQUAL = (torch.equal, torch.Tensor.equal)
_AS_ARRAY = (torch.Tensor.numpy, torch.Tensor.__array__)
#: What gives Python the values of a tensor that is there, which the tracer does not see.
_READ_BY = frozenset(
    ("item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__", "equal",
     "allclose", "__contains__")
)  # fmt: skip
#: Elements of a tensor that may be read as an array.
_MAX_READ = 4096


def _is_held(argument: Any) -> bool:
    """Whether an argument is not a tensor of the trace."""
    return not isinstance(argument, FakeTensor)


def _refuse_learners(function: str, args: Iterable[Any]) -> None:
    """Refuse tensors from outside of the call that a gradient would come to: as constants they get none."""
    for arg in args:
        if isinstance(arg, (list, tuple)):
            _refuse_learners(function, arg)
        elif isinstance(arg, torch.Tensor) and arg.requires_grad and not isinstance(arg, FakeTensor):
            raise CaptureError(
                f"{function} is called on a tensor of shape {list(arg.shape)} that requires a gradient and is neither "
                "a parameter of the model nor an input (a global of the script, an attribute of loss_fn, an entry of a "
                "list): a program would not train it. Make it an nn.Parameter of a module of the model, where loss_fn "
                "can reach it, or pass it as an argument; if it is not trained, freeze it (requires_grad_(False))"
            )


def _write_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
    """``tensor.data = new`` as a write to its memory, which nothing else may look at."""
    if not isinstance(tensor, torch.nn.Parameter) or (tensor.shape, tensor.dtype) != (new.shape, new.dtype):
        raise CaptureError(
            "x.data = … inside of forward cannot be traced, but for a parameter's, of the same shape and dtype: give "
            "the new value a name of its own, or x.copy_(…) under torch.no_grad()"
        )
    tensor.detach().copy_(new.detach())


def _refuse_freezing(parameter: torch.nn.Parameter, requires_grad: bool = True) -> None:
    if parameter.requires_grad is not requires_grad:
        raise CaptureError(
            "forward changes requires_grad of a parameter, which a program does not: set it before planner.compile, or "
            "detach what is computed of it"
        )


def _with_numbers(data: Any) -> Any:
    """A nested list with numbers for tensors: reading them is noted."""
    if isinstance(data, (list, tuple)):
        return type(data)(map(_with_numbers, data)) if type(data) in (list, tuple) else data
    return data.tolist() if isinstance(data, torch.Tensor) else data


def _joined(index: Any) -> Any:
    """An index in which lists of single tensors are tensors: ``x[list(rows), list(columns)]``."""
    if isinstance(index, tuple) and any(isinstance(entry, (list, tuple)) for entry in index):
        return tuple(map(_stacked, index))
    return _stacked(index) if isinstance(index, list) else index


def _stacked(entries: Any) -> Any:
    if not isinstance(entries, (list, tuple)) or not entries:
        return entries
    is_single = all(isinstance(entry, torch.Tensor) and entry.dim() == 0 for entry in entries)
    return torch.stack(tuple(entries)) if is_single else entries


def _array(tensor: torch.Tensor) -> Any:
    """``tensor.numpy()`` by way of its numbers."""
    if tensor.numel() > _MAX_READ:
        raise CaptureError(
            f"Tensor.numpy of {tensor.numel()} elements inside of forward would make each of them a constant of the "
            "program: use tensor operations"
        )
    return np.array(tensor.tolist(), dtype=str(tensor.dtype).removeprefix("torch."))


def _pack_hook() -> Any:
    """The function that packs saved tensors now; None if they are saved as they are."""
    hooks = saved_tensors_hooks_of_thread()
    return None if hooks is None else hooks[0]
