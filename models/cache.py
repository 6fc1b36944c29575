"""Where the keys and values of every layer live: layers dealt into cache groups, and the page tensors.

Layers that share another layer's keys and values take no part: they have the place of their donor.

One page id stands for ``num_slots`` physical pages, one in each slot tensor. The j-th layer of every group uses slot j and sees
it with its own shape, so layers with different heads, head sizes and block sizes share one pool::

              slot 0        slot 1
    group 0   layer 2       layer 5        full attention
    group 1   layer 0       layer 3        sliding window
    group 2   layer 1       layer 4        sliding window
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kvcore import GroupSpec
from quire.models.configs import FULL, SLIDING, ModelConfig


@dataclass(frozen=True)
class LayerPlacement:
    """Cache group and slot of one layer."""

    group: int
    slot: int


@dataclass(frozen=True)
class LayerCache:
    """Pages of one layer.

    k_pages, v_pages: [num_pages, block_size, num_kv_heads, head_dim] views of the layer's slot.
    group: index of the cache group whose table and slots address them.
    """

    k_pages: Tensor
    v_pages: Tensor
    group: int


def cache_groups(
    config: ModelConfig, dtype: torch.dtype, *, base_block_size: int = 16
) -> tuple[list[GroupSpec], list[LayerPlacement]]:
    """Deals layers of one kind into groups of equal size, and chooses block sizes so that all pages have equal bytes.

    A group has as many layers as the rarer kind (or the commoner one, when that has less than half as many again). The
    largest page is everybody's page: lighter layers put more tokens in theirs when the sizes divide, else leave a rest unused.

    dtype: of K and V. base_block_size: tokens in a page of the heaviest kind of layer.

    Returns: (groups, placement of each layer). Full-attention groups come first.
    Raises: ValueError for a base_block_size below 1.
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
    base_bytes = {
        kind: base_block_size * _token_bytes(config, members[0], dtype)
        for kind, members in layers.items()
    }
    page_bytes = max(base_bytes.values())

    groups: list[GroupSpec] = []
    placement = [LayerPlacement(-1, -1)] * config.num_layers
    for kind, members in layers.items():
        multiple = page_bytes // base_bytes[kind] if page_bytes % base_bytes[kind] == 0 else 1
        num_groups = -(-len(members) // group_size)
        for i in range(num_groups):
            for slot, layer in enumerate(members[i::num_groups]):
                placement[layer] = LayerPlacement(len(groups), slot)
            groups.append(
                GroupSpec(
                    name=f"{kind.removesuffix('_attention')}.{i}",
                    kind="dense" if kind == FULL else "window",
                    block_size=base_block_size * multiple,
                    page_bytes=page_bytes,
                    sliding_window=config.attention(members[0]).sliding_window,
                )
            )
    # A layer without keys and values of its own is where its donor is.
    return groups, [placement[config.kv_donor(layer)] for layer in range(config.num_layers)]


def _token_bytes(config: ModelConfig, layer: int, dtype: torch.dtype) -> int:
    """Bytes of one token's K and V in one layer."""
    shape = config.attention(layer)
    return 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize


class PagePool:
    """The page tensors of a model.

    groups, placement: of :func:`cache_groups`. num_pages: page ids, including the null page 0.

    Attributes:
        layers: LayerCache of each layer.
        slots: [num_slots] tensors of [num_pages, page_bytes] uint8, zeros at first.

    Raises: ValueError when num_pages is below 2.
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
    ) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages: expected >= 2 (page 0 is never owned), got {num_pages}")
        self.slots = [
            torch.zeros(num_pages, groups[0].page_bytes, dtype=torch.uint8, device=device)
            for _ in range(num_slots(placement))
        ]
        self.layers = []
        for layer, place in enumerate(placement):
            shape = config.attention(layer)
            block_size = groups[place.group].block_size
            rows = self.slots[place.slot].view(dtype)  # [num_pages, page elements]
            used = 2 * block_size * shape.num_kv_heads * shape.head_dim
            pages = rows[:, :used].unflatten(1, (2, block_size, shape.num_kv_heads, shape.head_dim))
            self.layers.append(LayerCache(pages[:, 0], pages[:, 1], place.group))


def num_slots(placement: list[LayerPlacement]) -> int:
    """Physical pages behind one page id: the layers of the largest group."""
    return 1 + max(place.slot for place in placement)
