"""Scripts of transformers' Trainer, accelerate and Lightning under plans, against the frameworks' own on one process.

    python -m benchmarks.adoption [--only Trainer] [--markdown benchmarks/results/adoption.md]

Every script of ``benchmarks.adoption_cells`` is run on every mesh, on gloo processes, and all that it logs (losses of
each step, norms, learning rates, evaluations) is compared with what it logs on one process without this package.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

from tests.ranks import free_port

MESHES = ("dp=2", "tp=2", "dp=2,tp=2", "pp=2")
#: Why scripts, by the beginning of their names, have no run on a mesh.
WITHOUT = {
    ("Tutorial: callback that reads", "pp=2"): "a rank has the gradients of its own stage",
    ("accelerate: two models", "pp=2"): "what is differentiated is no loss of the model's: no pipeline",
    ("accelerate: own loss", "pp=2"): "what is differentiated is no loss of the model's: no pipeline",
    ("Lightning: ZeRO 3", "tp=2"): "no data axis, over which ZeRO would cut",
    ("Lightning: ZeRO 3", "pp=2"): "no data axis, over which ZeRO would cut",
    ("Lightning: own loss", "pp=2"): "what is differentiated is no loss of the model's: no pipeline",
}
#: Below this a figure's difference counts relative to this.
FLOOR = 1e-2


def without(script: str, mesh: str) -> str | None:
    """Why a script has no run on a mesh, if so."""
    return next((why for (start, on), why in WITHOUT.items() if script.startswith(start) and on == mesh), None)


def run_rank(mesh: str, only: str, folder: str) -> None:
    """What every script logs under ``mesh`` (of ``alone``: on one process without plans), as JSON."""
    warnings.filterwarnings("ignore")
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    from benchmarks.adoption_cells import CELLS
    from tests.tracing import traced_once

    is_alone = mesh == "alone"
    if not is_alone:
        dist.init_process_group("gloo")
    logged: dict[str, Any] = {}
    with traced_once():
        for framework, cells in CELLS.items():
            for name, (cell, _) in cells.items():
                if not re.search(only, f"{framework}: {name}") or without(f"{framework}: {name}", mesh):
                    continue
                AcceleratorState._reset_state()  # a script's choices of precision and accumulation would stay
                GradientState._reset_state()
                place = str(Path(folder) / mesh / f"{framework}-{name}".replace(" ", "_"))
                try:
                    logged[f"{framework}: {name}"] = cell(None if is_alone else mesh, place)
                except Exception as error:  # said in the table; ranks fail together
                    traceback.print_exc()
                    logged[f"{framework}: {name}"] = f"{type(error).__name__}: {error}"[:200]
    if is_alone or dist.get_rank() == 0:
        (Path(folder) / f"{mesh}.json").write_text(json.dumps(logged), encoding="utf-8")
    if not is_alone:
        dist.barrier()


def logged_on(mesh: str, only: str, folder: str) -> dict[str, Any]:
    count = 1 if mesh == "alone" else math.prod(int(part.split("=")[1]) for part in mesh.split(","))
    shared = {**os.environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "MESHWRIGHT_CACHE": ""}  # fmt: skip
    if mesh == "alone":
        shared = {name: value for name, value in shared.items() if name not in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    command = [sys.executable, "-m", "benchmarks.adoption", "--rank-of", mesh, "--only", only, "--folder", folder]
    places = [{}] if mesh == "alone" else [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    ranks = [subprocess.Popen(command, env={**shared, **place}) for place in places]
    if any(rank.wait() for rank in ranks):
        raise RuntimeError(f"a rank of {mesh} failed")
    result: dict[str, Any] = json.loads((Path(folder) / f"{mesh}.json").read_text(encoding="utf-8"))
    return result


def difference(actual: Any, expected: Any) -> float | str:
    """The largest relative difference, or what went wrong."""
    if isinstance(actual, str) or isinstance(expected, str):
        return actual if isinstance(actual, str) else f"on one process: {expected}"
    if len(actual) != len(expected):
        return f"{len(actual)} figures, not {len(expected)}"
    return max(abs(one - other) / max(abs(other), FLOOR) for one, other in zip(actual, expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a regular expression that scripts' names are searched for")
    parser.add_argument("--meshes", default=";".join(MESHES))
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--rank-of")
    parser.add_argument("--folder", default="")
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of, options.only, options.folder)
        return
    from benchmarks.adoption_cells import CELLS

    meshes = options.meshes.split(";")
    with tempfile.TemporaryDirectory() as folder:
        alone = logged_on("alone", options.only, folder)
        logged = {mesh: logged_on(mesh, options.only, folder) for mesh in meshes}
    lines, failed, count = [], 0, 0
    for framework, cells in CELLS.items():
        for name, (_, allowed) in cells.items():
            key = f"{framework}: {name}"
            if key not in alone:
                continue
            row = []
            for mesh in meshes:
                if without(key, mesh):
                    row.append("–")
                    continue
                apart = difference(logged[mesh][key], alone[key])
                count += 1
                failed += isinstance(apart, str) or apart > allowed
                row.append(apart if isinstance(apart, str) else f"{apart:.1e}" + (" **too far**" * (apart > allowed)))
            figures = len(alone[key]) if isinstance(alone[key], list) else 0
            lines.append(f"| {key} | {figures} | {allowed:.0e} | {' | '.join(row)} |")
    text = "\n".join([
        "# Scripts of other frameworks under plans", "",
        "`python -m benchmarks.adoption --markdown PATH`: the largest relative difference of all that a script logs",
        f"(of a figure below {FLOOR}: relative to that) from what it logs on one process without this package.",
        f"{count - failed} of {count} are within what is allowed.", "",
        f"| script | figures | allowed | {' | '.join(meshes)} |", "|---|---|---|" + "---|" * len(meshes), *lines, "",
        *(f"* {script} on {mesh}: {why}." for (script, mesh), why in WITHOUT.items()
          if mesh in meshes and any(key.startswith(script) for key in alone)), "",
    ])  # fmt: skip
    print(text)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
