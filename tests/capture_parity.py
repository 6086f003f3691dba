"""Run a captured graph and the model it came from side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from passes.capture import TrainingOutput, capture, interpret, keep_float64
from passes.capture.nested_values import flatten
from passes.ir.graph import Graph, State


def assert_parity(
    model: nn.Module,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    tolerance: float = 1e-11,
) -> Graph:
    """Loss, every gradient and every buffer after the step are the model's own, relative to the largest entry."""
    kwargs = dict(kwargs or {})
    reference = copy.deepcopy(model)
    with keep_float64():
        graph = capture(model, args=args, kwargs=kwargs, loss_fn=loss_fn)
        loss = graph_loss(graph, model, args, kwargs)
        expected = _model_loss(reference, args, kwargs, loss_fn, graph)
    assert torch.allclose(loss, expected, rtol=tolerance, atol=tolerance)
    loss.backward()
    expected.backward()
    tensors = zip(model.named_parameters(), reference.named_parameters(), strict=True)
    for (name, parameter), (_, other) in tensors:
        assert (parameter.grad is None) == (other.grad is None), f"{name}: only one of the two has a gradient"
        if other.grad is not None:
            error = (parameter.grad - other.grad).abs().max() / other.grad.abs().max().clamp(min=1e-12)
            assert error < tolerance or other.grad.abs().max() < 1e-12, f"{name}: relative error {error:.1e}"
    for (name, buffer), (_, other) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.allclose(buffer, other, rtol=1e-9), f"buffer {name} differs"
    return graph


def graph_loss(graph: Graph, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    _, tensors = flatten((args, kwargs))
    by_path = {path[1:]: tensor for path, tensor in tensors.items()}
    inputs = {value.name: by_path[path] for value, path in zip(graph.inputs, graph.input_paths)}
    named: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    named.update(model.named_buffers(remove_duplicate=False))

    def tensor_of(state: State) -> torch.Tensor:
        return state.data if state.value.kind == "constant" else named[state.path]

    assert graph.loss is not None
    for state in graph.states:
        tensor = tensor_of(state)
        assert tuple(tensor.shape) == state.value.shape and str(tensor.dtype) == f"torch.{state.value.dtype}"
    return interpret(graph, inputs, tensor_of)[graph.loss]


def _model_loss(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: Callable[[Any, Any], Any] | None,
    graph: Graph,
) -> torch.Tensor:
    if loss_fn is not None:
        own = {name: value for name, value in kwargs.items() if name in model.forward.__code__.co_varnames}
        count = model.forward.__code__.co_argcount - 1
        outputs = TrainingOutput(loss_fn(model(*args[:count], **own), args or kwargs), None)
    else:
        outputs = model(*args, **kwargs)
    _, tensors = flatten(outputs)
    return next(tensor for path, tensor in tensors.items() if ".".join(map(str, path)) == graph.loss)
