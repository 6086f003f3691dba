"""Proves the whole product on a machine with GPUs, without preparation: in 36 minutes on one, 39 on several.

    python -m benchmarks.gpu [--only numerics] [--output FOLDER] [--list]

Numerics of every operator against float64; training of small models against torch; bandwidth against copies and
torch.compile; step time and peak memory of Llama, GPT-2, BERT, T5, ViT and Mixtral against the prediction, Hugging
Face's models and FSDP2, eager and compiled; plans that fill the GPU, their peak against the plan's;
every pipeline schedule, ZeRO stage and a mixture's experts on NCCL against one GPU (with two GPUs or more); tokens that
are generated; a kill and a resumed run; host time. Writes ``gpu.md`` and ``gpu.json`` after each part. Parts and their
items run in processes of their own with a limit of time: what fails, crashes or hangs is reported, and the others go
on. The exit status is 0 if all held.

``--rehearse`` runs some items of each part on a processor at sizes that mean nothing, to see that the command works.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.parts import Setting, plan, rehearsal
from benchmarks.gpu.report import Report
from benchmarks.gpu.running import in_turn

RESULTS = Path(__file__).parent.parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="parts to run, by name or its beginning (default: all)")
    parser.add_argument("--output", type=Path, help="folder for gpu.md and gpu.json (default: benchmarks/results)")
    parser.add_argument("--list", action="store_true", help="show the parts and their times, and run nothing")
    parser.add_argument("--rehearse", action="store_true", help="on a processor, at tiny sizes")
    options = parser.parse_args(arguments)
    setting = Setting(0 if options.rehearse else _count_gpus(), tiny=options.rehearse)
    parts = rehearsal(plan(setting)) if options.rehearse else plan(setting)
    parts = [part for part in parts if not options.only or any(part.name.startswith(name) for name in options.only)]
    if options.list:
        for part in parts:
            print(f"{part.seconds:5.0f} s  {part.name}: {', '.join(item.name for item in part.items)}")
        seconds = sum(part.seconds for part in parts if part.needs <= max(1, setting.num_gpus))
        print(f"{seconds / 60:5.1f} min at most")
        return 0
    if not setting.num_gpus and not options.rehearse:
        print("no GPU is visible: run this on a machine with one, or --rehearse it", file=sys.stderr)
        return 2
    if options.rehearse and options.output is None:
        print("--rehearse measures nothing: name an --output for its files", file=sys.stderr)
        return 2
    # Whoever stops this stops what it has started, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = Report(setting)
    with tempfile.TemporaryDirectory() as folder:
        for part, outcomes, seconds in in_turn(parts, setting, Path(folder)):
            report.add(part, outcomes, seconds)
            report.write(options.output or RESULTS)  # first: whoever reads the terminal may have gone
            print(report.section(part.name), flush=True)
    return 0 if report.holds else 1


def _count_gpus() -> int:
    """Without touching one: the processes that measure are forked from a server that must not have."""
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # without waiting for processes that hang in a driver and cannot be killed
