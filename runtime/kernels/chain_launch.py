"""Launches of a chain's kernels: all that depends on shapes, strides and the device alone is computed once.

A launch is made for the first call of its kind and kept by the chain, so that a further call only hands pointers to
Triton. Tiles are measured at the first launch on a GPU (``runtime.kernels.autotune``) if no result depends on them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from runtime.kernels import autotune
from runtime.kernels.chain_layout import OperandLayout
from runtime.kernels.device import on_device, processors_of
from runtime.kernels.language import interprets_triton
from runtime.kernels.rows import Tile, walkers_over
from runtime.kernels.tiling import DEFAULT_PROCESSORS, TileChoice, ranked_tiles


class Launch:
    """One kernel on operands of one geometry, on one device.

    Args:
        kernel: called with pointers to operands and results, and the operands' strides.
        layout: the geometry.
        operands: of the first call; further ones have the same shapes, strides, dtypes and device.
        num_results: how many results are written, at most.
        whole_rows: a program holds whole rows, for what is one number a row.
        walks: a program walks through a share of the rows, and adds up what it sees.

    Attributes:
        shares: parts that the rows are walked through in; ``blocks``: tiles that lie side by side in a row.
    """

    def __init__(
        self,
        kernel: Any,
        layout: OperandLayout,
        operands: Sequence[torch.Tensor],
        *,
        num_results: int,
        whole_rows: bool,
        walks: bool,
    ) -> None:
        self.layout = layout
        self._kernel, self._walks = kernel, walks
        tiles = _ranked(layout, operands, num_results, whole_rows=whole_rows)
        self.blocks = -(-layout.width // tiles[0].columns)
        walker = Tile(rows=tiles[0].rows, columns=tiles[0].columns, num_warps=tiles[0].num_warps, whole=False)
        self.shares = max(1, walkers_over(layout.num_rows, walker, operands[0].device) // self.blocks)
        # Sums are added up tile by tile: a measured tile would round as its rank measured.
        self._tiles = tiles[:1] if walks or whole_rows else tiles
        # An outer or middle size of 1 and strides of 0 are part of a kernel's code: see ``runtime.kernels.tiles``.
        outer, middle, inner, width = layout.sizes
        self._space = (None if outer == 1 else outer, None if middle == 1 else middle, inner, width)
        self._strides = tuple(tuple(stride or None for stride in strides) for strides in layout.strides)
        self._num_results = num_results
        self._fixed: tuple[Any, Mapping[str, Any]] | None = None

    def __call__(self, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None]) -> None:
        """Run the kernel on all of the space, on the operands' device."""
        with on_device(operands[0].device):
            self._launch(operands, results)

    def _launch(self, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None]) -> None:
        if self.layout.copies:
            operands = [operand.contiguous() for operand in operands]
        prepared = self._fixed
        if prepared is None:
            prepared = self._prepared(self._tuned(operands, results))
            if not _is_captured(operands[0].device):  # nothing can be measured in a CUDA graph: perhaps next time
                self._fixed = prepared
        self._run(prepared, operands, results)

    def _run(
        self,
        prepared: tuple[Any, Mapping[str, Any]],
        operands: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor | None],
    ) -> None:
        kernel, options = prepared
        kernel(*operands, *results, *self._strides, **options)

    def _prepared(self, tile: TileChoice) -> tuple[Any, Mapping[str, Any]]:
        """The kernel with its grid, and its options, for a tile."""
        parts = self.shares if self._walks else -(-self.layout.num_rows // tile.rows)
        options: dict[str, Any] = {
            "SPACE": self._space,
            "TILE": (tile.rows, tile.columns),
            "num_warps": tile.num_warps,
            **({"SHARES": self.shares} if self._walks else {}),
        }
        return self._kernel[(parts * -(-self.layout.width // tile.columns),)], options

    def _tuned(self, operands: Sequence[torch.Tensor], results: Sequence[torch.Tensor | None]) -> TileChoice:
        """The measured best on a GPU; the likeliest elsewhere."""
        device = operands[0].device
        if len(self._tiles) == 1 or interprets_triton() or device.type != "cuda" or _is_captured(device):
            return self._tiles[0]
        key = {
            "kernel": autotune.digest(inspect.getsource(self._kernel.fn)),
            "dtypes": [str(operand.dtype) for operand in operands],
            "broadcast": [[stride == 0 for stride in strides] for strides in self.layout.strides],
            "results": self._num_results,
            "rows": autotune.bucket_of(self.layout.num_rows),
            "width": autotune.rounded_up(self.layout.width),
            **autotune.environment_of(device),
        }

        def seconds(tile: TileChoice) -> float:
            prepared = self._prepared(tile)
            return autotune.device_seconds(lambda: self._run(prepared, operands, results))

        return autotune.best(key, self._tiles, seconds)


def _is_captured(device: torch.device) -> bool:
    """Whether launches are recorded for a CUDA graph rather than run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _ranked(
    layout: OperandLayout, operands: Sequence[torch.Tensor], num_results: int, *, whole_rows: bool
) -> tuple[TileChoice, ...]:
    whole = [operand.itemsize for operand in operands if operand.shape == layout.space]
    # of like sizes the same tiles: a new length is neither compiled nor measured anew
    return ranked_tiles(
        autotune.bucket_of(layout.num_rows),
        autotune.rounded_up(layout.width),
        item_bytes=sum(whole) + num_results * max(operand.itemsize for operand in operands),
        tensors=len(whole) + num_results,
        operands=len(operands) + num_results,
        processors=processors_of(operands[0].device, elsewhere=DEFAULT_PROCESSORS),
        whole_rows=whole_rows,
    )
