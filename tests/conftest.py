"""What holds for every test: kernels run without a GPU, and no process group is left behind for the next test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.order import dealt_out

# The same examples in every run: what passes on one machine passes on the next.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
# Tracing makes many objects, and what tests import is a heap of a million that is looked through for cycles each time.
gc.set_threshold(100_000, 20, 20)
# Test runners that read keys set them, and what is printed would be folded.
for _name in ("COLUMNS", "LINES"):
    os.environ.pop(_name, None)
# The tests are those of a machine without a GPU wherever they run; ``benchmarks.gpu`` is the proof on one.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Read when a kernel is defined, so before any test imports one.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["MESHWRIGHT_CACHE"] = ""  # nothing that another run left behind


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, slow ones come first."""
    num_processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if num_processes > 1:
        items[:] = dealt_out(items, num_processes)


def pytest_collection_finish() -> None:
    """What is imported stays: no later collection of garbage looks through it again."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def run_of_the_tests(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> None:
    """A folder that all processes of one run share, for ``tests.ranks``."""
    own = tmp_path_factory.getbasetemp()
    os.environ["MESHWRIGHT_TEST_RUN"] = str(own if worker_id == "master" else own.parent)
    os.environ["XDG_CACHE_HOME"] = os.environ["MESHWRIGHT_TEST_RUN"]  # rules found by running are not of the user's


@pytest.fixture(scope="module")
def models_traced_once() -> Iterator[None]:
    """For modules whose tests are not about tracing: see ``tests.tracing``."""
    from tests.tracing import traced_once

    with traced_once():
        yield


def _has_group() -> bool:
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()


@pytest.fixture(autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """A model compiled in the tests' own process joins a group of one; a module's own group stays."""
    had_group = _has_group()
    yield
    if not had_group and _has_group():
        import torch.distributed as dist

        dist.destroy_process_group()
