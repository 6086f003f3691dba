"""A measured step in one trace of all ranks, with the tracks and names of the simulated one."""

from __future__ import annotations

import json
from pathlib import Path

from planner.inspection.simulated_step import simulated_step
from planner.inspection.step_trace import trace_events
from runtime.execution.measured_trace import MeasuredSpan, spans_of
from tests.ranks import run_on_ranks
from tests.test_inspection import plan_of


def test_every_action_of_every_rank_is_in_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    run_on_ranks("measured_trace_worker", 2, {"path": str(path)})
    measured = json.loads(path.read_text())["traceEvents"]
    plan = plan_of("1f1b")  # another model's, of as many ranks and micro-batches
    simulated = list(trace_events(plan, simulated_step(plan)))

    def tracks(events: list[dict]) -> list[tuple]:  # type: ignore[type-arg]
        return [(event["pid"], event.get("tid"), event["args"].get("name")) for event in events if event["ph"] == "M"]

    def actions(events: list[dict], rank: int) -> list[str]:  # type: ignore[type-arg]
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["cat"] == "compute"]
        names = [e["name"] for e in sorted(spans, key=lambda e: e["ts"]) if e["name"][0] in "FBIW"]
        return list(dict.fromkeys(names))  # the simulator plays an action layer by layer

    assert tracks(measured) == tracks(simulated)
    for rank in (0, 1):
        assert actions(measured, rank) == actions(simulated, rank)
    assert {event["cat"] for event in measured if event["ph"] == "X"} == {"compute", "receive", "communication"}
    assert min(event["ts"] for event in measured if event["ph"] == "X") == 0.0


def test_on_a_gpu_the_tracks_are_of_kernels() -> None:
    def event(name: str, category: str, ts: float) -> dict[str, object]:
        return {"ph": "X", "name": name, "cat": category, "ts": ts, "dur": 1.0}

    events = [
        event("F0.0", "user_annotation", 0.0),
        event("ampere_gemm", "kernel", 1.0),
        event("ncclDevKernel_AllReduce_Sum", "kernel", 2.0),
        event("ncclDevKernel_SendRecv", "kernel", 3.0),
    ]
    spans = list(spans_of({"traceEvents": events, "baseTimeNanoseconds": 2_000_000_000}))
    assert [span.stream for span in spans] == ["compute", "communication", "receive"]
    assert spans[0] == MeasuredSpan("compute", "ampere_gemm", 2.0 + 1e-6, 1e-6)
