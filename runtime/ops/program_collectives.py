"""``spmd_types``' conversions for programs whose gradients are reduced in a dtype below float32."""

from __future__ import annotations

from typing import Any

import spmd_types as spmd
import torch

_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "convert", "reduce_scatter")


class _Reducing:
    """The conversions under their own names; ``reinterpret`` sends nothing."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        self.dtypes = dtypes
        self.reinterpret = spmd.reinterpret

    def __getattr__(self, name: str) -> Any:
        if name not in _COLLECTIVES:
            raise AttributeError(f"no conversion {name!r}: expected one of {', '.join(_COLLECTIVES)}, reinterpret")
        convert = getattr(spmd, name)

        def call(x: torch.Tensor, axis: Any, *, src: Any, dst: Any, **options: Any) -> torch.Tensor:
            # The gradient of what is R is partial: the way back reduces it.
            if dst is spmd.R and src is not spmd.R and x.dtype in self.dtypes:
                options["backward_options"] = {"op_dtype": x.dtype}
            return convert(x, axis, src=src, dst=dst, **options)

        setattr(self, name, call)
        return call


def reducing_in(*dtypes: torch.dtype) -> Any:
    """``spmd_types``' conversions with the dtype said in which gradients of ``dtypes`` are reduced: their own."""
    return _Reducing(dtypes)
