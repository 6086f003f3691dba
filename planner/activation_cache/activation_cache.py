"""Outputs of frozen layers kept per sample: what was computed once is read in every later epoch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from passes.plan import Plan
from planner.activation_cache.cached_step_prices import (
    CachePrice,
    cached_behind,
    seconds_of_reading,
    with_pinned_output,
)
from planner.activation_cache.earlier_rows import EarlierRows, KeptBoundary, leads_to
from planner.activation_cache.prefix_checks import CachedPrefix, checked_prefix
from planner.activation_cache.sample_keys import sample_keys, sum_of_weights
from planner.activation_cache.sample_ring import RingSizes, SampleRing, shared_ring
from planner.changing.freezing import BYTES_PER_SECOND, CacheRoom
from runtime.calls.content_keys import content_of
from runtime.calls.frozen_prefix import AFTER, OUTPUT
from runtime.calls.model_call import ModelCall
from runtime.migration.move_price import REPLAN_SECONDS, ReplanDecision, check_question
from runtime.module.changing import WayToGoOn, nothing_more
from runtime.module.parallel_module import ParallelModule


class ActivationCache:
    """Keeps what frozen layers give for each sample, in memory and files that the processes of a node share.

    Samples are told apart by what the frozen layers read of them, so that any loader and any order will do, and samples
    that are augmented anew each time are never taken for each other. When there is no more room the oldest are
    overwritten. Entries stay valid under every plan; they are dropped when frozen weights change. Behind a deeper
    boundary those of the one before are made into deeper ones, in the same places, where that is cheaper than to
    compute all frozen layers.

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
        converted: samples whose frozen layers were computed from the boundary before.

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
        self._room = CacheRoom(memory_bytes, disk_bytes, folder, bytes_per_second)
        self.parallel = parallel
        self.after: str | None = None
        self.price: CachePrice | None = None
        self.hits = self.misses = self.converted = 0
        self._folder = None if folder is None else Path(folder)
        self._ring: SampleRing | None = None
        #: What the ring's rows are, after how many steps of this boundary, and of which there may be some from before.
        self._kept: KeptBoundary | None = None
        self._num_steps = 0
        self._earlier: KeptBoundary | None = None
        #: Whether rows of the earlier boundary are made into deeper ones.
        self._converts = False
        self._earlier_prefix: CachedPrefix | None = None
        self._prefix: CachedPrefix | None = None
        self._setting: Hashable = None
        self._weights = 0

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
        state = {name: options.pop(name) for name in ("averages", "carried") if name in options}
        earlier = self._leading_to(after, example)
        cached, num_bytes = self._options_behind(after, example, options)
        readings: list[float] = []

        def read(plan: Plan) -> float:
            readings.append(seconds_of_reading(plan, num_bytes, self._room.bytes_per_second))
            return readings[-1]

        if always:
            self.parallel.replan_prefix(target, optimizer, [cached], [read], **state)
            self.price = None
            self._begin(after, earlier, converts=True)
            return None
        # Of equals the first is taken, which computes; the third says only what it takes to convert.
        ways, more = [{**options, "example_inputs": dict(example)}, cached], [nothing_more, read]
        if earlier is not None:
            ways.append(self._options_behind(earlier.after, example, options)[0])
            more.append(read)
        seconds, _ = self.parallel.replan_prefix(target, optimizer, ways, more, num_choices=2, **state)
        self.price = CachePrice(seconds[0], seconds[1] - readings[0], readings[0], *seconds[2:])
        self._begin(after if self.price.pays else None, earlier, converts=self.price.converts)
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
        required: bool = True,
        **options: Any,
    ) -> ReplanDecision:
        """``parallel.replan_if_it_pays`` over several plans a target: with the frozen layers computed, and cached.

        A step that reads the cache takes what its plan predicts and the reading; ``steps_of_epoch`` of them, which fill
        it, as long as if the layers were computed. Where outputs of an earlier boundary are kept of all samples, there
        is a third plan, which reads those; and to fill takes no longer than that. Where the cache lacks room for an
        epoch's samples, which are read in any order, they would be overwritten before they are read: it is then no
        choice, and the decision says why.

        Args:
            targets, optimizer, remaining_steps, replan_seconds, averages, carried, options: as there.
            after: path of the module up to which layers are frozen.
            steps_of_epoch: until each sample was seen once.
            required: raise for layers that cannot be cached; else the decision says why.

        Raises:
            ValueError: as there; for layers that train, draw random numbers, write buffers, mix samples.
        """
        check_question(targets, remaining_steps, replan_seconds)
        example: Mapping[str, Any] = self.parallel.prefix_call(options.pop("example_inputs", None)).kwargs
        earlier, cached, num_bytes, obstacle = None, dict[str, Any](), 0, ""
        try:
            earlier = self._leading_to(after, example)
            cached, num_bytes = self._options_behind(after, example, options)
        except ValueError as error:
            if required:
                raise
            obstacle = str(error)
        try:
            self._room.check_epoch(num_bytes, steps_of_epoch)
        except ValueError as error:
            obstacle = str(error)
        reading_now = 0.0 if self.after is None else self._reading_now(example)
        is_filled = earlier is not None and self._num_steps >= steps_of_epoch

        def read(plan: Plan) -> float:
            return seconds_of_reading(plan, num_bytes, self._room.bytes_per_second)

        ways: list[WayToGoOn] = []
        boundaries: list[str | None] = []
        filling = min(steps_of_epoch, remaining_steps)
        for target in targets:
            own = [WayToGoOn(target, {**options, "example_inputs": dict(example)}, replan_seconds)]
            if earlier is not None and is_filled:
                kept, _ = self._options_behind(earlier.after, example, options)
                own.append(WayToGoOn(target, kept, replan_seconds, read, cached_behind(earlier.after)))
            words = cached_behind(after)
            own.append(WayToGoOn(target, cached, replan_seconds, read, words, filling, len(own), obstacle))
            ways += own
            boundaries += [None, *([] if len(own) == 2 or earlier is None else [earlier.after]), after]
        decision, taken = self.parallel.replan_prefix_if_it_pays(
            ways,
            optimizer,
            remaining_steps=remaining_steps,
            reading_now=reading_now,
            averages=averages,
            carried=carried,
        )
        if taken is not None:
            chosen, self.price = decision.chosen, None
            prices, converts = decision.prices, False
            if boundaries[chosen - 1] == after and is_filled:
                converts = prices[chosen - 1].step_seconds < prices[chosen - 2].step_seconds
            self._begin(boundaries[chosen - 1], earlier, converts=converts)
        self._prefix, self._setting = None, None
        return decision

    def state_dict(self) -> dict[str, Any]:
        """What processes that join a training take up of those at work (``carried`` of ``parallel.replan``)."""
        boundaries = [None if one is None else one.to_state() for one in (self._kept, self._earlier)]
        return {"after": self.after, "boundaries": boundaries, "converts": self._converts, "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what another process's ``state_dict`` says; what it has kept is found at the next step."""
        self.after, self.price = state["after"], None
        self._converts, self._num_steps = state["converts"], state["num_steps"]
        self._kept, self._earlier = (None if one is None else KeptBoundary.of_state(one) for one in state["boundaries"])
        self._prefix, self._setting = None, None

    def _begin(self, after: str | None, earlier: KeptBoundary | None, *, converts: bool) -> None:
        """From now on outputs of ``after`` are read and kept, or none."""
        self.after = after
        if earlier is not None and earlier.after == after:
            earlier = None
        if after is not None:
            self._earlier, self._converts = earlier, converts and earlier is not None
        self._prefix, self._setting = None, None

    def _leading_to(self, after: str, example: Mapping[str, Any]) -> KeptBoundary | None:
        """The earlier boundary whose kept outputs give those of ``after``, if there is one; all ranks must ask."""
        kept = self._earlier if self._kept is not None and self._kept.after == after else self._kept
        if kept is None or kept.after == after:
            return None
        try:
            prefix = self._checked(kept.after, example)
        except ValueError:  # its layers train again
            return None
        is_alike = (kept.shape, kept.dtype) == (prefix.shape[1:], getattr(torch, prefix.dtype))
        deeper = self._checked(after, example)
        leads = leads_to(self.parallel, prefix, kept.after, deeper, after, example)
        return kept if is_alike and leads else None

    def _options_behind(
        self, after: str, example: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int]:
        """Options of a plan of a step that takes the output of ``after``, and the bytes of that."""
        behind, num_bytes = self._behind(after, example)
        pinned = with_pinned_output(options, self.parallel.inputs_behind(behind))
        return {**pinned, "example_inputs": behind}, num_bytes

    def _reading_now(self, example: Mapping[str, Any]) -> float:
        assert self.after is not None
        _, num_bytes = self._behind(self.after, example)
        return seconds_of_reading(self.parallel.plan, num_bytes, self._room.bytes_per_second)

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
        self._num_steps += 1
        if has_all:
            self.hits += len(keys)
        else:
            rows = self._made(after, batch, keys, local_inputs)
        assert rows is not None
        return parallel.train_behind(after, rows, batch, local_inputs=local_inputs, weight=weight)

    def _made(self, after: str, batch: Mapping[str, Any], keys: list[bytes], local_inputs: bool) -> torch.Tensor:
        """Compute this rank's samples' outputs and keep them: from what is kept of them, or from the start."""
        parallel, earlier = self.parallel, self._earlier_rows(batch, keys)
        given = None if earlier is None else (earlier.after, earlier.rows)
        whole = parallel.prefix_output(after, batch, local_inputs=local_inputs, given=given)
        rows = parallel.ranks_at_work.together(lambda: self._own(whole, len(keys), local_inputs))
        if earlier is None:
            self.misses += len(keys)
        else:
            self.converted += len(keys)
            deeper = torch.tensor(earlier.are_deeper)
            rows[deeper] = earlier.rows[deeper]
        self._keep(keys, rows, None if earlier is None else earlier.keys)
        return rows

    def _earlier_rows(self, batch: Mapping[str, Any], keys: list[bytes]) -> EarlierRows | None:
        """What is kept of this rank's samples behind the earlier boundary, if there is something of all on all ranks.

        When it returns all ranks have read, so that rows may be put in the place of those.
        """
        earlier, prefix, ring = self._earlier, self._earlier_prefix, self._ring
        if earlier is None or prefix is None or ring is None:
            return None
        ranks, call = self.parallel.ranks_at_work, self.parallel.prefix_call(batch)
        weights = sum(ranks.gathered(sum_of_weights(self.parallel.owned(), prefix.states))) % 2**64

        def read() -> tuple[list[bytes], list[bool], torch.Tensor | None]:
            own = self._keys(call, prefix, earlier.after, weights)
            are_deeper = ring.has(keys)
            chosen = [new if deeper else old for new, old, deeper in zip(keys, own, are_deeper)]
            return own, are_deeper, self._read(chosen, prefix, earlier.shape)

        own, are_deeper, rows = ranks.together(read)
        if not all(ranks.gathered(rows is not None)) or rows is None:
            return None
        return EarlierRows(earlier.after, own, rows, are_deeper)

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
                    keys = self._keys(call, self._prefix, after, self._weights)
                    rows = self._read(keys, self._prefix, self._row_shape)
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
            self._weights, self._num_steps = weights, 0  # other keys

    def _look_again(self, after: str) -> None:
        """Modes, attributes or the plan are others than at the last step: look at the frozen layers once more."""
        ranks = self.parallel.ranks_at_work
        example = self.parallel.prefix_call().kwargs
        converts = self._earlier is not None and self._converts
        self._earlier_prefix = self._checked(self._earlier.after, example) if self._earlier and converts else None
        self._prefix = self._checked(after, example)
        self._setting = self.parallel.prefix_setting()
        own = None if self._ring is None else (self._ring.sizes, self._kept)
        rings = [each for each in ranks.gathered(own) if each is not None]
        if rings:
            sizes, self._kept = rings[0]
            self._ring = shared_ring(ranks, self._ring, sizes, self._folder)

    def _keys(self, call: ModelCall, prefix: CachedPrefix, after: str, weights: int) -> list[bytes]:
        constants = [content_of(tensor) for tensor in prefix.constants]
        common = f"{after} {prefix.dtype} {weights} {self.parallel.constants_read} {constants}"
        return sample_keys(call, prefix.paths, prefix.by_row, common)

    @property
    def _row_shape(self) -> tuple[int, ...]:
        return () if self._kept is None else self._kept.shape

    def _read(self, keys: list[bytes], prefix: CachedPrefix, shape: tuple[int, ...]) -> torch.Tensor | None:
        """What is kept of samples, if it is kept of all."""
        raw = None if self._ring is None else self._ring.read(keys)
        if raw is None:
            return None
        return raw.reshape(-1).view(getattr(torch, prefix.dtype)).reshape(len(keys), *shape)

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

    def _keep(self, keys: list[bytes], rows: torch.Tensor, replaced: list[bytes] | None) -> None:
        assert self.after is not None
        kept = KeptBoundary(self.after, tuple(rows.shape[1:]), rows.dtype)
        if self._ring is None or self._kept != kept:
            ranks = self.parallel.ranks_at_work
            ranks.together(lambda: self._check_shape(kept))
            num_bytes = math.prod(kept.shape) * rows.element_size()
            if self._ring is None or self._ring.sizes.row_bytes != num_bytes:
                self._ring, self._earlier = None, None
                self._ring = self._shared(num_bytes)
            self._kept, self._num_steps = kept, 1
        self._ring.write(keys, rows.reshape(len(keys), -1).view(torch.uint8), replaced=replaced)

    def _check_shape(self, rows: KeptBoundary) -> None:
        kept = self._kept
        if kept is not None and kept.after == rows.after and self._ring is not None:
            raise ValueError(
                f"the frozen layers gave rows of shape {list(rows.shape)} ({rows.dtype}) after {list(kept.shape)} "
                f"({kept.dtype}): activations are cached of samples of one length (pad_to=(…,) of the loader)"
            )

    def _shared(self, row_bytes: int) -> SampleRing:
        sizes_in_all = int(self._room.memory_bytes), int(self._room.disk_bytes)
        memory, disk = (num_bytes // max(1, row_bytes) for num_bytes in sizes_in_all)
        ranks = self.parallel.ranks_at_work

        def sizes() -> RingSizes:
            if memory + disk == 0:
                raise ValueError(f"an output takes {row_bytes:,} bytes, more than memory_bytes and disk_bytes have")
            return RingSizes(row_bytes, memory, disk)

        return shared_ring(ranks, self._ring, ranks.together(sizes), self._folder)
