"""The example call as a module of flat tensors, which ``torch.export`` traces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, MutableMapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from passes.capture.call_arguments import batch_for_loss
from passes.capture.held_tensors import HeldTensors
from passes.capture.loss_of_call import CalledModel, calls_model
from passes.capture.model_copy import leading_to_copy, original_of
from passes.capture.nested_values import Path, Structure, TrainingOutput, constants_of, flatten, rebuild
from passes.capture.numbers_as_places import refuse_left_over
from passes.capture.operator_count import OperatorCount
from passes.capture.precision_of_calls import for_loss, precision_of
from passes.capture.python_draws import no_python_draws
from passes.capture.python_state import StateChanges, TracedStates, WatchedState
from passes.capture.stand_in import OneDevice
from passes.capture.value_reads import ValueReads
from passes.capture.watch import WatchedForward
from passes.ir.errors import CaptureError
from passes.ir.value_guards import GuardReading
from passes.torch_compat.tracer_questions import answered_lists

LossFunction = Callable[[Any, Any], Any]
_PLACED = "placed in Python"


def placed_output(number: int) -> str:
    """The output of the graph under which a call returns a tensor that it puts somewhere for its next call."""
    return f"{_PLACED}.{number}"


class CallResult:
    """What a call returned, taken apart; the literal tensors of its graph by path."""

    structure: Structure
    tensors: dict[Path, torch.Tensor]
    checkpoints: bool
    #: Whether a function of the model runs layers once more in its backward.
    recomputes: bool = False
    sizes_of_targets: list[GuardReading]
    changes: StateChanges
    constants: dict[str, Any]


class FlatCall(nn.Module):
    """The example call as a module of flat tensors, remembering the structure of what comes out."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: LossFunction | None
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn: LossFunction | None
        vars(self)["loss_fn"] = leading_to_copy(loss_fn, model)  # a module, too, is no part of the model
        self.parameters_of_forward = inspect.signature(model.forward).parameters
        self.extra = _without_cache(self.parameters_of_forward, kwargs)
        self.structure, self.tensors = flatten((args, kwargs))
        self.tensors = {path[1:]: tensor for path, tensor in self.tensors.items()}
        self.originals: MutableMapping[torch.Tensor, str] = WeakTensorKeyDictionary()
        for one in (model, original_of(model)):
            if one is not None:
                names = (*one.named_parameters(), *one.named_buffers())
                self.originals.update((tensor, name) for name, tensor in names)
        self.reads: ValueReads
        self.operators: OperatorCount
        #: Where the model is traced.
        self.device: torch.device
        #: Identities of the traced tensors that a call before placed in Python → which of them each is.
        self.placed: dict[int, int] = {}
        self.returns_placed = False
        # An object of its own: export puts the module's attributes back after tracing.
        self.result = CallResult()

    @cached_property
    def held(self) -> HeldTensors:
        """Finds the tensors that the model and the loss function hold beside weights."""
        return HeldTensors(self.model, self.loss_fn)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        sources = self.sources(tensors)
        self.reads.begin(sources)
        args, kwargs = self.unflatten(tensors)
        states: TracedStates = {id(tensor): source for source, tensor in sources.items() if source[0] != "input"}
        state = WatchedState(self.model, (self.loss_fn,), states)
        try:
            structure, results = self.called(args, kwargs)
            self.result.changes = state.changes()
            refuse_left_over([new for _, _, new in self.result.changes.entries])
        finally:
            state.put_back()
        self.result.structure, self.result.tensors = structure, results
        if self.returns_placed:
            results.update({(_PLACED, n): tensor for n, tensor in enumerate(self.result.changes.tensors)})
        return tuple(self.result.tensors.values())

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Structure, dict[Path, torch.Tensor]]:
        watched = WatchedForward(self.originals, self.reads, self.operators)
        # Around the model alone: the tracer's own looks at tensors would all pass through the mode.
        with (
            OneDevice(self.device),
            watched,
            no_python_draws(),
            answered_lists(watched.listed),
            precision_of(self.model),
        ):
            if self.loss_fn is None:
                outputs = self.model(*args, **kwargs, **self.extra)
            else:
                outputs = self.with_loss(args, kwargs)
            structure, results = flatten(outputs)
            refuse_left_over(list(constants_of(structure)))
            _make_scalar(results, ("loss",))
            path = _smallest(results)
            if path is not None:
                results[path] = watched.checked(results[path])
            elif self.reads.decisions.questions:
                raise CaptureError("control flow depends on a value, and the model returns no tensor of floats")
        self.result.checkpoints = watched.checkpoints or self.result.recomputes
        self.result.sizes_of_targets = watched.sizes_of_targets
        return structure, results

    def sources(self, tensors: tuple[torch.Tensor, ...]) -> dict[tuple[str, Any], torch.Tensor]:
        """What the trace begins with, now that the tracer has put its own tensors in place."""
        parameters = {("parameter", name): tensor for name, tensor in self.model.named_parameters()}
        buffers = {("buffer", name): tensor for name, tensor in self.model.named_buffers()}
        return {**parameters, **buffers, **{("input", path): tensor for path, tensor in zip(self.tensors, tensors)}}

    def unflatten(self, tensors: tuple[torch.Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        remaining_tensors = iter(tensors)
        return rebuild(self.structure, _InOrder(remaining_tensors))

    def with_loss(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TrainingOutput:
        assert self.loss_fn is not None
        parameters = list(self.parameters_of_forward.values())
        batch = batch_for_loss(args, kwargs, self.parameters_of_forward)
        if calls_model(self.loss_fn):
            called = CalledModel(self.model, self.extra, for_loss=partial(for_loss, self.model))
            loss = self.loss_fn(called, batch)
            return TrainingOutput(loss, called.outputs)
        kinds = {parameter.kind for parameter in parameters}
        places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        positional = args if inspect.Parameter.VAR_POSITIONAL in kinds else args[:places]
        named = kwargs
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            named = {name: value for name, value in kwargs.items() if name in self.parameters_of_forward}
        outputs = self.model(*positional, **named, **self.extra)
        return TrainingOutput(self.loss_fn(for_loss(self.model, outputs), batch), outputs)


def _smallest(tensors: Mapping[Path, torch.Tensor]) -> Path | None:
    """The floating-point tensor with the fewest elements: the loss, where there is one."""
    floating = [path for path, tensor in tensors.items() if tensor.is_floating_point()]
    return min(floating, key=lambda path: tensors[path].numel(), default=None)


def _make_scalar(tensors: dict[Path, torch.Tensor], path: Path) -> None:
    """Let a loss of one element in several dims, from which ``backward`` starts as well, be without any."""
    loss = tensors.get(path)
    if loss is not None and loss.dim() and loss.numel() == 1 and loss.is_floating_point() and loss.requires_grad:
        tensors[path] = loss.reshape(())


class _InOrder(dict[Path, Any]):
    """Returns the next tensor for every requested path."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._tensors = tensors

    def __missing__(self, path: Path) -> Any:
        return next(self._tensors)


def _without_cache(parameters: Mapping[str, inspect.Parameter], kwargs: dict[str, Any]) -> dict[str, Any]:
    """``use_cache=False`` for models that would return a key-value cache unless told otherwise."""
    return {"use_cache": False} if "use_cache" in parameters and "use_cache" not in kwargs else {}


def loss_path(outputs: Mapping[Path, torch.Tensor]) -> str | None:
    """Which output is the loss: the scalar called ``loss``, or the first output if it is a scalar with gradient."""
    for path in (("loss",), *list(outputs)[:1]):
        value = outputs.get(path)
        if value is not None and value.dim() == 0 and value.is_floating_point() and value.requires_grad:
            return ".".join(map(str, path))
    return None
