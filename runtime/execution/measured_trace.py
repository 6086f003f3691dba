"""Steps as they ran, by ``torch.profiler`` on every rank, in one trace with the tracks of the simulated step.

Actions of the pipeline are named as the simulator names them (``F0.3``: forward of chunk 0, micro-batch 3). On a
processor the compute track has the actions and the optimizer; on a GPU its kernels, with those of NCCL on the tracks of
communication. Times are the hosts' clocks: of several hosts they are as near as those are.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from cost_models.files import write_text
from passes.plan.step_tracks import MICROSECONDS, span_event, track_names
from runtime.execution.rank_mapping import Places

_ACTION = re.compile(r"[FBIW]\d+\.\d+|Optimizer\.step#.*")
_MESSAGE = re.compile(r"gloo:|nccl", flags=re.IGNORECASE)
_RECEIVE = re.compile(r"recv", flags=re.IGNORECASE)


class MeasuredSpan(NamedTuple):
    """What one stream did: ``start`` in seconds of the host's clock."""

    stream: str
    label: str
    start: float
    seconds: float


@contextmanager
def measured(path: str | Path, places: Places) -> Iterator[None]:
    """Profile what runs inside of the ``with`` block on every rank, and write one trace of all on the first rank.

    Raises:
        ValueError: if the file cannot be written.
    """
    activities = [ProfilerActivity.CPU]
    if places.layout.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        yield
    spans = list(spans_of(_chrome_trace(profiler)))
    everybody = _gathered((_rank_name(places), spans))
    if everybody is not None:
        write_text(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_events(everybody))}) + "\n")


def spans_of(trace: dict[str, Any]) -> Iterator[MeasuredSpan]:
    """The spans in what ``export_chrome_trace`` writes."""
    base = float(trace.get("baseTimeNanoseconds", 0)) * 1e-9
    on_gpu = any(event.get("cat") == "kernel" for event in trace["traceEvents"])
    for event in trace["traceEvents"]:
        stream = _stream_of(event, on_gpu=on_gpu) if event.get("ph") == "X" else None
        if stream is not None:
            start = base + float(event["ts"]) / MICROSECONDS
            yield MeasuredSpan(stream, str(event["name"]), start, float(event.get("dur", 0.0)) / MICROSECONDS)


def _stream_of(event: dict[str, Any], *, on_gpu: bool) -> str | None:
    """The track of an event of the profiler, None if it has none."""
    name, category = str(event["name"]), event.get("cat", "")
    if on_gpu and category != "kernel":
        return None
    if _MESSAGE.match(name) or (on_gpu and _MESSAGE.search(name)):
        return "receive" if _RECEIVE.search(name) else "communication"
    return "compute" if on_gpu or _ACTION.fullmatch(name) else None


def _chrome_trace(profiler: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    return content


def _rank_name(places: Places) -> str:
    """As in the simulated trace, with the device where a pipeline rank has several."""
    group = places.pipeline_group
    pipeline = dist.get_rank(group) if group is not None else 0
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    alone = ranks == (dist.get_world_size(group) if group is not None else 1)
    device = "" if alone else f", device {dist.get_rank()}"
    return f"pipeline rank {pipeline}{device}"


def _gathered(own: tuple[str, list[MeasuredSpan]]) -> list[tuple[str, list[MeasuredSpan]]] | None:
    """What all ranks have, on the first one."""
    if not dist.is_initialized():
        return [own]
    first = dist.get_rank() == 0
    everybody: list[Any] | None = [None] * dist.get_world_size() if first else None
    dist.gather_object(own, everybody)
    return everybody


def _events(everybody: list[tuple[str, list[MeasuredSpan]]]) -> Iterator[dict[str, Any]]:
    begin = min((span.start for _, spans in everybody for span in spans), default=0.0)
    for rank, (name, spans) in enumerate(everybody):
        yield from track_names(rank, name)
        for span in sorted(spans, key=lambda span: (span.start, -span.seconds)):
            yield span_event(rank, span.stream, span.label, span.start - begin, span.seconds)
