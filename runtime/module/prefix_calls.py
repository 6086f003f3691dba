"""A parallel module whose frozen first layers need not be computed: see ``runtime.calls.frozen_prefix``."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from passes.ir.graph import Graph
from passes.plan import Plan
from passes.shard import input_key
from runtime.calls.frozen_prefix import AFTER, FROM, OUTPUT, take_frozen_outputs, without_prefix
from runtime.calls.model_call import ModelCall, read_call
from runtime.calls.modes import SubmoduleModes
from runtime.execution.engine import Engine
from runtime.migration.move_price import ReplanDecision, step_seconds
from runtime.migration.state_entries import Averages
from runtime.migration.transfer_plan import TransferPlan
from runtime.module.changing import Changing, Optimizers, WayToGoOn
from runtime.module.meeting import Stateful

#: Path of a module, and what it gave.
GivenOutput = tuple[str, torch.Tensor]


class PrefixCalls(Changing):
    """Goes before ``nn.Module`` among the bases of ``ParallelModule``."""

    _modes: SubmoduleModes
    #: Names of inputs of frozen layers whose outputs are cached: every rank is handed them.
    _prefix_inputs: frozenset[str] = frozenset()

    def prefix_call(self, batch: Mapping[str, Any] | None = None) -> ModelCall:
        """A call by name, without what is said of the frozen layers.

        Args:
            batch: its arguments; None: those that were planned for, without data.

        Raises:
            ValueError: before the first plan, or if arguments cannot be given by name.
        """
        forward, args = self._engine.model.forward, ()
        if batch is None:
            if self._engine.example is None:
                raise ValueError("there is no plan yet: give example_inputs to planner.compile, or call train_step")
            call = read_call(forward, self._engine.example.args, self._engine.example.kwargs)
            args, batch = call.args, call.kwargs
        if args:
            raise ValueError("activations are cached for models whose batches are passed by name: train_step(**batch)")
        return read_call(forward, (), without_prefix(batch))

    def prefix_graph(self, after: str, batch: Mapping[str, Any], given: GivenOutput | None = None) -> Graph:
        """The graph that computes the output of module ``after`` of a global batch; all ranks must ask for it.

        Args:
            given: an earlier module, and its output, to begin with.

        Raises:
            ValueError: for a module that the model has not; as a call does.
        """
        engine = self._engine
        if after not in dict(engine.model.named_modules()):
            raise ValueError(f"the model has no module {after!r} whose output could be cached")
        take_frozen_outputs(engine.model)
        self.prefix_setting()
        graph = engine.graph_of((), {**batch, AFTER: after, **_arguments_of(given)})
        if given is None:
            self._prefix_inputs = frozenset(str(path[0]) for path in graph.input_paths)
        return graph

    def inputs_behind(self, batch: Mapping[str, Any]) -> list[str]:
        """Keys of the inputs that a step reads which takes the output of the frozen layers; all ranks must ask."""
        return [input_key(path) for path in self._engine.graph_of((), dict(batch)).input_paths]

    def prefix_setting(self) -> Hashable:
        """What the graph of the frozen layers depends on beside the call; equal as long as it stays."""
        modes = self._modes.follow()
        if modes is not None:
            self._engine.watch.other_modes = modes
        self._engine.watch.update()
        return id(self._engine), self._engine.model.training, self._engine.watch.key

    @property
    def constants_read(self) -> str:
        """What the code reads that is other than when it was compiled, in words that are the same on all ranks."""
        return repr(sorted(self._engine.watch.other_values))

    def what_trains(self) -> dict[str, bool]:
        """By each name of a parameter, whether it trains now; all ranks must ask."""
        by_rank = self._engine.ranks.gathered(self._tree.frozen_or_thawed())
        changed = {name: trains for own in by_rank for name, trains in own}
        infos = self._engine.state.infos
        return {name: changed.get(info.names[0], info.trainable) for name, info in infos.items() if info.is_parameter}

    def replan_prefix(
        self,
        target: Any,
        optimizer: Optimizers,
        ways: Sequence[Mapping[str, Any]],
        seconds_more: Sequence[Callable[[Plan], float]],
        *,
        num_choices: int | None = None,
        averages: Averages | Sequence[Averages] = (),
        carried: Stateful | Sequence[Stateful] = (),
    ) -> tuple[list[float], TransferPlan]:
        """Go on under that of several plans whose step takes the least time.

        Args:
            ways: options of each, as of ``replan``.
            seconds_more: of a step of each, beside what its plan predicts.
            num_choices: so many of them, the first ones, may be gone on under; of the others only the seconds are
                asked for, infinite where there is no plan. None: all.

        Returns:
            the seconds of each, and what moved to the first choice that has the least.
        """
        num_choices = len(ways) if num_choices is None else num_choices
        optimizers = _optimizers(optimizer)
        (meeting,) = self._meetings([target], None)
        facts = self._ready(meeting, optimizers, _stateful(carried))
        engines: list[Engine] = []
        seconds: list[float] = []
        for options, more in zip(ways, seconds_more, strict=True):
            try:
                engine = self._engine_for(meeting, target, facts, options)
            except ValueError:
                if len(engines) < num_choices:
                    raise
                seconds.append(math.inf)
                continue
            plan = engine.plan if meeting.chosen is None else meeting.told_by(meeting.chosen[0], engine.plan)
            assert plan is not None
            engines.append(engine)
            seconds.append(step_seconds(plan) + more(plan))
        chosen = engines[seconds.index(min(seconds[:num_choices]))]
        return seconds, self._go_on(chosen, self._migration(meeting, chosen, optimizers, averages), meeting)

    def replan_prefix_if_it_pays(
        self,
        ways: Sequence[WayToGoOn],
        optimizer: Optimizers,
        *,
        remaining_steps: int,
        reading_now: float,
        averages: Averages | Sequence[Averages] = (),
        carried: Stateful | Sequence[Stateful] = (),
    ) -> tuple[ReplanDecision, WayToGoOn | None]:
        """As ``replan_if_it_pays``, over ways that read outputs of frozen layers and others that compute them."""
        return self._go_on_if_it_pays(ways, optimizer, remaining_steps, averages, carried, reading_now)

    @torch.no_grad()
    def prefix_output(
        self, after: str, batch: Mapping[str, Any], *, local_inputs: bool, given: GivenOutput | None = None
    ) -> torch.Tensor:
        """What module ``after`` gives for a batch: of all its samples, whole, on every rank.

        Args:
            given: an earlier module, and its output for the samples that ``batch`` has, to begin with.
        """
        output = self(**batch, **{AFTER: after, **_arguments_of(given)}, local_inputs=local_inputs)  # type: ignore[operator]
        return torch.as_tensor(output).detach()

    def train_behind(
        self, after: str, output: torch.Tensor, batch: Mapping[str, Any], *, local_inputs: bool, weight: float | None
    ) -> torch.Tensor:
        """``train_step`` that takes the output of module ``after`` as given."""
        arguments = {**batch, AFTER: after, OUTPUT: output}
        loss: torch.Tensor = self.train_step(**arguments, local_inputs=local_inputs, weight=weight)  # type: ignore[attr-defined]
        return loss


def _arguments_of(given: GivenOutput | None) -> dict[str, Any]:
    return {} if given is None else {FROM: given[0], OUTPUT: given[1]}


def _optimizers(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]


def _stateful(carried: Stateful | Sequence[Stateful]) -> list[Stateful]:
    return [carried] if isinstance(carried, Stateful) else list(carried)
