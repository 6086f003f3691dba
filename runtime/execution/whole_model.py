"""The original again, with the whole weights that ranks hold parts of."""

from __future__ import annotations

import torch
from torch import nn

from passes.capture.independent_copy import independent_copy
from passes.torch_compat.module_tables import buffers_of, parameters_of
from runtime.execution.step_state import StepState


def whole_model(lean: nn.Module, state: StepState) -> nn.Module:
    """A model of its own with whole weights on this rank, in evaluation mode; every rank must call this.

    Args:
        lean: the original without data, whose dtypes count.

    Raises:
        ValueError: if tensors have no data yet.
    """
    state.check()
    model, device = independent_copy(lean), state.places.layout.device
    with torch.no_grad():
        for info in state.everything():
            whole = state.whole(info.names[0]).to(device)
            for name in info.names:
                path, _, attribute = name.rpartition(".")
                module = model.get_submodule(path)
                if info.is_parameter:
                    dtype = parameters_of(module)[attribute].dtype  # type: ignore[union-attr]
                    whole = whole if isinstance(whole, nn.Parameter) else nn.Parameter(whole.to(dtype), False)
                    parameters_of(module)[attribute] = whole
                else:
                    buffers_of(module)[attribute] = whole
    return model.eval()
