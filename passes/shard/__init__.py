"""Apply a plan to a graph: what one rank computes, with every change of type an explicit step.

The result is a main section and one section for each run of identical blocks. In a section, a conversion stands just
before the first use that needs it and is shared by all later uses. Values that all copies of a block share are
converted once, outside the loop; what a copy takes from the one before it has one placement, the plan's.
"""

from passes.shard.apply_plan import shard
from passes.shard.context import PlanMismatch, UndividedError, UnitMismatch, input_key
from passes.shard.sharded_graph import (
    Compute,
    Convert,
    Local,
    Repeat,
    RepeatedBlock,
    Section,
    ShardedGraph,
    StateRef,
    UnitPolicy,
)

__all__ = [
    "Compute",
    "Convert",
    "Local",
    "PlanMismatch",
    "Repeat",
    "RepeatedBlock",
    "Section",
    "ShardedGraph",
    "StateRef",
    "UndividedError",
    "UnitMismatch",
    "UnitPolicy",
    "input_key",
    "shard",
]
