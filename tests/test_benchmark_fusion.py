"""The table of what fusing saves: its figures are those of the plan."""

from __future__ import annotations

from benchmarks.fusion import HEADINGS, measure, page
from planner.fusing import saved_bytes
from planner.planning import capture_for_planning


def test_a_row_says_what_the_graph_holds() -> None:
    graph = capture_for_planning("tiny-llama", batch_size=2, seq_len=16)
    row = measure("tiny-llama", batch_size=2, seq_len=16)
    before, after = row.fusion.saved_bytes
    assert before == saved_bytes(graph) > after > 0
    name, operators, fused, fewer, *_, matches = row.cells()
    assert (name, int(operators)) == ("tiny-llama", sum(not node.constant for node in graph.nodes))
    assert fewer == f"{1 - int(fused) / int(operators):.0%}"
    assert "8 rotary" in matches and "1 cross_entropy" in matches


def test_the_page_has_a_line_for_each_model() -> None:
    rows = [measure(model, batch_size=1, seq_len=8) for model in ("tiny-gpt2", "tiny-bert")]
    lines = page(rows, batch_size=1, seq_len=8).splitlines()
    table = [line for line in lines if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in table] == ["| model", "| ---", "| tiny-gpt2", "| tiny-bert"]
    assert all(len(line.split(" | ")) == len(HEADINGS) for line in table)
    assert "1 sample of 8 tokens" in lines[2]
