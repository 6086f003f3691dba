"""``planner.Elastic``: a training that goes on when processes are lost, and takes in those that come."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cost_models import Cluster
from cost_models.text import counted
from passes.ir.errors import CaptureError
from passes.plan import Plan
from planner.compilation import compile
from planner.elastic_checkpoints import ElasticCheckpoints
from planner.elastic_gain import GainPricing, decide
from planner.engine_under_another_plan import LASTING
from planner.joining import join
from planner.kept_plans import KeptPlans
from planner.targets import process_group_as_cluster
from runtime.agreement.ranks_together import gathered, num_ranks, rank_in
from runtime.elastic.job_process import LOOK_SECONDS, JobProcess, TrainingFinished
from runtime.elastic.second_holders import SecondHolders, StateCopy, merged, without_tensors
from runtime.launch.process import init
from runtime.migration.move_price import REPLAN_SECONDS
from runtime.migration.state_entries import Averages
from runtime.migration.transfer_plan import StateLost
from runtime.module.meeting import SavedState, Stateful
from runtime.module.parallel_module import ParallelModule


class Elastic:
    """The training of a job whose processes come and go, started with ``planner run --elastic MIN --nproc N``.

    Example:
        >>> job = planner.Elastic()
        >>> parallel = job.compile(model, example_inputs=batch)
        >>> optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        >>> for step in job.steps(optimizer, num_steps=1000, carried=[schedule]):
        ...     with step:
        ...         loss = parallel.train_step(**batch_of(step.number))
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         schedule.step()

    After each step every rank copies its shard to the host, and what no other rank holds to a second holder. When a
    process is lost, the others drop the step under way, make a plan for as many as they are, and go on from the copies,
    with the same global batch. A process that comes gets its part at the end of a step.

    Args:
        collective_timeout: seconds that a rank waits for one that is there and does not answer.

    Raises:
        ValueError: if the script was started in another way.
    """

    def __init__(self, *, collective_timeout: float = 1800.0) -> None:
        self._member = JobProcess(collective_timeout=collective_timeout)
        #: Whether this process joins a training that runs: what it would load, the others have.
        self.joins = self._member.is_late
        if self.joins:
            init(local_rank=self._member.local_rank)
        else:
            self._member.arrive()
            self._member.meet()
        self._parallel: ParallelModule | None = None
        self._second_holders: SecondHolders | None = None
        self._copies: list[StateCopy] = []
        self._target: Any = None
        self._options: dict[str, Any] = {}
        #: Steps that are done.
        self.step = 0
        #: How often another plan was taken up because the processes had changed.
        self.num_changes = 0
        self.last_copy: StateCopy | None = None
        #: Number of the round whose newcomers wait.
        self._waiting_round = 0

    def compile(self, model: nn.Module, target: Any = None, **options: Any) -> ParallelModule:
        """As ``planner.compile``, for as many processes as there are; one that joins has no part yet.

        Args:
            target: the number of processes → what to compile for (``lambda ranks: f"dp={ranks}"``); a mapping by that
                number, or None: the devices of all of them. Where there is no plan for all, fewer are at work.
            options: of ``planner.compile``; ``example_inputs`` (or ``batch_size``) must be among them.

        Raises:
            ValueError: as ``planner.compile``, and without an example of a batch.
        """
        if options.get("example_inputs") is None and options.get("batch_size") is None:
            raise ValueError(
                "example_inputs is missing: an elastic training is planned anew for as many processes as there are, "
                "for one global batch that stays; give example_inputs (or batch_size, and seq_len)"
            )
        if target is not None and not callable(target) and not isinstance(target, Mapping):
            raise ValueError(f"target={target!r} is for one number of processes: give a function of it, or a mapping")
        self._target, self._plans = target, KeptPlans(model, options)
        self._pricing = GainPricing(model, options)
        self._options = {name: value for name, value in options.items() if name not in LASTING}
        if self.joins:
            lasting = {name: options[name] for name in LASTING if name in options and name != "optimizer"}
            self._parallel = join(model, **lasting)
        else:
            trains = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
            target = self._target_for(num_ranks())
            self._parallel = compile(model, self._kept_or(target, trains), **options)
            self._plans.note(target, trains, self._parallel.plan, writes=rank_in() == 0)
        return self._parallel

    def _kept_or(self, target: Any, trains: Mapping[str, bool] | None) -> Any:
        """The plan that any rank has kept for ``target``, the same on all; else ``target``."""
        own = None if trains is None else self._plans.read(target, trains)
        have = gathered(own is not None)
        if not any(have):
            return target
        message = [None if own is None else own.to_json()]
        if len(have) > 1:
            dist.broadcast_object_list(message, src=have.index(True))
        return Plan.from_dict(json.loads(str(message[0])))

    @property
    def parallel(self) -> ParallelModule:
        """What ``compile`` made.

        Raises:
            ValueError: before ``compile``.
        """
        if self._parallel is None:
            raise ValueError("there is no parallel module yet: call compile first")
        return self._parallel

    def steps(
        self,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        num_steps: int,
        every: int = 1,
        averages: Averages | Sequence[Averages] = (),
        carried: Stateful | Sequence[Stateful] = (),
        restore: Callable[[], int] | None = None,
        checkpoints: str | Path | None = None,
        checkpoint_every: int = 1000,
        take_in: str = "if it pays",
        replan_seconds: float = REPLAN_SECONDS,
    ) -> Iterator[ElasticStep]:
        """The steps of the training, each to be run in a ``with`` block that ends after the optimizer's.

        A step that fails because a process is lost comes again, and so do those since the last copy. Ranks without
        work get no steps.

        Args:
            optimizer: all optimizers that train the module.
            num_steps: of the whole training.
            every: how many steps there are from one copy to the next.
            averages, carried: as of ``parallel.replan``; they go back to a copy, too.
            restore: called on all ranks where the copies do not have the whole state any more: it loads the newest
                checkpoint into the module and the optimizers, and says how many steps that has.
            checkpoints: in the place of ``restore``: a directory, on a file system that all processes share, into which
                ``checkpoint_every`` steps are saved, and from whose newest checkpoint training goes on where copies do
                not have the whole state, and in a job that is started anew. Of one optimizer.
            take_in: when processes that come get a part: ``"if it pays"``, by the seconds that are predicted of the
                steps that are left, of moving and, ``replan_seconds``, of making programs (else they wait, and are
                taken in when another is lost); or ``"always"``.

        Raises:
            ValueError: for less than one step, another ``take_in``, both ``restore`` and ``checkpoints``, and what the
                latter do not have.
            StateLost: if there is no checkpoint then.
        """
        if num_steps < 1 or every < 1:
            raise ValueError(f"num_steps={num_steps}, every={every}: at least 1 each")
        if take_in not in ("if it pays", "always") or not replan_seconds >= 0:
            raise ValueError(
                f"take_in={take_in!r}, replan_seconds={replan_seconds}: processes are taken in 'if it pays' or "
                "'always', and programs are made in seconds of at least 0"
            )
        self._take_in, self._replan_seconds = take_in, replan_seconds
        if restore is not None and checkpoints is not None:
            raise ValueError("restore and checkpoints both say what to load when the state is lost: give one of them")
        self._checkpoints = None
        if checkpoints is not None:
            self._checkpoints = ElasticCheckpoints(
                checkpoints, checkpoint_every, optimizer=optimizer, averages=averages, carried=carried
            )
        self._num_steps, self._every, self._restore = num_steps, every, restore
        self._state_of: dict[str, Any] = {"averages": averages, "carried": carried}
        self._optimizer = optimizer
        if self.joins:
            self._member.arrive()
            self._change()
        else:
            self._attempt(self._begin)
        while self.step < num_steps:
            if self.parallel.has_work:
                yield ElasticStep(self)
            elif not self._waited_for_work():
                break
        self._member.finish()
        self._member.leave()

    def end_step(self) -> None:
        """A step is done: copy the state, and take in processes that have come."""
        self.step += 1
        ends = self.step == self._num_steps
        if self._checkpoints is not None and (self.step % self._checkpoints.every == 0 or ends):
            self._checkpoints.save(self.parallel, self.step)
        if self.step % self._every == 0 or ends:
            seen = self._copy()
            if seen > self._waiting_round and not ends and self._takes_in(seen):
                self._change()

    def go_on_after(self, error: BaseException) -> bool:
        """Whether ``error`` was because of a lost process, and the training goes on without it."""
        if not isinstance(error, Exception):
            return False
        if self.step == self._num_steps and self._member.is_finished:
            return True  # others have left: the last copy is complete
        if not self._member.heard_of_a_loss(error):
            return False
        self._change()
        return True

    def _attempt(self, action: Callable[[], Any]) -> None:
        """Do it; if a process is lost meanwhile, go on without it."""
        try:
            action()
        except Exception as error:
            if not self.go_on_after(error):
                raise

    def _begin(self) -> None:
        """Go on from the newest checkpoint, if there is one, and make the first copy."""
        if self._checkpoints is not None:
            self._checkpoints.go_on_with(self.parallel.ranks_at_work)
            if any(self.parallel.ranks_at_work.gathered(self._checkpoints.latest() is not None)):
                self.step = self._checkpoints.load(self.parallel)
        self._copy()

    def _takes_in(self, seen: int) -> bool:
        """Whether those that have come are to get a part, the same on all ranks at work; says why.

        Args:
            seen: the number of the round that has them.
        """
        if self._take_in == "always":
            return True
        ranks = self.parallel.ranks_at_work
        outcome: tuple[bool, str] = (True, "")
        if rank_in(ranks.group) == 0:
            outcome = self._gain_decided()
        takes_in, words = ranks.gathered(outcome)[0]
        if words and rank_in(ranks.group) == 0:
            print(f"meshwright: {words}", file=sys.stderr, flush=True)
        if not takes_in:
            self._waiting_round = seen
        return bool(takes_in)

    def _gain_decided(self) -> tuple[bool, str]:
        """Whether the plan for all that have come pays, and the prices in words; it is kept if it does."""
        newest, present, copy = self._member.newer_round(), self._member.round, self.last_copy
        plan = self.parallel.plan
        if newest is None or present is None or copy is None or present.lost(newest) or plan.step.costs.simulated <= 0:
            return True, ""
        facts, count = copy.saved.facts, len(newest.members)
        if count <= len(present.members):
            return False, ""  # who came is gone again
        cluster = Cluster.of_local_devices(self.parallel.layout.device.type, count)
        target = cluster if self._target is None else self._target_for(count)

        def make() -> Plan:
            own = self._plans.read(target, facts.trains, cluster)
            if own is None:
                own = self._pricing.plan_for(target, cluster, facts)
                self._plans.note(target, facts.trains, own, writes=True, cluster=cluster)
            return own

        try:
            remaining = self._num_steps - self.step
            decision = decide(plan, make, cluster, remaining_steps=remaining, replan_seconds=self._replan_seconds)
        except CaptureError:  # can be planned for with its weights alone, as all do when they have met
            return True, ""
        outcome = "are taken in" if decision.moved else "wait: another plan would not pay"
        words = f"{counted(count, 'process')} where {len(present.members)} were; those that came {outcome}"
        return decision.moved, f"{words}\n{decision.summary().rstrip()}"

    @property
    def others_wait(self) -> bool:
        """Whether processes have come that have no part yet."""
        return self._member.newer_round() is not None

    def _copy(self) -> int:
        """Copy the state; the number of the newest round that any rank has seen, 0 where there is no newer one."""
        if self._second_holders is None:
            self._second_holders = SecondHolders(self.parallel.ranks_at_work)
        saved = self.parallel.state_of_rank(self._optimizer, **self._state_of)
        made = self._second_holders.copy(saved, self.step)
        newer = self._member.newer_round()
        # Until all have theirs, the last one stays.
        self._copies.append(made)
        seen = self._second_holders.settle(0 if newer is None else newer.number)
        self._copies, self.last_copy = [made], made
        return seen

    def _waited_for_work(self) -> bool:
        """Wait until the processes change; whether they have before the training came to its end."""
        while not self._member.is_finished:
            if self._member.newer_round() is not None:
                self._change()
                return True
            time.sleep(LOOK_SECONDS)
        return False

    def _change(self) -> None:
        """Meet whoever is there, and go on from the newest copies that all have."""
        while True:
            try:
                self._member.meet()
                self._resume()
                return
            except TrainingFinished:
                return  # this process came late, or lacks only the last copy
            except StateLost:
                self._member.give_up()
                raise
            except Exception as error:
                if not self._member.heard_of_a_loss(error):
                    raise

    def _resume(self) -> None:
        """Go on with the members of the present round."""
        parallel, self._second_holders = self.parallel, None
        parallel.leave(self._optimizer)
        steps = [own for own in gathered([one.step for one in self._copies]) if own]
        if not steps:
            raise StateLost(f"no process has any state of the training any more: {self._way_back()}")
        in_all = set.intersection(*map(set, steps))
        try:
            if not in_all:
                raise StateLost("the processes that are left have copies of different steps")
            self.step = max(in_all)
            self._plan_anew(merged([one for one in self._copies if one.step == self.step]))
            if parallel.has_work and self._checkpoints is not None:
                self._checkpoints.go_on_with(parallel.ranks_at_work)
        except StateLost as error:
            self._go_back(error)
        self.num_changes += 1
        if parallel.has_work:
            self._copy()
        gathered(None)
        if not parallel.has_work:
            self._copies = []

    def _go_back(self, error: StateLost) -> None:
        """Go on from the newest checkpoint: copies do not have the whole state any more.

        Raises:
            StateLost: if there is none.
        """
        if self._restore is None and self._checkpoints is None:
            raise StateLost(f"{error}, and there is no checkpoint: {self._way_back()}") from error
        self._plan_anew(without_tensors(self._copies[-1].saved) if self._copies else None)
        if self._restore is not None:
            self.step = self._restore()
            return
        step, problem = 0, ""
        if self.parallel.has_work:
            checkpoints = self._checkpoints
            assert checkpoints is not None
            checkpoints.go_on_with(self.parallel.ranks_at_work)
            if checkpoints.latest() is None:
                problem = f"{error}, and there is no checkpoint in {checkpoints.directory} yet: start the job again"
            else:
                step = checkpoints.load(self.parallel)
        outcomes = gathered((step, problem))
        if problem := max(words for _, words in outcomes):
            raise StateLost(problem) from error
        self.step = max(steps for steps, _ in outcomes)
        if rank_in() == 0:
            print(f"meshwright: {error}; training goes on from the checkpoint of step {self.step}", file=sys.stderr)

    def _way_back(self) -> str:
        if self._checkpoints is None:
            return "start the job again (checkpoints='DIRECTORY' of job.steps has it go on from there)"
        return f"start the job again, which goes on from the newest checkpoint in {self._checkpoints.directory}"

    def _plan_anew(self, saved: SavedState | None) -> None:
        """Plan for as many ranks as there is a plan for, and take the state from what was saved."""
        trains = None if saved is None else saved.facts.trains
        for count in range(num_ranks(), 0, -1):
            target = self._target_for(count)
            try:
                self.parallel.resume(
                    self._kept_or(target, trains), self._optimizer, saved=saved, ranks=range(count), **self._state_of,
                    **self._options,
                )  # fmt: skip
                if trains is not None and self.parallel.has_work:
                    self._plans.note(target, trains, self.parallel.plan, writes=rank_in() == 0)
                return
            except StateLost:
                raise
            except ValueError as error:
                if count == 1:
                    raise
                if rank_in() == 0:
                    print(f"meshwright: no plan for {counted(count, 'process')}: {error}", file=sys.stderr)

    def _target_for(self, count: int) -> Any:
        if self._target is None:
            return process_group_as_cluster().subset(count)
        return self._target(count) if callable(self._target) else self._target[count]


@dataclasses.dataclass(frozen=True)
class ElasticStep:
    """A step of ``Elastic.steps``; what fails in it because a process is lost is done again."""

    job: Elastic

    @property
    def number(self) -> int:
        """Steps that were done before it."""
        return self.job.step

    def __enter__(self) -> ElasticStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            try:
                self.job.end_step()
                return False
            except Exception as problem:
                error = problem
                if self.job.go_on_after(error):
                    return False
                raise
        return self.job.go_on_after(error)
