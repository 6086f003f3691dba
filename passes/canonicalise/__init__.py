"""Bring an exported FX graph to the one form that rules, search and emission know. One pass per file."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from torch import fx

from passes.canonicalise.asserts import drop_asserts
from passes.canonicalise.batch_norm import write_out_batch_norm
from passes.canonicalise.broadcasts import narrow_constants
from passes.canonicalise.causal_masks import name_causal_masks
from passes.canonicalise.constants import CONSTANT, mark_constants
from passes.canonicalise.counted_lookups import view_counted_lookups
from passes.canonicalise.cross_entropy_form import cross_entropy, split_cross_entropy
from passes.canonicalise.ctc_losses import write_out_ctc_losses
from passes.canonicalise.dead_code import drop_dead_code, drop_failed_calls
from passes.canonicalise.dense_biases import make_biases_dense
from passes.canonicalise.dense_experts import route_dense_experts
from passes.canonicalise.elementwise_checks import check_each_element
from passes.canonicalise.embedding_bags import write_out_embedding_bags
from passes.canonicalise.epsilons import write_out_epsilons
from passes.canonicalise.equal_pieces import batch_equal_pieces
from passes.canonicalise.expanded_indices import index_whole_rows
from passes.canonicalise.expert_branches import join_expert_branches
from passes.canonicalise.expert_gates import join_expert_gates
from passes.canonicalise.expert_loops import gather_expert_loops
from passes.canonicalise.expert_rows import expert_linear
from passes.canonicalise.filled_places import choose_by_mask
from passes.canonicalise.filled_scalars import fill_scalars
from passes.canonicalise.functionalise import functionalise
from passes.canonicalise.gathered_experts import name_gathered_experts
from passes.canonicalise.gradient_carriers import nodes_with_gradient
from passes.canonicalise.grouped_queries import group_queries
from passes.canonicalise.instance_norm import write_out_running_statistics
from passes.canonicalise.joined_pieces import unite_pieces
from passes.canonicalise.linears import unflatten_linears
from passes.canonicalise.lists_of_one import unpack_lists_of_one
from passes.canonicalise.loss_reductions import separate_loss_reductions
from passes.canonicalise.narrow_logits import read_narrow_logits
from passes.canonicalise.noops import drop_noops
from passes.canonicalise.out_arguments import replace_out_arguments
from passes.canonicalise.parameter_writes import WRITES
from passes.canonicalise.picked_entries import gather_picked_entries
from passes.canonicalise.random_operators import refuse_other_random_operators, write_out_random_operators
from passes.canonicalise.regions import inline_regions
from passes.canonicalise.repeated_rows import expand_repeated_rows
from passes.canonicalise.settled_choices import take_settled_choices
from passes.canonicalise.settled_ids import drop_tests_of_bounded_ids
from passes.canonicalise.sorted_experts import unsort_experts
from passes.canonicalise.sparse_gradients import make_gradients_dense
from passes.canonicalise.static_sizes import fix_sizes
from passes.canonicalise.synonyms import replace_synonyms
from passes.canonicalise.token_dims import unmerge_token_dims
from passes.canonicalise.view_forms import fold_reshapes, normalise_views
from passes.canonicalise.weighted_counts import sum_weighted_counts
from passes.canonicalise.written_parts import join_written_parts

__all__ = [
    "CONSTANT",
    "WRITES",
    "canonicalise",
    "cross_entropy",
    "expert_linear",
    "inline_regions",
    "nodes_with_gradient",
]


def canonicalise(
    module: fx.GraphModule,
    *,
    buffers: Collection[str],
    literals: Collection[str],
    trainable: Collection[str],
    picked: Mapping[int, str] | None = None,
    left_out: Collection[int] = (),
    mean_of_none: float = math.nan,
) -> set[str]:
    """Run every pass on ``module``, in place.

    Args:
        buffers, literals, trainable: names of the placeholders that are buffers, that are literal tensors, and that
            carry a gradient.
        picked: made-up numbers of rows that masks pick → where.
        left_out: those of them whose rows are left out.
        mean_of_none: what the mean of no rows is.

    Returns:
        names of the placeholders that rows which a mask picks go through, as ``compute_all_rows``.

    Raises:
        CaptureError: if something in the graph has no functional form.
    """
    inline_regions(module)
    drop_failed_calls(module)
    drop_asserts(module)
    write_out_ctc_losses(module)
    fix_sizes(module)
    write_out_random_operators(module)
    write_out_batch_norm(module)
    write_out_running_statistics(module)
    write_out_embedding_bags(module)
    separate_loss_reductions(module)
    replace_out_arguments(module)
    functionalise(module, buffers, trainable)
    replace_synonyms(module)
    check_each_element(module)
    fill_scalars(module)
    make_gradients_dense(module)
    write_out_epsilons(module)
    drop_noops(module, trainable)
    normalise_views(module)
    join_written_parts(module)
    unite_pieces(module)
    batch_equal_pieces(module)
    unpack_lists_of_one(module)
    drop_tests_of_bounded_ids(module)
    drop_dead_code(module)
    split_cross_entropy(module)
    index_whole_rows(module)
    choose_by_mask(module)
    of_layers = gather_expert_loops(module, picked or {}, trainable, left_out=left_out, mean_of_none=mean_of_none)
    join_expert_gates(module)
    join_expert_branches(module)
    unsort_experts(module)
    name_gathered_experts(module)
    route_dense_experts(module)
    sum_weighted_counts(module)
    view_counted_lookups(module)
    gather_picked_entries(module)
    expand_repeated_rows(module)
    drop_dead_code(module)
    read_narrow_logits(module)
    unmerge_token_dims(module)
    unflatten_linears(module)
    fold_reshapes(module)
    group_queries(module)
    mark_constants(module, literals)
    narrow_constants(module)
    name_causal_masks(module)
    take_settled_choices(module)
    drop_dead_code(module)
    drop_noops(module, trainable)
    make_biases_dense(module)
    mark_constants(module, literals)
    drop_dead_code(module)
    refuse_other_random_operators(module)
    return of_layers
