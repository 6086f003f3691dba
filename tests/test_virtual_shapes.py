"""Shapes of tensors that are the parts of all ranks, in one process: looked up, as torch computes them rank by rank."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

from passes.ir.types import MeshShape
from runtime.mesh.layout import virtual_ranks
from runtime.torch_compat.local_tensors import shapes_looked_up


def parts(*lengths: int) -> dict[int, torch.Tensor]:
    """Columns 1 to 3 of matrices of 4 columns and ``lengths`` rows."""
    return {rank: torch.arange(4.0 * length).reshape(length, 4)[:, 1:] for rank, length in enumerate(lengths)}


def shapes(tensor: torch.Tensor) -> str:
    """Sizes, strides and offset of the ranks' parts, and of views that are made of them."""
    views = (tensor, tensor.t(), tensor.detach(), tensor.unsqueeze(1))
    return repr([(view.shape, view.stride(), view.storage_offset()) for view in views])


@pytest.mark.parametrize("lengths", [(2, 2), (2, 3), (0, 1)])
def test_shapes_are_those_that_torch_computes_on_each_rank(lengths: tuple[int, ...]) -> None:
    tensor = LocalTensor(parts(*lengths))
    with LocalTensorMode(2):
        computed = shapes(tensor)
        with shapes_looked_up():
            assert shapes(tensor) == computed


def test_a_view_enters_no_mode() -> None:
    """Each would copy the random state of every rank, three times a view."""
    tensor = LocalTensor(parts(2, 3))
    entered = mock.patch.object(LocalTensorMode, "__enter__", side_effect=AssertionError("a mode was entered"))
    with virtual_ranks(MeshShape(("tp",), (2,))), entered:
        view = tensor.t()
    assert [part.shape for part in view._local_tensors.values()] == [(3, 2), (3, 3)]  # type: ignore[attr-defined]


def test_the_class_is_left_as_it_was() -> None:
    before = vars(LocalTensor)["__torch_dispatch__"]
    with virtual_ranks(MeshShape(("tp",), (2,))):
        assert vars(LocalTensor)["__torch_dispatch__"] is not before
    assert vars(LocalTensor)["__torch_dispatch__"] is before
