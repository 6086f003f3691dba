"""The one call of ``torch.export``, with what makes it quick and what makes it strict about gradients."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

import torch
from torch.export import Dim, ExportedProgram

from passes.capture.batched_calls import traced_batched_calls
from passes.capture.custom_functions import traced_custom_functions
from passes.capture.flat_call import FlatCall
from passes.capture.host_functions import traced_host_functions
from passes.capture.token_loops import traced_token_loops
from passes.capture.value_free_forms import normalised_and_averaged
from passes.torch_compat.tracing import (
    batch_norms_without_momentum,
    float32_precisions_kept,
    idle_conversions,
    lazy_code,
    quiet_export,
    shapes_noted_once,
    stack_traces_noted,
    states_of_lstm_layers,
    unknown_sizes_sought_if_any,
)


def export(
    call: FlatCall,
    tensors: tuple[torch.Tensor, ...],
    *,
    open_dims: Sequence[Collection[int]] | None = None,
    stack_traces: bool = False,
) -> ExportedProgram:
    """Trace ``call(*tensors)`` to ATen operators, composite ones kept, nothing functionalised.

    Args:
        open_dims: of each tensor, the dims whose sizes are left open where the model allows it; None: none.
        stack_traces: note on every node the lines it comes from; costs a tenth of the time.

    Raises:
        whatever the model or the tracer raises.
    """
    shapes = None
    if open_dims is not None:
        shapes = (tuple(dict.fromkeys(sorted(dims), Dim.AUTO) for dims in open_dims),)
    with (
        warnings.catch_warnings(),
        quiet_export(),
        lazy_code(),
        float32_precisions_kept(),
        traced_custom_functions(call),
        traced_batched_calls(),
        traced_host_functions(),
        traced_token_loops(call.model),
        batch_norms_without_momentum(normalised_and_averaged),
        idle_conversions(),
        unknown_sizes_sought_if_any(),
        states_of_lstm_layers(),
        shapes_noted_once(),
    ):
        warnings.simplefilter("ignore")
        with stack_traces_noted(stack_traces):
            return torch.export.export(call, tensors, {}, strict=False, dynamic_shapes=shapes)
