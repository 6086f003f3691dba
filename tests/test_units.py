"""Units on real processes: every ZeRO stage computes what one process computes."""

from __future__ import annotations

import itertools
import math
from typing import Any

from cost_models.memory import zero_state_bytes
from runtime.program_tools.recompute import POLICIES
from runtime.zero.state_pieces import piece_shape
from tests.ranks import run_on_ranks

ORDERS = ("one by one", "in flight", "automatic")


def cases(policies: tuple[str, ...], orders: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"zero": zero, "recompute": recompute, "order": order, "num_microbatches": 2, "steps": 3}
        for zero, recompute, order in itertools.product((0, 1, 2, 3), policies, orders)
    ]


def fused_and_foreach() -> list[dict[str, Any]]:
    return [
        {**case, "options": {option: True}}
        for case, option in itertools.product(cases(("none",), ("one by one",)), ("fused", "foreach"))
    ]


def assert_parity(num_ranks: int, reference_figures: list[dict[str, Any]]) -> None:
    differences = run_on_ranks("units_worker", num_ranks, {"parity": reference_figures})["parity"]
    assert len(differences) == len(reference_figures)
    assert {case: worst for case, worst in differences.items() if not worst < 1e-9} == {}


def test_every_stage_trains_as_one_process_does() -> None:
    """Weights and gradients after three AdamW steps with parameter groups and a schedule."""
    assert_parity(2, [*cases(POLICIES, ("in flight",)), *cases(("none", "full"), ORDERS[::2]), *fused_and_foreach()])


def test_four_ranks() -> None:
    """Uneven and empty pieces; what is issued; the norm of all; what is held."""
    payload = {
        "parity": cases(("none", "full"), ("in flight",)),
        "parity in pairs": [case for case in cases(("none",), ORDERS) if case["zero"]],
        "issued": [{"zero": zero, "num_microbatches": 2} for zero in range(4)],
        "issued in pairs": [{"zero": zero, "num_microbatches": 2} for zero in (1, 2, 3)],
        "memory": MEMORY,
        "clipping": [1.0, 2.0, 3.0, "inf"],
        "tied": None,
    }
    results = run_on_ranks("units_worker", 4, payload)
    for parity in (results["parity"], results["parity in pairs"]):
        assert {case: worst for case, worst in parity.items() if not worst < 1e-9} == {}
    assert max(results["clipping"]) < 1e-9
    assert results["tied"] == [True, True]
    assert_issued(results["issued"], COLLECTIVES)
    assert_issued([[], *results["issued in pairs"]], COLLECTIVES_IN_PAIRS)
    for case, held in zip(MEMORY, results["memory"]):
        assert_memory(case, held)


#: Two layers, two micro-batches: (gathers, reduce-scatters, all-reduces) of a step, by ZeRO stage.
COLLECTIVES = {0: (0, 0, 2), 1: (2, 2, 0), 2: (2, 4, 0), 3: (8, 4, 0)}
#: The same where pairs hold all pieces: what a pair reduced is summed over the pairs once a step.
COLLECTIVES_IN_PAIRS = {1: (2, 2, 2), 2: (2, 4, 2), 3: (8, 4, 2)}


def assert_issued(logs: list[list[list[str]]], collectives: dict[int, tuple[int, ...]]) -> None:
    kinds = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce_")
    for zero, expected in collectives.items():
        _, second = logs[zero]
        assert tuple(second.count(kind) for kind in kinds) == expected, zero
    for stage in (1, 2, 3):
        # Both layers' gathers are under way when the first computes.
        assert logs[stage][0][:3] == ["all_gather_into_tensor", "all_gather_into_tensor", "mm"]


EVEN, RAGGED = [(32, 8), (32,), (7, 64)], [(5, 8), (21,)]
MEMORY = [
    {"zero": zero, "compute": compute, "shapes": shapes, "recompute": "none"}
    for zero, compute, shapes in itertools.product(range(4), ("float32", "bfloat16"), (EVEN, RAGGED))
] + [{"zero": 3, "compute": "bfloat16", "shapes": EVEN, "recompute": policy} for policy in POLICIES]


def assert_memory(case: dict[str, Any], held: dict[str, float]) -> None:
    """Rank 0's bytes are those that the planner counts: exactly where dims divide, else for pieces rounded up."""
    zero, compute = case["zero"], case["compute"]
    expected = rounded = 0
    for shape in case["shapes"]:
        options = {"stage": zero, "group_size": 4, "gradient_dtype": "float32"}
        state = zero_state_bytes(math.prod(shape), compute, **options)
        expected += state.total
        padded = math.prod(piece_shape(shape, 4, 0)) * 4
        rounded += zero_state_bytes(padded, compute, **options).total
    if case["shapes"] == EVEN:
        # A weight that is cut in another dim than the first is kept beside its piece, unless the piece is wider anyway.
        apart = 4 * 7 * 16 if zero in (1, 2) and compute == "float32" else 0
        assert held["between"] == expected + apart, case
    else:
        assert expected <= held["between"] <= rounded + 4 * 8 * 12, case
    if zero == 3:
        # Neither the caller nor autograd keeps gathered weights between the passes.
        assert held["after forward"] == held["at rest"], case
