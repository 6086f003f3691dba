"""``results/coverage.md``, written from the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from benchmarks.coverage.model_reasons import model_reason
from benchmarks.coverage.rows import Row

_HEAD = """# Coverage of transformers' model types

Written by `python -m benchmarks.coverage --page` from `coverage.jsonl`, where every outcome stands with the commit that
it was measured at (transformers 5.23, torch 2.13, CPU). `verify` is dp=2,tp=2, `pipeline` is pp=2,dp=2: loss, norm,
every gradient and the weights after three AdamW steps against the model on one device, in float64 to 1e-9, or in
float32 to 1e-5 where the model does not run in float64 (`planner.verify` lets pass what rounding explains, saying so).
"""

#: What ``_blamed`` says of a type in whose way nothing of ours stands.
_OF_MODEL = frozenset({"the model's"})


def page(rows: Mapping[str, Row]) -> str:
    """The page: counts, then every type by what holds of it."""
    built = [row for row in rows.values() if row.passed("eager")]
    lines = [
        _HEAD,
        *_counts(rows, built),
        "",
        *_failures("Trained in eager, and a stage failed", built),
        *_names("Verified, with a pipeline too", built, lambda row: row.passed("verify") and row.passed("pipeline")),
        *_names(
            "Verified, a pipeline not tried",
            built,
            lambda row: row.passed("verify") and "pipeline" not in row.outcomes,
        ),
        *_names(
            "Captured, not tried to verify",
            built,
            lambda row: row.captured and "verify" not in row.outcomes,
        ),
        *_names("Trained in eager, nothing more tried", built, lambda row: set(row.outcomes) <= {"build", "eager"}),
        *_unbuilt(rows),
    ]
    return "\n".join(lines) + "\n"


def _counts(rows: Mapping[str, Row], built: list[Row]) -> list[str]:
    own = [row for row in rows.values() if _own_reason(row)]
    ruled = [row.outcomes["verify"].facts for row in built if row.passed("verify")]
    shares = [facts["share_without_rule"] for facts in ruled if "share_without_rule" in facts]
    loose = [row for row in built if row.passed("verify") and row.outcomes["verify"].facts.get("tolerance") == 1e-5]
    return [
        "| | types |",
        "|---|---|",
        f"| have a class that takes labels | {len(rows)} |",
        f"| cannot be trained on one device, for a reason of their own | {len(own)} |",
        f"| built tiny and trained a step in eager | {len(built)} |",
        f"| not built or not trained by the benchmark yet | {len(rows) - len(built) - len(own)} |",
        f"| tried to capture | {_count(built, lambda row: row.captured or row.failed('capture'))} |",
        f"| captured | {_count(built, lambda row: row.captured)} |",
        f"| tried to verify on dp=2,tp=2 | {_count(built, lambda row: 'verify' in row.outcomes)} |",
        f"| verified | {_count(built, lambda row: row.passed('verify'))} |",
        f"| of these in float32, to 1e-5 | {len(loose)} |",
        f"| tried with a pipeline | {_count(built, lambda row: 'pipeline' in row.outcomes)} |",
        f"| verified with a pipeline | {_count(built, lambda row: row.passed('pipeline'))} |",
        f"| failed behind eager, for a reason of ours | {_count(built, lambda row: 'ours' in _blamed(row))} |",
        "| failed behind eager, for a reason of the model's alone "
        f"| {_count(built, lambda row: _blamed(row) == _OF_MODEL)} |",
        f"| at most 1% of the compute in operators without a rule, of {len(shares)} whose share was recorded "
        f"| {sum(share <= 0.01 for share in shares)} |",
        "",
        *_commits(built),
    ]


def _commits(rows: Iterable[Row]) -> list[str]:
    """The commits that the outcomes of ``verify`` and ``pipeline`` were measured at."""
    commits = Counter(
        outcome.commit for row in rows for stage, outcome in row.outcomes.items() if stage in ("verify", "pipeline")
    )
    return ["Measured at: " + ", ".join(f"{commit} ({count})" for commit, count in sorted(commits.items())) + "."]


def _count(rows: Iterable[Row], holds: Callable[[Row], bool]) -> int:
    return sum(map(holds, rows))


def _names(title: str, rows: list[Row], holds: Callable[[Row], bool]) -> list[str]:
    names = sorted(row.model_type for row in rows if holds(row))
    return [f"## {title} ({len(names)})", "", ", ".join(names) or "None.", ""]


def _failures(title: str, rows: list[Row]) -> list[str]:
    failed = [
        (row, stage, outcome)
        for row in sorted(rows, key=lambda row: row.model_type)
        for stage, outcome in row.outcomes.items()
        if not outcome.passed
    ]
    lines = [
        f"| {row.model_type} | {stage} | {outcome.commit} | {_whose(outcome.reason)} | {_sentence(outcome.reason)} |"
        for row, stage, outcome in failed
    ]
    number = len({row.model_type for row, _, _ in failed})
    return [f"## {title} ({number})", "", "| type | stage | at | whose | reason |", "|---|---|---|---|---|", *lines, ""]


def _whose(reason: str) -> str:
    """Ours, unless a pattern says that it is the model's."""
    return "ours" if model_reason(reason) is None else "the model's"


def _blamed(row: Row) -> frozenset[str]:
    """Whose the reasons are for which stages of a type failed."""
    return frozenset(_whose(outcome.reason) for outcome in row.outcomes.values() if not outcome.passed)


def _unbuilt(rows: Mapping[str, Row]) -> list[str]:
    """Types that the benchmark did not train, those with a reason of the model's first."""
    missing = [row for _, row in sorted(rows.items()) if not row.passed("eager")]
    own = [f"| {row.model_type} | {row.class_name} | {_own_reason(row)} |" for row in missing if _own_reason(row)]
    rest = [row for row in missing if not _own_reason(row)]
    others = [f"| {row.model_type} | {row.class_name} | {_cell(_last_reason(row))} |" for row in rest]
    head = ["", "| type | class | reason |", "|---|---|---|"]
    return [
        f"## Cannot be trained on one device either ({len(own)})", *head, *own, "",
        f"## Not built or not trained by the benchmark yet: its sizes or inputs ({len(others)})", *head, *others,
    ]  # fmt: skip


def _own_reason(row: Row) -> str | None:
    return model_reason(_last_reason(row))


def _last_reason(row: Row) -> str:
    reasons = [row.outcomes[stage].reason for stage in ("build", "eager") if row.failed(stage)]
    return reasons[-1] if reasons else ""


def _sentence(reason: str) -> str:
    """What stands in the way: in our words if it is the model's."""
    return model_reason(reason) or _cell(reason)


def _cell(reason: str) -> str:
    return reason.replace("|", "\\|")[:200]
