"""The canonical form, pass by pass: what comes out, and that it computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from passes.capture import CaptureError, capture
from passes.ir.graph import Graph
from tests.capture_parity import assert_parity


class Calls(nn.Module):
    """``function(x * weight)``; the weight makes gradients flow."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight).square().sum()


class Sums(nn.Module):
    """The sum of squares of what a module gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).square().sum()  # type: ignore[no-any-return]


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def check(function: Callable[[torch.Tensor], torch.Tensor], *shape: int) -> list[str]:
    """Operators between the product with the weight and the sum of squares."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    graph = assert_parity(Calls(function, shape), args=(x,))
    assert ops(graph)[0] == "aten.mul.Tensor" and ops(graph)[-1] == "aten.sum.default"
    return ops(graph)[1:-2]


def test_an_index_that_depends_on_values_in_many_ways_is_looked_at_once() -> None:
    def picked(y: torch.Tensor) -> torch.Tensor:
        index = y.argmax(1)
        for _ in range(40):
            index = torch.where(index > 2, index - 1, index)
        return y[index]

    assert "aten.index.Tensor" in check(picked, 4, 3)


def test_tiles_of_the_last_dims_are_repeats_of_all() -> None:
    assert check(lambda y: y.tile(2), 3, 4) == check(lambda y: y.tile(5, 1, 2), 3, 4) == ["aten.repeat.default"]


def test_a_weight_with_one_norm_for_all_its_elements_keeps_it() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.directions = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
            self.magnitude = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, torch._weight_norm(self.directions, self.magnitude, -1)).square().sum()

    graph = capture(Normed(), args=(torch.randn(2, 4, dtype=torch.float64),))
    (node,) = (node for node in graph.nodes if node.op == "aten._weight_norm.default")
    assert -1 in node.args  # not the last dim, whose magnitudes would be as many as its elements


def test_views_become_reshapes_with_all_sizes() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    views = [
        lambda y: y.view(2, 3, -1, 4),
        lambda y: y.flatten(0, 1),
        lambda y: y.unflatten(-1, (2, -1)),
        lambda y: y.view_as(torch.empty(6, 8)),
    ]
    shapes = [(2, 3, 2, 4), (6, 8), (2, 3, 2, 4), (6, 8)]
    for view, shape in zip(views, shapes):
        graph = capture(Calls(view, (2, 3, 8)), args=(x,))
        assert graph.nodes[1].op == "aten.reshape.default" and graph.nodes[1].args[1] == shape


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda y: y.view(6, 8).view(2, 3, 8), []),
        (lambda y: y.reshape(6, 8).reshape(48), ["aten.reshape.default"]),
        (lambda y: y.contiguous().clone().to(torch.float64) * 1.0 + 0, []),
        (lambda y: F.dropout(F.dropout(y, 0.0), 0.5, training=False), []),
        (lambda y: y.mT.transpose(-1, -2), ["aten.transpose.int", "aten.transpose.int"]),
        (lambda y: y.chunk(2, -1)[1] + y.split(4, 2)[0], ["aten.split_with_sizes.default"] * 2 + ["aten.add.Tensor"]),
        (lambda y: torch.concat([y, y], -1), ["aten.cat.default"]),
        (lambda y: y.detach() * y, ["aten.detach.default", "aten.mul.Tensor"]),
        (lambda y: y.data * y, ["aten.detach.default", "aten.mul.Tensor"]),
        (lambda y: y[..., 2:], ["aten.slice.Tensor"]),
        (lambda y: y[:, :, :], []),
        (lambda y: y.movedim(0, -1), ["aten.permute.default"]),
        (lambda y: torch.cat([y, y.new_ones(2, 1, 8)], 1), [f"aten.{op}.default" for op in ("ones", "expand", "cat")]),
        (lambda y: y.sum(0, keepdim=True).repeat(4, 1, 1), ["aten.sum.dim_IntList", "aten.expand.default"]),
    ],
)
def test_canonical_operators(function: Callable[[torch.Tensor], torch.Tensor], expected: list[str]) -> None:
    assert check(function, 2, 3, 8) == expected


def in_place_add(y: torch.Tensor) -> torch.Tensor:
    z = y * 2
    z.add_(1).mul_(y)
    return z


def through_a_slice(y: torch.Tensor) -> torch.Tensor:
    z = y.clone()
    before = z[0]
    z[:, 1:].mul_(3)
    z[0, 0] = y[1, 1]
    return z + before


def through_views(y: torch.Tensor) -> torch.Tensor:
    z = y.clone()
    flat = z.view(-1, 8)
    turned = flat.transpose(0, 1)
    turned[2].zero_()
    z[1].mul_(2)
    return flat + z.reshape(-1, 8) + turned.transpose(0, 1)


def through_pieces(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # autograd itself allows no write to a piece of split
        z = y.clone()
        left, right = z.split(4, -1)
        right.copy_(left)
        z.unbind(0)[1].relu_()
    return y * z + right.repeat(1, 1, 2)


def masked(y: torch.Tensor) -> torch.Tensor:
    z = y * 2
    z.masked_fill_(y > 1, 1.5)
    z.index_put_((torch.tensor([0, 1]),), y[:2], accumulate=True)
    return z.clamp_(max=2.0)


def with_written_literals(y: torch.Tensor) -> torch.Tensor:
    first = torch.tensor([1.0, 2.0], dtype=torch.float64)
    first += 1
    second = torch.tensor([1.0, 2.0], dtype=torch.float64)
    second[0] = 5
    return y * first.prod() + second.sum()


def with_assigning_operators(y: torch.Tensor) -> torch.Tensor:
    flags = y > 1
    flags |= y < -1
    flags &= y < 2
    flags ^= y > -0.5
    return y * flags


def shifted(y: torch.Tensor) -> torch.Tensor:
    z = y.new_zeros(y.shape)
    z[..., 1:] = y[..., :-1].clone()
    z[..., 0] = 7
    return z * y


def rounded_down(y: torch.Tensor) -> torch.Tensor:
    places = torch.arange(8, dtype=y.dtype)
    places //= 2
    return y * places.floor_divide_(torch.tensor(2, dtype=y.dtype))


def into_other_tensors(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # autograd itself allows no out=
        z, largest, places = y.clone(), y.new_empty(2, 3), y.new_empty(2, 3, dtype=torch.long)
        torch.div(y[:, 1:], 3, out=z[:, :2])
        torch.max(z, -1, out=(largest, places))
        torch.eye(3, 8, out=z[0])
        torch.arange(3, out=places[1])
        torch.full((3,), 7, out=largest[1])
    return y * z + (largest * places).unsqueeze(-1)


@pytest.mark.parametrize(
    "function",
    [
        in_place_add, through_a_slice, through_views, through_pieces, masked, with_written_literals,
        with_assigning_operators, shifted, rounded_down, into_other_tensors,
    ],
)  # fmt: skip
def test_in_place_operators_become_functional(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not [op for op in check(function, 2, 3, 8) if op.split(".")[1].endswith("_")]


def test_a_written_buffer_is_stored_once_at_the_end() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
            self.register_buffer("seen", torch.zeros(3, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.add_(x.mean(0))
            self.seen[0].mul_(2)
            return (x * self.weight * self.seen).sum()

    graph = assert_parity(Counts(), args=(torch.randn(4, 3, dtype=torch.float64),))
    assert ops(graph).count("aten.copy_.default") == 1 and ops(graph)[-1] == "aten.copy_.default"


def test_a_parameter_that_is_written_before_it_is_read_is_written_before_the_call() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.weight.mul_(2).clamp_(max=3)
            return x * self.weight

    graph = capture(Writes(), args=(torch.ones(3),))
    assert [(write.path, write.steps[-1].op, write.elementwise) for write in graph.parameter_writes] == [
        ("weight", "aten.mul_.Tensor", True),
        ("weight", "aten.clamp_.default", True),
    ]
    assert ops(graph) == ["aten.mul.Tensor"]


def test_a_parameter_whose_value_before_a_write_is_used_too_is_refused() -> None:
    class Normalises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            norm = self.weight.detach().norm()
            self.weight.data.div_(norm)
            return x * self.weight * norm

    with pytest.raises(CaptureError, match=r"in its forward, of what aten\.mul\.Tensor reads of it too"):
        capture(Normalises(), args=(torch.ones(3),))


def test_no_grad_regions_are_inlined_and_cut_the_gradient() -> None:
    def partly(y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = y.abs().amax(-1, keepdim=True)
            with torch.autocast("cpu", enabled=False):
                scale = scale + 1
        return y / scale

    assert "aten.detach.default" in check(partly, 2, 3, 8)


class Loss(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], inner: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(inner, dtype=torch.float64))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.function(x * self.weight, target).sum()


def flattened(logits: torch.Tensor, target: torch.Tensor, **options: object) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_keeps_batch_and_sequence(reduction: str, smoothing: float, ignored: int, weighted: bool) -> None:
    torch.manual_seed(0)
    target = torch.randint(0, 7, (2, 5))
    target[0, 3:] = ignored
    weight = torch.rand(7, dtype=torch.float64) if weighted else None
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored, "weight": weight}
    model = Loss(lambda logits, target: flattened(logits, target, **options), (2, 5, 7))
    graph = assert_parity(model, args=(torch.randn(2, 5, 7, dtype=torch.float64), target))
    node = next(node for node in graph.nodes if node.op == "meshwright.cross_entropy")
    assert node.args[2:] == (ignored, 0.0 if weighted else smoothing)
    assert node.output.shape == (2, 5) and node.output.requires_grad
    assert graph.values[node.inputs[0]].shape == (2, 5, 7)


@pytest.mark.parametrize(
    "function",
    [
        lambda logits, target: F.cross_entropy(logits.transpose(1, 2), target),
        lambda logits, target: F.cross_entropy(logits.permute(0, 2, 1), target, reduction="sum"),
        lambda logits, target: F.cross_entropy(logits.view(-1, 7).to(torch.float32), target.view(-1)).double(),
        lambda logits, target: F.nll_loss(F.log_softmax(logits.view(-1, 7), -1), target.view(-1)),
        lambda logits, target: F.cross_entropy(logits[0, 0], target[0, 0]),
    ],
)
def test_other_ways_to_call_cross_entropy(function: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    args = torch.randn(2, 5, 7, dtype=torch.float64), torch.randint(0, 7, (2, 5))
    graph = assert_parity(Loss(function, (2, 5, 7)), args=args)
    assert ops(graph).count("meshwright.cross_entropy") == 1
    assert "aten.log_softmax.int" not in ops(graph)


def test_probabilities_as_targets_are_a_sum_of_products() -> None:
    target = torch.rand(2, 7, dtype=torch.float64)
    graph = assert_parity(Loss(F.cross_entropy, (2, 7)), args=(torch.randn(2, 7, dtype=torch.float64), target))
    assert "aten.cross_entropy_loss.default" not in ops(graph) and "aten.log_softmax.int" in ops(graph)


def test_constants_are_marked_and_shared() -> None:
    def masked_twice(y: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            causal = torch.ones(8, 8, dtype=torch.bool).tril()
            y = torch.where(causal, y, 0.0) + torch.rand_like(y) * 0
        return y

    torch.manual_seed(0)
    graph = capture(Calls(masked_twice, (8, 8)), args=(torch.randn(8, 8, dtype=torch.float64),))
    assert [node.op for node in graph.nodes if node.constant] == ["aten.ones.default", "aten.tril.default"]
    assert ops(graph).count("aten.rand_like.default") == 2


def causal_mask(y: torch.Tensor) -> torch.Tensor:
    batch, length = torch.arange(4)[:, None, None], torch.arange(6)
    positions = length.expand(4, 6)
    mask = positions[batch, length[:, None]] >= positions[batch, length[None, :]]
    return torch.where(mask.expand(4, 6, 6), y, 0.5)


def mask_of_samples(y: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(4)[:, None, None].expand(4, 6, 6) > 1, y, 0.5)


def mask_in_place_of_values(y: torch.Tensor) -> torch.Tensor:
    ones = torch.arange(6.0).expand(4, 6, 6) + 1
    return torch.cat([y, ones * 2], 1)


@pytest.mark.parametrize(("function", "size"), [(causal_mask, 1), (mask_of_samples, 4), (mask_in_place_of_values, 4)])
def test_constants_are_narrow_where_they_are_uniform(
    function: Callable[[torch.Tensor], torch.Tensor], size: int
) -> None:
    x = torch.randn(4, 6, 6, dtype=torch.float64)
    graph = assert_parity(Calls(function, (4, 6, 6)), args=(x,))
    constants = {value.name: value for node in graph.nodes if node.constant for value in node.outputs}
    used = {name for node in graph.nodes if not node.constant for name in node.inputs if name in constants}
    assert {constants[name].shape[0] for name in used} == {size}


def test_flattened_linears_keep_their_dims() -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))
            self.bias = nn.Parameter(torch.randn(6, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x.view(-1, 8), self.weight).view(2, 3, 6).square().sum()

    graph = assert_parity(Conv1D(), args=(torch.randn(2, 3, 8, dtype=torch.float64),))
    assert ops(graph)[:2] == ["aten.transpose.int", "aten.linear.default"]
    assert graph.nodes[1].output.shape == (2, 3, 6)

    class SequenceFirst(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = super().forward(x.transpose(0, 1).reshape(-1, 8))
            return rows.view(3, 2, 6).transpose(0, 1).square().sum()

    layers = (nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 6))
    graph = assert_parity(SequenceFirst(*layers).double(), args=(torch.randn(2, 3, 8, dtype=torch.float64),))
    assert graph.nodes[3].output.shape == (3, 2, 6)
    assert not [op for op in ops(graph) if "reshape" in op]


class AttendsItself(nn.MultiheadAttention):
    """Attention of torch that also gives the weights, as it does unless it is told otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "layer",
    [
        nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True, dtype=torch.float64),
        AttendsItself(8, 2, batch_first=True, dtype=torch.float64),
    ],
)
def test_attention_of_torch_keeps_its_samples_apart(layer: nn.Module) -> None:
    graph = assert_parity(Sums(layer), args=(torch.randn(4, 3, 8, dtype=torch.float64),))
    assert all(node.output.shape[:2] in ((4, 3), (3, 4)) for node in graph.nodes if node.op == "aten.linear.default")


@pytest.mark.parametrize(("bound", "is_tested"), [(3, False), (4, False), (2, True)])
def test_ids_of_one_of_three_are_not_asked_whether_they_are_below_three(bound: int, is_tested: bool) -> None:
    def picked(y: torch.Tensor) -> torch.Tensor:
        ids, order = torch.sort(y.topk(1, dim=1)[1].reshape(-1))
        rows = y[order].masked_fill((ids >= bound).unsqueeze(-1), 0.0)
        return rows * y.sum(0)[ids.clamp(max=bound - 1)][:, None]

    tests = {"aten.masked_fill.Scalar", "aten.clamp.default", "aten.ge.Scalar"} & set(check(picked, 4, 3))
    assert bool(tests) == is_tested


def test_how_often_each_id_comes_is_a_sum_over_rows() -> None:
    def counted(y: torch.Tensor) -> torch.Tensor:
        return torch.bincount(y.topk(2, dim=1)[1].reshape(-1), minlength=3) * y

    found = check(counted, 4, 3)
    assert "aten.one_hot.default" in found and "aten.scatter_add.default" not in found
