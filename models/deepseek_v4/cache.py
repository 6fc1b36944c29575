"""Pages of DeepSeek-V4, their cache groups, and the rings beside them.

A page is one row of bytes for all layers of its group, side by side. All groups share one pool::

    group        kind    tokens   a page holds
    compressed   dense   256      entries of all CSA (64 rows) and HCA (2 rows) layers, index keys
    window.0 ..  window  64       raw rows of a share of the layers, those of drafters last
    overlap      window  256      series a (`attention.GatedPooling`) of the block's last 4 tokens

An open compression window of a request is in rings. A block's end is a multiple of both ratios: to
resume there, HCA needs nothing, and CSA one page of "overlap".

Source: DeepSeek-V4 report 3; vLLM 0.33 ``v1/core/kv_cache_planning`` for pages of bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from quire.kernels import IndexPages, LatentPages, page_bytes
from quire.kvcore import GroupSpec

from ..layers.kv_cache import empty_pages
from .config import CSA, HCA, DeepseekV4Config

FP8_DIMS = (512, 64)  # (head_dim, rope_dim) of the quantized layout
COMPRESSED, WINDOW, OVERLAP = "compressed", "window", "overlap"


@dataclass(frozen=True)
class CacheFormat:
    """Rows of ``dtype``, or quantized: 584 bytes a latent row, 132 bytes an index key."""

    dtype: torch.dtype
    fp8: bool = False

    def latent_bytes(self, config: DeepseekV4Config, rows: int) -> int:
        """Bytes of ``rows`` latent rows of one layer in a page."""
        return page_bytes(rows) if self.fp8 else rows * config.head_dim * self.dtype.itemsize

    def index_bytes(self, config: DeepseekV4Config, rows: int) -> int:
        """Bytes of ``rows`` index keys of one layer in a page."""
        dim = config.index_head_dim
        return page_bytes(rows, dim + 4) if self.fp8 else rows * dim * self.dtype.itemsize


@dataclass(frozen=True)
class LatentPlacement:
    """First bytes of a layer's raw rows, entries and index keys in a page; None = it has none."""

    window_group: int
    window: int
    compressed: int | None
    index_keys: int | None


@dataclass(frozen=True)
class CachePlan:
    """Groups of a model, and the place of each layer, trunk and drafters, in their pages."""

    format: CacheFormat
    groups: tuple[GroupSpec, ...]
    layers: tuple[LatentPlacement, ...]

    @cached_property
    def index(self) -> dict[str, int]:
        """Index of each group, by its name."""
        return {group.name: i for i, group in enumerate(self.groups)}


def plan_cache(config: DeepseekV4Config, fmt: CacheFormat, *, drafters: bool = True) -> CachePlan:
    """Deal layers into groups and choose the bytes of a page.

    A page is as large as the entries of a block, the first multiple of both ratios that holds two
    HCA windows. Raw rows of layers are dealt into as few groups as such pages allow.

    Raises:
        NotImplementedError: quantized rows of other sizes than `FP8_DIMS`.
    """
    if fmt.fp8 and (config.head_dim, config.rope_dim) != FP8_DIMS:
        raise NotImplementedError(
            f"kv_cache_dtype: 'fp8' is supported with (head_dim, rope_dim) = {FP8_DIMS}, "
            f"{config.name!r} has {(config.head_dim, config.rope_dim)}"
        )
    unit, half = math.lcm(config.csa_ratio, config.hca_ratio), max(1, config.sliding_window // 2)
    block_size = -(-2 * config.hca_ratio // unit) * unit
    window_block_size = next(n for n in range(half, 0, -1) if block_size % n == 0)
    kinds = config.all_layer_types if drafters else config.layer_types
    starts: list[tuple[int | None, int | None]] = []  # of entries and index keys
    size = 0
    for layer, kind in enumerate(kinds):
        ratio = config.compress_ratio(layer)
        entries = index_keys = None
        if ratio is not None:
            entries, size = size, size + fmt.latent_bytes(config, block_size // ratio)
        if kind == CSA:
            index_keys, size = size, size + fmt.index_bytes(config, block_size // config.csa_ratio)
        starts.append((entries, index_keys))
    overlap_bytes = 4 * kinds.count(CSA) * sum(overlap_sizes(config))
    window_bytes = fmt.latent_bytes(config, window_block_size)
    page = max(size, overlap_bytes, window_bytes)
    num_windows = -(-len(kinds) // (page // window_bytes))
    share = -(-len(kinds) // num_windows)  # layers of a window group

    groups = []
    if size:
        groups.append(GroupSpec(COMPRESSED, "dense", block_size, page))
    first = len(groups)
    has_dspark = config.dspark is not None
    drafted = config.num_layers // share if len(kinds) > config.num_layers else num_windows
    for i in range(num_windows):
        # Drafts of DSpark see a whole window besides themselves.
        window = config.sliding_window + int(i >= drafted and has_dspark)
        lookahead = int(i >= drafted and not has_dspark)
        name, size = f"{WINDOW}.{i}", window_block_size
        groups.append(GroupSpec(name, "window", size, page, window, lookahead=lookahead))
    if overlap_bytes:
        seen = config.csa_ratio + 1
        groups.append(GroupSpec(OVERLAP, "window", block_size, page, sliding_window=seen))
    layers = tuple(
        LatentPlacement(first + layer // share, layer % share * window_bytes, *starts[layer])
        for layer in range(len(kinds))
    )
    return CachePlan(fmt, tuple(groups), layers)


def overlap_sizes(config: DeepseekV4Config) -> tuple[int, int]:
    """fp32 numbers of a CSA layer in a page of "overlap": of its compressor, of its indexer."""
    return 2 * config.csa_ratio * config.head_dim, 2 * config.csa_ratio * config.index_head_dim


def ring_bytes(config: DeepseekV4Config, max_draft_tokens: int) -> int:
    """Bytes of one request's rings, fp32, all layers; `CompressorCache.ring` has their shape."""
    csa_row = 4 * 2 * 2 * (config.head_dim + config.index_head_dim)
    hca_row = 4 * 2 * config.head_dim
    csa = config.layer_types.count(CSA) * (2 * config.csa_ratio + max_draft_tokens) * csa_row
    return csa + config.layer_types.count(HCA) * (config.hca_ratio + max_draft_tokens) * hca_row


@dataclass(frozen=True)
class CompressorCache:
    """Storage of a compressor or an indexer.

    Attributes:
        pages: its entries, or its index keys.
        ring: [max_requests + 1, length, 2, channels] fp32, (kv, gate + position bias) of the newest
            tokens of each request, token t in row t % length. The last ring takes unwanted writes.
        overlap: [num_pages, csa_ratio, 2, width] fp32, series a of the last tokens of a block; None
            in HCA layers.
    """

    pages: LatentPages | IndexPages
    ring: Tensor
    overlap: Tensor | None


@dataclass(frozen=True)
class LatentLayerCache:
    """Pages and rings of one layer; window_group: index of the group of its raw rows."""

    window: LatentPages
    window_group: int
    compressed: CompressorCache | None = None
    index_keys: CompressorCache | None = None


class V4PagePool:
    """Page tensor and rings of a model.

    Args:
        max_draft_tokens: rows of a step that may be taken back; rings are longer by as many.

    Attributes:
        data: [num_pages, page_bytes] uint8, zeros at first.
        csa_ring_size, hca_ring_size: rows of a ring of such a layer.

    Raises:
        ValueError: num_pages is below 2.
    """

    def __init__(
        self, config: DeepseekV4Config, plan: CachePlan, *, num_pages: int, max_requests: int,
        max_draft_tokens: int = 0, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self.config, self.plan = config, plan
        self.data = empty_pages(num_pages, plan.groups[0].page_bytes, device)
        self._num_rings = max_requests + 1
        self.csa_ring_size = 2 * config.csa_ratio + max_draft_tokens
        self.hca_ring_size = config.hca_ratio + max_draft_tokens
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

    def _layer(self, layer: int) -> LatentLayerCache:
        config, plan, place = self.config, self.plan, self.plan.layers[layer]
        window = self._latents(place.window, plan.groups[place.window_group].block_size)
        ratio, group = config.compress_ratio(layer), place.window_group
        if ratio is None:
            return LatentLayerCache(window, group)
        num_entries = plan.groups[plan.index[COMPRESSED]].block_size // ratio  # of a page
        entries = self._latents(place.compressed, num_entries)
        if place.index_keys is None:
            ring = self._ring(self.hca_ring_size, config.head_dim)
            return LatentLayerCache(window, group, CompressorCache(entries, ring, None))
        size, dim = plan.format.index_bytes(config, num_entries), config.index_head_dim
        data = self._rows(place.index_keys, num_entries, dim, size)
        index_keys = IndexPages(data, storage_block_size=num_entries, index_dim=dim)
        # Twice the channels, as an entry overlaps the compression window before.
        rings = [self._ring(self.csa_ring_size, 2 * width) for width in (config.head_dim, dim)]
        stored = zip((entries, index_keys), rings, self._overlaps(layer), strict=True)
        return LatentLayerCache(window, group, *(CompressorCache(*each) for each in stored))

    def _ring(self, num_tokens: int, channels: int) -> Tensor:
        shape = (self._num_rings, num_tokens, 2, channels)
        return torch.zeros(shape, dtype=torch.float32, device=self.data.device)

    def _overlaps(self, layer: int) -> list[Tensor]:
        """Series a of the compressor and of the indexer of a CSA layer."""
        config, sizes = self.config, overlap_sizes(self.config)
        start = 4 * config.layer_types[:layer].count(CSA) * sum(sizes)
        both = self.data[:, start : start + 4 * sum(sizes)].view(torch.float32)
        return [rows.unflatten(1, (config.csa_ratio, 2, -1)) for rows in both.split(sizes, 1)]

    def _latents(self, start: int, rows: int) -> LatentPages:
        head_dim, rope_dim = self.config.head_dim, self.config.rope_dim
        size = self.plan.format.latent_bytes(self.config, rows)
        data = self._rows(start, rows, head_dim, size)
        return LatentPages(data, storage_block_size=rows, head_dim=head_dim, rope_dim=rope_dim)

    def _rows(self, start: int, rows: int, width: int, size: int) -> Tensor:
        """``size`` bytes of each page; as [num_pages, rows, width] unless they are quantized."""
        data, fmt = self.data[:, start : start + size], self.plan.format
        return data if fmt.fp8 else data.view(fmt.dtype).unflatten(1, (rows, width))
