"""Outputs of frozen layers kept per sample: what was computed once is read in every later epoch."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cost_models import Cluster
from passes.plan import Plan
from planner.activation_cache.prefix_checks import CachedPrefix, checked_prefix
from planner.activation_cache.sample_keys import sample_keys, sum_of_weights
from planner.activation_cache.sample_ring import RingSizes, SampleRing, shared_ring
from planner.changing.freezing import BYTES_PER_SECOND, CacheRoom
from runtime.calls.frozen_prefix import AFTER, OUTPUT
from runtime.calls.model_call import ModelCall
from runtime.migration.move_price import REPLAN_SECONDS, ReplanDecision, check_question
from runtime.module.changing import WayToGoOn, nothing_more
from runtime.module.parallel_module import ParallelModule


@dataclass(frozen=True)
class CachePrice:
    """Predicted seconds of a step that computes the frozen layers, of one that does not, of reading their output."""

    computed: float
    cached: float
    reading: float

    @property
    def pays(self) -> bool:
        """Whether a hit takes less time than computing it."""
        return self.cached + self.reading < self.computed


class ActivationCache:
    """Keeps what frozen layers give for each sample, in memory and files that the processes of a node share.

    Samples are told apart by what the frozen layers read of them, so that any loader and any order will do, and samples
    that are augmented anew each time are never taken for each other. When there is no more room the oldest are
    overwritten. Entries stay valid under every plan; they are dropped when frozen weights change.

    Example:
        >>> cache = planner.ActivationCache(parallel, memory_bytes=64e9, disk_bytes=500e9, folder="/scratch")
        >>> for layer in ("embedding", "layers.0", "layers.1"):
        ...     parallel.get_submodule(layer).requires_grad_(False).eval()
        >>> cache.replan("dp=4", optimizer, after="layers.1")  # in the place of parallel.replan
        >>> loss = cache.train_step(**batch)  # in the place of parallel.train_step

    Args:
        parallel: of a model whose batches are passed by name.
        memory_bytes: of host memory, of each node.
        disk_bytes: of a file in ``folder``, of each node; it has no name, and is gone with the processes.
        folder: None: that of temporary files.
        bytes_per_second: that a node reads of the cache.

    Attributes:
        after: path of the module whose output is read or kept; None while nothing is.
        price: of the last ``replan``.
        hits, misses: samples of this rank whose frozen layers were not computed, and were.

    Raises:
        ValueError: for no room at all, or negative sizes.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        *,
        memory_bytes: float,
        disk_bytes: float = 0,
        folder: str | Path | None = None,
        bytes_per_second: float = BYTES_PER_SECOND,
    ) -> None:
        room = CacheRoom(memory_bytes, disk_bytes, folder, bytes_per_second)
        self.parallel = parallel
        self.after: str | None = None
        self.price: CachePrice | None = None
        self.hits = self.misses = 0
        self._bytes = int(room.memory_bytes), int(room.disk_bytes)
        self._folder = None if folder is None else Path(folder)
        self._bytes_per_second = room.bytes_per_second
        self._ring: SampleRing | None = None
        self._ring_key: Hashable = None
        self._prefix: CachedPrefix | None = None
        self._setting: Hashable = None
        self._weights = 0
        self._row_shape: tuple[int, ...] = ()

    def replan(
        self, target: Any, optimizer: Any = None, *, after: str | None, always: bool = False, **options: Any
    ) -> CachePrice | None:
        """``parallel.replan`` for a training whose layers up to module ``after`` are frozen, and perhaps cached.

        Two plans are made: one of a step that computes the frozen layers, and one of a step that takes their output.
        The second is gone on under if it takes less time with reading the output. All ranks must call it.

        Args:
            target, optimizer, options: as of ``parallel.replan``, of all ranks at work.
            after: None: nothing is cached from now on.
            always: take the second without asking what it costs.

        Returns:
            the price that decided, None if nothing was to be decided.

        Raises:
            ValueError: as ``parallel.replan``; for layers that train, draw random numbers, write buffers, mix samples.
        """
        example: Mapping[str, Any] = self.parallel.prefix_call(options.pop("example_inputs", None)).kwargs
        if after is None:
            self.parallel.replan(target, optimizer, **{**options, "example_inputs": dict(example)})
            self.after, self.price = None, None
            return None
        behind, num_bytes = self._behind(after, example)
        reading: list[float] = []

        def read(plan: Plan) -> float:
            reading.append(self._seconds_of_reading(plan, num_bytes))
            return reading[-1]

        cached_options = {**with_pinned_output(options, self.parallel.inputs_behind(behind)), "example_inputs": behind}
        state = {name: options.pop(name) for name in ("averages", "carried") if name in options}
        if always:
            self.parallel.replan_prefix(target, optimizer, [cached_options], [read], **state)
            self.after, self.price = after, None
        else:
            # Of equals the first is taken, which computes.
            ways, more = [{**options, "example_inputs": dict(example)}, cached_options], [nothing_more, read]
            (computed, cached), _ = self.parallel.replan_prefix(target, optimizer, ways, more, **state)
            self.price = CachePrice(computed, cached - reading[-1], reading[-1])
            self.after = after if self.price.pays else None
        self._prefix, self._setting = None, None
        return self.price

    def replan_if_it_pays(
        self,
        targets: Sequence[Any],
        optimizer: Any = None,
        *,
        after: str,
        remaining_steps: int,
        steps_of_epoch: int,
        replan_seconds: float = REPLAN_SECONDS,
        averages: Any = (),
        carried: Any = (),
        **options: Any,
    ) -> ReplanDecision:
        """``parallel.replan_if_it_pays`` over two plans for each target: with the frozen layers computed, and cached.

        A step that reads the cache takes what its plan predicts and the reading; ``steps_of_epoch`` of them, which fill
        it, as long as if the layers were computed. Where the cache lacks room for an epoch's samples, which are read in
        any order, they would be overwritten before they are read: it is then no choice.

        Args:
            targets, optimizer, remaining_steps, replan_seconds, averages, carried, options: as there.
            after: path of the module up to which layers are frozen.
            steps_of_epoch: until each sample was seen once.

        Raises:
            ValueError: as there; for layers that train, draw random numbers, write buffers, mix samples.
        """
        check_question(targets, remaining_steps, replan_seconds)
        example: Mapping[str, Any] = self.parallel.prefix_call(options.pop("example_inputs", None)).kwargs
        behind, num_bytes = self._behind(after, example)
        reading_now = 0.0
        if self.after is not None:
            _, bytes_now = self._behind(self.after, example)
            reading_now = self._seconds_of_reading(self.parallel.plan, bytes_now)
        has_room = num_bytes * steps_of_epoch <= sum(self._bytes)

        def read(plan: Plan) -> float:
            return self._seconds_of_reading(plan, num_bytes)

        ways = []
        for target in targets:
            ways.append(WayToGoOn(target, {**options, "example_inputs": dict(example)}, replan_seconds))
            if has_room:
                words, slow = f", cached behind {after}", min(steps_of_epoch, remaining_steps)
                cached = {**with_pinned_output(options, self.parallel.inputs_behind(behind)), "example_inputs": behind}
                ways.append(WayToGoOn(target, cached, replan_seconds, read, words, slow))
        decision, taken = self.parallel.replan_prefix_if_it_pays(
            ways,
            optimizer,
            remaining_steps=remaining_steps,
            reading_now=reading_now,
            averages=averages,
            carried=carried,
        )
        if taken is not None:
            self.after, self.price = after if taken.words else None, None
        self._prefix, self._setting = None, None
        return decision

    def state_dict(self) -> dict[str, Any]:
        """What processes that join a training take up of those at work (``carried`` of ``parallel.replan``)."""
        return {"after": self.after}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what another process's ``state_dict`` says; what it has kept is found at the next step."""
        self.after, self.price = state["after"], None
        self._prefix, self._setting = None, None

    def _behind(self, after: str, example: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """Example arguments of a step that takes the output of ``after``, and the bytes of that."""
        prefix = self._checked(after, example)
        output = torch.empty(prefix.shape, dtype=getattr(torch, prefix.dtype), device="meta")
        return {**example, AFTER: after, OUTPUT: output}, output.nbytes

    def train_step(self, *, local_inputs: bool = False, weight: float | None = None, **batch: Any) -> torch.Tensor:
        """``parallel.train_step``, for which frozen layers are computed only if a sample of the batch is not cached.

        Raises:
            ValueError: on all ranks, as ``parallel.train_step``; for frozen layers that do not stay as they are; for
                outputs of several shapes.
        """
        parallel, after = self.parallel, self.after
        if after is None:
            loss: torch.Tensor = parallel.train_step(**batch, local_inputs=local_inputs, weight=weight)
            return loss
        keys, rows, has_all = self._looked_up(after, batch)
        if not has_all:
            whole = parallel.prefix_output(after, batch, local_inputs=local_inputs)
            rows = parallel.ranks_at_work.together(lambda: self._own(whole, len(keys), local_inputs))
            self._keep(keys, rows)
        assert rows is not None
        self.hits += len(keys) * has_all
        self.misses += len(keys) * (not has_all)
        return parallel.train_behind(after, rows, batch, local_inputs=local_inputs, weight=weight)

    def _checked(self, after: str, example: Mapping[str, Any]) -> CachedPrefix:
        graph = self.parallel.prefix_graph(after, example)
        return checked_prefix(graph, after, self.parallel.what_trains())

    def _looked_up(self, after: str, batch: Mapping[str, Any]) -> tuple[list[bytes], torch.Tensor | None, bool]:
        """Keys of this rank's samples, what is kept of them if all of it is, and whether that is so on all ranks."""
        ranks, call = self.parallel.ranks_at_work, self.parallel.prefix_call(batch)
        while True:
            keys, rows, own_weights, error = list[bytes](), None, 0, None
            changed = self._prefix is None or self.parallel.prefix_setting() != self._setting
            if self._prefix is not None and not changed:
                own_weights = sum_of_weights(self.parallel.owned(), self._prefix.states)
                try:
                    keys = self._keys(call, self._prefix, after)
                    rows = self._read(keys, self._prefix)
                except ValueError as problem:
                    error = problem
            by_rank = ranks.gathered((changed, rows is not None, own_weights, self._weights, error and str(error)))
            if any(each[0] for each in by_rank):
                self._look_again(after)
                continue
            if error is not None:
                raise error
            for number, (*_, message) in zip(ranks.numbers, by_rank):
                if message is not None:
                    raise ValueError(f"rank {number}: {message}")
            weights = sum(each[2] for each in by_rank) % 2**64
            if all(each[3] == weights for each in by_rank):  # one that has joined knows of none yet
                return keys, rows, all(each[1] for each in by_rank)
            self._weights = weights  # other keys

    def _look_again(self, after: str) -> None:
        """Modes, attributes or the plan are others than at the last step: look at the frozen layers once more."""
        ranks = self.parallel.ranks_at_work
        self._prefix = self._checked(after, self.parallel.prefix_call().kwargs)
        self._setting = self.parallel.prefix_setting()
        own = None if self._ring is None else (self._ring.sizes, self._ring_key, self._row_shape)
        rings = [each for each in ranks.gathered(own) if each is not None]
        if rings:
            sizes, self._ring_key, self._row_shape = rings[0]
            self._ring = shared_ring(ranks, self._ring, sizes, self._folder)

    def _keys(self, call: ModelCall, prefix: CachedPrefix, after: str) -> list[bytes]:
        common = f"{after} {prefix.dtype} {self._weights} {self.parallel.constants_read}"
        return sample_keys(call, prefix.paths, prefix.by_row, common)

    def _read(self, keys: list[bytes], prefix: CachedPrefix) -> torch.Tensor | None:
        """What is kept of samples, if it is kept of all."""
        raw = None if self._ring is None else self._ring.read(keys)
        if raw is None:
            return None
        return raw.reshape(-1).view(getattr(torch, prefix.dtype)).reshape(len(keys), *self._row_shape)

    def _own(self, whole: torch.Tensor, num_rows: int, local_inputs: bool) -> torch.Tensor:
        """This rank's samples of what was computed for all."""
        parts = self.parallel.num_data_ranks if local_inputs else 1
        if whole.shape[0] != parts * num_rows:
            raise ValueError(
                f"the frozen layers gave {whole.shape[0]} rows for {parts} × {num_rows} samples: activations are "
                "cached by rows, one for each sample"
            )
        first = self.parallel.data_rank * num_rows if local_inputs else 0
        return whole[first : first + num_rows].cpu().contiguous()

    def _keep(self, keys: list[bytes], rows: torch.Tensor) -> None:
        shape = tuple(rows.shape[1:])
        if self._ring is None or self._ring_key != (self.after, shape, rows.dtype):
            ranks = self.parallel.ranks_at_work
            ranks.together(lambda: self._check_shape(shape, rows.dtype))
            num_bytes = math.prod(shape) * rows.element_size()
            if self._ring is None or self._ring.sizes.row_bytes != num_bytes:
                self._ring = None
                self._ring = self._shared(num_bytes)
            self._ring_key, self._row_shape = (self.after, shape, rows.dtype), shape
        self._ring.write(keys, rows.reshape(len(keys), -1).view(torch.uint8))

    def _check_shape(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if isinstance(self._ring_key, tuple) and self._ring_key[0] == self.after and self._ring is not None:
            raise ValueError(
                f"the frozen layers gave rows of shape {list(shape)} ({dtype}) after {list(self._ring_key[1])} "
                f"({self._ring_key[2]}): activations are cached of samples of one length (pad_to=(…,) of the loader)"
            )

    def _shared(self, row_bytes: int) -> SampleRing:
        memory, disk = (num_bytes // max(1, row_bytes) for num_bytes in self._bytes)
        ranks = self.parallel.ranks_at_work

        def sizes() -> RingSizes:
            if memory + disk == 0:
                raise ValueError(f"an output takes {row_bytes:,} bytes, more than memory_bytes and disk_bytes have")
            return RingSizes(row_bytes, memory, disk)

        return shared_ring(ranks, self._ring, ranks.together(sizes), self._folder)

    def _seconds_of_reading(self, plan: Plan, num_bytes: int) -> float:
        """Of the output for a global batch: each process of a node reads its samples' rows, one after the other."""
        cluster = Cluster.from_dict(plan.cluster)
        processes = min(cluster.levels[0].group_size if cluster.levels else 1, cluster.num_devices)
        groups = max(1, plan.step.sample_groups)
        return num_bytes / groups * processes / self._bytes_per_second


def with_pinned_output(options: Mapping[str, Any], inputs_read: Collection[str]) -> dict[str, Any]:
    """Options of a step that takes the output of frozen layers: that is cut as inputs with samples are, if one is.

    Args:
        inputs_read: keys of the inputs that such a step still reads; pins of others would match nothing.
    """
    constraints = dict(options.get("constraints") or {})
    pins = {pattern: pin for pattern, pin in constraints.items() if pattern.startswith("input:")}
    cut = next((pin for pin in pins.values() if "S(0)" in dict(pin).values()), None)
    if cut is None:
        return dict(options)
    keys = [f"input:{key}" for key in inputs_read]
    for pattern in pins:
        if not any(fnmatch.fnmatchcase(key, pattern) for key in keys):
            del constraints[pattern]
    if not any(fnmatch.fnmatchcase(f"input:{OUTPUT}", pattern) for pattern in constraints):
        constraints[f"input:{OUTPUT}"] = cut
    return {**options, "constraints": constraints}
