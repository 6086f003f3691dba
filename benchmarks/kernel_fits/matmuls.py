"""``cost_models.matmul_kernel`` fitted to measured products of bf16 matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from benchmarks.kernel_fits.tables import Array, Chip, Measured, read_table
from cost_models.matmul_kernel import MatmulKernel

ITEM = 2
#: Parameters: name, least, first guess, most. Of ``rounding`` several guesses are tried: its steps are not smooth.
PARAMETERS = (
    ("ramp", 0.3e-6, 2e-6, 6e-6),
    ("rate", 0.3, 0.95, 1.1),
    ("side", 0.0, 0.3, 2.0),
    ("depth", 0.0, 100.0, 2000.0),
    ("rounding", 0.0, 0.5, 1.0),
    ("cache", 1.0, 4.0, 40.0),
    ("stream", 0.4, 0.85, 1.0),
    ("sharpness", 1.2, 3.0, 12.0),
    ("split_ramp", 1e-8, 1e-6, 10e-6),
    ("split_bytes", 0.01, 0.5, 3.0),
)
ROUNDINGS = (0.05, 0.5, 0.95)
#: Only where the measurement repeats a product whose operands are still in the cache: how much faster they are read,
#: and the share of the cache that they fill.
WARM = (("warm_speed", 0.5, 1.5, 5.0), ("warm_fill", 0.1, 0.6, 1.2))
#: Rows that a fit looks at.
SAMPLE = 3500


def read_products(folder: Path, chip: Chip) -> Measured:
    return read_table(folder, f"{chip.table}_matmul_bf16", numbers=("m", "n", "k"))


def fit(rows: Measured, chip: Chip) -> tuple[MatmulKernel, tuple[float, float]]:
    """The kernel of least logarithmic error (soft L1) over a sample of the rows that may be fitted, and its warmth."""
    places = np.flatnonzero(rows.fitted)
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[np.random.default_rng(0).choice(places, min(SAMPLE, len(places)), replace=False)] = True
    sample = rows.of(chosen)
    names, low, first, high = zip(*PARAMETERS, *WARM)
    scale = np.array(first)

    def kernel_of(values: Array) -> tuple[MatmulKernel, tuple[float, float]]:
        by_name = {name: float(value) for name, value in zip(names, values)}
        warm = by_name.pop("warm_speed"), by_name.pop("warm_fill")
        return MatmulKernel(processors=chip.processors, **by_name), warm

    def errors(values: Array) -> Array:
        return np.log(predict(*kernel_of(values), sample, chip) / sample.seconds)

    results = []
    for rounding in ROUNDINGS:
        start = scale.copy()
        start[names.index("rounding")] = rounding
        results.append(
            least_squares(
                errors, start, bounds=(low, high), loss="soft_l1", f_scale=0.1, x_scale=scale, diff_step=1e-3,
                max_nfev=60,
            )
        )  # fmt: skip
    return kernel_of(min(results, key=lambda result: float(result.cost)).x)


def predict(kernel: MatmulKernel, warm: tuple[float, float], rows: Measured, chip: Chip) -> Array:
    """Seconds of each product, its operands in the cache as far as they fit."""
    m, n, k = (rows.columns[name] for name in "mnk")
    moved = ITEM * (m * k + k * n + m * n)
    speed, fill = warm
    share = np.clip((1.5 * fill * chip.cache_bytes - moved) / (fill * chip.cache_bytes), 0.0, 1.0)
    shapes = np.stack((np.ones_like(m), m, n, k), axis=-1)
    return kernel.seconds_of_many(
        shapes, num_bytes=moved * (1 - share + share / speed), item_size=ITEM, peak=chip.peak, bandwidth=chip.bandwidth
    )
