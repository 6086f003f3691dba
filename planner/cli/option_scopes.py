"""Options that a way of planning takes; what else is set is refused, never left aside."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator

_MODEL = frozenset(("model", "dtype"))
_BATCH = frozenset(("seq_len", "global_batch"))
#: Of one search, whatever is searched.
_SEARCH = frozenset(
    (
        "fix", "headroom", "alternatives", "optimizer", "gradient_dtype", "compiled", "overlap_tensor", "offload",
        "no_fuse", "time_limit", "max_programs", "solver",
    )
)  # fmt: skip

#: Of ``--serve``, of islands, and of a cache of frozen layers' outputs.
SERVING = frozenset(("serve", "prompt_len", "new_tokens", "batch"))
ISLANDS = frozenset(("loss_budget", "inner_steps", "wire_format", "synchronous_share"))
CACHING = frozenset(("cache_memory", "cache_disk", "cache_speed"))

#: What may be set beside ``--serve``, beside a cluster of islands, and beside ``--freeze``.
TAKEN_BY_SERVING = _MODEL | SERVING | {"cluster", "mesh", "unequal", "output", "verbose"}
TAKEN_BY_ISLANDS = _MODEL | _BATCH | _SEARCH | ISLANDS | {"cluster", "output"}
TAKEN_BY_FREEZE = (
    _MODEL | _BATCH | _SEARCH | CACHING | {"cluster", "unequal", "memory", "pin", "forbid", "devices", "freeze"}
)


def flag(name: str) -> str:
    """The option whose value is ``name`` of the parsed options."""
    return {"framework": "--for"}.get(name, f"--{name.replace('_', '-')}")


def options_set(options: argparse.Namespace, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Names of the options whose values are not the parser's defaults."""
    for name, value in vars(options).items():
        if name != "command" and value != parser.get_default(name):
            yield name


def refuse_beside(
    options: argparse.Namespace, parser: argparse.ArgumentParser, taken: Collection[str], *, beside: str
) -> None:
    """Raise ValueError for an option that is set and not among ``taken``; ``beside``: what does not take it."""
    for name in options_set(options, parser):
        if name not in taken:
            raise ValueError(f"{flag(name)} does not go with {beside}: drop one of them")


def refuse_alone(options: argparse.Namespace, names: Collection[str], *, without: str) -> None:
    """Raise ValueError for one of the options ``names`` that is set; ``without``: what gives it a meaning."""
    for name in sorted(names):
        if getattr(options, name) not in (None, False):
            raise ValueError(f"{flag(name)} {without}")
