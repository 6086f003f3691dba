"""Choosing among a kernel's launch options by running them, once for each kind of call, with the answers on disk.

Only for kernels whose results do not depend on the choice: ranks that hold the same tensor tune apart from each other,
and must go on holding the same. Nothing is tuned but on a real GPU; whoever calls sees to that.

One file an answer, in ``$MESHWRIGHT_CACHE`` or ``~/.cache/meshwright``, named by what it answers, which it repeats. A
file that is not what its name promises, or whose answer is not among the options any more, is as good as none. It is
put in place whole, so processes may read and write at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

#: Environment variable with the folder of the cache.
VARIABLE = "MESHWRIGHT_CACHE"
_ROUNDS = 5
_RUNS_A_ROUND = 10

#: The key that distinguishes one kind of call from another.
Key = Mapping[str, Any]
#: Launch options, as JSON can hold them: numbers, and tuples of numbers.
Choice = TypeVar("Choice", bound=tuple[int, ...])

_known: dict[str, tuple[int, ...]] = {}


def cache_folder() -> Path:
    """The folder in which answers are cached."""
    folder = os.environ.get(VARIABLE)
    return Path(folder) if folder else Path.home() / ".cache" / "meshwright"


def best(key: Key, candidates: Sequence[Choice], time_of: Callable[[Choice], float]) -> Choice:
    """The fastest candidate: from this process or the cache, else measured and stored.

    Args:
        key: what the answer depends on: source, device, versions, shapes, dtypes (``environment_of`` gives some).
        candidates: the options, none twice; with one there is nothing to measure.
        time_of: seconds, or any other number that is smaller for the better one; infinity if it cannot run.
    """
    if len(candidates) == 1:
        return candidates[0]
    name = _name_of(key)
    cached = _known.get(name) or _read(name, key)
    choice = next((candidate for candidate in candidates if candidate == cached), None)
    if choice is None:
        choice = min(candidates, key=time_of)
        _write(name, key, choice)
    _known[name] = choice
    return choice


def environment_of(device: torch.device) -> dict[str, str]:
    """The environment that every answer depends on besides the kernel and its operands."""
    import triton

    return {"device": torch.cuda.get_device_name(device), "triton": triton.__version__}


def bucket_of(size: int) -> int:
    """The power of two above a size: calls of like sizes share an answer."""
    return 1 << max(size - 1, 0).bit_length()


def rounded_up(size: int) -> int:
    """A size with three leading bits: at most a quarter above ``size``, and no more than the power of two above it."""
    shift = max(size.bit_length() - 3, 0)
    return -(-size >> shift) << shift


def device_seconds(run: Callable[[], object]) -> float:
    """Seconds that ``run()`` takes on the current CUDA device, the least of some rounds."""
    run()
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_RUNS_A_ROUND):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / _RUNS_A_ROUND)
    return min(times)


@functools.cache
def digest(source: str) -> str:
    """A short name for a kernel's source."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _name_of(key: Key) -> str:
    return digest(json.dumps(key, sort_keys=True))


def _path_of(name: str) -> Path:
    return cache_folder() / "autotune" / f"{name}.json"


def _read(name: str, key: Key) -> tuple[int, ...] | None:
    try:
        entry = json.loads(_path_of(name).read_text(encoding="utf-8"))
        return tuple(entry["choice"]) if entry["key"] == json.loads(json.dumps(key)) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(name: str, key: Key, choice: tuple[int, ...]) -> None:
    """Write the answer to the cache; where nothing can be written, it is measured again next time."""
    path = _path_of(name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump({"key": key, "choice": choice}, file)
        os.replace(file.name, path)
