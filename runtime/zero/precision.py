"""In which dtypes a parameter is computed with, kept by the optimizer, and its gradients are added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from cost_models.dtypes import ITEM_SIZE
from passes.plan import Plan
from passes.plan.step_plan import CALLERS

if TYPE_CHECKING:
    import torch

_NARROW_BYTES = 2


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of one parameter: of its working copy, of what the optimizer updates, of its accumulated gradient."""

    compute: torch.dtype
    master: torch.dtype
    gradient: torch.dtype


class DtypeNames(NamedTuple):
    """``Dtypes`` by name."""

    compute: str
    master: str
    gradient: str


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
            if name is not None and not (_is_floating(name) and ITEM_SIZE[name] >= _NARROW_BYTES):
                raise ValueError(
                    f"{field} precision {name!r} is not known: expected a floating-point dtype of 16 bits or more, "
                    "like 'float32' or 'bfloat16', or None"
                )

    def of(self, dtype: torch.dtype) -> Dtypes:
        """The dtypes of a parameter that the model holds in ``dtype``."""
        import torch

        names = self.of_name(str(dtype).removeprefix("torch."))
        return Dtypes(*(getattr(torch, name) for name in names))

    def of_name(self, dtype: str) -> DtypeNames:
        """The same by name."""
        if not _is_floating(dtype) or ITEM_SIZE[dtype] > _NARROW_BYTES:
            return DtypeNames(dtype, dtype, dtype)
        compute = self.compute or dtype
        master = self.master or compute
        return DtypeNames(compute, master, self.gradient or master)


def _is_floating(dtype: str) -> bool:
    return dtype in ITEM_SIZE and "float" in dtype


def precision_of(plan: Plan) -> Precision:
    """The optimizer keeps float32 masters of narrow weights unless there is none to keep them.

    With the caller's own optimizer everything is in the parameter's own dtype, as it would be on one device. An
    optimizer on the host has the masters with its state there.
    """
    if plan.step.optimizer == CALLERS:
        return Precision(master=None, gradient=None)
    master = "float32" if plan.step.optimizer != "none" and not plan.step.optimizer_on_host else None
    return Precision(master=master, gradient=plan.step.gradient_dtype or "float32")
