"""Example inputs of any model, made from the signature of its ``forward`` and from its config."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.coverage.exceptions import INPUTS

NUM_TOKENS = 16
#: Rows of odd number are padded by this many tokens.
NUM_PADDED = 3
IGNORED = -100
AUDIO_SAMPLES = 1600
AUDIO_FRAMES = 32
#: Ordinary token ids are below this; special ones above (``tiny_configs``).
ORDINARY_TOKENS = 90

Batch = dict[str, Any]


class TinyInputs:
    """Example inputs of one model: a first guess, then what its errors ask for."""

    def __init__(self, model: Any, model_type: str, batch_size: int) -> None:
        self.model, self.config, self.batch_size = model, model.config, batch_size
        self.kind = type(model).__name__
        self.arguments = dict(inspect.signature(model.forward).parameters)
        self.exceptions = INPUTS.get(model_type, {})
        self.generator = torch.Generator().manual_seed(0)
        self.num_placeholders = 0
        self.tried: set[int] = set()

    def candidates(self) -> Iterator[Batch]:
        """Batches to try in turn, the fullest first."""
        batch = self.batch()
        yield batch
        sound = batch.get("input_features")
        if sound is not None and sound.ndim == 3:
            yield {**batch, "input_features": sound.transpose(1, 2).contiguous()}
        for dropped in (("attention_mask",), ("decoder_input_ids",), ("attention_mask", "decoder_input_ids")):
            if any(name in batch for name in dropped):
                yield {name: value for name, value in batch.items() if name not in dropped}
        if "decoder_input_ids" in self.arguments:
            decoder = {"decoder_input_ids": self.tokens(self.batch_size, NUM_TOKENS)}
            yield {**batch, **decoder}

    def learns_from(self, error: Exception) -> bool:
        """Take the number of placeholder tokens from a message about features and tokens; False if it says nothing new.

        Some messages count the features of the batch, others their elements.
        """
        match = re.search(r"features:?\s*(?:shape )?\D{0,20}(\d+)|(\d+) feature vectors", str(error))
        if match is None:
            return False
        reported, width = int(match.group(1) or match.group(2)), int(self.text("hidden_size") or 1)
        for count in (reported // width // self.batch_size, reported // self.batch_size):
            if count > 0 and count not in self.tried:
                self.tried.add(count)
                self.num_placeholders = count
                return True
        return False

    def batch(self) -> Batch:
        """All that ``forward`` takes and that can be made up, in the order of its signature."""
        batch: Batch = {}
        for name in self.arguments:
            maker = _MAKERS.get(name)
            value = None if maker is None else maker(self)
            if value is not None:
                batch[name] = value
        batch.update({name: make(self) if callable(make) else make for name, make in self.exceptions.items()})
        return {name: value for name, value in batch.items() if value is not None}

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def tokens(self, *shape: int) -> torch.Tensor:
        return self.integers(3, min(ORDINARY_TOKENS, self.vocabulary), *shape)

    def between(self, first: int, last: int) -> torch.Tensor:
        """Tokens, of which the first and the last are special ones."""
        tokens = self.tokens(self.batch_size, self.num_tokens)
        tokens[:, 0], tokens[:, -1] = first, last
        return tokens

    def with_tokens(self, begin: int, *ends_and_tokens: int) -> torch.Tensor:
        """Ordinary tokens, and from ``begin`` on each special token up to the end before it."""
        tokens = self.tokens(self.batch_size, self.num_tokens)
        for end, token in zip(ends_and_tokens[::2], ends_and_tokens[1::2]):
            tokens[:, begin:end] = token
            begin = end
        return tokens

    def marked(self, begin: int, end: int) -> torch.Tensor:
        """A mask of tokens: true from ``begin`` to before ``end``."""
        mask = torch.zeros(self.batch_size, self.num_tokens, dtype=torch.bool)
        mask[:, begin:end] = True
        return mask

    @property
    def vocabulary(self) -> int:
        return int(self.text("vocab_size") or 32)

    @property
    def num_tokens(self) -> int:
        return NUM_TOKENS + self.num_placeholders if self.num_placeholders else NUM_TOKENS

    @property
    def num_frames(self) -> int:
        """Frames of sound: as many as Whisper's encoder has places for, where the model has one."""
        audio = self.config if self.config.model_type == "whisper" else getattr(self.config, "audio_config", None)
        places = getattr(audio, "max_source_positions", None)
        return 2 * places if isinstance(places, int) else AUDIO_FRAMES

    def text(self, name: str) -> Any:
        """A field of the text part of the config."""
        for config in (self.config, _text_config(self.config), getattr(self.config, "text_config", None)):
            value = getattr(config, name, None)
            if value is not None:
                return value
        return None

    def vision(self, name: str, default: Any = None) -> Any:
        """A field of the vision part of the config."""
        for config in (*_sub_configs(self.config), self.config):
            value = getattr(config, name, None)
            if value is not None:
                return value
        return default

    @property
    def image_size(self) -> tuple[int, int]:
        size = self.vision("image_size", 32)
        if isinstance(size, dict):
            size = (size["height"], size["width"])
        size = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
        return (size[-2], size[-1]) if len(size) > 1 else (size[0], size[0])

    def image_token(self) -> int | None:
        for name in (
            "image_token_id",
            "image_token_index",
            "img_token_id",
            "audio_token_id",
            "audio_token_index",
            "speech_token_index",
            "video_token_index",
        ):
            value = getattr(self.config, name, None)
            if isinstance(value, int):
                return value
        return None


def _text_config(config: Any) -> Any:
    """The part of the config that is about text; of several, that of the decoder."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def _sub_configs(config: Any) -> list[Any]:
    names = [
        name
        for name in ("vision_config", "vision", "vq_config", "image_encoder", "encoder", "backbone_config")
        if getattr(config, name, None) is not None
    ]
    return [getattr(config, name) for name in names]


def _input_ids(t: TinyInputs) -> Any:
    ids = t.tokens(t.batch_size, t.num_tokens)
    ids[ids == t.image_token()] += 1
    if t.num_placeholders:
        ids[:, 2 : 2 + t.num_placeholders] = t.image_token()
    return ids


def _attention_mask(t: TinyInputs) -> Any:
    if "input_ids" not in t.arguments:
        frames = "input_features" in t.arguments
        return torch.ones(t.batch_size, t.num_frames, dtype=torch.long) if frames else None
    mask = torch.ones(t.batch_size, t.num_tokens, dtype=torch.long)
    mask[1::2, t.num_tokens - NUM_PADDED :] = 0
    return mask


def _pixel_values(t: TinyInputs) -> Any:
    channels = t.vision("num_channels") or t.vision("in_channels") or t.vision("in_chans") or 3
    if "spatial_shapes" in t.arguments:
        return t.floats(t.batch_size, 16, channels * t.vision("patch_size", 8) ** 2)
    if "image_grid_thw" in t.arguments or "grid_thw" in t.arguments:
        patch, frames = t.vision("patch_size", 8), t.vision("temporal_patch_size", 1)
        return t.floats(t.batch_size * 16, channels * frames * patch * patch)
    if "Video" in t.kind or "video" in t.config.model_type:
        return t.floats(t.batch_size, t.vision("num_frames", 4), channels, *t.image_size)
    return t.floats(t.batch_size, channels, *t.image_size)


def _videos(t: TinyInputs) -> Any:
    """For models of videos alone."""
    channels = t.vision("num_channels") or t.vision("in_channels") or 3
    return None if "pixel_values" in t.arguments else t.floats(t.batch_size, 4, channels, *t.image_size)


def _shapes_in_patches(t: TinyInputs) -> Any:
    return torch.tensor([[4, 4]] * t.batch_size)


def _patch_mask(t: TinyInputs) -> Any:
    return torch.ones(t.batch_size, 16, dtype=torch.long) if "spatial_shapes" in t.arguments else None


def _grid(t: TinyInputs) -> Any:
    return torch.tensor([[1, 4, 4]] * t.batch_size)


def _token_labels(t: TinyInputs, num_classes: int) -> Any:
    labels = t.integers(0, min(num_classes, ORDINARY_TOKENS), t.batch_size, t.num_tokens)
    labels[1::2, t.num_tokens - NUM_PADDED :] = IGNORED
    return labels


def _labels(t: TinyInputs) -> Any:
    num_labels = getattr(t.config, "num_labels", 2)
    if t.kind.endswith(("ImageClassification", "SequenceClassification", "VideoClassification", "AudioClassification")):
        return t.integers(0, num_labels, t.batch_size)
    if "Segmentation" in t.kind:
        return t.integers(0, num_labels, t.batch_size, *t.image_size)
    if "ObjectDetection" in t.kind:
        return [
            {"class_labels": t.integers(0, num_labels, 2), "boxes": 0.2 + 0.3 * torch.rand(2, 4, generator=t.generator)}
            for _ in range(t.batch_size)
        ]
    if "TokenClassification" in t.kind:
        return _token_labels(t, num_labels)
    if "CTC" in t.kind or "RNNT" in t.kind or "TDT" in t.kind:
        return t.integers(1, min(t.vocabulary, ORDINARY_TOKENS), t.batch_size, 4)
    if "input_ids" in t.arguments or "decoder_input_ids" in t.arguments:
        return _token_labels(t, t.vocabulary)
    return t.integers(0, num_labels, t.batch_size)


def _audio_features(t: TinyInputs) -> Any:
    mels = t.vision("num_mel_bins") or t.vision("feature_size") or t.vision("input_feat_per_channel") or 16
    for name in ("audio_config", "encoder_config", "speech_config"):
        mels = getattr(getattr(t.config, name, None), "num_mel_bins", None) or mels
    if t.num_frames != AUDIO_FRAMES:
        return t.floats(t.batch_size, mels, t.num_frames)
    return t.floats(t.batch_size, AUDIO_FRAMES, mels)


def _audio_mask(t: TinyInputs) -> Any:
    return torch.ones(t.batch_size, t.num_frames, dtype=torch.long)


def _image_sizes(t: TinyInputs) -> Any:
    return torch.tensor([list(t.image_size)] * t.batch_size)


def _audio_values(t: TinyInputs) -> Any:
    return t.floats(t.batch_size, AUDIO_SAMPLES)


def _bool_masked(t: TinyInputs) -> Any:
    patch = t.vision("patch_size", 8)
    patch = patch[0] if isinstance(patch, (list, tuple)) else patch
    height, width = t.image_size
    mask = torch.zeros(t.batch_size, (height // patch) * (width // patch), dtype=torch.bool)
    mask[:, ::2] = True
    return mask


def _mm_token_types(t: TinyInputs) -> Any:
    types = torch.zeros(t.batch_size, t.num_tokens, dtype=torch.long)
    types[:, 2 : 2 + t.num_placeholders] = 1
    return types


def _return_loss(t: TinyInputs) -> Any:
    return True


def _positions(t: TinyInputs) -> Any:
    return t.integers(0, NUM_TOKENS - NUM_PADDED, t.batch_size)


def _boxes(t: TinyInputs) -> Any:
    corner = t.integers(0, 30, t.batch_size, t.num_tokens, 2)
    return torch.cat([corner, corner + 20], dim=-1)


def _next_sentence(t: TinyInputs) -> Any:
    return t.integers(0, 2, t.batch_size) if "PreTraining" in t.kind or "NextSentence" in t.kind else None


def _mask_labels(t: TinyInputs) -> Any:
    return [(t.floats(2, *t.image_size) > 0).float() for _ in range(t.batch_size)]


def _class_labels(t: TinyInputs) -> Any:
    return [t.integers(0, t.config.num_labels, 2) for _ in range(t.batch_size)]


_MAKERS = {
    "input_ids": _input_ids,
    "attention_mask": _attention_mask,
    "pixel_values": _pixel_values,
    "pixel_values_videos": _videos,
    "pixel_attention_mask": _patch_mask,
    "spatial_shapes": _shapes_in_patches,
    "image_grid_thw": _grid,
    "mm_token_type_ids": _mm_token_types,
    "input_features": _audio_features,
    "input_features_mask": _audio_mask,
    "feature_attention_mask": _audio_mask,
    "input_values": _audio_values,
    "image_sizes": _image_sizes,
    "bool_masked_pos": _bool_masked,
    "return_loss": _return_loss,
    "start_positions": _positions,
    "end_positions": _positions,
    "bbox": _boxes,
    "next_sentence_label": _next_sentence,
    "sentence_order_label": _next_sentence,
    "mask_labels": _mask_labels,
    "class_labels": _class_labels,
    "labels": _labels,
}
