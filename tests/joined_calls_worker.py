"""One rank of the tests of calls that one process makes alone, as scripts do that save on the main process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import planner
from planner.integrations.accelerate import Accelerator
from tests.generation_cases import generated, model_named, training_batch
from tests.ranks import answer, result_of, task
from tests.small_models import Mlp, seeded, squared_error
from tests.tracing import traced_once

X = torch.linspace(-1, 1, 128, dtype=torch.float64).reshape(8, 16)
TARGET = torch.linspace(1, -1, 64, dtype=torch.float64).reshape(8, 8)
IS_FIRST = os.environ.get("RANK") == "0"


def mlp() -> Any:
    return planner.compile(seeded(Mlp), "dp=2", loss_fn=squared_error, example_inputs=(X, TARGET))


def others_join_before_their_next_call(folder: Path) -> bool:
    """A save and a state dict before a step, and another model's step: what is saved is of before it."""
    parallel, other = mlp(), mlp()
    expected = {name: tensor.clone() for name, tensor in parallel.full_state_dict().items()}
    seen = parallel.full_state_dict() if IS_FIRST else {}
    if IS_FIRST:
        parallel.save_pretrained(folder / "alone")
    other.train_step(X, TARGET)
    parallel.train_step(X, TARGET)
    torch.optim.SGD(parallel.parameters(), lr=1.0).step()
    parallel.wait_for_ranks()
    saved = load_file(folder / "alone" / "model.safetensors")
    return all(torch.equal(saved[name], expected[name]) for name in expected) and (
        not IS_FIRST or set(seen) == set(saved)
    )


def others_that_wait_join(folder: Path) -> bool:
    parallel = mlp()
    if not IS_FIRST:  # any rank may be the one that saves
        parallel.save_pretrained(folder / "waited")
    parallel.wait_for_ranks()
    return (folder / "waited" / "model.safetensors").exists()


def the_first_rank_generates_alone(folder: Path) -> bool:
    parallel = planner.compile(model_named("gpt2"), "tp=2", example_inputs=training_batch("gpt2"))
    tokens = generated(parallel, "gpt2", "greedy") if IS_FIRST else None
    parallel.wait_for_ranks()
    return not IS_FIRST or tokens == generated(model_named("gpt2"), "gpt2", "greedy")


def a_call_that_needs_its_arguments_is_refused(folder: Path) -> bool:
    parallel = mlp()
    try:
        if IS_FIRST:
            parallel.train_step(X, TARGET)
        else:
            parallel.full_gradients()
    except ValueError as error:
        return "ranks call different things" in str(error)
    return False


class Net(nn.Module):
    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(sizes[0], 16), nn.Tanh(), nn.Linear(16, sizes[1]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


class Against:
    """Two models with an optimizer each, trained against each other by accelerate."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.accelerator = Accelerator(cpu=True, mesh="dp=2", **options)
        torch.manual_seed(0)
        nets = Net((4, 8)).double(), Net((8, 1)).double()
        optimizers = torch.optim.Adam(nets[0].parameters(), lr=0.1), torch.optim.AdamW(nets[1].parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(24)]
        prepared = self.accelerator.prepare(*nets, *optimizers, DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
        self.maker, self.judge, self.of_maker, self.of_judge, self.loader = prepared

    def epoch(self) -> Iterator[float]:
        for batch in self.loader:
            made, real = self.maker(batch[:, :4]), batch[:, 4:]
            against = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(made.detach())).mean()
            self.accelerator.backward(against)
            self.of_judge.step()
            self.of_judge.zero_grad()
            loss = F.softplus(-self.judge(made)).mean()
            self.accelerator.backward(loss)
            self.of_maker.step()
            self.of_maker.zero_grad()
            self.of_judge.zero_grad()
            yield from (float(against), float(loss))


def two_models_go_on_from_their_state(folder: Path) -> bool:
    """Saved on the first process alone, where a hook saves more; loaded before there is a plan."""
    hooked: list[int] = []
    first = Against(folder)

    def hook(models: list[Any], weights: list[Any], output_dir: str) -> None:
        hooked.append(sum(map(len, weights)))
        if IS_FIRST:
            models[0].save_pretrained(Path(output_dir) / "maker")

    first.accelerator.register_save_state_pre_hook(hook)
    list(first.epoch())
    if IS_FIRST:
        first.accelerator.save_state(folder / "two")
    first.accelerator.wait_for_everyone()
    expected = list(first.epoch())
    second = Against(folder)
    second.accelerator.load_state(folder / "two")
    actual = list(second.epoch())
    assert hooked == [8] and (folder / "two" / "maker" / "model.safetensors").exists()
    return bool(torch.allclose(torch.tensor(actual), torch.tensor(expected), rtol=1e-9))


def states_are_numbered(folder: Path) -> bool:
    """As by accelerate, which removes the oldest; what a hook took out of the models keeps what the hook gave it."""
    project = ProjectConfiguration(project_dir=str(folder / "project"), automatic_checkpoint_naming=True, total_limit=2)
    script = Against(folder, project_config=project)
    list(script.epoch())
    for _ in range(3):
        script.accelerator.save_state()
    names = sorted(path.name for path in (folder / "project" / "checkpoints").iterdir())
    marked = {name: torch.full_like(tensor, 3.0) for name, tensor in script.maker.full_state_dict().items()}

    def load(models: list[Any], _: str) -> None:
        models.pop(0).load_full_state_dict(marked)

    before = script.judge.full_state_dict()
    list(script.epoch())
    script.accelerator.register_load_state_pre_hook(load)
    script.accelerator.load_state()
    maker, judge = script.maker.full_state_dict(), script.judge.full_state_dict()
    return (
        names == ["checkpoint_1", "checkpoint_2"]
        and all(torch.equal(maker[name], marked[name]) for name in marked)
        and all(torch.equal(judge[name], before[name]) for name in before)
    )


def values_are_not_scaled_by_the_processes(folder: Path) -> bool:
    """What undoes DDP's averages would be a wrong factor here."""
    accelerator = Accelerator(cpu=True)
    try:
        torch.ones(2) * accelerator.num_processes
    except ValueError as error:
        steps = torch.zeros(accelerator.num_processes * 4).view(accelerator.num_processes, -1)
        return "leave the factor out" in str(error) and tuple(steps.shape) == (2, 4)
    return False


def stages_take_their_part_of_a_whole_state_dict(folder: Path) -> bool:
    """As hooks of scripts give it; what the model does not have, or the state dict, is refused or told on all ranks."""
    parallel = planner.compile(seeded(Mlp), "pp=2", loss_fn=squared_error, example_inputs=(X, TARGET))
    marked = {name: tensor + 1 for name, tensor in parallel.full_state_dict().items()}
    parallel.load_state_dict(marked)
    try:
        parallel.load_state_dict({**marked, "unknown": X})
    except RuntimeError as error:
        taken = parallel.full_state_dict()
        if "unknown" not in str(error) or not all(torch.equal(taken[name], marked[name]) for name in marked):
            return False
    for name in marked:
        others = {other: tensor for other, tensor in marked.items() if other != name}
        refused = str(result_of(parallel.load_state_dict, others))
        told = parallel.load_state_dict(others, strict=False).missing_keys
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, name in refused and told == [name])
        if not all(by_rank):
            return False
    return True


SCENARIOS: tuple[Callable[[Path], bool], ...] = (
    others_join_before_their_next_call,
    others_that_wait_join,
    the_first_rank_generates_alone,
    a_call_that_needs_its_arguments_is_refused,
    two_models_go_on_from_their_state,
    states_are_numbered,
    stages_take_their_part_of_a_whole_state_dict,
    values_are_not_scaled_by_the_processes,
)


if __name__ == "__main__":
    place = Path(task())
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    passed = {}
    with traced_once():
        for scenario in SCENARIOS:
            outcomes: list[Any] = [None, None]
            dist.all_gather_object(outcomes, scenario(place))
            passed[scenario.__name__] = all(outcomes)
    answer(passed)
