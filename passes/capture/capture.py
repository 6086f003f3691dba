"""Capture a model: ``torch.export`` on stand-in tensors, then the canonical graph."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from passes.canonicalise import canonicalise
from passes.capture.convert import Source, convert
from passes.capture.draws import number_draws
from passes.capture.export import export
from passes.capture.forward_hooks import announced_hooks
from passes.capture.literals import merge_equal_literals
from passes.capture.model_copy import copy_of
from passes.capture.nested_values import Path, Structure, TrainingOutput, flatten, rebuild
from passes.capture.python_state import Changes, changes, describe, no_python_draws, plain_state, set_attributes
from passes.capture.refusals import refuse_inputs, refuse_unsupported
from passes.capture.repeats import RepeatedEntries, find_repeats
from passes.capture.saved_values import reconnect_saved_values
from passes.capture.shorten import NotRepeated, shortened
from passes.capture.stand_in import StandIns, device_of
from passes.capture.tracing_errors import describe_failure, explain, is_raised_by_the_model
from passes.capture.unfold import unfold
from passes.capture.value_reads import ValueReads, drop_answered
from passes.capture.watch import WatchedForward
from passes.ir.errors import CaptureError, MissingValues
from passes.ir.graph import Graph
from passes.ir.value_guards import GuardReading, ValueGuards
from passes.torch_compat.host_operators import CTC_LOSSES
from passes.torch_compat.tensor_fields import FakeTensor
from passes.torch_compat.tracer_questions import answered_reads
from passes.torch_compat.tracing import unvalidated_distributions

LossFunction = Callable[[Any, Any], Any]


def capture(
    model: nn.Module,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    training: bool | None = None,
    copy_repeats: bool = False,
    values: Mapping[Path, torch.Tensor] | None = None,
    buffer_values: Mapping[str, torch.Tensor] | None = None,
) -> Graph:
    """The graph of ``model(*args, **kwargs)`` for the shapes of these inputs.

    The model and its inputs may be on the meta device, and no weight is read or copied. Values of inputs matter only
    where the model's Python code asks for them (``.item()``, ``bool()``, ``nonzero``): the graph is then one for calls
    with the same answers, which its ``guards`` tell.
    A copy of the model is traced: the model itself is not touched, whatever its forward does.

    Args:
        args, kwargs: an example call on the global batch. Tensors (also inside lists, dicts and dataclasses) become
            inputs of the graph; everything else is a constant of it.
        loss_fn: ``loss_fn(outputs, batch)`` gives the scalar loss. ``batch`` is the one positional argument, or the
            tuple of them, or the dict of keyword arguments; those that ``model.forward`` does not take go to the loss
            alone. The graph then returns a ``TrainingOutput``. Without it, a scalar that the model returns as ``loss``
            (or as its first output) is the loss.
        training: put every module in training (or evaluation) mode; False also makes a graph without gradients.
            None leaves the modules' modes, and keeps gradients if there is a loss or the model is in training mode.
        copy_repeats: trace only a few of the layers that repeat and copy the rest, which gives the same graph in a
            time that hardly depends on how many they are. Models for which that cannot be told are traced in full.
        values: the call's tensors by path, where those in ``args`` and ``kwargs`` have none.
        buffer_values: the model's buffers by name, likewise.

    Raises:
        CaptureError: if the model cannot be traced; it names the module and the source line.
        MissingValues: if it asks for the value of an input that has none.
        Exception: what the model itself raises because of values that it asked for.
    """
    refuse_unsupported(model)
    options: dict[str, Any] = {
        "args": args,
        "kwargs": kwargs,
        "loss_fn": loss_fn,
        "training": training,
        "values": values,
        "buffer_values": buffer_values,
    }
    with _one_at_a_time:
        graph = _capture_shortened(model, options) if copy_repeats else None
        return number_draws(_capture_whole(model, **options) if graph is None else graph)


#: Tracing replaces functions of torch for its time.
_one_at_a_time = threading.RLock()


def _capture_whole(model: nn.Module, **options: Any) -> Graph:
    if options.get("buffer_values") is None:
        options["buffer_values"] = dict(model.named_buffers())
    graph, call = _traced(model, **options)
    changed = call.result.changed
    if not changed:
        return graph
    set_attributes(call.model, changed)
    again, _ = _traced(call.model, **options)
    if not _same_program(graph, again):
        raise CaptureError(
            f"cannot capture {type(model).__name__}: forward changes {describe(changed)} and computes something else "
            "at the next call, which a program does not: pass the number as an argument of forward, or keep it in a "
            "buffer that tensor operations change"
        )
    warnings.warn(
        f"forward of {type(model).__name__} changes {describe(changed)}: tracing called it on a copy, and the program "
        "does not change it any more",
        stacklevel=3,
    )
    return graph


def _same_program(first: Graph, second: Graph) -> bool:
    """Whether two graphs compute the same, from the same literal tensors."""
    literals = [(one.data, other.data) for one, other in zip(first.states, second.states) if one.data is not None]
    return first == second and all(other is not None and torch.equal(one, other) for one, other in literals)


def _traced(
    model: nn.Module,
    *,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss_fn: LossFunction | None,
    training: bool | None,
    values: Mapping[Path, torch.Tensor] | None = None,
    buffer_values: Mapping[str, torch.Tensor] | None = None,
    repeats: tuple[RepeatedEntries, ...] = (),
) -> tuple[Graph, _Call]:
    """The graph, and the call on a copy of the model, in which the entries of ``repeats`` are skipped."""
    stand_ins = StandIns(device_of(model))
    call = copy_of(_Call(model, args, dict(kwargs or {}), loss_fn), stand_ins.get)
    refuse_inputs(call.tensors)
    copied = call.model
    if training is not None and training != model.training:
        copied.train(training)
    paths = {id(module): name for name, module in copied.named_modules()}
    buffers = dict(model.named_buffers()) if buffer_values is None else buffer_values
    call.reads = ValueReads(call.tensors if values is None else values, buffers, paths, whole=not repeats)
    tensors = tuple(stand_ins.fresh(tensor) for tensor in call.tensors.values())
    with shortened(copied, repeats), announced_hooks(copied), unvalidated_distributions():
        graph_training = copied.training
        states = _state_names(call)
        program = _export(call, tensors, paths)
        loss = _loss_path(call, training)
        gradients = training is not False and (loss is not None or graph_training)
        merge_equal_literals(program)
        sources = _sources(program, call, states, gradients=gradients)
        try:
            reconnect_saved_values(program)
            graph = _to_graph(program, sources, call)
        except CaptureError as error:
            raise CaptureError(f"cannot capture {type(model).__name__}: {error}") from error
    names = {path: ".".join(map(str, path)) for path in call.result.tensors}
    graph = graph.replace(
        loss=loss,
        training=graph_training,
        checkpointed=call.result.checkpoints,
        guards=_guards(graph, call),
        unflatten=functools.partial(_returned, call.result.structure, names),
    )
    return graph, call


def _guards(graph: Graph, call: _Call) -> ValueGuards:
    """The readings that the graph is for. Targets of CTC losses that lie in rows are as many as they like."""
    guards = call.reads.guards
    losses = [node for node in graph.nodes if node.op == CTC_LOSSES]
    values = graph.values if losses else {}
    if any(len(values[node.inputs[1]].shape) == 1 for node in losses):
        return guards
    remaining = ValueGuards(tuple(entry for entry in guards.entries if entry not in call.result.sizes_of_targets))
    return remaining if remaining.readings else ValueGuards()


def _returned(structure: Structure, names: Mapping[Path, str], outputs: Mapping[str, Any]) -> Any:
    """What the model returns, put together from the graph's outputs by name."""
    return rebuild(structure, {path: outputs[name] for path, name in names.items()})


def _capture_shortened(model: nn.Module, options: dict[str, Any]) -> Graph | None:
    """The graph with repeated layers copied, or None if the model has none or does not treat them as such."""
    repeats = find_repeats(model)
    if not repeats:
        return None
    try:
        graph, call = _traced(model, **options, repeats=repeats)
        return None if call.result.changed else unfold(graph, repeats)
    except (CaptureError, NotRepeated):
        return None


class _Result:
    """What a call returned, taken apart."""

    structure: Structure
    tensors: dict[Path, torch.Tensor]
    checkpoints: bool
    sizes_of_targets: list[GuardReading]
    changed: Changes


class _Call(nn.Module):
    """The example call as a module of flat tensors, remembering the structure of what comes out."""

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], loss_fn: LossFunction | None
    ) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.parameters_of_forward = inspect.signature(model.forward).parameters
        self.extra = _without_cache(self.parameters_of_forward, kwargs)
        self.structure, self.tensors = flatten((args, kwargs))
        self.tensors = {path[1:]: tensor for path, tensor in self.tensors.items()}
        self.originals = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        self.reads: ValueReads
        # An object of its own: export puts the module's attributes back after tracing.
        self.result = _Result()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.reads.begin(self.sources(tensors))
        args, kwargs = self.unflatten(tensors)
        before = plain_state(self.model)
        with WatchedForward(self.originals, self.reads) as watched, no_python_draws():
            if self.loss_fn is None:
                outputs = self.model(*args, **kwargs, **self.extra)
            else:
                outputs = self.with_loss(args, kwargs)
            structure, results = flatten(outputs)
            path = _smallest(results)
            if path is not None:
                results[path] = watched.checked(results[path])
        self.result.checkpoints = watched.checkpoints
        self.result.sizes_of_targets = watched.sizes_of_targets
        self.result.changed = changes(before, plain_state(self.model))
        self.result.structure, self.result.tensors = structure, results
        return tuple(self.result.tensors.values())

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
        kinds = {parameter.kind for parameter in parameters}
        places = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        positional = args if inspect.Parameter.VAR_POSITIONAL in kinds else args[:places]
        named = kwargs
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            named = {name: value for name, value in kwargs.items() if name in self.parameters_of_forward}
        outputs = self.model(*positional, **named, **self.extra)
        return TrainingOutput(self.loss_fn(outputs, _batch(args, kwargs, [p.name for p in parameters])), outputs)


def _smallest(tensors: Mapping[Path, torch.Tensor]) -> Path | None:
    """The floating-point tensor with the fewest elements: the loss, where there is one."""
    floating = [path for path, tensor in tensors.items() if tensor.is_floating_point()]
    return min(floating, key=lambda path: tensors[path].numel(), default=None)


class _InOrder(dict[Path, Any]):
    """Returns the next tensor for every requested path."""

    def __init__(self, tensors: Any) -> None:
        super().__init__()
        self._tensors = tensors

    def __missing__(self, path: Path) -> Any:
        return next(self._tensors)


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> Any:
    if not args:
        return kwargs
    if kwargs:
        return {**dict(zip(names, args)), **kwargs}
    return args[0] if len(args) == 1 else args


def _without_cache(parameters: Mapping[str, inspect.Parameter], kwargs: dict[str, Any]) -> dict[str, Any]:
    """``use_cache=False`` for models that would return a key-value cache unless told otherwise."""
    return {"use_cache": False} if "use_cache" in parameters and "use_cache" not in kwargs else {}


def _state_names(call: _Call) -> dict[str, tuple[str, ...]]:
    """Path of every parameter and buffer → all paths of the same tensor, the first one first."""
    paths: dict[int, list[str]] = {}
    everything = (*call.named_parameters(remove_duplicate=False), *call.named_buffers(remove_duplicate=False))
    for path, tensor in everything:
        paths.setdefault(id(tensor), []).append(path)
    return {path: tuple(group) for group in paths.values() for path in group}


def _export(call: _Call, tensors: tuple[torch.Tensor, ...], paths: Mapping[int, str]) -> ExportedProgram:
    name = type(call.model).__name__
    try:
        with torch.enable_grad(), answered_reads(call.reads.answer):
            program = export(call, tensors)
            reads = _first_read(program)
            if reads is not None:
                reads = _first_read(export(call, tensors, stack_traces=True)) or reads
    except Exception as error:
        if isinstance(error, MissingValues) or (call.reads.guards and is_raised_by_the_model(error)):
            raise
        reason = str(error) if isinstance(error, CaptureError) else explain(error)
        raise CaptureError(f"cannot capture {name}: in {describe_failure(error, paths)}: {reason}") from error
    if reads is not None:
        raise CaptureError(f"cannot capture {name}: {reads}")
    written = call.reads.written_buffers
    if written:
        raise CaptureError(
            f"cannot capture {name}: forward changes buffer {written[0]!r} and reads its value in Python, which a "
            "program does not: use tensor operations (torch.where), or pass the number as an argument of forward"
        )
    drop_answered(program)
    return program


def _first_read(program: ExportedProgram) -> str | None:
    """Where a tensor's value becomes a Python number or a shape, or a branch is taken on it, if anywhere."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            stack = list(node.meta.get("nn_module_stack", {}).values())
            place = stack[-1][0].removeprefix("model").removeprefix(".") if stack else ""
            lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
            where = f", {' '.join(lines[-2:])}" if lines else ""
            return (
                f"in module {place!r}{where}: {node.target} makes a number or a shape out of a tensor's values, "
                "which are not known when planning: use tensor operations of static shape"
            )
    return None


def _loss_path(call: _Call, training: bool | None) -> str | None:
    """Which output is the loss: the scalar called ``loss``, or the first output if it is a scalar with gradient."""
    values = call.result.tensors
    named = values.get(("loss",))
    if training is False or not values:
        return None
    first_path, first = next(iter(values.items()))
    for path, value in ((("loss",), named), (first_path, first)):
        if value is not None and value.dim() == 0 and value.is_floating_point() and value.requires_grad:
            return ".".join(map(str, path))
    return None


def _sources(
    program: ExportedProgram, call: _Call, states: Mapping[str, tuple[str, ...]], *, gradients: bool
) -> dict[str, Source]:
    """What every placeholder of the exported graph is. Placeholders of tied weights become one."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    first: dict[str, fx.Node] = {}
    names = list(call.parameters_of_forward)
    inputs = iter(call.tensors.items())
    sources: dict[str, Source] = {}
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            path, _ = next(inputs)
            tensor = node.meta["val"]
            sources[node.name] = Source(
                "input", _input_name(path, names), path, requires_grad=gradients and tensor.requires_grad
            )
            continue
        assert spec.target is not None
        group = states.get(spec.target, (spec.target,))
        node.replace_all_uses_with(first.setdefault(group[0], node))
        relative_paths = tuple(path.removeprefix("model.") for path in group)
        kind = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}.get(spec.kind, "constant")
        data = program.constants.get(spec.target) if kind == "constant" else None
        sources[node.name] = Source(
            kind,
            relative_paths[0],
            state=relative_paths[0],
            aliases=relative_paths[1:],
            persistent=bool(spec.persistent) if kind == "buffer" else kind == "parameter",
            requires_grad=gradients and kind == "parameter" and node.meta["val"].requires_grad,
            data=None if isinstance(data, FakeTensor) else data,
        )
    return sources


def _input_name(path: Path, names: list[str]) -> str:
    first = path[0]
    if isinstance(first, int):
        first = names[first] if first < len(names) else f"input_{first}"
    return "_".join(map(str, (first, *path[1:])))


def _to_graph(program: ExportedProgram, sources: dict[str, Source], call: _Call) -> Graph:
    module = program.graph_module
    canonicalise(
        module,
        buffers=[name for name, source in sources.items() if source.kind == "buffer"],
        literals=[name for name, source in sources.items() if source.kind == "constant"],
        trainable=[name for name, source in sources.items() if source.requires_grad],
    )
    outputs = [".".join(map(str, path)) for path in call.result.tensors]
    return convert(module, sources, outputs, model_name=type(call.model).__name__)
