"""Values that forward reads in Python are constants of a program, which serves calls with the same values alone."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from passes.capture import CaptureError, capture, interpret
from passes.capture.guard_values import first_difference
from runtime.agreement.ranks_together import Ranks
from runtime.execution.value_cases import MAX_CASES, ValueCases, apart
from tests.capture_parity import assert_parity
from tests.cells import cells
from tests.ranks import run_on_ranks
from tests.value_guards_worker import LENGTHS, OTHERS, READERS, TARGETS, Branches, Checked, Reader, X

#: Readers and targets: how a reader's values are told to the ranks does not depend on its kind, so they take turns.
READ = cells(
    [(reader, TARGETS[place % 2]) for place, reader in enumerate(READERS)],
    [(reader, TARGETS[1 - place % 2]) for place, reader in enumerate(READERS)],
)
#: Each of the other scenarios on one target; values of data groups and what ranks must agree on, on both.
ON_DATA, ON_TENSOR = (cells([TARGETS[place]], [TARGETS[1 - place]]) for place in (0, 1))
CELLS = [
    *((reader.__name__, target) for reader, target in READ),
    *(("reads_each_groups_samples", target) for target in TARGETS),
    *(("errors_are_the_users", target) for target in ON_TENSOR),
    *(("checks_predictions", target) for target in ON_DATA),
    *(("transcribes", target) for target in ON_DATA),
    *(("follows_loaded_buffers", target) for target in ON_TENSOR),
    *(("follows_written_buffers", target) for target in ON_DATA),
    *(("fills_a_queue", target) for target in ON_TENSOR),
    *(("refuses_other_batches", target) for target in TARGETS),
]


@functools.cache
def results() -> dict[str, Any]:
    return run_on_ranks("value_guards_worker", 2, CELLS)


@pytest.mark.parametrize(("reader", "target"), READ)
def test_other_values_make_another_program_and_the_first_come_back_to_theirs(reader: type, target: str) -> None:
    assert results()[f"{reader.__name__} {target}"] == [True, 1, True, 2, True, 2]


@pytest.mark.parametrize("target", TARGETS)
def test_values_of_every_data_group_count_with_local_inputs(target: str) -> None:
    first, _, second, after_second, third, after_third = results()[f"reads_each_groups_samples {target}"]
    assert first and second and third and after_second == after_third


@pytest.mark.parametrize("target", ON_TENSOR)
def test_a_check_of_the_model_raises_its_own_error_and_makes_no_program(target: str) -> None:
    assert results()[f"errors_are_the_users {target}"] == ["lengths must be 5 at most", "True", "1"]


@pytest.mark.parametrize("target", ON_DATA)
def test_a_check_of_predictions_raises_at_the_call_that_it_refuses(target: str) -> None:
    first, message, second, programs = results()[f"checks_predictions {target}"]
    assert first and second and programs == 1
    assert "the model raises an error here" in message and "(y.abs() < 100).all()" in message


@pytest.mark.parametrize("target", ON_DATA)
def test_how_many_letters_a_batch_has_makes_no_program(target: str) -> None:
    assert results()[f"transcribes {target}"] == [True, True, 1]


@pytest.mark.parametrize("target", ON_TENSOR)
def test_a_buffer_that_was_loaded_is_read_again(target: str) -> None:
    assert results()[f"follows_loaded_buffers {target}"] == [True, 2]


@pytest.mark.parametrize("target", ON_DATA)
def test_a_buffer_that_forward_writes_is_read_at_the_next_call(target: str) -> None:
    assert results()[f"follows_written_buffers {target}"] == [True, True, 3]


@pytest.mark.parametrize("target", ON_TENSOR)
def test_a_queue_whose_place_is_a_tensor_has_one_program(target: str) -> None:
    assert results()[f"fills_a_queue {target}"] == [True, True, 1]


def test_more_values_than_programs_are_kept_are_announced_with_the_mend() -> None:
    cases, guards = ValueCases(Ranks(None), {}), capture(Branches(), args=(X, LENGTHS)).guards
    with pytest.warns(UserWarning, match="lengths") as caught:
        for number in range(MAX_CASES + 2):
            cases.add("kind", number, guards)
    many, dropped = (str(warning.message) for warning in caught)
    assert "9 programs were made" in many and f"more than {MAX_CASES} ways" in dropped
    assert all("queue[(pointer + torch.arange(len(rows))) % len(queue)] = rows" in text for text in (many, dropped))


@pytest.mark.parametrize("target", TARGETS)
def test_ranks_that_read_different_values_are_told(target: str) -> None:
    message = results()[f"refuses_other_batches {target}"]
    assert "same global batch" in message and "lengths" in message


def test_a_branch_is_guarded_by_its_condition_and_not_by_the_number_behind_it() -> None:
    guards = capture(Branches(), args=(X, LENGTHS)).guards
    assert [reading.expected for reading in guards.readings] == [False]
    assert first_difference(guards, {(1,): LENGTHS - 1}, {}) is None
    reading, value = first_difference(guards, {(1,): LENGTHS + 1}, {}) or (None, None)
    assert value is True and reading is not None and "lengths[-1] > 2" in reading.place


class Twice(Branches):
    """Reads a value of its weights, or of random numbers."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of

    def read(self, y: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        tensor = {"weight": y, "draw": torch.rand(3)}[self.of]
        return y if tensor.sum().item() > 0 else -y


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        ("weight", "depends on the parameter 'linear."),
        ("draw", "random numbers"),
    ],
)
def test_what_training_changes_is_refused_with_the_line(of: str, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(Twice(of), args=(X, LENGTHS))
    assert "return y if tensor.sum().item() > 0" in str(caught.value)


class Dropped(nn.Module):
    """Leaves an adapter out with a probability, as LoHa and LoKr of PEFT do."""

    def __init__(self, probability: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.probability, self.dtype = probability, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.rand(1, dtype=self.dtype) > self.probability:
            return x.sin()
        return x.cos() if torch.rand(()) <= self.probability else x.tan()


@pytest.mark.parametrize(("probability", "operator"), [(0.0, "sin"), (1.0, "cos")])
def test_a_branch_that_no_draw_changes_is_followed(probability: float, operator: str) -> None:
    graph = capture(Dropped(probability), args=(X,))
    assert [str(node.op) for node in graph.nodes] == [f"aten.{operator}.default"]


@pytest.mark.parametrize(("probability", "dtype"), [(0.5, torch.float32), (0.0, torch.bfloat16)])
def test_a_branch_that_draws_decide_is_refused(probability: float, dtype: torch.dtype) -> None:
    """In bfloat16 every 256th draw is 0."""
    with pytest.raises(CaptureError, match="random numbers"):
        capture(Dropped(probability, dtype), args=(X,))


def test_an_input_without_values_is_named_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"lengths\[-1\] > 2.*input '1'.*real tensors"):
        capture(Branches(), args=(X, LENGTHS.to("meta")))


def test_an_example_that_the_model_refuses_raises_the_models_error() -> None:
    with pytest.raises(IndexError, match="5 at most"):
        capture(Checked(), args=(X, OTHERS * 2))


class Variance(nn.Module):
    """Predicts a mean and a variance; torch's loss refuses variances below zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return F.gaussian_nll_loss(x, x.flip(0), self.linear(x).square() + shift)


def test_a_check_of_torchs_own_loss_stays_a_check() -> None:
    model, shift = Variance(), torch.tensor(0.1, dtype=torch.float64)
    graph = assert_parity(model, args=(X, shift))
    parameters = dict(model.named_parameters())
    negative = {"x": X, "shift": -10 * shift - 10}
    inputs = {value.name: negative[name] for value, name in zip(graph.inputs, ("x", "shift"))}
    with pytest.raises(ValueError, match=r"raises an error here.*gaussian_nll_loss"):
        interpret(graph, inputs, lambda state: parameters[state.path])


class Boxes(nn.Module):
    """Predicts corners of boxes, which it writes side by side; boxes without an inside are refused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 2, dtype=torch.float64)

    def forward(self, x: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        boxes = x.new_zeros(len(x), 4)
        boxes[:, :2] = self.linear(x)
        boxes[:, 2:] = boxes[:, :2] + size
        if not (boxes[:, 2:] >= boxes[:, :2]).all():
            raise ValueError(f"not corners: {boxes}")
        return boxes.square().mean()


def test_a_check_of_what_weights_are_written_into_is_no_check_of_the_example() -> None:
    model, size = Boxes(), torch.tensor(0.1, dtype=torch.float64)
    graph = assert_parity(model, args=(X, size))
    assert not graph.guards
    inputs = {value.name: tensor for value, tensor in zip(graph.inputs, (X, -size))}
    parameters = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"raises an error here.*boxes\[:, :2\]\).all\(\)"):
        interpret(graph, inputs, lambda state: parameters[state.path])


class Deep(nn.Module):
    """Layers that repeat, each with a flag of its own in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FlagLayer(place % 3 == 0) for place in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class FlagLayer(nn.Module):
    def __init__(self, flag: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.register_buffer("flag", torch.tensor(flag))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() if self.flag else self.linear(x)


def test_a_flag_of_one_layer_is_not_that_of_the_layers_that_repeat_it() -> None:
    graph = capture(Deep(), args=(X,), copy_repeats=True)
    assert sum(node.op == "aten.tanh.default" for node in graph.nodes) == 2


class GroupsByKind(Reader):
    """Averages the runs of rows of one kind, which Python groups, as models that place images among text do."""

    def read(self, y: torch.Tensor, x: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        means, first = [], 0
        for _, group in itertools.groupby(kinds.tolist(), key=bool):
            size = len(list(group))
            means.append(y[first : first + size].mean())
            first += size
        return torch.stack(means)


def test_a_list_is_one_reading_however_long_it_is() -> None:
    x, kinds = X.repeat(75, 1), torch.arange(600) // 200 % 2
    guards = assert_parity(GroupsByKind(), args=(x, kinds)).guards
    assert [reading.expected for reading in guards.readings] == [tuple(kinds.tolist())]
    assert len(guards.steps) == 2  # the input and its list
    assert first_difference(guards, {(1,): kinds.clone()}, {}) is None
    assert first_difference(guards, {(1,): 1 - kinds}, {}) is not None


class PicksPlaces(Reader):
    """Reads pairs of row and column."""

    def read(self, y: torch.Tensor, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return torch.stack([y[row, column] for row, column in places.tolist()])


def test_of_nested_lists_the_entry_that_differs_is_named() -> None:
    places = torch.tensor([[0, 1], [2, 3], [1, 1]])
    guards = assert_parity(PicksPlaces(), args=(X, places)).guards
    other = places.clone()
    other[1, 0] = 3
    reading, value = first_difference(guards, {(1,): other}, {}) or (None, None)
    assert reading is not None and apart(value, reading.expected) == "entry [1][0]: 3 instead of 2"
    assert apart(True, False) == "True instead of False"
