"""One of two ranks: a trainer that freezes layers on the way, stops, and is resumed under another plan."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import planner
from passes.capture import keep_float64
from planner.verification.comparison import difference, differences
from planner.verification.verify_model import slow_devices
from tests.activation_cache_worker import BATCH, LENGTH, SAMPLES, Tagger
from tests.patience import PATIENCE
from tests.ranks import answer, task
from tests.small_models import seeded
from tests.tracing import traced_once

#: The adaptive rule, and all layers at the third decision.
_ADAPTIVE = planner.FreezePolicy.adaptive(num_layers=4, alpha=0.4)
POLICY = planner.FreezePolicy(
    4, lambda decision, frozen, norms: 4 if decision == 3 else _ADAPTIVE.next(decision, frozen, norms)
)
#: Steps from one decision to the next: two epochs.
EVERY = 6


def undropped() -> Tagger:
    model = Tagger()
    for layer in model.layers:
        layer.dropout = nn.Dropout(0.0)
    return model


def tied() -> Tagger:
    """Whose embedding trains on while layers behind it are frozen: nothing that they give can be kept."""
    model = undropped()
    model.output.weight = model.embedding.weight
    return model


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(32, (SAMPLES + 3, LENGTH), generator=generator) for _ in range(2))
    return [{"tokens": one, "labels": other} for one, other in zip(tokens, labels)]


def trainer(model: nn.Module, target: Any, folder: Path, *, bytes_per_second: float, **options: Any) -> planner.Trainer:
    room = planner.CacheRoom(memory_bytes=1e6, bytes_per_second=bytes_per_second)
    freezing = planner.Freezing(POLICY, every=EVERY, targets=[target], cache=room, replan_seconds=0.0)
    return planner.Trainer(
        model, target, optimizer=optimizer_of, global_batch=BATCH, freeze=freezing, checkpoint_dir=folder,
        log_every=100, max_grad_norm=0.5, **options,
    )  # fmt: skip


def alone(epochs: int) -> tuple[nn.Module, list[torch.Tensor], list[int]]:
    """The same by plain PyTorch on one device: the model, the losses, and layers frozen after each decision."""
    single = seeded(undropped)
    optimizer, losses, frozen = optimizer_of(single.parameters()), [], [0]
    loader = planner.DataLoader(samples(), batch_size=BATCH, seed=0, last="whole")
    for _ in range(epochs):
        for batch in loader:
            norms = [0.0] * 4
            loss = single(**batch)
            loss.backward()
            for number, layer in enumerate(single.layers):
                squares = [float(one.grad.square().sum()) for one in layer.parameters() if one.grad is not None]
                norms[number] = sum(squares) ** 0.5
            nn.utils.clip_grad_norm_(single.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if len(losses) % EVERY == 0:
                frozen.append(POLICY.next(len(frozen), frozen[-1], norms))
                for module in (single.embedding, *single.layers[: frozen[-1]]):
                    module.requires_grad_(False)
                    for parameter in module.parameters():
                        optimizer.state.pop(parameter, None)
    return single, losses, frozen


def main() -> None:
    task()
    folder = Path(os.environ["MESHWRIGHT_TEST_FOLDER"])
    comparisons, frozen, counts = [], [], []
    with keep_float64():
        single, expected, frozen_alone = alone(7)
        plain = seeded(undropped)
        first = trainer(
            copy.deepcopy(plain), slow_devices(2), folder / "run", bytes_per_second=1e15, time_limit=PATIENCE
        )
        got = [*first.fit(samples(), num_epochs=5).losses]
        cache = first._freezing.cache if first._freezing else None
        assert first._freezing is not None and cache is not None
        counts.append([cache.hits, cache.misses, first.parallel.get_submodule("layers.0").training])
        frozen.append(first._freezing.frozen)
        second = trainer(plain, "tp=2", folder / "run", bytes_per_second=1.0)
        result = second.fit(samples(), samples(), num_epochs=7)
        got += result.losses
        assert second._freezing is not None and second._freezing.cache is not None
        frozen.append(second._freezing.frozen)
        counts.append(second._freezing.cache.after)
        comparisons += [
            difference("loss", "loss", torch.tensor(one, dtype=torch.float64), other)
            for one, other in zip(got, expected)
        ]
        weights = second.parallel.full_state_dict()
        comparisons += differences("weights", weights, dict(single.named_parameters()), floor=1e-6)
        whole = torch.utils.data.default_collate(samples())
        evaluated = result.evaluations[second.step]["loss"]
        comparisons.append(
            difference("evaluation", "loss", torch.tensor(evaluated, dtype=torch.float64), single(**whole).detach())
        )
        freezing = planner.Freezing(
            planner.FreezePolicy(4, lambda *_: 2), every=1, cache=planner.CacheRoom(1e6), replan_seconds=0.0
        )
        third = planner.Trainer(seeded(tied), "tp=2", freeze=freezing, global_batch=BATCH, log_every=0)
        third.fit(samples(), num_steps=2)
        assert third._freezing is not None and third._freezing.cache is not None
        counts.append([third._freezing.frozen, third._freezing.cache.after])
        unfrozen = planner.Trainer(undropped(), "tp=2", global_batch=BATCH, checkpoint_dir=folder / "run", log_every=0)
        try:
            unfrozen.fit(samples(), num_epochs=8)
        except ValueError as error:
            refused = str(error)
    errors: dict[str, float] = {}
    for one in comparisons:
        errors[one.what] = max(errors.get(one.what, 0.0), one.error)
    answer({
        "errors": errors, "losses": [len(got), len(expected)], "frozen": frozen, "frozen alone": frozen_alone,
        "counts": counts, "refused": refused,
    })  # fmt: skip


if __name__ == "__main__":
    with traced_once():
        main()
