"""Outputs that stay sharded behave as the model's own containers; each entry is gathered when it is first read."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import CausalLMOutput

import planner
from runtime.execution.deferred_outputs import deferred
from runtime.execution.deferred_values import DeferredValue
from runtime.mesh.communication_counter import CommunicationCounter
from tests.output_containers import Named, Plain
from tests.ranks import run_on_ranks
from tests.small_models import TiedClassifier, seeded, token_batch
from tests.test_runtime import sharded

LOSS, LOGITS = torch.tensor(1.0), torch.arange(4.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    loss: Any
    logits: Any


class Fetches:
    """Fetches logits, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def entry(self, key: Any) -> torch.Tensor:
        self.count += 1
        return LOGITS

    def missing(self, key: Any) -> Exception:
        return KeyError(key)


MAPPINGS: dict[str, Callable[[Any, Any], Any]] = {
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "OrderedDict": lambda loss, logits: OrderedDict(loss=loss, logits=logits),
    "UserDict": lambda loss, logits: UserDict(loss=loss, logits=logits),
    "ModelOutput": lambda loss, logits: CausalLMOutput(loss=loss, logits=logits),
}
SEQUENCES: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda loss, logits: (loss, logits),
    "list": lambda loss, logits: [loss, logits],
    "named tuple": Named,
}
WITH_FIELDS: dict[str, Callable[[Any, Any], Any]] = {
    "named tuple": Named,
    "dataclass": Plain,
    "dataclass with slots": Slotted,
    "ModelOutput": MAPPINGS["ModelOutput"],
}
ALL = {**MAPPINGS, **SEQUENCES, **WITH_FIELDS}


def outputs_of(make: Callable[[Any, Any], Any]) -> tuple[Any, Any, Fetches]:
    """Outputs whose logits are deferred, the model's own, and what fetches."""
    own, fetches = make(LOSS, LOGITS), Fetches()
    key = 1 if isinstance(own, (tuple, list)) else "logits"
    return deferred(make(LOSS, DeferredValue("logits", lambda: LOGITS)), fetches, pending=[key]), own, fetches


@pytest.mark.parametrize("kind", ALL)
def test_they_are_of_the_models_class_and_looking_at_that_fetches_nothing(kind: str) -> None:
    outputs, own, fetches = outputs_of(ALL[kind])
    assert isinstance(outputs, type(own)) and type(outputs).__name__ == type(own).__name__
    assert dataclasses.is_dataclass(outputs) == dataclasses.is_dataclass(own)
    assert "logits" in repr(outputs)
    if not isinstance(own, (Plain, Slotted)):
        assert len(outputs) == 2
    assert fetches.count == 0


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda outputs: pickle.loads(pickle.dumps(outputs))])
def test_copies_are_whole_and_of_the_models_class_itself(kind: str, copied: Callable[[Any], Any]) -> None:
    outputs, own, fetches = outputs_of(ALL[kind])
    assert type(copied(outputs)) is type(own) and fetches.count == 1


@pytest.mark.parametrize("kind", ALL)
def test_pytrees_take_them_apart_as_the_models_own(kind: str) -> None:
    outputs, own, fetches = outputs_of(ALL[kind])
    mapped, expected = (pytree.tree_map(lambda leaf: leaf, one) for one in (outputs, own))
    if pytree.tree_leaves(own) == [own]:
        assert mapped is outputs and fetches.count == 0
        return
    assert type(mapped) is type(own) and pytree.tree_leaves(mapped) == [LOSS, LOGITS] and fetches.count == 1
    assert pytree.tree_structure(mapped) == pytree.tree_structure(expected)


@pytest.mark.parametrize("kind", MAPPINGS)
def test_mappings(kind: str) -> None:
    def fresh() -> Any:
        return outputs_of(MAPPINGS[kind])[0]

    outputs, _, fetches = outputs_of(MAPPINGS[kind])
    assert list(outputs) == list(outputs.keys()) == ["loss", "logits"] and "logits" in outputs
    assert outputs["loss"] is outputs.get("loss") is next(iter(outputs.values())) is LOSS
    assert outputs.get("more", 3) == 3 and fetches.count == 0
    assert outputs["logits"] is outputs["logits"] is LOGITS and fetches.count == 1
    assert dict(fresh())["logits"] is {**fresh()}["logits"] is list(fresh().items())[1][1] is LOGITS
    assert (lambda **entries: entries)(**fresh())["logits"] is LOGITS
    assert ({} | dict(fresh()))["logits"] is fresh()[1] is fresh()[:2][1] is LOGITS
    written = fresh()
    written["logits"] = 3
    assert written["logits"] == 3 and list(written.values()) == [LOSS, 3]
    with pytest.raises(KeyError):
        fresh()["more"]
    match fresh():
        case {"loss": _, "logits": logits}:
            assert logits is LOGITS


@pytest.mark.parametrize("kind", ["dict", "OrderedDict", "UserDict"])
def test_mappings_that_are_changed(kind: str) -> None:
    def fresh() -> Any:
        return outputs_of(MAPPINGS[kind])[0]

    outputs = fresh()
    assert outputs.pop("logits") is LOGITS and list(outputs) == ["loss"]
    outputs = fresh()
    outputs.update(more=4)
    assert list(outputs.values()) == [LOSS, LOGITS, 4] and fresh().copy()["logits"] is LOGITS
    outputs = fresh()
    del outputs["logits"]
    assert list(outputs.values()) == [LOSS]
    assert (fresh() | {"more": 4})["logits"] is ({"more": 4} | fresh())["logits"] is LOGITS


@pytest.mark.parametrize("kind", SEQUENCES)
def test_sequences(kind: str) -> None:
    def fresh() -> Any:
        return outputs_of(SEQUENCES[kind])[0]

    outputs, own, fetches = outputs_of(SEQUENCES[kind])
    assert outputs[0] is LOSS and outputs[:1] == own[:1] and type(outputs[:1]) is type(own[:1]) and fetches.count == 0
    assert outputs[-1] is outputs[1] is outputs[1:][0] is LOGITS and fetches.count == 1
    loss, logits = fresh()
    assert loss is LOSS and logits is LOGITS
    assert (lambda loss, logits: logits)(*fresh()) is list(fresh())[1] is next(reversed(fresh())) is LOGITS
    assert type(fresh() + fresh()) is type(own + own) and (fresh() + own)[3] is (own[:1] + fresh())[2] is LOGITS
    assert torch.broadcast_tensors(*fresh())[0].shape == (4,)
    assert torch.cat(
        outputs_of(
            lambda loss, logits: type(own)([logits, logits]) if kind != "named tuple" else Named(logits, logits)
        )[0]
    ).shape == (8,)


def test_lists_that_are_changed() -> None:
    outputs, _, _ = outputs_of(SEQUENCES["list"])
    outputs.insert(0, "first")
    assert list(outputs) == ["first", LOSS, LOGITS] and outputs[2] is LOGITS


@pytest.mark.parametrize("kind", WITH_FIELDS)
def test_fields(kind: str) -> None:
    outputs, _, fetches = outputs_of(WITH_FIELDS[kind])
    assert outputs.loss is LOSS and fetches.count == 0
    assert outputs.logits is LOGITS and fetches.count == 1
    assert not hasattr(outputs, "hidden")


def test_dataclasses_have_their_methods_and_named_tuples_theirs() -> None:
    outputs, own, _ = outputs_of(Plain)
    assert torch.equal(outputs.doubled(), own.doubled())
    outputs, own, _ = outputs_of(Plain)
    assert vars(outputs) == vars(own) and dataclasses.replace(outputs, loss=2) == dataclasses.replace(own, loss=2)
    outputs, own, _ = outputs_of(Named)
    assert outputs._asdict() == own._asdict() and outputs._fields == own._fields
    assert type(outputs._replace(loss=2)).__name__ == "Named" and type(type(outputs)(1, 2)) is Named


def test_a_read_gathers_what_is_read_once() -> None:
    model = seeded(TiedClassifier)
    with sharded(model, "tp=2", constraints={"output:logits": {"tp": "S(2)"}}) as (parallel, _, layout):
        outputs = parallel(**token_batch())
        with CommunicationCounter(layout.device_mesh) as counter:
            assert isinstance(outputs, dict) and len(outputs) == 2 and "logits" in outputs
            assert outputs["loss"].dim() == 0 and outputs.get("loss") is outputs["loss"]
            assert not counter.collectives
            logits = outputs["logits"]
            assert [(one.collective, one.count) for one in counter.collectives] == [("all_gather", 1)]
            assert outputs["logits"] is logits and dict(outputs)["logits"] is logits
            assert [one.count for one in counter.collectives] == [1]


class Largest(nn.Module):
    """Returns what ``torch.max`` does, whose class can have no subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.max(self.layer(x), dim=1)


def test_classes_without_subclasses_are_gathered_at_once() -> None:
    model, x = seeded(Largest), torch.randn(4, 8, dtype=torch.float64)
    with sharded(model, "dp=2", constraints={"output:*": {"dp": "S(0)"}}) as (parallel, _, layout):
        outputs = parallel(x)
        with layout.plain():
            expected = model(x)
        assert type(outputs) is type(expected)
        torch.testing.assert_close(layout.join(outputs.values, ("I",)).detach(), expected.values.detach())


def test_a_pipeline_gives_the_loss_in_the_models_container_and_says_that_the_rest_is_left_out() -> None:
    results = run_on_ranks("left_out_outputs_worker", 2, None)
    wrong = {kind: failures for kind, failures in results.items() if failures}
    assert not wrong


def test_outputs_of_one_device_are_the_models_own() -> None:
    parallel = planner.compile(seeded(TiedClassifier), "dp=1", example_inputs=token_batch())
    assert type(parallel(**token_batch())) is dict
