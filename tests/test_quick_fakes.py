"""What operators give for stand-ins is looked up by all that it depends on, as torch looks it up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from passes.capture import capture
from passes.torch_compat.quick_fakes import quick_fakes

COMPLEX = functools.partial(torch.ones, 2, dtype=torch.complex64)
IMAGES = functools.partial(torch.ones, 1, 2, 3, 3)
#: Calls that differ in one thing each, which torch answers differently.
ALIKE: dict[str, tuple[Callable[[], Any], ...]] = {
    "numbers": tuple(lambda number=number: torch.ones(2, dtype=torch.int64) + number for number in (1, 1.0, True)),
    "dtypes": tuple(lambda dtype=dtype: torch.ones(2, dtype=dtype).mul(2) for dtype in (torch.int32, torch.float32)),
    "sizes": tuple(lambda size=size: torch.ones(size, 3).sum(0, keepdim=True) for size in (2, 3)),
    "strides": (lambda: torch.ones(3, 3).clone(), lambda: torch.ones(3, 3).t().clone()),
    "offsets": tuple(lambda start=start: torch.ones(8)[start : start + 4][1:3] for start in (0, 1, 2)),
    "gradients": tuple(lambda needed=needed: torch.ones(2, requires_grad=needed) * 2 for needed in (False, True)),
    "conjugates": (lambda: COMPLEX().conj()[1:], lambda: COMPLEX()[1:]),
    "devices": tuple(lambda device=device: torch.ones(2, device=device).neg() for device in ("cpu", "cuda:0")),
    "lists": tuple(lambda sizes=sizes: torch.ones(4, 2).split(sizes)[1] for sizes in ([1, 3], [2, 2], (3, 1))),
    "names": (lambda: torch.ones(2, 2).sum(dim=0), lambda: torch.ones(2, 2).sum(dim=1, keepdim=True)),
    "memory": (lambda: IMAGES() + 1, lambda: IMAGES().to(memory_format=torch.channels_last) + 1),
}  # fmt: skip


def described(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = tensor.device, tensor.storage_offset(), tensor.untyped_storage().nbytes()
    return tensor.dtype, tensor.shape, tensor.stride(), *place, tensor.requires_grad, tensor.is_conj()


@pytest.mark.parametrize("difference", ALIKE)
def test_calls_that_differ_in_one_thing_are_told_apart(difference: str) -> None:
    calls = ALIKE[difference]
    with FakeTensorMode() as mode:
        mode.cache_enabled = False
        expected = [described(call()) for call in calls]
    with quick_fakes(), FakeTensorMode():
        for _ in range(2):  # the second time they are looked up
            assert [described(call()) for call in calls] == expected


def test_results_are_looked_up() -> None:
    with quick_fakes(), FakeTensorMode():
        x = torch.ones(5, 7)
        torch.add(x, x, alpha=3)
        hits = FakeTensorMode.cache_hits
        torch.add(x, x, alpha=3)
        assert FakeTensorMode.cache_hits == hits + 1


def test_a_number_and_its_truth_make_two_graphs() -> None:
    model = torch.nn.Module()
    for number, dtype in ((1, "int64"), (1.0, "float32"), (True, "int64")):
        model.forward = lambda x, number=number: x * number
        graph = capture(model, args=(torch.ones(3, dtype=torch.int64),))
        assert graph.values[next(iter(graph.outputs.values()))].dtype == dtype


def test_torch_is_left_as_it_was() -> None:
    before = FakeTensorMode._prep_args_for_hash
    with pytest.raises(KeyError), quick_fakes():
        assert FakeTensorMode._prep_args_for_hash is not before
        raise KeyError
    assert FakeTensorMode._prep_args_for_hash is before
