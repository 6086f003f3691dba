"""What a model does that tracing would lose is refused in one line, or has exactly its own gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook

import planner
from passes.capture import CaptureError, capture
from tests.capture_parity import assert_parity

X = torch.linspace(-2.0, 2.0, 20, dtype=torch.float64).reshape(4, 5)


class Net(nn.Module):
    """Two linears with ``between(hidden)`` in between."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = torch.relu) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.up = nn.Linear(5, 5).double()
            self.down = nn.Linear(5, 5).double()
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x))).square().sum()


def refusal(model: Any, x: torch.Tensor = X) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, args=(x,))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def hooked(register: Callable[[Net], Any]) -> Net:
    model = Net()
    register(model)
    return model


@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda m: m.up.weight.register_hook(torch.neg), ("'up.weight'", "register_hook: ")),
        (lambda m: m.up.weight.register_post_accumulate_grad_hook(print), ("'up.weight'", "post_accumulate")),
        (lambda m: m.up.register_full_backward_hook(print), ("'up' (Linear)", "register_full_backward_hook: print")),
        (lambda m: m.down.register_full_backward_pre_hook(print), ("'down' (Linear)", "backward_pre_hook")),
    ],
)
def test_backward_hooks_are_refused_by_name(register: Callable[[Net], Any], words: tuple[str, ...]) -> None:
    model = hooked(register)
    assert all(word in refusal(model) for word in words)
    with pytest.raises(ValueError, match="hook"):  # the copy that is compiled has no hooks on parameters to tell it by
        planner.compile(model, "dp=1")


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_full_backward_hook])
def test_hooks_on_all_modules_are_refused(register: Callable[..., Any]) -> None:
    handle = register(lambda *args: None)
    try:
        assert "registered on all modules" in refusal(Net())
    finally:
        handle.remove()


def test_forward_hooks_are_traced() -> None:
    model = Net()
    model.up.register_forward_hook(lambda module, args, output: output * 2)
    model.down.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_parity(model, args=(X,))


def test_a_forward_hook_that_only_looks_on_is_announced() -> None:
    seen: list[torch.Tensor] = []
    model = Net()
    model.up.register_forward_hook(lambda module, args, output: seen.append(output))
    with pytest.warns(UserWarning, match="forward hook .* on module 'up' changes nothing"):
        capture(model, args=(X,))


def scaled_by_a_hook(h: torch.Tensor) -> torch.Tensor:
    h.register_hook(lambda grad: grad * 2)
    return h


def retained(h: torch.Tensor) -> torch.Tensor:
    h.retain_grad()
    return h


def with_backward(h: torch.Tensor) -> torch.Tensor:
    h.sum().backward(retain_graph=True)
    return h


def in_inference_mode(h: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return h * 2


def saved_elsewhere(h: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.half(), lambda x: x.double()):
        return h.exp()


def packed(h: torch.Tensor) -> torch.Tensor:
    lengths = torch.ones(len(h), dtype=torch.long)
    return nn.utils.rnn.pack_padded_sequence(h[:, None], lengths, batch_first=True).data


REFUSED: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (scaled_by_a_hook, "Tensor.register_hook inside of forward"),
    (retained, "Tensor.retain_grad inside of forward"),
    (with_backward, "Tensor.backward inside of forward"),
    (in_inference_mode, "use torch.no_grad"),
    (saved_elsewhere, "saved_tensors_hooks"),
    (lambda h: torch.func.vjp(torch.sin, h)[1](h)[0], "a transform of torch.func"),
    (lambda h: torch.func.jvp(torch.sin, (h,), (h,))[1], "a transform of torch.func"),
    (packed, "pick its outputs by length"),
]


@pytest.mark.parametrize(("between", "words"), REFUSED)
def test_what_tracing_would_lose_is_refused(between: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    message = refusal(Net(between))
    assert words in message and "test_capture_refusals.py" in message


@pytest.mark.filterwarnings("ignore")
def test_models_of_other_makes_are_refused() -> None:
    assert "compiled by torch.jit" in refusal(torch.jit.trace(nn.Linear(5, 5).double(), X))
    for kind in (nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel, FSDPModule):
        wrapper = object.__new__(type("Wrapped", (kind, nn.Module) if kind is FSDPModule else (kind,), {}))
        nn.Module.__init__(wrapper)
        assert f"is parallel already ({kind.__name__}): pass" in refusal(wrapper)
    quantized = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(5, 5)), {nn.Linear})
    assert "module '0' (Linear) is quantized" in refusal(quantized)
    assert "call the model once" in refusal(nn.LazyLinear(3))
    assert refusal(None) == "a model must be a torch.nn.Module, not None"
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module, not None"):
        planner.compile(None, "dp=1")  # type: ignore[arg-type]


def test_sparse_tensors_in_forward_are_refused() -> None:
    assert "to_sparse makes a sparse tensor" in refusal(Net(lambda hidden: hidden.to_sparse().to_dense()))


def test_sparse_and_nested_inputs_are_refused() -> None:
    assert "input '0' is a sparse coo tensor" in refusal(Net(), X.to_sparse())
    ragged = torch.nested.nested_tensor([X, X[:1]])
    assert "input '0' is a nested tensor" in refusal(Net(), ragged)
    for unusual in (X.to_sparse(), ragged):
        with pytest.raises(ValueError, match=r"input 'x' is a .* tensor, which cannot be sharded"):
            planner.compile(Net(), "dp=1", example_inputs={"x": unusual})
        parallel = planner.compile(Net(), "dp=1")
        parallel.train_step(x=X)
        with pytest.raises(ValueError, match=r"input 'x' is a .* tensor, which cannot be sharded"):
            parallel.train_step(x=unusual)


def test_a_branch_on_values_prints_nothing_beside_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    assert "choose with torch.where" in refusal(Net(lambda h: h if h.sum() > 0 else F.dropout(h)))
    assert capfd.readouterr() == ("", "")


def custom(forward: Callable[..., torch.Tensor], backward: Callable[..., torch.Tensor]) -> Net:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return backward(grad, *ctx.saved_tensors)

    return Net(Custom.apply)


def zero_below(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    grad[x < 0] = 0
    return grad


LINEAR: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "gradient reversal": (lambda x: x.view_as(x), lambda grad, x: grad.neg() * 0.3),
    "straight through": (torch.sign, lambda grad, x: grad * (x.abs() <= 1).to(grad.dtype)),
    "relu with a mask": (lambda x: x.clamp(min=0), zero_below),
    "where": (torch.sign, lambda grad, x: torch.where(x > 0, grad, torch.zeros_like(grad))),
    "sum of two": (lambda x: x * 1, lambda grad, x: grad + grad * x.exp()),
    "mixes elements": (lambda x: x.cumsum(0), lambda grad, x: 2 * grad.flip(0).cumsum(0).flip(0)),
    "another shape": (lambda x: torch.cat((x, x)), lambda grad, x: grad[: len(x)] - 0.1 * grad[len(x) :]),
    "einsum": (lambda x: x * x.sum(0), lambda grad, x: torch.einsum("ij,kj->kj", grad, 2 * x)),
    "Fourier transform": (lambda x: torch.fft.fft(x).real, lambda grad, x: torch.fft.ifft(grad * 5).real),
}
NOT_LINEAR: dict[str, Callable[..., torch.Tensor]] = {
    "clamp": lambda grad, x: grad.clamp(-0.1, 0.1),
    "hardtanh": lambda grad, x: F.hardtanh(grad),
    "sign": lambda grad, x: grad.sign(),
    "mul": lambda grad, x: grad * grad,
    "einsum": lambda grad, x: torch.einsum("ij,ij->ij", grad, grad),
    "add": lambda grad, x: grad + 0.1 * x,
    "its backward": lambda grad, x: torch.ones_like(grad),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_custom_backward_that_is_linear_is_kept(name: str) -> None:
    assert_parity(custom(*LINEAR[name]), args=(X,))


class Chosen(torch.autograd.Function):
    """As a router's: several arguments, some with gradients, a backward that scatters, two results."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, gates: torch.Tensor, places: torch.Tensor) -> Any:
        ctx.save_for_backward(gates, places)
        return scores.gather(-1, places), scores.sum(-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_of_sum: torch.Tensor) -> Any:
        gates, places = ctx.saved_tensors
        spread = gates * grad.mul(-1)
        spread.scatter_add_(dim=-1, index=places, src=grad)
        return spread + grad_of_sum[:, None] * 3, (grad * 0.5).expand_as(gates), None


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(5, 5).double(), nn.Linear(5, 5).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.up(x)
        top, total = Chosen.apply(scores, self.down(x).softmax(-1), scores.argmax(-1, keepdim=True))
        return (top.square() * total[:, None]).sum()


def test_a_custom_function_of_several_arguments_and_results_keeps_its_backward() -> None:
    assert_parity(Router(), args=(X,))


def test_a_custom_function_that_mixes_elements_by_no_linear_backward_is_refused() -> None:
    message = refusal(custom(lambda x: x.cumsum(0), lambda grad, x: grad.softmax(-1)))
    assert "'softmax' is not linear in the gradient" in message


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_a_custom_backward_that_is_not_linear_is_refused(name: str) -> None:
    assert f"({name!r} is not linear in the gradient)" in refusal(custom(lambda x: x * 1, NOT_LINEAR[name]))
