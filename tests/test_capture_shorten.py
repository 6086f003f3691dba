"""Capturing a model with repeated layers copied gives the very graph that tracing every layer gives."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from passes.capture import capture
from passes.capture.draws import number_draws
from passes.capture.repeats import MIN_PERIODS, find_repeats
from passes.ir.graph import Graph
from planner.library import build_model, example_batch, load_config
from tests.cells import cells, named_cells

transformers = pytest.importorskip("transformers")

capture_module = importlib.import_module("passes.capture.capture")
DEPTH_ENTRIES = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
DECODER = {"vocab_size": 96, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": MIN_PERIODS,
           "num_attention_heads": 4, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GROUPED = {**DECODER, "num_key_value_heads": 2, "head_dim": 6, "pad_token_id": 0}
CONVOLUTIONS = {"depths": [2, MIN_PERIODS + 1], "hidden_sizes": [8, 16], "embedding_size": 8, "num_labels": 4,
                "layer_type": "basic"}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "num_hidden_layers": 2 * MIN_PERIODS, "sliding_window": 8}),
    "gpt_neox": ("GPTNeoXForCausalLM", DECODER),
    "falcon": ("FalconForCausalLM", DECODER),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 2}),
    "resnet": ("ResNetForImageClassification", {**CONVOLUTIONS, "image_size": 32}),
}  # fmt: skip


def both(model: nn.Module, kwargs: Mapping[str, Any], **options: Any) -> tuple[Graph, Graph | None]:
    """The graph of the whole model, and that with copies (None where the layers cannot be copied)."""
    arguments = {"args": (), "kwargs": kwargs, "loss_fn": None, "training": None, **options}
    before = contents(model)
    shortened = capture_module._capture_shortened(model, arguments)
    assert contents(model) == before
    return capture(model, **arguments), None if shortened is None else number_draws(shortened)


def contents(model: nn.Module) -> list[tuple[str, Any]]:
    """Everything that modules hold, by identity, and their hooks."""
    return [
        (f"{path}.{name}", list(entry.items()) if isinstance(entry, dict) and name.endswith("_hooks") else id(entry))
        for path, module in model.named_modules(remove_duplicate=False)
        for part in (module.__dict__, module._parameters, module._buffers, module._modules)
        for name, entry in part.items()
    ]


@pytest.mark.parametrize(
    "name", cells(["tiny-llama", "tiny-gpt2", "tiny-bert", "tiny-t5", "tiny-vit", "tiny-bloom"], ["tiny-opt"])
)
def test_library_models(name: str) -> None:
    config = load_config(name)
    for entry in DEPTH_ENTRIES:
        if hasattr(config, entry):
            # the first block of each row of T5's is unlike the others
            setattr(config, entry, MIN_PERIODS + (name == "tiny-t5"))
    model = build_model(config)
    whole, shortened = both(model, example_batch(model, batch_size=2, seq_len=16))
    assert shortened == whole


@pytest.mark.parametrize("name", named_cells(OTHERS, "mistral", "gpt_neox"))
def test_other_architectures(name: str) -> None:
    class_name, entries = OTHERS[name]
    model = build_model(transformers.AutoConfig.for_model(name, architectures=[class_name], **entries))
    whole, shortened = both(model, example_batch(model, batch_size=2, seq_len=16))
    assert shortened == whole


def test_collected_hidden_states_are_those_of_every_layer() -> None:
    config = load_config("tiny-llama")
    config.num_hidden_layers, config.output_hidden_states = MIN_PERIODS, True
    model = build_model(config)
    whole, shortened = both(model, example_batch(model, batch_size=2, seq_len=16))
    assert len([path for path in whole.outputs if path.startswith("hidden_states")]) == MIN_PERIODS + 1
    assert shortened in (whole, None)


class Layer(nn.Module):
    """A residual block with whatever a test gives it to do."""

    def __init__(self, number: int, *, size: int = 8) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """Layers in a list, between two linears; ``run(layers, x)`` is the loop over them."""

    def __init__(self, layers: list[nn.Module], run: Callable[[nn.ModuleList, Any], Any] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(8, 4)
        self.run = run or in_turn

    def forward(self, x: torch.Tensor) -> Any:
        x = self.run(self.layers, self.first(x))
        return self.last(x) if isinstance(x, torch.Tensor) else x


def in_turn(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def check(model: nn.Module, *, copied: bool | None) -> None:
    """The short way gives what the long way does, or (``copied`` False) is not taken; None for either."""
    whole, shortened = both(model, {"x": torch.zeros(4, 8)})
    assert shortened in (whole, None)
    assert copied is None or copied == (shortened is not None)


def ten(kind: type[nn.Module] = Layer) -> list[nn.Module]:
    return [kind(number) for number in range(10)]


def test_plain_layers_are_copied() -> None:
    check(Stack(ten()), copied=True)


def test_a_sequential_of_alternating_modules() -> None:
    model = nn.Sequential(*(part for _ in range(7) for part in (nn.Linear(8, 8), nn.ReLU())))
    whole, shortened = both(model, {}, args=(torch.zeros(4, 8),))
    assert shortened == whole
    layers = [part for _ in range(7) for part in (nn.Linear(8, 8), nn.Dropout(0.0), nn.LayerNorm(8))]
    check(Stack(layers), copied=True)


def test_layers_between_others() -> None:
    check(Stack([nn.Linear(8, 8), *ten(), nn.LayerNorm(8), *ten()]), copied=True)


def test_the_loop_may_look_at_the_length_of_the_list() -> None:
    check(Stack(ten(), lambda layers, x: in_turn(layers, x * len(layers))), copied=True)


def test_batch_norm_statistics_are_written_for_every_layer() -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(7)]
    check(Stack(layers), copied=True)


class Scaled(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * torch.tensor(3.0)


def test_literals_of_every_layer_are_one() -> None:
    check(Stack(ten(Scaled)), copied=True)


class Special(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if self.number == 5 else 1)


class Writing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(self.linear(x))


class Remembering(Layer):
    aux: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = x.sum()
        return super().forward(x)


def penalised(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return in_turn(layers, x) + sum(parameter.sum() for parameter in layers.parameters())


def penalised_in_the_middle(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return in_turn(layers, x) + sum(parameter.sum() for parameter in layers[5].parameters())


def skipping_connections(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    seen = []
    for layer in layers[:5]:
        x = layer(x)
        seen.append(x)
    for layer in layers[5:]:
        x = layer(x + seen.pop())
    return x


def all_states(layers: nn.ModuleList, x: torch.Tensor) -> list[torch.Tensor]:
    states = []
    for layer in layers:
        x = layer(x)
        states.append(x)
    return states


def middle_state(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return all_states(layers, x)[4] * 2


def scaled_between(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for index, layer in enumerate(layers):
        x = layer(x * 2 if index == 5 else x)
    return x


def every_second_with_more(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    first = x
    for index, layer in enumerate(layers):
        x = layer(first if index % 2 else x)
    return x


def frozen_half(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for index, layer in enumerate(layers):
        with torch.set_grad_enabled(index >= 5):
            x = layer(x)
    return x


def summed(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([layer(x) for layer in layers]).sum(0)


LOOPS: dict[str, Callable[[nn.ModuleList, Any], Any]] = {
    "backwards": lambda layers, x: in_turn(layers[::-1], x),
    "twice": lambda layers, x: in_turn(layers, in_turn(layers, x)),
    "not all": lambda layers, x: in_turn(layers[:6], x),
    "each twice": lambda layers, x: in_turn([each for layer in layers for each in (layer, layer)], x),  # type: ignore[arg-type]
    **{loop.__name__: loop for loop in (penalised, penalised_in_the_middle, skipping_connections, all_states, summed,
                                        middle_state, scaled_between, every_second_with_more, frozen_half)},
}  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS)
def test_loops_that_do_not_treat_layers_alike(loop: str) -> None:
    check(Stack(ten(), LOOPS[loop]), copied=None if loop in ("all_states", "summed") else False)


@pytest.mark.parametrize("kind", [Special, Writing, Remembering])
def test_layers_that_are_not_alike_when_they_run(kind: type[nn.Module]) -> None:
    check(Stack(ten(kind)), copied=False)


def test_modules_that_differ_do_not_repeat() -> None:
    growing = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.01 * index)) for index in range(10)]
    tied = ten()
    for layer in tied[1:]:
        layer.linear.weight = tied[0].linear.weight
    frozen = ten()
    for index, layer in enumerate(frozen):
        layer.requires_grad_(index in (0, 2, 3, 5, 8))
    for layers in (growing, tied, frozen):
        assert not find_repeats(Stack(layers))
    hooked = ten()
    hooked[4].register_forward_hook(lambda module, args, output: output * 2)
    assert all(repeat.start > 4 or repeat.stop <= 4 for repeat in find_repeats(Stack(hooked)))


def test_failing_leaves_the_model_as_it_was() -> None:
    def fail(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no")

    model = Stack(ten(), fail)
    before = contents(model)
    with pytest.raises(Exception, match="no"):
        capture(model, kwargs={"x": torch.zeros(4, 8)}, copy_repeats=True)
    assert contents(model) == before
