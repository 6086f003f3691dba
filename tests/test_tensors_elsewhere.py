"""Under a pipeline a script writes all buffers, on all ranks; what it reads of another stage says where that is."""

from __future__ import annotations

from tests.ranks import run_on_ranks


def test_every_rank_may_write_all_buffers_and_is_told_where_values_are() -> None:
    assert run_on_ranks("tensors_elsewhere_worker", 2, None) == [[], []]
