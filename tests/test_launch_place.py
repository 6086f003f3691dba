"""Where a process stands: arguments, torchrun's variables, SLURM's, or alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cli import main
from runtime.launch.place import ProcessPlace, expand_hosts, find_place

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "4000"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "gpu[07-08,11],login",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node7", ["node7"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("rack[1-2]node[3-4]-ib", ["rack1node3-ib", "rack1node4-ib", "rack2node3-ib", "rack2node4-ib"]),
        ("a.example.org,b-[1]", ["a.example.org", "b-1"]),
    ],
)
def test_lists_of_hosts(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "n[1-2", "n]1[", "n[2-1]", "n[a-b]", "n[]", "a,,b", "a b", "n[[1]]"])
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(ValueError, match="hosts"):
        expand_hosts(text)


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 20)), min_size=1, max_size=5), st.integers(1, 5))
def test_ranges_keep_their_width(ranges: list[tuple[int, int]], width: int) -> None:
    text = ",".join(f"{first:0{width}}-{first + more:0{width}}" for first, more in ranges)
    expected = [f"n{number:0{width}}" for first, more in ranges for number in range(first, first + more + 1)]
    assert expand_hosts(f"n[{text}]") == expected


@pytest.mark.parametrize(
    ("environment", "arguments", "place"),
    [
        ({}, {}, ProcessPlace(0, 1, 0, None, None, "alone")),
        (TORCHRUN, {}, ProcessPlace(3, 8, 1, "node1", 4000, "torchrun")),
        (TORCHRUN, {"address": "other", "port": 1}, ProcessPlace(3, 8, 1, "other", 1, "torchrun")),
        (SLURM, {}, ProcessPlace(5, 8, 1, "gpu07", 15000 + 4711, "slurm")),
        ({**SLURM, "SLURM_STEP_ID": "2"}, {}, ProcessPlace(5, 8, 1, "gpu07", 15000 + 4713, "slurm")),
        ({**SLURM, "MASTER_PORT": "4000", "MASTER_ADDR": "a"}, {}, ProcessPlace(5, 8, 1, "a", 4000, "slurm")),
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu11"}, {}, ProcessPlace(5, 8, 1, "gpu11", 15000 + 4711, "slurm")),
        ({**SLURM, **TORCHRUN}, {}, ProcessPlace(3, 8, 1, "node1", 4000, "torchrun")),
        ({"SLURM_JOB_ID": "4711"}, {}, ProcessPlace(0, 1, 0, None, None, "alone")),
        (TORCHRUN, {"rank": 0, "world_size": 2, "address": "b"}, ProcessPlace(0, 2, None, "b", 29500, "arguments")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {}, ProcessPlace(0, 1, None, None, None, "torchrun")),
    ],
)
def test_places(environment: dict[str, str], arguments: dict[str, Any], place: ProcessPlace) -> None:
    assert find_place(environment, **arguments) == place


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ({"RANK": "0"}, {}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, {}, "RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "MASTER_ADDR and MASTER_PORT"),
        ({**TORCHRUN, "RANK": "first"}, {}, "RANK must be a whole number"),
        ({**TORCHRUN, "RANK": "8"}, {}, "0..world_size-1"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, {}, "SLURM_JOB_NODELIST"),
        ({**SLURM, "SLURM_JOB_NODELIST": "gpu[1"}, {}, "list of hosts"),
        ({}, {"rank": 0}, "belong together"),
        ({}, {"rank": 0, "world_size": 2}, "address="),
        ({}, {"address": "node1"}, "rank and world_size"),
        ({}, {"rank": 0, "world_size": 2, "address": "a", "port": 70000}, "1..65535"),
    ],
)
def test_places_that_are_none(environment: dict[str, str], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_place(environment, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc", "0"], "a whole number from 1"),
        (["--nproc", "2", "--nnodes", "2"], "--node-rank"),
        (["--nproc", "2", "--nnodes", "2", "--node-rank", "2", "--address", "a"], "0..1"),
        (["--nproc", "2", "--nnodes", "2", "--node-rank", "0"], "--address"),
        (["--nproc", "2", "--port", "4000"], "--nnodes"),
        (["--nproc", "2", "--nnodes", "0"], "at least 1"),
    ],
)
def test_runs_that_cannot_be(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["run", *arguments, __file__], ["run", __file__, *arguments]):
        try:
            code = main(command)
        except SystemExit as error:  # how argparse ends a command line that it cannot read
            code = error.code
        assert code == 2 and words in capsys.readouterr().err
