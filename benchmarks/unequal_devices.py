"""Pipelines over unequal devices: how much faster than counting all as the slowest, and whether the order is measured.

    python -m benchmarks.unequal_devices --markdown benchmarks/results/unequal_devices.md     # simulated: minutes
    python -m benchmarks.unequal_devices --measure         # two gloo ranks under CPU quotas 1 : 2 (Linux, as root)

Simulated: library models on A100 and V100 nodes, planned with stages on either kind and with all devices counted as
the slowest, in float16 (a V100 computes bfloat16 in float32). Measured: one model in two cuts, the one that is best
where devices are alike and the one that fits the quotas; what each is predicted to take on such devices, and takes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import planner
from benchmarks.shaped_hosts import processor_shares
from cost_models import Cluster
from cost_models.cluster_format import IN_ORDER, SLOWEST
from passes.plan import Plan
from planner.auditing.repriced_step import reprice
from planner.auditing.subject import subject_of
from tests.small_models import Mlp, mlp_batch, seeded, squared_error

#: (model, cluster, samples of a step, tokens of a sample).
CASES = (
    ("gpt3-2.7b", "dgx-a100-80g:1+dgx-v100-32g:1", 128, 2048),
    ("gpt3-6.7b", "dgx-a100-80g:2+dgx-v100-32g:2", 256, 2048),
    ("llama-2-13b", "dgx-a100-80g:2+dgx-v100-32g:2", 256, 2048),
    ("bert-large", "dgx-a100-80g:1+dgx-v100-32g:1", 512, 512),
)
#: What faster than counting all as the slowest is aimed at.
AIM = 1.3
#: Shares of a processor that the two ranks have, and of how many seconds.
QUOTAS = (0.3, 0.6)
#: The measured model, and its steps before and while it is timed.
LAYERS, SIZE, BATCH, MICRO_BATCHES, WARM, TIMED = 11, 768, 1024, 8, 2, 5


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One model on one cluster: seconds a step with unequal stages, and with all devices as the slowest."""

    model: str
    cluster: str
    plan: Plan
    slowest: Plan

    @property
    def ratio(self) -> float:
        return self.slowest.step.costs.simulated / self.plan.step.costs.simulated

    def cells(self) -> tuple[str, ...]:
        units = " + ".join(str(sum(group.count for group in chunk.groups)) for chunk in self.plan.step.chunks)
        devices = " → ".join(dict.fromkeys(device.name.split()[1] for device in self.plan.step.stage_devices))
        return (
            self.model, self.cluster, f"{self.slowest.step.costs.simulated:.4g}", _axes(self.slowest),
            f"{self.plan.step.costs.simulated:.4g}", _axes(self.plan), f"{devices}: {units}",
            f"{self.plan.certificate.gap:.2%}", f"{self.ratio:.2f}", "yes" if self.ratio >= AIM else "no",
        )  # fmt: skip


HEADER = ("model", "cluster", "all as the slowest, s", "its mesh", "unequal stages, s", "its mesh", "units by stage",
          "gap", "ratio", f"at least {AIM:g}")  # fmt: skip


def _axes(plan: Plan) -> str:
    return ",".join(f"{axis}={size}" for axis, size in plan.step.axes.items() if size > 1)


def compared(model: str, cluster: str, global_batch: int, seq_len: int) -> Comparison:
    """Both plans of one case."""
    unequal = Cluster.parse(cluster)
    plans = [
        planner.plan(model, each, global_batch=global_batch, seq_len=seq_len, dtype="float16")
        for each in (unequal, dataclasses.replace(unequal, unequal=SLOWEST))
    ]
    return Comparison(model, cluster, *plans)


def table(rows: list[tuple[str, ...]]) -> str:
    lines = [HEADER, ("---",) * len(HEADER), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# -- two ranks under quotas -----------------------------------------------------------------------------------------


def model_and_batch() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    return seeded(lambda: Mlp(layers=LAYERS, size=SIZE)), mlp_batch(batch=BATCH, size=SIZE)


def cluster_of_quotas(unequal: str) -> Cluster:
    """Two processors of which the ranks have these shares, as fast as this one at a matrix product."""
    a = torch.randn(1024, 1024)
    seconds = min(_timed(lambda: a @ a) for _ in range(10))

    def device(share: float) -> dict[str, Any]:
        return {
            "name": f"{share:.0%} of a processor", "count": 1, "flops": {"float32": share * 2 * 1024**3 / seconds},
            "memory_bytes": 8e9, "memory_bandwidth": share * 1e10, "launch_overhead": 1e-5 / share,
        }  # fmt: skip

    level = {"name": "loopback", "size": 2, "latency": 1e-4, "bandwidth": 1e9}
    devices = [device(share) for share in QUOTAS]
    return Cluster.from_dict({"name": "quotas", "unequal": unequal, "devices": devices, "levels": [level]})


def _timed(function: Any) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def two_cuts() -> dict[str, tuple[Plan, float]]:
    """The plan and the predicted seconds of the even cut and of the one fitted to the quotas."""
    model, batch = model_and_batch()
    unequal = cluster_of_quotas(IN_ORDER)
    fix = {"pp": 2, "num_microbatches": MICRO_BATCHES, "schedule": "1f1b", "recompute": "none", "zero": 0}
    options: dict[str, Any] = {"example_inputs": batch, "loss_fn": squared_error, "fix": fix}
    fitted = planner.plan(model, unequal, **options)
    even = planner.plan(model, dataclasses.replace(unequal, unequal=SLOWEST), **options)
    placed = dataclasses.replace(even.step, stage_devices=fitted.step.stage_devices)
    again = dataclasses.replace(even, step=placed, cluster=fitted.cluster)
    subject = subject_of(again, model, example_inputs=batch, loss_fn=squared_error)
    predicted = reprice(subject.graph, again, unequal).simulated().seconds
    return {"even": (again, predicted), "fitted": (fitted, fitted.step.costs.simulated)}


def worker(folder: Path) -> None:
    """One rank: join its control group, time steps of every plan in ``folder``, the two in turn."""
    rank = int(os.environ["RANK"])
    Path(json.loads((folder / "groups.json").read_text())[rank], "tasks").write_text("0")
    torch.set_num_threads(1)
    planner.init()
    model, batch = model_and_batch()
    steps = {}
    for path in sorted(folder.glob("*.plan.json")):
        parallel = planner.compile(model, Plan.load(path), example_inputs=batch, loss_fn=squared_error)
        steps[path.name.partition(".")[0]] = parallel
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM + TIMED):
        for name, parallel in steps.items():
            torch.distributed.barrier()
            seconds[name].append(_timed(lambda parallel=parallel: parallel.train_step(*batch)))
            parallel.zero_grad()
    if rank == 0:
        medians = {name: statistics.median(each[WARM:]) for name, each in seconds.items()}
        (folder / "seconds.json").write_text(json.dumps(medians))
    torch.distributed.destroy_process_group()


def measured() -> str:
    """Predicted and measured seconds of both cuts, as text."""
    cuts = two_cuts()
    with tempfile.TemporaryDirectory() as name, processor_shares(QUOTAS) as groups:
        folder = Path(name)
        (folder / "groups.json").write_text(json.dumps([str(path) for path in groups]))
        for cut, (plan, _) in cuts.items():
            plan.save(folder / f"{cut}.plan.json")
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1",
                  "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]  # fmt: skip
        command = [*launch, "-m", "benchmarks.unequal_devices", "--worker", name]
        subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
        seconds = json.loads((folder / "seconds.json").read_text())
    lines = [f"CPU quotas {' : '.join(f'{share:.0%}' for share in QUOTAS)} of a processor"]
    for cut, (plan, predicted) in cuts.items():
        units = " + ".join(str(sum(group.count for group in chunk.groups)) for chunk in plan.step.chunks)
        lines.append(f"{cut} cut ({units} units): predicted {predicted:.3g} s, measured {seconds[cut]:.3g} s")
    ratios = cuts["even"][1] / cuts["fitted"][1], seconds["even"] / seconds["fitted"]
    lines.append(f"even by fitted: predicted {ratios[0]:.2f}, measured {ratios[1]:.2f}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="two ranks under CPU quotas")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    if options.measure:
        print(measured(), end="")
        return
    rows = []
    for case in CASES:
        rows.append(compared(*case).cells())
        print(" | ".join(rows[-1]), flush=True)
    if options.markdown is not None:
        options.markdown.write_text(f"# Unequal devices, simulated\n\n{table(rows)}", encoding="utf-8")


if __name__ == "__main__":
    main()
