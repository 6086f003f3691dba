"""Operators of ours that an emitted program calls: those that communicate inside, and those that draw random numbers.

All are written with torch operators that run on real process groups, on a fake one, on meta tensors, in
``LocalTensorMode`` and under ``spmd_types``' checker; none branches on the rank.
"""

from runtime.mesh.joint_axes import joint
from runtime.ops.attention import grouped_query_attention, scaled_dot_product_attention
from runtime.ops.buffers import running_again, store, stored_at_end, values_before
from runtime.ops.equal_parts import padded, trimmed
from runtime.ops.mesh_types import retyped
from runtime.ops.microbatch import (
    Microbatch,
    current_microbatch,
    in_microbatch,
    of_first_microbatch,
    of_microbatch,
)
from runtime.ops.program_collectives import reducing_in
from runtime.ops.random import (
    begin_step,
    bernoulli,
    dropout,
    get_random_state,
    rand,
    rand_like,
    randint,
    randint_like,
    randn,
    randn_like,
    seed,
    set_random_state,
)
from runtime.ops.row_shards import gathered_linear, gathered_linears, scattered_linear
from runtime.ops.sharded_expert_linear import expert_linear
from runtime.ops.sharded_experts import experts
from runtime.ops.sharded_linear_cross_entropy import linear_cross_entropy
from runtime.ops.vocabulary import cross_entropy, embedding

__all__ = [
    "Microbatch",
    "begin_step",
    "bernoulli",
    "cross_entropy",
    "current_microbatch",
    "dropout",
    "embedding",
    "expert_linear",
    "experts",
    "gathered_linear",
    "gathered_linears",
    "get_random_state",
    "grouped_query_attention",
    "in_microbatch",
    "joint",
    "linear_cross_entropy",
    "of_first_microbatch",
    "of_microbatch",
    "padded",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "reducing_in",
    "retyped",
    "running_again",
    "scaled_dot_product_attention",
    "scattered_linear",
    "seed",
    "set_random_state",
    "store",
    "stored_at_end",
    "trimmed",
    "values_before",
]
