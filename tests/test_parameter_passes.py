"""A step makes the passes over gradients and weights that it is priced for, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks import run_on_ranks

CASES = [
    {"dtype": dtype, "zero": zero, "num_microbatches": num_microbatches}
    for dtype in ("bfloat16", "float32")
    for zero in (0, 1, 2, 3)
    for num_microbatches in (1, 4)
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_bytes_of_a_step_on_two_ranks(case: dict[str, Any]) -> None:
    figures = run_on_ranks("parameter_passes_worker", 2, CASES)[str(case)]
    assert figures["made"] == pytest.approx(figures["priced"], rel=1e-9)
