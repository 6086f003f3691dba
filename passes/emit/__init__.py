"""The emitter: from a sharded graph to a program, Python source that a person can read."""

from __future__ import annotations

from passes.emit.emitted_program import InputSpec, OutputSpec, Program, StateSpec
from passes.emit.render import Expression
from passes.emit.shared_gathers import with_shared_gathers
from passes.emit.source import render
from passes.ir.types import local_shape
from passes.shard import Local, ShardedGraph

__all__ = ["InputSpec", "OutputSpec", "Program", "StateSpec", "emit"]


def emit(sharded: ShardedGraph, *, expression: Expression | None = None) -> Program:
    """Write the program of a sharded graph; ``expression`` writes one operator (default: the library's)."""
    sharded = with_shared_gathers(sharded)
    graph = sharded.graph
    source, chains = render(sharded, expression or _known_expressions())
    return Program(
        source=source,
        model_name=graph.model_name,
        mesh=sharded.mesh,
        inputs=_inputs(sharded),
        states=_states(sharded),
        outputs=tuple(_output(path, local) for path, local in zip(graph.outputs, sharded.main.results)),
        constants=tuple(_output(local.value.name, local) for local in sharded.constants.results),
        loss=graph.loss,
        training=graph.training,
        unflatten=graph.unflatten,
        chains=chains,
    )


def _known_expressions() -> Expression:
    from passes.emit.expressions import expression

    return expression


def _inputs(sharded: ShardedGraph) -> tuple[InputSpec, ...]:
    return tuple(
        InputSpec(
            name=value.name,
            path=path,
            shape=value.shape,
            local_shape=local.shape,
            dtype=value.dtype,
            placement=local.placement,
            requires_grad=value.requires_grad,
        )
        for value, path, local in zip(sharded.graph.inputs, sharded.graph.input_paths, sharded.main.arguments)
    )


def _states(sharded: ShardedGraph) -> tuple[StateSpec, ...]:
    specs = []
    for state in sharded.graph.states:
        placement = sharded.state_placements[state.value.name]
        specs.append(
            StateSpec(
                path=state.path,
                aliases=tuple(state.aliases),
                shape=state.value.shape,
                local_shape=local_shape(state.value.shape, placement, sharded.mesh),
                dtype=state.value.dtype,
                placement=placement,
                kind=state.value.kind,
                trainable=state.value.requires_grad,
                persistent=state.persistent,
                data=state.data,
            )
        )
    return tuple(specs)


def _output(path: str, local: Local) -> OutputSpec:
    value = local.value
    return OutputSpec(path, value.shape, local.shape, value.dtype, local.placement, value.requires_grad)
