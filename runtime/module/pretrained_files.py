"""A parallel module's weights in Hugging Face's files, and in PEFT's."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path as FilePath

import torch

from runtime.execution.engine import Engine
from runtime.state.owned import Owned
from runtime.weight_files import LoadedFiles, hugging_face_names, load_weights, save_config, save_weights
from runtime.weight_files.peft_adapters import has_adapters, save_adapters, save_merged


class PretrainedFiles:
    """Goes before ``nn.Module`` among the bases of ``ParallelModule``, whose weights it reads and writes."""

    _engine: Engine
    owned: Callable[[], tuple[Owned, ...]]
    weights_changed: Callable[[], None]
    full_state_dict: Callable[[Collection[str]], dict[str, torch.Tensor]]

    def load_pretrained(self, path: str | FilePath, *, strict: bool = True) -> LoadedFiles:
        """Take this rank's parts of Hugging Face safetensors files, reading no others (all ranks must call it).

        Args:
            path: a safetensors file, the index of several, or the directory with either.
            strict: refuse missing and unexpected names, else take what fits. What the files do not hold stays as it is;
                buffers on meta that no state dict holds are computed as the model's own initialisation does.

        Raises:
            ValueError: on all ranks, as ``runtime.weight_files.load_weights``; nothing is changed then.
        """
        loaded = load_weights(
            self.owned(),
            path,
            names=tuple(self._engine.state.state_names),
            strict=strict,
            device=self._engine.layout.device,
            **hugging_face_names(self._engine.model),
        )
        self.weights_changed()
        return loaded

    def save_pretrained(
        self, path: str | FilePath, *, dtype: torch.dtype | None = None, merge_adapters: bool = False
    ) -> None:
        """Save the weights as Hugging Face does, with the model's config if it has one (all ranks must call it).

        Every rank writes its own parts: ``path`` is a directory on a file system that all ranks share. Of a PEFT model
        the first rank writes the adapters, for ``PeftModel.from_pretrained``.

        Args:
            dtype: of floating-point tensors in the files; None to keep each one's own.
            merge_adapters: of a PEFT model, save the base model with its adapters merged into its weights, which is
                done on the first rank.

        Raises:
            ValueError: on all ranks, if tensors are still on meta, the directory is not shared, or there are no
                adapters to merge.
        """
        if has_adapters(self._engine.model):
            save = save_merged if merge_adapters else save_adapters
            save(self._engine.model, path, self.full_state_dict, dtype=dtype)
            return
        if merge_adapters:
            raise ValueError("merge_adapters is for models of peft, and this is none: leave it out")
        save_weights(self.owned(), path, order=tuple(self._engine.state.state_names), dtype=dtype)
        save_config(self._engine.model, path, dtype=dtype)
