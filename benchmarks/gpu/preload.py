"""What the server of ``benchmarks.gpu.running`` imports before it forks; nothing here touches a GPU.

Modules of transformers with models in them ask for the accelerator: each process imports those.
"""

from __future__ import annotations

import contextlib

import highspy  # noqa: F401
import torch.export._trace  # noqa: F401

import benchmarks.kill_worker  # noqa: F401
import planner.compilation
import planner.whole_step.plan_step  # noqa: F401

with contextlib.suppress(ImportError):
    import transformers.models.auto.modeling_auto
    import transformers.utils.type_validators  # noqa: F401
