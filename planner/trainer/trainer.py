"""``planner.Trainer``: planning, sharding, training, evaluation, checkpoints and resuming in three functions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cost_models.checked_numbers import check_whole_number
from cost_models.short_text import ShortRepr
from planner.changing.freezing import Freezing
from planner.compilation import compile
from planner.targets import Target
from planner.trainer import trainer_batches as batches
from planner.trainer.evaluation import evaluate, predict
from planner.trainer.gradual_freezing import GradualFreezing
from planner.trainer.optimizers import MakeOptimizer, default_optimizer, on_planned_memory
from planner.trainer.reporting import OnLog, Reporter
from planner.trainer.saving import Saver
from runtime import ops
from runtime.data.loader import DataLoader
from runtime.data.padding import PaddedCollator, Padding, gives_several_lengths, read_padding
from runtime.module.parallel_module import ParallelModule
from runtime.zero.norm import check_max_norm


@dataclass(frozen=True)
class Moment:
    """A point in training: after ``step`` (None: after no new one), at an epoch's end, at the end of it all."""

    step: int | None
    epoch_ends: bool
    ends: bool

    def is_for(self, every: int | None) -> bool:
        """Whether an action due every ``every`` steps (None: every epoch) is due now."""
        due = self.epoch_ends if every is None else self.step is not None and self.step % every == 0
        return due or self.ends


@dataclass(frozen=True, repr=False)
class FitResult(ShortRepr):
    """The result of ``fit``.

    Attributes:
        step: optimizer steps done in all, those of earlier runs included.
        losses: of the steps that this run did, in order.
        evaluations: ``evaluate``'s results by step.
        best: the lowest evaluation loss, of earlier runs too; None without an evaluation.
    """

    step: int
    losses: tuple[float, ...]
    evaluations: dict[int, dict[str, float]]
    best: float | None


class Trainer:
    """Trains, evaluates and runs a model on a mesh; every rank makes one and calls its methods together.

    It is a thin layer: for a loop of your own use ``planner.compile``, ``planner.DataLoader`` and
    ``parallel.train_step``.

    Args:
        model, mesh, loss_fn: as in ``planner.compile``; it is planned for the first dataset's batches.
        collate_fn: list of samples → batch (a mapping of the model's arguments, a tuple of them, or a tensor).
        predict_fn: ``predict_fn(parallel, batch)`` → one output for each sample of a batch, for ``predict``. Default:
            the model's logits (or its first output beside the loss).
        predict_with_generate: ``predict`` gives what ``parallel.generate`` makes of a batch (less its labels): True, or
            options of it (``{"max_new_tokens": 20}``).
        metrics: by name, functions ``(outputs, batch)`` → a value for each sample, or their mean.
        optimizer: parameters → optimizer. Default: AdamW, lr 1e-3, weight decay 0.01 but on norms and biases (see
            ``planner.trainer.decay_groups``).
        lr_schedule: optimizer → schedule, stepped after every step (see ``planner.trainer.warmup_cosine``).
        global_batch: samples in an optimizer step, over all ranks and micro-batches.
        max_grad_norm: gradients are scaled down to this norm.
        freeze: layers to freeze on the way, and what to go on under then (``planner.Freezing``).
        seed: of the order of samples, dropout, and the initialisation of a model on the meta device.
        checkpoint_dir: where the last ``keep_last`` checkpoints (``last/``) and the one with the lowest evaluation loss
            (``best/``) are kept. ``fit`` goes on from the last one there is.
        save_asynchronously: checkpoints are copied, and written while training goes on.
        eval_every, save_every: steps between evaluations, and between checkpoints; None: at the end of each epoch. The
            last step of ``fit`` has both in any case.
        log_every: steps between lines of the log; 0: silence.
        on_log: called on the first rank with everything that is logged.
        loader: options of ``planner.DataLoader`` for training (``num_workers``, ``shuffle``, ``last``, ``pad_to``, …).
            With ``pad_to`` evaluation is padded too, and the step is planned for the largest bucket. A last batch that
            is not full is trained on as it is (``last="whole"``): one program more, the same under any loss.
        label_fields: names of integer labels in a batch: what a mean loss is weighed by in ``evaluate``.
        count_fn: batch → how many samples or tokens its mean loss is over, where labels do not tell.
        **options: of ``planner.compile``: ``constraints``, ``fix``, ``memory_limit``, …

    Raises:
        ValueError: for a global batch or an interval that is not a whole number above zero, and for a ``max_grad_norm``
            below zero or not a number.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Target,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        predict_fn: Callable[[ParallelModule, Any], Any] | None = None,
        predict_with_generate: bool | Mapping[str, Any] = False,
        metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
        optimizer: MakeOptimizer = default_optimizer,
        lr_schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        global_batch: int,
        max_grad_norm: float | None = None,
        freeze: Freezing | None = None,
        seed: int = 0,
        checkpoint_dir: str | Path | None = None,
        keep_last: int = 2,
        save_asynchronously: bool = False,
        eval_every: int | None = None,
        save_every: int | None = None,
        log_every: int = 10,
        on_log: OnLog | None = None,
        loader: Mapping[str, Any] | None = None,
        label_fields: tuple[str, ...] = ("labels",),
        count_fn: Callable[[Any], float] | None = None,
        **options: Any,
    ) -> None:
        check_whole_number("global_batch", global_batch, at_least=1)
        check_whole_number("log_every", log_every, at_least=0)
        for name, every in (("eval_every", eval_every), ("save_every", save_every)):
            if every is not None:
                check_whole_number(name, every, at_least=1)
        if max_grad_norm is not None:
            check_max_norm(max_grad_norm, "max_grad_norm")
        self.model = model
        self.mesh = mesh
        self.global_batch = global_batch
        self.collate_fn = collate_fn
        if predict_fn is not None and predict_with_generate:
            raise ValueError("predict_fn and predict_with_generate both say what predict gives: drop one of them")
        self.predict_fn = predict_fn
        generates = predict_with_generate is not False
        options_of_generate = {} if isinstance(predict_with_generate, bool) else dict(predict_with_generate)
        self.predict_with_generate = options_of_generate if generates else None
        self.metrics = dict(metrics or {})
        self.max_grad_norm = max_grad_norm
        self._freeze = freeze
        self._freezing: GradualFreezing | None = None
        self.seed = seed
        self.eval_every = eval_every
        self.save_every = save_every
        self.log_every = log_every
        self.on_log = on_log
        self.label_fields = label_fields
        shifted = batches.shifts_labels(model)
        self.count_fn = count_fn or (lambda batch: batches.count_valid(batch, label_fields, shifted=shifted))
        self.step = 0
        self._make_optimizer = optimizer
        self._make_schedule = lr_schedule
        self._loss_fn = loss_fn
        self.loader_options = dict(loader or {})
        self._padding: Padding | None = None
        if "pad_to" in self.loader_options:
            options_of_labels = {"label_fields": label_fields, **self.loader_options}
            names = ("pad_to", "label_fields", "ignore_index", "pad_values")
            self._padding = read_padding(
                **{name: options_of_labels[name] for name in names if name in options_of_labels}
            )
        self._save: dict[str, Any] = {"keep_last": keep_last, "asynchronous": save_asynchronously}
        self._checkpoint_dir = checkpoint_dir
        self._options = options
        self._parallel: ParallelModule | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: Any = None
        self._saver: Saver | None = None
        self._position: dict[str, Any] | None = None

    def fit(
        self,
        train_dataset: Any,
        eval_dataset: Any = None,
        *,
        num_epochs: int | None = None,
        num_steps: int | None = None,
    ) -> FitResult:
        """Train until ``num_epochs`` or ``num_steps`` are done, counted from the very first run.

        Called again, it goes on with the epoch (if the dataset has the same length; else another one begins).

        Raises:
            ValueError: unless exactly one of them is given, a whole number; for a dataset without a whole batch; and as
                ``planner.compile`` and ``planner.DataLoader``.
            FloatingPointError: if a loss is not a finite number.
        """
        if (num_epochs is None) == (num_steps is None):
            raise ValueError("give num_epochs or num_steps: how long to train")
        for name, count in (("num_epochs", num_epochs), ("num_steps", num_steps)):
            if count is not None:
                check_whole_number(name, count, at_least=0)
        self._prepare(train_dataset)
        loader = self._loader(train_dataset)
        self._total_steps = num_steps if num_steps is not None else _steps(loader, num_epochs)
        self._check_freezing(loader)
        evaluations: dict[int, dict[str, float]] = {}
        with Reporter(first=self.is_first, log_every=self.log_every, on_log=self.on_log) as reporter:
            if self._saver is not None and self._saver.resume(self, loader):
                reporter.say(f"resumed at step {self.step}, epoch {loader.epoch}")
            elif self._position is not None and self._position["num_samples"] == loader.num_samples:
                loader.load_state_dict(self._position)
            reporter.start(self.step, self._total_steps)
            for moment in self._steps(loader, reporter, num_epochs, num_steps):
                evaluated = eval_dataset is None or self.step in evaluations
                if not evaluated and moment.is_for(self.eval_every):
                    reporter.check()
                    evaluations[self.step] = self.evaluate(eval_dataset)
                    reporter.log(self.step, **{f"eval_{name}": value for name, value in evaluations[self.step].items()})
                    if self._saver is not None:
                        self._saver.save_best(self, loader, evaluations[self.step]["loss"])
                if self._saver is not None and moment.is_for(self.save_every):
                    reporter.check()
                    self._saver.save(self, loader)
            reporter.check()
        self._position = loader.state_dict()
        self.wait_for_checkpoints()
        best = min((metrics["loss"] for metrics in evaluations.values()), default=None)
        if self._saver is not None and self._saver.best < math.inf:
            best = self._saver.best
        return FitResult(self.step, tuple(reporter.losses), evaluations, best)

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """The mean ``loss`` over a whole dataset, weighed by valid labels (or samples), and the mean of each metric.

        The same on every rank; nothing of the dataset is left out or counted twice.
        """
        self._prepare(dataset)
        with self._evaluating():
            return evaluate(self, dataset)

    def predict(self, dataset: Any) -> list[Any]:
        """One output for each sample of a dataset, in its order, on every rank (tensors on the CPU)."""
        self._prepare(dataset)
        with self._evaluating():
            return predict(self, dataset)

    def wait_for_checkpoints(self) -> None:
        """Wait until checkpoints written in the background are complete; ``fit`` ends with this."""
        if self._saver is not None:
            self._saver.wait()

    def load_best(self) -> float:
        """Go back to the weights of the lowest evaluation loss, and return it.

        Raises:
            ValueError: if there is no ``checkpoint_dir``, or nothing in it yet.
        """
        if self._saver is None:
            raise ValueError("there is no best checkpoint: give checkpoint_dir=, and call fit with an eval_dataset")
        return self._saver.load_best(self)

    @property
    def parallel(self) -> ParallelModule:
        """The sharded model.

        Raises:
            ValueError: before the first ``fit``, ``evaluate`` or ``predict``.
        """
        if self._parallel is None:
            raise ValueError("the model is planned for the first dataset: call fit, evaluate or predict first")
        return self._parallel

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of this rank's parameters."""
        if self._optimizer is None:
            self._optimizer = on_planned_memory(self._make_optimizer(self.parallel.parameters()), self.parallel.plan)
        return self._optimizer

    @property
    def schedule(self) -> Any:
        """The learning-rate schedule, or None."""
        if self._schedule is None and self._make_schedule is not None:
            self._schedule = self._make_schedule(self.optimizer)
        return self._schedule

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank: the one that prints."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def _prepare(self, dataset: Any) -> None:
        """Plan and shard for batches of ``dataset``, unless done already."""
        if self._parallel is not None:
            return
        torch.manual_seed(self.seed)
        ops.seed(self.seed)
        example = batches.example_batch(dataset, self.global_batch, self.collator(longest=True))
        pins = batches.data_pins(example, self.global_batch, self.mesh, self._options)
        dynamic = gives_several_lengths(self.collator(longest=False))
        options = {"constraints": pins or None, "dynamic": dynamic, **self._options}
        inputs = dict(example) if isinstance(example, Mapping) else example
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs
        inputs = inputs if isinstance(inputs, (dict, tuple)) else (inputs,)
        self._parallel = compile(self.model, self.mesh, example_inputs=inputs, loss_fn=self._loss_fn, **options)
        if self._freeze is not None:
            pins_of = partial(batches.data_pins, example, self.global_batch, options=self._options)
            self._freezing = GradualFreezing(
                self._freeze, self.model, self._parallel, self.mesh, self._options, pins_of
            )
        if any(parameter.is_meta for parameter in self._parallel.parameters()):
            self._parallel.initialise(seed=self.seed)
        if not self.loader_options.get("drop_last"):
            self.loader_options.setdefault("last", "whole")
        if self._checkpoint_dir is not None:
            self._saver = Saver(self._checkpoint_dir, **self._save)

    def collator(self, *, longest: bool) -> Callable[[list[Any]], Any] | None:
        """What makes a batch of samples: padded to a bucket (or the largest) if batches are padded."""
        if self._padding is None:
            return self.collate_fn
        return PaddedCollator(self._padding, self.collate_fn, longest=longest)

    def _loader(self, dataset: Any) -> DataLoader:
        return DataLoader(
            dataset,
            self.parallel,
            batch_size=self.global_batch,
            collate_fn=self.collate_fn,
            **{"seed": self.seed, "label_fields": self.label_fields, **self.loader_options},
        )

    def _steps(
        self, loader: DataLoader, reporter: Reporter, num_epochs: int | None, num_steps: int | None
    ) -> Iterator[Moment]:
        """Train; yield after every step (and, as a stream's end shows only after its last one, after its epochs)."""
        last_step, num_epochs_in_all = (math.inf if count is None else count for count in (num_steps, num_epochs))
        while self.step < last_step and loader.epoch < num_epochs_in_all:
            step, starts = self.step, loader.position == 0
            for batch in loader:
                epoch_ends = loader.position == loader.num_samples
                decides = self._freezing is not None and self._freezing.is_due(self.step + 1, epoch_ends=epoch_ends)
                loss = self._train_step(batch, local_inputs=loader.local_inputs, decides=decides)
                reporter.step(self.step + 1, loss, self.optimizer)
                self.step += 1
                if decides:
                    self._freeze_more(loader, reporter)
                ends = self.step == num_steps or (epoch_ends and loader.epoch + 1 == num_epochs)
                yield Moment(self.step, epoch_ends, ends)
                if self.step == num_steps:
                    return
            if starts and self.step == step:
                raise ValueError(
                    f"the training dataset gives no batch of {self.global_batch} samples: give it more samples, choose "
                    "a smaller global_batch, or loader={'last': 'whole'}"
                )
            if loader.num_samples is None:
                yield Moment(None, True, loader.epoch == num_epochs)

    def _train_step(self, batch: Any, *, local_inputs: bool, decides: bool) -> torch.Tensor:
        self.parallel.train()
        optimizer, schedule, freezing = self.optimizer, self.schedule, self._freezing
        batch = batches.moved(batch, self.parallel.layout.device)
        loss = None
        if freezing is not None:
            freezing.set_modes()
            loss = freezing.train_step(batch, local_inputs=local_inputs)
        if loss is None:
            loss = batches.run(self.parallel.train_step, batch, local_inputs=local_inputs)
        if freezing is not None and decides:
            freezing.take_norms()
        if self.max_grad_norm is not None:
            self.parallel.clip_grad_norm_(self.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
        return loss

    def _check_freezing(self, loader: DataLoader) -> None:
        """Raise ValueError for a stream, whose epochs and steps nobody knows, where freezing depends on them."""
        if self._freeze is None:
            return
        if loader.num_samples is None and (self._freeze.every is None or self._freeze.cache is not None):
            raise ValueError(
                "the dataset is a stream, which says nothing of its epochs: planner.Freezing(…, every=STEPS), without "
                "a cache, or a dataset with a length"
            )
        if self._total_steps is None:
            raise ValueError(
                "nobody knows how many steps are left of a stream: give fit(num_steps=…) to freeze by price"
            )

    def _freeze_more(self, loader: DataLoader, reporter: Reporter) -> None:
        assert self._freezing is not None
        decision = self._freezing.decide(self.optimizer, **self._steps_left(loader, self.step))
        if decision is not None:
            reporter.say(f"step {self.step}: {self._freezing.frozen} layers are frozen\n{decision.summary().rstrip()}")

    def take_up_frozen(self, state: Mapping[str, int], step: int, loader: Any) -> None:
        """Freeze what a checkpoint of ``step`` steps has frozen, before it is loaded.

        Raises:
            ValueError: if this trainer freezes nothing.
        """
        if self._freezing is None:
            raise ValueError(
                f"{state['frozen']} layers were frozen when the checkpoint was written: give the trainer the same "
                "freeze=, or another checkpoint_dir"
            )
        self._freezing.take_up(state, self.optimizer, **self._steps_left(loader, step))

    def _steps_left(self, loader: DataLoader, step: int) -> dict[str, int]:
        assert self._total_steps is not None
        in_epoch = self._total_steps if loader.num_samples is None else len(loader)
        return {"remaining_steps": self._total_steps - step, "steps_of_epoch": in_epoch}

    @property
    def frozen_state(self) -> dict[str, int] | None:
        """What a checkpoint says of frozen layers; None where none are."""
        return self._freezing.state_dict() if self._freezing is not None and self._freezing.decision else None

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.parallel.training
        self.parallel.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.parallel.train(training)


def _steps(loader: DataLoader, num_epochs: int | None) -> int | None:
    return None if loader.num_samples is None or num_epochs is None else len(loader) * num_epochs
