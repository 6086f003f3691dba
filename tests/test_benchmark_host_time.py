"""The benchmark of host time runs everything but whole steps, and says what is beyond its goals."""

import gc

import pytest
import torch
import torch.distributed as dist

from benchmarks.host_time import Comparison, Contestant, Row, beyond_goals, measure, run, table
from benchmarks.kernels_cases import OPERATORS


@pytest.fixture(autouse=True)
def what_other_tests_left_is_not_looked_through() -> None:
    """Garbage is collected before each measurement."""
    gc.freeze()


def test_operators_chains_collectives_and_units_are_compared() -> None:
    threads = torch.get_num_threads()
    rows = run(("operator", "chain", "collective", "unit"), rounds=1, calls=2)
    torch.set_num_threads(threads)
    assert [row.name for row in rows if row.kind == "operator"] == [operator.name for operator in OPERATORS]
    assert len([row for row in rows if row.kind == "chain"]) == 2
    assert len([row for row in rows if row.kind == "collective"]) == 3
    assert len([row for row in rows if row.kind == "unit"]) == 4
    assert not dist.is_initialized()
    assert len(table(rows).splitlines()) == 2 + len(rows)


def test_backward_takes_all_results_of_a_round() -> None:
    rounds: list[int] = []
    counting = Contestant(lambda: None, lambda results: rounds.append(len(results)))
    row = measure(Comparison("operator", "", counting, Contestant(lambda: None)), rounds=2, calls=5)
    assert rounds == [3, 5, 5]
    assert row.backward is not None and row.other_backward is None
    assert len(row.paired) == 2


def test_the_ratio_is_that_of_pairs_of_which_one_was_disturbed() -> None:
    assert Row("step", "", "", 1.0, None, 4.0, None, paired=(0.5, 0.9, 3.0)).ratio == 0.9


def test_goals_are_about_operators_each_way_and_about_steps() -> None:
    rows = [
        Row("operator", "quick", "", 129.0, 29.0, 100.0, 1.0),
        Row("operator", "slow backward", "", 1.0, 131.0, 100.0, 100.0),
        Row("chain", "no goal", "", 100.0, 100.0, 1.0, 1.0),
        Row("step", "as quick", "", 5.0, None, 5.0, None),
        Row("step", "slower", "", 5.1, None, 5.0, None),
    ]
    assert beyond_goals(rows) == ["slow backward", "slower"]
