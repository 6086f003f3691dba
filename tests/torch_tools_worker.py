"""One rank of the tests of PyTorch's own tools on a parallel module's parameters; rank 0 says how they compare."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import planner
from runtime.torch_compat.dtensors import are_subclasses_dispatched
from tests.parameter_operators import losses_with_averages, wrong_draws, wrong_operators
from tests.ranks import answer, task
from tests.runtime_worker import error_of
from tests.scaled_steps import wrong_scaled_steps
from tests.small_models import seeded
from tests.torch_tools_cases import (
    OPTIMIZERS,
    PLANS,
    Odd,
    compiled,
    difference,
    odd_batch,
    renewed,
    warnings_by_choice,
)
from tests.tracing import traced_once

#: The second step is the first that depends on what optimizers remember.
STEPS, MAX_NORM = 2, 0.05
#: In place over partial sums; on lists with a number for each place, which 2.11 knows no sharding of.
REFUSED_BY_DTENSOR = ("requires redistribution", "_foreach_lerp_.ScalarList does not have a sharding strategy")


def step(module: Any, optimizer: torch.optim.Optimizer, *, clip: Callable[[Iterable[Any], float], Any]) -> float:
    """One training step on either module; the gradients' norm."""
    batch = odd_batch()
    if hasattr(module, "train_step") and module.plan.step.axes["pp"] > 1:
        for _ in range(2):  # a loss that the script differentiates, of two batches of one optimizer step
            (module(**batch)["loss"] / 2).backward()
    elif hasattr(module, "train_step"):
        module.train_step(**batch)
    else:
        module(**batch)["loss"].backward()
    norm = clip(module.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def clip_of(parallel: Any) -> Callable[[Iterable[Any], float], Any]:
    """Of a pipeline, whose rank has the gradients of one stage."""
    return lambda _, norm: parallel.clip_grad_norm_(norm)


def against_one_device(plan: str, names: Iterable[str]) -> dict[str, float]:
    """Largest relative differences of weights after some steps with each optimizer, and of the gradients' norms."""
    torch_clip = nn.utils.clip_grad_norm_
    results: dict[str, float] = {}
    for name in names:
        single, parallel, make = seeded(Odd), renewed(plan), OPTIMIZERS[name]
        clip = clip_of(parallel) if plan.startswith("pp") else torch_clip
        optimizers = make(list(parallel.parameters())), make(list(single.parameters()))
        for number in range(STEPS):
            try:
                norms = step(parallel, optimizers[0], clip=clip), step(single, optimizers[1], clip=torch_clip)
            except RuntimeError as error:  # torch 2.11 refuses on DTensors what Adafactor computes
                if not any(reason in str(error) for reason in REFUSED_BY_DTENSOR):
                    raise
                results[f"refused {name}"] = 0.0
                parallel.zero_grad()
                break
            results[f"norm {number} {name}"] = abs(norms[0] / norms[1] - 1)
        else:
            results[name] = difference(parallel.full_state_dict(), dict(single.state_dict()))
    return results


class Late(nn.Module):
    """May look up in its first weight in its last stage, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, rows: torch.Tensor, again: torch.Tensor | None = None) -> torch.Tensor:
        x = self.layers(self.table(rows)).mean(1)
        return (x if again is None else x + self.table(again).mean(1)).square().mean()


def looks_up_late() -> None:
    rows = torch.arange(8).reshape(4, 2)
    planner.compile(Late().double(), "pp=2", example_inputs=(rows,))(rows, again=rows)


def gathers_whole_tensors(parallel: Any) -> dict[str, float]:
    """``full_tensor`` of parameters and gradients is what one device has."""
    single = seeded(Odd)
    parallel.train_step(**odd_batch())
    single(**odd_batch())["loss"].backward()
    expected = dict(single.named_parameters())
    mine = dict(parallel.named_parameters())
    errors = {
        "parameters": difference(
            {name: one.full_tensor().detach() for name, one in mine.items()},
            {name: expected[name].detach() for name in mine},
        ),
        "gradients": difference(
            {name: one.grad.full_tensor() for name, one in mine.items()}, {name: expected[name].grad for name in mine}
        ),
    }
    parallel.zero_grad()
    other = {name: tensor + 1 for name, tensor in single.state_dict().items()}
    before = parallel.full_state_dict()
    parallel.load_state_dict({**other, "_extra_state": 5})
    errors["loaded"] = difference(parallel.full_state_dict(), other)
    assert parallel.full_state_dict(["_extra_state"]) == {"_extra_state": 5}
    parallel.load_full_state_dict({**before, "_extra_state": 3} if dist.get_rank() == 0 else {})
    assert parallel.full_state_dict(["_extra_state"]) == {"_extra_state": 3}
    return errors


def resumes_by_dcp(plan: str, other: str) -> float:
    """PyTorch's checkpoint of one plan goes on under another as one device does."""
    folder = Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / f"dcp {plan} {other}"
    single = seeded(Odd)
    single_optimizer = OPTIMIZERS["AdamW"](single.parameters())
    parallel = renewed(plan)
    optimizer = OPTIMIZERS["AdamW"](parallel.parameters())
    for module, one in ((parallel, optimizer), (single, single_optimizer)):
        step(module, one, clip=lambda *_: 0.0)
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    parallel = renewed(other)
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    optimizer = OPTIMIZERS["AdamW"](parallel.parameters())
    model_state, optimizer_state = get_state_dict(parallel, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(parallel, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for module, one in ((parallel, optimizer), (single, single_optimizer)):
        step(module, one, clip=lambda *_: 0.0)
    return difference(parallel.full_state_dict(), dict(single.state_dict()))


def resumes_statistics(plan: str, other: str) -> float:
    """A checkpoint, then a move, with statistics of rows and columns: weights are those of one device."""
    manager = planner.CheckpointManager(Path(os.environ["MESHWRIGHT_TEST_FOLDER"]) / f"statistics {plan} {other}")
    make = OPTIMIZERS.get("Adafactor of transformers, its own rates", OPTIMIZERS["Adafactor"])
    modules = single, parallel, resumed = seeded(Odd), renewed(plan), compiled(other)
    single_optimizer, *optimizers = (make(list(one.parameters())) for one in modules)
    step(single, single_optimizer, clip=lambda *_: 0.0)
    step(parallel, optimizers[0], clip=lambda *_: 0.0)
    manager.save(parallel, optimizers[0], step=1)
    manager.load(resumed, optimizers[1])
    resumed.replan(f"dp={dist.get_world_size()}", optimizers[1])
    step(single, single_optimizer, clip=lambda *_: 0.0)
    step(resumed, optimizers[1], clip=lambda *_: 0.0)
    return difference(resumed.full_state_dict(), dict(single.state_dict()))


def takes_over_an_optimizer(plan: str) -> float:
    """An optimizer made before compile, and stepped once, trains the parallel module."""
    models = seeded(Odd), seeded(Odd)
    optimizers = [OPTIMIZERS["AdamW"](model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers):
        step(model, optimizer, clip=lambda *_: 0.0)
    target, options = PLANS[plan]
    parallel = planner.compile(models[0], target, example_inputs=odd_batch(), optimizer=optimizers[0], **options)
    for module, optimizer in zip((parallel, models[1]), optimizers):
        step(module, optimizer, clip=lambda *_: 0.0)
    return difference(parallel.full_state_dict(), dict(models[1].state_dict()))


def refusals() -> dict[str, str]:
    model, batch = seeded(Odd), odd_batch()
    early = torch.optim.AdamW(model.parameters())
    target, options = PLANS["zero 1"]
    parallel = planner.compile(model, target, example_inputs=batch, **options)
    parallel.train_step(**batch)
    parameter = parallel.first.weight
    results = {
        "early optimizer": error_of(early.step),
        "LBFGS": error_of(lambda: torch.optim.LBFGS(parallel.parameters()).step(lambda: 0.0)),
        "pickle": error_of(lambda: pickle.dumps(parallel)),
        "copy": error_of(lambda: copy.copy(parallel)),
        "DDP": error_of(lambda: nn.parallel.DistributedDataParallel(parallel)),
        "fully_shard": error_of(lambda: fully_shard(parallel)),
        "FSDP": error_of(lambda: FullyShardedDataParallel(parallel, device_id=torch.device("cpu"))),
        "plain gradient": error_of(lambda: setattr(parameter, "grad", torch.zeros(8, 6))),
    }
    if are_subclasses_dispatched():
        noise = torch.full((8, 6), float(os.environ["RANK"]), dtype=torch.float64)
        results["noise"] = error_of(lambda: parameter.grad.add_(noise))
    parallel.first._parameters["weight"] = nn.Parameter(torch.zeros(8, 6))
    results["replaced"] = error_of(lambda: parallel.train_step(**batch))
    pipeline = compiled("pp")
    pipeline.train_step(**batch)
    outputs = pipeline(**batch)
    assert hasattr(outputs, "loss") and not hasattr(outputs, "logits")
    results["method"] = error_of(lambda: pipeline.encode(batch["x"].to("meta")))
    results["weight elsewhere"] = error_of(looks_up_late)
    outputs["loss"].backward(retain_graph=True)
    results["twice"] = error_of(outputs["loss"].backward)
    results["hook"] = error_of(lambda: next(iter(pipeline.parameters())).register_hook(torch.neg))
    results["clip"] = error_of(lambda: nn.utils.clip_grad_norm_(pipeline.parameters(), 1.0))
    stack = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    alone = planner.compile(stack, "pp=2", example_inputs=(batch["x"],))
    results["loss outside"] = error_of(alone(batch["x"]).sum().backward)
    whole = compiled("zero 1")
    weights = list(whole.parameters())
    results["second"] = error_of(lambda: torch.autograd.grad(whole(**batch)["loss"], weights, create_graph=True))
    results["one parameter"] = error_of(lambda: nn.utils.get_total_norm([next(iter(pipeline.parameters())).grad]))
    frozen = seeded(Odd)
    frozen.first.requires_grad_(False)
    planned_frozen = planner.compile(frozen, "pp=2", example_inputs=odd_batch())
    planned_frozen.requires_grad_(True)
    results["thawed"] = error_of(lambda: planned_frozen.train_step(**batch))
    return results


def hooks_see_whole_gradients(plan: str) -> float:
    """Gradients after two steps: one that a hook doubles each time, and one that is halved whenever it is added to."""

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    parallel, single = compiled(plan), seeded(Odd)
    for module in (parallel, single):
        module.inner.weight.register_hook(lambda gradient: gradient * 2)
        module.last.bias.register_post_accumulate_grad_hook(halve)
    for _ in range(2):
        parallel.train_step(**odd_batch())
        single(**odd_batch())["loss"].backward()
    return difference(parallel.full_gradients(), {name: p.grad for name, p in single.named_parameters()})


def layers_may_be_frozen(plan: str) -> float:
    """Weights after steps of which the last ones leave a layer as it is."""
    parallel, single = compiled(plan), seeded(Odd)
    for module in (parallel, single):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for number in range(4):
            if number == 2:
                for name, parameter in module.named_parameters():
                    parameter.requires_grad_(not name.startswith("inner"))
            step(module, optimizer, clip=lambda *_: 0.0)
    return difference(parallel.full_state_dict(), dict(single.state_dict()))


def backward_after_one_that_raised(plan: str) -> float:
    """Gradients of a backward pass after two that ran out of memory, which a script catches."""

    def raises(gradient: torch.Tensor) -> None:
        raise MemoryError

    parallel, single = compiled(plan), seeded(Odd)
    for module in (parallel, single):
        for hook in (raises, raises, lambda gradient: None):
            batch = odd_batch()
            batch["x"].requires_grad_().register_hook(hook)
            module.zero_grad()
            with contextlib.suppress(MemoryError):
                module(**batch)["loss"].backward()
    return difference(parallel.full_gradients(), {name: p.grad for name, p in single.named_parameters()})


def one_backward_of_several_forwards(plan: str) -> float:
    """Gradients of a sum of two losses, with an evaluation before it is differentiated."""
    parallel, single = renewed(plan), seeded(Odd)
    for module in (parallel, single):
        losses = [module(**odd_batch())["loss"] for _ in range(2)]
        module.eval()
        with torch.inference_mode():
            evaluated = module(**odd_batch())["loss"]
        module.train()
        (losses[0] + 2 * losses[1] + evaluated).backward()
    return difference(parallel.full_gradients(), {name: p.grad for name, p in single.named_parameters()})


def gradients_asked_for(plan: str) -> float:
    """Gradients that ``autograd.grad`` gives, and those after passes of which one is for some parameters only."""
    parallel, single = renewed(plan), seeded(Odd)
    results: list[dict[str, torch.Tensor]] = []
    for module in (parallel, single):
        trained = dict(module.named_parameters())
        module(**odd_batch())["loss"].backward()
        given = torch.autograd.grad(3 * module(**odd_batch())["loss"], list(trained.values()))
        (module(**odd_batch())["loss"] / 2).backward(
            inputs=[one for name, one in trained.items() if name.endswith("weight")]
        )
        result = dict(zip(trained, given)) | {f"{name}.grad": one.grad for name, one in trained.items()}
        results.append({name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in result.items()})
    mine, expected = results
    return difference(mine, {name: expected[name] for name in mine})  # a pipeline's rank has some of them


def gradients_asked_for_with_those_of_inputs(plan: str) -> float:
    """Gradients of parameters and of an input, of two outputs, asked for in one pass."""
    parallel, single = compiled(plan), seeded(Odd)
    results = []
    for module in (parallel, single):
        batch = odd_batch()
        live = batch["x"].requires_grad_()
        names, parameters = zip(*module.named_parameters())
        module(**batch)["loss"].backward(inputs=[live, *parameters])
        again = torch.autograd.grad(module(**batch)["loss"], parameters)
        result = dict(zip(names, again)) | {f"{name}.grad": one.grad for name, one in zip(names, parameters)}
        results.append({name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in result.items()})
        results[-1]["x"] = live.grad
    return difference(*results)


def gradients_of_a_penalty_are_added() -> bool:
    """What autograd computes on the DTensors joins what the program computes."""
    parallel, single = renewed("tp"), seeded(Odd)
    for module in (parallel, single):
        module(**odd_batch())["loss"].backward()
        sum(parameter.square().sum() for parameter in module.parameters()).backward()
    return difference(parallel.full_gradients(), {name: one.grad for name, one in single.named_parameters()}) < 1e-9


def averages_weights(plan: str) -> float:
    """An average is a copy that runs for itself: its weights, its loss and its gradients."""
    parallel, single = renewed(plan), seeded(Odd)
    averages = []
    for module in (parallel, single):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(2):
            step(module, optimizer, clip=lambda _, norm: norm)
            average.update_parameters(module)
        averages.append(average.module)
    copied, expected = averages
    copied.train_step(**odd_batch())
    expected(**odd_batch())["loss"].backward()
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    trained = difference(parallel.full_state_dict(), dict(single.state_dict()))
    weights = difference(copied.full_state_dict(), dict(expected.state_dict()))
    return max(trained, weights, difference(copied.full_gradients(), gradients))


def loss_of(module: Any) -> float:
    with torch.no_grad():
        return float(module(**odd_batch())["loss"])


def torch_compile_leaves_it_as_it_is() -> bool:
    parallel, single = compiled("tp"), seeded(Odd)
    for module in (torch.compile(parallel, backend="eager"), single):
        module(**odd_batch())["loss"].backward()
    expected = {name: parameter.grad for name, parameter in single.named_parameters()}
    return difference(parallel.full_gradients(), expected) < 1e-9


def outputs_outlive_a_plan() -> list[float]:
    """Gradients under other plans while a script holds the outputs of the first, and with plans of first calls.

    Parameters are frozen before the last plan.
    """
    errors = []
    for parallel in (compiled("dp"), planner.compile(seeded(Odd), "dp=2")):
        held = []
        for target in ("tp=2", "dp=2", None):
            single = seeded(Odd)
            for module in (parallel, single):
                module.first.requires_grad_(target is not None)
                module.zero_grad()
                held.append(module(**odd_batch())["loss"])
                held[-1].backward()
            expected = {name: one.grad for name, one in single.named_parameters() if one.grad is not None}
            errors.append(difference({name: parallel.full_gradients()[name] for name in expected}, expected))
            if target == "dp=2":
                parallel.first.requires_grad_(False)
            if target:
                parallel.replan(target)
    return errors


class Checkpointed(Odd):
    """A model that recomputes a part of itself."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return checkpoint(super().forward, x, y, use_reentrant=False)  # type: ignore[no-any-return]


def recomputed_on_a_mesh() -> tuple[list[str], float]:
    """How a mesh that is given recomputes such a model, and how far its gradients are off."""
    parallel, single = planner.compile(seeded(Checkpointed), "tp=2", example_inputs=odd_batch()), seeded(Odd)
    parallel.train_step(**odd_batch())
    single(**odd_batch())["loss"].backward()
    expected = {name: one.grad for name, one in single.named_parameters()}
    return list(parallel.plan.step.recompute), difference(parallel.full_gradients(), expected)


def main() -> None:
    asked = task()
    # Muon rounds to 16 bits: what is left of sums in another order is no measure.
    torch.Tensor.bfloat16 = torch.Tensor.clone  # type: ignore[assignment]
    result: dict[str, Any] = {
        "whole": {plan: gathers_whole_tensors(renewed(plan)) for plan in asked["plans"]},
        "one device": {plan: against_one_device(plan, optimizers) for plan, optimizers in asked["plans"].items()},
        "dcp": [resumes_by_dcp(*pair) for pair in asked["dcp"]],
        "adopted": [takes_over_an_optimizer(plan) for plan in asked["adopted"]],
    }
    result["scaled"] = {plan: wrong_scaled_steps(plan) for plan in asked["plans"]}
    result["averages"] = {plan: averages_weights(plan) for plan in asked["plans"]}
    expected = losses_with_averages(seeded(Odd), loss_of)
    losses = {plan: losses_with_averages(renewed(plan), loss_of) for plan in asked["plans"]}
    result["exchanged"] = {plan: max(abs(a - b) for a, b in zip(own, expected)) for plan, own in losses.items()}
    if are_subclasses_dispatched():
        result["statistics"] = [resumes_statistics(*pair) for pair in asked["dcp"]]
        result["operators"] = {plan: wrong_operators(renewed(plan), seeded(Odd)) for plan in asked["plans"]}
        plans = [plan for plan in asked["plans"] if not plan.startswith("pp")]
        result["draws"] = {plan: wrong_draws(renewed(plan), seeded(Odd)) for plan in plans}
    if asked["refusals"]:
        result["refusals"] = refusals()
        result["warned"] = warnings_by_choice()
        plans = [plan for plan in asked["plans"] if not plan.startswith("pp")]
        result["hooks"] = {plan: hooks_see_whole_gradients(plan) for plan in plans}
        result["frozen"] = {plan: layers_may_be_frozen(plan) for plan in asked["plans"]}
        result["raised"] = {plan: backward_after_one_that_raised(plan) for plan in plans}
        result["several"] = {plan: one_backward_of_several_forwards(plan) for plan in (*plans, "zero 1")}
        result["asked for"] = {plan: gradients_asked_for(plan) for plan in (*asked["plans"], "zero 1")}
        result["asked for with inputs"] = {plan: gradients_asked_for_with_those_of_inputs(plan) for plan in plans}
        result |= {"held outputs": outputs_outlive_a_plan(), "penalty": gradients_of_a_penalty_are_added()}
        result |= {"torch.compile": torch_compile_leaves_it_as_it_is(), "recomputed": recomputed_on_a_mesh()}
    answer(result)


if __name__ == "__main__":
    with traced_once():
        main()
