"""One rank of the tests of ``planner.Trainer``; rank 0 says what every scenario found."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import IterableDataset, default_collate

import planner
from planner.trainer import decay_groups, warmup_cosine
from tests.ranks import answer, task
from tests.small_models import Mlp, TiedClassifier, mlp_batch, seeded, squared_error, token_batch
from tests.tracing import traced_once

BATCH = 8
NUM_SAMPLES = 21  # two full batches and one that is not


def samples(count: int = NUM_SAMPLES) -> list[dict[str, torch.Tensor]]:
    batch = token_batch(batch=count)
    return [{name: tensor[row] for name, tensor in batch.items()} for row in range(count)]


def pairs(count: int = NUM_SAMPLES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(*mlp_batch(batch=count)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(decay_groups(parameters, weight_decay=0.1), lr=0.3, momentum=0.9)


def trainer(mesh: str = "dp=2", **options: Any) -> planner.Trainer:
    actual = {"optimizer": sgd, "lr_schedule": warmup_cosine(2, 12), "max_grad_norm": 0.5, "log_every": 0}
    return planner.Trainer(seeded(TiedClassifier), mesh, global_batch=BATCH, **{**actual, **options})


def reference(num_epochs: int) -> tuple[list[float], float]:
    """Losses of a loop by hand, on one device, and the loss over all samples after it."""
    model = seeded(TiedClassifier)
    optimizer = sgd(model.parameters())
    schedule = warmup_cosine(2, 12)(optimizer)
    loader = planner.DataLoader(samples(), batch_size=BATCH, last="short")
    losses = []
    for _ in range(num_epochs):
        for batch in loader:
            loss = model(**batch)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    with torch.no_grad():
        return losses, float(model(**default_collate(samples()))["loss"])


def reference_losses(num_epochs: int) -> list[float]:
    return reference(num_epochs)[0]


def difference(actual: Any, expected: Any) -> float:
    actual, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    return (
        float((actual - expected).abs().max() / expected.abs().max())
        if actual.shape == expected.shape
        else float("inf")
    )


def shared_folder() -> str:
    message = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(message)
    return message[0]


class Killed(Exception):
    """Stands for what ends a process."""


class EndsAfter(list[Any]):
    """Samples of which only so many can be read."""

    reads = 0

    def __init__(self, content: list[Any], allowed: int) -> None:
        super().__init__(content)
        self.allowed = allowed

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        if self.reads > self.allowed:
            raise Killed
        return super().__getitem__(index)


def fit_is_the_loop_by_hand() -> float:
    result = trainer().fit(samples(), num_epochs=3)
    assert result.step == 9 and result.best is None
    return difference(result.losses, reference_losses(3))


def a_plan_with_a_pipeline() -> float:
    result = trainer("pp=2", eval_every=6).fit(samples(), samples(), num_epochs=2)
    losses, after = reference(2)
    return difference([*result.losses, result.evaluations[6]["loss"]], [*losses, after])


def evaluation_with_a_pipeline() -> float:
    compiled_trainer = trainer("pp=2")
    expected = seeded(TiedClassifier)(**default_collate(samples()))
    predicted = difference(torch.stack(compiled_trainer.predict(samples())), expected["logits"].detach())
    return max(predicted, difference(compiled_trainer.evaluate(samples())["loss"], expected["loss"].detach()))


def a_cluster_in_the_place_of_a_mesh() -> float:
    compiled_trainer = trainer("cpu-local:2")
    losses = compiled_trainer.fit(samples(), num_epochs=1).losses
    assert compiled_trainer.parallel.plan.step is not None
    return difference(losses, reference_losses(1))


def killed_and_gone_on(**more: Any) -> float:
    """Killed in the second epoch, after a checkpoint in its middle."""
    options: dict[str, Any] = {"checkpoint_dir": shared_folder(), "save_every": 2, **more}
    read = BATCH + 5 * BATCH // 2  # an example to plan for, then each rank's share of five batches
    first = trainer(**options)
    try:
        first.fit(EndsAfter(samples(), read), num_epochs=3)
        raise AssertionError("it was not killed")
    except Killed:
        first.wait_for_checkpoints()
    again = trainer(**options)
    losses = again.fit(samples(), num_epochs=3).losses
    assert again.step == 9 and len(losses) == 5
    return difference(losses, reference_losses(3)[4:])


def a_killed_run_goes_on() -> float:
    return killed_and_gone_on()


def a_run_killed_after_its_best_goes_on() -> float:
    """The best checkpoint is later than the last one: it is found, and written, a second time."""
    folder = shared_folder()
    options: dict[str, Any] = {"checkpoint_dir": folder, "save_every": 2, "eval_every": 1}
    expected = trainer(eval_every=1).fit(samples(), samples(), num_steps=6)
    with contextlib.suppress(Killed):
        trainer(**options).fit(EndsAfter(samples(), BATCH + 3 * BATCH // 2), samples(), num_steps=6)
    result = trainer(**options).fit(samples(), samples(), num_steps=6)
    assert list(result.evaluations) == [3, 4, 5, 6]
    return difference([*result.losses, result.best], [*expected.losses[2:], expected.best])


def a_killed_run_that_saves_in_the_background_goes_on() -> float:
    """With the weights at the moment of saving, not those of the step during which they were written."""
    return killed_and_gone_on(save_asynchronously=True)


def another_mesh_goes_on() -> float:
    folder = shared_folder()
    trainer("dp=2", checkpoint_dir=folder).fit(samples(), num_steps=4)
    result = trainer("tp=2", checkpoint_dir=folder).fit(samples(), num_steps=9)
    return difference(result.losses, reference_losses(3)[4:])


def dropout_goes_on() -> float:
    """The masks after a checkpoint are those of a run that was never stopped."""

    def fit(num_steps: int, folder: str) -> tuple[float, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.Linear(32, 8)).double()
        compiled_trainer = planner.Trainer(
            model, "dp=2", loss_fn=squared_error, global_batch=BATCH, checkpoint_dir=folder, log_every=0
        )
        return compiled_trainer.fit(pairs(3 * BATCH), num_steps=num_steps).losses

    first, second = shared_folder(), shared_folder()
    whole = fit(6, first)
    return difference([*fit(4, second), *fit(6, second)], whole)


def nothing_is_left_to_do() -> float:
    folder = shared_folder()
    first = trainer(checkpoint_dir=folder).fit(samples(), num_steps=3)
    again = trainer(checkpoint_dir=folder).fit(samples(), num_steps=3)
    return float(first.step != again.step or again.losses != ())


def evaluation_is_exact() -> float:
    """Samples with different numbers of labels; the last batch is not full."""
    evaluation = trainer().evaluate(samples())
    expected = seeded(TiedClassifier)(**default_collate(samples()))["loss"]
    return difference(evaluation["loss"], expected.detach())


class Stream(IterableDataset[Any]):
    def __init__(self, count: int = NUM_SAMPLES) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(samples(self.count))


def streams_are_trained_on() -> float:
    result = trainer().fit(Stream(), samples(), num_epochs=2)
    expected = trainer(loader={"shuffle": False}).fit(samples(), samples(), num_epochs=2)
    assert list(result.evaluations) == list(expected.evaluations) == [3, 6]
    return difference([*result.losses, result.best], [*expected.losses, expected.best])


def fit_again_goes_on() -> float:
    compiled_trainer = trainer()
    losses = [
        loss for num_steps in (2, 2, 1, 6) for loss in compiled_trainer.fit(samples(), num_steps=num_steps).losses
    ]
    return difference(losses, reference_losses(2))


def streams_are_evaluated() -> float:
    expected = seeded(TiedClassifier)(**default_collate(samples()))["loss"]
    return difference(trainer("tp=2").evaluate(Stream())["loss"], expected.detach())


def evaluation_without_labels_is_exact() -> float:
    def first_error(outputs: Any, batch: Any) -> torch.Tensor:
        return (outputs.outputs - batch[1]).abs()[:, 0]

    compiled_trainer = planner.Trainer(
        seeded(Mlp), "dp=2", loss_fn=squared_error, metrics={"error": first_error}, global_batch=BATCH, log_every=0
    )
    evaluation = compiled_trainer.evaluate(pairs())
    inputs, targets = default_collate(pairs())
    outputs = seeded(Mlp)(inputs).detach()
    expected = [squared_error(outputs, (inputs, targets)), (outputs - targets).abs()[:, 0].mean()]
    return difference([evaluation["loss"], evaluation["error"]], torch.stack(expected))


def predictions_are_in_order() -> float:
    expected = seeded(TiedClassifier)(**default_collate(samples()))["logits"].detach()
    return difference(torch.stack(trainer().predict(samples())), expected)


def predict_fn_may_return_anything() -> float:
    def best(parallel: Any, batch: Any) -> list[str]:
        return [str(int(row[0].argmax())) for row in parallel(**batch)["logits"]]

    expected = seeded(TiedClassifier)(**default_collate(samples()))["logits"].detach()
    return float(trainer(predict_fn=best).predict(samples()) != [str(int(row[0].argmax())) for row in expected])


def the_best_weights_come_back() -> float:
    """Losses rise from the second evaluation on: the schedule's peak is far too high."""
    compiled_trainer = trainer(checkpoint_dir=shared_folder(), eval_every=1, max_grad_norm=None, lr_schedule=None)
    result = compiled_trainer.fit(samples(), samples(), num_steps=8)
    losses = {step: evaluation["loss"] for step, evaluation in result.evaluations.items()}
    assert list(losses) == list(range(1, 9)) and result.best == min(losses.values()) < losses[8]
    return difference([compiled_trainer.load_best(), compiled_trainer.evaluate(samples())["loss"]], [result.best] * 2)


def a_loss_that_is_not_finite_is_told() -> float:
    try:
        trainer(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=float("inf")), max_grad_norm=None).fit(
            samples(), num_steps=6
        )
    except FloatingPointError as error:
        return float("the loss of step" not in str(error))
    return 1.0


def everything_is_logged() -> float:
    records: list[dict[str, float]] = []
    compiled_trainer = trainer(log_every=2, on_log=lambda values: records.append(dict(values)))
    result = compiled_trainer.fit(samples(), samples(), num_steps=4)
    if dist.get_rank() != 0:
        return float(records != [])
    assert [record["step"] for record in records] == [2, 3, 4, 4]
    assert "eval_loss" in records[1] and "eval_loss" in records[3]
    return difference(records[0]["loss"], sum(result.losses[:2]) / 2)


def training_that_cannot_go_on_ends() -> float:
    """No epochs are no steps; a stream without a whole batch is refused rather than read for ever."""
    nothing = trainer().fit(samples(), num_epochs=0)
    try:
        trainer(loader={"last": "drop"}).fit(Stream(3), num_steps=1)
    except ValueError as error:
        return float(nothing.step) if "no batch of 8 samples" in str(error) else float("inf")
    return float("inf")


SCENARIOS: tuple[Callable[[], float], ...] = (
    training_that_cannot_go_on_ends,
    fit_is_the_loop_by_hand,
    a_plan_with_a_pipeline,
    evaluation_with_a_pipeline,
    a_cluster_in_the_place_of_a_mesh,
    a_killed_run_goes_on,
    a_run_killed_after_its_best_goes_on,
    a_killed_run_that_saves_in_the_background_goes_on,
    another_mesh_goes_on,
    dropout_goes_on,
    nothing_is_left_to_do,
    evaluation_is_exact,
    streams_are_trained_on,
    fit_again_goes_on,
    streams_are_evaluated,
    evaluation_without_labels_is_exact,
    predictions_are_in_order,
    predict_fn_may_return_anything,
    the_best_weights_come_back,
    a_loss_that_is_not_finite_is_told,
    everything_is_logged,
)

if __name__ == "__main__":
    names = task()
    with traced_once():
        evaluation = {scenario.__name__: scenario() for scenario in SCENARIOS if scenario.__name__ in names}
    answer(evaluation)
