"""Bytes that the parameters' state takes on one device: parameters, gradients, optimizer state; and allocator slack.

All counts are of local elements: divide a sharded parameter first. Bytes an element, AdamW:

    parameters         gradients          optimizer
    float32 4          float32 4          two moments 8
    bfloat16 2         bfloat16 2         float32 master copy 4, two moments 8
    bfloat16 2         float32 4          float32 master copy 4, two moments 8      (``gradient_dtype="float32"``)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from cost_models.dtypes import ITEM_SIZE, item_size

#: Tensors of the parameter's shape that an optimizer keeps per parameter.
OPTIMIZER_MOMENTS = {"none": 0, "sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}

#: Dtypes too coarse to add small updates to: their optimizer keeps a float32 copy of the parameter.
MASTER_COPY_DTYPES = frozenset(dtype for dtype, size in ITEM_SIZE.items() if "float" in dtype and size < 4)


#: Share of a device's memory that plans leave to what they do not count: 3% is what the caching allocator loses to
#: fragmentation (``reserved_bytes``), the rest is for buffers of communicators (NCCL holds some hundred MiB for each),
#: workspaces, and pools of CUDA graphs.
HEADROOM = 0.06


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a parameter's parts on one device, and of what the device has in its host's memory."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer


def parameter_bytes(num_elements: int, dtype: str) -> int:
    """Bytes of a parameter (or any tensor) of ``num_elements`` elements on the device.

    Raises:
        ValueError: if the dtype is not known.
    """
    return num_elements * item_size(dtype)


def gradient_bytes(num_elements: int, dtype: str) -> int:
    """Bytes of a parameter's gradient: it has the parameter's dtype."""
    return num_elements * item_size(dtype)


def optimizer_bytes(num_elements: int, dtype: str, *, optimizer: str = "adamw") -> int:
    """Bytes of a parameter's optimizer state.

    Moments are float32 (float64 for float64 parameters); parameters of 16 bits or fewer also have a float32 master
    copy. AdamW: 8 bytes an element for float32, 12 for bfloat16 and float16, 16 for float64.

    Raises:
        ValueError: if the dtype or the optimizer is not known.
    """
    if optimizer not in OPTIMIZER_MOMENTS:
        raise ValueError(f"unknown optimizer {optimizer!r}: expected one of {', '.join(OPTIMIZER_MOMENTS)}")
    if optimizer == "none":
        return 0
    moment = max(4, item_size(dtype))
    master = 4 if dtype in MASTER_COPY_DTYPES else 0
    return num_elements * (OPTIMIZER_MOMENTS[optimizer] * moment + master)


def state_bytes(num_elements: int, dtype: str, *, trainable: bool = True, optimizer: str = "adamw") -> StateBytes:
    """All parts of one parameter; a frozen one (and a buffer, and any in inference) has neither gradient nor state.

    Raises:
        ValueError: if the dtype or the optimizer is not known.
    """
    if not trainable:
        return StateBytes(parameter_bytes(num_elements, dtype), 0, 0)
    return StateBytes(
        parameter_bytes(num_elements, dtype),
        gradient_bytes(num_elements, dtype),
        optimizer_bytes(num_elements, dtype, optimizer=optimizer),
    )


@functools.lru_cache(maxsize=8192)
def zero_state_bytes(
    num_elements: int,
    dtype: str,
    *,
    stage: int,
    group_size: int,
    gradient_dtype: str | None = None,
    optimizer: str = "adamw",
    offloaded: bool = False,
) -> StateBytes:
    """All parts of a trainable parameter on one of ``group_size`` devices that share its state (ZeRO).

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (SC 2020), section 5:
    stage 0 divides nothing, 1 the optimizer state, 2 also the gradients, 3 also the parameters. A part that does not
    divide is padded: every device holds ``ceil(num_elements / group_size)``. In stage 3 a parameter of 16 bits or fewer
    is stored as its float32 master copy alone; its narrow copy exists only while it is gathered.

    Args:
        num_elements: of the parameter as it would be on the device without ZeRO (after tensor parallelism).
        dtype: that the parameter computes in.
        gradient_dtype: of the gradients that are kept from one micro-batch to the next; None for that of the stored
            parameter.
        offloaded: the optimizer's state, with the float32 master copy of a narrow parameter, is in the host's memory.

    Raises:
        ValueError: for an unknown stage, dtype or optimizer, or a group of no device.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"unknown ZeRO stage {stage!r}: expected 0, 1, 2 or 3")
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    shard = math.ceil(num_elements / group_size)
    parameters, gradients, states = (shard if stage >= least else num_elements for least in (3, 2, 1))
    optimizer_state = optimizer_bytes(states, dtype, optimizer=optimizer)
    stored = dtype
    if stage == 3 and dtype in MASTER_COPY_DTYPES and optimizer != "none" and not offloaded:
        stored = "float32"
        optimizer_state -= parameter_bytes(shard, stored)
    on_device, on_host = (0, optimizer_state) if offloaded else (optimizer_state, 0)
    return StateBytes(
        parameter_bytes(parameters, stored), gradient_bytes(gradients, gradient_dtype or stored), on_device, on_host
    )


def reserved_bytes(peak_bytes: float) -> int:
    """Memory that a caching allocator reserves in a run whose tensors take ``peak_bytes`` at their peak.

    Segments of PyTorch's for CUDA are multiples of 2 MiB, and well-behaved training runs reserve a few percent more
    than they allocate.
    """
    return math.ceil(peak_bytes * 1.03 / (2 << 20)) * (2 << 20)
