"""A parallel module's weights in Hugging Face's files, and in PEFT's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from runtime.module.whole_state import WholeState
from runtime.state.owned import Owned
from runtime.weight_files import LoadedFiles, hugging_face_names, load_weights, save_config, save_weights
from runtime.weight_files.peft_adapters import (
    has_adapters,
    has_saved_adapters,
    read_adapters,
    save_adapters,
    save_merged,
)


class PretrainedFiles(WholeState):
    """Goes before ``nn.Module`` among the bases of ``ParallelModule``, whose weights it reads and writes."""

    wait_for_ranks: Callable[[], None]
    owned: Callable[[], tuple[Owned, ...]]

    def load_pretrained(self, path: str | FilePath, *, strict: bool = True) -> LoadedFiles:
        """Take this rank's parts of Hugging Face safetensors files, reading no others (all ranks must call it).

        Of a PEFT model adapters that were saved by themselves are read too, by the first rank.

        Args:
            path: a safetensors file, the index of several, or the directory with either or with adapters.
            strict: refuse missing and unexpected names, else take what fits. What the files do not hold stays as it is;
                buffers on meta that no state dict holds are computed as the model's own initialisation does.

        Raises:
            ValueError: on all ranks, as ``runtime.weight_files.load_weights``; nothing is changed then.
        """
        self.wait_for_ranks()
        if has_adapters(self._engine.model) and has_saved_adapters(path):
            adapters = read_adapters(self._engine.model, path, strict=strict)
            self.load_full_state_dict(adapters.tensors, strict=False)
            return LoadedFiles(adapters.num_bytes, adapters.missing, adapters.unexpected)
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
        self,
        path: str | FilePath,
        *,
        dtype: torch.dtype | None = None,
        merge_adapters: bool = False,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        is_main_process: bool = True,
        save_function: Callable[..., Any] | None = None,
    ) -> None:
        """Save the weights as Hugging Face does, with the model's config if it has one.

        All ranks must call it, or come to another call, where they join in. Every rank writes its own parts: ``path``
        is a directory on a file system that all ranks share. Of a PEFT model the first rank writes the adapters, for
        ``PeftModel.from_pretrained``.

        Args:
            dtype: of floating-point tensors in the files; None to keep each one's own.
            merge_adapters: of a PEFT model, save the base model with its adapters merged into its weights, which is
                done on the first rank.
            state_dict: as scripts for accelerate pass it: the model's own weights, whole or as DTensors.
            is_main_process, save_function: as such scripts pass them too; nothing depends on them, since every rank
                writes its own parts.

        Raises:
            ValueError: on all ranks, if tensors are still on meta, the directory is not shared, there are no
                adapters to merge, or ``state_dict`` has other weights than the model.
        """

        def save(path: str | FilePath, dtype: torch.dtype | None, merge_adapters: bool) -> None:
            self._save_pretrained(path, dtype, merge_adapters, state_dict)

        arguments: dict[str, Any] = {"path": path, "dtype": dtype, "merge_adapters": merge_adapters}
        if self._engine.waits:
            save(**arguments)  # with those at work, which agree among themselves
        else:
            self.call_joined("save_pretrained", save, **arguments)

    def _save_pretrained(
        self,
        path: str | FilePath,
        dtype: torch.dtype | None,
        merge_adapters: bool,
        state_dict: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        owned = self.owned()
        self._engine.ranks.together(lambda: None if state_dict is None else _check_own_weights(owned, state_dict))
        if has_adapters(self._engine.model):
            write = save_merged if merge_adapters else save_adapters
            write(self._engine.model, path, self.full_state_dict, dtype=dtype)
            return
        if merge_adapters:
            raise ValueError("merge_adapters is for models of peft, and this is none: leave it out")
        save_weights(self.owned(), path, order=tuple(self._engine.state.state_names), dtype=dtype)
        save_config(self._engine.model, path, dtype=dtype)


def _check_own_weights(owned: Sequence[Owned], state: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError for a state dict that is not that of the model, whose weights are saved."""
    for piece in owned:
        if not piece.persistent:
            continue
        name = next((name for name in (piece.name, *piece.aliases) if name in state), None)
        if (
            name is None
            or tuple(state[name].shape) != piece.shape
            or not _same(_part(state[name], piece), piece.tensor)
        ):
            raise ValueError(
                f"state_dict has {'no' if name is None else 'another'} {piece.name!r}: save_pretrained saves what the "
                "model holds, so leave state_dict out, or take its weights first by load_full_state_dict"
            )


def _part(tensor: torch.Tensor, piece: Owned) -> torch.Tensor:
    """What ``piece`` has of a tensor of its name."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    places = tuple(slice(first, first + size) for first, size in zip(piece.offsets, piece.tensor.shape, strict=True))
    return tensor[places].to(piece.tensor)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.allclose(one.detach(), other.detach(), rtol=0, atol=0, equal_nan=True))
