"""Where DeepSeek-V4 keeps what it has seen: the tensors of its pages, and rings beside them.

`models.deepseek_v4.cache_plan` says which groups there are and what a page of each holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import IndexPages, LatentPages

from ..layers.kv_cache import empty_pages
from .cache_plan import COMPRESSED, CachePlan, overlap_sizes
from .config import CSA, DeepseekV4Config


@dataclass(frozen=True)
class CompressorCache:
    """What a compressor or an indexer keeps.

    Attributes:
        pages: its entries, or its index keys.
        ring: [max_requests + 1, length, 2, channels] fp32, the newest tokens of each request;
            length = ratio (CSA: 2 * ratio) + max_draft_tokens. Row position % length is (kv, gate +
            position bias) of the token. Rows of an earlier request are not cleared, as none is read
            before it is written or loaded. The last ring is no request's: there `copy_overlap` may
            write what is not wanted.
        overlap: [num_pages, csa_ratio, 2, width] fp32 of the group "overlap": series a, (kv, gate +
            position bias), of the last tokens of a block; None in HCA layers.
    """

    pages: LatentPages | IndexPages
    ring: Tensor
    overlap: Tensor | None


@dataclass(frozen=True)
class LayerCache:
    """Pages and rings of one layer.

    Attributes:
        window: raw rows.
        window_group: index of the group whose tables and slots they have.
        compressed: of the compressor, whose entries have the tables of the group "compressed"; None
            in sliding layers.
        index_keys: of the indexer, with the same tables; None but in CSA layers.
    """

    window: LatentPages
    window_group: int
    compressed: CompressorCache | None
    index_keys: CompressorCache | None


class V4PagePool:
    """Page tensor and rings of a model.

    Args:
        num_pages: page ids, including the null page 0.
        max_requests: slots of the allocator.
        max_draft_tokens: rows of a step that may be taken back; rings are longer by as many.

    Attributes:
        data: [num_pages, page_bytes] uint8, zeros at first.
        layers: LayerCache of each layer.

    Raises:
        ValueError: num_pages is below 2.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        plan: CachePlan,
        *,
        num_pages: int,
        max_requests: int,
        max_draft_tokens: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.plan = config, plan
        self.data = empty_pages(num_pages, plan.groups[0].page_bytes, device)
        self._num_rings, self._max_draft_tokens = max_requests + 1, max_draft_tokens
        self.layers = [self._layer(layer) for layer in range(len(plan.layers))]

    @property
    def tensors(self) -> list[Tensor]:
        """The page tensors: one."""
        return [self.data]

    @property
    def rings(self) -> list[Tensor]:
        """The rings of all layers."""
        caches = [cache for layer in self.layers for cache in (layer.compressed, layer.index_keys)]
        return [cache.ring for cache in caches if cache is not None]

    def _layer(self, layer: int) -> LayerCache:
        config, plan, place = self.config, self.plan, self.plan.layers[layer]
        window = self._latents(place.window, plan.groups[place.window_group].block_size)
        ratio = config.compress_ratio(layer)
        if ratio is None:
            return LayerCache(window, place.window_group, None, None)
        group = plan.group_index(COMPRESSED)
        assert group is not None and place.compressed is not None
        num_entries = plan.groups[group].block_size // ratio  # of a page
        pages = self._latents(place.compressed, num_entries)
        if place.index_keys is None:
            compressed = CompressorCache(pages, self._ring(ratio, config.head_dim), None)
            return LayerCache(window, place.window_group, compressed, None)
        # Twice as many tokens and channels: an entry overlaps the compression window before.
        compressed = CompressorCache(
            pages, self._ring(2 * ratio, 2 * config.head_dim), self._overlap(layer, 0)
        )
        index_keys = CompressorCache(
            self._index_keys(place.index_keys, num_entries),
            self._ring(2 * ratio, 2 * config.index_head_dim),
            self._overlap(layer, 1),
        )
        return LayerCache(window, place.window_group, compressed, index_keys)

    def _ring(self, num_tokens: int, channels: int) -> Tensor:
        shape = (self._num_rings, num_tokens + self._max_draft_tokens, 2, channels)
        return torch.zeros(shape, dtype=torch.float32, device=self.data.device)

    def _overlap(self, layer: int, part: int) -> Tensor:
        """Series a of a CSA layer in pages of the group "overlap".

        Args:
            layer: of the trunk.
            part: 0 = of the compressor, 1 = of the indexer.
        """
        config, sizes = self.config, overlap_sizes(self.config)
        nth = config.layer_types[:layer].count(CSA)
        offset = 4 * (nth * sum(sizes) + part * sizes[0])
        rows = self._bytes(offset, 4 * sizes[part]).view(torch.float32)
        return rows.unflatten(1, (config.csa_ratio, 2, -1))

    def _latents(self, offset: int, rows: int) -> LatentPages:
        config, fmt = self.config, self.plan.format
        data = self._bytes(offset, fmt.latent_bytes(config, rows))
        if not fmt.fp8:
            data = data.view(fmt.dtype).unflatten(1, (rows, config.head_dim))
        return LatentPages(
            data, storage_block_size=rows, head_dim=config.head_dim, rope_dim=config.rope_dim
        )

    def _index_keys(self, offset: int, rows: int) -> IndexPages:
        config, fmt = self.config, self.plan.format
        data = self._bytes(offset, fmt.index_bytes(config, rows))
        if not fmt.fp8:
            data = data.view(fmt.dtype).unflatten(1, (rows, config.index_head_dim))
        return IndexPages(data, storage_block_size=rows, index_dim=config.index_head_dim)

    def _bytes(self, offset: int, size: int) -> Tensor:
        return self.data[:, offset : offset + size]
