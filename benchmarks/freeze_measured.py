"""PipeTransformer's parts one after the other, measured on a link that is shaped, with a gloo rank at each end.

    python -m benchmarks.freeze_measured [--mbit 100] [--passes 3] [--markdown FILE]

As root, on Linux: a veth pair joins two network namespaces, ``tc`` (tbf) limits both ends. All variants run in the same
processes by turns, a step each, so that what else the machine does meets all of them alike: ratios are what to read. A
phase has so many passes over the data, and a decision of the adaptive rule (α = 1/3, the most that it may freeze) after
each. Prices are of processes as ``planner profile`` measures them first and of the link as it is shaped. Seconds are of
steps, and once more with the median of a pass for each of its steps; what replanning takes is a column of its own, as
programs are made once however long the training is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PORT = 29611


@contextmanager
def shaped_namespaces(mbit: float) -> Iterator[list[tuple[str, str, str]]]:
    """Two network namespaces that one link of so many Mbit/s joins: of each its name, its device and its address."""
    mark = f"{os.getpid() % 0x10000:x}"
    places = [(f"mw{mark}n{rank}", f"mw{mark}v{rank}", f"10.77.0.{rank + 1}") for rank in range(2)]
    try:
        for name, _, _ in places:
            _run("ip", "netns", "add", name)
        (first, device, _), (second, other, _) = places
        _run("ip", "link", "add", device, "netns", first, "type", "veth", "peer", "name", other, "netns", second)
        for name, end, address in places:
            inside = ("ip", "netns", "exec", name)
            _run(*inside, "ip", "address", "add", f"{address}/24", "dev", end)
            for each in ("lo", end):
                _run(*inside, "ip", "link", "set", each, "up")
            limit = ("rate", f"{mbit}mbit", "burst", "128kb", "latency", "400ms")
            _run(*inside, "tc", "qdisc", "add", "dev", end, "root", "tbf", *limit)
        yield places
    finally:
        for name, _, _ in places:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def measured(mbit: float, passes: int) -> dict[str, Any]:
    """What the first rank measured."""
    with tempfile.TemporaryDirectory() as folder, shaped_namespaces(mbit) as places:
        cluster, output = Path(folder) / "shaped.toml", Path(folder) / "rows.json"
        _on_ranks(places, "planner", "profile", "-o", str(cluster), "--device", "cpu", "--quick")
        _on_ranks(places, "benchmarks.freeze_measured_worker", str(cluster), str(mbit), str(passes), str(output))
        answer: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return answer


def _on_ranks(places: Sequence[tuple[str, str, str]], *module: str) -> None:
    """Run a module with its arguments in every namespace, one rank each.

    Raises:
        RuntimeError: if a rank fails.
    """
    processes = []
    for rank, (name, device, _) in enumerate(places):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": places[0][2], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": device,
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = ["ip", "netns", "exec", name, sys.executable, "-m", *module]
        processes.append(subprocess.Popen(command, env=environment, cwd=ROOT))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"the ranks of {module[0]} ended with {codes}")


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each variant, beside the first."""
    lines = [
        "| parts | steps, s | times as fast | in medians | replanning, s | pp×dp, ms of a step at its end, by phase |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        phases = "; ".join(f"{layout} {seconds * 1e3:.0f}" for layout, seconds in zip(row["layouts"], row["last pass"]))
        ratios = [rows[0][kind] / row[kind] for kind in ("seconds", "medians")]
        lines.append(
            f"| {row['name']} | {row['seconds']:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {row['replanning']:.1f} | "
            f"{phases} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link, in each direction")
    parser.add_argument("--passes", type=int, default=3, help="over the data in each phase, 2 or more")
    parser.add_argument("--markdown", type=Path, help="append the table there")
    options = parser.parse_args()
    measurement = measured(options.mbit, options.passes)
    text = "\n".join(
        [
            f"## {options.mbit:g} Mbit/s, {options.passes} passes a phase",
            "",
            *table(measurement["rows"]),
            "",
            f"Frozen of {measurement['layers']} layers, by phase: {measurement['frozen']}. Losses of the variants that "
            f"freeze are within {measurement['apart']:.1e} of each other (float32).",
            "",
        ]
    )
    print(text)
    if options.markdown is not None:
        with options.markdown.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
