"""The plan as data: its fields, its grammar and checks, its file, and its summary as text."""

from passes.plan.plan import Plan
from passes.plan.plan_data import (
    PLAN_VERSION,
    BlockPlan,
    Certificate,
    CollectivePlan,
    ConversionPlan,
    Costs,
    FusionPlan,
    NodePlan,
    PatternPlan,
    TensorPlan,
)

__all__ = [
    "PLAN_VERSION",
    "BlockPlan",
    "Certificate",
    "CollectivePlan",
    "ConversionPlan",
    "Costs",
    "FusionPlan",
    "NodePlan",
    "PatternPlan",
    "Plan",
    "TensorPlan",
]
