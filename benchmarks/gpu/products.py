"""Item about matrix products: what rows cost whose length is odd, or such that no wide load divides it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.parts import Setting
from benchmarks.kernels_timing import Clock

Row = dict[str, Any]
#: Of a layer of logits: tokens, and entries of a hidden state.
TOKENS, HIDDEN = 8192, 768
#: Classes: GPT-2's, whose rows begin on 2 bytes, others on 4, 8 and 16, and on whole lines of the cache.
CLASSES = (50257, 50258, 50260, 50264, 50304)


def rows(setting: Setting) -> Iterator[Row]:
    """Times of the three products of a layer of logits in bfloat16, by its classes, and the share of the last's rate.

    ``cost_models.efficiency.Efficiency.odd_rows`` is that share for odd classes.
    """
    device = torch.device(setting.device)
    clock = Clock(device)
    tokens, hidden, sizes = (8, 16, (31, 32)) if setting.tiny else (TOKENS, HIDDEN, CLASSES)
    seconds = {}
    for classes in reversed(sizes):
        x, weight, grad = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((tokens, hidden), (classes, hidden), (tokens, classes))
        )
        calls = {
            "forward": lambda x=x, weight=weight: F.linear(x, weight),
            "by input": lambda grad=grad, weight=weight: grad @ weight,
            "by weight": lambda grad=grad, x=x: grad.t() @ x,
        }
        times = {name: clock.time(lambda _, call=call: call()).median for name, call in calls.items()}
        seconds[classes] = sum(times.values())
        yield {
            "tokens": tokens, "classes": classes, "hidden": hidden,
            **{f"{name}, ms": round(1e3 * each, 3) for name, each in times.items()},
            "TFLOP/s": round(6e-12 * tokens * classes * hidden / seconds[classes], 1),
            "of the even rate": round(next(iter(seconds.values())) / seconds[classes], 3),
        }  # fmt: skip
