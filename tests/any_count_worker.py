"""Models that pick rows by masks of their inputs, on ranks beside plain PyTorch: batches with ever other numbers."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import planner
from tests.ranks import answer, result_of, task

BATCH, LENGTH, WIDTH, CLASSES = 8, 5, 6, 7
#: Steps, and how many entries of the mask are true in each.
COUNTS = (13, 7, 40, 0)


class Tagger(nn.Module):
    """Classes of tokens; labels below zero are none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.head = nn.Linear(WIDTH, CLASSES, dtype=torch.float64)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.loss(self.inner(x).tanh(), labels)}

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class PicksLogits(Tagger):
    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(hidden)
        return F.cross_entropy(logits[labels >= 0], labels[labels >= 0], reduction="sum")


class PicksHidden(Tagger):
    """The head of a masked language model: it runs where there are labels alone."""

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        chosen = labels != -1
        return F.cross_entropy(self.head(hidden[chosen]), labels[chosen])


class PicksLosses(Tagger):
    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(self.head(hidden).transpose(1, 2), labels.clamp(min=0), reduction="none")
        return losses[labels >= 0].mean() + hidden.square().mean()


class SelectsEntries(Tagger):
    """Targets of a regression, where there are any: the others are no numbers."""

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        targets = labels.to(hidden.dtype).masked_fill(labels < 0, torch.nan)
        there = ~targets.isnan()
        scores = self.head(hidden).sum(-1)
        return (torch.masked_select(scores, there) - targets.masked_select(there)).square().sum()


class TakesPlaces(Tagger):
    """As models without padding do: places of the tokens in the flat batch."""

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        places = (labels.flatten() + 1).clamp(max=1).nonzero().squeeze(-1)
        rows = self.head(hidden.flatten(0, 1).index_select(0, places))
        return rows.logsumexp(-1).sum() + hidden.mean()


class PutsBack(Tagger):
    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        result = hidden.clone()
        result[labels >= 0] = self.inner(hidden[labels >= 0]).relu() + 1
        return self.head(result).square().mean()


class DropsWhatIsNoNumber(Tagger):
    """Rows without a label are no numbers, as those of padding are behind some attention."""

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = hidden.masked_fill((labels < 0).unsqueeze(-1), torch.nan)
        return self.head(hidden[labels >= 0]).square().sum()


class DividesByTheirNumber(Tagger):
    """No row's own: the number of rows is a constant of the program, as the example has it."""

    def loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        picked = self.head(hidden[labels >= 0])
        return picked.square().sum() / max(len(picked), 1) + hidden.mean()


REWRITTEN = (PicksLogits, PicksHidden, PicksLosses, SelectsEntries, TakesPlaces, PutsBack, DropsWhatIsNoNumber)
REFUSED = (DividesByTheirNumber,)
#: Losses that are no number where no row is picked.
OF_NONE_IS_NAN = (PicksHidden, PicksLosses)
TARGETS = ("pp=1,dp=2", "tp=2", "pp=2")
#: The first kind is trained on all meshes, each other on one.
TRAINED = (
    *((PicksLogits, target) for target in TARGETS),
    *((kind, TARGETS[place % len(TARGETS)]) for place, kind in enumerate(REWRITTEN[1:])),
)


def batch_of(count: int, number: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=generator)
    dropped = torch.randperm(BATCH * LENGTH, generator=generator)[count:]
    labels.view(-1)[dropped] = -1
    return {"x": x, "labels": labels}


def batches(kind: type[Tagger]) -> list[dict[str, torch.Tensor]]:
    counts = (*COUNTS[:-1], 2) if kind in OF_NONE_IS_NAN else COUNTS
    return [batch_of(count, number) for number, count in enumerate(counts)]


def captures_of(parallel: Any) -> int:
    return int(parallel._engine._maker.captures.count)


def is_near(value: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(value, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def trains(kind: type[Tagger], target: Any, **options: Any) -> dict[str, Any]:
    """Which of the steps have another loss, gradient or weight than plain PyTorch; how often the model was captured."""
    model, first = kind(), batches(kind)[0]
    parallel = planner.compile(kind(), target, example_inputs=first, **options)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.05) for one in (model, parallel)]
    wrong: list[str] = []
    for number, batch in enumerate(batches(kind)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        if not is_near(parallel.train_step(**batch), loss.detach()):
            wrong.append(f"loss {number}")
        wrong += compared(f"gradient {number}", parallel.full_gradients(), gradients(model))
        for optimizer in optimizers:
            optimizer.step()
        wrong += compared(f"weight {number}", parallel.full_state_dict(), model.state_dict())
    return {"wrong": wrong, "captures": captures_of(parallel)}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def compared(words: str, values: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    return [f"{words} of {name}" for name, one in expected.items() if not is_near(values[name], one)]


def evaluates(target: str) -> dict[str, Any]:
    """Losses without gradients, of each data rank's own samples; how often the model was captured behind the second."""
    kind = PicksHidden
    model, first = kind(), batches(kind)[0]
    parallel = planner.compile(kind(), target, example_inputs=first, constraints={"input:*": {"dp": "S(0)"}}).eval()
    wrong: list[str] = []
    captures: list[int] = []
    with torch.no_grad():
        for number, batch in enumerate(batches(kind)):
            size = BATCH // parallel.num_data_ranks
            own = slice(parallel.data_rank * size, (parallel.data_rank + 1) * size)
            outputs = parallel(**{name: tensor[own] for name, tensor in batch.items()}, local_inputs=True)
            wrong += [] if is_near(outputs["loss"], model(**batch)["loss"]) else [f"loss {number}"]
            captures.append(captures_of(parallel))
    return {"wrong": wrong, "captures": captures[-1] - captures[1]}


def runs_a_saved_plan(target: str) -> dict[str, Any]:
    kind = PicksHidden
    parallel = planner.compile(kind(), target, example_inputs=batches(kind)[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        parallel.plan.save(path)
        return trains(kind, planner.Plan.load(path))


def main() -> None:
    warnings.simplefilter("ignore")
    task()  # joins the other rank
    results = {
        f"{kind.__name__} {target}": result_of(trains, kind, target)
        for kind, target in (*TRAINED, *((kind, TARGETS[0]) for kind in REFUSED))
    }
    results["evaluation"] = result_of(evaluates, "dp=2")
    results["saved plan"] = result_of(runs_a_saved_plan, "pp=1,dp=2")
    results["any size"] = result_of(functools.partial(trains, dynamic=True), PicksHidden, "dp=2")
    answer(results)


if __name__ == "__main__":
    main()
