"""Which bytes of which pages are whose: the layers of DeepSeek-V4 dealt into cache groups.

`models.deepseek_v4.cache` makes the tensors.

A page is one row of bytes for all layers of its group, side by side. Groups share one pool of equal
pages::

    group        kind    tokens   a page holds
    compressed   dense   256      entries of all CSA (64 rows) and HCA (2 rows) layers, and index
                                  keys of the CSA layers
    window.0 ..  window  64       raw rows of a share of the layers, those of drafters last
    overlap      window  256      series a of the block's last 4 tokens, of all CSA compressors and
                                  indexers

What a compressor has of a compression window that is still open lives in rings, one for each
request, outside of the pages: there a token's row is overwritten in place, and pages of a few
tokens each would cost a whole page. Only what a resumed request needs at a boundary becomes a page.
A boundary is a multiple of both ratios, so that compression windows end there: HCA then needs
nothing, and CSA, whose next entry overlaps the window before, its series a (4 rows, see
`GatedPooling`). To the allocator that is a sliding window of the 4 tokens before a query; of a
block's rows none but its last 4 are ever stored. So a prefix hit takes all pages of "compressed"
before its end, the last two of each window group, and one of "overlap".

A new block gets its page when the allocator plans the step (`quire.kvcore`:
``tables/planner.py``). Until the commit it is in the slot mapping
alone: tables show the context before the step.

Source: DeepSeek-V4 report 3; vLLM 0.33 ``v1/core/kv_cache_planning`` (pages of bytes), which keeps
    compressor state in token pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quire.kernels import page_bytes
from quire.kvcore import GroupSpec

from .config import CSA, HCA, DeepseekV4Config

FP8_DIMS = (512, 64)  # of a latent row in the quantized layout
COMPRESSED, WINDOW, OVERLAP = "compressed", "window", "overlap"


@dataclass(frozen=True)
class CacheFormat:
    """How rows are stored.

    Attributes:
        dtype: of plain rows.
        fp8: latent rows and index keys quantized (584 and 132 bytes a row).
    """

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
    """Where in a page a layer's rows begin, in bytes; None for what the layer has not.

    Attributes:
        window_group: index of the group that has its raw rows.
        window: raw rows.
        compressed: entries, in pages of the group "compressed".
        index_keys: index keys, in the same pages.
    """

    window_group: int
    window: int
    compressed: int | None
    index_keys: int | None


@dataclass(frozen=True)
class CachePlan:
    """Groups of a model, and where in their pages each layer is.

    Attributes:
        groups: in the order of an allocator's tables; a page of each has the same bytes.
        layers: of the trunk, then drafters.
    """

    format: CacheFormat
    groups: tuple[GroupSpec, ...]
    layers: tuple[LayerPlacement, ...]

    def group_index(self, name: str) -> int | None:
        """Where in ``groups`` the group of that name is; None where the model has none."""
        names = [group.name for group in self.groups]
        return names.index(name) if name in names else None


def overlap_sizes(config: DeepseekV4Config) -> tuple[int, int]:
    """Elements (fp32) of a CSA layer in a page of overlap rows.

    Of the compressor, and of the indexer; kv and gate of one window.
    """
    return 2 * config.csa_ratio * config.head_dim, 2 * config.csa_ratio * config.index_head_dim


def ring_bytes(config: DeepseekV4Config, max_draft_tokens: int) -> int:
    """Bytes of one request's rings, fp32, all layers; `CompressorCache.ring` has their shape."""
    csa_row = 4 * 2 * 2 * (config.head_dim + config.index_head_dim)
    hca_row = 4 * 2 * config.head_dim
    csa = config.layer_types.count(CSA) * (2 * config.csa_ratio + max_draft_tokens) * csa_row
    return csa + config.layer_types.count(HCA) * (config.hca_ratio + max_draft_tokens) * hca_row


def plan_cache(
    config: DeepseekV4Config,
    fmt: CacheFormat,
    *,
    block_size: int | None = None,
    window_block_size: int | None = None,
    drafters: bool = True,
) -> CachePlan:
    """Chooses groups and the bytes of their pages.

    The page that entries need is everybody's. Layers' windows are dealt into as few groups as fit
    such pages.

    Args:
        block_size: tokens of a page of entries, a multiple of both ratios; default: the first such that holds two HCA windows.
        window_block_size: a divisor of block_size; default: the largest that is at most half a
            sliding window.
        drafters: whether the drafter layers take part.

    Returns:
        CachePlan.

    Raises:
        ValueError: block_size is no multiple of both ratios and of window_block_size.
        NotImplementedError: quantized rows of other sizes than the released ones.
    """
    if fmt.fp8 and (config.head_dim, config.rope_dim) != FP8_DIMS:
        raise NotImplementedError(
            f"kv_cache_dtype: 'fp8' is supported with (head_dim, rope_dim) = {FP8_DIMS}, "
            f"{config.name!r} has {(config.head_dim, config.rope_dim)}"
        )
    unit = math.lcm(config.csa_ratio, config.hca_ratio, window_block_size or 1)
    if block_size is None:
        block_size = -(-2 * config.hca_ratio // unit) * unit
    if block_size < 1 or block_size % unit:
        windows = f", window blocks of {window_block_size}" if window_block_size else ""
        raise ValueError(
            f"block_size: expected a multiple of {unit} (ratios {config.csa_ratio} and "
            f"{config.hca_ratio}{windows}), got {block_size}"
        )
    if window_block_size is None:
        half = max(1, config.sliding_window // 2)
        window_block_size = next(n for n in range(half, 0, -1) if block_size % n == 0)
    kinds = config.all_layer_types if drafters else config.layer_types
    starts: list[tuple[int | None, int | None]] = []  # entries, index keys
    size = 0
    for layer in range(len(kinds)):
        ratio = config.compress_ratio(layer)
        compressed = index_keys = None
        if ratio is not None:
            compressed, size = size, size + fmt.latent_bytes(config, block_size // ratio)
        if kinds[layer] == CSA:
            bytes_of_keys = fmt.index_bytes(config, block_size // config.csa_ratio)
            index_keys, size = size, size + bytes_of_keys
        starts.append((compressed, index_keys))
    overlap_bytes = 4 * kinds.count(CSA) * sum(overlap_sizes(config))
    window_bytes = fmt.latent_bytes(config, window_block_size)
    page_bytes = max(size, overlap_bytes, window_bytes)
    num_windows = -(-len(kinds) // (page_bytes // window_bytes))
    share = -(-len(kinds) // num_windows)

    groups = []
    if size:
        groups.append(GroupSpec(COMPRESSED, "dense", block_size, page_bytes))
    first = len(groups)
    drafted = config.num_layers // share if len(kinds) > config.num_layers else num_windows
    for i in range(num_windows):
        groups.append(
            GroupSpec(
                f"{WINDOW}.{i}",
                "window",
                window_block_size,
                page_bytes,
                sliding_window=config.sliding_window,
                lookahead=int(i >= drafted),
            )
        )
    if overlap_bytes:
        seen = config.csa_ratio + 1
        groups.append(GroupSpec(OVERLAP, "window", block_size, page_bytes, sliding_window=seen))
    layers = tuple(
        LayerPlacement(first + layer // share, layer % share * window_bytes, *starts[layer])
        for layer in range(len(kinds))
    )
    return CachePlan(fmt, tuple(groups), layers)
