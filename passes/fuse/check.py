"""Check a match: run the matched operators and the fused one side by side on random tensors, with gradients.

Both run in float64, casts included, so that rounding does not hide a difference. Dims are made small first: every large
size becomes a small one of its own wherever it stands, also in the arguments.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from passes.capture.interpret import run_node
from passes.ir.graph import Node, Ref, Value, map_refs
from passes.ir.recent_results import RecentResults

#: Sizes up to this stay as they are.
LARGE = 4
#: Most elements that a tensor of the check may have.
MOST_ELEMENTS = 1 << 19
#: Largest difference, relative to the largest entry, that rounding in float64 explains.
EXACT = 1e-11
#: The same for constants that are written with fewer digits than float64 has.
ROUNDED = 1e-6
#: Scales of the random inputs: at the smaller one, what is added under a root counts.
_SCALES = (1.0, 1e-2)
_FORCED = "MESHWRIGHT_KERNELS"

#: Shape and dtype of an input.
_Spec = tuple[tuple[int, ...], str]
_Nodes = Sequence[Node]
#: Differences, or why there is none.
_outcomes: RecentResults[float | str] = RecentResults(1024)


class CannotRun(Exception):
    """The two sides cannot be run; the message says why."""


def difference(
    matched: _Nodes,
    fused: _Nodes,
    values: Mapping[str, Value],
    *,
    results: tuple[Sequence[str], Sequence[str]] | None = None,
) -> float:
    """Largest difference of results and gradients relative to the largest entry; each distinct pair is run once.

    Args:
        matched: the matched operators, in order.
        fused: the nodes that replace them.
        values: every value that either side takes.
        results: names of the values to compare, on either side; None for the output of each side's last operator.

    Raises:
        CannotRun: if an operator fails, or a tensor is too large whatever is made smaller.
    """
    produced = {value.name for node in matched for value in node.outputs}
    inputs = list(dict.fromkeys(name for node in matched for name in node.inputs if name not in produced))
    names = _short_names(inputs, matched, fused)
    results = results or ([matched[-1].output.name], [fused[-1].output.name])
    failure = "a tensor is too large to be tried out"
    for sizes in _ways_to_shrink(inputs, matched, values):
        specs = tuple((_resized(values[name].shape, sizes), values[name].dtype) for name in inputs)
        outputs = [value.shape for node in (*matched, *fused) for value in node.outputs]
        shapes = [shape for shape, _ in specs] + [_resized(shape, sizes) for shape in outputs]
        if any(math.prod(shape) > MOST_ELEMENTS for shape in shapes):
            continue
        sides = tuple(
            _Side(tuple(_small(node, sizes, names) for node in nodes), tuple(names[name] for name in compared))
            for nodes, compared in zip((matched, fused), results)
        )
        outcome = _outcomes.get((repr(sides), specs), partial(_compared, sides, specs))
        if not isinstance(outcome, str):
            return outcome
        failure = outcome
    raise CannotRun(failure)


def _ways_to_shrink(inputs: Sequence[str], nodes: _Nodes, values: Mapping[str, Value]) -> list[dict[int, int]]:
    """Large size → small size: of all dims that are nowhere the last one; of all; of those that are nowhere but among
    the first two, since others may be taken apart and put together (heads)."""
    shapes = [values[name].shape for name in inputs] + [value.shape for node in nodes for value in node.outputs]
    large = sorted({size for shape in shapes for size in shape if size > LARGE})
    last = {shape[-1] for shape in shapes if shape}
    inner = last.union(*(shape[2:] for shape in shapes))
    outer, first = ([size for size in large if size not in excluded] for excluded in (last, inner))
    return [
        {size: 2 + place for place, size in enumerate(outer)},
        {size: LARGE + 2 + 2 * place for place, size in enumerate(large)},
        {size: 2 + place for place, size in enumerate(first)},
        _halved_alike(large),
    ]


def _halved_alike(sizes: Sequence[int]) -> dict[int, int]:
    """Large size → small size, where what is twice as large stays so: of tensors that are split in two."""
    small: dict[int, int] = {}
    for place, size in enumerate(sizes):
        half = small.get(size // 2) if size % 2 == 0 else None
        small[size] = LARGE + 2 + 2 * place if half is None else 2 * half
    return small


def _resized(sizes: Sequence[int], small: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(small.get(size, size) for size in sizes)


def _short_names(inputs: Sequence[str], matched: _Nodes, fused: _Nodes) -> dict[str, str]:
    """Names that do not depend on where in the graph the match stands."""
    names = {name: f"input{place}" for place, name in enumerate(inputs)}
    for side, nodes in (("matched", matched), ("fused", fused)):
        produced = [value.name for node in nodes for value in node.outputs]
        names.update((name, f"{side}{place}") for place, name in enumerate(produced) if name not in inputs)
    return names


def _small(node: Node, sizes: Mapping[int, int], names: Mapping[str, str]) -> Node:
    """The call in float64 with sizes made small, and without what says where it came from."""
    outputs = tuple(Value(names[value.name], (), "float64") for value in node.outputs)
    args, kwargs = (
        _constants(map_refs(argument, lambda ref: Ref(names[ref.name])), sizes)
        for argument in (node.args, dict(node.kwargs))
    )
    return Node("call", node.op, args, kwargs, outputs)


def _constants(argument: Any, sizes: Mapping[int, int]) -> Any:
    if isinstance(argument, str) and argument.startswith(("dtype:float", "dtype:bfloat")):
        return "dtype:float64"
    if isinstance(argument, (list, tuple)):
        return tuple(_constants(item, sizes) for item in argument)
    if isinstance(argument, dict):
        return {name: _constants(item, sizes) for name, item in argument.items()}
    return sizes.get(argument, argument) if type(argument) is int else argument


@dataclass(frozen=True)
class _Side:
    """What is run, and which values of it are compared."""

    nodes: tuple[Node, ...]
    results: tuple[str, ...]


def _compared(sides: tuple[_Side, ...], specs: tuple[_Spec, ...]) -> float | str:
    try:
        with _alone():
            return max(_difference_at(scale, specs, sides) for scale in _SCALES)
    except Exception as error:  # whatever an operator raises for shapes that it does not take
        return f"cannot be run: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Shut out the caller's modes, default dtype and choice of kernels; one thread, as others would wait for work."""
    forced = os.environ.pop(_FORCED, None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
            yield
    finally:
        torch.set_num_threads(threads)
        if forced is not None:
            os.environ[_FORCED] = forced


def _difference_at(scale: float, specs: Sequence[_Spec], sides: tuple[_Side, ...]) -> float:
    generator = torch.Generator().manual_seed(0)
    inputs = [_random(shape, dtype, scale, generator) for shape, dtype in specs]
    results = [_run(side, inputs) for side in sides]
    upstream = [torch.randn(result.shape, dtype=torch.float64, generator=generator) for result in results[0]]
    differentiable = [tensor for tensor in inputs if tensor.requires_grad]
    gradients = [torch.autograd.grad(outputs, differentiable, upstream, allow_unused=True) for outputs in results]
    return max(_relative(first, second) for first, second in (*zip(*results), *zip(*gradients)))


def _random(shape: tuple[int, ...], dtype: str, scale: float, generator: torch.Generator) -> torch.Tensor:
    if "float" not in dtype and "complex" not in dtype:
        return torch.randint(0, 2, shape, generator=generator).to(getattr(torch, dtype))
    wide = torch.complex128 if "complex" in dtype else torch.float64
    drawn = torch.randn(shape, dtype=wide, generator=generator) * scale
    return drawn.requires_grad_()


def _run(side: _Side, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    values: dict[str, Any] = {f"input{place}": tensor for place, tensor in enumerate(inputs)}
    for node in side.nodes:
        values.update(zip((value.name for value in node.outputs), run_node(node, values)))
    return [values[name] for name in side.results]


def _relative(first: torch.Tensor | None, second: torch.Tensor | None) -> float:
    if first is None or second is None:
        present = first if first is not None else second
        return 0.0 if present is None or not present.any() else math.inf
    if first.shape != second.shape:
        return math.inf
    if not first.numel():
        return 0.0
    first, second = first.detach(), second.detach()
    largest = float(first.abs().max())
    distance = float((first - second).abs().max())
    return distance / largest if largest else (math.inf if distance else 0.0)
