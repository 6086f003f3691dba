"""Graphs of calls that differ in shapes alone: the model is traced for the first shapes, once more for all others.

Where sizes are known to change, the first trace is the one for all of them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field

from passes.ir.errors import CaptureError
from passes.ir.graph import Graph
from runtime.calls.model_call import ModelCall, Path

Shapes = Mapping[Path, tuple[int, ...]]
#: Gives the graph for shapes; ValueError for those that need another trace.
GraphOfShapes = Callable[[Shapes], Graph]

#: Traces with open sizes of one kind of call: another one when a dim changes that the last one took for fixed, and one
#: for sizes at which forward branches.
_MAX_TRACES = 3
#: A size of 1 or 0 is a case of its own for every operator.
_SMALLEST = 2

log = logging.getLogger("meshwright.programs")


@contextlib.contextmanager
def announced(call: ModelCall) -> Iterator[Callable[[str], None]]:
    """Log what was done for a call, which the block says, and the seconds that it took."""
    begun, words = time.perf_counter(), list[str]()
    yield words.append
    log.info("%s in %.2f s, for %s", " ".join(words), time.perf_counter() - begun, _words(_shapes(call)))


@dataclass
class _Kind:
    """Calls that differ in shapes alone.

    Attributes:
        shapes, graph: of the first one.
        open_dims: dims that have changed since.
        traces: those with open sizes that are right.
        num_traces: how many were made.
        has_branched: whether one of them is for dims that an earlier one had left open.
    """

    shapes: Shapes
    graph: Graph
    open_dims: dict[Path, set[int]] = field(default_factory=dict)
    traces: list[GraphOfShapes] = field(default_factory=list)
    num_traces: int = 0
    has_branched: bool = False


class ShapeCaptures:
    """Captures by kind of call.

    Args:
        dynamic: leave sizes open from the first trace on.

    Attributes:
        count: how often the model was traced.
    """

    def __init__(self, *, dynamic: bool = False) -> None:
        self.count = 0
        self._dynamic = dynamic
        self._kinds: dict[Hashable, _Kind] = {}

    def graph(
        self,
        call: ModelCall,
        mode: Hashable,
        *,
        capture: Callable[[], Graph],
        trace: Callable[[Mapping[Path, set[int]]], GraphOfShapes],
    ) -> Graph:
        """The graph of a call: of a trace that serves several shapes if there is one, else captured.

        Args:
            mode: what the graph depends on beside the call.
            capture: traces the model for these shapes.
            trace: traces it with the sizes of these dims left open; CaptureError if no trace serves several shapes.
        """
        with announced(call) as say:
            graph, how = self._graph(call, mode, capture, trace)
            say(f"{graph.model_name} {how}")
        return graph

    def _graph(
        self,
        call: ModelCall,
        mode: Hashable,
        capture: Callable[[], Graph],
        trace: Callable[[Mapping[Path, set[int]]], GraphOfShapes],
    ) -> tuple[Graph, str]:
        shapes = _shapes(call)
        kind = self._kinds.get(_key(call, mode))
        if kind is None and self._dynamic and not call.case:
            kind = self._opened(shapes, trace)
            if kind is not None:
                self._kinds[_key(call, mode)] = kind
                return kind.graph, "captured for any size"
        if kind is None or call.case:
            self.count += 1
            graph = capture()
            if kind is None and not graph.guards:
                self._kinds[_key(call, mode)] = _Kind(shapes, graph)
            return graph, "captured"
        graph_of_trace = self._of_trace(kind, shapes)
        if graph_of_trace is not None:
            return graph_of_trace, "made of an earlier capture"
        if self._trace_again(kind, shapes, trace):
            graph_of_trace = self._of_trace(kind, shapes)
            if graph_of_trace is not None:
                return graph_of_trace, "captured for any size of the dims that changed"
        self.count += 1
        return capture(), "captured, for these sizes alone"

    def _opened(self, shapes: Shapes, trace: Callable[[Mapping[Path, set[int]]], GraphOfShapes]) -> _Kind | None:
        """The kind of calls whose first trace leaves all sizes open that one may; None if there is no such trace."""
        dims = {path: {dim for dim, size in enumerate(shape) if size >= _SMALLEST} for path, shape in shapes.items()}
        if not any(dims.values()):
            return None
        self.count += 1
        with contextlib.suppress(CaptureError, ValueError):
            graph_of_shapes = trace(dims)
            return _Kind(shapes, graph_of_shapes(shapes), dims, [graph_of_shapes], num_traces=1)
        return None

    def _of_trace(self, kind: _Kind, shapes: Shapes) -> Graph | None:
        for graph_of_shapes in reversed(kind.traces):
            with contextlib.suppress(CaptureError, ValueError):
                return graph_of_shapes(shapes)
        return None

    def _trace_again(
        self, kind: _Kind, shapes: Shapes, trace: Callable[[Mapping[Path, set[int]]], GraphOfShapes]
    ) -> bool:
        """Whether there is a new trace, which gives for the first shapes what capturing gave, if it is for them."""
        changed = False
        for path, shape in shapes.items():
            dims = {dim for dim, size in enumerate(shape) if size != kind.shapes[path][dim]}
            changed = changed or not dims <= kind.open_dims.get(path, set())
            kind.open_dims.setdefault(path, set()).update(dims)
        changing = [(path, dim) for path, dims in kind.open_dims.items() for dim in dims]
        is_small = any(min(shapes[path][dim], kind.shapes[path][dim]) < _SMALLEST for path, dim in changing)
        if is_small or kind.num_traces == _MAX_TRACES or (kind.has_branched and not changed):
            return False
        kind.has_branched = kind.has_branched or not changed
        kind.num_traces += 1
        self.count += 1
        try:
            graph_of_shapes = trace(kind.open_dims)
        except CaptureError:
            return False
        with contextlib.suppress(CaptureError, ValueError):
            if graph_of_shapes(kind.shapes) != kind.graph:
                return False
        kind.traces.append(graph_of_shapes)
        return True


def _shapes(call: ModelCall) -> dict[Path, tuple[int, ...]]:
    return {path: tuple(tensor.shape) for path, tensor in call.tensors.items()}


def _key(call: ModelCall, mode: Hashable) -> Hashable:
    """Equal for calls that differ in shapes alone."""
    shapes, structures, _ = call.signature
    tensors = tuple((path, len(shape), dtype, requires_grad) for path, shape, dtype, requires_grad in shapes)
    return mode, tensors, structures


def _words(shapes: Shapes) -> str:
    return ", ".join(f"{'.'.join(map(str, path))} {list(shape)}" for path, shape in shapes.items())
