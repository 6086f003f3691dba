"""One of three ranks: two train behind cached layers, the third joins; the boundary moves, and one of them leaves."""

from __future__ import annotations

import copy

import torch
from torch.distributed.device_mesh import DeviceMesh

import planner
from passes.capture import keep_float64
from planner.verification.comparison import difference, differences
from runtime.agreement.ranks_together import gathered
from tests.activation_cache_worker import LENGTH, SIZE, Tagger, freeze
from tests.ranks import answer, task
from tests.small_models import seeded
from tests.tracing import traced_once

SAMPLES, BATCH = 12, 6


def main() -> None:
    task()
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(32, (SAMPLES, LENGTH), generator=generator) for _ in range(2))
    comparisons, counts = [], []
    with keep_float64():
        single = seeded(Tagger)
        single.layers[:2].eval()
        pair = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
        if rank < 2:
            example = {"tokens": tokens[:BATCH], "labels": labels[:BATCH]}
            parallel = planner.compile(copy.deepcopy(single), pair, example_inputs=example)
        else:
            parallel = planner.join(copy.deepcopy(single))
        optimizer, alone = (torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (parallel, single))
        cache = planner.ActivationCache(parallel, memory_bytes=SAMPLES * LENGTH * SIZE * 8)

        def epoch() -> None:
            before = cache.hits, cache.misses, cache.converted
            for rows in torch.randperm(SAMPLES, generator=generator).split(BATCH):
                expected = single(tokens[rows], labels[rows])
                expected.backward()
                if parallel.has_work:
                    loss = cache.train_step(tokens=tokens[rows], labels=labels[rows])
                    comparisons.append(difference("loss", "loss", loss, expected.detach()))
                for one in (optimizer, alone) if parallel.has_work else (alone,):
                    one.step()
                    one.zero_grad()
            now = cache.hits, cache.misses, cache.converted
            counts.append([one - other for one, other in zip(now, before)])

        def frozen(*paths: str) -> None:
            for module in (parallel, single) if parallel.has_work else (single,):
                freeze(module, paths)

        frozen("embedding", "layers.0")
        if parallel.has_work:
            cache.replan(pair, optimizer, after="layers.0", always=True)
        epoch()
        parallel.replan("dp=3", optimizer, carried=[cache])
        epoch()
        frozen("layers.1")
        cache.replan("dp=3", optimizer, after="layers.1", always=True)
        epoch()
        parallel.replan("dp=2", optimizer, ranks=[0, 2], carried=[cache])
        epoch()
        if parallel.has_work:
            weights = parallel.full_state_dict()
            comparisons += differences("weights", weights, dict(single.named_parameters()), floor=1e-6)
    errors: dict[str, float] = {}
    for one in comparisons:
        errors[one.what] = max(errors.get(one.what, 0.0), one.error)
    by_rank = gathered((errors, counts))
    answer({"errors": [own for own, _ in by_rank], "counts": [own for _, own in by_rank]})


if __name__ == "__main__":
    with traced_once():
        main()
