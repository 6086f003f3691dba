"""A parallel module that goes on under another plan while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from cost_models import Cluster
from passes.plan import Plan
from runtime.agreement.ranks_together import Ranks
from runtime.execution.engine import Engine
from runtime.execution.rank_mapping import RankPlaces
from runtime.migration.migration import Migration
from runtime.migration.move_price import (
    REPLAN_SECONDS,
    ReplanDecision,
    ReplanPrice,
    axes_of,
    check_question,
    seconds_of_moving,
    step_seconds,
)
from runtime.migration.state_entries import NO_STATE, Averages, RankState, let_go
from runtime.migration.transfer_plan import TransferPlan
from runtime.module.meeting import (
    Facts,
    Meeting,
    SavedState,
    Stateful,
    chosen_ranks,
    meeting_of_job,
    present_meeting,
    stays_at_work,
)
from runtime.parameters import ParameterTree, ShardedParameter
from runtime.parameters.optimizer_steps import optimizers_of
from runtime.weight_files import named_alike

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Replanner(Protocol):
    """Makes the engines to go on with from the present one."""

    def num_devices(self, target: Any) -> int: ...

    def engine(
        self, before: Engine, target: Any, facts: Facts, ranks: Sequence[int] | None, **options: Any
    ) -> Engine: ...

    def waiting(self, before: Engine) -> Engine: ...


def nothing_more(plan: Plan) -> float:
    """No seconds of a step beside what its plan predicts."""
    return 0.0


@dataclass(frozen=True)
class WayToGoOn:
    """A plan that training may go on under.

    Attributes:
        target, options: as of ``replan``.
        replan_seconds: of making its programs.
        seconds_more: of a step, beside what the plan predicts; ``words`` say of what.
        slow_steps: the first steps, which take as long as those of the fastest of the ``slow_as`` ways before this one.
        obstacle: why it cannot be gone on in this way; else empty.
    """

    target: Any
    options: Mapping[str, Any]
    replan_seconds: float
    seconds_more: Callable[[Plan], float] = nothing_more
    words: str = ""
    slow_steps: int = 0
    slow_as: int = 1
    obstacle: str = ""


class Changing:
    """Goes before ``nn.Module`` among the bases of ``ParallelModule``, whose engine and parameters it replaces."""

    _engine: Engine
    _tree: ParameterTree
    _replanner: Replanner | None = None

    def replanned_by(self, replanner: Replanner) -> None:
        """Let ``replan`` make its engines by ``replanner``."""
        object.__setattr__(self, "_replanner", replanner)

    def replan(
        self,
        target: Any,
        optimizer: Optimizers = None,
        *,
        ranks: Sequence[int] | None = None,
        averages: Averages | Sequence[Averages] = (),
        carried: Stateful | Sequence[Stateful] = (),
        **options: Any,
    ) -> TransferPlan:
        """Go on under another plan: the state of training moves between the ranks, without a file.

        All ranks must call it, between two steps: those at work, and for another number of them all of the job. Ranks
        that the target has no place for hand on what they hold, and are without work from then on (``has_work``); ranks
        without work, as ``planner.join`` makes them, get their part from the others.

        Weights, gradients, buffers and the optimizers' state move as the plan of transfers says that is returned: what
        a rank holds already stays, and all else moves once. This module, its optimizers and their schedules stay the
        objects that they are. Parameters that a rank has under both plans do, too; with a pipeline others come and go,
        and the optimizers' ``param_groups`` with them.

        Parameters that were frozen (``requires_grad = False``) since the last plan are planned as frozen: without
        gradients, reductions and optimizer state, which is dropped. Those that were thawed are planned as trained.

        Args:
            target: as ``mesh`` of ``planner.compile``: a mesh, a cluster, a plan, or the path of one.
            optimizer: all optimizers that train this module.
            ranks: of the job, ascending and evenly spaced: those that will be at work; None: the first ones.
            averages: tensors by parameter name that are placed as the parameters are (an exponential moving average),
                or several such mappings: their tensors are replaced.
            carried: what is the same on all ranks and has a ``state_dict`` (schedules, a ``planner.DataLoader``): ranks
                that join load that of the first rank at work.
            options: of ``planner.compile``: ``fix``, ``constraints``, ``memory_limit``, ``cluster``, ``example_inputs``
                (else it is planned for calls as before), …; the loss function and the precision stay.

        Raises:
            ValueError: on all ranks, as ``planner.compile``; before the first plan; for an optimizer that is missing,
                or whose state is not shaped as its parameters. Nothing has changed then.
            RuntimeError: if a rank fails while the state moves, which is then lost.
        """
        return self._replan(target, optimizer, None, ranks, averages, carried, options)

    def _replan(
        self, target: Any, optimizer: Optimizers, saved: SavedState | None, ranks: Sequence[int] | None,
        averages: Averages | Sequence[Averages], carried: Stateful | Sequence[Stateful], options: Mapping[str, Any],
    ) -> TransferPlan:  # fmt: skip
        optimizers = _listed(optimizer, torch.optim.Optimizer)
        (meeting,) = self._meetings([target], ranks)
        facts = self._ready(meeting, optimizers, _listed(carried, Stateful), saved)
        engine = self._engine_for(meeting, target, facts, options)
        migration = self._migration(meeting, engine, optimizers, averages, None if saved is None else saved.rank)
        return self._go_on(engine, migration, meeting)

    def state_of_rank(
        self,
        optimizer: Optimizers = None,
        *,
        averages: Averages | Sequence[Averages] = (),
        carried: Stateful | Sequence[Stateful] = (),
    ) -> SavedState:
        """What this rank has of the state of training, on which it goes on; nothing is communicated.

        Raises:
            ValueError: for an optimizer that is missing, or whose state is not shaped as its parameters.
        """
        optimizers = _listed(optimizer, torch.optim.Optimizer)
        self._check_ready(optimizers)
        trains = {name: info.trainable for name, info in self._engine.state.infos.items()}
        facts = Facts.of(self._engine, trains | dict(self._tree.frozen_or_thawed()), _listed(carried, Stateful))
        return SavedState(self._live_state(optimizers, _listed(averages, Mapping)), facts)

    @property
    def ranks_at_work(self) -> Ranks:
        """All ranks that have a part in the plan."""
        return self._engine.ranks

    def leave(self, optimizer: Optimizers = None) -> None:
        """Be without work and hold nothing from now on, as after ``planner.join``: peers are gone, and their groups.

        Nothing is communicated. The process group of the job, which may be another one now, is the next ``replan``'s.
        """
        engine, shown = cast(Replanner, self._replanner).waiting(self._engine), self._tree.shown()
        let_go(self._engine.state.owned(), shown.values(), _listed(optimizer, torch.optim.Optimizer))
        self._hold_under(engine, shown)

    def resume(
        self,
        target: Any,
        optimizer: Optimizers = None,
        *,
        saved: SavedState | None,
        ranks: Sequence[int] | None = None,
        averages: Averages | Sequence[Averages] = (),
        carried: Stateful | Sequence[Stateful] = (),
        **options: Any,
    ) -> TransferPlan:
        """Go on from states that ranks have saved: as ``replan`` of a job in which no rank is at work.

        Args:
            saved: what this rank has; None on one that has nothing. It stays as it is.

        Raises:
            StateLost: on all ranks, if none has a part of the state.
            ValueError, RuntimeError: as ``replan``.
        """
        return self._replan(target, optimizer, saved, ranks, averages, carried, options)

    def replan_if_it_pays(
        self,
        targets: Sequence[Any],
        optimizer: Optimizers = None,
        *,
        remaining_steps: int,
        replan_seconds: float = REPLAN_SECONDS,
        averages: Averages | Sequence[Averages] = (),
        carried: Stateful | Sequence[Stateful] = (),
        **options: Any,
    ) -> ReplanDecision:
        """Go on under that of several plans with which the remaining training takes the least time, or as before.

        The prices: to stay, ``remaining_steps`` times the seconds that the present plan predicts of a step; to go to a
        target, so many times what the plan for it predicts, with what is frozen now; the seconds of the bytes that
        would move, by the links of the plan's cluster; and ``replan_seconds``. Of equals the first is taken. All ranks
        must call it, between two steps (if a target is for another number of ranks: all of the job), and decide alike:
        nothing is measured.

        Args:
            targets: as of ``replan``: ``["pp=2,dp=2", "dp=4"]`` for a pipeline that is shortened to two and to one.
            remaining_steps: of the training, after this one.
            replan_seconds: of making programs for another plan.
            optimizer, averages, carried, options: as of ``replan``, for every target.

        Raises:
            ValueError: as ``replan``; for no targets, less than one step, or seconds below zero. A target for which
                there is no plan is a row of the decision that says why.
        """
        check_question(targets, remaining_steps, replan_seconds)
        ways = [WayToGoOn(target, options, replan_seconds) for target in targets]
        return self._go_on_if_it_pays(ways, optimizer, remaining_steps, averages, carried)[0]

    def _go_on_if_it_pays(
        self, ways: Sequence[WayToGoOn], optimizer: Optimizers, remaining_steps: int,
        averages: Averages | Sequence[Averages], carried: Stateful | Sequence[Stateful], reading_now: float = 0.0,
    ) -> tuple[ReplanDecision, WayToGoOn | None]:  # fmt: skip
        """Take the fastest of several ways, or stay.

        Args:
            reading_now: seconds of a step beside what the present plan predicts.

        Returns:
            what was decided, and the way that was taken; None: to stay.
        """
        optimizers = _listed(optimizer, torch.optim.Optimizer)
        meetings = self._meetings([way.target for way in ways], None)
        # Of the ranks that are at work, or of all for all targets.
        facts = self._ready(meetings[0], optimizers, _listed(carried, Stateful))
        present = cast(Plan, facts.plan)
        prices = [ReplanPrice("stay", step_seconds(present) + reading_now, remaining_steps)]
        prepared: list[tuple[Engine, Migration, Meeting] | None] = [None]
        for way, meeting in zip(ways, meetings):
            try:
                if way.obstacle:
                    raise ValueError(way.obstacle)
                engine = self._engine_for(meeting, way.target, facts, way.options)
            except ValueError as error:
                words = f"{getattr(way.target, 'name', way.target)}{way.words}"
                prices.append(ReplanPrice.impossible(words, remaining_steps, str(error)))
                prepared.append(None)
                continue
            plan = engine.plan if meeting.chosen is None else meeting.told_by(meeting.chosen[0], engine.plan)
            migration = self._migration(meeting, engine, optimizers, averages)
            prices.append(_price(present, cast(Plan, plan), migration.plan, remaining_steps, way, prices))
            prepared.append((engine, migration, meeting))
        decision = ReplanDecision(tuple(prices))
        chosen = prepared[decision.chosen]
        if chosen is None:
            return decision, None
        self._go_on(*chosen)
        return decision, ways[decision.chosen - 1]

    def _migration(
        self,
        meeting: Meeting,
        engine: Engine,
        optimizers: Sequence[torch.optim.Optimizer],
        averages: Any,
        state: RankState | None = None,
    ) -> Migration:
        """What would move if ``engine`` took over; nothing does yet.

        Args:
            state: what this rank has; None: what this module holds.
        """
        names = tuple(self._engine.state.state_names)
        listed = _listed(averages, Mapping)

        def held() -> RankState:
            if state is not None:
                return state
            if self._engine.waits:
                return NO_STATE
            return self._live_state(optimizers, listed)

        after = () if engine.waits else named_alike(engine.state.owned(), names)
        return Migration(held, after, optimizers, listed, meeting.ranks)

    def _live_state(self, optimizers: Sequence[torch.optim.Optimizer], averages: Sequence[Averages]) -> RankState:
        owned = named_alike(self._engine.state.owned(), tuple(self._engine.state.state_names))
        return RankState.live(owned, optimizers, averages)

    def _go_on(self, engine: Engine, migration: Migration, meeting: Meeting) -> TransferPlan:
        """Move the state to where ``engine`` needs it, and run that from now on."""
        shown = self._tree.shown()
        migration.let_go(self._engine.state.owned(), shown.values())
        leaving = self._hold_under(engine, shown)
        for parameter in leaving:
            parameter.left_by_replan = True
        migration.run(meeting.group, meeting.device)
        engine.forget_constants()
        self._tree.update()
        migration.hand_over(self._tree.shown_by_every_name())
        return migration.plan

    def _meetings(self, targets: Sequence[Any], ranks: Sequence[int] | None) -> list[Meeting]:
        """Of each target the ranks that take part: for all the ranks at work, or for all those of the job."""
        if self._replanner is None or not isinstance(self._engine.places, RankPlaces):
            raise ValueError("only what planner.compile made for real ranks can be replanned")
        chosen = [chosen_ranks(target, self._replanner.num_devices(target), ranks) for target in targets]
        stay = all(stays_at_work(self._engine, target, numbers) for target, numbers in zip(targets, chosen))
        return [present_meeting(self._engine) if stay else meeting_of_job(self._engine, numbers) for numbers in chosen]

    def _ready(
        self,
        meeting: Meeting,
        optimizers: Sequence[torch.optim.Optimizer],
        carried: Sequence[Stateful],
        saved: SavedState | None = None,
    ) -> Facts:
        """What the ranks at work agree on, once all have been found to be ready; the others take it up."""
        before = self._engine
        if meeting.chosen is None:
            # In the place of another call that the others may make.
            before.calls.together(lambda: self._check_ready(optimizers))
            before.calls.check("calls replan")
        else:
            meeting.ranks.together(lambda: self._check_ready(optimizers))
        has_state = saved is not None or not before.waits
        by_rank = meeting.ranks.gathered(self._tree.frozen_or_thawed() if has_state else None)
        with_state = [place for place, own in enumerate(by_rank) if own is not None]
        if not with_state:
            raise ValueError("no rank of the job has any state that could move: none is at work")
        own_facts = None if saved is None else saved.facts
        if not before.waits:
            changed = {name: trains for own in by_rank if own is not None for name, trains in own}
            trains = {name: changed.get(info.names[0], info.trainable) for name, info in before.state.infos.items()}
            own_facts = Facts.of(before, trains, carried)
        facts = own_facts if len(with_state) == len(by_rank) else meeting.told_by(with_state[0], own_facts)
        assert facts is not None
        if before.waits:
            facts.take_up(before, carried)
        return facts

    def _check_ready(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self._engine.plan is None and not self._engine.waits:
            raise ValueError("there is no plan yet that could be changed: it is made at the first call")
        self._refuse_forgotten(optimizers)
        self._tree.take_gradients()

    def _engine_for(self, meeting: Meeting, target: Any, facts: Facts, options: Mapping[str, Any]) -> Engine:
        replanner = cast(Replanner, self._replanner)

        def make() -> Engine:
            if not meeting.is_at_work:
                return replanner.waiting(self._engine)
            return replanner.engine(self._engine, target, facts, meeting.chosen, **options)

        return make() if meeting.chosen is None else meeting.ranks.together(make)

    def _refuse_forgotten(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        stepped = optimizers_of(self._tree.shown().values())
        for optimizer in (*optimizers, *stepped):
            if reason := getattr(optimizer, "stays_with_plan", ""):
                raise ValueError(f"{type(optimizer).__name__} cannot go on under another plan: {reason}")
        handed_over = set(map(id, optimizers))
        for optimizer in stepped:
            if id(optimizer) not in handed_over:
                raise ValueError(
                    f"a {type(optimizer).__name__} that has stepped on these parameters was not handed over: "
                    "parallel.replan(target, optimizer) (several as a list), so that its state moves with them"
                )

    def _hold_under(self, engine: Engine, shown: Mapping[str, ShardedParameter]) -> list[ShardedParameter]:
        """Run ``engine`` from now on; the parameters that this rank has no more."""
        by_alias = {
            alias: shown[piece.name]
            for piece in self._engine.state.owned()
            if piece.name in shown
            for alias in (piece.name, *piece.aliases)
        }
        staying = {piece.name: by_alias[piece.name] for piece in engine.state.owned() if piece.name in by_alias}
        self._hold(engine, staying)  # type: ignore[attr-defined]
        identities = {id(parameter) for parameter in staying.values()}
        return [parameter for parameter in shown.values() if id(parameter) not in identities]


def _price(
    present: Plan,
    plan: Plan,
    transfers: TransferPlan,
    remaining_steps: int,
    way: WayToGoOn,
    before: Sequence[ReplanPrice],
) -> ReplanPrice:
    """What it takes to go on under ``plan`` after the transfers to it.

    Args:
        before: the prices of the ways before this one.
    """
    clusters = [Cluster.from_dict(each.cluster) for each in (plan, present)]
    moving = seconds_of_moving(transfers.bytes_by_pair, max(clusters, key=lambda cluster: cluster.num_devices))
    seconds = step_seconds(plan) + way.seconds_more(plan)
    slow_seconds = min(price.step_seconds for price in before[-way.slow_as :])
    slower = way.slow_steps * max(0.0, slow_seconds - seconds) if way.slow_steps else 0.0
    words = f"{axes_of(plan)}{way.words}"
    programs = way.replan_seconds + slower
    return ReplanPrice(words, seconds, remaining_steps, moving, programs, transfers.num_bytes)


def _listed(value: Any, kind: Any) -> list[Any]:
    """One or several of ``kind`` as a list."""
    if value is None:
        return []
    if isinstance(value, kind):
        return [value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        values = list(value)
        if all(isinstance(one, kind) for one in values):
            return values
    raise ValueError(f"expected a {kind.__name__} or a list of them, got {type(value).__name__}")
