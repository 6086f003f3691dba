"""A parallel module that goes on under another plan while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from cost_models import Cluster
from passes.plan import Plan
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
from runtime.migration.state_entries import Averages
from runtime.migration.transfer_plan import TransferPlan
from runtime.parameters import ParameterTree, ShardedParameter
from runtime.parameters.optimizer_steps import optimizers_of
from runtime.weight_files import named_alike

#: Makes the engine for a target from the present one and whether each parameter is trained, with options.
Replanner = Callable[..., Engine]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


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
        averages: Averages | Sequence[Averages] = (),
        **options: Any,
    ) -> TransferPlan:
        """Go on under another plan: the state of training moves between the ranks, without a file.

        All ranks must call it, between two steps. Weights, gradients, buffers and the optimizers' state move as the
        plan of transfers says that is returned: what a rank holds already stays, and all else moves once. This module,
        its optimizers and their schedules stay the objects that they are. Parameters that a rank has under both plans
        do, too; with a pipeline others come and go, and the optimizers' ``param_groups`` with them.

        Parameters that were frozen (``requires_grad = False``) since the last plan are planned as frozen: without
        gradients, reductions and optimizer state, which is dropped. Those that were thawed are planned as trained.

        Args:
            target: as ``mesh`` of ``planner.compile``: a mesh, a cluster, a plan, or the path of one.
            optimizer: all optimizers that train this module.
            averages: tensors by parameter name that are placed as the parameters are (an exponential moving average),
                or several such mappings: their tensors are replaced.
            options: of ``planner.compile``: ``fix``, ``constraints``, ``memory_limit``, ``cluster``, ``example_inputs``
                (else it is planned for calls as before), …; the loss function and the precision stay.

        Raises:
            ValueError: on all ranks, as ``planner.compile``; before the first plan; for an optimizer that is missing,
                or whose state is not shaped as its parameters. Nothing has changed then.
            RuntimeError: if a rank fails while the state moves, which is then lost.
        """
        optimizers = _listed(optimizer, torch.optim.Optimizer)
        trains = self._ready(optimizers)
        engine = self._engine_for(target, trains, options)
        return self._go_on(engine, self._migration(engine, optimizers, averages))

    def replan_if_it_pays(
        self,
        targets: Sequence[Any],
        optimizer: Optimizers = None,
        *,
        remaining_steps: int,
        replan_seconds: float = REPLAN_SECONDS,
        averages: Averages | Sequence[Averages] = (),
        **options: Any,
    ) -> ReplanDecision:
        """Go on under that of several plans with which the remaining training takes the least time, or as before.

        The prices: to stay, ``remaining_steps`` times the seconds that the present plan predicts of a step; to go to a
        target, so many times what the plan for it predicts, with what is frozen now; the seconds of the bytes that
        would move, by the links of the plan's cluster; and ``replan_seconds``. Of equals the first is taken. All ranks
        must call it, between two steps, and decide alike: nothing is measured.

        Args:
            targets: as of ``replan``: ``["pp=2,dp=2", "dp=4"]`` for a pipeline that is shortened to two and to one.
            remaining_steps: of the training, after this one.
            replan_seconds: of making programs for another plan.
            optimizer, averages, options: as of ``replan``, for every target.

        Raises:
            ValueError: as ``replan``; for no targets, less than one step, or seconds below zero. A target for which
                there is no plan is a row of the decision that says why.
        """
        check_question(targets, remaining_steps, replan_seconds)
        optimizers = _listed(optimizer, torch.optim.Optimizer)
        trains = self._ready(optimizers)
        present = cast(Plan, self._engine.plan)
        prices = [ReplanPrice("stay", step_seconds(present), remaining_steps)]
        ways: list[tuple[Engine, Migration] | None] = [None]
        for target in targets:
            try:
                engine = self._engine_for(target, trains, options)
            except ValueError as error:
                prices.append(ReplanPrice.impossible(str(getattr(target, "name", target)), remaining_steps, str(error)))
                ways.append(None)
                continue
            plan, migration = cast(Plan, engine.plan), self._migration(engine, optimizers, averages)
            moving = seconds_of_moving(migration.plan.bytes_by_pair, Cluster.from_dict(plan.cluster))
            prices.append(
                ReplanPrice(
                    axes_of(plan), step_seconds(plan), remaining_steps, moving, replan_seconds, migration.plan.num_bytes
                )
            )
            ways.append((engine, migration))
        decision = ReplanDecision(tuple(prices))
        chosen = ways[decision.chosen]
        if chosen is not None:
            self._go_on(*chosen)
        return decision

    def _migration(self, engine: Engine, optimizers: Sequence[torch.optim.Optimizer], averages: Any) -> Migration:
        """What would move if ``engine`` took over; nothing does yet."""
        names = tuple(self._engine.state.state_names)
        return Migration(
            named_alike(self._engine.state.owned(), names),
            named_alike(engine.state.owned(), names),
            optimizers,
            _listed(averages, Mapping),
            self._engine.ranks,
        )

    def _go_on(self, engine: Engine, migration: Migration) -> TransferPlan:
        """Move the state to where ``engine`` needs it, and run that from now on."""
        places = cast(RankPlaces, engine.places)
        shown = self._tree.shown()
        migration.let_go(shown.values())
        leaving = self._hold_under(engine, shown)
        for parameter in leaving:
            parameter.left_by_replan = True
        migration.run(places.everyone, places.layout.device)
        engine.forget_constants()
        self._tree.update()
        migration.hand_over(self._tree.shown_by_every_name())
        return migration.plan

    def _ready(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, bool]:
        """Whether each parameter is trained from now on, once all ranks have been found to be ready."""
        before = self._engine
        if self._replanner is None or not isinstance(before.places, RankPlaces):
            raise ValueError("only what planner.compile made for real ranks can be replanned")
        if before.plan is None:
            raise ValueError("there is no plan yet that could be changed: it is made at the first call")
        before.calls.together(lambda: self._refuse_forgotten(optimizers))
        before.calls.together(self._tree.take_gradients)
        before.calls.check("calls replan")
        changed = {name: trains for own in before.ranks.gathered(self._tree.frozen_or_thawed()) for name, trains in own}
        return {name: changed.get(info.names[0], info.trainable) for name, info in before.state.infos.items()}

    def _engine_for(self, target: Any, trains: Mapping[str, bool], options: Mapping[str, Any]) -> Engine:
        assert self._replanner is not None
        return self._replanner(self._engine, target, trains, **options)

    def _refuse_forgotten(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        handed_over = set(map(id, optimizers))
        for optimizer in optimizers_of(self._tree.shown().values()):
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


def _listed(value: Any, kind: type) -> list[Any]:
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
