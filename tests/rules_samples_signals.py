"""Samplers (see ``rules_samples``) of recurrent layers, Fourier transforms, sampling grids and pools with indices."""

from __future__ import annotations

import torch
from rules_samples import Arguments, Draw, sampler

from passes.torch_compat import fake_quantization  # noqa: F401  (shapes without data)

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def _weights(draw: Draw, gates: int, inputs: int, hidden: int, biases: bool) -> list[torch.Tensor]:
    shapes = [(gates * hidden, inputs), (gates * hidden, hidden), *[(gates * hidden,)] * (2 * biases)]
    return [draw.normal(*shape) for shape in shapes]


def _recurrent(draw: Draw, kind: str) -> Arguments:
    batch, length, hidden, layers = draw.of(1, 2, 4), draw.int(1, 2), 2, draw.int(1, 2)
    both, batch_first, biases = draw.flag(), draw.flag(), draw.flag()
    x = draw.normal(*((batch, length, 3) if batch_first else (length, batch, 3)))
    directions = 2 if both else 1
    states = [draw.normal(layers * directions, batch, hidden) for _ in range(2 if kind == "lstm" else 1)]
    weights = [
        weight
        for layer in range(layers)
        for _ in range(directions)
        for weight in _weights(draw, GATES[kind], hidden * directions if layer else 3, hidden, biases)
    ]
    hx = states if kind == "lstm" else states[0]
    return (x, hx, weights, biases, layers, 0.0, True, both, batch_first), {}


@sampler("lstm.input")
def lstm(draw: Draw) -> Arguments:
    return _recurrent(draw, "lstm")


@sampler("gru.input")
def gru(draw: Draw) -> Arguments:
    return _recurrent(draw, "gru")


@sampler("rnn_tanh.input", "rnn_relu.input")
def rnn(draw: Draw) -> Arguments:
    return _recurrent(draw, "rnn_tanh")


def _cell(draw: Draw, kind: str) -> Arguments:
    batch = draw.of(1, 2, 4)
    states = [draw.normal(batch, 2) for _ in range(2)]
    return (
        draw.normal(batch, 3),
        states if kind == "lstm" else states[0],
        *_weights(draw, GATES[kind], 3, 2, True),
    ), {}


@sampler("lstm_cell")
def lstm_cell(draw: Draw) -> Arguments:
    return _cell(draw, "lstm")


@sampler("gru_cell")
def gru_cell(draw: Draw) -> Arguments:
    return _cell(draw, "gru")


@sampler("rnn_tanh_cell", "rnn_relu_cell")
def rnn_cell(draw: Draw) -> Arguments:
    return _cell(draw, "rnn_tanh")


def _complex(draw: Draw, *shape: int) -> torch.Tensor:
    return torch.complex(draw.normal(*shape), draw.normal(*shape))


@sampler("fft_fft", "fft_ifft", "fft_irfft", "fft_hfft")
def transform(draw: Draw) -> Arguments:
    shape = [draw.of(2, 4), *draw.shape(1, 2)]
    dim = draw.dim(len(shape))
    return (_complex(draw, *shape), 4 if shape[dim] == 1 else draw.of(None, 4), dim), {}


@sampler("fft_rfft", "fft_ihfft")
def real_transform(draw: Draw) -> Arguments:
    shape = [draw.of(2, 4), *draw.shape(1, 2)]
    return (draw.normal(*shape), draw.of(None, 4), draw.dim(len(shape))), {}


@sampler("fft_fft2", "fft_ifft2", "fft_irfft2", "fft_hfft2")
def plane_transform(draw: Draw) -> Arguments:
    return (_complex(draw, draw.size(), 4, 2, draw.of(2, 4)), None, draw.of([-2, -1], [1, 3])), {}


@sampler("fft_rfft2", "fft_ihfft2")
def real_plane_transform(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), 4, 2, draw.of(2, 4)), None, draw.of([-2, -1], [1, 3])), {}


@sampler("fft_fftn", "fft_ifftn", "fft_irfftn", "fft_hfftn")
def transform_of_many(draw: Draw) -> Arguments:
    return (_complex(draw, draw.size(), 4, 2), *draw.of((None, None), ([4, 4], None), (None, [0, 1]))), {}


@sampler("fft_fftshift", "fft_ifftshift")
def shifted(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    return (draw.normal(*shape), draw.of(None, draw.dims(len(shape)))), {}


@sampler("fft_rfftn", "fft_ihfftn")
def real_transform_of_many(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), 4, 2), *draw.of((None, None), ([4, 4], None), (None, [0, 1]))), {}


@sampler("stft")
def stft(draw: Draw) -> Arguments:
    batch = draw.of((), (1,), (2,), (4,))
    return (draw.normal(*batch, 16), 4, 2, 4, draw.normal(4), False, True, True), {}


@sampler("grid_sampler")
def grid_sampler(draw: Draw) -> Arguments:
    batch, places = draw.size(), (draw.size(), draw.size())
    return (draw.normal(batch, draw.size(), 3, 4), draw.between(-1, 1, batch, *places, 2), 0, 0, draw.flag()), {}


@sampler("instance_norm")
def instance_norm(draw: Draw) -> Arguments:
    channels = draw.size()
    of_input = draw.flag()
    affine = (draw.normal(channels), draw.normal(channels)) if draw.flag() or not of_input else (None, None)
    running = (None, None) if of_input else (draw.normal(channels), draw.between(0.5, 1.0, channels))
    return (draw.normal(draw.size(), channels, 4, 2), *affine, *running, of_input, 0.1, 1e-5, False), {}


@sampler("prelu")
def prelu(draw: Draw) -> Arguments:
    channels = draw.size()
    return (draw.normal(draw.size(), channels, *draw.of((), (3,))), draw.normal(draw.of(1, channels))), {}


@sampler("bilinear")
def bilinear(draw: Draw) -> Arguments:
    batch, out = draw.shape(1, 2), draw.size()
    bias = draw.of(None, draw.normal(out))
    return (draw.normal(*batch, 3), draw.normal(*batch, 2), draw.normal(out, 3, 2), bias), {}


@sampler("affine_grid_generator")
def affine_grid(draw: Draw) -> Arguments:
    batch = draw.size()
    return (draw.normal(batch, 2, 3), [batch, 3, 4, 2], draw.flag()), {}


@sampler("max_pool1d_with_indices")
def line_pool_with_indices(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size(), 4), [2]), {}


@sampler("max_pool3d_with_indices")
def room_pool_with_indices(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size(), 4, 4, 2), [2, 2, 2]), {}


@sampler("max_unpool3d")
def room_unpool(draw: Draw) -> Arguments:
    whole = draw.normal(draw.size(), draw.size(), 4, 4, 2)
    values, places = torch.nn.functional.max_pool3d(whole, 2, return_indices=True)
    return (values, places, [4, 4, 2], [2, 2, 2], [0, 0, 0]), {}


@sampler("max_pool2d_with_indices")
def pool_with_indices(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size(), 4, 4), [2, 2]), {}


@sampler("max_unpool2d")
def unpool(draw: Draw) -> Arguments:
    whole = draw.normal(draw.size(), draw.size(), 4, 4)
    values, places = torch.nn.functional.max_pool2d(whole, 2, return_indices=True)
    return (values, places, [4, 4]), {}


@sampler("adaptive_max_pool3d")
def adaptive_pool(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size(), 4, 4, 2), [2, 2, 1]), {}


@sampler("upsample_trilinear3d.vec")
def trilinear(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size(), 2, 2, 2), [4, 3, 4], draw.flag(), None), {}


@sampler("_upsample_nearest_exact2d.vec")
def nearest_exact(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size(), 4, 3), *draw.of(([8, 6], None), (None, [2.0, 2.0]))), {}


@sampler("_upsample_nearest_exact1d.vec")
def nearest_exact_line(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size(), 4), *draw.of(([8], None), (None, [2.0]))), {}


@sampler("_upsample_nearest_exact3d.vec")
def nearest_exact_room(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size(), 2, 3, 2), [4, 6, 2], None), {}


@sampler("_upsample_bilinear2d_aa.vec", "_upsample_bicubic2d_aa.vec")
def antialiased(draw: Draw) -> Arguments:
    return (draw.normal(draw.size(), draw.size(), 4, 6), [3, 4], draw.flag(), None), {}


@sampler("take_along_dim")
def take_along_dim(draw: Draw) -> Arguments:
    shape = draw.shape(1, 3)
    dim = draw.dim(len(shape))
    places = [1 if draw.int(0, 3) == 0 else size for size in shape]
    places[dim] = draw.int(1, 4)
    return (draw.normal(*shape), draw.integers(0, shape[dim], *places), dim), {}


@sampler("fake_quantize_per_tensor_affine")
def fake_quantized(draw: Draw) -> Arguments:
    return (draw.normal(*draw.shape()), draw.of(0.05, 0.3), draw.int(-2, 2), -8, 7), {}


@sampler("fake_quantize_per_tensor_affine.tensor_qparams")
def fake_quantized_by_tensors(draw: Draw) -> Arguments:
    one = draw.of((), (1,))
    scale, zero_point = draw.between(0.05, 0.3, *one).float(), draw.integers(-2, 3, *one).int()
    return (draw.normal(*draw.shape()), scale, zero_point, -8, 7), {}


@sampler("fake_quantize_per_channel_affine")
def fake_quantized_channels(draw: Draw) -> Arguments:
    shape = draw.shape()
    axis = draw.int(0, len(shape) - 1)
    scales = draw.between(0.05, 0.3, shape[axis]).float()
    return (draw.normal(*shape), scales, draw.integers(-2, 3, shape[axis]).int(), axis, -8, 7), {}


@sampler("_fake_quantize_learnable_per_tensor_affine")
def quantized_by_learned_scale(draw: Draw) -> Arguments:
    scale, zero_point = draw.between(0.05, 0.3, 1).float(), draw.integers(-2, 3, 1).float()
    return (draw.normal(*draw.shape()).float(), scale, zero_point, -8, 7, draw.of(1.0, 0.5)), {}


@sampler("_fake_quantize_learnable_per_channel_affine")
def quantized_by_learned_scales(draw: Draw) -> Arguments:
    shape = draw.shape(2)  # of one dim, torch's gradient of the scales has none
    axis = draw.int(0, len(shape) - 1)
    scales, zero_points = draw.between(0.05, 0.3, shape[axis]).float(), draw.integers(-2, 3, shape[axis]).float()
    return (draw.normal(*shape).float(), scales, zero_points, axis, -8, 7, draw.of(1.0, 0.5)), {}
