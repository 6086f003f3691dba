"""Loops over experts that pick each expert's rows, compute them and add them up: as rows that stay where they are.

    for e in range(E):
        token, choice = torch.where(chosen == e)
        out.index_add_(0, token, expert[e](x[token]) * scores[token, choice, None])

becomes ``(layers of expert_linear(x, chosen, weights) * scores).sum(choices)``. Each expert's expression has to be the
same, row by row, but for its weights (``expert_expressions``); the masks have to exclude each other, because they
compare one tensor with different numbers or are entries of one-hot rows (``expert_masks``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from passes.canonicalise.dead_code import drop_dead_code
from passes.canonicalise.expert_expressions import (
    ExpertRows,
    MaskPlaces,
    places_of,
    root_of,
    row_operators_of,
    same_value,
)
from passes.canonicalise.expert_masks import ExpertMask, RoutedTokens, expert_mask, routed_tokens
from passes.canonicalise.fx import argument, aten, calls, insert, shape
from passes.canonicalise.loss_reductions import separate_losses_of_rows
from passes.canonicalise.masked_rows import compute_all_rows, leave_out_sums
from passes.ir.errors import CaptureError

_FILLED = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


def gather_expert_loops(
    module: fx.GraphModule,
    counts: Mapping[int, str],
    trainable: Collection[str],
    *,
    left_out: Collection[int],
    mean_of_none: float,
) -> set[str]:
    """Replace what is written row by row.

    Args:
        counts: made-up numbers of rows → where the model picks them.
        trainable: names of the placeholders that carry a gradient.
        left_out: those of them whose rows are left out.
        mean_of_none: what the mean of no rows is.

    Returns:
        as ``compute_all_rows``, of rows that no loop over experts picks.

    Raises:
        CaptureError: if something else is done with picked rows.
    """
    if not counts:
        return set()
    separate_losses_of_rows(module, counts)
    for node in calls(module.graph):
        write = _write(node, counts)
        if write is None or any(getattr(_write(user, counts), "base", None) is node for user in node.users):
            continue
        chain = _chain(write, counts)
        if left_out:
            _leave_out(chain, left_out)
        else:
            _replace_chain(chain)
    if left_out:
        leave_out_sums(module, left_out, mean_of_none)
        drop_dead_code(module)
        return set()
    drop_dead_code(module)
    of_layers = compute_all_rows(module, counts, trainable, mean_of_none)
    drop_dead_code(module)
    for node in calls(module.graph, aten.nonzero_static.default):
        place = counts.get(argument(node, "size"))
        if place is not None:
            raise CaptureError(
                f"in {place}: the shape of a result depends on a value that the program leaves open: how many rows "
                "a mask picks; and what is computed on them is not each row's own, put back or added up, nor the "
                "same linear layers for every expert, row by row, added up: compute every row and choose with "
                "torch.where"
            )
    return of_layers


class _Write(NamedTuple):
    """``base`` with ``rows`` put or added at ``places``.

    Attributes:
        num_rows: how many rows.
        kind: "add"; "once": added, where a row that is picked twice counts once; "put".
    """

    node: fx.Node
    base: fx.Node
    places: MaskPlaces
    rows: fx.Node
    num_rows: int
    kind: str


def _write(node: fx.Node, counts: Collection[int]) -> _Write | None:
    args: Any = node.args
    if node.target is aten.index_add.default and args[1] == 0 and argument(node, "alpha") == 1:
        indices, rows, kind = [args[2]], args[3], "add"
    elif node.target is aten.index_put.default:
        indices, rows, kind = args[1], args[2], "add" if argument(node, "accumulate") else "put"
    else:
        return None
    base = args[0]
    places = places_of(indices)
    if places is None or not shape(rows) or shape(rows)[0] not in counts:
        return None
    if shape(rows)[1:] != shape(base)[len(places.dims) :]:
        return None
    count = shape(rows)[0]
    if kind == "put" and rows.target is aten.add.Tensor and argument(rows, "alpha") == 1:
        operands: Any = rows.args
        for before, update in (operands, operands[::-1]):
            is_read = isinstance(before, fx.Node) and before.target is aten.index.Tensor and before.args[0] is base
            if is_read and places_of(before.args[1]) == places and isinstance(update, fx.Node):
                return _Write(node, base, places, update, count, "once") if shape(update) == shape(rows) else None
    return _Write(node, base, places, rows, count, kind)


def _chain(last: _Write, counts: Collection[int]) -> list[_Write]:
    """The writes to one tensor, the first one first."""
    chain = [last]
    while (before := _write(chain[-1].base, counts)) is not None:
        chain.append(before)
    return chain[::-1]


def _leave_out(chain: Sequence[_Write], left_out: Collection[int]) -> None:
    """Take out the writes of some numbers of rows."""
    for write in reversed(chain):
        if write.num_rows in left_out:
            write.node.replace_all_uses_with(write.base)


def _replace_chain(chain: Sequence[_Write]) -> None:
    """Put the sum over all experts in the place of the last write, if it can be computed so."""
    masks = [expert_mask(root_of(write.places.mask)) for write in chain]
    groups: dict[Any, list[tuple[ExpertMask, _Write]]] = {}
    sources: list[fx.Node] = []
    for mask, write in zip(masks, chain):
        if mask is None:
            return
        source = next((each for each in sources if same_value(each, mask.source)), mask.source)
        sources.append(source)
        key = (source, mask.form, write.places.dims, write.kind)
        groups.setdefault(key, []).append((mask._replace(source=source), write))
    total = chain[0].base
    for group in groups.values():
        for run in _alike_runs(sorted(group, key=lambda entry: entry[0].expert)):
            added = _with_group(total, run, at=chain[-1].node)
            if added is None:
                return
            total = added
    chain[-1].node.replace_all_uses_with(total)


def _alike_runs(in_order: Sequence[tuple[ExpertMask, _Write]]) -> list[list[tuple[ExpertMask, _Write]]]:
    """Experts in their order, those behind each other whose expressions are of the same operators together."""
    runs: list[list[tuple[ExpertMask, _Write]]] = []
    last: object = None
    for mask, write in in_order:
        operators = row_operators_of(write.rows, root_of(write.places.mask))
        if not runs or operators != last:
            runs.append([])
        runs[-1].append((mask, write))
        last = operators
    return runs


def _with_group(base: fx.Node, in_order: Sequence[tuple[ExpertMask, _Write]], *, at: fx.Node) -> fx.Node | None:
    """``base`` and what some experts of one choice write to it; None if it cannot be computed so."""
    masks, writes = [mask for mask, _ in in_order], [write for _, write in in_order]
    if [mask.expert - masks[0].expert for mask in masks] != list(range(len(masks))):
        return None
    roots = [root_of(write.places.mask) for write in writes]
    is_flat = roots[0] is not writes[0].places.mask
    rank = len(shape(roots[0]))
    if is_flat and writes[0].places.dims != (0,):
        return None
    token_dims = tuple(range(rank)) if is_flat else writes[0].places.dims
    tokens = routed_tokens(at, masks, rank=rank, token_dims=token_dims)
    if tokens is None or not _excludes(tokens, masks[0], writes[0]):
        return None
    rows = ExpertRows(at, tokens, roots).rows([write.rows for write in writes])
    if rows is None or shape(rows)[: len(shape(tokens.ids))] != shape(tokens.ids):
        return None
    total = rows
    if not tokens.single:
        total = insert(at, aten.sum.dim_IntList, (_dropped(at, tokens, rows), [tokens.num_token_dims]))
    if shape(total) != shape(base):
        total = insert(at, aten.reshape.default, (total, list(shape(base))))
    if writes[0].kind != "put":
        return total if base.target in _FILLED else insert(at, aten.add.Tensor, (base, total))
    if tokens.valid is None:
        return total  # every row is written
    num_dims = len(writes[0].places.dims)
    sizes = [*shape(base)[:num_dims], *[1] * (len(shape(base)) - num_dims)]
    written = insert(at, aten.reshape.default, (tokens.valid, sizes))
    return insert(at, aten.where.self, (written, total, base))


def _excludes(tokens: RoutedTokens, mask: ExpertMask, write: _Write) -> bool:
    """Whether what is written of one choice leaves that of the others as it is."""
    if write.kind == "put":
        return mask.form != "any" and len(write.places.dims) == len(shape(write.places.mask))
    return tokens.distinct or (write.kind == "add" and mask.form != "any")


def _dropped(at: fx.Node, tokens: RoutedTokens, rows: fx.Node) -> fx.Node:
    """``rows`` without those of no expert: their scores, where there are any, are zero."""
    if tokens.valid is None:
        return rows
    if rows.target is aten.mul.Tensor:
        factors: list[Any] = list(rows.args)
        for place, factor in enumerate(factors):
            scores = _scores(factor, tokens)
            if scores is not None:
                zero = insert(at, aten.zeros_like.default, (scores,))
                counted = insert(at, aten.where.self, (tokens.valid, scores, zero))
                factors[place] = insert(at, aten.unsqueeze.default, (counted, tokens.num_token_dims + 1))
                return insert(at, aten.mul.Tensor, tuple(factors))
    zero = insert(at, aten.zeros_like.default, (rows,))
    return insert(at, aten.where.self, (insert(at, aten.unsqueeze.default, (tokens.valid, -1)), rows, zero))


def _scores(factor: Any, tokens: RoutedTokens) -> fx.Node | None:
    """The scores [*tokens, K] of which a factor of the rows is ``scores[..., None]``; None if it is not."""
    if not isinstance(factor, fx.Node) or factor.target is not aten.unsqueeze.default:
        return None
    scores, dim = factor.args
    rank = tokens.num_token_dims + 1
    return scores if dim in (-1, rank) and shape(scores) == shape(tokens.ids) else None  # type: ignore[arg-type, return-value]
