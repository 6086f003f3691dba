"""How a model that reads images and text takes its images, and how many tokens stand for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: Shapes of tensors of floats, and values of other arguments, by name.
Images = dict[str, Any]

#: Model types that are told which tokens stand for an image: 1, and 0 for words.
TYPED = frozenset({"qwen2_vl", "qwen2_5_vl"})

#: Patches along each side of an image, for models that take any size.
GRID = 16


def image_fields(config: Any, batch_size: int) -> tuple[Images, tuple[int, int] | None, int]:
    """Arguments for one image a sample, (number of tokens, token) that stand for it, and the first special token.

    Raises:
        ValueError: for model types that are not in the table.
    """
    if config.model_type not in _IMAGES:
        raise ValueError(
            f"cannot make up a batch for model type {config.model_type!r}: known of those that read images and text "
            f"are {', '.join(sorted(_IMAGES))}; pass example_inputs="
        )
    images, num_tokens = _IMAGES[config.model_type](config, batch_size)
    names = [name for name in vars(config) if name.endswith(("_token_id", "_token_index"))]
    special = [value for name in names if isinstance(value := getattr(config, name), int) and value > 2]
    token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", None)
    placeholders = None if num_tokens == 0 or token is None else (num_tokens, token)
    return images, placeholders, min(special)


def _shape(vision: Any, batch_size: int) -> tuple[int, ...]:
    return (batch_size, vision.num_channels, vision.image_size, vision.image_size)


def _whole_images(config: Any, batch_size: int) -> tuple[Images, int]:
    """One square image of the size that the vision tower has positions for."""
    return {"pixel_values": _shape(config.vision_config, batch_size)}, config.image_seq_length


def _shuffled_tiles(config: Any, batch_size: int) -> tuple[Images, int]:
    """One tile; neighbouring patches become one token."""
    vision = config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    return {"pixel_values": _shape(vision, batch_size)}, int(num_patches * vision.pixel_shuffle_ratio**2)


def _tiles_apart(config: Any, batch_size: int) -> tuple[Images, int]:
    """Tiles that the text attends to; no token of the text stands for them."""
    vision = config.vision_config
    tiles = vision.max_num_tiles
    shape = (batch_size, 1, tiles, vision.num_channels, vision.image_size, vision.image_size)
    ones = [[[1] * tiles]] * batch_size
    return {"pixel_values": shape, "aspect_ratio_ids": [[1]] * batch_size, "aspect_ratio_mask": ones}, 0


def _flat_patches(config: Any, batch_size: int) -> tuple[Images, int]:
    """Patches of all images in a row, with a grid (frames, height, width) for each image."""
    vision = config.vision_config
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    images = {
        "pixel_values": (batch_size * GRID * GRID, width),
        "image_grid_thw": [[1, GRID, GRID]] * batch_size,
    }
    return images, (GRID // vision.spatial_merge_size) ** 2


_IMAGES: dict[str, Callable[[Any, int], tuple[Images, int]]] = {
    "llava": _whole_images,
    "llama4": _shuffled_tiles,
    "mllama": _tiles_apart,
    "qwen2_vl": _flat_patches,
    "qwen2_5_vl": _flat_patches,
}
