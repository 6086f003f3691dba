"""Plans as other frameworks' configurations: their own parsers read them, and models train to the same loss there."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import planner
from cost_models import Cluster
from passes.plan import Plan
from planner.cli import main
from planner.exports.export_plan import FRAMEWORKS
from planner.inspection.robustness import robustness
from planner.inspection.why_not import why_not
from planner.library import load_config
from tests.small_models import Mlp, mlp_batch, squared_error
from tests.versions import transformers_version

pytestmark = pytest.mark.usefixtures("models_traced_once")

#: Columns whose outputs are gathered for attention, rows that take their part of what it gives.
WHOLE_HEADS = {
    **dict.fromkeys(("embed_tokens", "norm", "rotary.default:*", "attention.default:0", "lm_head"), "invariant"),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "cut n"),
    **dict.fromkeys(("o_proj", "down_proj"), "cut k"),
}
PIPELINE = {"pp": 2, "dp": 2, "tp": 1, "cp": 1, "num_microbatches": 4, "schedule": "zb_h1", "zero": 1}


@cache
def llama(
    fix: str = "",
    framework: str | None = None,
    devices: int = 2,
    *,
    bandwidth: float = 1e9,
    overlap_tensor: bool = False,
) -> Plan:
    """A plan of a tiny Llama in float32 on slow devices; ``fix``: ``tp=2,zero=0``."""
    pairs = dict(pair.split("=") for pair in fix.split(",") if pair)
    values = {name: int(value) if value.isdigit() else value for name, value in pairs.items()}
    cluster = Cluster.uniform(
        devices, flops=1e9, memory_bandwidth=1e9, latency=1e-6, bandwidth=bandwidth, memory_bytes=2**30
    )
    return planner.plan(
        "tiny-llama",
        cluster,
        global_batch=8,
        seq_len=12,
        dtype="float32",
        fix=values,
        framework=framework,
        overlap_tensor=overlap_tensor,
    )


def odd_heads(folder: Path, **pins: str) -> Plan:
    """A plan of a Llama of three heads, which the two ranks of ``tp`` cannot cut; its config is in ``folder``.

    ``pins``: by the last name of a module, what ``tp`` cuts of its operators.
    """
    config = load_config("tiny-llama")
    config.update({"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 2})
    config.save_pretrained(folder)
    cluster = Cluster.uniform(2, flops=1e9, memory_bandwidth=1e9, latency=1e-6, bandwidth=1e9, memory_bytes=2**30)
    return planner.plan(
        str(folder), cluster, global_batch=8, seq_len=12, dtype="float32", fix={"tp": 2, "recompute": "none"},
        constraints={f"*{name}": {"tp": pin} for name, pin in pins.items()},
    )  # fmt: skip


@cache
def pipelined() -> Plan:
    cluster = Cluster.uniform(4, flops=1e9, memory_bandwidth=1e9, latency=1e-6, bandwidth=1e9, memory_bytes=2**30)
    batch: Any = {"example_inputs": mlp_batch(batch=16), "loss_fn": squared_error}
    return planner.plan(Mlp(layers=4), cluster, fix=PIPELINE, **batch)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_plan_for_a_framework_lists_nothing_that_it_cannot_express(framework: str) -> None:
    plan = llama(framework=framework)
    assert plan.export(framework).inexpressible == ()
    assert 0.0 <= plan.certificate.gap < 0.5


@pytest.mark.parametrize(
    ("framework", "setting"),
    [("megatron", "--tp-comm-overlap"), ("torchtitan", "--parallelism.enable_async_tensor_parallel")],
)
def test_a_search_for_a_framework_lets_layers_exchange_their_rows_if_it_can_say_so(
    framework: str, setting: str
) -> None:
    plan = llama("tp=2", framework, bandwidth=1e7, overlap_tensor=True)
    exported = plan.export(framework)
    assert exported.inexpressible == () and exported.settings[setting] is True
    assert plan.step.costs.simulated < llama("tp=2", framework, bandwidth=1e7).step.costs.simulated
    wished = why_not(plan, fix={"recompute": "full"}).wished
    assert wished is not None and wished.export(framework).settings[setting] is True


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_a_demanded_tensor_axis_is_split_as_the_framework_splits_it(framework: str) -> None:
    """The vocabulary is cut, in the embedding and up to the loss, also where something else would be faster."""
    plan = llama("tp=2", framework)
    assert plan.export(framework).inexpressible == ()
    tensor = plan.mesh.names.index("tp")
    assert [plan.states[name].placement[tensor] for name in ("model.embed_tokens.weight", "lm_head.weight")] == [
        "S(0)",
        "S(0)",
    ]
    losses = [key for key, node in plan.nodes.items() if "cross_entropy" in node.op]
    assert losses and not any(step.value.startswith("node:lm_head") for step in plan.conversions if step.axis == "tp")


def test_positions_are_whole_beside_a_vocabulary_that_is_cut() -> None:
    cluster = Cluster.uniform(2, flops=1e9, memory_bandwidth=1e9, latency=1e-6, bandwidth=1e9, memory_bytes=2**30)
    pins = {"transformer.wte.weight": {"tp": "S(0)"}, "transformer.wpe.weight": {"tp": "I"}}
    plan = planner.plan("tiny-gpt2", cluster, global_batch=2, seq_len=8, fix={"tp": 2, "dp": 1}, constraints=pins)
    sentences = plan.export("megatron").inexpressible
    assert not [sentence for sentence in sentences if sentence.startswith("tp: transformer.w")]


def test_query_key_and_value_in_one_layer_are_named_where_no_plan_keeps_them_cut() -> None:
    """GPT-2's lie one behind the other: a rank's part of the columns is no set of heads."""
    with pytest.raises(ValueError, match=r"c_attn is gathered before it is split into pieces.*a layer for each piece"):
        planner.plan("tiny-gpt2", "dgx-h100:1x2", global_batch=2, seq_len=8, fix={"tp": 2}, framework="megatron")


def test_positions_that_are_cut_are_listed() -> None:
    cluster = Cluster.uniform(2, flops=1e9, memory_bandwidth=1e9, latency=1e-6, bandwidth=1e9, memory_bytes=2**30)
    pins = {"transformer.wte.weight": {"tp": "S(0)"}, "transformer.wpe.weight": {"tp": "S(0)"}}
    plan = planner.plan("tiny-gpt2", cluster, global_batch=2, seq_len=8, fix={"tp": 2, "dp": 1}, constraints=pins)
    assert "tp: transformer.wpe is vocabulary: it has whole" in plan.export("megatron").inexpressible


def test_batch_norm_over_all_data_ranks_is_the_script_s_or_is_listed() -> None:
    plan = planner.plan("resnet-50", "dgx-h100:1x2", global_batch=4, fix={"dp": 2})
    for framework in ("deepspeed", "accelerate-fsdp2", "transformers-tp"):
        assert plan.export(framework).script["torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)"]
    for framework in ("torchtitan", "megatron"):
        assert [each for each in plan.export(framework).inexpressible if each.startswith("batch norm is over")]


def test_a_loss_over_the_samples_of_all_data_ranks_is_listed() -> None:
    plan = planner.plan("tiny-clip", "dgx-h100:1x2", global_batch=4, seq_len=16, fix={"dp": 2, "zero": 0})
    (sentence,) = plan.export("deepspeed").inexpressible
    assert sentence.startswith("the loss or a layer reads the samples of all data ranks (all_gather of aten.transpose")


def test_ranks_that_lie_on_unlike_devices_are_named() -> None:
    cluster = "dgx-a100-80g:1x1+dgx-v100-32g:1x1"
    plan = planner.plan("tiny-llama", cluster, global_batch=2, seq_len=8, fix={"pp": 2, "num_microbatches": 2})
    names = [device.name for device in plan.step.stage_devices]
    assert len(set(names)) == 2
    assert f"on these devices: 0: {names[0]}, 1: {names[1]}" in plan.export("megatron").text


def test_a_plan_for_a_framework_is_asked_and_audited_within_it() -> None:
    plan = llama("dp=2", "accelerate-fsdp2")
    demands = plan.certificate.demands
    assert demands["framework"] == "accelerate-fsdp2" and demands["fix"] == {"dp": [2]}
    answer = why_not(plan, fix={"recompute": "full"})
    assert answer.wished is not None and answer.wished.step.zero in ((2,), (3,))
    assert answer.wished.export("accelerate-fsdp2").inexpressible == ()
    with pytest.raises(ValueError, match=r"fix and forbid contradict Accelerate"):
        why_not(plan, fix={"zero": 0})
    report = planner.audit(plan)
    assert report.ok and next(row for row in report.rows if row.figure == "lower bound").ok
    with pytest.raises(ValueError, match=r"without --for"):
        robustness(plan)


def test_megatron_is_told_degrees_cuts_batches_and_what_it_lacks() -> None:
    exported = pipelined().export("megatron")
    assert exported.settings["--pipeline-model-parallel-size"] == 2
    assert exported.settings["--micro-batch-size"] * 4 * 2 == exported.settings["--global-batch-size"] == 16
    assert exported.settings["--use-distributed-optimizer"] is True
    layout = exported.settings["--pipeline-model-parallel-layout"]
    assert layout[0] == "E" and layout[-1] == "L" and layout.count("|") == 1
    assert any(sentence.startswith("schedule=zb_h1") for sentence in exported.inexpressible)
    assert all(f"#   * {sentence}" in exported.text for sentence in exported.inexpressible)


def test_torchtitan_runs_the_schedules_that_megatron_lacks() -> None:
    exported = pipelined().export("torchtitan")
    assert exported.settings["--parallelism.pipeline_parallel_schedule"] == "InterleavedZeroBubble"
    assert exported.settings["--training.disable_cuda_graphs"] is True  # a pipeline is refused without
    first, *_, last = exported.settings["--parallelism.module_fqns_per_model_part"]
    assert f"module_fqns_per_model_part {','.join(first)} " in exported.text and f" {','.join(last)}\n" in exported.text
    assert not any("schedule" in sentence for sentence in exported.inexpressible)
    assert any(sentence.startswith("zero=1") for sentence in exported.inexpressible)


def test_a_tensor_parallel_plan_names_the_style_of_every_matrix() -> None:
    styles = llama("tp=2,dp=1", "transformers-tp").export("transformers-tp").settings["distributed_config.tp_plan"]
    assert styles["model.layers.*.self_attn.q_proj"] == styles["model.layers.*.mlp.up_proj"] == "colwise"
    assert styles["model.layers.*.self_attn.o_proj"] == styles["model.layers.*.mlp.down_proj"] == "rowwise"


def test_rows_whose_tokens_come_whole_split_them_or_are_listed(tmp_path: Path) -> None:
    plan = odd_heads(tmp_path, **WHOLE_HEADS)
    exported = plan.export("transformers-tp")
    assert exported.inexpressible == ()
    styles = exported.settings["distributed_config.tp_plan"]
    assert {name.rpartition(".")[2]: style for name, style in styles.items() if "layers" in name} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise_gather_output"),
        "o_proj": "rowwise_split_input",
        **dict.fromkeys(("gate_proj", "up_proj"), "colwise"),
        "down_proj": "rowwise",
    }
    sentences = plan.export("deepspeed").inexpressible
    assert "tp: the output of model.layers.*.self_attn.q_proj is gathered, which AutoTP leaves cut" in sentences
    assert [sentence for sentence in sentences if "_proj takes its part of a whole input" in sentence] == [
        "tp: model.layers.*.self_attn.o_proj takes its part of a whole input, AutoTP's row layers take one that is cut"
    ]


def test_weights_in_parts_that_are_gathered_for_use_are_no_columns(tmp_path: Path) -> None:
    """Three heads on two ranks: tokens are cut, and each rank keeps half of a weight that it uses whole."""
    plan = odd_heads(tmp_path, **{"q_proj.weight": "S(0)"})
    tensor, name = plan.mesh.names.index("tp"), "model.layers.0.self_attn.q_proj"
    assert plan.states[f"{name}.weight"].placement[tensor] == "S(0)"
    assert plan.nodes[f"{name}:aten.linear.default:0"].strategy[tensor] == "cut b0"
    for framework in ("megatron", "torchtitan"):
        sentences = plan.export(framework).inexpressible
        assert "tp: model.layers.*.self_attn.q_proj is whole, the tokens are cut: it has column or row" in sentences


def test_cut_layers_that_transformers_cannot_split_are_listed() -> None:
    pins = {"*mlp.c_fc": {"tp": "cut n"}, "*mlp.c_proj": {"tp": "cut k"}}
    fix = {"tp": 2, "dp": 1}
    plan = planner.plan("tiny-gpt2", "dgx-h100:1x2", global_batch=8, seq_len=32, fix=fix, constraints=pins)
    assert plan.export("transformers-tp").inexpressible == tuple(
        f"tp: transformer.h.*.mlp.{name} keeps its matrix transposed (Conv1D): linear layers alone are cut there"
        for name in ("c_fc", "c_proj")
    )


def test_layers_that_exchange_their_rows_are_columns_and_rows_that_overlap() -> None:
    pins = {
        **{f"*{name}_proj": {"tp": "cut n from b0"} for name in ("q", "k", "v", "gate", "up")},
        **{f"*{name}_proj": {"tp": "cut k to b0"} for name in ("o", "down")},
    }
    cluster = Cluster.uniform(2, flops=1e9, memory_bandwidth=1e9, latency=1e-6, bandwidth=1e9, memory_bytes=2**30)
    plan = planner.plan(
        "tiny-llama", cluster, global_batch=8, seq_len=12, fix={"tp": 2}, constraints=pins, overlap_tensor=True
    )
    assert plan.export("megatron").settings["--tp-comm-overlap"] is True
    assert plan.export("torchtitan").settings["--parallelism.enable_async_tensor_parallel"] is True
    styles = plan.export("transformers-tp").settings["distributed_config.tp_plan"]
    assert styles["model.layers.*.self_attn.o_proj"] == styles["model.layers.*.mlp.down_proj"] == "rowwise"
    assert "--tp-comm-overlap" not in llama("tp=2", "megatron").export("megatron").settings


def test_what_differs_between_layers_is_listed() -> None:
    plan = llama("pp=1,dp=2,tp=1,zero=3")
    chunk = plan.step.chunks[0]
    groups = tuple(dataclasses.replace(group, zero=0) if place else group for place, group in enumerate(chunk.groups))
    step = dataclasses.replace(plan.step, chunks=(dataclasses.replace(chunk, groups=groups),))
    sentences = dataclasses.replace(plan, step=step).export("deepspeed").inexpressible
    assert any("ZeRO stages differ" in sentence for sentence in sentences)
    layer = next(group for group in chunk.groups if "layers" in group.unit)
    groups = tuple(dataclasses.replace(layer, count=1, recompute=policy) for policy in ("none", "selective"))
    step = dataclasses.replace(plan.step, chunks=(dataclasses.replace(chunk, groups=groups),))
    exported = dataclasses.replace(plan, step=step).export("accelerate-fsdp2")
    assert "recompute differs between layers (none ×1, selective ×1): all layers get 'full'" in exported.inexpressible
    assert exported.settings["fsdp_config.fsdp_activation_checkpointing"] is True
    ends = tuple(group for group in chunk.groups if "layers" not in group.unit)
    step = dataclasses.replace(plan.step, chunks=(dataclasses.replace(chunk, groups=(ends[0], *groups, *ends[1:])),))
    exported = dataclasses.replace(plan, step=step).export("accelerate-fsdp2")
    assert "recompute differs between layers (none ×1, selective ×1): all layers get 'full'" in exported.inexpressible


def test_demands_that_a_framework_cannot_meet_are_refused() -> None:
    with pytest.raises(ValueError, match=r"contradict Accelerate .*zero=2, 3"):
        llama("zero=1", "accelerate-fsdp2")
    with pytest.raises(ValueError, match="Accelerate has no setting for layers that exchange their rows"):
        llama(framework="accelerate-fsdp2", overlap_tensor=True)
    with pytest.raises(ValueError, match=r"unknown framework 'megatrn'.*megatron"):
        llama().export("megatrn")
    with pytest.raises(ValueError, match="mesh does not go with framework='megatron'"):
        planner.plan("tiny-llama", mesh="dp=2", framework="megatron")


def test_the_command_writes_the_file_and_says_what_is_not_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelined().save(tmp_path / "plan.json")
    command = ["export", str(tmp_path / "plan.json"), "--to", "deepspeed", "-o", str(tmp_path / "deepspeed.json")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "pp=2: DeepSpeed has pp=1" in printed
    written = json.loads((tmp_path / "deepspeed.json").read_text())
    assert written["train_batch_size"] == 16 and "pp=2: DeepSpeed has pp=1" in "".join(written["_comment"])
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["export", str(tmp_path / "plan.json"), "--to", "megatron"]) == 0
    assert capsys.readouterr().out == pipelined().export("megatron").text


@pytest.mark.parametrize(("host", "machines"), [(None, 4), ("bridge", 4), ("pcie", 2), ("network", 1)])
def test_machines_of_accelerate_are_the_hosts_of_the_cluster(host: str | None, machines: int) -> None:
    plan = llama("micro_batch=2", "accelerate-fsdp2")
    link = {"latency": 1e-6, "bandwidth": 1e9}
    levels = [{"name": name, "size": 2, **link} for name in ("bridge", "pcie", "network")]
    memory = {"memory_bytes": 1e12, "memory_bandwidth": 1e11, "link_bandwidth": 1e10}
    of_hosts = {} if host is None else {"host": {**memory, "level": host}}
    cluster = Cluster.from_dict({"name": "pairs", "device": plan.cluster["device"], "levels": levels, **of_hosts})
    step = dataclasses.replace(plan.step, axes={**plan.step.axes, "dp": 8}, global_batch=32)
    exported = dataclasses.replace(plan, step=step, cluster=cluster.to_dict()).export("accelerate-fsdp2")
    assert exported.settings["num_machines"] == machines and exported.settings["num_processes"] == 8


def test_accelerate_reads_its_file(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    llama("micro_batch=2", "accelerate-fsdp2").export("accelerate-fsdp2", tmp_path / "accelerate.yaml")
    read = load_config_from_file(str(tmp_path / "accelerate.yaml"))
    assert read.num_processes == 2 and read.fsdp_config["fsdp_version"] == 2
    assert yaml.safe_load((tmp_path / "accelerate.yaml").read_text())["distributed_type"] == "FSDP"


@pytest.mark.skipif(transformers_version() < (5, 23), reason="the file is one of transformers 5.23")
def test_transformers_reads_its_file(tmp_path: Path) -> None:
    from transformers import TrainingArguments
    from transformers.distributed import DistributedConfig

    exported = llama("tp=2", "transformers-tp").export("transformers-tp", tmp_path / "transformers.json")
    read = json.loads((tmp_path / "transformers.json").read_text())
    assert DistributedConfig(**read["distributed_config"]).tp_size == 2
    arguments = TrainingArguments(output_dir=str(tmp_path), **read["training_arguments"])
    assert arguments.per_device_train_batch_size == exported.settings["training_arguments.per_device_train_batch_size"]
