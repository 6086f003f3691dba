"""``planner.verify``: many virtual ranks in one process against one device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import planner
from planner.library import load_config
from planner.verification.comparison import Comparison, difference
from planner.verification.training_run import run_sharded
from tests.cells import cells
from tests.small_models import TiedClassifier, seeded, token_batch

pytestmark = pytest.mark.usefixtures("models_traced_once")

OPTIONS: dict[str, Any] = {"forbid_replicated_matmul": True}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, most of all where other processes run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def two_layers(model: str) -> Any:
    """A config of the library with as many layers as make a block that repeats."""
    config = load_config(model)
    config.num_hidden_layers = 2
    return config


@pytest.mark.parametrize(
    ("model", "mesh"),
    cells([("tiny-gpt2", "cp=2,tp=2"), ("tiny-bert", "dp=2,tp=4")], [("tiny-llama", "dp=2,tp=8")]),
)
def test_library_models_on_large_meshes(model: str, mesh: str) -> None:
    # One step: what further steps are like does not depend on the mesh (the tests of few ranks take three).
    report = planner.verify(two_layers(model), mesh, batch_size=8, seq_len=16, steps=1, **OPTIONS)
    assert report.ok, report.table()
    assert report.largest_error < 1e-9
    assert report.collectives_as_planned


@pytest.mark.parametrize(
    ("mesh", "fix"), [("pp=2,tp=2", {"recompute": "none"}), ("dp=2,tp=2", {"recompute": "full", "zero": 3})]
)
def test_collectives_of_a_whole_step(mesh: str, fix: dict[str, Any]) -> None:
    report = planner.verify(
        two_layers("tiny-llama"), mesh, batch_size=8, seq_len=16, fix={"num_microbatches": 2, **fix}, steps=1
    )
    assert report.ok and report.collectives_as_planned, report.table()
    first = next(entry for entry in report.plan.collectives if entry.axis == "tp" and entry.phase == "forward")
    wrong = [dataclasses.replace(one, count=one.count + 100 * (one is first)) for one in report.plan.collectives]
    lying = dataclasses.replace(report, plan=dataclasses.replace(report.plan, collectives=tuple(wrong)))
    assert not lying.ok and first.collective in lying.table()


def test_what_does_not_pay_is_whole_on_every_rank() -> None:
    """BLOOM adds its biases, which have no gradient, to products that are the same on all ranks."""
    assert planner.verify("tiny-bloom", "tp=2", cluster="cpu-local:2", steps=1).ok


def test_64_ranks() -> None:
    report = planner.verify(
        seeded(TiedClassifier, size=64, vocabulary=64), "dp=8,tp=8", batch=token_batch(), steps=1, **OPTIONS
    )
    assert report.ok, report.table()
    with pytest.raises(ValueError, match="at most 64 ranks"):
        planner.verify(seeded(TiedClassifier), "dp=8,tp=16", batch=token_batch())


def test_vocabulary_that_tp_does_not_divide() -> None:
    batch = token_batch(vocabulary=29)
    report = planner.verify(seeded(TiedClassifier, vocabulary=29), "tp=4", batch=batch, **OPTIONS)
    assert report.ok, report.table()


def test_a_saved_plan_is_verified(tmp_path: Any) -> None:
    first = planner.verify(seeded(TiedClassifier), "dp=2,tp=2", batch=token_batch(), **OPTIONS)
    path = tmp_path / "plan.json"
    first.plan.save(path)
    again = planner.verify(seeded(TiedClassifier), path, batch=token_batch())
    assert again.ok and again.source == first.source
    assert not dist.is_initialized()


def test_the_report_fails_for_a_wrong_number_and_for_unplanned_communication() -> None:
    report = planner.verify(seeded(TiedClassifier), "tp=2", batch=token_batch(), **OPTIONS)
    assert "largest relative error" in report.table()
    wrong = dataclasses.replace(report, comparisons=(*report.comparisons, Comparison("gradients", "w", 1e-3)))
    assert not wrong.ok and "FAILED" in wrong.table()
    unplanned = dataclasses.replace(report, counted=())
    assert not unplanned.ok and "planned" in unplanned.table()


@pytest.mark.parametrize("fix", [None, {"num_microbatches": 1, "zero": 0}])
def test_a_part_that_two_ranks_count_is_seen(monkeypatch: pytest.MonkeyPatch, fix: Any) -> None:
    """What is whole on both ranks enters the norm, and whole tensors, twice."""
    monkeypatch.setattr("runtime.execution.state_info.is_first_holder", lambda *_: True)
    pins = {"input:*": {"dp": "S(0)"}, "*.weight": {"dp": "I"}}
    options = {"constraints": pins} if fix is None else {"fix": fix}
    report = planner.verify(seeded(TiedClassifier), "dp=2", batch=token_batch(), steps=1, **options)
    assert not report.ok
    wrong = {comparison.what for comparison in report.comparisons if comparison.error > 1e-6}
    assert {"norm of all gradients", "weights after 1 steps"} <= wrong


class Counting(torch.nn.Module):
    """Scales by how often it was called, and keeps the largest value that it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("calls", torch.ones(()))
        self.register_buffer("largest", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / self.calls
        self.calls += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.largest.copy_(torch.maximum(self.largest, x.detach().amax(0)))
        return (x - self.largest).square().mean()


COUNTED = {"x": torch.linspace(-1, 1, 128).reshape(8, 16)}


@pytest.mark.parametrize("fix", [None, {"num_microbatches": 1}, {"num_microbatches": 1, "recompute": "full"}])
def test_buffers_that_forward_writes_are_written_once_a_step(fix: dict[str, Any] | None) -> None:
    options = {} if fix is None else {"fix": fix}
    report = planner.verify(seeded(Counting), "dp=2", batch=COUNTED, **options)
    assert report.ok, report.table()
    assert {"calls", "largest"} <= {comparison.name for comparison in report.comparisons}


def test_buffers_that_forward_writes_need_one_micro_batch() -> None:
    with pytest.raises(ValueError, match="num_microbatches"):
        planner.verify(seeded(Counting), "dp=2", batch=COUNTED, fix={"num_microbatches": 2})
    assert planner.verify(seeded(Counting), "dp=2", batch=COUNTED, fix={"zero": 1}).plan.step.num_microbatches == 1


class Chaotic(torch.nn.Module):
    """The logistic map, which doubles what rounding makes of a number each time; gradients pass it by."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sigmoid()
        chaos = h.detach()
        for _ in range(32):
            chaos = 4.0 * chaos * (1.0 - chaos)
        return h + chaos


def mean_square(outputs: torch.Tensor, _: Any) -> torch.Tensor:
    return outputs.square().mean()


def test_what_rounding_alone_makes_is_no_error_and_what_is_wrong_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that differ in the last bit after a step give another loss: only a reference run can judge that."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "batch": {"x": torch.randn(8, 6, 16, dtype=torch.float64)},
        "loss_fn": mean_square,
        "constraints": {"input:*": {"dp": "S(0)"}},
    }
    report = planner.verify(seeded(Chaotic), "dp=2", **options)
    assert report.ok and report.largest_error > report.tolerance, report.table()
    assert "differ by more, as they do on one device" in report.table()

    def with_an_error(parallel: Any, *arguments: Any, **options: Any) -> Any:
        results = run_sharded(parallel, *arguments, **options)
        bias = results.state["linear.bias"] + 1e-5
        return dataclasses.replace(results, state={**results.state, "linear.bias": bias})

    monkeypatch.setattr("planner.verification.verify_model.run_sharded", with_an_error)
    assert not planner.verify(seeded(Chaotic), "dp=2", **options).ok


class FloatOnly(torch.nn.Module):
    """Like grouped matrix products, it does not take float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("expected Float, got Double")
        return self.linear(x)


def test_a_model_that_lacks_float64_is_compared_in_float32() -> None:
    batch = {"x": torch.ones(4, 16)}
    report = planner.verify(FloatOnly(), "dp=2", batch=batch, loss_fn=mean_square, steps=1)
    assert report.ok and report.tolerance == 1e-5 and "does not train in float64" in report.table()
    with pytest.raises(RuntimeError, match="got Double"):
        planner.verify(FloatOnly(), "dp=2", batch=batch, loss_fn=mean_square, dtype="float64")


class NotFinite(torch.nn.Linear):
    """Its outputs are NaN in these dtypes."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__(16, 16)
        self.dtypes = dtypes

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * (torch.nan if input.dtype in self.dtypes else 1.0)


def test_a_loss_that_is_not_finite_is_refused_unless_it_is_in_float32() -> None:
    options: dict[str, Any] = {"batch": {"input": torch.ones(4, 16)}, "loss_fn": mean_square, "steps": 1}
    report = planner.verify(NotFinite(torch.float64), "dp=2", **options)
    assert report.ok and report.tolerance == 1e-5 and "is nan in float64" in report.note
    with pytest.raises(ValueError, match="is nan in float64, with which nothing can be compared: give a batch"):
        planner.verify(NotFinite(torch.float64, torch.float32), "dp=2", **options)


class MaskedByBuffer(torch.nn.Module):
    """A causal mask in a buffer of booleans, and one of minus infinities."""

    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(8, 8)
        self.register_buffer("seen", torch.ones(4, 4, dtype=torch.bool).tril())
        self.register_buffer("bias", torch.full((4, 4), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = (self.project(x) @ x.transpose(1, 2) + self.bias).where(self.seen, -1e9)
        return (scores.softmax(-1) @ x).square().mean()


@pytest.mark.parametrize(("mesh", "shown"), [("dp=2,tp=2", "dp=2,tp=2"), ("pp=2,dp=2", "pp=2,dp=2,cp=1,tp=1")])
def test_buffers_of_booleans_and_infinities_agree(mesh: str, shown: str) -> None:
    report = planner.verify(seeded(MaskedByBuffer), mesh, batch=(torch.randn(4, 4, 8),), steps=1)
    assert report.ok and report.disagreement == 0.0, report.table()
    assert report.table().startswith(f"MaskedByBuffer on mesh {shown}:")


@pytest.mark.parametrize("options", [{"steps": 0}, {"steps": 1.5}, {"batch_size": 0}, {"seq_len": -1}])
def test_what_would_compare_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give a whole number, at least 1"):
        planner.verify("tiny-llama", "tp=2", **options)


def test_inputs_that_are_missing_are_named() -> None:
    with pytest.raises(ValueError, match="batch is missing: TiedClassifier"):
        planner.verify(seeded(TiedClassifier), "tp=2")
    with pytest.raises(ValueError, match="as batch=, not example_inputs="):
        planner.verify(seeded(TiedClassifier), "tp=2", example_inputs=token_batch())
    with pytest.raises(ValueError, match="verify has no option 'memory_limits'"):
        planner.verify(seeded(TiedClassifier), "tp=2", batch=token_batch(), memory_limits=1)
    with torch.device("meta"):
        empty = TiedClassifier()
    with pytest.raises(ValueError, match="meta device"):
        planner.verify(empty, "tp=2", batch=token_batch())


def test_difference_is_relative_to_the_largest_value() -> None:
    actual, expected = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])
    assert difference("x", "x", actual, expected).error == 0.5
    assert difference("x", "x", actual, expected, floor=20.0).error == 0.1
    assert difference("x", "x", torch.zeros(2), torch.zeros(2)).error == 0.0
    nothing, imaginary = torch.tensor([torch.nan]), torch.tensor([1j])
    assert difference("x", "x", nothing, nothing).error == torch.inf
    assert difference("x", "x", nothing, nothing, nan_agrees=True).error == 0.0
    assert difference("x", "x", imaginary, 2 * imaginary).error == 0.5


class ConvNet(torch.nn.Module):
    """Convolutions, a batch norm with running statistics, pooling, a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(8, 16, 3), torch.nn.GroupNorm(4, 16), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(),
            torch.nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)


class Tanhs(torch.nn.Module):
    """A list whose odd entries hold no weights."""

    def __init__(self) -> None:
        super().__init__()
        linears = [torch.nn.Linear(16, 16) for _ in range(4)]
        self.net = torch.nn.Sequential(*(part for linear in linears for part in (linear, torch.nn.Tanh())))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)


def classification(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, batch["labels"])


@pytest.mark.parametrize(
    "options",
    [
        {"constraints": {"images": {"dp": "S(0)"}}},
        {"fix": {"num_microbatches": 1}},
        {"fix": {"num_microbatches": 1, "recompute": "full", "zero": 3}},
    ],
)
def test_running_statistics_are_those_of_the_whole_batch(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    batch = {"images": torch.randn(8, 3, 12, 12), "labels": torch.randint(10, (8,))}
    model = seeded(ConvNet)
    report = planner.verify(model, "dp=2,tp=2", batch=batch, loss_fn=classification, **options)
    assert report.ok, report.table()
    compared = {comparison.name for comparison in report.comparisons}
    assert {"layers.1.running_mean", "layers.1.running_var", "layers.1.num_batches_tracked"} <= compared


def test_list_entries_without_weights() -> None:
    batch = {"images": torch.randn(8, 16), "labels": torch.randint(10, (8,))}
    report = planner.verify(seeded(Tanhs), "dp=2,tp=2", batch=batch, loss_fn=classification)
    assert report.ok, report.table()


def test_uneven_valid_tokens_on_ranks_that_cut_the_batch() -> None:
    batch = token_batch(batch=8)
    valid = (batch["labels"] != -100).sum(1).reshape(4, 2).sum(1)
    assert len(set(valid.tolist())) > 1
    pins = {"input:*": {"dp": "S(0)"}}
    report = planner.verify(seeded(TiedClassifier), "dp=4", batch=batch, constraints=pins)
    assert report.ok, report.table()
    assert {tensor.placement for tensor in report.plan.inputs.values()} == {("S(0)",)}


def test_fewer_key_heads_than_tensor_parallel_ranks() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
    report = planner.verify(transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **sizes, **heads), "tp=4")
    assert report.ok, report.table()
    for name in ("q_proj:aten.linear", "o_proj:aten.linear", "mlp.up_proj:aten.linear"):
        nodes = [node for key, node in report.plan.nodes.items() if name in key]
        assert nodes and all(node.strategy[0].startswith("cut") for node in nodes), nodes


class IdleEncoder(torch.nn.Module):
    """It returns what its encoder makes, which its loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3))
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        encoded = decoded = x
        for layer in self.encoder:
            encoded = layer(encoded)
        for layer in self.decoder:
            decoded = layer(decoded)
        return {"loss": decoded.square().mean(), "encoded": encoded}


@pytest.mark.parametrize("mesh", ["pp=2,dp=2", "dp=2,tp=2"])
def test_blocks_that_the_loss_does_not_depend_on(mesh: str) -> None:
    report = planner.verify(seeded(IdleEncoder), mesh, batch=(torch.linspace(-1, 1, 64).reshape(8, 8),), steps=1)
    assert report.ok, report.table()


class CalledAgain(torch.nn.Module):
    """Layers that are called several times, of which some calls give no gradient to their weights."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2))
        self.calls = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.calls(self.first, self.second, x)  # type: ignore[no-any-return]


def beside(first: Any, second: Any, x: torch.Tensor) -> torch.Tensor:
    h = first(x) + first(2 * x).detach()
    return second(h) + second(2 * h).detach()


def behind(first: Any, second: Any, x: torch.Tensor) -> torch.Tensor:
    h = first(first(x)).detach() + first(x)
    return second(second(h))


SPLITS = {
    "dp=4": {"pp": 1, "dp": 4, "tp": 1, "zero": 2},
    "dp=2,tp=2": {"pp": 1, "dp": 2, "tp": 2, "zero": 3, "recompute": "full"},
}


@pytest.mark.parametrize("mesh", SPLITS)
@pytest.mark.parametrize("calls", [beside, behind])
def test_calls_that_give_weights_no_gradient(calls: Any, mesh: str) -> None:
    model = seeded(functools.partial(CalledAgain, calls))
    batch = (torch.linspace(-1, 1, 64).reshape(8, 8),)
    report = planner.verify(model, mesh, batch=batch, loss_fn=mean_square, fix=SPLITS[mesh], steps=1)
    assert report.ok, report.table()


class NormedStem(torch.nn.Module):
    """A stem with running statistics before blocks that repeat: its statistics are written in the stem's chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in range(4)
        )
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def test_running_statistics_of_a_stem_in_a_pipeline() -> None:
    report = planner.verify(seeded(NormedStem), "pp=2,dp=2", batch=(torch.linspace(-1, 1, 64).reshape(8, 8),), steps=2)
    assert report.ok, report.table()
