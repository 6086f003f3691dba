"""Functions of torch in operators that a program may have: most look at values, to check or to warn.

Tracing stops where a value is looked at. These look at numbers that the shapes decide (``cov`` at the number of
observations), at a buffer that they have just counted up (a batch norm without momentum), at a number that they have
spread themselves (``repeat_interleave``), or only to raise (``istft``). A sparse tensor is written out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def call_without_values(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the function ``name`` of torch gives; None where it is none of these, or not in a form that is known."""
    form = _FORMS.get(name)
    return form(*args, **kwargs) if form is not None and args and isinstance(args[0], torch.Tensor) else None


def normalised_and_averaged(layer: nn.BatchNorm1d, x: torch.Tensor) -> torch.Tensor:
    """A batch norm without momentum: every batch counts alike, the n-th moves the statistics by a share of 1/n."""
    assert layer.num_batches_tracked is not None and layer.running_mean is not None and layer.running_var is not None
    layer.num_batches_tracked.add_(1)
    output = F.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)
    values, others = x.detach(), [0, *range(2, x.dim())]
    mean = values.mean(others, keepdim=True)
    variance = (values - mean).square().sum(others) / (values.numel() // values.shape[1] - 1)
    share = layer.num_batches_tracked.to(variance.dtype).reciprocal()
    for running, of_batch in ((layer.running_mean, mean.flatten()), (layer.running_var, variance)):
        running.mul_(1 - share).add_(share * of_batch)
    return output


def _cov(
    x: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor | None:
    if x.dim() > 2 or not (x.is_floating_point() or x.is_complex()) or fweights is not None or aweights is not None:
        return None
    rows = x.reshape(1, -1) if x.dim() < 2 else x
    observations = rows.shape[1]
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.t().conj() / (observations - correction if observations > correction else 0)).squeeze()


def _corrcoef(x: torch.Tensor) -> torch.Tensor | None:
    covariance = _cov(x)
    if covariance is None or covariance.is_complex():
        return None
    if covariance.dim() == 0:
        return covariance / covariance
    deviation = covariance.diagonal().sqrt()
    return (covariance / deviation[:, None] / deviation[None]).clamp(-1, 1)


def _istft(
    spectrum: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> torch.Tensor | None:
    """Overlapped frames divided by their overlapped windows; not a number where windows leave a gap (torch refuses)."""
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    complex_window = window is not None and window.is_complex()
    if return_complex or complex_window or not spectrum.is_complex() or spectrum.dim() not in (2, 3) or width > n_fft:
        return None
    if onesided is False:
        spectrum = spectrum[..., : n_fft // 2 + 1, :]
    if spectrum.shape[-2] != n_fft // 2 + 1 or (window is not None and window.shape != (width,)):
        return None
    real = spectrum.real
    window = real.new_ones(width) if window is None else window
    left = (n_fft - width) // 2
    window = F.pad(window, (left, n_fft - width - left))
    norm = "ortho" if normalized else "backward"
    frames = torch.fft.irfft(spectrum.transpose(-1, -2), n=n_fft, norm=norm) * window
    frames = frames if frames.dim() == 3 else frames[None]
    count = frames.shape[1]
    whole = n_fft + hop * (count - 1)
    weight = window.square()[None, None].expand(1, count, n_fft)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else whole - start
    sound, envelope = (_overlapped(part, n_fft, hop, whole)[:, start:end] for part in (frames, weight))
    signal = F.pad(sound / envelope, (0, max(0, end - whole)))
    return signal[0] if spectrum.dim() == 2 else signal


def _overlapped(frames: torch.Tensor, n_fft: int, hop: int, whole: int) -> torch.Tensor:
    """[batch, frames, n_fft] → [batch, whole]: each frame added where it begins."""
    return F.fold(frames.transpose(1, 2), (1, whole), (1, n_fft), stride=(1, hop)).flatten(1)


def _sparse_coo_tensor(
    indices: torch.Tensor, values: Any, size: Sequence[int] | None = None, **options: Any
) -> torch.Tensor | None:
    """The same numbers with the zeros between them written out: a plan cuts tensors with strides."""
    if size is None or options or not isinstance(values, torch.Tensor) or values.dim() != 1 or indices.dim() != 2:
        return None
    return values.new_zeros(tuple(size)).index_put(indices.unbind(0), values, accumulate=True)


def _repeat_interleave(
    x: torch.Tensor, repeats: Any = None, dim: int | None = None, *, output_size: int | None = None
) -> torch.Tensor | None:
    """One number of repeats for all entries: torch spreads it out of the tracer's sight, where its value is unknown."""
    if not isinstance(repeats, torch.Tensor) or repeats.numel() != 1:
        return None
    entries = x.flatten() if dim is None else x
    spread = repeats.reshape(1).expand(entries.shape[dim or 0])
    return entries.index_select(dim or 0, torch.repeat_interleave(spread, output_size=output_size))


#: Names of functions and methods of torch → their forms, which give None for arguments that they do not know.
_FORMS: dict[str, Callable[..., torch.Tensor | None]] = {
    "cov": _cov, "corrcoef": _corrcoef, "istft": _istft, "sparse_coo_tensor": _sparse_coo_tensor,
    "repeat_interleave": _repeat_interleave,
}  # fmt: skip
