"""``transformers.Trainer``'s scripts log under a plan what they log on one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from peft import (
    AdaLoraConfig,
    IA3Config,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import planner
from planner.integrations import transformers as hf
from planner.integrations.accelerate import Accelerator
from planner.integrations.global_batches import with_global_batches
from runtime.torch_compat.dtensors import are_subclasses_dispatched
from tests.generation_cases import model_named, training_batch
from tests.hugging_face_cases import (
    BATCH,
    FULL,
    accelerated,
    arguments,
    evaluated,
    evaluation_order,
    figures,
    llama,
    lora,
    regression_script,
    samples,
    script,
    translated,
    with_own_loss,
)
from tests.hugging_face_cases import config as llama_config
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("models_traced_once")

ONCE = {"num_train_epochs": 1, "save_strategy": "no"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def logged(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = run_on_ranks("hugging_face_worker", 2, str(folder))
    return result


def close(actual: list[float], expected: list[float], tolerance: float) -> None:
    torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=tolerance, atol=tolerance / 100)


def test_a_script_logs_the_same_on_every_mesh(logged: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """With gradient accumulation, clipping, a short last batch and evaluations; resumed on other meshes."""
    alone = script(transformers.Trainer, str(tmp_path), BATCH)
    for name in ("dp=2", "resumed on tp=2", "resumed on pp=2"):
        close(logged[name], figures(alone), 2e-6)
    assert logged["axes"]["dp"] == 2
    assert all(logged["collectives"])  # else every rank has computed all of it
    saved = transformers.LlamaForCausalLM.from_pretrained(folder / "dp" / "checkpoint-4")
    for name, tensor in alone.model.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


def test_checkpoints_of_several_ranks_go_on_with_transformers_own_trainer(
    logged: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Of data ranks, and of adapters on two stages, whose ranks have parts of the optimizer's state."""
    resumed = script(transformers.Trainer, str(tmp_path), BATCH, resume=str(folder / "dp" / "checkpoint-2"))
    close(figures(resumed), logged["dp=2"], 2e-6)
    adapted = str(folder / "lora" / "checkpoint-2")
    resumed = script(transformers.Trainer, str(tmp_path), BATCH, model=lora(), sizes=FULL, resume=adapted)
    close(figures(resumed), logged["lora"], 2e-6)


def test_a_script_in_bf16(logged: dict[str, Any], tmp_path: Path) -> None:
    alone = script(transformers.Trainer, str(tmp_path), BATCH, sizes=FULL, changes={**ONCE, "bf16": True})
    close(logged["bf16"], figures(alone), 1e-2)


def test_evaluations_in_bf16(tmp_path: Path) -> None:
    """Which transformers converts the model for, and a plan in bf16 computes anyway."""
    options = arguments(tmp_path, BATCH, bf16=True, bf16_full_eval=True, eval_strategy="no")
    evaluations = [
        trainer_class(llama(), options, eval_dataset=samples(BATCH)).evaluate()["eval_loss"]
        for trainer_class in (hf.Trainer, transformers.Trainer)
    ]
    close(evaluations[:1], evaluations[1:], 1e-2)


def test_losses_of_the_scripts_own(logged: dict[str, Any], tmp_path: Path) -> None:
    """Label smoothing, with gradient checkpointing on a given mesh, and ``compute_loss`` overridden: with a pipeline,
    too."""
    changes = {**ONCE, "label_smoothing_factor": 0.1, "eval_strategy": "no"}
    alone = script(transformers.Trainer, str(tmp_path), BATCH, sizes=FULL, changes=changes)
    close(logged["smoothed labels"], figures(alone), 2e-6)
    assert "full" in logged["recompute"]
    own = with_own_loss(transformers.Trainer)
    close(logged["own loss"], figures(script(own, str(tmp_path), BATCH, sizes=FULL, changes=ONCE)), 2e-6)


def test_numbers_as_labels_and_an_optimizer_of_the_scripts_own(logged: dict[str, Any], tmp_path: Path) -> None:
    """Evaluated after the best weights came back; nothing tells the loss to ignore what fills up a batch."""
    alone = regression_script(transformers.Trainer, str(tmp_path), BATCH)
    close(logged["regression"], figures(alone), 2e-6)


def test_samples_grouped_by_length_are_predicted_in_the_order_of_one_process(
    logged: dict[str, Any], tmp_path: Path
) -> None:
    assert logged["order"] == evaluation_order(transformers.Trainer, str(tmp_path), BATCH)


def test_evaluations_without_a_length_or_a_dataset(tmp_path: Path) -> None:
    """What fills up a short batch does not count; what is planned is the first batch there is."""
    for ours, alone in zip(
        *(evaluated(kind, str(tmp_path)) for kind in (hf.Trainer, transformers.Trainer)), strict=True
    ):
        close([*ours.values()], [*alone.values()], 2e-6)


def test_samples_by_length_come_in_the_same_order_after_resuming_within_an_epoch(tmp_path: Path) -> None:
    """They are permuted by torch's own random numbers, whose state is taken up behind the batches that were seen."""
    rows = [{"input_ids": row["input_ids"][: 2 + index % 5]} for index, row in enumerate(samples(3 * BATCH))]

    def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
        tokens = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
        return {"input_ids": tokens, "labels": tokens}

    losses = []
    for resume in (None, str(tmp_path / "checkpoint-1")):
        changes = {"train_sampling_strategy": "group_by_length", "save_strategy": "steps", "save_steps": 1}
        options = arguments(tmp_path, BATCH, eval_strategy="no", gradient_accumulation_steps=1, **changes)
        trainer = hf.Trainer(llama(), options, train_dataset=rows, data_collator=padded)
        trainer.train(resume_from_checkpoint=resume)
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    close(losses[1], losses[0], 2e-6)


@pytest.mark.filterwarnings("ignore:hooks were registered on or removed")
def test_noise_on_embeddings_ends_with_the_training(tmp_path: Path) -> None:
    losses = {}
    for alpha in (None, 0.001, 20.0):
        model = llama()
        changes = {"max_steps": 2, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no"}
        options = arguments(tmp_path, BATCH, neftune_noise_alpha=alpha, **changes)
        trainer = hf.Trainer(model, options, train_dataset=samples(2 * BATCH))
        for _ in range(2):
            trainer.train()
            losses[alpha] = trainer.state.log_history[1]["loss"]
        batch = trainer.data_collator(samples(BATCH))
        noisy, plain = (trainer.model.train(mode)(**batch).loss.item() for mode in (True, False))
        assert noisy == plain
        assert not model.get_input_embeddings()._forward_hooks
    assert losses[None] == pytest.approx(losses[0.001], rel=1e-4)
    assert losses[None] != pytest.approx(losses[20.0], rel=1e-4)


def test_predictions_that_are_generated(logged: dict[str, Any], tmp_path: Path) -> None:
    """With two beams; the ranks do not divide the samples."""
    tokens, loss = translated(transformers.Seq2SeqTrainer, str(tmp_path), BATCH)
    assert logged["translated"][0] == tokens
    close([logged["translated"][1]], [loss], 2e-6)


def test_a_loop_of_accelerates(logged: dict[str, Any], tmp_path: Path) -> None:
    """Planned at its first call; its state goes on on another mesh."""
    first = accelerated(accelerate.Accelerator, folder=str(tmp_path))
    again = accelerated(accelerate.Accelerator, resume=str(tmp_path))
    for name, (losses, predictions) in (("accelerate", first), ("accelerate again", again)):
        close(logged[name][0], losses, 2e-6)
        assert logged[name][1] == predictions == 21
    assert logged["triggers"] == [True, False]  # set on the second process, seen on the first


def test_a_loader_that_drops_its_last_batch_still_says_so() -> None:
    """Else what is gathered of its last batch, which is full, is cut to the samples that were dropped."""
    for shuffle in (False, True):
        loader = DataLoader(range(13), batch_size=4, drop_last=True, shuffle=shuffle)  # type: ignore[arg-type]
        assert with_global_batches(loader, 2).drop_last


def test_other_ways_to_split_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another way to split a model"):
        Accelerator(cpu=True, parallelism_config=accelerate.ParallelismConfig())
    with pytest.raises(ValueError, match="bf16_full_eval convert the model"):
        hf.Trainer(llama(), arguments(tmp_path, BATCH, bf16_full_eval=True, eval_strategy="no"))
    trainer = hf.Trainer(llama(), arguments(tmp_path, BATCH, eval_strategy="no"))
    with pytest.raises(ValueError, match="planned by the first train, evaluate or predict"):
        _ = trainer.parallel


def test_adapters_alone_are_trained_reduced_and_saved(logged: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    for measured in logged["adapters"].values():
        assert measured["apart"] <= 1e-6, measured
        assert measured["graded"][0] == measured["graded"][1]
        assert measured["states"] == 2 * measured["adapters"]  # both moments of AdamW
    data_parallel = logged["adapters"]["pp=1,dp=2"]
    # Beside the adapters' gradients the loss, and counts of one number each.
    assert 0 <= data_parallel["reduced"] - data_parallel["adapters"] <= 16
    alone = script(transformers.Trainer, str(tmp_path), BATCH, model=lora(), sizes=FULL)
    for name in ("lora", "lora resumed"):
        close(logged[name], figures(alone), 2e-6)
    trained = PeftModel.from_pretrained(llama(num_layers=2), folder / "lora2" / "checkpoint-4")
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, alone.model.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), "prompt_encoder"),
        (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "ia3_l"),
    ],
)
def test_other_adapters_are_tuned_as_on_one_device(config: PeftConfig, part: str, tmp_path: Path) -> None:
    """With IA³ keys get a gradient and queries do not, and one statement reads weights of two modules."""
    torch.manual_seed(1)
    model = get_peft_model(llama(), config)
    tokens = torch.randint(1, 64, (4, 6))
    batch = {"input_ids": tokens, "labels": tokens}
    report = planner.verify(model, "tp=2", batch=batch, steps=1)
    assert report.ok, report.table()
    assert all((part in name) == state.trainable for name, state in report.plan.states.items())
    if part == "prompt_encoder":
        parallel = planner.compile(model, "dp=1", example_inputs=batch)
        parallel.save_pretrained(tmp_path)
        saved = PeftModel.from_pretrained(llama(), tmp_path).state_dict()
        assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
        with pytest.raises(ValueError, match="PREFIX_TUNING has nothing to merge into weights"):
            parallel.save_pretrained(tmp_path, merge_adapters=True)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], modules_to_save=["lm_head"], use_dora=True),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    ],
)
def test_adapters_that_peft_saved_are_loaded(config: PeftConfig, tmp_path: Path) -> None:
    trained, other = get_peft_model(llama(), config), get_peft_model(llama(), config)
    for number, parameter in enumerate(parameter for parameter in trained.parameters() if parameter.requires_grad):
        parameter.data.fill_(number + 1)
    trained.save_pretrained(tmp_path)
    tokens = torch.randint(1, 64, (2, 6))
    parallel = planner.compile(other, "dp=1", example_inputs={"input_ids": tokens})
    parallel.load_pretrained(tmp_path)
    loaded = parallel.full_state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in trained.state_dict().items())


@pytest.mark.skipif(not are_subclasses_dispatched(), reason="in torch 2.11 DTensor decides alone what operators do")
def test_adapters_whose_rank_shrinks_are_saved_as_peft_saves_them(tmp_path: Path) -> None:
    """The script's own line after a step, ``update_and_allocate``, leaves rows of AdaLoRA's matrices out."""
    tokens = torch.arange(24).reshape(4, 6)
    kept = {}
    for kind in ("parallel", "alone"):
        torch.manual_seed(1)
        adapters = AdaLoraConfig(init_r=4, target_r=2, total_step=4, tinit=0, tfinal=1, target_modules=["q_proj"])
        model: Any = get_peft_model(llama(), adapters)
        for name, parameter in model.named_parameters():
            if "lora_E" in name:
                torch.nn.init.uniform_(parameter)
        if kind == "parallel":
            model = planner.compile(model, "dp=1", example_inputs={"input_ids": tokens, "labels": tokens})
        for step in range(3):
            model(input_ids=tokens, labels=tokens).loss.backward()
            model.base_model.update_and_allocate(step)
        model.save_pretrained(tmp_path / kind)
        kept[kind] = load_file(tmp_path / kind / "adapter_model.safetensors")
    assert min(min(tensor.shape) for tensor in kept["alone"].values() if tensor.dim() == 2) < 4
    torch.testing.assert_close(kept["parallel"], kept["alone"])


def test_adapters_of_other_layers_are_refused(tmp_path: Path) -> None:
    get_peft_model(llama(), LoraConfig(target_modules=["v_proj"])).save_pretrained(tmp_path)
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    parallel = planner.compile(model, "dp=1", example_inputs={"input_ids": torch.ones(2, 6, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"does not fit the model's adapters: missing .*q_proj.*, unexpected .*v_proj"):
        parallel.load_pretrained(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_merged_adapters_are_weights_of_the_base_model(tied: bool, tmp_path: Path) -> None:
    """An adapter of one of two tied weights makes them two."""
    torch.manual_seed(1)
    base = transformers.LlamaForCausalLM(llama_config(tie_word_embeddings=tied))
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)).eval()
    tokens = torch.randint(1, 64, (2, 6))
    parallel = planner.compile(model, "dp=1", example_inputs={"input_ids": tokens})
    parallel.save_pretrained(tmp_path, merge_adapters=True)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(merged(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)
    options: dict[str, Any] = {"input_ids": tokens, "max_new_tokens": 4, "do_sample": False}
    alone = model.generate(**options).tolist()
    assert parallel.generate(**options).tolist() == alone
    assert parallel.generate(**options, gathered=True).tolist() == alone


def test_own_losses_call_the_model_as_they_like(tmp_path: Path) -> None:
    """Without labels BART makes its decoder's inputs of other tokens; a second call is another call."""

    def trained(kind: Any, folder: str) -> dict[str, torch.Tensor]:
        class Regularised(kind):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                reversed_tokens = {**inputs, "input_ids": inputs["input_ids"].flip(-1)}
                again = model(**reversed_tokens).logits
                return super().compute_loss(model, inputs, *args, **kwargs) + again.square().mean()

        torch.manual_seed(0)
        config = model_named("bart").config
        config.dropout = config.attention_dropout = config.activation_dropout = 0.0
        model = transformers.BartForConditionalGeneration(config)
        rows = [{name: tensor[0].roll(n) for name, tensor in training_batch("bart").items()} for n in range(8)]
        changes = {"label_smoothing_factor": 0.1, "max_steps": 2, "eval_strategy": "no", "adam_epsilon": 1e-3}
        trainer = Regularised(model, arguments(tmp_path / folder, 4, **changes), train_dataset=rows)
        trainer.train()
        state: dict[str, torch.Tensor] = getattr(trainer.model, "full_state_dict", trainer.model.state_dict)()
        return state

    expected, actual = trained(transformers.Trainer, "stock"), trained(hf.Trainer, "ours")
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def test_scripts_for_accelerate_pass_the_models_own_state_to_be_saved(tmp_path: Path) -> None:
    model = llama()
    parallel = planner.compile(model, "dp=1", example_inputs={"input_ids": torch.ones(2, 6, dtype=torch.int64)})
    state = parallel.full_state_dict()
    options: dict[str, Any] = {"is_main_process": True, "save_function": torch.save}
    parallel.save_pretrained(tmp_path, state_dict=state, **options)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(ValueError, match=r"state_dict has another 'lm_head\.weight'"):
        parallel.save_pretrained(tmp_path, state_dict=state)
