"""In which dtypes a parameter is computed with, kept by the optimizer, and its gradients are added up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NARROW_BYTES = 2


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of one parameter: of its working copy, of what the optimizer updates, of its accumulated gradient."""

    compute: torch.dtype
    master: torch.dtype
    gradient: torch.dtype


@dataclass(frozen=True)
class Precision:
    """Mixed precision as a policy; names of dtypes, or None for the parameter's own (``gradient``: the master's).

    It concerns parameters of 16 bits: they compute in ``compute``, the optimizer updates a ``master`` copy, and
    their gradients are reduced and added up in ``gradient``. Parameters of float32 or wider keep their dtype in all
    three places, since the model asks for it.

    Raises:
        ValueError: for a name that is no floating-point dtype, and for gradients narrower than the computation.
    """

    compute: str | None = None
    master: str | None = "float32"
    gradient: str | None = "float32"

    def __post_init__(self) -> None:
        for field in ("compute", "master", "gradient"):
            name = getattr(self, field)
            dtype = getattr(torch, name, None) if name is not None else torch.float32
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize < _NARROW_BYTES:
                raise ValueError(
                    f"{field} precision {name!r} is not known: expected a floating-point dtype of 16 bits or more, "
                    "like 'float32' or 'bfloat16', or None"
                )

    def of(self, dtype: torch.dtype) -> Dtypes:
        """The dtypes of a parameter that the model holds in ``dtype``."""
        if not dtype.is_floating_point or dtype.itemsize > _NARROW_BYTES:
            return Dtypes(dtype, dtype, dtype)
        compute = getattr(torch, self.compute) if self.compute else dtype
        master = getattr(torch, self.master) if self.master else compute
        return Dtypes(compute, master, getattr(torch, self.gradient) if self.gradient else master)
