"""On one device, the random numbers that programs draw: a reference for models that draw in forward.

Programs draw by seed, step, number of the operator and position of the element (``runtime.ops.random``), the same under
every plan. In here torch's operators give those numbers for whole tensors, numbered in the order of their calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.overrides import TorchFunctionMode

from passes.canonicalise.fx import is_random
from passes.canonicalise.random_operators import write_out_in
from passes.torch_compat.operators import OpOverload, TorchDispatchMode
from runtime import ops
from runtime.torch_compat.autograd_engine import in_backward

_aten = torch.ops.aten


@contextlib.contextmanager
def sequence_of_draws(seed: int) -> Iterator[None]:
    """The block draws the numbers of a seed from its first step on; the caller's go on after it."""
    state = ops.get_random_state()
    ops.seed(seed)
    try:
        yield
    finally:
        ops.set_random_state(state)


class DrawsOfPlans:
    """Around the training steps of a model on one device: its forward draws what programs do.

    What cannot be told from torch's operators (dropout inside of attention), and what no program draws, is left to
    torch, whose generator then moves on.

    Attributes:
        shapes: of what the last step drew.

    Args:
        unused: places of draws that programs leave out, as nothing depends on them: these have no number of their own.
    """

    def __init__(self, unused: Collection[int] = ()) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._unused = frozenset(unused)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around forward and backward of one step.

        Raises:
            ValueError: if backward draws: a layer runs again, whose numbers are those of its first run in a program.
        """
        self.shapes = []
        ops.begin_step(training=True)
        with _Functions(self), _Operators(self):
            yield

    def next(self, draw: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """``draw`` called as the next random operator."""
        if in_backward():
            raise ValueError(
                "the model draws random numbers while backward runs (a layer that draws is in torch.utils.checkpoint), "
                "which verify cannot compare: turn checkpointing off; plans recompute by themselves"
            )
        place = len(self.shapes)
        number = place - sum(other < place for other in self._unused)
        result = draw(*args, draw=number, **kwargs)
        self.shapes.append(tuple(result.shape))
        return result


def unused_draws(drawn: Sequence[tuple[int, ...]], of_program: Sequence[tuple[int, ...]]) -> frozenset[int] | None:
    """The places of draws that a program leaves out, by the shapes of all and of its own; None if shapes do not tell.

    They tell if there is one way alone to find the program's shapes, in order, among all.
    """
    first = _places(drawn, of_program)
    last = _places(drawn[::-1], of_program[::-1])
    if first is None or last is None or first != [len(drawn) - 1 - place for place in reversed(last)]:
        return None
    return frozenset(range(len(drawn))).difference(first)


def _places(shapes: Sequence[tuple[int, ...]], some: Sequence[tuple[int, ...]]) -> list[int] | None:
    """The first places at which ``some`` are among ``shapes``, in order; None if they are not."""
    places: list[int] = []
    for shape in some:
        start = places[-1] + 1 if places else 0
        place = next((place for place in range(start, len(shapes)) if shapes[place] == shape), None)
        if place is None:
            return None
        places.append(place)
    return places


class _Functions(TorchFunctionMode):
    """Dropout, which torch composes of operators that draw other numbers."""

    def __init__(self, draws: DrawsOfPlans) -> None:
        super().__init__()
        self._draws = draws

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.dropout:
            return self._dropout(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if not training or not p:
            return x
        result = self._draws.next(ops.dropout, x, p)
        return x.copy_(result) if inplace else result


class _Operators(TorchDispatchMode):
    """Random operators, written out as in a program."""

    def __init__(self, draws: DrawsOfPlans) -> None:
        super().__init__()
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        has_own_generator = (kwargs or {}).get("generator") is not None  # programs have no such draws
        if torch.Tag.nondeterministic_seeded not in func.tags or has_own_generator:
            return func(*args, **kwargs or {})
        graph = _written_out(func, args, kwargs or {})
        if graph is None:
            return func(*args, **kwargs or {})
        return self._run(graph)

    def _run(self, graph: fx.Graph) -> Any:
        values: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = node.meta["val"]
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "output":
                return args[0]
            draw = _DRAWS.get(node.target)
            values[node] = node.target(*args, **kwargs) if draw is None else self._draws.next(draw, *args, **kwargs)
        raise AssertionError("a graph has an output")


def _written_out(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Graph | None:
    """The graph of one random operator in terms of those that programs draw, or None if it has no such form."""
    graph = fx.Graph()

    def operand(entry: Any) -> Any:
        if not isinstance(entry, torch.Tensor):
            return entry
        node = graph.placeholder(f"operand_{len(graph.nodes)}")
        node.meta["val"] = entry
        return node

    inputs = [operand(entry) for entry in args], {name: operand(entry) for name, entry in kwargs.items()}
    node = graph.call_function(func, tuple(inputs[0]), inputs[1])
    graph.output(node)
    with torch.random.fork_rng(devices=[]):
        node.meta["val"] = func(*args, **kwargs)
        write_out_in(graph)
    return None if any(is_random(each) and each.target not in _DRAWS for each in graph.nodes) else graph


def _integers(
    low: int, high: int, size: Sequence[int], *, draw: int, dtype: torch.dtype | None = None, **_: Any
) -> torch.Tensor:
    return ops.randint(size, low, high, dtype=dtype or torch.int64, draw=draw)


def _of_size(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def draw(size: Sequence[int], *, draw: int, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return function(size, dtype=dtype or torch.get_default_dtype(), draw=draw)

    return draw


def _like(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def draw(x: torch.Tensor, *bounds: int, draw: int, dtype: torch.dtype | None = None, **_: Any) -> torch.Tensor:
        return function(x, *bounds, dtype=dtype, draw=draw)

    return draw


def _chances(x: torch.Tensor, *, draw: int, **_: Any) -> torch.Tensor:
    return ops.bernoulli(x, draw=draw)


#: Operators that programs draw → what draws for them, ``draw=`` the number.
_DRAWS: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.rand.default: _of_size(ops.rand),
    _aten.randn.default: _of_size(ops.randn),
    _aten.randint.low: _integers,
    _aten.rand_like.default: _like(ops.rand_like),
    _aten.randn_like.default: _like(ops.randn_like),
    _aten.randint_like.low_dtype: _like(ops.randint_like),
    _aten.bernoulli.default: _chances,
}
