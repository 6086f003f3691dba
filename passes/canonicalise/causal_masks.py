"""Attention masks that say what attention can be told: nothing is hidden, or later positions are.

Hugging Face makes its causal mask by comparing positions, whatever the implementation of attention. With the mask as a
tensor no flash kernel can be used and the scores of hidden positions are computed too. A constant mask that is exactly

    mask[i, j] = (j <= i)    as Booleans, or as 0 and -inf (or the lowest number of the dtype) to add to the scores

between as many queries as keys becomes ``is_causal=True``, and one that hides nothing is left out. Any other (sliding
windows, packed documents, padding given as an input) stays.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx

from passes.canonicalise.bands import Band, BandFinder, true_columns
from passes.canonicalise.constants import CONSTANT
from passes.canonicalise.fx import argument, aten, calls, shape

Visible = Literal["all", "earlier"]


def name_causal_masks(module: fx.GraphModule) -> None:
    """Rewrite every attention whose constant mask is causal or hides nothing. Constants must be marked."""
    finder = BandFinder()
    for node in calls(module.graph, aten.scaled_dot_product_attention.default):
        mask = argument(node, "attn_mask")
        if not isinstance(mask, fx.Node) or not mask.meta.get(CONSTANT) or argument(node, "is_causal"):
            continue
        visible = _visible(finder, mask)
        query, key = (shape(used)[-2] for used in node.args[:2])  # type: ignore[arg-type]
        causal = visible == "earlier" and query == key and shape(mask)[-2:] == (query, key)
        if causal or visible == "all":
            _without_mask(node, is_causal=causal)


def _without_mask(node: fx.Node, *, is_causal: bool) -> None:
    kwargs = {name: entry for name in ("scale", "enable_gqa") if (entry := argument(node, name))}
    dropout = argument(node, "dropout_p")
    node.args = node.args[:3]
    node.kwargs = {
        **({"dropout_p": dropout} if dropout else {}),
        **({"is_causal": True} if is_causal else {}),
        **kwargs,
    }


def _visible(finder: BandFinder, mask: fx.Node) -> Visible | None:
    """What a constant mask shows, None if it is something else or not known."""
    band = finder.band(mask)
    if band is not None:
        return _visible_in_band(band)
    tensor = finder.tensor(mask)
    shown = None if tensor is None else _shown(tensor)
    if shown is None:
        return None
    if shown.all():
        return "all"
    rows, columns = shown.shape[-2:] if shown.dim() >= 2 else (0, 0)
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "earlier" if rows and bool((shown == causal).all()) else None


def _visible_in_band(band: Band) -> Visible | None:
    shown = _shown(band.values)
    seen = None if shown is None else true_columns(band.with_values(shown))
    if seen is None or bool((seen.start != 0).any()):
        return None
    if bool((seen.stop == seen.columns).all()):
        return "all"
    return "earlier" if torch.equal(seen.stop, torch.arange(1, len(seen.stop) + 1)) else None


def _shown(mask: torch.Tensor) -> torch.Tensor | None:
    """Which elements are visible; None if some are added to the scores and neither 0 nor low enough to hide them."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min
    return ~hidden if bool((hidden | (mask == 0)).all()) else None
