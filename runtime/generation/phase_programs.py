"""Programs of one setting of generation (rows, prompt, cache) on this rank, and the cache that they fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from passes.ir.types import Placement, R, shard_dim
from runtime import ops
from runtime.calls.model_call import ModelCall, read_call
from runtime.execution.chunk import InputOf, in_order_of_use
from runtime.execution.engine import Engine
from runtime.execution.outputs import whole_output
from runtime.execution.prepared_programs import Prepared
from runtime.execution.program_builder import Maker
from runtime.generation.cache_layout import ROWS, CacheTensor, cache_placement, planned_buffers, rows_divisor
from runtime.generation.phase_models import LAST, POSITION, cache_tensors, prompt_model, token_model
from runtime.generation.slot_check import BY_TOKEN
from runtime.state.owned import rectangle


@dataclass(frozen=True)
class Prompt:
    """What generation begins with: a call of the model, as every rank hears of it.

    Attributes:
        tensors: the model's inputs by name, and ``LAST``: the place in it whose logits are asked for, int64 [1].
        constants: its arguments that are no tensors.
        rows: samples times beams.
        length: slots of the cache.
        encoder_shape: of what the encoder gives, None without one.
        per_row: by inputs that have another number of entries for each row than one (images), how many.
    """

    tensors: dict[str, torch.Tensor]
    constants: dict[str, Any]
    rows: int
    length: int
    encoder_shape: tuple[int, ...] | None = None
    per_row: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for prompts that the same programs serve."""
        shapes = tuple((name, tuple(t.shape), t.dtype) for name, t in sorted(self.tensors.items()))
        per_row = tuple(sorted(self.per_row.items()))
        return shapes, tuple(sorted(self.constants.items())), self.length, self.encoder_shape, per_row


class CacheMemory(Mapping[str, torch.Tensor]):
    """This rank's parts of the cache by path; each is made when a program of this rank asks for it."""

    def __init__(self, tensors: tuple[CacheTensor, ...], engine: Engine) -> None:
        assert engine.plan is not None
        self._tensors = {tensor.path: tensor for tensor in tensors}
        self.placements = {path: cache_placement(tensor, engine.plan) for path, tensor in self._tensors.items()}
        self._places = engine.places
        self.parts: dict[str, torch.Tensor] = {}

    def __getitem__(self, path: str) -> torch.Tensor:
        if path not in self.parts:
            tensor = self._tensors[path]
            shape = self._places.own_shape(tensor.shape, self.placements[path])
            self.parts[path] = torch.zeros(shape, dtype=tensor.dtype, device=self._places.layout.device)
        return self.parts[path]

    def __contains__(self, path: object) -> bool:
        return path in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @torch.no_grad()
    def reorder(self, rows: torch.Tensor) -> None:
        """Replace each row of the whole batch by another, int64 [rows]."""
        layout = self._places.layout
        for path, part in self.parts.items():
            by_rows: Placement = tuple(kind if shard_dim(kind) == ROWS else R for kind in self.placements[path])
            (first,), (count,) = rectangle((len(rows),), by_rows, layout.mesh, layout.coordinate)
            if count == len(rows):
                part.copy_(part.index_select(0, rows))
                continue
            # Whether rows move between ranks is the same on all: each looks at the whole list.
            if bool((rows // count == torch.arange(len(rows), device=rows.device) // count).all()):
                part.copy_(part.index_select(0, rows[first : first + count] - first))
            else:
                whole = whole_output(part, by_rows, layout, (len(rows), *part.shape[1:]))
                part.copy_(whole.index_select(0, rows[first : first + count]))


class PhasePrograms:
    """A prompt's program and that of each token behind it, over one cache.

    Args:
        prompt: the first one; others of its ``key`` may follow.

    Raises:
        ValueError: as ``cache_tensors``, and for a plan that cannot divide the rows.
    """

    def __init__(self, engine: Engine, prompt: Prompt) -> None:
        assert engine.plan is not None
        self.engine = engine
        #: Set by the loop on the first rank.
        self.is_checked = False
        divisor = rows_divisor(engine.plan)
        self.rows, self.per_row = prompt.rows, prompt.per_row
        #: With rows that repeat the last one, so that the ranks divide them.
        self.padded_rows = -(-prompt.rows // divisor) * divisor
        tensors = self._padded(prompt.tensors)
        described = {name: tensor for name, tensor in tensors.items() if name != LAST}
        self.tensors = cache_tensors(engine.model, described, prompt.constants, length=prompt.length)
        self.memory = CacheMemory(self.tensors, engine)
        encoder_shape = prompt.encoder_shape
        encoder_shape = None if encoder_shape is None else (self.padded_rows, *encoder_shape[1:])
        self._models = {
            LAST: prompt_model(engine.model, self.tensors, prompt.constants),
            POSITION: token_model(engine.model, self.tensors, prompt.constants, encoder_shape=encoder_shape),
        }
        self._inputs: dict[str, torch.Tensor] = {}
        self._makers = {phase: self._maker(phase) for phase in self._models}
        self._prepared: dict[str, Prepared] = {}
        #: Programs, by identity, that have run in this generation.
        self._is_fresh: set[int] = set()

    def _maker(self, phase: str) -> Maker:
        def input_of(program: Any) -> InputOf:
            places = self.engine.places

            def part(spec: Any, microbatch: int) -> torch.Tensor:
                whole = self._inputs[str(spec.path[0])]
                return places.to_device(places.input_part(whole, spec.placement, program.mesh, lambda at: at))

            return part

        plan = self.engine.plan
        assert plan is not None
        return self.engine.programs_of(
            self._models[phase], input_of=input_of, scratch=self.memory, planned=planned_buffers(self.tensors, plan)
        )

    def start(self) -> None:
        """A new generation: weights may have changed since the last."""
        self._is_fresh.clear()

    @torch.no_grad()
    def run(self, phase: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The logits [rows, 1, vocabulary] of a prompt (``LAST``) or a token (``POSITION``), on every rank."""
        self._inputs = self._padded(tensors)
        maker = self._makers[phase]
        if phase not in self._prepared or maker.cases.read_values:
            self._prepared[phase] = maker.prepare(self._call(phase), training=False, local_inputs=False)
        prepared = self._prepared[phase]
        if id(prepared) not in self._is_fresh:
            self._is_fresh.add(id(prepared))
            prepared.follow_literals()
            prepared.forget_constants()
            for unit in in_order_of_use(prepared.stages):
                unit.refresh_needed()
        ops.begin_step(training=False)
        (spec,) = prepared.last.outputs
        local = prepared.execution.forward()[spec.path]
        return whole_output(local, spec.placement, self.engine.layout, spec.shape)[: self.rows]

    def reorder(self, rows: torch.Tensor) -> None:
        """Replace the cache's rows by others, int64 [rows]."""
        extra = torch.arange(self.rows, self.padded_rows)
        self.memory.reorder(torch.cat([rows.cpu(), extra]).to(self.engine.layout.device))

    def _call(self, phase: str) -> ModelCall:
        return read_call(self._models[phase].forward, (), self._inputs)

    def _padded(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        extra = self.padded_rows - self.rows
        return {name: self._with_rows(name, tensor, extra) for name, tensor in tensors.items()}

    def _with_rows(self, name: str, tensor: torch.Tensor, extra: int) -> torch.Tensor:
        """A tensor with its last row ``extra`` times more, if it has rows."""
        if name in self.per_row:
            return torch.cat([tensor, *[tensor[-self.per_row[name] :]] * extra])
        dim = tensor.dim() - 2 if name in BY_TOKEN else 0  # of position_ids there may be several kinds
        if not extra or name in (LAST, POSITION) or not tensor.dim() or tensor.shape[dim] != self.rows:
            return tensor
        last = tensor.narrow(dim, self.rows - 1, 1)
        return torch.cat([tensor, *[last] * extra], dim)
