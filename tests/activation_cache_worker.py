"""One of two ranks: a model whose first layers freeze trains on with their outputs cached; each trains it alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import planner
from passes.capture import keep_float64
from planner.verification.comparison import difference, differences
from planner.verification.verify_model import slow_devices
from tests.patience import PATIENCE
from tests.ranks import answer, task
from tests.small_models import seeded
from tests.tracing import traced_once

SAMPLES, BATCH, LENGTH, SIZE = 16, 8, 6, 16


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        self.up = nn.Linear(SIZE, 2 * SIZE)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Tagger(nn.Module):
    """Four layers, of which the first two drop out; the mean of the tokens shifts all of a batch if it ``mixes``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, SIZE)
        self.layers = nn.ModuleList(Layer(0.5 if index < 2 else 0.0) for index in range(4))
        self.output = nn.Linear(SIZE, 32)
        self.mixes = False

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x + x.mean(0) if self.mixes else x
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.output(x).flatten(0, 1), labels.flatten())


def freeze(module: nn.Module, paths: tuple[str, ...]) -> None:
    for path in paths:
        module.get_submodule(path).requires_grad_(False)


def main() -> None:
    payload = task()
    results: dict[str, Any] = {"errors": {}, "counts": [], "prices": []}
    comparisons = []
    with keep_float64():
        single = seeded(Tagger)
        single.layers[:2].eval()
        generator = torch.Generator().manual_seed(0)
        tokens, labels = (torch.randint(32, (SAMPLES, LENGTH), generator=generator) for _ in range(2))
        options = {"time_limit": PATIENCE}
        batch = {"tokens": tokens[:BATCH], "labels": labels[:BATCH]}
        parallel = planner.compile(
            copy.deepcopy(single), slow_devices(2), fix=payload["plans"][0], example_inputs=batch, **options
        )
        optimizer, alone = (torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (parallel, single))
        row_bytes = LENGTH * SIZE * 8
        cache = planner.ActivationCache(parallel, memory_bytes=10 * row_bytes, disk_bytes=10 * row_bytes)
        refused = {"trains": error_of(cache.replan, slow_devices(2), optimizer, after="layers.0")}
        refused["no module"] = error_of(cache.replan, slow_devices(2), optimizer, after="layers.9")

        def step(rows: torch.Tensor) -> None:
            expected = single(tokens[rows], labels[rows])
            (expected / payload["accumulate"]).backward()
            if cache.after is not None and payload["local"]:
                rows = rows.chunk(parallel.num_data_ranks)[parallel.data_rank]
            loss = cache.train_step(
                tokens=tokens[rows], labels=labels[rows], local_inputs=cache.after is not None and payload["local"]
            )
            comparisons.append(difference("loss", "loss", loss, expected.detach()))

        def epoch() -> None:
            before = cache.hits, cache.misses, cache.converted
            for rows in torch.randperm(SAMPLES, generator=generator).split(BATCH * payload["accumulate"]):
                with parallel.accumulate(payload["accumulate"]):
                    for part in rows.split(BATCH):
                        step(part)
                for one in (optimizer, alone):
                    one.step()
                    one.zero_grad()
            now = cache.hits, cache.misses, cache.converted
            results["counts"].append([one - other for one, other in zip(now, before)])

        epoch()
        for plan, after, paths in zip(payload["plans"][1:], payload["after"], payload["frozen"], strict=True):
            for module in (parallel, single):
                freeze(module, tuple(paths))
            if after == "as before":
                parallel.replan(slow_devices(2), optimizer, fix=plan, **options)
            else:
                price = cache.replan(slow_devices(2), optimizer, after=after, always=True, fix=plan, **options)
                results["prices"].append(price)
            epoch()
            epoch()
        if payload.get("price"):
            price = cache.replan(slow_devices(2), optimizer, after=payload["after"][-2], fix=plan, **options)
            results["prices"] = [price.computed, price.cached, price.reading, price.converted, cache.after]
            slow = planner.ActivationCache(parallel, memory_bytes=1e6, bytes_per_second=1.0)
            assert slow.replan(slow_devices(2), optimizer, after="layers.0", fix=plan, **options) is not None
            results["slow"] = slow.after
            cache.replan(slow_devices(2), optimizer, after=payload["after"][-2], always=True, fix=plan, **options)
            # Frozen weights that change: nothing that was kept is right any more.
            state = {name: tensor * 1.5 for name, tensor in single.state_dict().items()}
            single.load_state_dict(state)
            parallel.load_full_state_dict(state)
            epoch()
            parallel.get_submodule("layers.0").train()
            refused["draws"] = error_of(cache.train_step, tokens=tokens[:BATCH], labels=labels[:BATCH])
            parallel.get_submodule("layers.0").eval()
            parallel.mixes = True
            refused["mixes"] = error_of(cache.train_step, tokens=tokens[:BATCH], labels=labels[:BATCH])
            results["refused"] = refused
        comparisons += differences("weights", parallel.full_state_dict(), dict(single.named_parameters()), floor=1e-6)
    for one in comparisons:
        results["errors"][one.what] = max(results["errors"].get(one.what, 0.0), one.error)
    answer(results)


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    with traced_once():
        main()
