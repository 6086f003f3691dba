"""From an ``nn.Module`` and an example call to a ``Graph``."""

from __future__ import annotations

from passes.capture.capture import capture, trace_shapes
from passes.capture.float64 import keep_float64
from passes.capture.interpret import interpret
from passes.capture.nested_values import TrainingOutput
from passes.capture.refusals import refuse_inputs, refuse_unsupported
from passes.ir.errors import CaptureError

__all__ = [
    "CaptureError",
    "TrainingOutput",
    "capture",
    "interpret",
    "keep_float64",
    "refuse_inputs",
    "refuse_unsupported",
    "trace_shapes",
]
