"""Units on real processes: every ZeRO stage computes what one process computes."""

from __future__ import annotations

import itertools
from typing import Any

from tests.ranks import run_on_ranks

ORDERS = ("one by one", "in flight", "automatic")


def cases(orders: tuple[str, ...] = ORDERS) -> list[dict[str, Any]]:
    return [
        {"zero": zero, "recompute": recompute, "order": order, "num_microbatches": 2, "steps": 3}
        for zero, recompute, order in itertools.product((0, 1, 2, 3), (False, True), orders)
    ]


def fused_and_foreach() -> list[dict[str, Any]]:
    return [
        {**case, "options": {option: True}}
        for case, option in itertools.product(cases(("one by one",)), ("fused", "foreach"))
        if not case["recompute"]
    ]


def assert_parity(num_ranks: int, wanted: list[dict[str, Any]]) -> None:
    differences = run_on_ranks("units_worker", num_ranks, {"parity": wanted})["parity"]
    assert len(differences) == len(wanted)
    assert {case: worst for case, worst in differences.items() if not worst < 1e-9} == {}


def test_every_stage_trains_as_one_process_does() -> None:
    """Weights and gradients after three AdamW steps with parameter groups and a schedule."""
    assert_parity(2, [*cases(), *fused_and_foreach()])


def test_ranks_with_uneven_and_empty_pieces_train_alike() -> None:
    assert_parity(4, cases(("in flight",)))
