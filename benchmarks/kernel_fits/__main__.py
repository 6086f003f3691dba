"""Fit the kernel models of presets to measured kernels, and say how far the rows that were not fitted are off.

    python -m benchmarks.kernel_fits TABLES [--markdown FILE]

TABLES is a folder of ``DEVICE_matmul_bf16.csv.gz`` (columns m, n, k, microseconds),
``DEVICE_attention_causal_forward_bf16.csv.gz`` (batch, length, num_heads, num_kv_heads, head_dim, kernel,
microseconds) and ``DEVICE_nccl.csv.gz`` (collective, num_gpus, message_bytes, microseconds) for the devices of
``tables.CHIPS``. Numbers that a fit prints go into ``cost_models/presets``; the table also holds the presets' own
numbers, rounded, against the same rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.kernel_fits import attention, collectives, matmuls
from benchmarks.kernel_fits.tables import CHIPS, Chip, Errors
from cost_models import Cluster
from cost_models.attention_kernel import AttentionKernel
from cost_models.efficiency_format import Kernel, parse_efficiency
from cost_models.matmul_kernel import MatmulKernel
from cost_models.presets import efficiency_names, load_efficiency

HEADER = "| device | kernel | calls | predicted / measured, median (10th–90th percentile) | preset's numbers |\n"
TITLE = """# Kernel models against measured kernels

Predicted over measured time of the half of the rows that were not fitted (a hash of the shape decides). The rows are
NVIDIA's aiconfigurator's (github.com/ai-dynamo/aiconfigurator, Apache-2.0, commit 095f58a, 2026-08-21): bf16, alone,
replayed from CUDA graphs. Written by `python -m benchmarks.kernel_fits TABLES --markdown FILE`.

"""

#: The measured kernel that a preset's attention is.
SHIPPED = {"a100_sxm": ("vllm_flash_attn", 128)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, help="folder of measured tables")
    parser.add_argument("--markdown", type=Path, help="write the table there")
    options = parser.parse_args()
    if not options.tables.is_dir():
        parser.error(f"{options.tables} is no folder: expected that of the measured tables")
    lines = [HEADER + "|---|---|---|---|---|"]
    for chip in CHIPS:
        rooms = (_products, _attention, _collectives)
        for line in (line for room in rooms for line in room(options.tables, chip)):
            lines.append(line)
            print(line, flush=True)
    if options.markdown is not None:
        options.markdown.write_text(TITLE + "\n".join(lines) + "\n", encoding="utf-8")


def _products(folder: Path, chip: Chip) -> Iterator[str]:
    rows = matmuls.read_products(folder, chip)
    kernel, warm = matmuls.fit(rows, chip)
    print(f"{chip.table}: {kernel}")
    rest = rows.of(~rows.fitted)
    fitted = Errors.of(matmuls.predict(kernel, warm, rest, chip), rest.seconds)
    preset = _of_preset(chip, "matmul")
    shipped: Errors | str = ""
    if isinstance(preset, MatmulKernel):
        shipped = Errors.of(matmuls.predict(preset, warm, rest, chip), rest.seconds)
    yield f"| {chip.table} | matmul | {fitted.rows:,} | {fitted} | {shipped} |"


def _attention(folder: Path, chip: Chip) -> Iterator[str]:
    preset = _of_preset(chip, "attention")
    for name, width, rows in attention.read_calls(folder, chip):
        kernel = attention.fit(rows, chip)
        print(f"{chip.table} {name}, heads of {width}: {kernel}")
        rest = rows.of(~rows.fitted)
        if not len(rest):
            continue
        fitted = Errors.of(attention.predict(kernel, rest, chip), rest.seconds)
        shipped: Errors | str = ""
        if isinstance(preset, AttentionKernel) and (name, width) == SHIPPED[chip.table]:
            shipped = Errors.of(attention.predict(preset, rest, chip), rest.seconds)
        yield f"| {chip.table} | {name}, heads of {width} | {fitted.rows:,} | {fitted} | {shipped} |"


def _collectives(folder: Path, chip: Chip) -> Iterator[str]:
    links = collectives.LINKS.get(chip.table)
    if links is None:
        return
    shipped = Cluster.parse(links.preset).levels[0].protocols
    for name, rows in collectives.read_collectives(folder, chip).items():
        protocols = collectives.fit(name, rows, links)
        print(f"{chip.table} {name}: {protocols}")
        rest = rows.of(~rows.fitted)
        fitted, preset = (
            Errors.of(collectives.predict(name, each, rest, links), rest.seconds) for each in (protocols, shipped)
        )
        yield f"| {chip.table} | NCCL {name}, 2, 4, 8 ranks | {fitted.rows:,} | {fitted} | {preset} |"


def _of_preset(chip: Chip, kind: str) -> Kernel | None:
    """The preset's kernel model, at the rate that it has alone."""
    if chip.efficiency not in efficiency_names():
        return None
    kernel = parse_efficiency(load_efficiency(chip.efficiency), chip.efficiency)[kind].kernel
    return None if kernel is None else replace(kernel, sustained=1.0)


if __name__ == "__main__":
    main()
