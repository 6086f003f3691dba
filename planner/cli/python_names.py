"""Errors in the words of the command line: what functions of Python call by arguments' names has options here."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from typing import NamedTuple


class _Row(NamedTuple):
    """``pattern`` in an error's text, said as ``words`` where the command has the option of the parsed name ``option``.

    Only what is no English word stands alone.
    """

    option: str
    pattern: str
    words: str | Callable[[re.Match[str]], str]


def _gib(match: re.Match[str]) -> str:
    """``--memory`` with bytes as GiB, up to a tenth more."""
    return f"--memory {math.ceil(int(match[1]) / 2**30 * 10) / 10:g}GiB"


#: In the order in which they are tried.
_ROWS = (
    _Row("memory", r"\bmemory_limit=(\d+)(?: \([^()]*\))?", _gib),
    _Row("memory", r"\bmemory_limit\b", "--memory"),
    _Row("global_batch", r"\bbatch_size \(global_batch, --global-batch\)", "--global-batch"),
    _Row("global_batch", r"(?<!-)\b(?:global_batch|batch_size)\b", "--global-batch"),
    _Row("seq_len", r"\bseq_len\b", "--seq-len"),
    _Row("devices", r"\bnum_devices\b", "--devices"),
    _Row("time_limit", r"\btime_limit\b", "--time-limit"),
    _Row("max_programs", r"\bmax_programs\b", "--max-programs"),
    _Row("target_seconds", r"\btarget_seconds\b", "--target-seconds"),
    _Row("alternatives", r"\bnum_alternatives\b", "--alternatives"),
    _Row("gradient_dtype", r"\bgradient_dtype\b", "--gradient-dtype"),
    _Row("overlap_tensor", r"\boverlap_tensor\b(?:=True)?", "--overlap-tensor"),
    _Row("write_lp", r"\bwrite_lp\b", "--write-lp"),
    _Row("framework", r"\bframework='([^']*)'", r"--for \1"),
    _Row("forbid", r"\bforbid_collectives='([^']*)'", r"--forbid \1"),
    _Row("forbid", r"\bforbid_collectives\b", "--forbid"),
    _Row("pin", r"\bfix, forbid or constraints\b", "--fix, --forbid or --pin"),
    _Row("offload", r"\boffload=['\"]([a-z]+)['\"]", r"--offload \1"),
    _Row("objective", r"\bobjective=['\"]([a-z]+)['\"]", r"--objective \1"),
    _Row("prompt_len", r"\bprompt_len\b", "--prompt-len"),
    _Row("new_tokens", r"\bnew_tokens\b", "--new-tokens"),
    _Row("price", r"\bdevice_hour_price\b", "--price"),
)


def in_options(text: str, options: argparse.Namespace) -> str:
    """An error's text with the options of the command that was given in the place of Python's arguments."""
    for row in _ROWS:
        if hasattr(options, row.option):
            text = re.sub(row.pattern, row.words, text)
    return text
