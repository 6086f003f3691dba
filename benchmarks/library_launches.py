"""The kernels that a training step of a library model launches, on tensors without data: fused operators and chains."""

from __future__ import annotations

import hashlib
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.compiled_chains import LENGTHS, Operand, captured_at_longest, chained_program, run_of
from passes.chains import TRITON
from planner.library.configs import config_file
from runtime.kernels import library
from runtime.kernels.chain_call import Chain
from runtime.kernels.library import FusedOperator
from runtime.program_tools.typecheck import typecheck

#: Two layers of one kind have all the kernels: the first's, and those of one that follows its like.
_ALIKE = 2
#: So many have every layer that is not like the others: the longest period is Jamba's.
_MIXED = 8
#: What a config with layers of several kinds says, in a part of the name of an entry.
_KINDS = ("period", "interleave", "first_k", "index", "indices", "cross_attention_layers", "sliding_window", "types")
_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "encoder_layers",
           "decoder_layers", "depth")  # fmt: skip


class Launch(NamedTuple):
    """One call that launches kernels, forward and backward.

    Attributes:
        key: the operator or the chain, and a digest of its operands: the same for calls that launch the same code.
        name: of the operator or the chain.
    """

    key: str
    name: str
    run: Callable[[], None]


class ModelLaunches(NamedTuple):
    """What a step of a model launches: definitions of chains by backend, and distinct calls."""

    num_chains: int
    num_for_torch: int
    launches: tuple[Launch, ...]


def launches_of(model: str) -> ModelLaunches:
    """What a training step of a model on one device launches, in bfloat16 at the model's own widths.

    Raises:
        ValueError: if the model cannot be captured.
    """
    program = chained_program(_captured(model))
    launches: dict[str, Launch] = {}
    call_operator, call_chain = FusedOperator.__call__, Chain.__call__

    def operator(self: FusedOperator, *arguments: Any) -> Any:
        name = str(self.overload).removeprefix("meshwright.").removesuffix(".default")
        operands = [_operand(one) for one in arguments]
        _note(launches, name, "", operands, lambda: _run_operator(self, operands))
        return call_operator(self, *arguments)

    def chain(self: Chain, *tensors: torch.Tensor) -> Any:
        if self.backend == TRITON:
            operands = [_operand(one) for one in tensors]
            name = f"chain {self.plain.__name__.removesuffix('_plain')}"
            source = "".join(inspect.getsource(kernel.fn) for kernel in (self.forward, self.backward) if kernel)
            _note(launches, name, hashlib.sha256(source.encode()).hexdigest(), operands, run_of(self, operands))
        return call_chain(self, *tensors)

    with mock.patch.object(FusedOperator, "__call__", operator), mock.patch.object(Chain, "__call__", chain):
        typecheck(program)
    backends = [report.backend for report in program.chains]
    return ModelLaunches(backends.count(TRITON), len(backends) - backends.count(TRITON), tuple(launches.values()))


def _note(launches: dict[str, Launch], name: str, source: str, operands: list[Any], run: Callable[[], None]) -> None:
    text = f"{', '.join(map(str, operands))} {source}"
    key = f"{name} #{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    launches.setdefault(key, Launch(key, name, run))


def _operand(value: Any) -> Any:
    return Operand.of(value) if isinstance(value, torch.Tensor) else value


def _run_operator(operator: FusedOperator, operands: list[Any]) -> None:
    """Forward and, if an operand has a gradient, backward, as on a GPU: without torch's dispatcher, by Triton."""
    arguments = [one.tensor() if isinstance(one, Operand) else one for one in operands]
    with (
        mock.patch.object(library, "runs_triton", lambda tensor: True),
        mock.patch.object(library, "nobody_listens", lambda: True),
        mock.patch.object(library, "are_plain", lambda arguments: True),
    ):
        results = operator(*arguments)
        ends = [end for end in (results if isinstance(results, tuple) else (results,)) if end.requires_grad]
        leaves = [one for one in arguments if isinstance(one, torch.Tensor) and one.requires_grad]
        if ends:
            torch.autograd.grad(ends, leaves, [torch.empty_like(end) for end in ends], allow_unused=True)


def _captured(model: str) -> Any:
    """The graph of the model with a few layers, which have all the kernels, at the longest of the usual lengths."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        entries = json.loads(config_file(model).read_text(encoding="utf-8"))
        path.write_text(json.dumps(_shortened(entries, _num_layers(entries))), encoding="utf-8")
        options: dict[str, Any] = {"lengths": LENGTHS, "dtype": "bfloat16"}
        try:
            return captured_at_longest(str(path), **options)
        except ValueError:  # a config that does not add up with fewer layers
            return captured_at_longest(str(config_file(model)), **options)


def _num_layers(entries: Mapping[str, Any]) -> int:
    names = set(entries).union(*(one for one in entries.values() if isinstance(one, dict)))
    return _MIXED if any(kind in name for kind in _KINDS for name in names) else _ALIKE


def _shortened(entries: Any, layers: int) -> Any:
    if not isinstance(entries, dict):
        return entries
    counts = {entries[name] for name in _COUNTS if isinstance(entries.get(name), int)}
    short = {}
    for name, value in entries.items():
        if name in _COUNTS and isinstance(value, int):
            short[name] = min(value, layers)
        elif isinstance(value, list) and len(value) in counts:
            short[name] = value[:layers]
        else:
            short[name] = _shortened(value, layers)
    return short
