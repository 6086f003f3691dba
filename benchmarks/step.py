"""Whether the planner's training steps are at least as fast as experts' ones, by the simulator.

    python -m benchmarks.step -o /tmp/step                        # the pairs of benchmarks/step.toml: takes minutes
    python -m benchmarks.step -o /tmp/step --only llama-3.1-8b
    python -m benchmarks.step -o /tmp/step tiny-llama cpu-local:8 --global-batch 8 --seq-len 32

A sweep (``planner.sweep``): one that was stopped goes on. A line for each pair of model and cluster: simulated
seconds of the chosen plan and of every baseline of ``planner.whole_step.candidates.expert_layouts`` at its best, the
ratio to the best of them, and what both are. ``table.md`` and ``sweep.html`` in the folder have all rows.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import planner
from planner.sweeps.study import Study
from planner.sweeps.study_format import load_study, read_study
from planner.sweeps.sweep_row import SweepRow

STUDY = Path(__file__).with_name("step.toml")


def line(row: SweepRow) -> str:
    """One pair as text."""
    request = row.request
    where = f"{request.model} on {request.cluster} ({row.num_devices} devices), batch {request.global_batch}"
    if row.error is not None:
        return f"{where}\n  no plan: {row.error}"
    seconds = {name: row.baseline(name).get("seconds") for name in request.baselines}
    baselines = ", ".join(f"{name} {_cell(row, name)}" for name in request.baselines)
    best = min((name for name in seconds if seconds[name] is not None), key=lambda name: seconds[name], default=None)
    verdict = "no baseline runs"
    if best is not None:
        verdict = f"ratio {row.ratio(best):.4f} to {best}: {row.baseline(best)['what']}"
    return (
        f"{where}\n  plan {row.figure('step_seconds'):.4g} s ({row.figure('status')}, gap {row.figure('gap'):.2%}): "
        f"{row.figure('choice')}\n  baselines: {baselines}\n  {verdict}\n"
        f"  planned and compared in {row.planning_seconds:.1f} processor seconds"
    )


def _cell(row: SweepRow, name: str) -> str:
    seconds = row.baseline(name).get("seconds")
    return f"({row.baseline(name)['what']})" if seconds is None else f"{seconds:.4g}"


def _study(options: argparse.Namespace) -> Study:
    if options.model:
        fields = {"models": [options.model], "clusters": [options.cluster], "global_batches": [options.global_batch]}
        length = {"seq_lens": [options.seq_len]} if options.seq_len else {}
        return read_study({**fields, **length, "baselines": "all"})
    study = load_study(STUDY)
    grids = tuple(grid for grid in study.grids if options.only in " ".join((*grid.models, *grid.clusters)))
    return replace(study, grids=grids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a config name; without it the standard pairs are compared")
    parser.add_argument("cluster", nargs="?", default="cpu-local:8")
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--only", default="", help="standard pairs in whose model or cluster this occurs")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each core)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the results")
    options = parser.parse_args()
    done = planner.sweep(
        _study(options), options.output, jobs=options.jobs, listener=lambda *told: print(line(told[2]), flush=True)
    )
    print(f"{len(done.rows)} rows, {done.num_errors} without a plan; {done.files[1]}")


if __name__ == "__main__":
    main()
