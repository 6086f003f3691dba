"""Measures one case of ``benchmarks.kernels``: every contestant, forward, backward and both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.kernels_cases import BACKWARD, BOTH, FORWARD, Case
from benchmarks.kernels_contestants import EAGER, OURS, Contestant, contestants
from benchmarks.kernels_timing import Clock, largest_error

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Row:
    """One contestant in one pass of one case.

    Attributes:
        kind: what the operator counts as in the goals, "" for nothing.
        what: the pass.
        seconds, low, high: median and quartiles; None if it was not measured, and ``note`` says why.
        num_bytes: that the operator must move.
        peak_bytes: most memory held above the inputs and the gradients of the outputs.
        error: largest difference from float64, relative to the largest value.
        comparable: False where forward does work of backward, or the other way round.
    """

    operator: str
    kind: str
    size: str
    dtype: str
    what: str
    contestant: str
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    num_bytes: int = 0
    peak_bytes: int | None = None
    error: float | None = None
    comparable: bool = True
    note: str = ""

    @property
    def case(self) -> tuple[str, str, str]:
        return self.operator, self.size, self.dtype


class Run:
    """A contestant with tensors of its own, since some overwrite them."""

    def __init__(self, function: Callable[..., Any], case: Case, device: torch.device, *, exact: bool = False) -> None:
        self.function = function

        def make() -> dict[str, torch.Tensor]:
            tensors = case.tensors(device)
            return {name: _exact(tensor) for name, tensor in tensors.items()} if exact else tensors

        self.inputs = make()
        self.grads = [_gradient_of(output, case.dtype, place) for place, output in enumerate(self.forward())]
        # Again: some overwrite what they are given.
        self.inputs = make()
        self.leaves = [self.inputs[name] for name in case.trained]

    def forward(self, _: Any = None) -> Tensors:
        results = self.function(*self.inputs.values())
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)

    def backward(self, outputs: Tensors) -> Tensors:
        return torch.autograd.grad(outputs, self.leaves, self.grads)

    def both(self, _: Any = None) -> tuple[Tensors, Tensors]:
        outputs = self.forward()
        return outputs, self.backward(outputs)


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


def _gradient_of(output: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """One for a loss; else random values that ``dtype`` holds, the same for every contestant."""
    if not output.dim():
        return torch.ones_like(output, requires_grad=False)
    generator = torch.Generator(output.device).manual_seed(100 + seed)
    values = torch.randn(output.shape, dtype=dtype, device=output.device, generator=generator).to(output.dtype)
    return torch.empty_like(output, requires_grad=False).copy_(values)


def measure_case(case: Case, clock: Clock, *, backend: str) -> list[Row]:
    """Rows of all contestants; what fails says so in its row, and the others go on."""
    torch.compiler.reset()
    truth = _or_none(lambda: _truth(case, clock.device))
    rows: list[Row] = []
    for contestant in contestants(case.operator.name, backend=backend):
        rows += _rows_of(contestant, case, clock, truth)
        clock.release()
    return rows


def _truth(case: Case, device: torch.device) -> tuple[Tensors, Tensors]:
    """Outputs and gradients in float64."""
    eager = contestants(case.operator.name, backend="eager")[0]
    assert eager.name == EAGER and eager.function is not None
    outputs, grads = Run(eager.function, case, device, exact=True).both()
    return tuple(output.detach() for output in outputs), grads


def _or_none(make: Callable[[], Any]) -> Any:
    """None where the device's memory does not hold it."""
    try:
        return make()
    except torch.OutOfMemoryError:
        return None


def _rows_of(contestant: Contestant, case: Case, clock: Clock, truth: tuple[Tensors, Tensors] | None) -> list[Row]:
    if contestant.function is None:
        return [_row(contestant, case, what, note=contestant.missing) for what in (FORWARD, BACKWARD, BOTH)]
    try:
        return _measured(contestant, case, clock, truth)
    except Exception as error:  # whatever a compiler or another library raises: the others go on
        note = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return [_row(contestant, case, what, note=note[:200]) for what in (FORWARD, BACKWARD, BOTH)]


def _measured(contestant: Contestant, case: Case, clock: Clock, truth: tuple[Tensors, Tensors] | None) -> list[Row]:
    assert contestant.function is not None
    errors: dict[str, float] = {}
    if truth is not None:
        outputs, grads = Run(contestant.function, case, clock.device).both()
        errors = {FORWARD: largest_error(outputs, truth[0]), BACKWARD: largest_error(grads, truth[1])}
        errors[BOTH] = max(errors[FORWARD], errors[BACKWARD])
        del outputs, grads
    run = Run(contestant.function, case, clock.device)
    moved = case.bytes_moved(run.inputs, run.both()[0])
    calls: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
        FORWARD: (run.forward, lambda: None),
        BACKWARD: (run.backward, run.forward),
        BOTH: (run.both, lambda: None),
    }
    peaks = {FORWARD: clock.peak_bytes(run.forward), BOTH: clock.peak_bytes(run.both)}
    rows = []
    for what, (call, prepare) in calls.items():
        timing = clock.time(call, prepare)
        rows.append(
            _row(
                contestant,
                case,
                what,
                seconds=timing.median,
                low=timing.low,
                high=timing.high,
                num_bytes=moved[what],
                peak_bytes=peaks.get(what),
                error=errors.get(what),
            )
        )
    return rows


def _row(contestant: Contestant, case: Case, what: str, **figures: Any) -> Row:
    operator = case.operator
    return Row(
        operator.name,
        operator.goal,
        case.size.name,
        case.dtype_name,
        what,
        contestant.name,
        comparable=contestant.splits or what == BOTH,
        **figures,
    )


def ratio_to_best(rows: Sequence[Row], ours: Row, *, others: Sequence[str]) -> float | None:
    """How many times as fast as the fastest of ``others`` ours is in the same pass of the same case; None without."""
    assert ours.contestant == OURS
    times = [
        row.seconds
        for row in rows
        if row.case == ours.case
        and row.what == ours.what
        and row.contestant in others
        and row.comparable
        and row.seconds is not None
    ]
    return min(times) / ours.seconds if times and ours.seconds else None
