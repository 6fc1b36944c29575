"""Page tensors of keys and values, and the cache groups of layers (`quire.kvcore.cache_groups`).

A layer that shares another layer's keys and values has the pages of its donor. Pages of e4m3 hold
the scales of their rows too, unless a layer has one scale for all keys and one for all values:
behind K and V, fp32 [2, num_kv_heads, block_size], a head's rows side by side, as a tile reads
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kvcore import GroupSpec, LayerPlacement, LayerShape
from quire.kvcore import cache_groups as groups_of_layers

from ..config.model import ModelConfig

E4M3 = torch.float8_e4m3fn
SCALE_BYTES = 4


@dataclass(frozen=True)
class LayerCache:
    """Pages of one layer.

    Attributes:
        k_pages, v_pages: [num_pages, block_size, num_kv_heads, head_dim] views of the
            layer's page tensor.
        group: index of the cache group with their table and slots.
        sliding_window: tokens that a query of the layer sees; None = all.
        k_scale, v_scale: where pages are e4m3, fp32 [num_pages, block_size, num_kv_heads] views of
            it, or one number each; else None.
    """

    k_pages: Tensor
    v_pages: Tensor
    group: int
    sliding_window: int | None = None
    k_scale: Tensor | float | None = None
    v_scale: Tensor | float | None = None

    def rows(self, page: Tensor, row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [..., num_kv_heads, head_dim] at rows [...] of pages, as `dtype`."""

        def read(pages: Tensor, scale: Tensor | float | None) -> Tensor:
            if scale is None:
                return pages[page, row]
            values = pages.view(torch.uint8)[page, row].view(pages.dtype)
            factor = scale[page, row][..., None] if isinstance(scale, Tensor) else scale
            return (values.float() * factor).to(dtype)

        return read(self.k_pages, self.k_scale), read(self.v_pages, self.v_scale)


def cache_groups(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    base_block_size: int = 16,
    row_scales: bool = True,
    more_window: int = 0,
) -> tuple[list[GroupSpec], list[LayerPlacement]]:
    """Split the layers of a model into cache groups, by `quire.kvcore.cache_groups`.

    Args:
        dtype: data type of K and V in pages.
        base_block_size: tokens in a page of the heaviest kind of layer.
        row_scales: True = e4m3 pages hold a scale for each row; block sizes do not depend on it.
        more_window: rows that pages of window layers keep beyond their windows, for a drafter.

    Returns:
        (groups, placement of each layer). Full-attention groups come first.

    Raises:
        ValueError: a base_block_size below 1.
    """
    shapes = []
    for layer in range(config.num_kv_owners):
        size = token_bytes(config, layer, dtype, row_scales=False)
        scales = token_bytes(config, layer, dtype, row_scales=row_scales) - size
        window = config.attention(layer).sliding_window
        window = None if window is None else window + more_window
        shapes.append(LayerShape(size, window, scales))
    groups, placement = groups_of_layers(shapes, base_block_size=base_block_size)
    # A layer without keys and values of its own is where its donor is.
    return groups, [placement[config.kv_donor(layer)] for layer in range(config.num_layers)]


def token_bytes(
    config: ModelConfig, layer: int, dtype: torch.dtype, *, row_scales: bool = True
) -> int:
    """Bytes of one token's K and V in one layer, scales included."""
    shape = config.attention(layer)
    scale_bytes = SCALE_BYTES if dtype == E4M3 and row_scales else 0
    return 2 * shape.num_kv_heads * (shape.head_dim * dtype.itemsize + scale_bytes)


class PageTensors:
    """The page tensors of a model.

    Args:
        groups, placement, dtype: results and argument of `cache_groups`.
        num_pages: page ids, including the null page 0.
        kv_scales: [num_layers] pairs, the scale of a layer's keys and of its values, for e4m3
            pages without row scales.

    Attributes:
        layers: LayerCache of each layer.
        tensors: [num_tensors] of [num_pages, page_bytes] uint8, zeros at first.

    Raises:
        ValueError: num_pages is below 2.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: list[GroupSpec],
        placement: list[LayerPlacement],
        *,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        self.tensors = [
            empty_pages(num_pages, groups[0].page_bytes, device)
            for _ in range(num_tensors(placement))
        ]
        self.layers = []
        for layer, place in enumerate(placement):
            shape = config.attention(layer)
            block_size = groups[place.group].block_size
            rows = self.tensors[place.tensor].view(dtype)  # [num_pages, page elements]
            used = 2 * block_size * shape.num_kv_heads * shape.head_dim
            pages = rows[:, :used].unflatten(1, (2, block_size, shape.num_kv_heads, shape.head_dim))
            scales: tuple[Tensor | float | None, Tensor | float | None] = (None, None)
            if kv_scales is not None:
                scales = kv_scales[config.kv_donor(layer)]
            elif dtype == E4M3:
                behind = self.tensors[place.tensor].view(torch.float32)[:, used // SCALE_BYTES :]
                behind = behind[:, : 2 * shape.num_kv_heads * block_size]
                each = behind.unflatten(1, (2, shape.num_kv_heads, block_size)).transpose(2, 3)
                scales = each[:, 0], each[:, 1]
            cache = LayerCache(pages[:, 0], pages[:, 1], place.group, shape.sliding_window, *scales)
            self.layers.append(cache)


def empty_pages(num_pages: int, page_bytes: int, device: torch.device | str) -> Tensor:
    """Pages as rows of bytes: [num_pages, page_bytes] uint8, zeros.

    Raises:
        ValueError: fewer than two pages.
    """
    if num_pages < 2:
        raise ValueError(f"num_pages: expected >= 2 (page 0 is never owned), got {num_pages}")
    return torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)


def num_tensors(placement: list[LayerPlacement]) -> int:
    """Physical pages behind one page id: the layers of the largest group."""
    return 1 + max(place.tensor for place in placement)
