"""``profile_machine``: time what training does on the machine at hand, and write the cluster file that it fits."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cost_models import Cluster
from cost_models.files import check_writable, write_text
from planner.calibration.call_timing import (
    Call,
    cold,
    seconds_behind_compute,
    seconds_of,
    seconds_one_way,
    seconds_to_enqueue,
)
from planner.calibration.cluster_fit import fit_cluster
from planner.calibration.cluster_toml import as_toml
from planner.calibration.collective_cases import COLLECTIVES, LinkGroups, link_groups, relay, whole_elements
from planner.calibration.measured_call import SAME, MeasuredCall, read_calls, write_calls
from planner.calibration.operator_cases import OperatorCase, launch, launched_chain, operator_cases
from runtime.launch.process import Process, init
from runtime.program_tools.adapters import apply_adapters

#: Seconds that one call may take, as predicted from those before it: longer ones are left out.
MOST_SECONDS, MOST_SECONDS_QUICK = 0.5, 0.01
#: The dtype that curves are of, and those of which only the peak is measured, by type of device.
DTYPES = {
    "cpu": ("float32", ("float64", "bfloat16", "float16")),
    "cuda": ("bfloat16", ("float32", "tfloat32", "float16", "float64")),
}
PEAK_SIDES = (256, 512, 1024, 2048, 4096, 8192)
#: Of a tensor: a processor's allocator keeps less than that; for more the system clears new pages at every call.
KEPT_BYTES = 32 * 2**20
#: The matrix product that is timed again and again, and how often after each part of the measurements.
SAME_SIDE, SAME_TIMES = 512, 2
#: Operators in the chain by which the host's launches are timed, forward, and as many backward: a device's queue holds
#: a thousand.
HOST_CHAIN = 200
#: Of the all-reduce that runs beside matrix products.
OVERLAP_BYTES = 16 * 2**20
Listener = Callable[[str], None]
Timing = Callable[..., float]


def profile_machine(
    output: str | Path,
    *,
    device: str | None = None,
    name: str | None = None,
    quick: bool = False,
    fresh: bool = False,
    listener: Listener = print,
) -> Path:
    """Measure this machine (every process of a ``torchrun`` job calls it) and write a cluster file.

    Beside it lies ``<output>.calls.csv`` with every call that was timed, from which a run that was stopped goes on.
    Curves are fitted to two thirds of the calls; how far the others are off stands in the file.

    Args:
        output: the cluster file, ``*.toml``.
        device: ``"cpu"`` or ``"cuda"``; default: a GPU if there is one.
        name: of the cluster; default: that of the file.
        quick: leave out calls of more than ten milliseconds.
        fresh: measure all anew.
        listener: is told each call, on rank 0.

    Returns:
        the path of the cluster file.

    Raises:
        ValueError: if the file cannot be written, or what an earlier run left is damaged.
    """
    path = Path(output)
    if path.suffix != ".toml":
        raise ValueError(f"a cluster file is named *.toml (planner plan --cluster reads it), got '{path}'")
    check_writable(path)
    is_joined = dist.is_initialized()
    process = init(device=device)
    apply_adapters()  # as programs call collectives
    try:
        _measure_and_fit(_Run.of(process, path, quick=quick, listener=listener), path, name=name, fresh=fresh)
    finally:
        if not is_joined and dist.is_initialized():
            dist.destroy_process_group()
    return path


def _measure_and_fit(run: _Run, path: Path, *, name: str | None, fresh: bool) -> None:
    run.take_up([] if fresh or run.rank else read_calls(run.table, run.machine))
    for _ in _measurements(run):
        run.save()
    if run.rank == 0:
        cluster = fit_cluster(
            run.calls, name=name or path.stem, machine=run.machine, memory=_memory(run.device, run.per_host),
            world_size=run.world_size, per_host=run.per_host, main_dtype=DTYPES[run.device.type][0],
            device_name=_device_name(run.device),
        )  # fmt: skip
        write_text(path, as_toml(cluster))
        for line in (*_off_by(cluster), f"wrote {path}"):
            run.listener(line)
    run.agree(0.0)


def _off_by(cluster: Cluster) -> Iterator[str]:
    assert cluster.profile is not None
    yield "measured over predicted seconds of calls that were not fitted: median (5% to 95%)"
    for name, each in cluster.profile.ranges.items():
        yield f"  {name:28s} {each.median:5.2f} ({each.low:.2f} to {each.high:.2f}) of {each.calls}"


@dataclass
class _Run:
    """The calls measured so far, the same on every rank."""

    device: torch.device
    rank: int
    world_size: int
    per_host: int
    machine: str
    table: Path
    most_seconds: float
    listener: Listener
    calls: list[MeasuredCall] = field(default_factory=list)

    @staticmethod
    def of(process: Process, path: Path, *, quick: bool, listener: Listener) -> _Run:
        per_host = int(os.environ.get("LOCAL_WORLD_SIZE") or process.world_size)
        machine = machine_text(process.device, process.world_size, per_host)
        table, most_seconds = path.with_name(f"{path.name}.calls.csv"), MOST_SECONDS_QUICK if quick else MOST_SECONDS
        return _Run(
            process.device, process.rank, process.world_size, per_host, machine, table, most_seconds, listener
        )  # fmt: skip

    def take_up(self, calls: list[MeasuredCall]) -> None:
        """What an earlier run measured, as rank 0 read it."""
        told = [calls]
        if self.world_size > 1:
            dist.broadcast_object_list(told, src=0)
        self.calls = list(told[0])

    def agree(self, seconds: float) -> float:
        """The longest of all ranks."""
        if self.world_size == 1:
            return seconds
        told = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return float(told)

    def find(self, key: tuple[str, str, str, int]) -> MeasuredCall | None:
        return next((call for call in self.calls if call.key == key), None)

    def measure(
        self, kind: str, place: str, shape: str, make: Callable[[], Call], *, timed: Timing = seconds_of, **sizes: Any
    ) -> MeasuredCall:
        """Time a call on all ranks at once, unless an earlier run has."""
        ranks = int(sizes.pop("ranks", 1))
        known = self.find((kind, place, shape, ranks))
        if known is None:
            call = make()
            self.agree(0.0)
            known = MeasuredCall(
                kind,
                place,
                shape,
                ranks=ranks,
                seconds=self.agree(timed(call, self.device, agree=self.agree)),
                **sizes,
            )
            self.calls.append(known)
            if self.rank == 0:
                self.listener(
                    f"{kind} {place} {shape}{f' on {ranks} ranks' * (ranks > 1)}: {known.seconds * 1e6:,.1f} µs"
                )
        return known

    def save(self) -> None:
        if self.rank == 0:
            write_calls(self.table, self.machine, self.calls)


def _measurements(run: _Run) -> Iterator[None]:
    """Measure everything; between two parts the caller may save."""
    main, others = DTYPES[run.device.type]
    run.measure("launch", main, "16", lambda: launch(getattr(torch, main), run.device), flops=0.0, num_bytes=0.0)
    _host(run, main)
    by_kind: dict[str, list[OperatorCase]] = {}
    for case in operator_cases():
        by_kind.setdefault(case.kind, []).append(case)
    for kind, cases in by_kind.items():
        _operators(run, cases, main)
        _same_call(run, main, kind)
        yield
    squares = [case for case in by_kind["matmul"] if case.shape[0] == 1 and case.shape[1] in PEAK_SIDES]
    for dtype in others:
        _operators(run, [case for case in squares if len(set(case.shape[1:])) == 1], dtype)
        _same_call(run, main, dtype)
        yield
    every = link_groups(run.world_size, run.per_host)
    for groups in every:
        _collectives(run, groups)
        _same_call(run, main, f"{groups.place} {groups.size}")
        yield
    if every:
        _overlap(run, every[-1])
        yield


def _host(run: _Run, dtype: str) -> None:
    """How long the host needs to launch an operator; not of processors, on which operators are the host's own work."""
    if run.device.type == "cpu":
        if run.rank == 0:
            run.listener(
                "host: operators of processors run on the host itself; host_seconds stays 0, as part of theirs"
            )
        return
    make = functools.partial(launched_chain, getattr(torch, dtype), run.device, length=HOST_CHAIN)
    timed = functools.partial(seconds_to_enqueue, operators=2 * HOST_CHAIN)
    run.measure("host", dtype, str(HOST_CHAIN), make, timed=timed, flops=0.0, num_bytes=0.0)


def _operators(run: _Run, cases: list[OperatorCase], dtype: str) -> None:
    """Time cases of one kind, the least work first, as long as they do not take too long."""
    torch_dtype = getattr(torch, "float32" if dtype == "tfloat32" else dtype)
    rate = 0.0
    for case in cases:
        work = case.flops or case.elements
        if rate and work / rate > run.most_seconds:
            continue
        num_bytes = case.elements * torch_dtype.itemsize
        if run.device.type == "cpu" and case.streamed_elements * torch_dtype.itemsize >= KEPT_BYTES:
            continue
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = dtype == "tfloat32"
        try:
            call = run.measure(
                case.kind, dtype, "x".join(map(str, case.shape)),
                functools.partial(cold, functools.partial(case.make, torch_dtype, run.device), num_bytes),
                flops=case.flops, num_bytes=num_bytes,
            )  # fmt: skip
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before
        rate = max(rate, work / call.seconds)


def _same_call(run: _Run, dtype: str, after: str) -> None:
    """A matrix product once more, ``after`` other measurements: how fast the machine is now."""
    square = torch.rand(SAME_SIDE, SAME_SIDE, device=run.device).to(getattr(torch, dtype))
    for turn in range(SAME_TIMES):
        shape = f"after {after} {turn}"
        run.measure(SAME, dtype, shape, lambda: lambda: square @ square, flops=2.0 * SAME_SIDE**3, num_bytes=0.0)


def _collectives(run: _Run, groups: LinkGroups) -> None:
    mine: Any = None
    for ranks in groups.members(run.world_size):
        group = dist.new_group(ranks)
        mine = group if run.rank in ranks else mine
    for collective in groups.collectives:
        make = COLLECTIVES[collective]
        timed: Timing = seconds_behind_compute
        if collective == "send_recv" and run.device.type == "cpu":
            make, timed = relay, seconds_one_way
        for size in groups.sizes:
            elements = whole_elements(size, groups.size)
            call = run.measure(
                collective, groups.place, str(4 * elements),
                functools.partial(make, elements, mine, run.device) if mine is not None else _resting,
                timed=timed,
                flops=0.0, num_bytes=4.0 * elements, ranks=groups.size,
            )  # fmt: skip
            if call.seconds > run.most_seconds:
                break
    if mine is not None:
        dist.destroy_process_group(mine)


def _resting() -> Call:
    """What a rank does that has no part in a collective: it computes as long as the others."""
    return lambda: None


def _overlap(run: _Run, groups: LinkGroups) -> None:
    """An all-reduce over all ranks, matrix products that take as long, and both at once."""
    main = getattr(torch, DTYPES[run.device.type][0])
    tensor = torch.ones(OVERLAP_BYTES // 4, device=run.device)
    left, right = (torch.rand(512, 512, device=run.device).to(main) for _ in range(2))

    def measure(what: str, call: Callable[[], Any]) -> float:
        return run.measure("overlap", groups.place, what, lambda: call, flops=0.0, num_bytes=0.0).seconds

    communication = measure("communication", lambda: dist.all_reduce(tensor))
    product = measure("product", lambda: torch.mm(left, right))
    times = max(1, round(communication / product))

    def compute() -> None:
        for _ in range(times):
            torch.mm(left, right)

    def together() -> None:
        work = dist.all_reduce(tensor, async_op=True)
        compute()
        work.wait()

    measure("compute", compute)
    measure("together", together)


def machine_text(device: torch.device, world_size: int, per_host: int) -> str:
    """In one line where calls are measured: they are not mixed with those of another machine."""
    threads = f", {torch.get_num_threads()} threads each" if device.type == "cpu" else ""
    hosts = f"{world_size // per_host} × " if world_size > per_host else ""
    return f"{hosts}{per_host} × {_device_name(device)}{threads}, torch {torch.__version__}"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"process on {names[0] if names else platform.machine() or 'a processor'}"


def _memory(device: torch.device, per_host: int) -> tuple[float, float]:
    """Bytes of a device, and of those what tensors cannot have."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total), float(max(0, total - free - torch.cuda.memory_reserved(device)))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total / per_host, 0.0
