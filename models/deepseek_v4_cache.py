"""Where DeepSeek-V4 keeps what it has seen: bytes of pages for each layer, dealt into cache groups, and rings beside the pages.

A page is one row of bytes for all layers of its group, side by side. Groups share one pool of equal pages::

    group        kind    tokens   a page holds
    compressed   dense   256      entries of all CSA (64 rows) and HCA (2 rows) layers, and index keys of the CSA layers
    window.0 ..  window  64       raw rows of a share of the layers; the last group has the drafter's
    state        state   256      a snapshot: series a of the last window, of all CSA compressors and indexers

What a compressor has of a window that is still open lives in rings, one place a request, outside of the pages: there a token's row
is overwritten in place, and pages of a few tokens each would cost a whole page. Only what a resumed request needs at a boundary
becomes a page. A boundary is a multiple of both ratios, so that windows end there: HCA then needs nothing, and CSA, whose next entry
overlaps the window before, its series a (4 rows).

Source: DeepSeek-V4 report 3; vLLM 0.33 ``v1/core/kv_cache_planning`` (pages of bytes), which keeps compressor state in token pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.mla import IndexPages, LatentPages, page_bytes
from quire.kvcore import GroupSpec
from quire.models.deepseek_v4_config import CSA, HCA, DeepseekV4Config

COMPRESSED, WINDOW, STATE = "compressed", "window", "state"


@dataclass(frozen=True)
class CacheFormat:
    """How rows are stored. dtype: of plain rows. fp8: latent rows and index keys quantised (584 and 132 bytes a row)."""

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
class LayerPlacement:
    """Where in a page a layer's rows begin, in bytes; None for what the layer has not. window_group: index of its group."""

    window_group: int
    window: int
    compressed: int | None
    index: int | None


@dataclass(frozen=True)
class CachePlan:
    """Groups of a model, and the place of each layer (the trunk's, then the drafters') in their pages."""

    format: CacheFormat
    groups: tuple[GroupSpec, ...]
    layers: tuple[LayerPlacement, ...]

    def group(self, name: str) -> int | None:
        """Index of the group of that name; None where the model has none."""
        names = [group.name for group in self.groups]
        return names.index(name) if name in names else None


def state_rows(config: DeepseekV4Config) -> tuple[int, int]:
    """Elements (fp32) of a snapshot in one CSA layer: of the compressor, and of the indexer; kv and gate of one window."""
    return 2 * config.csa_ratio * config.head_dim, 2 * config.csa_ratio * config.index_head_dim


def plan_cache(
    config: DeepseekV4Config,
    fmt: CacheFormat,
    *,
    block_size: int | None = None,
    window_block_size: int | None = None,
    drafters: bool = True,
) -> CachePlan:
    """Chooses groups and the bytes of their pages.

    The page that entries need is everybody's. Layers' windows are dealt into as few groups as fit such pages.

    block_size: tokens of a page of entries; default: two HCA windows. window_block_size: default: half a sliding window.
    drafters: whether the drafter layers take part.

    Returns: CachePlan.
    Raises: ValueError where block_size is no multiple of both ratios and of window_block_size.
    """
    block_size = block_size or 2 * config.hca_ratio
    window_block_size = window_block_size or max(1, config.sliding_window // 2)
    unit = math.lcm(config.csa_ratio, config.hca_ratio, window_block_size)
    if block_size % unit:
        raise ValueError(
            f"block_size: expected a multiple of {unit} (ratios {config.csa_ratio} and {config.hca_ratio}, "
            f"window blocks of {window_block_size}), got {block_size}"
        )
    kinds = config.all_layer_types if drafters else config.layer_types
    entries: list[tuple[int | None, int | None]] = []
    size = 0
    for layer in range(len(kinds)):
        ratio = config.compress_ratio(layer)
        compressed = index = None
        if ratio is not None:
            compressed, size = size, size + fmt.latent_bytes(config, block_size // ratio)
        if kinds[layer] == CSA:
            index, size = size, size + fmt.index_bytes(config, block_size // config.csa_ratio)
        entries.append((compressed, index))
    state_bytes = 4 * kinds.count(CSA) * sum(state_rows(config))
    window_bytes = fmt.latent_bytes(config, window_block_size)
    page_bytes = max(size, state_bytes, window_bytes)
    num_windows = -(-len(kinds) // (page_bytes // window_bytes))
    share = -(-len(kinds) // num_windows)

    groups = []
    if size:
        groups.append(GroupSpec(COMPRESSED, "dense", block_size, page_bytes))
    first = len(groups)
    drafted = len(kinds) > config.num_layers
    for i in range(num_windows):
        last = i == num_windows - 1
        groups.append(
            GroupSpec(
                f"{WINDOW}.{i}",
                "window",
                window_block_size,
                page_bytes,
                sliding_window=config.sliding_window,
                lookahead=int(last and drafted),
            )
        )
    if state_bytes:
        groups.append(GroupSpec(STATE, "state", block_size, page_bytes))
    layers = tuple(
        LayerPlacement(first + layer // share, layer % share * window_bytes, *entries[layer])
        for layer in range(len(kinds))
    )
    return CachePlan(fmt, tuple(groups), layers)


@dataclass(frozen=True)
class LayerCache:
    """Pages and rings of one layer.

    window: raw rows; group window_group of the plan. compressed, index: entries and index keys, group "compressed".
    state, index_state: [max_requests, ring, 2, channels] fp32, the compressors' newest rows by position modulo ring.
    """

    window: LatentPages
    window_group: int
    compressed: LatentPages | None
    index: IndexPages | None
    state: Tensor | None
    index_state: Tensor | None


class V4PagePool:
    """Page tensor and rings of a model.

    num_pages: page ids, including the null page 0. max_requests: slots of the allocator. max_draft_tokens: rows of a step that
    may be taken back; rings are longer by as many.

    Attributes:
        data: [num_pages, page_bytes] uint8, zeros at first. layers: LayerCache of each layer.

    Raises: ValueError when num_pages is below 2.
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
        if num_pages < 2:
            raise ValueError(f"num_pages: expected >= 2 (page 0 is never owned), got {num_pages}")
        self.config, self.plan = config, plan
        page_bytes = plan.groups[0].page_bytes
        self.data = torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=device)

        def rings(kind: str, channels: int) -> Tensor:
            """Of all layers of one kind: [layers, max_requests, ring, 2, channels]."""
            count = config.layer_types.count(kind)
            window = 2 * config.csa_ratio if kind == CSA else config.hca_ratio
            shape = (count, max_requests, window + max_draft_tokens, 2, channels)
            return torch.zeros(shape, dtype=torch.float32, device=device)

        self._csa = rings(CSA, 2 * config.head_dim)
        self._index = rings(CSA, 2 * config.index_head_dim)
        self._hca = rings(HCA, config.head_dim)
        self.layers = [self._layer(layer) for layer in range(len(plan.layers))]

    def _layer(self, layer: int) -> LayerCache:
        config, place, groups = self.config, self.plan.layers[layer], self.plan.groups
        ratio = config.compress_ratio(layer)
        window_rows = groups[place.window_group].block_size
        compressed = index = state = index_state = None
        if ratio is not None:
            assert place.compressed is not None
            compressed = self._latents(place.compressed, groups[0].block_size // ratio)
            kind = config.layer_types[layer]
            nth = config.layer_types[:layer].count(kind)
            state = (self._csa if kind == CSA else self._hca)[nth]
        if place.index is not None:
            index = self._index_keys(place.index, groups[0].block_size // config.csa_ratio)
            index_state = self._index[nth]
        window = self._latents(place.window, window_rows)
        return LayerCache(window, place.window_group, compressed, index, state, index_state)

    def _latents(self, offset: int, rows: int) -> LatentPages:
        config, fmt = self.config, self.plan.format
        data = self._bytes(offset, fmt.latent_bytes(config, rows))
        if not fmt.fp8:
            data = data.view(fmt.dtype).unflatten(1, (rows, config.head_dim))
        return LatentPages(data, rows, config.head_dim, config.rope_dim)

    def _index_keys(self, offset: int, rows: int) -> IndexPages:
        config, fmt = self.config, self.plan.format
        data = self._bytes(offset, fmt.index_bytes(config, rows))
        if not fmt.fp8:
            data = data.view(fmt.dtype).unflatten(1, (rows, config.index_head_dim))
        return IndexPages(data, rows, config.index_head_dim)

    def _bytes(self, offset: int, size: int) -> Tensor:
        return self.data[:, offset : offset + size]

    def save_states(self, slots: Tensor, pages: Tensor, boundaries: Tensor) -> None:
        """Copies series a of the last window before each boundary from the rings of requests into pages.

        slots, pages, boundaries: [n] int64: request, page of the state group, and a boundary (in tokens) that the request has just
        reached or, by rows that may be taken back, passed.
        """
        for ring, view, rows in self._snapshots(pages, slots, boundaries):
            width = ring.shape[-1] // 2
            view[pages] = ring[:, slots[:, None], rows, :, :width].movedim(0, 1)

    def load_states(self, slots: Tensor, pages: Tensor, boundaries: Tensor) -> None:
        """Copies snapshots back into the rings of requests that start at the boundaries; arguments as in :meth:`save_states`."""
        for ring, view, rows in self._snapshots(pages, slots, boundaries):
            width = ring.shape[-1] // 2
            ring[:, slots[:, None], rows, :, :width] = view[pages].movedim(1, 0)

    def _snapshots(self, pages: Tensor, slots: Tensor, boundaries: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:  # fmt: skip
        """Of compressors, then indexers: rings, the pages' view [num_pages, layers, csa_ratio, 2, width], ring rows [n, csa_ratio]."""
        config, start, parts = self.config, 0, []
        if not len(self._csa):
            return parts
        for ring in (self._csa, self._index):
            shape = (len(ring), config.csa_ratio, 2, ring.shape[-1] // 2)
            size = 4 * math.prod(shape)
            view = self._bytes(start, size).view(torch.float32).unflatten(1, shape)
            back = torch.arange(-config.csa_ratio, 0, device=boundaries.device)
            parts.append((ring, view, (boundaries[:, None] + back) % ring.shape[2]))
            start += size
        return parts
