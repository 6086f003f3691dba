"""Pipelines: running chunks of a model on several ranks, on ``torch.distributed.pipelining``."""

from runtime.pipeline.executor import PipelineExecutor
from runtime.pipeline.specs import StageRunner, TensorSpec

__all__ = ["PipelineExecutor", "StageRunner", "TensorSpec"]
