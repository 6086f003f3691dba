"""From a plan of a whole step to one program for each pipeline chunk, for one micro-batch.

``step_programs`` applies the plan with every parameter's gradient left partial over the data ranks, takes out of the
loss what depends on the whole batch (``totals``), tells which operators belong to which unit (``chain``), and cuts
between chunks (``cut``). Whoever runs the chunks adds up losses and gradients over micro-batches and data ranks.
"""

from passes.pipeline_cut.deferral import BATCH_AXIS, DATA_AXES, Deferral, deferral_of
from passes.pipeline_cut.step_programs import StageGraph, StepPrograms, step_programs
from passes.pipeline_cut.totals import DependentSamplesError

__all__ = [
    "BATCH_AXIS",
    "DATA_AXES",
    "Deferral",
    "DependentSamplesError",
    "StageGraph",
    "StepPrograms",
    "deferral_of",
    "step_programs",
]
