"""Units in one process: pieces, dtypes, one rank alone, and all ranks as local tensors."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from passes.ir.types import MeshShape
from runtime.execution.step_state import StepState
from runtime.mesh.layout import virtual_ranks
from runtime.zero.flat import FlatLayout, copy_all
from runtime.zero.group import StateGroup
from runtime.zero.norm import clip_gradients, gradient_norm
from runtime.zero.precision import Dtypes, Precision
from runtime.zero.state_pieces import piece, piece_of, piece_shape
from runtime.zero.unit import Unit, UnitWeight, chained
from runtime.zero.uses import taken_together
from tests.units_worker import FROZEN, forward, optimizer_of, reference, samples, whole_weights

pytestmark = pytest.mark.usefixtures("models_traced_once")

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(SHAPES, st.integers(1, 5))
def test_pieces_put_together_are_the_whole(shape: tuple[int, ...], num_ranks: int) -> None:
    whole = torch.arange(math.prod(shape)).view(shape)
    pieces = [piece(whole, num_ranks, rank) for rank in range(num_ranks)]
    assert [tuple(some.shape) for some in pieces] == [piece_shape(shape, num_ranks, rank) for rank in range(num_ranks)]
    if shape:
        assert torch.equal(torch.cat(pieces, piece_of(shape, num_ranks, 0)[0]), whole)
    else:
        assert all(torch.equal(some, whole) for some in pieces)


@pytest.mark.parametrize(
    ("shape", "num_ranks", "cuts"),
    [
        ((8, 3), 4, [(0, 0, 2), (0, 2, 2), (0, 4, 2), (0, 6, 2)]),
        ((5, 4), 2, [(1, 0, 2), (1, 2, 2)]),
        ((5, 3), 4, [(0, 0, 2), (0, 2, 2), (0, 4, 1), (0, 5, 0)]),
        ((), 2, [(0, 0, 1), (0, 0, 1)]),
    ],
)
def test_the_first_dim_that_divides_is_cut(shape: tuple[int, ...], num_ranks: int, cuts: list[tuple[int, ...]]) -> None:
    assert [piece_of(shape, num_ranks, rank) for rank in range(num_ranks)] == cuts


@given(st.lists(SHAPES, min_size=1, max_size=4), st.integers(1, 5))
def test_rows_of_all_ranks_become_whole_tensors_and_back(shapes: list[tuple[int, ...]], num_ranks: int) -> None:
    layout = FlatLayout(shapes, num_ranks)
    wholes = [torch.randn(shape) for shape in shapes]
    rows = torch.zeros(num_ranks, layout.row)
    for rank in range(num_ranks):
        pieces = [piece(whole, num_ranks, rank) for whole in wholes]
        copy_all(layout.pieces(rows[rank], pieces), pieces)
    flat = torch.zeros(layout.total)
    copy_all(*layout.gather_pairs(rows.flatten(), flat))
    assert all(torch.equal(one, other) for one, other in zip(layout.wholes(flat), wholes))
    again = torch.zeros_like(rows)
    copy_all(*layout.scatter_pairs(again, dict(enumerate(wholes))))
    assert torch.equal(again, rows)


def test_precision_concerns_parameters_of_16_bits() -> None:
    narrow, single, double = torch.bfloat16, torch.float32, torch.float64
    assert Precision().of(narrow) == Dtypes(narrow, single, single)
    assert Precision(master=None, gradient=None).of(narrow) == Dtypes(narrow, narrow, narrow)
    assert Precision(compute="bfloat16").of(torch.float16) == Dtypes(narrow, single, single)
    assert Precision(compute="bfloat16").of(single) == Dtypes(single, single, single)
    assert Precision().of(double) == Dtypes(double, double, double)
    with pytest.raises(ValueError, match="gradient precision 'int8' is not known"):
        Precision(gradient="int8")


def test_one_rank_of_one_dtype_uses_its_parameters_themselves() -> None:
    weight, bias = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))
    unit = Unit([UnitWeight("weight", weight, (3, 2)), UnitWeight("bias", bias, (3,))], zero=3)
    assert [id(used) for used in unit.use()] == [id(weight), id(bias)] == [id(leaf) for leaf in unit.leaves]


def test_gradients_of_a_use_are_taken_by_the_token() -> None:
    """Schedules that split the backward pass ask for the gradients of the leaves by ``autograd.grad``."""
    owner = nn.Parameter(torch.full((3,), 2.0))
    unit = Unit([UnitWeight("weight", owner, (3,), compute=torch.bfloat16)], zero=0)
    unit.begin(1)
    (zero,) = torch.autograd.grad(unit.use()[0].float().square().sum(), unit.leaves)
    unit.finish()
    assert float(zero) == 0.0
    assert owner.grad is not None and owner.grad.dtype == torch.float32
    assert owner.grad.tolist() == [4.0, 4.0, 4.0]


def test_the_token_is_where_parameters_are_once_they_are_loaded() -> None:
    owner = nn.Parameter(torch.empty(4, device="meta"))
    unit = Unit([UnitWeight("weight", owner, (4,), compute=torch.bfloat16)], zero=0)
    assert unit.token.device.type == "meta"
    torch.utils.swap_tensors(owner, nn.Parameter(torch.ones(4)))
    assert unit.token.device.type == "cpu" and unit.leaves[0] is unit.token


def test_working_weights_follow_their_owners() -> None:
    owner = nn.Parameter(torch.zeros(4))
    unit = Unit([UnitWeight("weight", owner, (4,), compute=torch.bfloat16)], zero=0)
    assert unit.use()[0].tolist() == [0.0] * 4
    with torch.no_grad():
        owner.fill_(3.0)
    unit.refresh_needed()
    assert unit.use()[0].tolist() == [3.0] * 4


def test_gradients_are_added_to_those_that_are_there() -> None:
    owner, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    units = [
        Unit([UnitWeight("tied", owner, (2,), compute=torch.bfloat16), UnitWeight(str(index), other, (2,))], zero=0)
        for index in range(2)
    ]
    for _ in range(2):
        sum((index + 1) * unit.use()[0].float().sum() for index, unit in enumerate(units)).backward()
    assert owner.grad is not None and owner.grad.tolist() == [6.0, 6.0]
    assert other.grad is None


def test_a_gpu_takes_gradients_of_neighbours_together() -> None:
    mib = 2**20
    sizes = [20 * mib, 10 * mib, 40 * mib, mib, mib]
    assert taken_together(sizes, on_gpu=True, splits_backward=False) == [2, 1, 2]
    assert taken_together(sizes, on_gpu=True, splits_backward=True) == [1] * 5
    assert taken_together(sizes, on_gpu=False, splits_backward=False) == [1] * 5
    assert taken_together([1024] * 3, on_gpu=False, splits_backward=True) == [3]


@pytest.mark.parametrize(("schedule", "splits"), [("none", False), ("1f1b", False), ("zb_h1", True), ("zbv", True)])
def test_a_step_knows_whether_its_schedule_splits_backward_passes(schedule: str, splits: bool) -> None:
    state = StepState(nn.Linear(2, 2), SimpleNamespace(layout=SimpleNamespace(mesh=MeshShape.from_dict({"dp": 1}))))
    assert not state.splits_backward  # there is no plan yet
    state.placing = SimpleNamespace(plan=SimpleNamespace(step=SimpleNamespace(schedule=schedule)))
    assert state.splits_backward is splits


@pytest.mark.parametrize("sizes", ([3], [1, 1, 1], [1, 2], [2, 1]), ids=str)
def test_gradients_are_the_same_however_many_are_taken_together(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.zero.unit.taken_together", lambda *_, **__: sizes)
    owners = [nn.Parameter(torch.full((2,), nr + 1.0)) for nr in range(3)]
    dtypes = (torch.bfloat16, torch.float16, torch.bfloat16)  # two bundles, whose order is not the owners'
    weights = [UnitWeight(str(nr), owner, (2,), compute=dtypes[nr]) for nr, owner in enumerate(owners)]
    unit = Unit(weights, zero=0)
    unit.begin(2)
    for _ in range(2):
        first, _unused, last = unit.use()
        (first.float().square() + 3 * last.float()).sum().backward()
    unit.finish()
    assert [None if owner.grad is None else owner.grad.tolist() for owner in owners] == [
        [4.0] * 2,
        None,
        [6.0] * 2,
    ]


def test_a_wrong_piece_is_refused() -> None:
    weight = UnitWeight("layer.weight", nn.Parameter(torch.ones(4, 2)), (4, 2))
    with pytest.raises(
        ValueError, match=r"layer.weight of shape \(4, 2\) is owned as \(4, 2\) by rank 1 of 2; ZeRO 1 exp"
    ):
        Unit([weight], zero=1, group=StateGroup("some", 2, 1))
    with pytest.raises(ValueError, match="unknown ZeRO stage 4: expected 0, 1, 2 or 3"):
        Unit([weight], zero=4)


def test_many_microbatches_in_bfloat16_add_up_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(16, 32, generator=generator)
    batches = torch.randn(256, 4, 32, generator=generator)
    exact = start.double().requires_grad_()
    (batches.double() @ exact.t()).square().sum().backward()
    errors = {}
    for gradient in (torch.float32, torch.bfloat16):
        owner = nn.Parameter(start.clone())
        unit = Unit([UnitWeight("w", owner, (16, 32), compute=torch.bfloat16, gradient=gradient)], zero=0)
        unit.begin(len(batches))
        for batch in batches:
            (batch.bfloat16() @ unit.use()[0].t()).float().square().sum().backward()
        unit.finish()
        assert owner.grad is not None and exact.grad is not None
        errors[gradient] = float((owner.grad - exact.grad).norm() / exact.grad.norm())
    assert 4 * errors[torch.float32] < errors[torch.bfloat16], errors


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_clipping_is_torchs(norm_type: float) -> None:
    owners, others = ([nn.Parameter(torch.zeros(shape)) for shape in ((4, 3), (5,), ())] for _ in range(2))
    for owner, other in zip(owners, others):
        owner.grad = torch.randn(owner.shape)
        other.grad = owner.grad.clone()
    own = [(owner, True) for owner in [*owners, nn.Parameter(torch.zeros(0, 2)), nn.Parameter(torch.zeros(1))]]
    norm = clip_gradients(own, StateGroup(), max_norm=0.1, norm_type=norm_type)
    assert float(norm) == pytest.approx(float(nn.utils.clip_grad_norm_(others, 0.1, norm_type=norm_type)), rel=1e-5)
    for owner, other in zip(owners, others):
        torch.testing.assert_close(owner.grad, other.grad)


def test_a_norm_that_is_no_number_is_told() -> None:
    owner = nn.Parameter(torch.zeros(2))
    owner.grad = torch.tensor([1.0, math.nan])
    for norm_type in (2.0, math.inf):
        with pytest.raises(ValueError, match="some gradient is infinite or not a number"):
            clip_gradients([(owner, True)], StateGroup(), max_norm=1.0, norm_type=norm_type, error_if_nonfinite=True)
    with pytest.raises(ValueError, match="norm_type must be above zero"):
        gradient_norm([(owner, True)], StateGroup(), norm_type=0.0)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_ranks_in_one_process(zero: int) -> None:
    """On local tensors, over the ranks of dp and cp together: gradients and one AdamW step as on one process."""
    from torch.distributed._local_tensor import LocalTensor

    expected_figures = reference(4, 2, 1)
    mesh = MeshShape.parse("dp=2,cp=2,tp=2")

    def cut(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return piece(tensor, 4, rank // 2) if zero and name != FROZEN else tensor

    def everywhere(parts: list[torch.Tensor]) -> torch.Tensor:
        return LocalTensor(dict(enumerate(parts)))

    with virtual_ranks(mesh) as layout:
        group = StateGroup.of(layout.device_mesh["dp", "cp"]._flatten().get_group())
        ranks = range(mesh.num_devices)
        with layout.plain():
            inputs = [[samples(rank // 2, microbatch) for rank in ranks] for microbatch in range(2)]
            parts = [
                {name: [cut(name, whole, rank).clone() for rank in ranks] for name, whole in weights.items()}
                for weights in whole_weights()
            ]
        units = []
        for layer, weights in zip(parts, whole_weights()):
            owners = {
                name: nn.Parameter(everywhere(some), requires_grad=name != FROZEN) for name, some in layer.items()
            }
            members = [UnitWeight(name, owner, tuple(weights[name].shape)) for name, owner in owners.items()]
            units.append(Unit(members, zero=zero, group=group))
        chain = chained(units)
        for unit in chain:
            unit.begin(2)
        for recompute, some in zip(("none", "full"), inputs):
            forward(chain, everywhere(some), recompute=recompute).backward()
        for unit in chain:
            unit.finish()
        named = [(weight.name, weight.owner) for unit in chain for weight in unit.weights]
        optimizer, _ = optimizer_of(named)
        optimizer.step()
        with layout.plain():
            for (name, owner), expected in zip(named, [some for layer in expected_figures for some in layer.values()]):
                for local, whole in ((owner, expected), (owner.grad, expected.grad)):
                    assert (local is None) == (whole is None)
                    for rank, part in local._local_tensors.items() if local is not None else ():  # type: ignore[attr-defined]
                        torch.testing.assert_close(part, cut(name, whole.detach(), rank), rtol=1e-9, atol=1e-12)
