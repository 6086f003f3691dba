"""How many tokens each expert of each layer gets, counted while steps run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from passes.pipeline_cut import StageGraph
from passes.pipeline_cut.expert_calls import ExpertCall, expert_calls
from runtime.kernels.routing_listeners import listening


@dataclass
class ExpertLoad:
    """What the steps inside of ``with parallel.expert_load() as load`` routed where; filled in at its end.

    Attributes:
        tokens: path of the layer's experts → how many (token, choice) pairs went to each expert, int64 [experts]: of
            all ranks and micro-batches.
        dropped: path of the layer's experts → how many went to none (their id is no expert's).
    """

    tokens: dict[str, torch.Tensor] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def add_up(self, ranks: Sequence[Mapping[str, tuple[list[int], int]]]) -> None:
        """Take up the counts of every rank.

        Raises:
            ValueError: if no operator of experts was run.
        """
        if not any(ranks):
            raise ValueError(
                "no experts were run: call train_step inside of expert_load(); if it was, the plan has no operator of "
                "experts (parallel.plan.fusion tells what was recognised)"
            )
        sums: dict[str, torch.Tensor] = {}
        copies: dict[str, int] = {}
        for by_path in ranks:
            for path, (counts, num_copies) in by_path.items():
                sums[path] = sums.get(path, 0) + torch.tensor(counts)
                copies[path] = num_copies
        for path in sorted(sums, key=_in_model_order):
            *tokens, dropped = torch.div(sums[path], copies[path], rounding_mode="floor").tolist()
            self.tokens[path], self.dropped[path] = torch.tensor(tokens), dropped


def _in_model_order(path: str) -> list[tuple[int, str]]:
    """Layers by their numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.split(".")]


class ChunkListener:
    """Who is told when chunks begin."""

    def begin(self, graph: StageGraph) -> None:
        """A chunk begins to run a micro-batch."""
        raise NotImplementedError


class RoutingCounts(ChunkListener):
    """This rank's counts by path: of each expert, and of none."""

    def __init__(self) -> None:
        self._counts: dict[str, torch.Tensor] = {}
        self._copies: dict[str, int] = {}
        self._calls: Iterator[ExpertCall] = iter(())

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which what chunks route is counted."""
        with following_chunks(self), listening(self._note):
            yield

    def begin(self, graph: StageGraph) -> None:
        self._calls = iter(expert_calls(graph))

    def _note(self, expert_ids: torch.Tensor, num_experts: int) -> None:
        call = next(self._calls)
        ids = expert_ids.detach().flatten()
        places = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
        counts = torch.bincount(places, minlength=num_experts + 1)
        self._counts[call.path] = self._counts.get(call.path, 0) + counts
        self._copies[call.path] = call.num_copies

    def by_path(self) -> dict[str, tuple[list[int], int]]:
        """Counts, and on how many ranks and micro-batches the same tokens were counted; waits for the device."""
        return {path: (counts.tolist(), self._copies[path]) for path, counts in self._counts.items()}


_chunk_listeners: list[ChunkListener] = []


@contextlib.contextmanager
def following_chunks(listener: ChunkListener) -> Iterator[None]:
    """A context in which ``listener`` is told when a chunk begins."""
    _chunk_listeners.append(listener)
    try:
        yield
    finally:
        _chunk_listeners.remove(listener)


def chunk_begins(graph: StageGraph) -> None:
    """Tell those who count that a chunk begins to run a micro-batch."""
    for listener in _chunk_listeners:
        listener.begin(graph)


class DroppedTokens:
    """Whether any token went to no expert.

    Attributes:
        any: so far.
    """

    def __init__(self) -> None:
        self.any = False

    def note(self, expert_ids: torch.Tensor, num_experts: int) -> None:
        """Look at the experts of one operator's tokens, of every rank where all run in one process."""
        from runtime.torch_compat.local_tensors import parts_of_ranks

        goes_nowhere = (expert_ids.detach() < 0) | (expert_ids.detach() >= num_experts)
        parts = parts_of_ranks(goes_nowhere, ranks=(0,)).values()
        self.any = self.any or any(bool(flags.any()) for flags in parts)
