"""Launches that skip Triton's look at their arguments hand the same machine code the same values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton import JITFunction
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel

from benchmarks.compiled_gpu import DEVICES, _Driver
from runtime.kernels import normalization, rows
from runtime.kernels.repeated_launch import RepeatedKernel
from runtime.torch_compat.triton_launches import machine_launch

PARTIALS, TOTAL = torch.ones(20, 64), torch.empty(64, dtype=torch.bfloat16)
OPTIONS = {"COLUMNS": 32, "WIDE": triton.language.float32, "ROWS": 64}  # in another order than the kernel's
Launches = list[tuple[Any, ...]]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """Grid, code (by Triton's key of it) and values of every launch on a GPU that is not there; nothing is compiled."""
    noted: Launches = []

    def compile_nothing(
        kernel: Any, key: str, signature: Any, device: int, constants: Any, options: Any, *_: Any
    ) -> Any:
        compiled = CompiledKernel.__new__(CompiledKernel)
        compiled.name, compiled.src, compiled.function, compiled.packed_metadata = "", None, key, ()
        compiled.metadata = SimpleNamespace(maxnreg=options.maxnreg)
        compiled._run = lambda *values: noted.append((*values[:3], values[4], *values[9:]))
        kernel.device_caches[device][0][key] = compiled
        return compiled

    monkeypatch.setattr(JITFunction, "_do_compile", compile_nothing)
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda compiled: None)
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(DEVICES["sm_90"]))
    yield noted
    triton.runtime.driver._active = before


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels whose arguments Triton has looked at, a name for every launch."""
    names: list[str] = []
    run = JITFunction.run

    def noted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        names.append(kernel.fn.__name__)
        return run(kernel, *arguments, **options)

    monkeypatch.setattr(JITFunction, "run", noted)
    return names


def sums(kernel: Any) -> Callable[..., None]:
    def launch(partials: torch.Tensor, total: torch.Tensor, width: int = 64, grid: tuple[int, ...] = (2,)) -> None:
        kernel[grid](partials, total, len(partials), width, **OPTIONS)

    return launch


def test_like_launches_are_the_same(launches: Launches, looks: list[str]) -> None:
    launch = sums(RepeatedKernel(rows._sum_kernel.fn))
    for _ in range(3):
        launch(PARTIALS, TOTAL)
    assert len(looks) == 1
    assert launches[0][:3] == (2, 1, 1)
    assert launches[0][4:] == (PARTIALS, TOTAL, 20, 64, triton.language.float32, 64, 32)
    assert all([*map(id, one)] == [*map(id, launches[0])] for one in launches[1:])


def test_launches_of_other_kinds_are_what_triton_makes_of_them(launches: Launches, looks: list[str]) -> None:
    kernel, plain = RepeatedKernel(rows._sum_kernel.fn), JITFunction(rows._sum_kernel.fn)
    beside = torch.ones(20 * 64 + 1)[1:].view(20, 64)  # no multiple of 16 bytes
    kinds = [
        (PARTIALS, TOTAL), (beside, TOTAL), (PARTIALS, TOTAL.float()), (PARTIALS, TOTAL, 48), (PARTIALS, TOTAL, 47),
        (PARTIALS, TOTAL, 1), (PARTIALS, TOTAL, 64, (1,)), (PARTIALS[:1], TOTAL),
    ]  # fmt: skip
    for one in (kernel, kernel, plain):
        for kind in kinds:
            sums(one)(*kind)
    assert len(looks) == 2 * len(kinds)
    first, again, expected = (launches[start : start + len(kinds)] for start in range(0, 3 * len(kinds), len(kinds)))
    assert [[*map(id, one)] for one in again] == [[*map(id, one)] for one in first]
    assert [one[:4] for one in again] == [one[:4] for one in expected]
    assert len({one[3] for one in again}) == 6  # 48 and 64 columns run one code, and so do both grids


def test_pointers_that_are_none_and_values_by_name_are_handed_on(
    launches: Launches, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = normalization.kernels
    monkeypatch.setattr(kernels, "forward_kernel", RepeatedKernel(kernels.forward_kernel.fn))
    norm = normalization.Norm(1e-5, offset=1.0)
    x, weight = torch.randn(8, 48), torch.ones(48)
    for _ in range(2):
        normalization.normalize(norm, x, None, weight, None)
    assert looks == ["forward_kernel"]
    first, second = ([one for one in launch if not isinstance(one, torch.Tensor)] for launch in launches)
    assert first == second and [*map(type, launches[0])] == [*map(type, launches[1])]


def test_code_that_spills_is_kept_once_it_has_been_tried_with_more_room(
    launches: Launches, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.kernels.spill_free._spilled", lambda compiled: int(compiled.metadata.maxnreg is None))
    launch = sums(RepeatedKernel(rows._sum_kernel.fn))
    for _ in range(5):
        launch(PARTIALS, TOTAL)
    assert len(looks) == 3  # as it was, with more room, and once more to keep that
    assert [one[3] == launches[0][3] for one in launches] == [True, False, False, False, False]


def test_code_that_spills_is_not_kept_for_want_of_a_moment_to_compile(
    launches: Launches, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.kernels.spill_free._spilled", lambda compiled: int(compiled.metadata.maxnreg is None))
    launch = sums(RepeatedKernel(rows._sum_kernel.fn))
    launch(PARTIALS, TOTAL)
    with monkeypatch.context() as recording:
        recording.setattr("runtime.kernels.spill_free._may_compile", lambda: False)
        launch(PARTIALS, TOTAL)
    launch(PARTIALS, TOTAL)
    assert [one[3] == launches[0][3] for one in launches] == [True, True, False]


def test_what_was_kept_can_be_forgotten(launches: Launches, looks: list[str]) -> None:
    kernel = RepeatedKernel(rows._sum_kernel.fn)
    for _ in range(2):
        sums(kernel)(PARTIALS, TOTAL)
        kernel.forget()
    assert len(looks) == 2


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> tuple[CompiledKernel, Launches]:
    """Code on a GPU that is not there, and what its launcher's C function was called with; its stream is number 11."""
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 11 + index, raising=False)
    monkeypatch.setattr(CompiledKernel, "_init_handles", lambda compiled: None)
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda index: 11 + index)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    calls: Launches = []
    launcher = CudaLauncher.__new__(CudaLauncher)
    launcher.launch = lambda *values: calls.append(values)
    launcher.num_ctas, launcher.launch_cooperative_grid, launcher.launch_pdl = 1, False, True
    for name in ("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align"):
        setattr(launcher, name, 0)
    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel.module, kernel.function, kernel.packed_metadata, kernel._run = object(), 7, (4, 1, 0), launcher
    kernel.name, kernel.src = "sums", None
    return kernel, calls


GPU = torch.device("cuda", 0)


def test_machine_code_is_launched_as_triton_launches_it(compiled: tuple[CompiledKernel, Launches]) -> None:
    kernel, calls = compiled
    for launch in (kernel[(2, 3, 1)], machine_launch(kernel, (2, 3, 1), GPU)):
        launch(PARTIALS, 20, None)
    by_triton, ours = calls
    num_before_hooks = 10  # grid, stream, code, two options, two memories, packed metadata
    assert (
        ours[:num_before_hooks] == by_triton[:num_before_hooks] == (2, 3, 1, 11, 7, False, True, None, None, (4, 1, 0))
    )
    assert ours[num_before_hooks:] == (None, None, None, PARTIALS, 20, None)
    assert by_triton[num_before_hooks + 3 :] == (PARTIALS, 20, None)


def test_hooks_of_launches_are_called(compiled: tuple[CompiledKernel, Launches]) -> None:
    kernel, calls = compiled
    launch = machine_launch(kernel, (2, 3, 1), GPU)

    def hook(metadata: Any) -> None:
        return None

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launch(PARTIALS, 20, None)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert calls[0][10] is not None and calls[0][11] is triton.knobs.runtime.launch_enter_hook


def test_code_that_is_given_memory_is_launched_by_triton(compiled: tuple[CompiledKernel, Launches]) -> None:
    kernel, calls = compiled
    kernel._run.global_scratch_size = 64
    triton.set_allocator(lambda size, alignment, stream: "memory")
    machine_launch(kernel, (2, 3, 1), GPU)(PARTIALS, 20, None)
    assert calls[0][7] == "memory"
