"""Hugging Face's ``Trainer`` on a plan: a script changes the import, and is started on several processes.

    from planner.integrations import transformers as hf

    trainer = hf.Trainer(model, args, train_dataset=…, eval_dataset=…)  # was: transformers.Trainer(…)

Batches are those of ``transformers.Trainer`` on one process with ``per_device_train_batch_size`` × processes samples,
and so are the losses, under whatever mesh; every process reads all samples and takes its part.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import find_batch_size
from transformers.utils import ModelOutput

from passes.capture.loss_of_call import calling_model
from planner.integrations.accelerate import Accelerator
from planner.integrations.saved_training import SavedTraining
from planner.integrations.torch_compat.framework_internals import (
    collator_for,
    count_labels,
    moved_noise,
    on_device,
    says_loss_is_scaled,
    train_batch_size,
)
from planner.library.installed_transformers import check_version
from planner.targets import Target
from planner.trainer.trainer_batches import example_batch
from runtime.data.padding import Buckets, PaddedCollator, gives_several_lengths, read_padding
from runtime.module.parallel_module import ParallelModule

#: The name by which losses of transformers take the number of labels that they are divided by.
COUNT = "num_items_in_batch"


class TransformersTrainer(transformers.Trainer):
    """``transformers.Trainer`` whose model is sharded as a plan says.

    ``trainer.model`` is a ``ParallelModule`` from the first ``train``, ``evaluate`` or ``predict`` on; the model that
    was handed over keeps its first weights.

    Args:
        args: of ``transformers.Trainer``, in the same order.
        mesh: as in ``planner.compile``; None for the mesh that is best for the processes there are.
        plan_options: other arguments of ``planner.compile``: ``fix``, ``constraints``, ``memory_limit``, …
        pad_to, pad_values: as in ``planner.DataLoader``: what the collator gives is padded to one of a few lengths,
            each of which has a program. Labels that the loss leaves out are −100.
        stock_state: whether checkpoints have an ``optimizer.pt`` from which ``transformers.Trainer`` goes on too: the
            first rank writes all of the optimizer's state once more. Without, that class refuses them.
        kwargs: of ``transformers.Trainer``. A loss of the caller's own (``compute_loss`` overridden,
            ``compute_loss_func``, label smoothing) is planned with the model, whatever it is.

    Raises:
        ValueError: for what is another way to split a model (fsdp, deepspeed), for fp16, for evaluations in another
            dtype than training, and for a transformers that is too old.
    """

    model: Any
    optimizer: Any
    neftune_hook_handle: Any = None

    def __init__(
        self,
        *args: Any,
        mesh: Target | None = None,
        plan_options: Mapping[str, Any] | None = None,
        pad_to: Buckets | None = None,
        pad_values: Mapping[str, float] | None = None,
        stock_state: bool = True,
        **kwargs: Any,
    ) -> None:
        check_version(transformers.__version__)
        self.mesh = mesh
        self.plan_options = dict(plan_options or {})
        self._accelerator_arguments: dict[str, Any] = {}
        self._training = SavedTraining(for_stock=stock_state)
        super().__init__(*args, **kwargs)
        if pad_to is not None:
            padding = read_padding(pad_to, label_fields=tuple(self.label_names), pad_values=pad_values)
            self.data_collator = PaddedCollator(padding, self.data_collator)
        if self.args.fsdp or self.args.deepspeed or self.args.fp16:
            raise ValueError(
                "fsdp, deepspeed and fp16 are other ways to train than a plan's: leave them out (bf16 works)"
            )
        if self.args.fp16_full_eval or (self.args.bf16_full_eval and not self.args.bf16):
            raise ValueError(
                "fp16_full_eval and bf16_full_eval convert the model for evaluations, and a planned model computes in "
                "one dtype: leave them out, or say bf16=True, under which evaluations are in bf16 too"
            )
        if self.args.world_size > 1:  # every process counts the labels of the whole batch
            self.args.average_tokens_across_devices = False

    def create_accelerator_and_postprocess(self) -> None:
        """An accelerator that plans, in the place of accelerate's."""
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(**self._accelerator_arguments, mesh=self.mesh, plan_options=self.plan_options)
        self.gather_function = self.accelerator.gather_for_metrics

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_arguments = super()._build_accelerator_args(**kwargs)
        return self._accelerator_arguments

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Nothing: shards are brought to their device when the model is planned."""

    @property
    def parallel(self) -> ParallelModule:
        """The sharded model.

        Raises:
            ValueError: before the first ``train``, ``evaluate`` or ``predict``.
        """
        if not isinstance(self.model, ParallelModule):
            raise ValueError("the model is planned by the first train, evaluate or predict: call one of them before")
        return self.model

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """By the modules of the original."""
        return super().get_decay_parameter_names(_own(model))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As of ``transformers.Trainer``."""
        with self._noise_on_embeddings():
            return super().train(*args, **kwargs)

    @contextmanager
    def _noise_on_embeddings(self) -> Iterator[None]:
        """NEFTune's noise inside, on the model's own embeddings: those of a parallel module take no hooks."""
        alpha, self.neftune_noise_alpha = self.neftune_noise_alpha, None
        if alpha is None:
            yield
            return
        self.neftune_hook_handle = activate_neftune(_own(self.model), alpha)
        try:
            yield
        finally:
            deactivate_neftune(_own(self.model), self.neftune_hook_handle)
            self.neftune_noise_alpha, self.neftune_hook_handle = alpha, None

    # -- planning -------------------------------------------------------------------------------------------------

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        self._plan_with(self.train_dataset, train_batch_size(self))
        handed_over = self.model
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self.model = self.model_wrapped = self.callback_handler.model = prepared[0]
        if self.neftune_hook_handle is not None and handed_over is not self.model:
            self.neftune_hook_handle = moved_noise(self.neftune_hook_handle, handed_over, self.model.original)
        return prepared

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """As on one process with as many samples a batch: samplers that sort by length look at whole steps."""
        size = self.args.per_device_train_batch_size
        self.args.per_device_train_batch_size = size * self.accelerator.num_processes
        try:
            return super()._get_train_sampler(*args, **kwargs)
        finally:
            self.args.per_device_train_batch_size = size

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise: predictions come in the order of this sampler."""
        size = self.args.per_device_eval_batch_size
        self.args.per_device_eval_batch_size = size * self.accelerator.num_processes
        try:
            return super()._get_eval_sampler(*args, **kwargs)
        finally:
            self.args.per_device_eval_batch_size = size

    def _plan_with(self, dataset: Any, batch_size: int) -> None:
        """Let the accelerator plan for a whole batch of ``dataset``; without one, for the first batch there is."""
        if isinstance(self.model, ParallelModule):
            return
        options: dict[str, Any] = {}
        if dataset is not None:
            with torch.random.fork_rng():
                batch = example_batch(dataset, batch_size * self.accelerator.num_processes, collator_for(self))
            options["example_inputs"] = self._with_count(dict(batch))
        if self._has_own_loss():
            options["loss_fn"] = self._loss_of_script
        dynamic = gives_several_lengths(self.data_collator)
        self.accelerator.plan_options = {"dynamic": dynamic, **self.plan_options, **options}
        self.model.train()

    def _with_count(self, batch: dict[str, Any], count: Any = None) -> dict[str, Any]:
        """The batch with what losses are divided by, where they take it."""
        count = count_labels(self, batch) if count is None else count
        return batch if count is None else {**batch, COUNT: torch.as_tensor(count).round().long()}

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        if training or isinstance(self.model, ParallelModule):
            own: nn.Module = self.model
            return own
        if self.train_dataset is not None:
            self._plan_with(self.train_dataset, train_batch_size(self))
        else:
            self._plan_with(self._evaluated, self.args.eval_batch_size)
        parallel = self.accelerator.prepare_model(self.model)
        self.model = self.model_wrapped = parallel
        return parallel

    # -- losses ---------------------------------------------------------------------------------------------------

    def _has_own_loss(self) -> bool:
        overridden = type(self).compute_loss is not TransformersTrainer.compute_loss
        return overridden or self.compute_loss_func is not None or self.label_smoother is not None

    @calling_model
    def _loss_of_script(self, model: Any, batch: Any) -> torch.Tensor:
        """The loss that the script computes, which calls the model as it likes."""
        inputs = {name: value for name, value in batch.items() if name != COUNT}
        loss = self.compute_loss(model, inputs, num_items_in_batch=batch.get(COUNT))
        assert isinstance(loss, torch.Tensor)
        return loss

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward of one global batch, under any plan."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        batch = self._with_count(on_device(self, inputs), num_items_in_batch)
        scaled = says_loss_is_scaled(self)
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and COUNT in batch) or self.compute_loss_func is not None
        weight = 1.0 if scaled else 1.0 / self.current_gradient_accumulation_steps
        return self.parallel.train_step(**batch, weight=weight) * weight

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.parallel.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.parallel.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    # -- evaluation -----------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """As transformers', with losses weighed by the samples of a global batch."""
        self._evaluated = getattr(dataloader, "dataset", None)
        size, converts = self.args.per_device_eval_batch_size, self.args.bf16_full_eval
        self.args.per_device_eval_batch_size = size * self.accelerator.num_processes
        self.args.bf16_full_eval = False  # the plan is in bf16
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.args.per_device_eval_batch_size, self.args.bf16_full_eval = size, converts

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Outputs and loss of a global batch, whole on every process."""
        state = self.accelerator.gradient_state
        rows = find_batch_size(inputs)
        if state.end_of_dataloader and rows is not None:
            # Of a dataset without a length accelerate does not know how short its last batch is.
            state.active_dataloader.remainder = rows
        batch = self._with_count(on_device(self, inputs)) if self._has_own_loss() else None
        whole = _WholeOutputs(self.parallel, batch, loss_alone=prediction_loss_only)
        return super().prediction_step(whole, inputs, prediction_loss_only, ignore_keys)  # type: ignore[arg-type]

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """On all processes, which gather what one of them writes; transformers 5.20 calls the writer alone."""
        self._save(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = str(output_dir if output_dir is not None else self.args.output_dir)
        if not isinstance(self.model, ParallelModule):
            super()._save(folder, state_dict)
            return
        self.model.save_pretrained(folder)
        if not self.args.should_save:
            return
        generation = getattr(self.model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(folder)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, Path(folder) / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self._training.save(output_dir, self.parallel, self.optimizer, self.lr_scheduler, step=self.state.global_step)

    def _save_rng_state(self, output_dir: str) -> None:
        """As transformers', of each process, and of the first one under the name that one process reads."""
        super()._save_rng_state(output_dir)
        own = Path(output_dir) / "rng_state_0.pth"
        if self.args.should_save and own.exists():
            shutil.copyfile(own, own.with_name("rng_state.pth"))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None:
            self._training.take_random_states()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._training.load(checkpoint, self.accelerator.prepared_model, self.optimizer, self.lr_scheduler)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if isinstance(self.model, ParallelModule):
            self.model.load_pretrained(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        assert self.state.best_model_checkpoint is not None
        self.parallel.load_pretrained(self.state.best_model_checkpoint)


Trainer = TransformersTrainer


class Seq2SeqTransformersTrainer(TransformersTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer`` likewise: with ``predict_with_generate`` predictions are generated sharded."""


Seq2SeqTrainer = Seq2SeqTransformersTrainer


class _WholeOutputs:
    """A parallel module to evaluate, whose outputs are whole, and in a container of transformers'.

    Args:
        batch: all that the loss of the script's own needs; None where the model computes it.
        loss_alone: whether to leave what nobody reads where it is.
    """

    def __init__(self, parallel: ParallelModule, batch: dict[str, Any] | None, *, loss_alone: bool) -> None:
        self._parallel, self._batch, self.stands_for = parallel, batch, parallel.original
        self._loss_alone = loss_alone

    def __call__(self, **inputs: Any) -> Any:
        if inputs.get(COUNT) is not None:
            inputs[COUNT] = torch.as_tensor(inputs[COUNT]).round().long()
        outputs = self._outputs(inputs if self._batch is None else self._batch)
        is_plain = isinstance(outputs, Mapping) and not isinstance(outputs, ModelOutput)
        return ModelOutput(**outputs) if is_plain else outputs

    def _outputs(self, batch: dict[str, Any]) -> Any:
        outputs = self._parallel(**batch)
        if self._batch is not None:
            return outputs.outputs
        if self._loss_alone and isinstance(outputs, Mapping) and "loss" in outputs:
            return {"loss": outputs["loss"]}
        return outputs


def _own(model: nn.Module) -> nn.Module:
    """The model of a script, which a parallel module has a copy of without data."""
    return model.original if isinstance(model, ParallelModule) else model
