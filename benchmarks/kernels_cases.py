"""What ``benchmarks.kernels`` measures: operators, the sizes of models, and the bytes that each operator must move."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

#: Passes of an operator that are timed. "both" is forward and backward in one.
FORWARD, BACKWARD, BOTH = "forward", "backward", "both"
#: What the goals speak of.
NORM, ACTIVATION, ROTARY, LOSS = "norms", "activations", "rotary", "cross-entropy"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Size:
    """Sizes of a model, and of a batch of sequences."""

    name: str
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    groups: int
    head: int
    batch: int = 2
    length: int = 4096


LLAMA_8B = Size("Llama-8B", 4096, 14336, 128256, heads=32, groups=8, head=128)
LLAMA_70B = Size("Llama-70B", 8192, 28672, 128256, heads=64, groups=8, head=128)
GPT2 = Size("GPT-2", 768, 3072, 50257, heads=12, groups=12, head=64, batch=8, length=1024)
T5 = Size("T5-XL", 2048, 5120, 32128, heads=32, groups=32, head=64, batch=16, length=512)
SIZES = (LLAMA_8B, LLAMA_70B, GPT2, T5)
#: For machines without a GPU: to see that everything runs.
TINY = Size("tiny", 64, 160, 512, heads=4, groups=2, head=16, batch=2, length=16)


@dataclass(frozen=True)
class Input:
    """A tensor that an operator takes.

    Attributes:
        dims: fields of ``Size``.
        values: "normal", "around one", "positions" or "classes" (indices below the vocabulary).
        trained: whether its gradient is wanted.
        order: how its dims lie in memory, outermost first; empty for as they are.
    """

    dims: tuple[str, ...]
    values: str = "normal"
    trained: bool = True
    order: tuple[int, ...] = ()


@dataclass(frozen=True)
class Operator:
    """A fused operator.

    Attributes:
        inputs: by name, in the order of its arguments.
        moves: names of the tensors that must be read or written once, forward and backward: inputs, ``output`` or
            ``output_0``, ``output_1``, … and ``grad_`` of each of these. What need not be read again (statistics of a
            row, say) is not counted.
        goal: what it counts as in the goals; "" for none.
        planned: its name in the planner's graphs; "" for ``meshwright.<name>.default``.
    """

    name: str
    inputs: dict[str, Input]
    moves: tuple[str, str]
    goal: str = ""
    planned: str = ""

    @property
    def op(self) -> str:
        return self.planned or f"meshwright.{self.name}.default"


_ROWS = Input(("batch", "length", "hidden"))
_GATES = Input(("batch", "length", "intermediate"))
_SCALE = Input(("hidden",), "around one")
_SHIFT = Input(("hidden",))
#: As attention has them after its projections: heads stand before positions, but lie behind them.
_QUERY = Input(("batch", "heads", "length", "head"), order=(0, 2, 1, 3))
_KEY = Input(("batch", "groups", "length", "head"), order=(0, 2, 1, 3))
_ANGLES = Input(("length", "head"), "positions", trained=False)
_TABLES = {"cos": _ANGLES, "sin": _ANGLES}
_CLASSES = Input(("batch", "length"), "classes", trained=False)
_GATED = {"gate": _GATES, "up": _GATES}
_GATED_MOVES = ("gate up output", "grad_output gate up grad_gate grad_up")

OPERATORS: tuple[Operator, ...] = (
    Operator(
        "rms_norm", {"input": _ROWS, "weight": _SCALE}, goal=NORM,
        moves=("input weight output", "grad_output input weight grad_input grad_weight"),
    ),
    Operator(
        "add_rms_norm", {"input": _ROWS, "residual": _ROWS, "weight": _SCALE}, goal=NORM,
        moves=("input residual weight output_0 output_1",
               "grad_output_0 grad_output_1 output_0 weight grad_input grad_weight"),
    ),
    Operator(
        "layer_norm", {"input": _ROWS, "weight": _SCALE, "bias": _SHIFT}, goal=NORM,
        moves=("input weight bias output", "grad_output input weight grad_input grad_weight grad_bias"),
    ),
    Operator(
        "add_layer_norm", {"input": _ROWS, "residual": _ROWS, "weight": _SCALE, "bias": _SHIFT}, goal=NORM,
        moves=("input residual weight bias output_0 output_1",
               "grad_output_0 grad_output_1 output_0 weight grad_input grad_weight grad_bias"),
    ),
    Operator("swiglu", _GATED, goal=ACTIVATION, moves=_GATED_MOVES),
    Operator("geglu", _GATED, goal=ACTIVATION, moves=_GATED_MOVES),
    Operator(
        "bias_gelu", {"input": _GATES, "bias": Input(("intermediate",))}, goal=ACTIVATION,
        moves=("input bias output", "grad_output input bias grad_input grad_bias"),
    ),
    Operator(
        "rotary", {"input": _QUERY, **_TABLES}, goal=ROTARY,
        moves=("input cos sin output", "grad_output cos sin grad_input"),
    ),
    Operator(
        "rotary_interleaved", {"input": _QUERY, **_TABLES}, goal=ROTARY, planned="meshwright.rotary.default",
        moves=("input cos sin output", "grad_output cos sin grad_input"),
    ),
    Operator(
        "rotary_pair", {"query": _QUERY, "key": _KEY, **_TABLES}, goal=ROTARY,
        moves=("query key cos sin output_0 output_1", "grad_output_0 grad_output_1 cos sin grad_query grad_key"),
    ),
    Operator(
        "cross_entropy", {"logits": Input(("batch", "length", "vocabulary")), "target": _CLASSES}, goal=LOSS,
        planned="meshwright.cross_entropy", moves=("logits target", "logits target grad_logits"),
    ),
    Operator(
        "linear_cross_entropy",
        {"hidden": _ROWS, "weight": Input(("vocabulary", "hidden"), "narrow"), "target": _CLASSES},
        moves=("hidden weight target", "hidden weight target grad_hidden grad_weight"),
    ),
    Operator(
        "embedding", {"indices": _CLASSES, "weight": Input(("vocabulary", "hidden"))},
        # A row of the table for each row of the output.
        moves=("indices output output", "indices grad_output grad_weight"),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An operator at a size in a dtype."""

    operator: Operator
    size: Size
    dtype_name: str

    @property
    def label(self) -> str:
        return f"{self.operator.name} {self.size.name} {self.dtype_name}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    @property
    def trained(self) -> tuple[str, ...]:
        return tuple(name for name, spec in self.operator.inputs.items() if spec.trained)

    def tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Its inputs, the same at every call."""
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)
        operands = {
            name: _tensor(spec, self.size, self.dtype, device, generator) for name, spec in self.operator.inputs.items()
        }
        if "sin" in operands:
            operands |= {"cos": operands["cos"].cos(), "sin": operands["sin"].sin()}
        return {name: tensor.requires_grad_(self.operator.inputs[name].trained) for name, tensor in operands.items()}

    def bytes_moved(self, inputs: dict[str, torch.Tensor], outputs: Sequence[torch.Tensor]) -> dict[str, int]:
        """Bytes that each pass must move; a scalar output counts as nothing."""
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in inputs.items()}
        results = {f"output_{place}": output for place, output in enumerate(outputs)} | {"output": outputs[0]}
        sizes |= {name: output.numel() * output.element_size() for name, output in results.items()}
        forward, backward = (
            sum(sizes[name.removeprefix("grad_")] for name in moves.split()) for moves in self.operator.moves
        )
        return {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}


def _tensor(
    spec: Input, size: Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    shape = [getattr(size, dim) for dim in spec.dims]
    order = spec.order or tuple(range(len(shape)))
    lying = [shape[dim] for dim in order]
    tensor = _VALUES[spec.values](lying, size, dtype, device, generator)
    return tensor.permute([order.index(dim) for dim in range(len(shape))])


Maker = Callable[[list[int], Size, torch.dtype, torch.device, torch.Generator | None], torch.Tensor]


def _normal(scale: Callable[[list[int]], float], offset: float = 0.0) -> Maker:
    def make(
        shape: list[int], size: Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
    ) -> torch.Tensor:
        values = torch.randn(shape, dtype=dtype, device=device, generator=generator)
        return values.mul_(scale(shape)).add_(offset)

    return make


def _classes(
    shape: list[int], size: Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    return torch.randint(0, size.vocabulary, shape, device=device, generator=generator)


def _positions(
    shape: list[int], size: Size, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    """Angles [length, head]: each frequency twice, as halves of a row."""
    half = shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
    angles = torch.arange(shape[0], device=device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles, angles), dim=-1).to(dtype)


_VALUES: dict[str, Maker] = {
    "normal": _normal(lambda shape: 1.0),
    "around one": _normal(lambda shape: 0.1, 1.0),
    "narrow": _normal(lambda shape: 1.0 / math.sqrt(shape[-1])),
    "classes": _classes,
    "positions": _positions,
}

_ALL = " ".join(operator.name for operator in OPERATORS)
#: The product takes seconds in float32 at the size of a Llama.
_BUT_LINEAR = _ALL.replace("linear_cross_entropy ", "")
#: Which operators are measured at which sizes by default, most wanted first; the goals are about Llama-8B.
DEFAULT: tuple[tuple[Size, str, str], ...] = (
    (LLAMA_8B, "bf16", _ALL),
    (LLAMA_8B, "fp32", _BUT_LINEAR),
    (LLAMA_70B, "bf16", "rms_norm add_rms_norm swiglu rotary_pair"),
    (GPT2, "bf16", "layer_norm add_layer_norm bias_gelu cross_entropy"),
    (GPT2, "fp32", "layer_norm linear_cross_entropy"),
    (T5, "bf16", "rms_norm add_rms_norm geglu cross_entropy"),
)
QUICK = ((LLAMA_8B, "bf16", "rms_norm add_rms_norm layer_norm swiglu geglu bias_gelu rotary_pair cross_entropy"),)
EVERY = tuple((size, dtype, _ALL) for size in SIZES for dtype in DTYPES)
TINY_CASES = tuple((TINY, dtype, _ALL) for dtype in DTYPES)


def cases(rows: Iterable[tuple[Size, str, str]], only: Sequence[str] = ()) -> list[Case]:
    """The cases of such a table, of the operators ``only`` if some are given."""
    by_name = {operator.name: operator for operator in OPERATORS}
    return [
        Case(by_name[name], size, dtype)
        for size, dtype, names in rows
        for name in names.split()
        if not only or name in only
    ]
