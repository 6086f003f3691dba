"""``cost_models.attention_kernel`` fitted to measured causal attention in bf16, forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.kernel_fits.tables import Array, Chip, Measured, read_table
from cost_models.attention_kernel import BLOCK, AttentionKernel

ITEM = 2
#: Parameters: name, least, first guess, most.
PARAMETERS = (
    ("ramp", 0.5e-6, 5e-6, 30e-6),
    ("rate", 0.05, 0.6, 1.1),
    ("tail", 0.0, 0.3, 3.0),
    ("stream", 0.05, 0.7, 1.0),
    ("sharpness", 1.0, 2.0, 12.0),
)


def read_calls(folder: Path, chip: Chip) -> Iterator[tuple[str, int, Measured]]:
    """(kernel, head dim, calls) of at least a block of tokens; shorter ones are generation's, by other code."""
    numbers = ("batch", "length", "num_heads", "num_kv_heads", "head_dim")
    rows = read_table(folder, f"{chip.table}_attention_causal_forward_bf16", numbers=numbers, labels=("kernel",))
    names, widths = np.array(rows.labels["kernel"]), rows.columns["head_dim"]
    enough = (rows.columns["length"] >= BLOCK) & (rows.columns["batch"] * rows.columns["num_heads"] >= 8)
    for name, width in sorted({(str(name), int(width)) for name, width in zip(names[enough], widths[enough])}):
        yield name, width, rows.of(enough & (names == name) & (widths == width))


def fit(rows: Measured, chip: Chip) -> AttentionKernel:
    """The kernel of least logarithmic error (soft L1) over the rows that may be fitted."""
    sample = rows.of(rows.fitted)
    names, low, first, high = zip(*PARAMETERS)

    def kernel_of(values: Array) -> AttentionKernel:
        return AttentionKernel(processors=chip.processors, **dict(zip(names, map(float, values))))

    def errors(values: Array) -> Array:
        return np.log(predict(kernel_of(values), sample, chip) / sample.seconds)

    result = least_squares(errors, first, bounds=(low, high), loss="soft_l1", f_scale=0.05, x_scale=np.array(first))
    return kernel_of(result.x)


def predict(kernel: AttentionKernel, rows: Measured, chip: Chip) -> Array:
    """Seconds of each call."""
    batch, length, heads, groups, width = (
        rows.columns[name] for name in ("batch", "length", "num_heads", "num_kv_heads", "head_dim")
    )
    moved = ITEM * width * batch * length * (2 * heads + 2 * groups)
    shapes = np.stack((batch * heads, length, length, width), axis=-1)
    return kernel.seconds_of_many(shapes, is_causal=True, num_bytes=moved, peak=chip.peak, bandwidth=chip.bandwidth)
