"""Where the keys and values of every layer live.

Layers dealt into cache groups, and the page tensors.

Layers that share another layer's keys and values take no part: they have the pages of their donor.

One page id stands for ``num_tensors`` physical pages, one in each page tensor. The j-th layer of
every group has its rows in tensor j and sees it with its own shape, so layers with different heads,
head sizes and block sizes share one pool::

              tensor 0      tensor 1
    group 0   layer 2       layer 5        full attention
    group 1   layer 0       layer 3        sliding window
    group 2   layer 1       layer 4        sliding window

Pages of e4m3 hold the scales of their rows too, unless a layer has one scale for all keys and one
for all values: behind the quantized values of K and V, fp32 [2, num_kv_heads, block_size], a head's
rows side by side, as a tile reads them. They take 4 bytes beside each head_dim of values, travel
with the page, and are shared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kvcore import GroupSpec

from ..config.named import FULL, SLIDING, ModelConfig

E4M3 = torch.float8_e4m3fn
SCALE_BYTES = 4
PAGE_ALIGNMENT = 16


@dataclass(frozen=True)
class LayerPlacement:
    """Cache group of one layer, and which page tensor has its rows."""

    group: int
    tensor: int


@dataclass(frozen=True)
class LayerCache:
    """Pages of one layer.

    Attributes:
        k_pages, v_pages: [num_pages, block_size, num_kv_heads, head_dim] views of the
            layer's page tensor.
        group: index of the cache group whose table and slots address them.
        k_scale, v_scale: where pages are e4m3, fp32 [num_pages, block_size, num_kv_heads] views of
            it, or one number each; else None.
    """

    k_pages: Tensor
    v_pages: Tensor
    group: int
    k_scale: Tensor | float | None = None
    v_scale: Tensor | float | None = None

    def rows(self, page: Tensor, row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [..., num_kv_heads, head_dim] at rows [...] of pages, as `dtype`."""
        return (
            _rows(self.k_pages, self.k_scale, page, row, dtype),
            _rows(self.v_pages, self.v_scale, page, row, dtype),
        )


def _rows(
    pages: Tensor, scale: Tensor | float | None, page: Tensor, row: Tensor, dtype: torch.dtype
) -> Tensor:
    if scale is None:
        return pages[page, row]
    values = pages.view(torch.uint8)[page, row].view(pages.dtype)
    factor = scale[page, row][..., None] if isinstance(scale, Tensor) else scale
    return (values.float() * factor).to(dtype)


def cache_groups(
    config: ModelConfig, dtype: torch.dtype, *, base_block_size: int = 16, row_scales: bool = True
) -> tuple[list[GroupSpec], list[LayerPlacement]]:
    """Deals layers of one kind into groups of equal size, with pages of equal bytes.

    A group has as many layers as the rarer kind (or the commoner one, when that has less than half
    as many again). The largest page is everybody's page: lighter layers put more tokens in theirs
    when the sizes divide, else leave a rest unused. With scales, sizes are compared without them:
    block sizes are the same in every dtype, and the rest is less than a scale's share.

    Args:
        dtype: of K and V.
        base_block_size: tokens in a page of the heaviest kind of layer.
        row_scales: whether pages of e4m3 hold a scale for each row.

    Returns:
        (groups, placement of each layer). Full-attention groups come first.

    Raises:
        ValueError: a base_block_size below 1.

    Source: vLLM 0.33 ``v1/core/kv_cache_utils`` (group sizes, page unification).
    """
    if base_block_size < 1:
        raise ValueError(f"base_block_size: expected >= 1, got {base_block_size}")
    owners = config.layer_types[: config.num_kv_owners]
    layers = {
        kind: [i for i, layer_type in enumerate(owners) if layer_type == kind]
        for kind in (FULL, SLIDING)
        if kind in owners
    }
    counts = sorted(len(members) for members in layers.values())
    group_size = counts[-1] if counts[-1] < 1.5 * counts[0] else counts[0]
    sizes = {kind: _row_elements(config, members[0]) for kind, members in layers.items()}
    largest = max(sizes.values())
    block_sizes = {
        kind: base_block_size * (largest // size if largest % size == 0 else 1)
        for kind, size in sizes.items()
    }
    page_bytes = max(
        block_sizes[kind] * token_bytes(config, members[0], dtype, row_scales=row_scales)
        for kind, members in layers.items()
    )
    # Rows of every page start at a multiple of 16 bytes.
    page_bytes = -(-page_bytes // PAGE_ALIGNMENT) * PAGE_ALIGNMENT

    groups: list[GroupSpec] = []
    placement = [LayerPlacement(-1, -1)] * config.num_layers
    for kind, members in layers.items():
        num_groups = -(-len(members) // group_size)
        for i in range(num_groups):
            for tensor, layer in enumerate(members[i::num_groups]):
                placement[layer] = LayerPlacement(len(groups), tensor)
            groups.append(
                GroupSpec(
                    name=f"{kind.removesuffix('_attention')}.{i}",
                    kind="dense" if kind == FULL else "window",
                    block_size=block_sizes[kind],
                    page_bytes=page_bytes,
                    sliding_window=config.attention(members[0]).sliding_window,
                )
            )
    # A layer without keys and values of its own is where its donor is.
    return groups, [placement[config.kv_donor(layer)] for layer in range(config.num_layers)]


def token_bytes(
    config: ModelConfig, layer: int, dtype: torch.dtype, *, row_scales: bool = True
) -> int:
    """Bytes of one token's K and V in one layer, scales included.

    Arguments as in `cache_groups`.
    """
    scales = 0
    if dtype == E4M3 and row_scales:
        scales = 2 * config.attention(layer).num_kv_heads * SCALE_BYTES
    return _row_elements(config, layer) * dtype.itemsize + scales


def _row_elements(config: ModelConfig, layer: int) -> int:
    """Elements of one token's K and V in one layer."""
    shape = config.attention(layer)
    return 2 * shape.num_kv_heads * shape.head_dim


class PagePool:
    """The page tensors of a model.

    Args:
        groups, placement: of `cache_groups`, as is dtype.
        num_pages: page ids, including the null page 0.
        kv_scales: [num_layers] of pages of e4m3 without scales of rows: the scale of all keys and
            that of all values.

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
            self.layers.append(LayerCache(pages[:, 0], pages[:, 1], place.group, *scales))


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
