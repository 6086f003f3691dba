"""Whole steps on real processes compute what one device does: loss, every gradient, weights after three AdamW steps.

``benchmarks/parity.py`` runs many more; ``tests/step_parity_worker.py`` says what is compared.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from benchmarks.parity import TOLERANCES, Case, case
from tests.patience import PATIENCE
from tests.ranks import run_on_ranks

PIPELINE = {"pp": 2, "num_microbatches": 4}
#: Hybrid sharding: pairs of data ranks hold all pieces together.
PAIRS = {"dp": 4, "num_microbatches": 2, "zero_ranks": 2}


def two_layers(model: str, name: str, **fix: Any) -> Case:
    """One for each stage; where a rank has several chunks, the ends of the model are chunks of their own."""
    return {**case(model, name, **fix), "layers": 2}


def on_device_thread(case: Case) -> Case:
    """Backward passes run on a thread of their own, as on a GPU: see ``tests.device_thread``."""
    return {**case, "device_thread": True}


CASES: tuple[Case, ...] = (
    two_layers("tiny-llama", "zero bubbles and split tensors", **PIPELINE, tp=2, schedule="zbv", chunks_per_rank=2),
    on_device_thread(
        two_layers(
            "tiny-llama",
            "several chunks, all recomputed",
            **PIPELINE,
            dp=2,
            schedule="interleaved_1f1b",
            chunks_per_rank=2,
            zero=3,
            recompute="full",
        )
    ),
    {
        **two_layers("tiny-llama", "half in flight", **PIPELINE, dp=2, schedule="v_half", chunks_per_rank=2, zero=3),
        "short": 6,
    },
    {
        **two_layers("tiny-gpt2", "twice in flight, tied weights", **PIPELINE, dp=2, schedule="zb_h2", zero=1),
        "short": 6,
    },
    case("tiny-t5", "encoder and decoder on two stages", **PIPELINE, tp=2, schedule="1f1b"),
    two_layers("tiny-vit", "an image model on two stages", **PIPELINE, tp=2, schedule="zb_h1"),
    on_device_thread(
        two_layers("tiny-llama", "split sequences", cp=2, dp=2, num_microbatches=2, zero=2, recompute="selective")
    ),
    two_layers(
        "tiny-gpt2", "tied weights, loss in chunks", **PIPELINE, tp=2, schedule="zb_h1", recompute="chunked_loss"
    ),
)
IN_PAIRS: tuple[Case, ...] = (
    on_device_thread(two_layers("tiny-llama", "gathered from neighbours", **PAIRS, zero=3, recompute="full")),
    two_layers("tiny-gpt2", "kept by neighbours, tied weights", **PAIRS, zero=1),
)
#: In the dtype that most train in, of weights that are sharded and gathered.
SINGLE: Case = {
    **on_device_thread(
        two_layers("tiny-llama", "float32", dp=2, tp=2, num_microbatches=2, zero=3, recompute="chunked_loss")
    ),
    "dtype": "float32",
}
NARROW: Case = {
    **two_layers("tiny-llama", "bfloat16 with masters", **PIPELINE, dp=2, schedule="1f1b", zero=2),
    "dtype": "float32",
    "precision": "bfloat16",
}
NARROW_CHUNKS: Case = {
    **two_layers("tiny-llama", "bfloat16 in chunks", dp=2, tp=2, num_microbatches=2, recompute="chunked_loss"),
    "dtype": "float32",
    "precision": "bfloat16",
}
#: Linear layers that gather and scatter the rows that the tensor axis cuts, a piece at a time.
_EXCHANGING = {
    "overlap_tensor": True,
    "constraints": {
        **{f"*{name}_proj": {"tp": "cut n from b0"} for name in ("q", "k", "v", "gate", "up")},
        **{f"*{name}_proj": {"tp": "cut k to b0"} for name in ("o", "down")},
    },
}
EXCHANGED: tuple[Case, ...] = tuple(
    {**two_layers("tiny-llama", name, **fix), "options": _EXCHANGING}
    for name, fix in {
        "rows exchanged, all recomputed": {**PIPELINE, "tp": 2, "schedule": "1f1b", "recompute": "full"},
        "rows exchanged, weights gathered": {"dp": 2, "tp": 2, "num_microbatches": 2, "zero": 3},
    }.items()
)
EVALUATED = ("zero bubbles and split tensors", "half in flight", "split sequences")


@functools.cache
def results() -> dict[str, dict[str, Any]]:
    # Outputs without a loss are of other programs: one of a pipeline and one of a mesh stand for all.
    cases = [
        {**each, "evaluated": each["name"] in EVALUATED}
        for each in (*CASES, *IN_PAIRS, *EXCHANGED, SINGLE, NARROW, NARROW_CHUNKS)
    ]
    return run_on_ranks("step_parity_worker", 4, cases, timeout=PATIENCE)


@pytest.mark.parametrize("entry", [*CASES, *IN_PAIRS, *EXCHANGED, SINGLE], ids=lambda entry: entry["name"])
def test_a_step_on_four_processes_is_that_of_one_device(entry: Case) -> None:
    result = results()[entry["name"]]
    axes = {axis: size for axis, size in entry["fix"].items() if axis in result["axes"]}
    assert result["axes"] == axes and result["zero"] == [entry["fix"]["zero"]]
    assert result["zero_ranks"] == entry["fix"].get("zero_ranks", 0)
    assert result["error"] <= TOLERANCES[entry.get("dtype", "float64")], result["worst"]


@pytest.mark.parametrize("entry", [*CASES, *IN_PAIRS, *EXCHANGED, SINGLE], ids=lambda entry: entry["name"])
def test_what_the_ranks_of_a_step_send_keeps_nccls_rules(entry: Case) -> None:
    """Collectives in one order in every group, transfers that pair up, and no circle of waits."""
    assert results()[entry["name"]]["broken_rules"] == []


@pytest.mark.parametrize(
    "entry", [*CASES, *IN_PAIRS, *EXCHANGED, SINGLE, NARROW, NARROW_CHUNKS], ids=lambda entry: entry["name"]
)
def test_the_plan_counts_every_collective_of_the_step(entry: Case) -> None:
    """Activations, what recomputation sends again, ZeRO's gathers and reductions, sends, totals, the loss."""
    assert results()[entry["name"]]["unlike_plan"] == []


@pytest.mark.parametrize("entry", [entry for entry in (*CASES, SINGLE) if entry["fix"]["recompute"] == "chunked_loss"])
def test_the_loss_is_really_in_chunks(entry: Case) -> None:
    assert results()[entry["name"]]["recompute"][-1] == "chunked_loss"


@pytest.mark.parametrize("entry", [NARROW, NARROW_CHUNKS], ids=lambda entry: entry["name"])
def test_computing_in_bfloat16_keeps_wide_masters(entry: Case) -> None:
    """Three steps stay near those in float32."""
    result = results()[entry["name"]]
    assert result["dtypes"] == ["torch.float32"]
    assert 0.0 < result["loss_error"] < 2e-2
