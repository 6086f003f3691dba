"""One timed call, and the table of them that a run of the profiler leaves and goes on from."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from cost_models.files import write_text


@dataclass(frozen=True)
class MeasuredCall:
    """Seconds of one operator on a device, or of one collective in all groups of ``ranks`` ranks at once.

    Attributes:
        kind: kind of work (``cost_models.efficiency.KIND_STAND_IN``), ``"launch"``, ``"host"``, ``"overlap"``,
            ``SAME`` or a collective.
        place: dtype of an operator, level of links of a collective.
        shape: sizes joined by ``x``: they tell calls of one kind and place apart.
        flops, num_bytes: as the cost model counts them; of a collective the whole tensor's bytes.
        ranks: members of a group; 1 for operators.
    """

    kind: str
    place: str
    shape: str
    flops: float
    num_bytes: float
    ranks: int
    seconds: float

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.kind, self.place, self.shape, self.ranks

    @property
    def is_fitted(self) -> bool:
        """Whether curves are fitted to it: a hash of its key keeps a third of the calls back to judge them by."""
        digest = hashlib.sha256("/".join(map(str, self.key)).encode()).digest()
        return digest[0] % 3 != 0


#: Kind of the call that tells how a machine's speed changes.
SAME = "same"
#: How calls are timed, in words: those timed otherwise are not taken up.
_TIMED = (
    "operators on cold tensors into cold memory in rounds of 20 ms, collectives in chains behind milliseconds of"
    " compute, messages there and back"
)
_COLUMNS = tuple(entry.name for entry in fields(MeasuredCall))


def write_calls(path: Path, machine: str, calls: Iterable[MeasuredCall]) -> None:
    """Write calls as CSV behind a line that names machine and timing; the file appears whole or not at all."""
    text = io.StringIO()
    text.write(f"{_first_line(machine)}\n")
    table = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(asdict(call) for call in calls)
    write_text(path, text.getvalue())


def read_calls(path: Path, machine: str) -> list[MeasuredCall]:
    """The calls that an earlier run measured; none if there is no file, or of another machine or timing.

    Raises:
        ValueError: if the file is no table of calls.
    """
    if not path.exists():
        return []
    first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    if not first.startswith("# "):
        raise ValueError(f"'{path}' is no table that planner profile wrote: give another -o, or remove it")
    if first != _first_line(machine):
        return []
    try:
        return [_read_row(row) for row in csv.DictReader(lines)]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"'{path}' is damaged ({error}): remove it, or pass --fresh") from error


def _first_line(machine: str) -> str:
    return f"# {machine}: {_TIMED}"


def _read_row(row: dict[str, str]) -> MeasuredCall:
    return MeasuredCall(
        row["kind"], row["place"], row["shape"], float(row["flops"]), float(row["num_bytes"]), int(row["ranks"]),
        float(row["seconds"]),
    )  # fmt: skip
