"""Capture a model: ``torch.export`` on stand-in tensors, then the canonical graph."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from passes.canonicalise import canonicalise, inline_regions
from passes.capture.convert import Source, convert
from passes.capture.decisions import Decisions
from passes.capture.draws import number_draws
from passes.capture.eager_path import compiled_or_eager
from passes.capture.early_checks import with_early_checks
from passes.capture.export import export
from passes.capture.flat_call import FlatCall, LossFunction, loss_path
from passes.capture.forward_hooks import announced_hooks
from passes.capture.layer_drops import advice_on_layer_drops
from passes.capture.literals import merge_equal_literals
from passes.capture.model_copy import copy_of
from passes.capture.naming import input_name
from passes.capture.nested_values import Path, Structure, rebuild
from passes.capture.next_call import check_next_call
from passes.capture.one_process import as_one_process
from passes.capture.open_shapes import OpenDims, StaticProgram, with_sizes
from passes.capture.operator_count import CaptureProgress, OperatorCount, TooManyOperators
from passes.capture.ordered_sets import sets_in_order
from passes.capture.other_branches import with_other_branches
from passes.capture.picked_rows import (
    OperatorCall,
    PickedRows,
    check_picked_rows,
    operator_calls,
    refuse_picked_rows,
    with_most_calls,
)
from passes.capture.refusals import first_read, names_of_paths, refuse_inputs, refuse_unsupported
from passes.capture.repeats import RepeatedEntries, find_repeats
from passes.capture.rows_left_out import placeholders_without_rows
from passes.capture.saved_values import lifted_values, reconnect_saved_values
from passes.capture.shorten import NotRepeated, shortened
from passes.capture.stand_in import StandIns, trace_device
from passes.capture.tracing_errors import describe_failure, explain, is_raised_by_the_model
from passes.capture.unfold import unfold
from passes.capture.value_reads import ValueReads, drop_answered
from passes.ir.errors import CaptureError, MissingValues
from passes.ir.graph import Graph
from passes.ir.value_guards import ValueGuards
from passes.torch_compat.host_operators import CTC_LOSSES
from passes.torch_compat.quick_fakes import quick_fakes
from passes.torch_compat.quick_pytrees import quick_pytrees
from passes.torch_compat.tensor_fields import FakeTensor
from passes.torch_compat.tracer_questions import answered_reads
from passes.torch_compat.tracing import unvalidated_distributions


def capture(
    model: nn.Module,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    training: bool | None = None,
    gradients: bool = False,
    copy_repeats: bool = False,
    values: Mapping[Path, torch.Tensor] | None = None,
    buffer_values: Mapping[str, torch.Tensor] | None = None,
    any_number_at: Collection[str] = (),
    progress: CaptureProgress | None = None,
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
        gradients: keep them in evaluation mode without a loss, too.
        copy_repeats: trace only a few of the layers that repeat and copy the rest, which gives the same graph in a
            time that hardly depends on how many they are. Models for which that cannot be told are traced in full.
        values: the call's tensors by path, where those in ``args`` and ``kwargs`` have none.
        buffer_values: the model's buffers by name, likewise.
        any_number_at: places of readings (``guards.counts``) that the graph is to do without: it computes all rows that
            a mask may pick there, and holds for every number of them.
        progress: told how many operators have been captured, now and then.

    Raises:
        CaptureError: if the model cannot be traced, or not with ``any_number_at``; it names the module and the source
            line. So if it calls more operators than a graph may have, as loops over tokens in Python do.
        MissingValues: if it asks for the value of an input that has none.
        Exception: what the model itself raises because of values that it asked for.
    """
    refuse_unsupported(model)
    options: dict[str, Any] = {
        "args": args,
        "kwargs": kwargs,
        "loss_fn": loss_fn,
        "training": training,
        "gradients": gradients,
        "values": values,
        "buffer_values": buffer_values,
        "any_number_at": frozenset(any_number_at),
        "progress": progress,
    }
    with _one_at_a_time, quick_pytrees(), quick_fakes():
        graph = _capture_shortened(model, options) if copy_repeats else None
        return number_draws(with_early_checks(_capture_whole(model, **options)) if graph is None else graph)


#: Tracing replaces functions of torch for its time.
_one_at_a_time = threading.RLock()


def _capture_whole(model: nn.Module, **options: Any) -> Graph:
    if options.get("buffer_values") is None:
        options["buffer_values"] = dict(model.named_buffers())
    graph, call = _traced(model, **options)
    if call.result.changes:
        check_next_call(model, graph, call, functools.partial(_traced, **options))
    return with_other_branches(graph, call, lambda flipped: _traced(model, **options, flipped=flipped))


def _traced(model: nn.Module, **options: Any) -> tuple[Graph, FlatCall]:
    """The graph, and the call on a copy of the model, in which the entries of ``repeats`` are skipped."""
    trace = _trace(model, **options)
    picked = trace.call.reads.picked
    calls = trace.calls() if picked.counts else []
    graph = trace.graph()
    if picked.counts:
        try:
            graph = check_picked_rows(calls, graph, picked, lambda other: _trace(model, **options, picked=other))
        except CaptureError as error:
            text = str(error).removeprefix(f"cannot capture {type(model).__name__}: ")
            raise CaptureError(f"cannot capture {type(model).__name__}: {text}") from error
    return graph, trace.call


def _trace(
    model: nn.Module, *, picked: PickedRows | None = None, any_number_at: frozenset[str] = frozenset(), **options: Any
) -> _Trace:
    """The exported program of a call on a copy of the model, on the path that it takes when compiled or in eager."""
    if picked is None and any_number_at:
        picked = with_most_calls(any_number_at, lambda one: _trace(model, **options, picked=one).call.reads.picked)
    picked = picked or PickedRows()
    return compiled_or_eager(lambda rows: _trace_path(model, **options, picked=rows), picked)


def _trace_path(
    model: nn.Module,
    *,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    loss_fn: LossFunction | None,
    training: bool | None,
    picked: PickedRows,
    gradients: bool = False,
    values: Mapping[Path, torch.Tensor] | None = None,
    buffer_values: Mapping[str, torch.Tensor] | None = None,
    repeats: tuple[RepeatedEntries, ...] = (),
    open_dims: OpenDims | None = None,
    placed: Sequence[torch.Tensor] = (),
    returns_placed: bool = False,
    flipped: Collection[int] = (),
    progress: CaptureProgress | None = None,
) -> _Trace:
    stand_ins = StandIns(trace_device(), with_symbols=open_dims is not None)
    example = FlatCall(model, args, dict(kwargs or {}), loss_fn)
    refuse_inputs(example.tensors)
    call = copy_of(example, stand_ins.get, placed)
    call.placed = {id(stand_ins.get(tensor)): place for place, tensor in enumerate(placed)}
    call.returns_placed = returns_placed
    call.device = stand_ins.device
    copied = call.model
    if training is not None and training != model.training:
        copied.train(training)
    paths = {id(module): name for name, module in copied.named_modules()}
    call.operators = OperatorCount(paths, progress)
    buffers = dict(model.named_buffers()) if buffer_values is None else buffer_values
    call.reads = ValueReads(
        call.tensors if values is None else values,
        buffers,
        paths,
        whole=not repeats,
        picked=picked,
        decisions=Decisions(flipped),
        held=call.held,
    )
    tensors = tuple(stand_ins.fresh(tensor) for tensor in call.tensors.values())
    with (
        shortened(copied, repeats),
        announced_hooks(copied),
        unvalidated_distributions(),
        as_one_process(),
        sets_in_order(copied),
    ):
        graph_training = copied.training
        states = _state_names(call)
        program = _export(call, tensors, paths, open_dims)
    refuse_picked_rows(picked, repeats, is_open=open_dims is not None)
    loss = None if training is False else loss_path(call.result.tensors)
    keeps_gradients = training is not False and (loss is not None or graph_training or gradients)
    return _Trace(call, program, states, loss, graph_training, keeps_gradients, repeats)


@dataclass(frozen=True)
class _Trace:
    """A call that was traced.

    Attributes:
        states: all paths of every parameter and buffer.
        loss: the output that is the loss.
        training: the mode it was traced in.
        gradients: whether its graph has any.
    """

    call: FlatCall
    program: ExportedProgram
    states: Mapping[str, tuple[str, ...]]
    loss: str | None
    training: bool
    gradients: bool
    repeats: tuple[RepeatedEntries, ...]

    def calls(self) -> list[OperatorCall]:
        """The operators that the model called, while its program is not changed."""
        return operator_calls(self.program.graph_module, self.call.result.structure)

    def read_without_rows(self) -> set[str]:
        """Paths of the parameters and buffers that are used on tensors without entries."""
        names = placeholders_without_rows(self.program.graph_module)
        targets = [str(spec.target) for spec in self.program.graph_signature.input_specs if spec.arg.name in names]
        return {self.states.get(target, (target,))[0].removeprefix("model.") for target in targets}

    def graph(self, made_of_program: StaticProgram | None = None) -> Graph:
        """The graph of the program, or of what was made of it; it is changed.

        Raises:
            CaptureError: if there is none.
        """
        call = self.call
        program = self.program if made_of_program is None else made_of_program
        merge_equal_literals(program)
        sources = _sources(program, call, self.states, gradients=self.gradients)
        try:
            reconnect_saved_values(program, call.placed)
            graph = _to_graph(program, sources, call)
        except CaptureError as error:
            raise CaptureError(f"cannot capture {type(call.model).__name__}: {error}") from error
        names = names_of_paths(call.result.tensors, "outputs")
        return graph.replace(
            loss=self.loss,
            training=self.training,
            checkpointed=call.result.checkpoints,
            guards=_guards(graph, call),
            unflatten=functools.partial(_returned, call.result.structure, names),
        )

    def graph_of_shapes(self, shapes: Mapping[Path, tuple[int, ...]]) -> Graph:
        """The graph for other shapes of the inputs, of a trace with open sizes.

        Raises:
            ValueError: if the trace does not hold for them.
            CaptureError: if it has no such graph.
            NotRepeated: as ``unfold``.
        """
        specs = self.program.graph_signature.input_specs
        names = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
        if lifted_values(self.program):
            raise CaptureError("gradients inside of forward are traced for each shape")
        by_name = {name: shapes[path] for name, path in zip(names, self.call.tensors, strict=True)}
        graph = self.graph(with_sizes(self.program, by_name))
        return number_draws(unfold(graph, self.repeats) if self.repeats else graph)


def trace_shapes(model: nn.Module, open_dims: OpenDims, **options: Any) -> Callable[[Mapping[Path, Any]], Graph]:
    """Trace a call with the sizes of some dims left open.

    Args:
        options: of ``capture``.

    Returns:
        what gives the graph for shapes of the inputs by path; it raises ValueError for shapes that need another trace.

    Raises:
        CaptureError: if no trace serves several shapes: forward reads values or changes attributes, or the model cannot
            be captured.
    """
    with _one_at_a_time, quick_pytrees(), quick_fakes():
        buffers = dict(model.named_buffers())
        options = {"training": None, **options, "buffer_values": options.get("buffer_values") or buffers}
        repeats = find_repeats(model) if options.pop("copy_repeats", False) else ()
        own: tuple[Mapping[Path, Any], Graph] | None = None
        try:
            trace = _trace(model, **options, repeats=repeats, open_dims=open_dims)
            inline_regions(trace.program.graph_module)
            own_shapes = {path: tuple(tensor.shape) for path, tensor in trace.call.tensors.items()}
            own = own_shapes, trace.graph_of_shapes(own_shapes)
        except NotRepeated:
            trace = _trace(model, **options, open_dims=open_dims)
            inline_regions(trace.program.graph_module)
    if trace.call.result.changes or trace.call.reads.guards or trace.call.reads.decisions.questions:
        raise CaptureError("forward changes attributes, or reads values, which is traced for each shape")

    def graph(shapes: Mapping[Path, Any]) -> Graph:
        if own is not None and shapes == own[0]:
            return own[1]
        with _one_at_a_time, quick_pytrees(), quick_fakes():
            return trace.graph_of_shapes(shapes)

    return graph


def _guards(graph: Graph, call: FlatCall) -> ValueGuards:
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
        return None if call.result.changes else unfold(graph, repeats)
    except TooManyOperators:
        raise
    except (CaptureError, NotRepeated):
        return None


def _state_names(call: FlatCall) -> dict[str, tuple[str, ...]]:
    """Path of every parameter and buffer → all paths of the same tensor, the first one first."""
    paths: dict[int, list[str]] = {}
    everything = (*call.named_parameters(remove_duplicate=False), *call.named_buffers(remove_duplicate=False))
    for path, tensor in everything:
        paths.setdefault(id(tensor), []).append(path)
    return {path: tuple(group) for group in paths.values() for path in group}


def _export(
    call: FlatCall, tensors: tuple[torch.Tensor, ...], paths: Mapping[int, str], open_dims: OpenDims | None
) -> ExportedProgram:
    name = type(call.model).__name__
    dims = None if open_dims is None else [open_dims.get(path, ()) for path in call.tensors]
    try:
        with torch.enable_grad(), answered_reads(call.reads.answer):
            program = export(call, tensors, open_dims=dims)
            reads = first_read(program) if dims is None else None
            if reads is not None:
                reads = first_read(export(call, tensors, stack_traces=True)) or reads
    except TooManyOperators as error:
        raise TooManyOperators(f"cannot capture {name}: {error}") from None
    except Exception as error:
        is_of_values = bool(call.reads.guards) and not call.reads.picked.any_number_at
        if isinstance(error, MissingValues) or (is_of_values and is_raised_by_the_model(error)):
            raise
        reason = call.reads.picked.before(str(error) if isinstance(error, CaptureError) else explain(error))
        reason += advice_on_layer_drops(call.model) if "random numbers" in reason else ""
        raise CaptureError(f"cannot capture {name}: in {describe_failure(error, paths)}: {reason}") from error
    if reads is not None:
        raise CaptureError(f"cannot capture {name}: {reads}")
    drop_answered(program)
    return program


def _sources(
    program: ExportedProgram | StaticProgram,
    call: FlatCall,
    states: Mapping[str, tuple[str, ...]],
    *,
    gradients: bool,
) -> dict[str, Source]:
    """What every placeholder of the exported graph is. Placeholders of tied weights become one."""
    placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    first: dict[str, fx.Node] = {}
    names = list(call.parameters_of_forward)
    inputs = iter(call.tensors.items())
    sources: dict[str, Source] = {}
    call.result.constants = {}
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            path, _ = next(inputs)
            tensor = node.meta["val"]
            sources[node.name] = Source(
                "input", input_name(path, names), path, requires_grad=gradients and tensor.requires_grad
            )
            continue
        assert spec.target is not None
        group = states.get(spec.target, (spec.target,))
        node.replace_all_uses_with(first.setdefault(group[0], node))
        relative_paths = tuple(path.removeprefix("model.") for path in group)
        kind = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}.get(spec.kind, "constant")
        data = call.held.of(program.constants.get(spec.target)) if kind == "constant" else None
        call.result.constants[relative_paths[0]] = data
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


def _to_graph(program: ExportedProgram | StaticProgram, sources: dict[str, Source], call: FlatCall) -> Graph:
    module = program.graph_module
    of_layers = canonicalise(
        module,
        buffers=[name for name, source in sources.items() if source.kind == "buffer"],
        literals=[name for name, source in sources.items() if source.kind == "constant"],
        trainable=[name for name, source in sources.items() if source.requires_grad],
        picked=call.reads.picked.counts,
        left_out=call.reads.picked.left_out_counts,
        mean_of_none=call.reads.picked.mean_of_none,
    )
    call.reads.picked.layers |= {sources[name].state for name in of_layers if sources[name].requires_grad}
    outputs = names_of_paths(call.result.tensors, "outputs").values()
    return convert(module, sources, list(outputs), model_name=type(call.model).__name__)
