"""Capture: the graph computes the model's loss and gradients, and carries everything that planning needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from passes.capture import CaptureError, TrainingOutput, capture
from tests.capture_parity import assert_parity


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(images)), inplace=True), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def squared_error(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(outputs, batch[1])


def test_a_loss_function_gets_the_outputs_and_the_whole_batch() -> None:
    batch = torch.randn(6, 8, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    graph = assert_parity(MLP().double(), args=batch, loss_fn=squared_error)
    assert graph.loss == "loss"
    assert list(graph.outputs) == ["loss", "outputs"]
    assert graph.input_paths == ((0,), (1,))
    assert [node.name for node in graph.nodes] == ["up", "relu", "down", "mse_loss"]
    unflattened = graph.unflatten({"loss": 1, "outputs": 2})
    assert unflattened == TrainingOutput(1, 2)


def test_keyword_inputs_and_names() -> None:
    model = MLP().double()
    batch = {"x": torch.randn(6, 8, dtype=torch.float64), "target": torch.randn(6, 4, dtype=torch.float64)}
    graph = assert_parity(model, kwargs=batch, loss_fn=lambda out, batch: (out - batch["target"]).abs().mean())
    assert [value.name for value in graph.inputs] == ["x", "target"]
    assert [(state.path, state.value.name) for state in graph.states][:2] == [
        ("up.weight", "up_weight"),
        ("up.bias", "up_bias"),
    ]
    assert all(state.value.requires_grad for state in graph.states)
    assert [node.key for node in graph.nodes][:2] == ["up:aten.linear.default:0", ":aten.relu.default:0"]


def test_batch_norm_updates_its_statistics() -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    graph = assert_parity(ConvNet().double(), kwargs={"images": images, "labels": labels})
    assert graph.loss == ""
    assert graph.outputs == {"": graph.nodes[[node.op for node in graph.nodes].index("aten.div.Tensor")].name}
    assert [node.op for node in graph.nodes][-1] == "aten.copy_.default", "num_batches_tracked is stored last"


def test_inference_has_no_gradients() -> None:
    model = MLP().eval()
    graph = capture(model, args=(torch.randn(2, 8),))
    assert not graph.training and graph.loss is None
    assert not any(value.requires_grad for value in graph.values.values())


def test_training_flag_is_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    graph = capture(model, args=(torch.randn(2, 4),), training=False)
    assert [node.op for node in graph.nodes] == ["aten.linear.default"]
    assert model.training and model[1].training
    graph = capture(model, args=(torch.randn(2, 4),))
    assert [node.op for node in graph.nodes] == ["aten.linear.default", "aten.dropout.default"]


def test_capture_on_meta_and_on_real_weights_is_the_same() -> None:
    with torch.device("meta"):
        meta = MLP()
        x = torch.randn(3, 8)
    assert capture(meta, args=(x,)) == capture(MLP(), args=(torch.randn(3, 8),))


def test_the_model_is_untouched() -> None:
    model = ConvNet()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    capture(model, args=(torch.randn(2, 3, 8, 8), torch.tensor([0, 1])))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0]
        assert torch.equal(tensor, before[name][1])
        assert tensor.grad is None


def test_one_tensor_given_twice_is_two_inputs() -> None:
    class Product(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b.T

    x = torch.randn(3, 3)
    graph = capture(Product(), args=(x, x))
    assert [value.name for value in graph.inputs] == ["a", "b"]


def test_tied_weights_are_one_state_with_aliases() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(tokens)).logsumexp(-1).mean()

    graph = assert_parity(Tied().double(), args=(torch.arange(6).reshape(2, 3),))
    assert [(state.path, state.aliases) for state in graph.states] == [("embed.weight", ("head.weight",))]
    assert graph.nodes[0].inputs[0] == graph.nodes[1].inputs[1]


def test_frozen_parameters_buffers_and_literals() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            self.trained = nn.Parameter(torch.ones(3))
            self.register_buffer("scale", torch.tensor([2.0, 3.0, 4.0]), persistent=False)
            self.table = torch.arange(3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.frozen * self.scale + torch.tensor([1.0, 2.0, 3.0]) * self.table * self.trained).sum()

    graph = assert_parity(Mixed(), args=(torch.randn(2, 3),), tolerance=1e-5)
    kinds = {state.path: (state.value.kind, state.value.requires_grad, state.persistent) for state in graph.states}
    assert kinds["frozen"] == ("parameter", False, True)
    assert kinds["trained"] == ("parameter", True, True)
    assert kinds["scale"] == ("buffer", False, False)
    literals = [state for state in graph.states if state.value.kind == "constant"]
    assert sorted(state.data.tolist() for state in literals) == [[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]
    assert [node.constant for node in graph.nodes].count(True) == 1, "the product of the two literals"


def test_nested_inputs_and_outputs_are_rebuilt() -> None:
    @dataclass
    class Pair:
        first: torch.Tensor
        rest: dict[str, torch.Tensor]
        note: str

    class Nested(nn.Module):
        def forward(self, batch: dict[str, list[torch.Tensor]], *, power: int) -> Pair:
            return Pair(batch["x"][0] ** power, {"y": batch["x"][1] * 2}, "kept")

    graph = capture(Nested(), args=({"x": [torch.ones(2), torch.ones(3)]},), kwargs={"power": 3})
    assert graph.input_paths == ((0, "x", 0), (0, "x", 1))
    assert list(graph.outputs) == ["first", "rest.y"]
    assert graph.unflatten({"first": 1, "rest.y": 2}) == Pair(1, {"y": 2}, "kept")


def test_an_elementwise_custom_function_keeps_its_own_gradient() -> None:
    class StraightThrough(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3

    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return StraightThrough.apply(x * self.weight).square().sum()

    assert_parity(Rounded(), args=(torch.randn(5, dtype=torch.float64) * 5,))


#: What is written to a parameter, and whether the parameter is read before that too.
PARAMETER_WRITES: dict[str, tuple[Callable[[torch.Tensor], object], bool]] = {
    "doubled": (lambda weight: weight.mul_(2), True),
    "row": (lambda weight: weight[0].fill_(0), False),
    "drawn": (lambda weight: weight.bernoulli_(0.5), False),
}


_OF_NO_MODULE = torch.zeros(4)
#: What a forward does that no program would.
LOST: dict[str, Callable[[nn.Module], object]] = {
    "gradient": lambda inner: setattr(inner.weight, "grad", torch.ones(4)),
    "frozen": lambda inner: inner.weight.requires_grad_(False),
    "replaced": lambda inner: setattr(inner, "weight", nn.Parameter(torch.ones(4))),
    "resized": lambda inner: inner.weight.data.set_(torch.ones(4)),
    "global": lambda inner: _OF_NO_MODULE.add_(1),
}


class Reads(nn.Module):
    """Does what cannot be captured, one thing per ``mode``."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.inner = Inner(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Inner(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        if self.mode == "branch" and y.sum() > 0:
            return y + 1
        if self.mode == "item":
            return y * y.sum().item()
        if self.mode == "select":
            return y[y > 0]
        if self.mode == "cond":
            return torch.cond(y.sum() > 0, lambda y: y + 1, lambda y: y - 1, (y,))
        if self.mode in PARAMETER_WRITES:
            write, read = PARAMETER_WRITES[self.mode]
            write(self.weight.data)
            return self.weight * (y if read else x)
        if self.mode == "of_input":
            self.weight.data.mul_(x[0])
            return self.weight * x
        if self.mode == "assigned":
            y.data = x
            return y
        if self.mode in LOST:
            LOST[self.mode](self)
            return x * self.weight
        if self.mode == "data":
            y.data.clamp_(max=1)
            return y.tanh()
        if self.mode == "no_grad":
            with torch.no_grad():
                y.mul_(2)
            return y.tanh()
        if self.mode == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return y @ y.T
        raise KeyError("something the model raises itself")


@pytest.mark.parametrize(
    ("mode", "line", "reason"),
    [
        ("branch", "y.sum() > 0", "parameters decide, and one of its branches cannot be traced (in module 'inner'"),
        ("item", "y.sum().item()", "read in Python (.item(), .tolist()), which depends on the parameter"),
        ("select", "y[y > 0]", "the shape of a result depends on a value that the program leaves open"),
        ("raise", "raise KeyError", "something the model raises itself"),
    ],
)
def test_what_cannot_be_captured_names_module_and_line(mode: str, line: str, reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Reads(mode), args=(torch.ones(4, 4),))
    message = str(caught.value)
    assert "cannot capture Reads" in message and "'inner'" in message
    assert line in message and "test_capture.py" in message
    assert reason in message


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("doubled", "writes to parameter 'model_inner_weight' in its forward, after it was read by aten.mul.Tensor"),
        ("of_input", "by aten.mul_.Tensor, from 'tensors_0', which is not computed of parameters alone"),
        ("assigned", "x.data = … inside of forward cannot be traced, but for a parameter's"),
        ("row", "through aten.select.int, a part or another order of it"),
        ("drawn", "by aten.copy_.default, from"),
        ("data", "writes through .data or detach() into a tensor that has a gradient"),
        ("no_grad", "writes through .data or detach() into a tensor that has a gradient"),
    ],
)
def test_writes_that_autograd_does_not_see_are_refused(mode: str, reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Reads(mode), args=(torch.ones(4, 4),))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("gradient", "x.grad = … inside of forward would be lost"),
        ("frozen", "forward changes requires_grad of a parameter"),
        ("replaced", "puts another tensor in the place of parameter 'inner.weight'"),
        ("resized", "by aten.set_.source_Tensor, which gives it another memory or shape"),
        ("global", "to a tensor that is none of its buffers, parameters and inputs"),
    ],
)
def test_what_a_program_would_not_do_is_refused(mode: str, reason: str) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Reads(mode), args=(torch.ones(4, 4),))
    assert reason in str(caught.value)


def test_control_flow_operators_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"in module 'inner' \(Inner\).* cannot be planned: its branches"):
        capture(Reads("cond"), args=(torch.ones(4, 4),))


def test_autocast_inside_the_model_is_refused() -> None:
    with pytest.raises(CaptureError, match="switches autocast on"):
        capture(Reads("autocast"), args=(torch.ones(4, 4),))


class OnlyInEager(nn.Module):
    """Makes what its next line needs only while it is not compiled, and names a layer by an input's value."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer_{index}": nn.Linear(4, 4) for index in range(3)})

    def forward(self, x: torch.Tensor, index: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones_like(x)
        y: torch.Tensor = self.layers[f"layer_{index[0]}"](x)
        return y * mask[:, :4]  # type: ignore[index]


def test_a_model_that_fails_on_its_compiled_path_is_captured_on_its_eager_one() -> None:
    """A number of a tensor in a text is its value, as in eager."""
    is_compiling = torch.compiler.is_compiling
    graph = capture(OnlyInEager(), args=(torch.ones(2, 4), torch.tensor([1])))
    assert {state.path for state in graph.states} == {"layers.layer_1.weight", "layers.layer_1.bias"}
    assert [reading.expected for reading in graph.guards.readings] == [1]
    assert torch.compiler.is_compiling is is_compiling


class ConvertsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.router = self.router.to(torch.float32)
        return self.router(x.float())  # type: ignore[no-any-return]


def test_a_module_that_converts_its_weights_is_captured_once_they_are_converted() -> None:
    with pytest.raises(CaptureError, match=r"forward converts the weights of Linear for good.*call forward once"):
        capture(ConvertsItself().double(), args=(torch.ones(2, 4),))
    assert capture(ConvertsItself(), args=(torch.ones(2, 4),)).states
