"""One rank of the tests of programs that must follow what changed since they were traced; both kinds of plans."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import planner
from runtime.programs import program_cache
from tests.ranks import answer, task

X = torch.linspace(-1.0, 1.0, 64, dtype=torch.float64).reshape(8, 8)


class Factor:
    def __init__(self, value: float) -> None:
        self.value = value


#: Read by the code of ``Net``.
AROUND, TABLE, SETTINGS = 1.0, {"by": 1.0}, Factor(1.0)


def around(y: torch.Tensor) -> torch.Tensor:
    return y * AROUND * TABLE["by"]


class Gate(nn.Module):
    """Has no parameters, and a mode that counts."""

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y * 3.0 if self.training else y


class Net(nn.Module):
    """A linear whose output is scaled by attributes, by what is around it and by what it is called with."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8).double()
        self.linear.gain = 1.0
        self.scale = 1.0
        self.config = Factor(1.0)
        self.gate = Gate()

    def forward(self, x: torch.Tensor, by: Any = None, beta: float = 1.0, gate: float = 1.0) -> dict[str, torch.Tensor]:
        y = self.linear(x) * self.scale * self.linear.gain * self.config.value
        y = y * beta + beta**2
        y = around(self.gate(y)) * SETTINGS.value * self.of_class
        if gate > 0.5:
            y = y * gate
        if isinstance(by, np.ndarray):
            y = y * torch.from_numpy(by)[:8]
        elif by is not None:
            y = y * (by(2.0) if callable(by) else by.value)
        return {"loss": y.square().sum()}


class Pair:
    """The model and its parallel version, called alike."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.model = Net()
        self.parallel = planner.compile(self.model, target, example_inputs={"x": X})

    def same(self, x: torch.Tensor = X, **arguments: Any) -> bool:
        """Whether both have one loss and one gradient."""
        self.model.zero_grad()
        self.parallel.zero_grad()
        loss = self.model(x, **arguments)["loss"]
        loss.backward()
        actual = self.parallel.train_step(x=x, **arguments)
        gradient = self.parallel.full_gradients()["linear.weight"]
        return torch.allclose(actual, loss.detach(), rtol=1e-9) and torch.allclose(
            gradient, self.model.linear.weight.grad, rtol=1e-9
        )


def arrays_count_by_content(pair: Pair) -> bool:
    array = np.ones(2000)
    first = pair.same(by=array)
    array[3] = 7.0  # among those that repr leaves out
    return first and pair.same(by=array)


def objects_count_by_content(pair: Pair) -> bool:
    factor = Factor(2.0)
    first = pair.same(by=factor)
    factor.value = 3.0
    return first and pair.same(by=factor)


def functions_count_by_what_they_see(pair: Pair) -> bool:
    def times(number: float) -> Callable[[float], float]:
        return lambda x: x * number

    return pair.same(by=times(2.0)) and pair.same(by=times(5.0))


def what_cannot_be_compared_is_refused(pair: Pair) -> bool:
    try:
        pair.parallel.train_step(x=X, by=(number for number in range(3)))
    except ValueError as error:
        return "argument 'by' holds a generator" in str(error)
    return False


def attributes_of_the_model_are_followed(pair: Pair) -> bool:
    results = []
    for change in ("scale", "gain", "config"):
        if change == "scale":
            pair.model.scale = 2.0
        elif change == "gain":
            pair.model.linear.gain = 3.0
        else:
            pair.model.config.value = 0.5
        results.append(pair.same())
    pair.model.scale, pair.model.linear.gain, pair.model.config.value = 1.0, 1.0, 1.0
    return all(results) and pair.same()


def attributes_of_the_parallel_module_are_followed(pair: Pair) -> bool:
    other = copy.deepcopy(pair.model)
    other.scale = pair.parallel.scale = 4.0
    other.linear.gain = pair.parallel.linear.gain = 3.0
    loss = pair.parallel.train_step(x=X)
    pair.parallel.scale = pair.parallel.linear.gain = 1.0
    return torch.allclose(loss, other(X)["loss"].detach(), rtol=1e-9)


def globals_and_classes_are_followed(pair: Pair) -> bool:
    """Numbers around the model's code, read by ``forward`` or by what it calls; functions, too."""
    global AROUND, around
    results, first = [], around
    AROUND = 2.0
    results.append(pair.same())
    TABLE["by"] = 3.0
    results.append(pair.same())
    SETTINGS.value = 0.5
    results.append(pair.same())
    Net.of_class = 4.0
    results.append(pair.same())
    around = torch.sin
    results.append(pair.same())
    AROUND, TABLE["by"], SETTINGS.value, Net.of_class, around = 1.0, 1.0, 1.0, 1.0, first
    before = _num_programs(pair)
    return all(results) and pair.same() and _num_programs(pair) == before


def modes_of_submodules_are_followed(pair: Pair) -> bool:
    """Those of the parallel module; another mode of a part of the original is refused, of all of it is not."""
    gate, results = pair.parallel.get_submodule("gate"), []
    pair.model.gate.eval()
    results.append("'gate' of the model was put into evaluation mode" in _error_of(lambda: pair.same()))
    gate.eval()
    results.append(pair.same())
    pair.parallel.train()
    pair.model.train()
    results.append(pair.same())
    pair.model.eval()
    loss = pair.parallel.train_step(x=X)
    pair.model.train()
    return all(results) and torch.allclose(loss, pair.model(X)["loss"].detach(), rtol=1e-9)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.gain, self.gate = 1.0, Gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gate(torch.tanh(self.linear(x)) * self.gain)


class Layers(nn.Module):
    """Repeats a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def a_repeated_layer_may_become_unlike_the_others(pair: Pair) -> bool:
    """Its mode, or a number of it; also where the plan is one of stages."""
    results = []
    for target in (pair.target, "pp=2"):
        model, parallel = Layers(), planner.compile(Layers(), target, example_inputs={"x": X})
        for layer in (2, 0):
            for module in (model, parallel):
                module.get_submodule(f"layers.{layer}.gate").eval()
                module.get_submodule(f"layers.{layer + 1}").gain = 0.5
            loss = model(X)
            gradients = torch.autograd.grad(loss, model.layers[1].linear.weight)[0]
            parallel.zero_grad()
            results.append(torch.allclose(parallel.train_step(x=X), loss, rtol=1e-9))
            own = parallel.full_gradients()["layers.1.linear.weight"]
            results.append(torch.allclose(own, gradients, rtol=1e-9))
    return all(results)


def freezing_is_followed_or_refused(pair: Pair) -> bool:
    """Of a part of the original it is refused, of the parallel module's it is followed."""
    results = []
    pair.model.linear.bias.requires_grad_(False)
    results.append("'linear.bias' of the model was frozen after it" in _error_of(lambda: pair.parallel.train_step(x=X)))
    pair.parallel.linear.bias.requires_grad_(False)
    results.append(pair.same() and pair.parallel.linear.bias.grad is None)
    pair.parallel.linear.bias.requires_grad_(True)
    pair.model.requires_grad_(False)  # a teacher
    pair.parallel.train_step(x=X)
    pair.model.requires_grad_(True)
    return all(results) and pair.same()


def other_changes_are_announced(pair: Pair) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pair.model.table = [1, 2]
        pair.model.linear.register_forward_hook(lambda module, args, output: output * 2)
        pair.parallel.train_step(x=X)
    pair.model.linear._forward_hooks.clear()
    text = " ".join(str(warning.message) for warning in caught)
    return "'table' of the model was set" in text and "hooks were registered" in text


def hooks_that_would_not_be_called_are_refused(pair: Pair) -> bool:
    refused = []
    for register in (pair.parallel.linear.register_forward_hook, pair.parallel.linear.register_full_backward_hook):
        refused.append(_refuses(lambda register=register: register(print)))
    handle = pair.parallel.register_forward_hook(print)
    refused.append(_refuses(lambda: pair.parallel.train_step(x=X)))
    handle.remove()
    return all(refused) and pair.same()


def floats_that_change_are_inputs(pair: Pair) -> bool:
    """Two programs, of the first value and of all others."""
    before = _num_programs(pair)
    return all(pair.same(beta=0.9**step) for step in range(5)) and _num_programs(pair) <= before + 2


def floats_that_decide_are_constants(pair: Pair) -> bool:
    return all(pair.same(gate=gate) for gate in (0.9, 0.4, 0.6))


def _num_programs(pair: Pair) -> int:
    engine = pair.parallel._engine
    return len(engine._maker._prepared)


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def _refuses(call: Callable[[], Any]) -> bool:
    return _error_of(call) != ""


def the_programs_kept_are_bounded(pair: Pair) -> bool:
    """And a constant that changes from call to call is announced."""
    engine = pair.parallel._engine
    caches = [engine._runnables] if hasattr(engine, "_runnables") else [engine._maker._prepared, engine._maker._made]
    for cache in caches:
        cache.max_programs = 3
        cache._announced.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        right = [pair.same(by=Factor(float(number))) for number in range(program_cache.CONSTANTS_ANNOUNCED)]
    text = " ".join(str(warning.message) for warning in caught)
    return (
        all(right)
        and all(len(cache) == 3 for cache in caches)
        and "more than 3 kinds" in text
        and "traced anew" in text
    )


def numbers_that_a_loss_sees_are_followed(pair: Pair) -> bool:
    """In the closure of a loss function, and on an object that is one."""

    class Weighted:
        weight = 1.0

        def __call__(self, outputs: Any, batch: Any) -> torch.Tensor:
            return outputs["loss"] * self.weight

    losses = []
    loss_fn = Weighted()
    parallel = planner.compile(Net(), pair.target, example_inputs={"x": X}, loss_fn=loss_fn)
    for loss_fn.weight in (1.0, 3.0):
        losses.append(parallel.train_step(x=X))
    return torch.allclose(losses[1], 3 * losses[0], rtol=1e-9)


SCENARIOS = (
    numbers_that_a_loss_sees_are_followed,
    arrays_count_by_content,
    objects_count_by_content,
    functions_count_by_what_they_see,
    what_cannot_be_compared_is_refused,
    attributes_of_the_model_are_followed,
    attributes_of_the_parallel_module_are_followed,
    globals_and_classes_are_followed,
    modes_of_submodules_are_followed,
    a_repeated_layer_may_become_unlike_the_others,
    freezing_is_followed_or_refused,
    other_changes_are_announced,
    hooks_that_would_not_be_called_are_refused,
    floats_that_change_are_inputs,
    floats_that_decide_are_constants,
    the_programs_kept_are_bounded,
)
TARGETS = ("dp=2", "pp=1,dp=2")


def main() -> None:
    answers = {}
    for target in task():
        pair = Pair(target)
        answers |= {f"{scenario.__name__} {target}": scenario(pair) for scenario in SCENARIOS}
    answer(answers)


if __name__ == "__main__":
    main()
