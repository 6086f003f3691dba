"""A chain of elementwise operators as an emitted program uses it: its kernels on a GPU, its plain form elsewhere.

The plain form is what processors run, what ``MESHWRIGHT_KERNELS=aten`` runs, and what runs wherever the kernels do not
apply: while torch traces or compiles (a compiler fuses it with what is around), on subclasses and without data, under
autocast, on empty tensors, and on other dtypes than the kernels were written for.

Sums over rows are made in two stages, always in the same order. Tiles of kernels with sums come from the cost model
alone: measured ones may differ from rank to rank, and with them the rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from passes.chains.iteration_space import COLUMN, FULL, OTHER, ROW, SCALAR
from runtime.kernels.chain_launch import Launch
from runtime.kernels.chain_layout import OperandLayout, Shape, layout_of
from runtime.kernels.dispatch import runs_triton
from runtime.kernels.sharing import compile_shared, shared_function
from runtime.torch_compat.dispatcher import are_operators_observed, as_one_operator

Plain = Callable[..., Any]
_OWN_TYPES = (torch.Tensor, torch.nn.Parameter)
_SUMMED = (ROW, COLUMN, SCALAR)
#: Kernels count rows in 32 bits.
_MOST_ROWS = 2**31
#: The largest number of kinds of launches that a chain caches: more arise from lengths that never repeat.
_MOST_KINDS = 1024


class Chain:
    """``chain(*tensors)`` gives one tensor, or several as a tuple.

    Args:
        plain: the chain as torch operators; parameters and results are those of the chain.
        forward: the kernel, called with pointers to ``inputs``, ``outputs`` and ``extra``, and the inputs' strides.
        backward: the kernel of the gradients, called with pointers to the gradients of ``grads``, to ``saved``, and to
            what it makes of ``gradients``, and the strides of the first two.
        inputs, outputs: names and dtypes, in order.
        rows: outputs that have one number a row: whether they keep the last dim.
        columns: how many trailing dims of the space are columns; 0 for as many as lie side by side.
        grads: outputs whose gradients ``backward`` takes.
        saved: inputs, outputs and ``extra`` that are kept for it.
        extra: what forward writes for backward alone.
        gradients: for each input that ``backward`` makes a gradient of, how that is summed
            (``passes.chains.iteration_space``).
        holds_rows: ``backward`` needs whole rows in a program; ``forward`` does if there are ``rows``.
        passed: inputs whose gradient is that of an output, as it is.
        shared: inputs whose gradient is that of another input.
        fixed: inputs that have gradients elsewhere, none here: no result depends on them smoothly.
        backend: ``"inductor"`` to have ``torch.compile`` make kernels of ``plain`` on a GPU.
    """

    def __init__(
        self,
        *,
        plain: Plain,
        forward: Any = None,
        backward: Any = None,
        inputs: Mapping[str, str] | None = None,
        outputs: Mapping[str, str] | None = None,
        rows: Mapping[str, bool] | None = None,
        columns: int = 0,
        grads: Sequence[str] = (),
        saved: Sequence[str] = (),
        extra: Mapping[str, str] | None = None,
        gradients: Mapping[str, str] | None = None,
        holds_rows: bool = False,
        passed: Mapping[str, str] | None = None,
        shared: Mapping[str, str] | None = None,
        fixed: Sequence[str] = (),
        backend: str = "triton",
    ) -> None:
        self.plain, self.backend = plain, backend
        self.forward, self.backward = shared_function(forward), shared_function(backward)
        self.inputs, self.outputs, self.extra = (_dtypes(names) for names in (inputs, outputs, extra))
        self.rows, self.columns, self.holds_rows = dict(rows or {}), columns, holds_rows
        self.grads, self.saved = tuple(grads), tuple(saved)
        self.gradients = dict(gradients or {})
        self.passed, self.shared = dict(passed or {}), dict(shared or {})
        self._differentiable = bool(self.gradients or self.passed)
        self._handled_inputs = frozenset((*self.gradients, *self.passed, *self.shared, *fixed))
        self._layouts: dict[Any, OperandLayout | None] = {}
        self._launches: dict[Any, Launch] = {}
        self._compiled: Plain | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if torch.compiler.is_compiling() or not _are_real(tensors) or not self._is_on_device(tensors):
            return self.plain(*tensors)
        if self.backend == "inductor":
            return self._run_compiled(tensors)
        if not self._fits(tensors):
            return self.plain(*tensors)
        if self._differentiable and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            results = _ChainRun.apply(self, *tensors)  # type: ignore[no-untyped-call]
        else:
            results, _ = self.run(tensors, extra=False)
        return results[0] if len(results) == 1 else tuple(results)

    def _is_on_device(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether kernels are to run, and on what they can read."""
        if not runs_triton(tensors[0]):
            return False
        device = tensors[0].device
        if self.backend == "inductor" and device.type != "cuda":
            return False
        return not torch.is_autocast_enabled(device.type) and all(tensor.device == device for tensor in tensors)

    def _run_compiled(self, tensors: Sequence[torch.Tensor]) -> Any:
        if are_operators_observed():
            return self.plain(*tensors)
        if self._compiled is None:
            self._compiled = compile_shared(self.plain)
        with as_one_operator():
            return self._compiled(*tensors)

    def _fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the kernels were written for such tensors and their gradients."""
        keeps = torch.is_grad_enabled()
        for tensor, (name, dtype) in zip(tensors, self.inputs.items(), strict=True):
            if tensor.dtype != dtype or (keeps and tensor.requires_grad and name not in self._handled_inputs):
                return False
        layout = self.layout(tensors)
        return layout is not None and 0 < layout.num_rows < _MOST_ROWS and layout.width > 0

    @staticmethod
    def _key(tensors: Sequence[torch.Tensor], space: Shape | None) -> tuple[Any, ...]:
        """The key of a launch's geometry."""
        return space, *((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)

    def layout(self, tensors: Sequence[torch.Tensor], space: Shape | None = None) -> OperandLayout | None:
        """The geometry of a launch with these operands."""
        key = self._key(tensors, space)
        if key not in self._layouts:
            _make_room(self._layouts)
            shape = tuple(torch.broadcast_shapes(*(tensor.shape for tensor in tensors))) if space is None else space
            self._layouts[key] = layout_of(tensors, shape, columns=self.columns)
        return self._layouts[key]

    def run(
        self, tensors: Sequence[torch.Tensor], *, extra: bool
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """Outputs, and what is kept for backward besides (None without ``extra``)."""
        launch = self._launch(self.forward, tensors, None, len(self.outputs) + len(self.extra) * extra)
        layout = launch.layout
        results = {name: self._room(name, dtype, layout, tensors[0]) for name, dtype in self.outputs.items()}
        saved = {
            name: self._room(name, dtype, layout, tensors[0]) if extra else None for name, dtype in self.extra.items()
        }
        launch(tensors, [*results.values(), *saved.values()])
        return [self._shown(name, tensor, layout) for name, tensor in results.items()], [
            None if tensor is None else layout.restored(tensor) for tensor in saved.values()
        ]

    def _room(self, name: str, dtype: torch.dtype, layout: OperandLayout, like: torch.Tensor) -> torch.Tensor:
        """Memory for a result, dims in the order in which it is written."""
        last = len(layout.space) - 1
        spans_dim = [dim != last or name not in self.rows for dim in range(len(layout.space))]
        return like.new_empty(layout.sizes_in_order(spans_dim), dtype=dtype)

    def _shown(self, name: str, tensor: torch.Tensor, layout: OperandLayout) -> torch.Tensor:
        shown = layout.restored(tensor)
        return shown.squeeze(-1) if self.rows.get(name) is False else shown

    def run_backward(
        self, grads: Sequence[torch.Tensor], saved: Sequence[torch.Tensor], space: Shape, shapes: Mapping[str, Shape]
    ) -> dict[str, torch.Tensor]:
        """Gradients of the inputs that the kernel makes, by name; ``shapes`` are the inputs'."""
        output_grads = [
            grad.unsqueeze(-1) if self.rows.get(name) is False else grad for name, grad in zip(self.grads, grads)
        ]
        operands = [*output_grads, *saved]
        launch = self._launch(self.backward, operands, space, len(self.gradients))
        sums = _Sums(launch.layout, launch.shares, launch.blocks)
        partials = {name: sums.room(kind, self.inputs[name], operands[0]) for name, kind in self.gradients.items()}
        launch(operands, list(partials.values()))
        return {
            name: sums.total(self.gradients[name], tensor, shapes[name]).to(self.inputs[name])
            for name, tensor in partials.items()
        }

    def _launch(self, kernel: Any, operands: Sequence[torch.Tensor], space: Shape | None, num_results: int) -> Launch:
        """The launch for such operands, made at their first call."""
        key = (kernel is self.forward, num_results, operands[0].device, *self._key(operands, space))
        launch = self._launches.get(key)
        if launch is None:
            layout = self.layout(operands, space)
            assert layout is not None
            is_forward = kernel is self.forward
            whole_rows = bool(self.rows) if is_forward else self.holds_rows
            _make_room(self._launches)
            walks = not is_forward and any(kind in _SUMMED for kind in self.gradients.values())
            launch = self._launches[key] = Launch(
                kernel, layout, operands, num_results=num_results, whole_rows=whole_rows, walks=walks
            )
        return launch


class _Sums:
    """Where gradients of broadcast operands are written, and the second stage of their sums."""

    def __init__(self, layout: OperandLayout, shares: int, blocks: int) -> None:
        self.layout, self.shares, self.blocks = layout, shares, blocks

    def room(self, kind: str, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        layout = self.layout
        whole = layout.sizes_in_order([True] * len(layout.space))
        if kind == FULL:
            return like.new_empty(whole, dtype=dtype)
        shapes = {
            OTHER: whole,
            ROW: (self.shares, layout.width),
            COLUMN: (self.blocks, layout.num_rows),
            SCALAR: (self.shares * self.blocks,),
        }
        return like.new_empty(shapes[kind], dtype=torch.promote_types(dtype, torch.float32))

    def total(self, kind: str, partials: torch.Tensor, shape: Shape) -> torch.Tensor:
        """The gradient of an operand of ``shape``."""
        layout = self.layout
        if kind == FULL:
            return layout.restored(partials)
        if kind == SCALAR:
            return partials.sum().reshape(shape)
        missing = len(layout.space) - len(shape)
        spans_dim = [dim >= missing and shape[dim - missing] == layout.space[dim] for dim in range(len(layout.space))]
        if kind == OTHER:
            return (
                layout.restored(partials)
                .sum([dim for dim in range(len(spans_dim)) if not spans_dim[dim]])
                .reshape(shape)
            )
        return layout.restored(partials.sum(0).reshape(layout.sizes_in_order(spans_dim))).reshape(shape)


class _ChainRun(torch.autograd.Function):
    """A chain's kernels with their gradient; called where they apply."""

    @staticmethod
    def forward(ctx: Any, chain: Chain, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, extra = chain.run(tensors, extra=True)
        tensor_of = {
            **dict(zip(chain.inputs, tensors)),
            **dict(zip(chain.outputs, outputs)),
            **dict(zip(chain.extra, extra)),
        }
        ctx.chain, ctx.space = chain, torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
        ctx.shapes = {name: tuple(tensor.shape) for name, tensor in zip(chain.inputs, tensors)}
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(tensor_of[name] for name in chain.saved))
        differentiable = {*chain.grads, *chain.passed.values()}
        fixed = [output for name, output in zip(chain.outputs, outputs) if name not in differentiable]
        ctx.mark_non_differentiable(*fixed)
        ctx.like = [(output.shape, output.dtype, output.device) for output in outputs]
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        chain: Chain = ctx.chain
        grad_of_output = dict(zip(chain.outputs, grads))
        likes = dict(zip(chain.outputs, ctx.like))
        grad_of_input: dict[str, torch.Tensor | None] = {
            name: grad_of_output[output] for name, output in chain.passed.items()
        }
        if chain.gradients and any(grad_of_output[name] is not None for name in chain.grads):
            kernel_grads = [
                grad_of_output[name] if grad_of_output[name] is not None else _zeros(*likes[name])
                for name in chain.grads
            ]
            grad_of_input.update(chain.run_backward(kernel_grads, ctx.saved_tensors, tuple(ctx.space), ctx.shapes))  # type: ignore[arg-type]
        grad_of_input.update((name, grad_of_input.get(other)) for name, other in chain.shared.items())
        return None, *(grad_of_input.get(name) for name in chain.inputs)


def _make_room(kinds: dict[Any, Any]) -> None:
    """Clear a cache that is full; what is in use is soon cached again."""
    if len(kinds) >= _MOST_KINDS:
        kinds.clear()


def _zeros(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _dtypes(dtype_names: Mapping[str, str] | None) -> dict[str, torch.dtype]:
    return {name: getattr(torch, dtype) for name, dtype in (dtype_names or {}).items()}


def _are_real(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether these are torch's own tensors with data, not stand-ins."""
    return all(type(tensor) in _OWN_TYPES and not tensor.is_meta for tensor in tensors)
