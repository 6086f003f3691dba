"""accelerate's own test scripts, which its wheel has, run with our ``Accelerator`` in the place of accelerate's.

    python -m benchmarks.accelerate_scripts [--only test_sync] [--markdown benchmarks/results/accelerate_scripts.md]

Every function is run on two gloo processes of its own, with both classes: what fails with accelerate's alone is its
matter, what fails with ours is listed with the reason.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.ranks import free_port

SCRIPTS = "accelerate.test_utils.scripts."
#: Seconds after which ranks that wait for each other are stopped.
PATIENCE = 240
#: Script, function and its arguments, as the script's own main calls it.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("test_script", name, {}) for name in (
        "process_execution_check", "init_state_check", "rng_sync_check", "dl_preparation_check",
        "central_dl_preparation_check", "custom_sampler_check", "check_seedable_sampler",
        "check_seedable_sampler_in_batch_sampler_shard", "check_seedable_sampler_with_data_seed",
        "test_split_between_processes_list", "test_split_between_processes_nested_dict",
        "test_split_between_processes_tensor", "test_split_between_processes_evenly", "test_trigger",
        "test_reinstantiated_state",
    )),
    *(("test_script", "training_check", {"use_seedable_sampler": seedable}) for seedable in (False, True)),
    *(("test_sync", name, {}) for name in ("test_dataloader_break", "test_distributed_sync",
                                           "test_distributed_sync_multiple_fwd")),
    *(("test_sync", name, {"split_batches": split, "dispatch_batches": False, "sync_each_batch": each})
      for name in ("test_gradient_accumulation", "test_gradient_accumulation_with_opt_and_scheduler")
      for split in (False, True) for each in (False, True)),
    *(("test_ops", name, {}) for name in ("test_gather", "test_gather_object", "test_gather_non_contiguous",
                                          "test_broadcast", "test_pad_across_processes", "test_reduce_sum",
                                          "test_reduce_mean", "test_reduce_max")),
    *(("test_distributed_data_loop", name, {}) for name in (
        "test_default_ensures_even_batch_sizes", "test_can_disable_even_batches", "test_can_join_uneven_inputs",
        "test_join_can_override_even_batches", "test_join_can_override_for_mixed_type_dataloaders",
        "test_join_raises_warning_for_iterable_when_overriding_even_batches", "test_pickle_accelerator",
        "test_stateful_dataloader", "test_stateful_dataloader_save_state",
    )),
]  # fmt: skip


def run_rank(place: int, *, ours: bool) -> None:
    """One rank of a case."""
    script, name, arguments = CASES[place]
    module = importlib.import_module(SCRIPTS + script)
    import accelerate

    if ours:
        from planner.integrations.accelerate import Accelerator

        module.Accelerator = accelerate.Accelerator = Accelerator  # type: ignore[attr-defined]
    accelerator = accelerate.Accelerator(cpu=True)  # as the scripts' own main begins
    function = getattr(module, name)
    offered = {"accelerator": accelerator, "state": accelerate.PartialState()}
    needed = inspect.signature(function).parameters
    arguments = {**arguments, **{key: value for key, value in offered.items() if key in needed}}
    function(**arguments)


def outcome(place: int, *, ours: bool) -> str:
    """ "" if a case passed on both ranks, else why it failed."""
    shared = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true", "MESHWRIGHT_CACHE": ""}  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.accelerate_scripts", "--rank-of", str(place)]
    command += ["--ours"] if ours else []
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(2)]
        ranks = []
        for rank, log in enumerate(logs):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("w") as file:
                ranks.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
        try:
            codes = [rank.wait(PATIENCE) for rank in ranks]
        except subprocess.TimeoutExpired:
            for rank in ranks:
                rank.kill()
            return "ranks wait for each other"
        if not any(codes):
            return ""
        failed = next(index for index, code in enumerate(codes) if code)
        said = [line for line in logs[failed].read_text().splitlines() if "Error" in line and "ChildFailed" not in line]
        return said[-1][:200] if said else f"exit codes {codes}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rank-of", type=int)
    parser.add_argument("--ours", action="store_true")
    options = parser.parse_args()
    if options.rank_of is not None:
        run_rank(options.rank_of, ours=options.ours)
        return
    rows = []
    for place, (script, name, arguments) in enumerate(CASES):
        if options.only not in f"{script}.{name}":
            continue
        called = ", ".join(f"{key}={value}" for key, value in arguments.items())
        results = [outcome(place, ours=ours) for ours in (False, True)]
        rows.append([f"{script}.{name}({called})", *(result or "passes" for result in results)])
        print(" | ".join(rows[-1]), flush=True)
    passed = [sum(row[column] == "passes" for row in rows) for column in (1, 2)]
    text = (
        "# accelerate's own test scripts\n\n`python -m benchmarks.accelerate_scripts --markdown PATH`: functions of "
        "the scripts in accelerate's wheel, on\ntwo gloo processes. "
        f"With accelerate's `Accelerator` {passed[0]} of {len(rows)} pass, with ours {passed[1]}.\n\n"
        "| function | accelerate's | ours |\n|---|---|---|\n"
        + "".join(f"| `{row[0]}` | {row[1]} | {row[2]} |\n" for row in rows)
    )
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    print(f"{passed} of {len(rows)}")


if __name__ == "__main__":
    main()
