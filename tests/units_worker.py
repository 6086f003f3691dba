"""One rank of the tests of units: a stack of layers under ZeRO, compared with the same stack on one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from runtime.launch.groups import shared_group
from runtime.program_tools.recompute import recomputed
from runtime.zero.group import StateGroup, sum_over
from runtime.zero.norm import clip_gradients
from runtime.zero.state_pieces import piece, piece_shape
from runtime.zero.unit import Unit, UnitWeight, chained
from tests.ranks import answer, task

HIDDEN, NUM_LAYERS, NUM_SAMPLES = 6, 2, 3
#: Cut in dim 0, in dim 1, unevenly with empty pieces (of 4 ranks), not at all; and one that no layer uses.
SHAPES: dict[str, tuple[int, ...]] = {
    "up": (8, HIDDEN),
    "bias": (8,),
    "down": (HIDDEN, 8),
    "gain": (HIDDEN,),
    "code": (5, 3),
    "scale": (),
    "unused": (4,),
}
FROZEN = "offset"


def whole_weights() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {**SHAPES, FROZEN: (HIDDEN,)}
    return [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for name, shape in shapes.items()}
        for _ in range(NUM_LAYERS)
    ]


def samples(rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + microbatch)
    return torch.randn(NUM_SAMPLES, HIDDEN, generator=generator, dtype=torch.float64)


def layer(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    up, bias, down, gain, code, scale, _, offset = weights
    hidden = torch.tanh(x @ up.t() + bias)
    return x + (hidden @ down.t()) * gain * scale + offset + (code * code).sum()


def reference(num_ranks: int, num_microbatches: int, steps: int, **options: Any) -> list[dict[str, nn.Parameter]]:
    """Whole parameters and gradients after ``steps`` optimizer steps on one process."""
    layers = [
        {name: nn.Parameter(tensor, requires_grad=name != FROZEN) for name, tensor in weights.items()}
        for weights in whole_weights()
    ]
    optimizer, schedule = optimizer_of([some for weights in layers for some in weights.items()], **options)
    for _ in range(max(steps, 1)):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            for microbatch in range(num_microbatches):
                x = samples(rank, microbatch)
                for weights in layers:
                    x = layer(list(weights.values()), x)
                x.square().sum().backward()
        if steps:
            optimizer.step()
            schedule.step()
    return layers


def optimizer_of(named: list[tuple[str, nn.Parameter]], **options: Any) -> tuple[Any, Any]:
    """AdamW without decay of 1-d weights, under a schedule."""
    trained = [parameter for _, parameter in named if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trained if parameter.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, **options)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def make_units(zero: int, group: StateGroup) -> tuple[Unit, ...]:
    units = []
    for weights in whole_weights():
        members = []
        for name, tensor in weights.items():
            trained = name != FROZEN
            local = piece(tensor, group.size, group.rank) if zero and trained else tensor
            members.append(UnitWeight(name, nn.Parameter(local.clone(), requires_grad=trained), tuple(tensor.shape)))
        units.append(Unit(members, zero=zero, group=group))
    return chained(units)


def run_layer(unit: Unit, x: torch.Tensor, *, recompute: str) -> torch.Tensor:
    result: torch.Tensor = recomputed(lambda x: layer(unit.use(), x), recompute, gathers_weights=unit.zero == 3)(x)
    return result


def forward(units: tuple[Unit, ...], x: torch.Tensor, *, recompute: str) -> torch.Tensor:
    for unit in units:
        x = run_layer(unit, x, recompute=recompute)
    return x.square().sum()


def trained_by_units(
    zero: int, recompute: str, order: str, num_microbatches: int, steps: int, group: StateGroup, **options: Any
) -> list[dict[str, nn.Parameter]]:
    units = make_units(zero, group)
    named = [(weight.name, weight.owner) for unit in units for weight in unit.weights]
    optimizer, schedule = optimizer_of(named, **options)
    for _ in range(max(steps, 1)):
        optimizer.zero_grad()
        if order == "automatic":
            for unit in units:
                unit.refresh_needed()
        else:
            for unit in units:
                unit.begin(num_microbatches)
        losses = []
        for microbatch in range(num_microbatches):
            losses.append(forward(units, samples(dist.get_rank(), microbatch), recompute=recompute))
            if order != "in flight":
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        if order != "automatic":
            for unit in units:
                unit.finish()
        if steps:
            optimizer.step()
            schedule.step()
    return [{weight.name: weight.owner for weight in unit.weights} for unit in units]


def difference(
    actual: list[dict[str, nn.Parameter]], alone: list[dict[str, nn.Parameter]], zero: int, group: StateGroup
) -> float:
    """Largest relative difference of owners and their gradients from the same pieces of whole ones."""
    worst = 0.0
    for layers in zip(actual, alone):
        for name in layers[0]:
            mine, whole = (weights[name] for weights in layers)
            cut = (lambda tensor: piece(tensor, group.size, group.rank)) if zero and name != FROZEN else (lambda t: t)
            pairs = [(mine.detach(), cut(whole.detach()))]
            if (mine.grad is None) != (whole.grad is None):
                return float("inf")
            if mine.grad is not None:
                pairs.append((mine.grad, cut(whole.grad)))
            for one, other in pairs:
                if one.shape != other.shape:
                    return float("inf")
                if one.numel():
                    worst = max(worst, float((one - other).abs().max() / other.abs().max().clamp_min(1e-300)))
    largest = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def parity(cases: list[dict[str, Any]], group: StateGroup) -> dict[str, float]:
    answers = {}
    for case in cases:
        options = case.get("options", {})
        actual = trained_by_units(
            case["zero"], case["recompute"], case["order"], case["num_microbatches"], case["steps"], group, **options
        )
        alone = reference(dist.get_world_size(), case["num_microbatches"], case["steps"], **options)
        answers[str(case)] = difference(actual, alone, case["zero"], group)
    return answers


def in_pairs() -> StateGroup:
    """Neighbours hold all pieces together; every second rank holds the same."""
    ranks, rank = range(dist.get_world_size()), dist.get_rank()
    together, replicas = ranks[rank - rank % 2 :][:2], ranks[rank % 2 :: 2]
    return StateGroup.of(shared_group("pieces", list(together)), shared_group("replicas", list(replicas)))


class CollectiveLog(TorchDispatchMode):
    """Names of the collectives and matrix products, in the order of their issue."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if (namespace == "_c10d_functional" and name != "wait_tensor") or name == "mm":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def issued(argument: dict[str, int], group: StateGroup) -> list[list[str]]:
    """What two equal steps issue, at one ZeRO stage."""
    units = make_units(argument["zero"], group)
    logs = []
    for _ in range(2):
        with CollectiveLog() as log:
            for unit in units:
                unit.begin(argument["num_microbatches"])
            for microbatch in range(argument["num_microbatches"]):
                forward(units, samples(dist.get_rank(), microbatch), recompute="none").backward()
            for unit in units:
                unit.finish()
        logs.append(log.names)
    return logs


class LiveBytes(TorchDispatchMode):
    """Bytes of all tensors made inside that still live, those that only autograd holds included."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def total(self) -> int:
        """Of living storages above a few bytes (an optimizer's count of steps is no state of a weight)."""
        readings = []
        for _ in range(5):
            # The thread that ran a collective lets go of its tensors a moment after the collective is done.
            time.sleep(0.02)
            held = [size for storage, size in self._storages.values() if not storage.expired() and size > 8]
            readings.append(sum(held))
        return min(readings)


def memory(argument: dict[str, Any], group: StateGroup) -> dict[str, float]:
    """Bytes that live between two micro-batches of a second step, and after a forward pass."""
    zero, compute = argument["zero"], getattr(torch, argument["compute"])
    shapes = [tuple(shape) for shape in argument["shapes"]]
    with LiveBytes() as live:
        owners = []
        for shape in shapes:
            local = torch.empty(piece_shape(shape, group.size, group.rank) if zero else shape).normal_()
            owners.append(nn.Parameter(local))
        members = [UnitWeight(str(shape), owner, shape, compute) for shape, owner in zip(shapes, owners)]
        unit = Unit(members, zero=zero, group=group)
        optimizer = torch.optim.AdamW(owners)

        def squares() -> Any:
            return sum((weight * weight).float().sum() for weight in unit.use())

        def loss() -> torch.Tensor:
            result: torch.Tensor = recomputed(squares, argument["recompute"], gathers_weights=zero == 3)()
            return result

        del local
        for num_uses in (1, 2):
            unit.begin(num_uses)
            value = loss()
            after_forward = live.total()
            value.backward()
            del value
            if num_uses == 1:
                unit.finish()
                optimizer.step()
                optimizer.zero_grad()
        unit.settle()
        between = live.total()
        loss().backward()
        unit.finish()
        for owner in owners:
            owner.grad = None
    return {"between": between, "after forward": after_forward, "at rest": live.total()}


def clipping(norm_types: list[float | str], group: StateGroup) -> list[float]:
    """Largest difference of norm and clipped gradients from torch's on one process, for each p."""
    errors = []
    for norm_type in map(float, norm_types):
        actual = trained_by_units(3, "none", "one by one", 1, 0, group)
        alone = reference(group.size, 1, 0)
        trained = [some for weights in alone for some in weights.values() if some.grad is not None]
        expected = torch.nn.utils.clip_grad_norm_(trained, 0.5, norm_type=norm_type)
        own = [(owner, owner.dim() > 0 or group.rank == 0) for weights in actual for owner in weights.values()]
        norm = clip_gradients(own, group, max_norm=0.5, norm_type=norm_type)
        errors.append(max(float((norm - expected).abs() / expected), difference(actual, alone, 3, group)))
    return errors


def tied(_: None, group: StateGroup) -> list[bool]:
    """Copies of a parameter on several ranks end with the sum, those without a gradient too."""
    owners = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(3, 2).t())]
    owners[1].grad = torch.full((3, 2), 1.0 + group.rank).t()
    if group.rank == 0:
        owners[0].grad = torch.ones(2, 3)
    sum_over(owners, group)
    ranks = range(group.size)
    return [bool((owners[0].grad == 1).all()), bool((owners[1].grad == sum(1 + rank for rank in ranks)).all())]


SCENARIOS: dict[str, Callable[[Any, StateGroup], Any]] = {
    "parity": parity,
    "parity in pairs": lambda cases, _: parity(cases, in_pairs()),
    "issued": lambda arguments, group: [issued(argument, group) for argument in arguments],
    "issued in pairs": lambda arguments, _: [issued(argument, in_pairs()) for argument in arguments],
    "memory": lambda arguments, group: [memory(argument, group) for argument in arguments],
    "clipping": clipping,
    "tied": tied,
}


def main() -> None:
    payload = task()
    group = StateGroup.of(dist.group.WORLD)
    answer({name: SCENARIOS[name](argument, group) for name, argument in payload.items()})


if __name__ == "__main__":
    main()
