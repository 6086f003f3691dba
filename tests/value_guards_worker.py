"""Models whose Python code reads values of their inputs, on two ranks beside plain PyTorch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import nn
from torch.nn import functional as F

import planner
from tests.ranks import answer, result_of, task

FEATURES = 4
X = torch.randn(8, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
#: A batch, and one of other values that reads otherwise.
LENGTHS = torch.tensor([3, 1, 4, 2, 3, 1, 4, 2])
OTHERS = torch.tensor([2, 1, 4, 2, 3, 3, 3, 5])


class Reader(nn.Module):
    """A linear layer with something around it that reads lengths."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.register_buffer("longest", torch.tensor(4))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.read(self.linear(x), x, lengths).square().sum()}

    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class ReadsNumber(Reader):
    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return y * lengths.sum().item() / int(lengths.max())


class Branches(Reader):
    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return y * 3 if lengths[-1] > 2 else y.tanh()


class SplitsByList(Reader):
    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = y.repeat_interleave(lengths, dim=0)
        return torch.stack([part.mean() for part in rows.split(lengths.tolist())])


class SelectsByMask(Reader):
    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        (places,) = torch.where(lengths > 2)
        return y[lengths > 2].tanh().sum() + y[places].sum() + y[(lengths > 3).nonzero()].square().sum()


class CountsKinds(Reader):
    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        kinds, place = torch.unique(lengths, return_inverse=True)
        sums = torch.zeros(len(kinds), FEATURES, dtype=y.dtype).index_add(0, place, y)
        return sums.square()


class WritesFirst(Reader):
    """Reads what was written in place, before and after."""

    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        changed = lengths.clone()
        before = int(changed[0])
        changed[:2] += lengths[-1]
        return y * before + y.tanh() * int(changed[0])


class ComparesWithBuffer(Reader):
    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return y.exp() if bool((lengths > self.longest).any()) else y


class Transcribes(Reader):
    """A CTC loss of targets that a mask picks."""

    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        frames = torch.stack([y, 2 * y, y.tanh(), 3 * y, y.exp()]).log_softmax(-1)
        labels = torch.stack([lengths % 3 + 1, (lengths + 1) % 3 + 1], dim=1)
        labels_mask = torch.stack([lengths > 0, lengths > 2], dim=1)
        num_frames = torch.full((len(x),), len(frames))
        return F.ctc_loss(frames, labels[labels_mask], num_frames, labels_mask.sum(-1))


class PicksOneByOne(Reader):
    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return y[list(lengths), list(lengths % FEATURES)] * int(lengths[0])


class PlacesRows(Reader):
    """As features of images between those of tokens: one a sample, or another number."""

    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        places = torch.arange(FEATURES) == lengths[:, None] - 1
        return y.masked_scatter(places, y.sum(1)).square()


class Unpacks(Reader):
    """Flags of inputs that were packed beside values of weights."""

    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = torch.cat([y, (lengths > 2)[:, None].to(y.dtype)], dim=-1)
        values, flags = packed.split([FEATURES, 1], dim=-1)
        return values[flags.squeeze(-1).bool()].square()


READERS = (
    Unpacks, PlacesRows, ReadsNumber, Branches, SplitsByList, SelectsByMask, CountsKinds, WritesFirst,
    ComparesWithBuffer, PicksOneByOne,
)  # fmt: skip
TARGETS = ("pp=1,dp=2", "tp=2")


class CountsCalls(Reader):
    """Begins with an offset of its first batch, and writes to another row of a queue at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("queue", torch.zeros(2, FEATURES, dtype=torch.float64))
        self.register_buffer("is_ready", torch.tensor(False))
        self.register_buffer("row", torch.zeros(1, dtype=torch.long))

    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.offset.copy_(x.mean(0))
            self.is_ready.fill_(True)
        row = int(self.row)
        z = (y - self.offset) * (1 + self.queue.clone())[row]
        self.queue[row] = x.sum(0)
        self.row[0] = (row + 1) % len(self.queue)
        return z


class FillsQueue(Reader):
    """Writes the rows of each call behind those of the one before, round and round: the place is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.linspace(-1, 1, 12 * FEATURES, dtype=torch.float64).view(12, FEATURES))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        scores = (y @ self.queue.clone().T).softmax(-1)
        with torch.no_grad():
            self.queue[(self.place + torch.arange(len(y))) % len(self.queue)] = y
            self.place.add_(len(y)).remainder_(len(self.queue))
        return scores


class Checked(Reader):
    """Reads values only to refuse some."""

    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if lengths.max() > 5:
            raise IndexError("lengths must be 5 at most")
        return y


class Assigns(Reader):
    """Pairs what it predicts with its inputs, and refuses predictions that are too large."""

    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        if self.longest is not None and not (y.abs() < 100).all():
            raise IndexError("too large")
        assert not y.isnan().any() and (x.isfinite().all() or y.isinf().any()), "not a number"
        rows, columns = linear_sum_assignment(torch.cdist(y.detach(), x).cpu())
        rows = np.concatenate([rows[:3], rows[3:]])
        return y[torch.as_tensor(rows)] * x[torch.as_tensor(columns)] ** 2


def equals_eager(model: Reader, parallel: Any, lengths: torch.Tensor, **options: Any) -> bool:
    """Loss and every gradient of one step."""
    model.zero_grad()
    parallel.zero_grad()
    loss = model(X, lengths)["loss"]
    loss.backward()
    part = slice(None)
    if options.get("local_inputs"):
        size = len(X) // parallel.num_data_ranks
        part = slice(parallel.data_rank * size, (parallel.data_rank + 1) * size)
    parallel_loss = parallel.train_step(x=X[part], lengths=lengths[part], **options)
    gradients = parallel.full_gradients()
    return torch.allclose(parallel_loss, loss.detach(), rtol=1e-9, atol=0) and all(
        torch.allclose(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)
        for name, parameter in model.named_parameters()
    )


def programs_of(parallel: Any) -> int:
    return len(parallel._engine._maker._made)


def follows(reader: type[Reader], target: str) -> list[Any]:
    """Whether three calls equal eager's, the second with other values; programs after each."""
    model = reader()
    parallel = planner.compile(model, target, example_inputs={"x": X, "lengths": LENGTHS})
    answers: list[Any] = []
    for lengths in (LENGTHS, OTHERS, LENGTHS):
        answers += [equals_eager(model, parallel, lengths), programs_of(parallel)]
    return answers


def errors_are_the_users(target: str) -> list[str]:
    """A call that the model refuses, between two that it takes."""
    model = Checked()
    parallel = planner.compile(model, target, example_inputs={"x": X, "lengths": LENGTHS})
    message = ""
    try:
        parallel.train_step(x=X, lengths=LENGTHS * 2)
    except IndexError as error:
        message = str(error)
    return [message, str(equals_eager(model, parallel, OTHERS)), str(programs_of(parallel))]


def checks_predictions(target: str) -> list[Any]:
    """A step that a check of the model refuses, between two that it lets pass; one program serves them all."""
    model = Assigns()
    parallel = planner.compile(model, target, example_inputs={"x": X, "lengths": LENGTHS})
    results = [equals_eager(model, parallel, LENGTHS)]
    message = ""
    try:
        parallel.train_step(x=X * 1000, lengths=LENGTHS)
    except ValueError as error:
        message = str(error)
    return [*results, message, equals_eager(model, parallel, OTHERS), programs_of(parallel)]


def transcribes(target: str) -> list[Any]:
    """Targets of other numbers of letters, under one program."""
    model = Transcribes()
    parallel = planner.compile(model, target, example_inputs={"x": X, "lengths": LENGTHS})
    return [*(equals_eager(model, parallel, lengths) for lengths in (LENGTHS, OTHERS)), programs_of(parallel)]


def reads_each_groups_samples(target: str) -> list[Any]:
    """Local inputs: the values of the whole batch count."""
    model = ReadsNumber()
    cut = {"input:*": {"dp": "S(0)"}} if "dp" in target else {}
    parallel = planner.compile(model, target, example_inputs={"x": X, "lengths": LENGTHS}, constraints=cut)
    answers: list[Any] = []
    for lengths in (LENGTHS, OTHERS, LENGTHS):
        answers += [equals_eager(model, parallel, lengths, local_inputs=True), programs_of(parallel)]
    return answers


def follows_loaded_buffers(target: str) -> list[Any]:
    model = ComparesWithBuffer()
    parallel = planner.compile(model, target, example_inputs={"x": X, "lengths": LENGTHS})
    model.load_state_dict({**model.state_dict(), "longest": torch.tensor(1)})
    parallel.load_full_state_dict(model.state_dict())
    return [equals_eager(model, parallel, LENGTHS), programs_of(parallel)]


def follows_written_buffers(target: str) -> list[Any]:
    """Calls after the first, of which each reads what the one before wrote; then two rows take turns."""
    model = CountsCalls()
    parallel = planner.compile(model, target, example_inputs={"x": X, "lengths": LENGTHS})
    model = CountsCalls()
    equal = all(equals_eager(model, parallel, LENGTHS) for _ in range(4))
    state = parallel.full_state_dict()
    buffers = all(torch.allclose(state[name], buffer, rtol=1e-9) for name, buffer in model.named_buffers())
    return [equal, buffers, programs_of(parallel)]


def fills_a_queue(target: str) -> list[Any]:
    """Three calls go once around the queue and more."""
    model = FillsQueue()
    parallel = planner.compile(model, target, example_inputs={"x": X, "lengths": LENGTHS})
    model = FillsQueue()
    equal = all(equals_eager(model, parallel, LENGTHS) for _ in range(3))
    state = parallel.full_state_dict()
    buffers = all(torch.allclose(state[name], buffer, rtol=1e-9) for name, buffer in model.named_buffers())
    return [equal, buffers, programs_of(parallel)]


def refuses_other_batches(target: str) -> str:
    """Ranks that pass other values do not run different programs."""
    parallel = planner.compile(ReadsNumber(), target, example_inputs={"x": X, "lengths": LENGTHS})
    for _ in range(2):
        parallel.train_step(x=X, lengths=LENGTHS)
    try:
        parallel.train_step(x=X, lengths=(LENGTHS, OTHERS)[torch.distributed.get_rank()])
    except ValueError as error:
        return str(error)
    return "no error"


SCENARIOS: tuple[Callable[[str], Any], ...] = (
    errors_are_the_users,
    checks_predictions,
    transcribes,
    reads_each_groups_samples,
    follows_loaded_buffers,
    follows_written_buffers,
    fills_a_queue,
    refuses_other_batches,
)


def main() -> None:
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    functions: dict[str, Callable[[str], Any]] = {
        reader.__name__: functools.partial(follows, reader) for reader in READERS
    }
    functions |= {scenario.__name__: scenario for scenario in SCENARIOS}
    for name, target in task():
        results[f"{name} {target}"] = result_of(functions[name], target)
    answer(results)


if __name__ == "__main__":
    main()
