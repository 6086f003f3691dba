"""Weights in Hugging Face's format: safetensors files, one or several with an index, read and written in pieces."""

from runtime.weight_files.hugging_face import hugging_face_names, save_config
from runtime.weight_files.load import LoadedFiles, load_weights
from runtime.weight_files.materialise import materialise
from runtime.weight_files.plan_free_names import named_alike
from runtime.weight_files.save import save_weights

__all__ = [
    "LoadedFiles",
    "hugging_face_names",
    "load_weights",
    "materialise",
    "named_alike",
    "save_config",
    "save_weights",
]
