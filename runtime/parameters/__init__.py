"""What users hold of a parallel module: parameters that are DTensors, over the plain tensors that programs run on."""

from runtime.parameters.parameter_tree import ParameterTree
from runtime.parameters.sharded import SCALARS, ShardedParameter, local_of

__all__ = ["SCALARS", "ParameterTree", "ShardedParameter", "local_of"]
