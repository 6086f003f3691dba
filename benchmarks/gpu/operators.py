"""Items about single operators: the machine, numerics against float64, bandwidth, host time."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.parts import Setting
from benchmarks.kernels_cases import LLAMA_8B, OPERATORS, TINY, Case, Size
from benchmarks.kernels_contestants import COMPILED, EAGER, OURS, contestants
from benchmarks.kernels_measure import Run, _truth, measure_case, ratio_to_best
from benchmarks.kernels_timing import Clock, largest_error
from runtime.kernels import dispatch

Row = dict[str, Any]
#: Sizes of which the numerics are checked: a wide one, one that no tile divides, and one larger than any tile.
SIZES = (
    Size("Llama-8B, few rows", 4096, 14336, 32000, heads=32, groups=8, head=128, batch=1, length=48),
    Size("odd", 1001, 333, 131077, heads=3, groups=1, head=66, batch=3, length=37),
    Size("wide", 36864, 40960, 8191, heads=4, groups=4, head=256, batch=1, length=16),
)
DTYPES = ("bf16", "fp32")
#: An error may be so many times that of the eager operators in the same dtype, or this if that is less.
SLACK, LEAST = 2.0, {"bf16": 1e-2, "fp32": 2e-6}
_BY_NAME = {operator.name: operator for operator in OPERATORS}


def machine(setting: Setting) -> Iterator[Row]:
    """What this runs on, and how fast it copies."""
    from benchmarks.kernels import machine as describe

    device = torch.device(setting.device)
    yield {**describe(device), "GPUs": setting.num_gpus, "copy, GB/s": round(Clock(device).copy_bandwidth() / 1e9, 1)}


def numerics(setting: Setting, *, operator: str) -> Iterator[Row]:
    """Outputs and gradients of an operator against float64, beside those of the eager operators."""
    device = torch.device(setting.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    _measure_own_kernels(setting)
    functions = {one.name: one.function for one in contestants(operator, backend="eager")}
    for size in (TINY,) if setting.tiny else SIZES:
        for dtype in DTYPES:
            case = Case(_BY_NAME[operator], size, dtype)
            truth = _truth(case, device)
            errors = {}
            for name in (OURS, EAGER):
                function = functions[name]
                assert function is not None
                outputs, grads = Run(function, case, device).both()
                errors[name] = largest_error(outputs, truth[0]), largest_error(grads, truth[1])
            ok = all(
                ours <= max(SLACK * eager, LEAST[dtype])
                for ours, eager in zip(errors[OURS], errors[EAGER], strict=True)
            )
            yield {
                "operator": operator, "size": size.name, "dtype": dtype,
                **{
                    f"{name} {what}": float(f"{error:.2e}")
                    for name in (OURS, EAGER) for what, error in zip(("forward", "backward"), errors[name])
                },
                "ok": ok,
            }  # fmt: skip


@functools.cache
def _clock(device: str) -> tuple[Clock, float]:
    clock = Clock(torch.device(device))
    return clock, clock.copy_bandwidth()


def _measure_own_kernels(setting: Setting) -> None:
    """Run kernels of ours in this process, where torch's would be taken for small tensors, too."""
    if setting.device == "cuda":
        os.environ[dispatch.VARIABLE] = "triton"


def bandwidth(setting: Setting, *, operator: str) -> Iterator[Row]:
    """Times of an operator, its share of copy bandwidth, and how it compares with torch.compile."""
    clock, copied = _clock(setting.device)
    case = Case(_BY_NAME[operator], TINY if setting.tiny else LLAMA_8B, "bf16")
    rows = measure_case(case, clock, backend="aot_eager" if setting.tiny else "inductor")
    for row in rows:
        if row.contestant not in (EAGER, COMPILED, OURS):
            continue
        if row.seconds is None:
            yield {"operator": operator, "pass": row.what, "contestant": row.contestant, "note": row.note}
            continue
        ratio = ratio_to_best(rows, row, others=(COMPILED,)) if row.contestant == OURS else None
        yield {
            "operator": operator, "pass": row.what, "contestant": row.contestant, "ms": round(row.seconds * 1e3, 4),
            "of copy": f"{row.num_bytes / row.seconds / copied:.0%}",
            "against compile": None if ratio is None else f"{ratio:.2f}×",
        }  # fmt: skip


def host_time(setting: Setting, *, kind: str) -> Iterator[Row]:
    """Microseconds of the host in a call, against what it replaces."""
    from benchmarks.host_time import run

    for row in run((kind,), rounds=1 if setting.tiny else 5, calls=3 if setting.tiny else 100):
        yield {
            "what": row.name, "forward, µs": round(row.forward, 1),
            "backward, µs": None if row.backward is None else round(row.backward, 1),
            "instead of": row.other, "ratio": round(row.ratio, 2),
        }  # fmt: skip
