"""Bytes that the parameters' state takes on one device: parameters, gradients, optimizer state.

All counts are of local elements: divide a sharded parameter first.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.dtypes import ITEM_SIZE, item_size

#: Tensors of the parameter's shape that an optimizer keeps per parameter.
OPTIMIZER_MOMENTS = {"none": 0, "sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2}

#: Dtypes too coarse to add small updates to: their optimizer keeps a float32 copy of the parameter.
MASTER_COPY_DTYPES = frozenset(dtype for dtype, size in ITEM_SIZE.items() if "float" in dtype and size < 4)


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a parameter's parts on one device."""

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
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
