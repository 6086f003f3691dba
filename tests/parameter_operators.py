"""What scripts do with parameters by themselves, for ``tests.torch_tools_worker``: each gives what one device gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

#: Calls on a weight of several rows and columns, and on the same weight whole.
READ: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "allclose": lambda weight, whole: torch.allclose(weight, whole),
    "allclose, plain first": lambda weight, whole: torch.allclose(whole, weight + 1),
    "equal": lambda weight, whole: torch.equal(weight, whole),
    "rows": lambda weight, whole: list(weight),
    "mask": lambda weight, whole: weight[weight > 0],
    "nonzero": lambda weight, whole: (weight > 0).nonzero(),
    "unique": lambda weight, whole: weight.unique(),
    "renorm": lambda weight, whole: weight.renorm(2, 0, 0.1),
    "cdist": lambda weight, whole: torch.cdist(weight, weight),
    "largest": lambda weight, whole: weight.abs().max(),
    "where each column is smallest": lambda weight, whole: weight.argmin(0),
    "largest norm of a list": lambda weight, whole: torch._foreach_norm([weight, weight], math.inf),
    "largest of a list": lambda weight, whole: torch._foreach_max([weight, weight]),
    "tolist": lambda weight, whole: weight.tolist(),
    "numpy": lambda weight, whole: torch.from_numpy(numpy.array(weight)),
    "printed": lambda weight, whole: float(f"{weight.sum():.6f}"),
    "sum of the columns' norms": lambda weight, whole: weight.norm(dim=0).sum(),
    "norm of norms of another order": lambda weight, whole: weight.norm(dim=1).norm(1),
    "whether any is large": lambda weight, whole: 2.0 * (weight > 0.1).any(),
    "beside a plain number": lambda weight, whole: weight.sum() + weight.norm() + torch.ones((), dtype=weight.dtype),
    "beside a number without dims, then a number": lambda weight, whole: (
        weight.sum() + weight.new_ones(()),
        weight.sum() + 1.0,
        weight.sum() + weight.new_ones(()),
    ),
}

#: The same, of numbers side by side, which may be of several parameters: refused with a pipeline.
READ_SIDE_BY_SIDE: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "sum of two norms": lambda weight, whole: torch.stack([weight.norm(), weight[:, 1].norm()]).sum(),
    "larger count": lambda weight, whole: torch.stack([(weight > 0).sum(), (weight > 0).sum() + 1]).max(),
    "product": lambda weight, whole: torch.stack([weight.prod(), weight.prod() + 1]),
}


def _half_of_a_row(weight: Any) -> None:
    weight[2][1:3].mul_(2.0)


def _by_mask(weight: Any) -> None:
    weight[weight > 0] = 0.5


def _row(weight: Any) -> None:
    weight[1] = torch.ones(weight.shape[1], dtype=weight.dtype)


def _sum(weight: Any) -> None:
    total = weight.sum(0)
    total[1].zero_()
    weight.add_(total)


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "zero row": lambda weight: weight[2].zero_(),
    "zero column": lambda weight: weight[:, 2].zero_(),
    "row": _row,
    "half of a row": _half_of_a_row,
    "mask": _by_mask,
    "column of the transposed": lambda weight: weight.t()[1:4].fill_(2.0),
    "part of another shape": lambda weight: weight.view(-1)[5:9].sub_(1.0),
    "chunk": lambda weight: weight.chunk(3)[1].fill_(3.0),
    "identity": lambda weight: nn.init.eye_(weight),
    "sum in the place of it": lambda weight: torch.add(weight.clone(), 1.0, out=weight),
    "turned in place": lambda weight: weight.clone().t_()[1].fill_(2.0),
    "data in the place of it": lambda weight: setattr(weight, "data", weight * 2.0),
    "diagonal": lambda weight: weight.fill_diagonal_(0.5),
    "sum": _sum,
}


DRAWN: dict[str, Callable[[Any], Any]] = {
    "orthogonal": lambda weight: weight.dim() == 2 and nn.init.orthogonal_(weight),
    "normal": lambda weight: nn.init.normal_(weight),
    "uniform": lambda weight: weight.detach().uniform_(-1, 1),
    "noise": lambda weight: weight.add_(torch.randn_like(weight)),
    "mask": lambda weight: weight.mul_(torch.bernoulli(torch.full_like(weight, 0.5))),
    "normal around it": lambda weight: weight.copy_(torch.normal(weight, 0.1)),
}


def _cut_alike_once(parallel: nn.Module) -> dict[str, nn.Parameter]:
    """Of parameters with the same placements, dimensions and kind of first size, even or odd, the first."""
    first: dict[object, str] = {}
    for name, one in parallel.named_parameters():
        placements = one.placements if isinstance(one, DTensor) else None
        first.setdefault((placements, one.dim(), one.shape[0] % 2), name)
    return {name: parallel.get_parameter(name) for name in first.values()}


def wrong_draws(parallel: nn.Module, single: nn.Module) -> list[str]:
    """Names of draws that are not those of one device; each rank has a seed of its own, the first one that device's."""
    expected = dict(single.named_parameters())
    wrong = []
    for name, parameter in _cut_alike_once(parallel).items():
        for call, write in DRAWN.items():
            mine, copied = parameter.detach().clone(), expected[name].detach().clone()
            torch.manual_seed(dist.get_rank())
            write(mine)
            torch.manual_seed(0)
            write(copied)
            if not _same(mine, copied):
                wrong.append(f"{call} of {name}")
    return wrong


def losses_with_averages(module: nn.Module, loss: Callable[[nn.Module], float]) -> list[float]:
    """Losses under weights that are put in the place of a model's by ``data``, and under its own that are put back."""
    averages = [parameter.data * 0.5 for parameter in module.parameters()]
    losses = [loss(module)]
    for _ in range(2):
        own = [parameter.data for parameter in module.parameters()]
        for parameter, average in zip(module.parameters(), averages, strict=True):
            parameter.data = average
        losses.append(loss(module))
        for parameter, before in zip(module.parameters(), own, strict=True):
            parameter.data = before
        losses.append(loss(module))
    return losses


def wrong_operators(parallel: nn.Module, single: nn.Module) -> list[str]:
    """Names of calls that give another result on a parallel module's weights than on those of one device."""
    expected = dict(single.named_parameters())
    wrong = []
    for name, parameter in _cut_alike_once(parallel).items():
        if parameter.dim() != 2:
            continue
        weight, whole = parameter.detach(), expected[name].detach()
        calls = READ if getattr(weight, "of_stage", False) else READ | READ_SIDE_BY_SIDE
        wrong += [
            f"{call} of {name}" for call, run in calls.items() if not _same(run(weight, whole), run(whole, whole))
        ]
        for call, write in WRITTEN.items():
            mine, copied = weight.clone(), whole.clone()
            write(mine)
            write(copied)
            if not _same(mine, copied):
                wrong.append(f"writing {call} of {name}")
    return wrong


def _same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(map(_same, actual, expected))
    if isinstance(expected, torch.Tensor):
        actual = actual.full_tensor() if isinstance(actual, DTensor) else actual
        return bool(actual.shape == expected.shape and torch.allclose(actual.double(), expected.double(), rtol=1e-12))
    return bool(actual == expected)
