"""Results that passes remember are told apart by everything that they depend on."""

from __future__ import annotations

import pytest
import torch

from passes.fuse.fused_nodes import CannotBuild, outputs_of
from passes.ir.graph import Ref, Value
from passes.ir.recent_results import RecentResults


def test_the_results_last_asked_for_are_remembered() -> None:
    results: RecentResults[str | None] = RecentResults(2)
    assert results.get("a", lambda: None) is None
    assert results.get("b", lambda: "b") == "b"
    assert results.get("a", lambda: pytest.fail("None is a result, too")) is None
    assert results.get("c", lambda: "c") == "c"  # "b" goes, which was asked for longest ago
    assert results.get("a", lambda: pytest.fail("asked for a moment ago")) is None
    assert results.get("b", lambda: "again") == "again"


def test_arguments_that_are_equal_but_of_other_types_are_other_calls() -> None:
    values = {"x": Value("x", (4,), "int64", requires_grad=False)}
    dtypes = [outputs_of("aten.add.Scalar", (Ref("x"), one), {}, values, name="y")[0].dtype for one in (1, 1.0, True)]
    assert dtypes == ["int64", str(torch.get_default_dtype()).removeprefix("torch."), "int64"]
    for _ in range(2):  # a refusal is not remembered
        with pytest.raises(CannotBuild, match="does not take this"):
            outputs_of("aten.mm.default", (Ref("x"), Ref("x")), {}, values, name="y")
