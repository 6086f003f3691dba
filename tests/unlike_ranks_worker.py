"""One rank of the tests of ranks that differ: what each rank saw, by scenario."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import planner
from runtime.agreement.call_agreement import CallAgreement
from runtime.agreement.ranks_together import Ranks
from runtime.agreement.vote import Vote
from runtime.calls.model_call import ModelCall, read_call
from tests.ranks import answer, task
from tests.runtime_worker import close, error_of
from tests.small_models import TiedClassifier, token_batch

BATCH = token_batch()
#: Plans of a mesh made at compile and at the first call, and plans of a step.
PLANS: tuple[dict[str, Any], ...] = (
    {"mesh": "tp=2", "example_inputs": BATCH, "forbid_replicated_matmul": True},
    {"mesh": "dp=2", "forbid_replicated_matmul": True},
    {"mesh": "pp=2", "example_inputs": BATCH},
    {"mesh": "pp=1,dp=2", "example_inputs": BATCH, "fix": {"zero": 3}},
)


def built(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return TiedClassifier().double()


def the_first_ranks_weights_count() -> bool:
    """Each rank builds another model: all train the first one's."""
    rank, same = dist.get_rank(), True
    for plan in PLANS:
        model = built(seed=0)
        parallel = planner.compile(built(seed=rank), **plan)
        before = parallel.full_state_dict()
        same &= all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        loss = model(**BATCH)["loss"]
        loss.backward()
        same &= close(parallel.train_step(**BATCH), loss)
        gradients = parallel.full_gradients()
        trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        same &= all(close(gradients[name], gradient) for name, gradient in trained.items())
    return same


def only_the_first_rank_needs_weights() -> bool:
    """The others may build theirs on the meta device."""
    model = built(seed=0)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        own = built(seed=0)
    parallel = planner.compile(own, **PLANS[0])
    return close(parallel.train_step(**BATCH), model(**BATCH)["loss"])


def unlike_calls(parallel: Any) -> dict[str, Callable[[], Any]]:
    """Calls that differ between ranks 0 and 1, by what the error says."""
    rank, tokens = dist.get_rank(), {"tokens": BATCH["tokens"]}
    last = rank == 1
    return {
        "passes 'tokens' as [8, 6] int64, rank 1 as [4, 6] int64": lambda: parallel(**token_batch(batch=8 - 4 * rank)),
        "values of input 'labels' differ: rank 1": lambda: parallel(BATCH["tokens"], BATCH["labels"] + rank),
        "rank 0 runs train_step in training mode, rank 1 calls the model": lambda: (
            parallel(**BATCH) if last else parallel.train_step(**BATCH)
        ),
        "mode, rank 1 runs train_step in evaluation mode": lambda: parallel.train(not last).train_step(**BATCH),
        "rank 1 runs train_step in training mode on local": lambda: parallel.train_step(**BATCH, local_inputs=last),
        "rank 1 by 2;": lambda: parallel.train_step(**BATCH, weight=rank + 1),
        "has no values": lambda: parallel.train_step(BATCH["tokens"], BATCH["labels"].to("meta" if last else "cpu")),
        "does not fit": lambda: parallel(1, 2, 3) if last else parallel(**BATCH),
        "'labels'": lambda: parallel.train_step(**(tokens if last else BATCH)),
        "rank 1 calls clip_grad_norm_": lambda: parallel.clip_grad_norm_(1.0) if last else parallel(**BATCH),
        "returns no loss to train on, but 'logits' [8, 6, 32]": lambda: parallel.train_step(**tokens),
    }


def unlike_calls_are_refused() -> bool:
    """By every rank, before any runs; the next call that is alike goes on."""
    refused = []
    for plan in (PLANS[0], PLANS[3]):
        parallel, model = planner.compile(built(seed=0), **plan), built(seed=0)
        for words, call in unlike_calls(parallel).items():
            refused.append(words in error_of(call))
            parallel.train()
        refused.append(close(parallel.train_step(**BATCH), model(**BATCH)["loss"]))
    return all(refused)


def values_are_compared_now_and_then() -> bool:
    """At the first and second call, not at the third, at the fourth again."""
    parallel = planner.compile(built(seed=0), **PLANS[0])
    other = token_batch(seed=dist.get_rank())
    errors = [error_of(functools.partial(parallel.train_step, **batch)) for batch in (BATCH, other, other, other)]
    return ["values of input" in error for error in errors] == [False, True, False, True]


def stages_are_passed_what_they_read() -> bool:
    """A pipeline's ranks may leave out what only others read, all may leave out labels, none what it reads."""
    rank, model = dist.get_rank(), built(seed=0)
    parallel = planner.compile(built(seed=0), **PLANS[2])
    read = {name: BATCH[name] for name in parallel.needed_inputs}
    fewer = token_batch(batch=4)
    with torch.no_grad():
        refusals = [
            close(parallel.train_step(**read), model(**BATCH)["loss"]),
            close(parallel.train_step(**{name: fewer[name] for name in read}), model(**fewer)["loss"]),
            close(parallel(BATCH["tokens"])["logits"], model(BATCH["tokens"])["logits"]),
            close(parallel.eval()(BATCH["tokens"])["logits"], model(BATCH["tokens"])["logits"]),
            close(parallel.train().train_step(**BATCH), model(**BATCH)["loss"]),
        ]
    none = error_of(lambda: parallel.train_step(**(BATCH if rank == 0 else {})))
    return all(refusals) and len(read) == 1 and "was passed on other ranks" in none


def two_steps(parallel: Any, announced: int, steps: int) -> None:
    with parallel.accumulate(announced):
        for _ in range(steps):
            parallel.train_step(**BATCH)


def with_hook(parallel: Any) -> None:
    """A step of a parallel module that has a hook on the last rank."""
    handle = parallel.register_forward_hook(print) if dist.get_rank() else None
    try:
        parallel.train_step(**BATCH)
    finally:
        if handle is not None:
            handle.remove()


def what_is_wrong_on_one_rank_is_raised_by_all() -> bool:
    """Before a call is compared: of its weight, of ``accumulate``, of the module; the next call goes on."""
    parallel, last = planner.compile(built(seed=0), **PLANS[0]), dist.get_rank() == 1
    calls: dict[str, Callable[[], Any]] = {
        "weight=inf: give a finite number": lambda: parallel.train_step(**BATCH, weight=math.inf if last else 1.0),
        "weight='2': give a finite number": lambda: parallel.train_step(**BATCH, weight="2" if last else 2.0),
        "accumulate(0): give the number": lambda: two_steps(parallel, 0 if last else 2, 2),
        "accumulate(2) saw 1 train_step calls": lambda: two_steps(parallel, 2, 1 if last else 2),
        "train_step calls no hooks": lambda: with_hook(parallel),
        "clip_grad_norm_(1.0, 2.0, error_if_nonfinite), rank 1 calls clip": lambda: parallel.clip_grad_norm_(
            1.0, error_if_nonfinite=not last
        ),
    }
    refused = [words in error_of(call) for words, call in calls.items()]
    parallel.zero_grad()
    return all(refused) and close(parallel.train_step(**BATCH, weight=-0.0), built(seed=0)(**BATCH)["loss"])


def the_first_ranks_state_dict_counts() -> bool:
    """Other ranks may pass another, or none; what is wrong with the first one's is raised by all."""
    rank, same, whole_state = dist.get_rank(), True, built(seed=5).state_dict()
    for plan in PLANS:
        parallel = planner.compile(built(seed=0), **plan)
        for state in ([whole_state, {}][rank], built(seed=5 + rank).state_dict()):
            parallel.load_full_state_dict(built(seed=1).state_dict())
            parallel.load_full_state_dict(state)
            now = parallel.full_state_dict()
            same &= all(torch.equal(now[name], tensor) for name, tensor in whole_state.items())
        short = {name: tensor for name, tensor in whole_state.items() if name != "middle.weight"}
        for words, state in {
            "missing": [short, whole_state][rank],
            "is a shard: load_full_state_dict takes whole": [parallel.state_dict(), whole_state][rank],
            "is a float": [{**whole_state, "embedding.weight": 1.0}, whole_state][rank],
        }.items():
            same &= words in error_of(functools.partial(parallel.load_full_state_dict, state))
    return same


def a_call(size: int, *, error: str = "") -> Callable[[], ModelCall]:
    def read() -> ModelCall:
        if error:
            raise ValueError(error)
        return read_call(lambda x: x, (torch.zeros(size),), {})

    return read


def ahead_of(calls: CallAgreement, read: Callable[[], ModelCall], **arguments: Any) -> tuple[str, str]:
    """What is raised at the beginning and at the end of a call."""
    action = arguments.pop("action", "calls")
    return error_of(lambda: calls.agree(action, read, **arguments)), error_of(calls.settle)


def raised_ahead(read: Callable[[], ModelCall], arguments: dict[str, Any]) -> tuple[str, str, str, str]:
    """Of four calls that are alike, the fifth as given, and two that follow it: what is raised by which."""
    calls = CallAgreement(Ranks(dist.group.WORLD, run_ahead=True), data_rank=0, may_leave_out=False)
    before = "".join(word for _ in range(4) for word in ahead_of(calls, a_call(4)))
    begun, ended = ahead_of(calls, read, **arguments)
    return before, begun, ended, error_of(lambda: calls.agree("calls", a_call(4)))


def ranks_that_run_ahead_hear_of_it() -> bool:
    """A call of a known kind begins before the votes are counted; what they show is raised by all at its end."""
    last, right = dist.get_rank() == 1, []
    cases: dict[str, tuple[Callable[[], ModelCall], dict[str, Any]]] = {
        "rank 1 by 2;": (a_call(4), {"weight": 2.0 if last else 1.0}),
        "no such batch": (a_call(4, error="no such batch" if last else ""), {}),
        "rank 1 evaluates": (a_call(4), {"action": "evaluates" if last else "calls"}),
        "as [5] float32": (a_call(5 if last else 4), {}),
    }
    for words, (read, arguments) in cases.items():
        before, begun, ended, after = raised_ahead(read, arguments)
        # Rank 1 does not run ahead with what the ranks have not agreed on before.
        knows = last and words != "rank 1 by 2;"
        right += [before == "", words in (begun if knows else ended), knows or not begun, "out of step" in after]
    return all(right)


def steps_run_ahead() -> bool:
    """Where collectives do not block, a step is queued before the vote is counted; results are the same."""
    order: list[str] = []
    parallel, model = planner.compile(built(seed=0), **PLANS[3]), built(seed=0)
    engine: Any = parallel._engine
    engine.ranks.run_ahead = True
    count, step = Vote.is_unanimous, engine.state.tied_gradients_summed

    def counted(vote: Vote) -> bool:
        order.append("vote")
        return count(vote)

    def stepped() -> Any:
        order.append("step")
        return step()

    engine.state.tied_gradients_summed = stepped
    Vote.is_unanimous = counted  # type: ignore[method-assign]
    try:
        losses = [parallel.train_step(**BATCH) for _ in range(3)]
    finally:
        Vote.is_unanimous = count  # type: ignore[method-assign]
    expected = model(**BATCH)["loss"]
    return all(close(loss, expected) for loss in losses) and order == ["vote", "step", "vote", "step", "step", "vote"]


def unlike_arguments_are_refused() -> bool:
    """Of ``compile``, by every rank: another model, plan, mesh or option on one of them."""
    rank = dist.get_rank()
    path = Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / f"plan of rank {rank}.json"
    wider = functools.partial(TiedClassifier, size=16 + 4 * rank)
    plan = planner.compile(built(seed=0), **PLANS[0]).plan
    dataclasses.replace(plan, model=f"of rank {rank}").save(path)
    kinds: dict[str, Callable[[], Any]] = {
        "rank 1 and rank 0 differ in the TiedClassifier: 'scale': [20] float64 frozen on rank 1": lambda: (
            planner.compile(wider().double(), **PLANS[0])
        ),
        "differ in the plan": lambda: planner.compile(built(seed=0), "tp=2", plan=path),
        "differ in option fuse: False on rank 1, True": lambda: planner.compile(built(0), **PLANS[0], fuse=rank == 0),
        "differ in the mesh: dp=2 on rank 1, tp=2 on rank 0": lambda: planner.compile(built(0), ["tp=2", "dp=2"][rank]),
        "differ in the mesh: a whole step on pp=2 on rank 1": lambda: planner.compile(built(0), ["tp=2", "pp=2"][rank]),
        "differ in option example_inputs": lambda: planner.compile(
            built(seed=0), "tp=2", example_inputs=token_batch(length=6 + rank)
        ),
        "cannot read plan file": lambda: planner.compile(built(seed=0), path if rank == 0 else "nowhere.json"),
    }
    return all(words in error_of(call) for words, call in kinds.items())


SCENARIOS: tuple[Callable[[], bool], ...] = (
    the_first_ranks_weights_count,
    only_the_first_rank_needs_weights,
    unlike_calls_are_refused,
    values_are_compared_now_and_then,
    stages_are_passed_what_they_read,
    what_is_wrong_on_one_rank_is_raised_by_all,
    the_first_ranks_state_dict_counts,
    ranks_that_run_ahead_hear_of_it,
    steps_run_ahead,
    unlike_arguments_are_refused,
)


if __name__ == "__main__":
    names = task()
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(
        seen, {scenario.__name__: scenario() for scenario in SCENARIOS if scenario.__name__ in names}
    )
    answer({name: all(results[name] for results in seen) for name in names})
