"""Who takes part in ``benchmarks.runtime``: hand-written parallel training with torch's own tools, and emitted plans.

All train the same ``LlamaForCausalLM`` on the same batch; each is one rank's part in it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import planner
from passes.plan import Plan
from planner.verification.verify_model import slow_devices
from runtime.module.parallel_module import ParallelModule

#: Label of a token that does not count.
IGNORED = -100
LEARNING_RATE = 1e-4
Batch = dict[str, torch.Tensor]


@dataclass
class Contestant:
    """One rank's part in one way to train.

    Attributes:
        forward_backward: one global batch; gives the loss of the whole batch, or this rank's part of it.
        join_loss: from what that gives, the loss of the whole batch on all ranks; never timed.
        parallel: what runs a plan, where one is run.
    """

    name: str
    forward_backward: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer
    join_loss: Callable[[torch.Tensor], torch.Tensor] = field(default=torch.Tensor.detach)
    parallel: ParallelModule | None = None


#: From the model, the global batch and the plan to compare with (None: there is none yet).
Maker = Callable[[nn.Module, Batch, Plan | None], Contestant]


def llama(*, layers: int, hidden: int, intermediate: int, heads: int, vocabulary: int) -> nn.Module:
    """A ``LlamaForCausalLM`` with random weights, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def random_tokens(batch: int, length: int, *, vocabulary: int) -> Batch:
    """A global batch [batch, length], the same on all ranks."""
    tokens = torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW over lists of tensors; torch refuses lists of plain and distributed tensors together."""
    kinds: dict[type, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(type(parameter.data), []).append(parameter)
    groups = [{"params": some} for some in kinds.values()]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, foreach=True)


def _next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As the model's own, for logits that it does not see itself."""
    shifted = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), shifted.flatten(), ignore_index=IGNORED)


def _mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def _own_samples(batch: Batch) -> Batch:
    rank, size = dist.get_rank(), dist.get_world_size()
    return {name: tensor.chunk(size)[rank].contiguous() for name, tensor in batch.items()}


# -- by hand -----------------------------------------------------------------------------------------------------------


def hand_tensor_parallel(*, sequence: bool) -> Maker:
    """``parallelize_module`` as in torch's tutorial; ``sequence``: norms and residuals are cut along the sequence."""

    def make(model: nn.Module, batch: Batch, plan: Plan | None) -> Contestant:
        model = copy.deepcopy(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        between = Shard(1) if sequence else Replicate()
        layer_plan: dict[str, Any] = {
            **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            "self_attn.o_proj": RowwiseParallel(output_layouts=between),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            layer_plan |= {
                "input_layernorm": SequenceParallel(),
                "post_attention_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(
                    input_kwarg_layouts={"hidden_states": Shard(1)},
                    desired_input_kwarg_layouts={"hidden_states": Replicate()},
                ),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            }
        outer_plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "lm_head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        }
        if sequence:
            outer_plan["model.norm"] = SequenceParallel()
        parallelize_module(model, mesh, outer_plan)
        for layer in model.get_submodule("model.layers").children():
            parallelize_module(layer, mesh, layer_plan)
        positions = torch.arange(batch["input_ids"].shape[1]).unsqueeze(0)

        def forward_backward() -> torch.Tensor:
            with loss_parallel():
                logits = model(input_ids=batch["input_ids"], position_ids=positions).logits
                loss = _next_token_loss(logits, batch["labels"])
                loss.backward()
            return loss

        def join_loss(loss: torch.Tensor) -> torch.Tensor:
            return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()

        name = "parallelize_module, sequence parallel" if sequence else "parallelize_module"
        return Contestant(name, forward_backward, _adamw(model.parameters()), join_loss)

    return make


def hand_ddp(model: nn.Module, batch: Batch, plan: Plan | None) -> Contestant:
    """``DistributedDataParallel``; gradients are views of its buckets."""
    replica = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
    return _on_own_samples("DDP", replica, batch)


def hand_fsdp(model: nn.Module, batch: Batch, plan: Plan | None) -> Contestant:
    """FSDP2: ``fully_shard`` on every layer, and on what is left."""
    model = copy.deepcopy(model)
    for layer in model.get_submodule("model.layers").children():
        fully_shard(layer)
    fully_shard(model)
    return _on_own_samples("FSDP2", model, batch)


def _on_own_samples(name: str, model: nn.Module, batch: Batch) -> Contestant:
    own = _own_samples(batch)

    def forward_backward() -> torch.Tensor:
        loss: torch.Tensor = model(**own).loss
        loss.backward()
        return loss

    return Contestant(name, forward_backward, _adamw(model.parameters()), _mean_over_ranks)


def layers_of_chunks(plan: Plan | None) -> list[int]:
    """How many layers each chunk of a plan has."""
    assert plan is not None and plan.step is not None
    return [
        sum(group.count for group in chunk.groups if group.unit.startswith("model.layers."))
        for chunk in plan.step.chunks
    ]


class LlamaStage(nn.Module):
    """Layers ``first`` to ``last`` of a Llama, with the embedding before the first and the head after the last."""

    def __init__(self, model: Any, first: int, last: int) -> None:
        super().__init__()
        num_layers = len(model.model.layers)
        self.embedding = model.model.embed_tokens if first == 0 else None
        self.rotary = model.model.rotary_emb
        self.layers = model.model.layers[first:last]
        self.norm = model.model.norm if last == num_layers else None
        self.head = model.lm_head if last == num_layers else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, position_embeddings=rotary, position_ids=positions)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def hand_pipeline(*, num_microbatches: int) -> Maker:
    """``torch.distributed.pipelining``, 1F1B, with a stage a rank of as many layers as the plan's."""

    def make(model: nn.Module, batch: Batch, plan: Plan | None) -> Contestant:
        model = copy.deepcopy(model)
        rank, size = dist.get_rank(), dist.get_world_size()
        ends = [0, *itertools.accumulate(layers_of_chunks(plan))]
        module = LlamaStage(model, ends[rank], ends[rank + 1])
        stage = PipelineStage(module, rank, size, torch.device("cpu"))
        schedule = Schedule1F1B(stage, num_microbatches, loss_fn=_next_token_loss)

        def forward_backward() -> torch.Tensor:
            losses: list[torch.Tensor] = []
            inputs = (batch["input_ids"],) if rank == 0 else ()
            target = batch["labels"] if rank == size - 1 else None
            schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
            return sum(losses, torch.zeros(())) / num_microbatches

        def join_loss(loss: torch.Tensor) -> torch.Tensor:
            whole = loss.detach().clone()
            dist.broadcast(whole, size - 1)
            return whole

        return Contestant("hand-split pipelining", forward_backward, _adamw(module.parameters()), join_loss)

    return make


# -- emitted -----------------------------------------------------------------------------------------------------------


def emitted(fix: dict[str, Any], *, own_samples: bool = False, **options: Any) -> Maker:
    """A plan with the decisions ``fix``; ``own_samples``: each data rank passes its own, as DDP does."""

    def make(model: nn.Module, batch: Batch, plan: Plan | None) -> Contestant:
        layout = {"recompute": "none", "zero": 0, "pp": 1, "dp": 1, "cp": 1, "tp": 1, "num_microbatches": 1, **fix}
        parallel = planner.compile(
            copy.deepcopy(model), slow_devices(dist.get_world_size()), example_inputs=batch, fix=layout, **options
        )
        inputs = _own_samples(batch) if own_samples else batch

        def forward_backward() -> torch.Tensor:
            return parallel.train_step(**inputs, local_inputs=own_samples)

        return Contestant("Meshwright", forward_backward, _adamw(parallel.parameters()), parallel=parallel)

    return make
