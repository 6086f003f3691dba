"""Bytes that PyTorch really holds for a training step on a processor, beside those predicted from the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from cost_models.memory import StateBytes, state_bytes
from passes.autograd import Activations, Recompute, held_constants, kept_under, working_peak
from passes.autograd.kernels import EXPENSIVE
from passes.capture import capture
from passes.ir.graph import Graph
from planner.library import build_model, load_config, random_batch
from planner.sharding_ilp.liveness import live_nodes


class ConvNet(nn.Module):
    """Three convolutions with group norm, pooling and dropout, and a classifier that gives its own loss."""

    def __init__(self, *, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(inputs, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.MaxPool2d(2),
                nn.Dropout(0.1),
            )
            for inputs in (3, width, width)
        )  # fmt: skip
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            images = layer(images)
        return {"loss": F.cross_entropy(self.head(images.mean((-2, -1))), labels)}


@dataclass(frozen=True)
class Case:
    """A model in training mode, its batch, and the modules that are recomputed as a whole."""

    model: nn.Module
    batch: Mapping[str, torch.Tensor]
    layers: tuple[str, ...]

    def loss(self) -> torch.Tensor:
        outputs = self.model(**self.batch)
        return outputs["loss"]


def library_case(name: str, *layers: str, batch_size: int = 4, seq_len: int | None = 64, **changes: Any) -> Case:
    """A model of the config library; ``layers`` are paths of its module lists."""
    config = load_config(name)
    config.use_cache = False  # what generation would reuse is no part of training; capture leaves it out too
    for field, value in changes.items():
        setattr(config, field, value)
    model = build_model(config, device="cpu")
    paths = tuple(f"{path}.{index}" for path in layers for index, _ in enumerate(model.get_submodule(path)))
    return Case(model, random_batch(model, batch_size=batch_size, seq_len=seq_len), paths)


def convolution_case() -> Case:
    model = ConvNet()
    batch = {"images": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 10, (4,))}
    return Case(model, batch, tuple(f"layers.{index}" for index in range(3)))


_DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}

CASES: dict[str, Callable[[], Case]] = {
    "llama": lambda: library_case("tiny-llama", "model.layers"),
    "gpt2": lambda: library_case("tiny-gpt2", "transformer.h"),
    "gpt2 with dropout": lambda: library_case("tiny-gpt2", "transformer.h", **_DROPOUT),
    "bert": lambda: library_case("tiny-bert", "bert.encoder.layer"),
    "t5": lambda: library_case("tiny-t5", "encoder.block", "decoder.block", batch_size=8, seq_len=32),
    "vit": lambda: library_case("tiny-vit", "vit.layers"),
    "convolutions": convolution_case,
}


# -- what PyTorch holds -----------------------------------------------------------------------------------------------


def held_activations(case: Case, policy: str) -> int:
    """Bytes allocated by the forward and not freed while only the loss is held: what the allocator was asked for."""
    restore = _checkpointed(case, policy)
    case.loss().backward()  # caches of the first call (and torch's own) are not activations
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = case.loss()
    restore()
    assert loss.grad_fn is not None
    return sum(allocations(profile))


def peak_activations(case: Case, policy: str) -> int:
    """The most bytes that the allocator has out during forward and backward, beyond parameters and gradients."""
    restore = _checkpointed(case, policy)
    case.loss().backward()  # gradients are there from now on
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        case.loss().backward()
    restore()
    return max(accumulate(allocations(profile)))


def allocations(profile: torch.profiler.profile) -> list[int]:
    """Bytes given (positive) and taken back (negative), in order."""
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def hooked_activations(case: Case) -> int:
    """Bytes of the distinct storages that autograd packs away, other than parameters, buffers and inputs."""
    saved_bytes: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved_bytes[_storage(tensor)] = tensor
        return tensor

    own = {_storage(tensor) for tensor in (*case.model.parameters(), *case.model.buffers(), *case.batch.values())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = case.loss()
    assert loss.grad_fn is not None
    return sum(tensor.untyped_storage().nbytes() for storage, tensor in saved_bytes.items() if storage not in own)


def held_state(case: Case) -> StateBytes:
    """Bytes of the parameters, their gradients and AdamW's state after one step."""
    optimizer = torch.optim.AdamW(case.model.parameters())
    case.loss().backward()
    optimizer.step()
    parameters = list(case.model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    return StateBytes(
        sum(parameter.nbytes for parameter in parameters),
        sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None),
        sum(value.nbytes for value in states if isinstance(value, torch.Tensor)),
    )


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _saves_expensive(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    expensive = op.overloadpacket.__name__ in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


_CONTEXTS: dict[str, dict[str, Any]] = {
    "full": {},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, _saves_expensive)},
}


def _checkpointed(case: Case, policy: str) -> Callable[[], None]:
    """Run every layer of the case under torch's checkpoint; returns what undoes it."""
    layers = [case.model.get_submodule(path) for path in case.layers] if policy != "none" else []
    for layer in layers:
        layer.forward = partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **_CONTEXTS[policy]
        )  # type: ignore[method-assign]

    def restore() -> None:
        for layer in layers:
            del layer.forward

    return restore


# -- what is predicted ------------------------------------------------------------------------------------------------


class Prediction:
    """The graph of a case, and what it says of memory."""

    def __init__(self, case: Case) -> None:
        self.layers = case.layers
        self.graph: Graph = capture(case.model, kwargs=dict(case.batch))
        self.figures = Activations.of(self.graph, live_nodes(self.graph), kernels="cpu")

    def activations(self, policy: str) -> int:
        return self.num_bytes([kept_under(self.figures, nodes, used) for nodes, used in self.stretches(policy)])

    def peak(self, policy: str) -> float:
        """While a stretch runs, those before it hold what they keep; those after are through with their backward."""
        stretches = self.stretches(policy)
        parts = [kept_under(self.figures, nodes, used) for nodes, used in stretches]
        return max(
            self.num_bytes(parts[: place + 1])
            + working_peak(
                self.figures,
                nodes,
                used,
                local_bytes=lambda value: value.num_bytes,
                extra_bytes=lambda extra: extra.num_bytes,
            )
            for place, (nodes, used) in enumerate(stretches)
        )

    def stretches(self, policy: str) -> list[tuple[list[str], str]]:
        """The graph cut into the layers, under ``policy``, and what is between them, under none; in order."""
        policy_stretches: list[tuple[list[str], str]] = []
        current: str | None = ""
        for node in self.graph.nodes:
            if node.constant:
                continue
            layer = next((path for path in self.layers if f"{node.module_path}.".startswith(f"{path}.")), None)
            if layer != current:
                policy_stretches.append(([], "none" if layer is None else policy))
                current = layer
            policy_stretches[-1][0].append(node.name)
        return policy_stretches

    def num_bytes(self, parts: list[Recompute]) -> int:
        values = held_constants(self.graph).union(*(part.values for part in parts))
        bytes_of_extras = sum(extra.num_bytes for part in parts for extra in part.extras)
        return bytes_of_extras + sum(self.figures.values[name].num_bytes for name in values)

    def state(self) -> StateBytes:
        parts = [
            state_bytes(state.value.num_elements, state.value.dtype, trainable=state.value.requires_grad)
            for state in self.graph.parameters
        ]
        return StateBytes(
            sum(part.parameters for part in parts),
            sum(part.gradients for part in parts),
            sum(part.optimizer for part in parts),
        )
