"""Masks become what attention can be told, exactly where that is the same mathematics."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from capture_parity import assert_parity
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from passes.canonicalise.bands import BandFinder
from passes.canonicalise.constants import mark_constants
from passes.canonicalise.synonyms import replace_synonyms
from passes.canonicalise.view_forms import normalise_views
from passes.capture import capture
from passes.ir.graph import Graph, Node
from passes.rules import forward_flops
from passes.rules.operator_call import OperatorCall, bind
from runtime.ops.attention import causal_without_mask

SDPA = "aten.scaled_dot_product_attention.default"
Mask = Callable[[int, int], torch.Tensor]


class Attends(nn.Module):
    """Attention of a projected input to itself (its first ``keys`` positions) under a mask made in forward."""

    def __init__(self, mask: Mask, *, keys: int | None = None, width: int = 4) -> None:
        super().__init__()
        self.mask, self.keys = mask, keys
        self.project = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x).unsqueeze(1)
        seen = y[:, :, : self.keys]
        mask = self.mask(y.shape[-2], seen.shape[-2])
        return F.scaled_dot_product_attention(y, seen, seen, attn_mask=mask, scale=0.7).square().sum()


def attention_of(graph: Graph) -> OperatorCall:
    (node,) = (node for node in graph.nodes if node.op == SDPA)
    call = bind(node, graph.values)
    assert call is not None
    return call


def positions(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(rows)[:, None], torch.arange(keys)[None, :]


def compared(rows: int, keys: int) -> torch.Tensor:
    i, j = positions(rows, keys)
    return j <= i


def mirrored(rows: int, keys: int) -> torch.Tensor:
    i, j = positions(rows, keys)
    return (i >= j)[None, None].expand(2, 1, rows, keys)


def twice_negated(rows: int, keys: int) -> torch.Tensor:
    i, j = positions(rows, keys)
    return ~((j > i) | (j > i + 3))


def low_where_hidden(rows: int, keys: int) -> torch.Tensor:
    zeros = torch.zeros((), dtype=torch.float64)
    return torch.where(compared(rows, keys), zeros, torch.finfo(torch.float64).min)


def triangle_of_infinity(rows: int, keys: int) -> torch.Tensor:
    return torch.full((rows, keys), -torch.inf, dtype=torch.float64).triu(1)


def filled_triangle(rows: int, keys: int) -> torch.Tensor:
    ones = torch.ones(rows, keys, dtype=torch.float64)
    return torch.zeros_like(ones).masked_fill(ones.tril() == 0, -torch.inf)


def by_distance(rows: int, keys: int) -> torch.Tensor:
    """No band by its operators: known by its values."""
    i, j = positions(rows, keys)
    return (i - j).clamp(-1, 0) == 0


def one_document(rows: int, keys: int) -> torch.Tensor:
    """As transformers: positions that go on belong to the same document."""
    document = (torch.arange(rows).expand(2, rows).diff(prepend=-torch.ones(2, 1).long(), dim=1) != 1).cumsum(1)
    return compared(rows, keys) & (document[:, None, :, None] == document[:, None, None, :])


def wide_window(rows: int, keys: int) -> torch.Tensor:
    i, j = positions(rows, keys)
    return (j > i - rows) & compared(rows, keys)


def chunks_behind_padding(rows: int, keys: int, *, size: int) -> torch.Tensor:
    """As transformers: attention within chunks, counted from where each sample's padding ends (none)."""
    i, j = positions(rows, keys)
    padding = torch.zeros(2, dtype=torch.int64)[:, None, None, None]
    return compared(rows, keys) & ((i - padding) // size == (j - padding) // size)


def one_chunk(rows: int, keys: int) -> torch.Tensor:
    return chunks_behind_padding(rows, keys, size=rows + 2)


def short_chunks(rows: int, keys: int) -> torch.Tensor:
    return chunks_behind_padding(rows, keys, size=4)


CAUSAL = [compared, mirrored, twice_negated, low_where_hidden, triangle_of_infinity, filled_triangle, by_distance,
          one_document, wide_window, one_chunk]  # fmt: skip


def window(rows: int, keys: int) -> torch.Tensor:
    i, j = positions(rows, keys)
    return (j > i - 3) & compared(rows, keys)


def strictly_earlier_or_first(rows: int, keys: int) -> torch.Tensor:
    i, j = positions(rows, keys)
    return (j < i) | (j == 0)


def two_documents(rows: int, keys: int) -> torch.Tensor:
    i, j = positions(rows, keys)
    return compared(rows, keys) & (i // 3 == j // 3)


def hardly_hidden(rows: int, keys: int) -> torch.Tensor:
    return torch.where(compared(rows, keys), 0.0, -10.0).double()


def weighted(rows: int, keys: int) -> torch.Tensor:
    return torch.where(compared(rows, keys), 0.5, -torch.inf).double()


def later(rows: int, keys: int) -> torch.Tensor:
    i, j = positions(rows, keys)
    return j >= i


def on_a_grid(rows: int, keys: int) -> torch.Tensor:
    """Of positions that are two results of one call."""
    i, j = torch.meshgrid(torch.arange(rows), torch.arange(keys), indexing="ij")
    return (j - i).abs() < 2


OTHERS = [short_chunks, window, strictly_earlier_or_first, two_documents, hardly_hidden, weighted, later, on_a_grid]


def everything(rows: int, keys: int) -> torch.Tensor:
    return torch.arange(rows)[:, None].ge(0).expand(2, 1, rows, keys)


def nothing_added(rows: int, keys: int) -> torch.Tensor:
    return torch.zeros(1, 1, rows, keys, dtype=torch.float64)


def seen_by_all_rows(rows: int, keys: int) -> torch.Tensor:
    return torch.ones(1, keys, dtype=torch.bool)


def check(mask: Mask, *, keys: int | None = None) -> OperatorCall:
    """The attention of a captured model, which computes what the model does."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    return attention_of(assert_parity(Attends(mask, keys=keys), args=(x,)))


@pytest.mark.parametrize("mask", CAUSAL)
def test_causal_masks_become_a_flag(mask: Mask) -> None:
    call = check(mask)
    assert call["is_causal"] and not call.has("attn_mask") and call["scale"] == 0.7


@pytest.mark.parametrize("mask", OTHERS)
def test_other_masks_stay(mask: Mask) -> None:
    call = check(mask)
    assert not call["is_causal"] and call.has("attn_mask")
    assert call.shape("attn_mask")[-4:-2] in ((), (1, 1)), "one copy for all samples"


@pytest.mark.parametrize("mask", [everything, nothing_added, seen_by_all_rows])
def test_masks_that_hide_nothing_are_left_out(mask: Mask) -> None:
    call = check(mask, keys=4)
    assert not call["is_causal"] and not call.has("attn_mask")


def test_fewer_keys_than_queries_are_not_called_causal() -> None:
    call = check(compared, keys=4)
    assert not call["is_causal"] and call.has("attn_mask")


def test_padding_that_is_given_stays() -> None:
    class Padded(nn.Module):
        def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
            mask = compared(6, 6) & padding[:, None, None, :]
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x = torch.randn(2, 1, 6, 4)
    graph = capture(Padded(), args=(x, torch.ones(2, 6, dtype=torch.bool)))
    assert attention_of(graph).has("attn_mask")


def test_dropout_and_grouped_keys_stay_as_they_are() -> None:
    class Grouped(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            mask = compared(6, 6)
            return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, dropout_p=0.25, enable_gqa=True)

    call = attention_of(capture(Grouped(), args=(torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8))))
    assert call["is_causal"] and call["dropout_p"] == 0.25 and call["enable_gqa"] and call["scale"] is None


@pytest.mark.parametrize("mask", [one_document, wide_window, low_where_hidden])
def test_long_masks_are_never_formed(mask: Mask) -> None:
    length = 2**21
    model = Attends(mask).to("meta")
    # A mask of four tera-elements fits no machine.
    call = attention_of(capture(model, args=(torch.empty(2, length, 4, dtype=torch.float64, device="meta"),)))
    assert call["is_causal"] and not call.has("attn_mask")


def test_a_window_is_told_from_a_causal_mask_however_long() -> None:
    def nearly(rows: int, keys: int) -> torch.Tensor:
        i, j = positions(rows, keys)
        return (j > i - (rows - 1)) & compared(rows, keys)

    model = Attends(nearly).to("meta")
    graph = capture(model, args=(torch.empty(1, 65536, 4, dtype=torch.float64, device="meta"),))
    assert attention_of(graph).has("attn_mask"), "the last row does not see the first key"


@pytest.mark.parametrize("rank", range(4))
def test_the_mask_free_path_of_causal_attention(rank: int) -> None:
    """What GPUs run instead of a mask: keys up to the rank's last query, aligned at the end."""
    query, key = torch.randn(2, 4, 8, 4, dtype=torch.float64), torch.randn(2, 4, 8, 4, dtype=torch.float64)
    whole = F.scaled_dot_product_attention(query, key, key, is_causal=True, scale=0.3)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        with spmd.set_current_mesh(mesh), warnings.catch_warnings(action="ignore"):
            rows = query[:, :, 2 * rank : 2 * rank + 2]
            masks = causal_without_mask(rows, key, key, ("a", "b"), scale=0.3, enable_gqa=False)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(masks, whole[:, :, 2 * rank : 2 * rank + 2])


class Biased(nn.Module):
    """Attention with a learned bias of positions, hidden where ``mask`` says so, as T5's."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask
        self.bias = nn.Parameter(torch.randn(1, 2, 6, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.where(self.mask(6, 6), self.bias, torch.finfo(x.dtype).min)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=bias).square().sum()


@pytest.mark.parametrize(("mask", "masked"), [(everything, False), (mirrored, True)])
def test_a_learned_bias_is_hidden_only_where_something_is(mask: Mask, masked: bool) -> None:
    torch.manual_seed(0)
    graph = assert_parity(Biased(mask), args=(torch.randn(2, 2, 6, 4, dtype=torch.float64),))
    assert any(node.op.startswith("aten.where") for node in graph.nodes) == masked
    if not masked:
        mask_of = attention_of(graph)
        assert mask_of.shape("attn_mask") == (1, 2, 6, 6), "one copy for all samples"


def test_settled_choices_keep_their_shape() -> None:
    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nothing = torch.zeros(3, 6, 6, dtype=torch.bool)
            return (self.weight.masked_fill(nothing[0], 1.0) * x + torch.where(~nothing, self.weight, 2.0)).sum()

    graph = assert_parity(Chooses(), args=(torch.randn(3, 6, 6, dtype=torch.float64),))
    assert not [node.op for node in graph.nodes if "where" in node.op or "fill" in node.op]


# -- the algebra of bands against the matrices themselves ------------------------------------------------------------


def expression(place: int, number: int, last: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """One of ``EXPRESSIONS`` operators on Boolean masks."""
    i, j = positions(*last.shape)
    makers: list[Callable[[], torch.Tensor]] = [
        lambda: j > i - (1 + number), lambda: i == j, lambda: i != j, lambda: (j // 2) >= (i // 2), lambda: i < j,
        lambda: ~last, lambda: last & other, lambda: last | other, lambda: last != other, lambda: (j < 2) & other,
        lambda: last.tril(number - 1), lambda: last.triu(number - 1), lambda: torch.where(last, other, True),
        lambda: torch.logical_and(last, i > 1), lambda: last.double().mul(2.0).sub(1.0) > 0,
        lambda: torch.where(last, 0.0, -torch.inf) == 0,
    ]  # fmt: skip
    return makers[place]()


EXPRESSIONS = 16


class Masks(nn.Module):
    """Masks over ``rows`` × ``keys``, one made of those before, by the (place, number) of ``expression``."""

    def __init__(self, rows: int, keys: int, program: list[tuple[int, int]]) -> None:
        super().__init__()
        self.rows, self.keys, self.program = rows, keys, program

    def forward(self) -> torch.Tensor:
        masks = [compared(self.rows, self.keys)]
        for place, number in self.program:
            masks.append(expression(place, number, masks[-1], masks[number % len(masks)]))
        return masks[-1]


PROGRAMS = st.lists(st.tuples(st.integers(0, EXPRESSIONS - 1), st.integers(0, 2)), max_size=5)


@settings(deadline=None, max_examples=50, derandomize=True)
@given(rows=st.integers(2, 6), keys=st.integers(2, 6), program=PROGRAMS)
def test_a_band_is_the_matrix(rows: int, keys: int, program: list[tuple[int, int]]) -> None:
    model = Masks(rows, keys, program)
    module = traced(model)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    band = BandFinder().band(output.args[0][0])
    if band is not None:
        j = torch.arange(keys)
        inside = (band.start[:, None] <= j) & (j < band.stop[:, None])
        assert torch.equal(torch.where(inside, band.values[0], band.values[1]), model())


def traced(model: nn.Module) -> fx.GraphModule:
    """The operators that ``model`` calls, in canonical names, its constants marked."""
    module = torch.export.export(model, (), strict=False).graph_module
    replace_synonyms(module)
    normalise_views(module)
    mark_constants(module, ())
    return module


@pytest.mark.parametrize("place", range(EXPRESSIONS))
def test_every_operator_on_a_causal_mask_is_understood(place: int) -> None:
    model = Masks(5, 5, [(place, 1)])
    (output,) = (node for node in traced(model).graph.nodes if node.op == "output")
    assert BandFinder().band(output.args[0][0]) is not None


def test_flops_of_a_causal_call_are_half() -> None:
    def flops(mask: Mask) -> float:
        graph = capture(Attends(mask), args=(torch.randn(2, 64, 4, dtype=torch.float64),))
        node: Node = attention_of(graph).node
        return forward_flops(node, graph.values)

    assert flops(compared) == pytest.approx(flops(everything) / 2)
