"""How a model is trained, as far as memory and time depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from cost_models.dtypes import item_size
from cost_models.memory import OPTIMIZER_MOMENTS
from passes.plan.step_plan import CHUNKED_LOSS

#: ZeRO stages (Rajbhandari et al. 2020): what is divided over the devices that hold the same parameters.
ZERO_STAGES = (0, 1, 2, 3)
#: Dtypes that gradients can be summed in: torch adds nothing in 8 bits, and integers are none.
GRADIENT_DTYPES = ("float64", "float32", "bfloat16", "float16")
#: Recompute policies on the device in the order of what they keep; the last is of units that compute the loss alone.
POLICIES = ("none", "regather", "selective", "full", CHUNKED_LOSS)


@dataclass(frozen=True)
class TrainingOptions:
    """How parameters are trained: the optimizer, and the dtype that gradients are summed and reduced in.

    ``gradient_dtype`` None: float32 for parameters of 16 bits, else the parameter's own. ``offload``: whether the
    optimizer runs on the host, with its state in the host's memory.
    """

    optimizer: str = "adamw"
    gradient_dtype: str | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for an optimizer or dtype that nothing is known of."""
        if self.optimizer not in OPTIMIZER_MOMENTS:
            raise ValueError(f"unknown optimizer {self.optimizer!r}: expected one of {', '.join(OPTIMIZER_MOMENTS)}")
        if self.gradient_dtype not in (None, *GRADIENT_DTYPES):
            raise ValueError(
                f"unknown gradient_dtype {self.gradient_dtype!r}: gradients are summed in {', '.join(GRADIENT_DTYPES)}"
            )

    def gradients(self, dtype: str) -> str:
        if self.gradient_dtype is not None:
            return self.gradient_dtype
        return "float32" if item_size(dtype) < 4 else dtype
