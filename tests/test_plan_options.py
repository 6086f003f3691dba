"""What ``planner.plan`` and ``planner.compile`` are asked for is checked before anything is captured, in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import planner

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"global_batch": NAN}, "global_batch must be at least 1, a whole number, got nan"),
        ({"global_batch": -4}, "global_batch must be at least 1, a whole number, got -4"),
        ({"batch_size": 2.0}, "batch_size must be at least 1, a whole number"),
        ({"seq_len": 0}, "seq_len must be at least 1"),
        ({"num_devices": 0}, "num_devices must be at least 1"),
        ({"num_alternatives": 1.5}, "num_alternatives must be at least 1"),
        ({"headroom": NAN}, "headroom must be a share of memory from 0 to below 1, got nan"),
        ({"headroom": "6%"}, "headroom must be a share of memory"),
        ({"memory_limit": INF}, "memory_limit must be a positive number of bytes"),
        ({"memory_limit": -1}, "memory_limit must be a positive number of bytes"),
        ({"time_limit": "long"}, "time_limit must be at least 0 seconds, got 'long'"),
        ({"objective": "devices", "target_seconds": NAN}, "target_seconds must be a positive number of seconds"),
        ({"fix": "tp=2"}, "fix must be {name: value or values}"),
        ({"fix": {"tq": 2}}, "fix: unknown name 'tq'"),
        ({"forbid": {"recompute": "nothing"}}, "'recompute' must be one of"),
        ({"constraints": "lm_head"}, "constraints must be {pattern: {axis: demand}}"),
        ({"mesh": {1: 1}}, "a mesh axis is named by a letter"),
        ({"mesh": 5}, "mesh must be axis sizes such as 'dp=2,tp=4'"),
        ({"gradient_dtype": "int8"}, "gradients are summed in float64, float32, bfloat16, float16"),
        ({"gradient_dtype": "float8_e4m3fn"}, "unknown gradient_dtype 'float8_e4m3fn'"),
        ({"fix": {"zero": 0, "zero_ranks": 2}}, "fix says zero=0, which divides nothing, and zero_ranks"),
        ({"cluster": 5}, "cluster must be a Cluster, 'dgx-h100:2' or a .toml file, got 5"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_plan_says_what_is_wrong_with_an_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        planner.plan("tiny-llama", **{"cluster": "cpu-local:1", **options})
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("demand", ["Q", "S(x)".upper(), ["R", "T"], 5, "S(-1)"])
@pytest.mark.parametrize("mesh", [{"mesh": "dp=2"}, {"mesh": "dp=1"}, {"cluster": "cpu-local:2"}], ids=str)
def test_a_constraint_that_is_no_type_is_refused(demand: object, mesh: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"constraint 'weight': unknown type .*expected 'R', 'I', 'P' or 'S"):
        planner.plan(
            nn.Linear(4, 4),
            example_inputs=(torch.ones(4, 4),),
            loss_fn=lambda outputs, batch: outputs.mean(),
            constraints={"weight": {"dp": demand}},
            **mesh,
        )


@pytest.mark.parametrize("mesh", ["dp=1", "pp=1,dp=1"])
def test_compile_knows_its_options(mesh: str) -> None:
    with pytest.raises(ValueError, match="compile has no option 'tims_limit', did you mean 'time_limit'"):
        planner.compile(nn.Linear(4, 4), mesh, tims_limit=3)
    with pytest.raises(ValueError, match="time_limit must be at least 0 seconds, got nan"):
        planner.compile(nn.Linear(4, 4), mesh, time_limit=NAN)
