"""``copy.deepcopy`` of a parallel module: another one under the same plan, with shards of its own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from runtime.execution.rank_mapping import RankPlaces
from runtime.migration.migration import fill
from runtime.module.changing import Changing
from runtime.module.meeting import Facts

if TYPE_CHECKING:
    from runtime.execution.engine import Engine


class Copying(Changing):
    """Goes before ``nn.Module`` among the bases of ``ParallelModule``."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """What averages of weights begin with (``torch.optim.swa_utils.AveragedModel``); all ranks must copy it.

        Weights, buffers, gradients, modes and attributes are copied; optimizers and hooks are not.

        Raises:
            ValueError: on all ranks, where there is no plan yet; for what does not run on real ranks.
        """
        before = self._engine
        before.calls.together(self._check_copied)
        before.calls.check("copies the module")
        other: Any = type(self)(self._engine_of_copy())  # type: ignore[call-arg]
        memo[id(self)] = other
        other.replanned_by(self._replanner)
        for mine, its in zip(before.state.owned(), other._engine.state.owned(), strict=True):
            fill(its.tensor, mine.tensor.detach().clone())
            if mine.tensor.grad is not None:
                its.tensor.grad = mine.tensor.grad.clone()
        other._engine.forget_constants()
        other._tree.update()
        other.training = self.training  # type: ignore[attr-defined]
        memo.update({id(one): its for one, its in zip(self._tree.shown().values(), other._tree.shown().values())})
        for name in vars(self).keys() - vars(other).keys():
            setattr(other, name, copy.deepcopy(vars(self)[name], memo))
        return other

    def _check_copied(self) -> None:
        if self._replanner is None or not isinstance(self._engine.places, RankPlaces):
            raise ValueError("only what planner.compile made for real ranks can be copied")
        if self._engine.plan is None and not self._engine.waits:
            raise ValueError(
                "there is no plan yet that a copy could run under: copy it after the first call, or give "
                "example_inputs to planner.compile"
            )
        self._tree.take_gradients()

    def _engine_of_copy(self) -> Engine:
        before = self._engine
        assert self._replanner is not None
        if before.waits:
            return self._replanner.waiting(before)
        trains = {name: info.trainable for name, info in before.state.infos.items()}
        trains |= dict(self._tree.frozen_or_thawed())
        ranks = before.places.device_mesh.mesh.flatten().tolist()
        return self._replanner.engine(before, before.plan, Facts.of(before, trains, ()), ranks)
