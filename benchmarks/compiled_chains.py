"""The kernels of chains on tensors without data: those of the golden files, and of the library's models."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.compiled_cases import Case
from passes.chains import TRITON, chain_up
from passes.emit import Program, emit
from passes.ir.graph import Graph
from planner.fusing import fused_for_planning
from planner.planning import capture_for_planning
from runtime.kernels import chain_call as chain_module
from runtime.kernels.chain_call import Chain
from runtime.program_tools.typecheck import typecheck
from tests.chain_graphs import GraphMaker, programs_of, sharded_of

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
Shape = tuple[int, ...]
#: Tokens in a sample, or as many as a model has positions for.
LENGTHS = (2048, 1024, 512, 64, 16, None)
_numbers = itertools.count()


class Operand(NamedTuple):
    """What a kernel's code depends on of a tensor that it reads."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Operand:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def tensor(self) -> torch.Tensor:
        """One without data."""
        empty = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")
        return empty.requires_grad_(self.requires_grad)


def golden_cases(widths: Sequence[int], dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """Every Triton chain of the golden files, with operands of the sizes of real models in the place of tiny ones."""
    seen = set()
    for path in sorted(GOLDEN.glob("*.py")):
        source = path.read_text(encoding="utf-8")
        for dtype, width in itertools.product(dtypes if "'bfloat16'" in source else dtypes[:1], widths):
            loaded = _loaded(source.replace("'bfloat16'", repr(str(dtype).removeprefix("torch."))), path.stem)
            for name, chain in loaded.items():
                key = (name, *chain.inputs.items(), width)
                if key not in seen:  # Models of one family have the same chains.
                    seen.add(key)
                    run = run_of(chain, _golden_operands(path.stem, width, chain))
                    yield Case(f"chain {path.stem}.{name}", f"width {width:,}", dtype, run)


def _loaded(source: str, name: str) -> dict[str, Chain]:
    program = Program(source, f"golden_{name}_{next(_numbers)}", None, (), (), (), (), None, True)  # type: ignore[arg-type]
    chains = {key: value for key, value in program.load().items() if isinstance(value, Chain)}
    return {key: chain for key, chain in chains.items() if chain.backend == TRITON}


def _golden_shapes(width: int) -> Mapping[str, Mapping[str, Shape]]:
    """First word of a golden program's name → sizes of what its chains read, by name."""
    tokens, row, channels = (8, 2048, width), (width,), (1, 256, 1, 1)
    running = (256,)
    return {
        "bert": {"word_embeddings": tokens, "token_type_embeddings": tokens, "position_embeddings": (1, 2048, width)},
        "buffers": {"activation": (16384, width), "mean": row},
        "chained": {"hidden": tokens, "gate_bias": row, "mask": (2048, width)},
        "experts": {"one_hot": (8, 2048, 64), "probabilities": (8, 2048, 64), "x": tokens, "product": tokens},
        "images": {
            **{"stem": (64, 256, 56, 56), "difference": (64, 256, 56, 56), "mean": channels, "inverse_root": channels},
            **{"stem_weight": channels[1:], "stem_bias": channels[1:], "running_mean": running, "product": running},
        },
        "llama": {"angles": (1, 8192, 64)},
        "t5": {"shifted": (64, 512)},
        "tied": {"middle": tokens, "scale": row, "shift": row},
        "vocabulary": {"middle": tokens, "scale": row, "shift": row},
    }


def _golden_operands(program: str, width: int, chain: Chain) -> list[Operand]:
    """Operands of the sizes that ``_golden_shapes`` gives them."""
    shapes = _golden_shapes(width).get(program.split("_")[0], {})
    unknown = [name for name in chain.inputs if name not in shapes]
    if unknown:
        raise ValueError(
            f"a chain of the golden program {program} reads {', '.join(unknown)}: say in compiled_chains.py how large "
            "that is"
        )
    return [
        Operand(shapes[name], torch.empty(shapes[name], device="meta").stride(), dtype, dtype.is_floating_point)
        for name, dtype in chain.inputs.items()
    ]


def sample_cases() -> Iterator[Case]:
    """Chains by hand, which have what the golden files' lack."""
    for make in (_walking, _flat, _odd):
        graph = make()
        (chain,) = [value for value in programs_of(graph)[0].load().values() if isinstance(value, Chain)]
        values = {value.name: value for value in (*graph.inputs, *(state.value for state in graph.states))}
        operands = [
            Operand(value.shape, torch.empty(value.shape, device="meta").stride(), dtype, value.requires_grad)
            for value, dtype in ((values[name], dtype) for name, dtype in chain.inputs.items())
        ]
        yield Case(
            f"chain of {make.__name__.strip('_')} elements",
            str(operands[0].shape),
            operands[0].dtype,
            run_of(chain, operands),
        )


def _walking() -> Graph:
    """Every kind of sum, a row reduction, and most of the functions."""
    maker = GraphMaker()
    x, bias = maker.input("x", (2, 4096, 2048), "bfloat16"), maker.weight("bias", (2048,), "bfloat16")
    column, number = maker.input("column", (2, 4096, 1), "bfloat16"), maker.input("number", (), "bfloat16")
    value = maker.call("gelu", maker.call("add.Tensor", x, bias))
    value = maker.call("mul.Tensor", maker.call("tanh", value), column)
    value = maker.call("maximum", maker.call("div.Tensor", value, number), maker.call("sigmoid", x))
    return maker.graph(value, maker.call("amax", maker.call("clamp", value, -1.0, 1.0), [-1]))


def _flat() -> Graph:
    """Elements alone, a value that is kept, and whole numbers."""
    maker = GraphMaker()
    x, y = (maker.input(name, (4096, 14336), "bfloat16") for name in "xy")
    labels = maker.input("labels", (4096, 14336), "int64")
    value = maker.call("relu", maker.call("add.Tensor", x, y))
    valid = maker.call("ne.Scalar", labels, -100)
    return maker.graph(maker.call("where.ScalarOther", valid, maker.call("mul.Tensor", value, value), 0.0))


def _odd() -> Graph:
    """Odd sizes, with operands that walk through the rows in their own ways."""
    maker = GraphMaker()
    x, mask = maker.input("x", (2, 3, 401, 501), "float32"), maker.input("mask", (2, 1, 1, 501), "bool")
    value = maker.call("mul.Tensor", maker.call("tanh", x), maker.input("scale", (3, 1, 501), "float32"))
    return maker.graph(maker.call("masked_fill.Scalar", value, mask, 0.1))


def run_of(chain: Chain, operands: Sequence[Operand]) -> Callable[[], None]:
    """Launches the kernels of a chain, forward and, if an operand has a gradient, backward."""

    def run() -> None:
        tensors = [operand.tensor() for operand in operands]
        with (
            # the tile that was chosen for another device is not this one's
            mock.patch.object(chain, "_launches", {}),
            mock.patch.object(chain_module, "_are_real", lambda tensors: True),
            mock.patch.object(Chain, "_is_on_device", lambda chain, tensors: True),
            # what follows a kernel on its device, and compiles nothing here
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        ):
            results = chain(*tensors)
            ends = [end for end in (results if isinstance(results, tuple) else (results,)) if end.requires_grad]
            leaves = [tensor for tensor in tensors if tensor.requires_grad]
            if ends:
                torch.autograd.grad(ends, leaves, [torch.empty_like(end) for end in ends], allow_unused=True)

    return run


class ModelChains(NamedTuple):
    """The chains of a model of the library: distinct definitions by backend, and launches of Triton's."""

    model: str
    triton: int
    inductor: int
    cases: tuple[Case, ...]


def chains_of_model(model: str) -> ModelChains:
    """The chains of a training step on one device, as they are called.

    Raises:
        ValueError: if the model cannot be captured.
    """
    program = chained_program(captured_at_longest(model))
    calls: dict[tuple[Any, ...], Chain] = {}
    plain = Chain.__call__

    def call(chain: Chain, *tensors: torch.Tensor) -> Any:
        calls[chain.plain.__name__, *map(Operand.of, tensors)] = chain
        return plain(chain, *tensors)

    with mock.patch.object(Chain, "__call__", call):
        typecheck(program)
    cases = tuple(
        Case(f"chain {name.removesuffix('_plain')}", model, operands[0].dtype, run_of(chain, operands))
        for (name, *operands), chain in calls.items()
        if chain.backend == TRITON
    )
    backends = [report.backend for report in program.chains]
    return ModelChains(model, backends.count(TRITON), len(backends) - backends.count(TRITON), cases)


def chained_program(graph: Graph) -> Program:
    """The program of a training step on one device, fused and with its chains."""
    return emit(chain_up(sharded_of(fused_for_planning(graph)[0])))


def captured_at_longest(model: str, *, lengths: Sequence[int | None] = LENGTHS, **options: Any) -> Graph:
    """The graph of two samples of the first of ``lengths`` (None: the model's own) that the model has positions for.

    Raises:
        ValueError: if the model cannot be captured.
    """
    for length in lengths:
        try:
            return capture_for_planning(model, batch_size=2, seq_len=length, **options)
        except ValueError as error:
            if "seq_len" not in str(error) or length == lengths[-1]:
                raise
    raise AssertionError("unreachable")
