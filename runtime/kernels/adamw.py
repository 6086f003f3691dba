"""AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019) over many tensors in one launch.

Parameters in 16 bits have a float32 copy in the optimizer's state, which is what steps add up in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw

from runtime.kernels.adamw_kernels import adamw_launch, in_order_of, is_walkable
from runtime.kernels.dispatch import runs_triton

_NARROW = (torch.float16, torch.bfloat16)
#: Options of torch's AdamW that there is no kernel for.
_REFUSED = ("amsgrad", "maximize", "capturable", "differentiable")


class Moments(NamedTuple):
    """One parameter and what steps with it; all of one shape, ``step`` [] on the CPU, counted before the update."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    step: torch.Tensor
    master: torch.Tensor | None = None


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, in one launch for each group and dtype on a GPU.

    Its state is torch's (``step``, ``exp_avg``, ``exp_avg_sq``), so checkpoints of either load into the other.
    For a parameter in 16 bits all of it is float32, and ``master`` is the parameter in float32: made from it at
    the first step, and rounded to it at every step.

    Raises:
        ValueError: if an option is not supported, or as torch's.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        unsupported_options = {
            "amsgrad": amsgrad,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        super().__init__(params, lr, betas, eps, weight_decay, foreach=foreach, fused=fused)
        for group in self.param_groups:
            _check_options({**group, **{name: value for name, value in unsupported_options.items() if value}})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step of every parameter that has a gradient; the loss of ``closure`` if there is one.

        Raises:
            ValueError: if a gradient is sparse, or a group's options are not supported.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            _check_options(group)
            adamw_step_(
                [self._moments(param) for param in group["params"] if param.grad is not None],
                lr=float(group["lr"]),
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
            )
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of this optimizer or of torch's AdamW.

        Optimizers of torch round a parameter's state to its own dtype: what is float32 here is taken as it was saved.
        """
        super().load_state_dict(state_dict)
        places = itertools.chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        params = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        for place, param in zip(places, params):
            saved = state_dict["state"].get(place, {})
            if param.dtype in _NARROW:
                for name in saved.keys() & {"exp_avg", "exp_avg_sq", "master"}:
                    self.state[param][name] = saved[name].to(param.device, torch.float32, copy=True)

    def _moments(self, param: torch.Tensor) -> Moments:
        """A parameter with its state, which is made where there is none."""
        if param.grad.is_sparse:  # type: ignore[union-attr]
            raise ValueError("AdamW takes no sparse gradients: make them dense, or use torch.optim.SparseAdam")
        state = self.state[param]
        dtype = torch.float32 if param.dtype in _NARROW else param.dtype
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype)
        if param.dtype in _NARROW and "master" not in state:
            state["master"] = param.detach().to(dtype)
        # torch's fused AdamW counts on the device: to read it there would make the host wait at every step
        if state["step"].device.type != "cpu":
            state["step"] = state["step"].cpu()
        return Moments(param, param.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], state.get("master"))  # type: ignore[arg-type]


def adamw_step_(
    moments: Sequence[Moments], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """Step parameters, their moments, counts and float32 copies in place; gradients may have any floating dtype.

    Args:
        moments: those of any devices and dtypes; those of one device and dtype go in one launch.
    """
    groups: dict[Any, list[Moments]] = {}
    for entry in moments:
        if entry.param.numel():
            key = (is_walkable(entry), entry.param.device, entry.param.dtype, entry.grad.dtype)
            groups.setdefault(key, []).append(entry)
        else:
            entry.step.add_(1)
    options: dict[str, Any] = {"betas": betas, "lr": lr, "eps": eps, "weight_decay": weight_decay}
    for (walkable, *_), alike in groups.items():
        if walkable and runs_triton(alike[0].param):
            adamw_launch(alike, **options)
        else:
            _aten(alike, walkable=walkable, **options)


def _aten(
    moments: Sequence[Moments],
    *,
    walkable: bool,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """By torch's functional, on the float32 copies where there are some; its fused one walks through memory too."""
    fused = walkable and moments[0].param.device.type == "cpu"
    stepped = [entry.param if entry.master is None else entry.master for entry in moments]
    adamw(
        stepped,
        [in_order_of(param, entry.grad).to(param.dtype) for entry, param in zip(moments, stepped)],
        [entry.exp_avg for entry in moments],
        [entry.exp_avg_sq for entry in moments],
        [],
        [entry.step for entry in moments],
        fused=fused,
        foreach=not fused,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    for entry in moments:
        if entry.master is not None:
            entry.param.copy_(entry.master)


def _check_options(group: dict[str, Any]) -> None:
    refused = [name for name in _REFUSED if group.get(name)]
    if refused:
        raise ValueError(f"AdamW was asked for {', '.join(refused)}: not supported here, use torch.optim.AdamW")
