"""Pipelines: running chunks of a model on several ranks, on ``torch.distributed.pipelining``."""

from runtime.pipeline.executor import PipelineExecutor
from runtime.pipeline.forward import broadcast_from_last, forward_only
from runtime.pipeline.specs import StageRunner, TensorSpec

__all__ = ["PipelineExecutor", "StageRunner", "TensorSpec", "broadcast_from_last", "forward_only"]
