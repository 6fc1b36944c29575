"""Attention through FlashInfer's wrapper over pages: ``EngineConfig(impl="flashinfer")``.

FlashInfer reads keys and values from pages only, so a layer writes its rows first, then attends.
Each cache group has two wrappers, planned once a step for all of its layers::

    new tokens    dense group            window group
    one           pages                  pages
    several       pages                  copies of the keys in sight: pages keep the last rows only

Steps run without CUDA graphs. Each waits for the step before it, to read its lengths and tables.
FlashInfer compiles a kernel at its first plan, unless it was compiled ahead. In pages of e4m3
queries see the step's own rows quantized, unless they were copied.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from quire.kvcore import GroupSpec
from quire.kvcore.arrays import ragged_arange
from quire.kvcore.device import AttnMetadata

from ..config.named import ModelConfig
from .attention import PagedAttend
from .kv_cache import E4M3, LayerCache, PageTensors

DEVICES = ["cuda"]
DTYPES = [torch.float16, torch.bfloat16]
HEAD_DIMS = [64, 128, 256]
KV_CACHE_DTYPES = ["auto", "fp8_per_tensor"]
BACKEND = "fa2"
LAYOUT = "NHD"
WORKSPACE_BYTES = 256 * 2**20
ENDLESS = 2**62


def import_flashinfer() -> Any:
    """Import the package; NotImplementedError with torch for AMD GPUs or where it is missing."""
    if torch.version.hip is not None:
        _refuse(f"a torch for ROCm {torch.version.hip}, supported are NVIDIA GPUs")
    try:
        return importlib.import_module("flashinfer")
    except ModuleNotFoundError as error:
        raise NotImplementedError(
            f"impl: 'flashinfer' is supported where the package flashinfer-python is installed "
            f"(the extra quire[gpu]), got {type(error).__name__}: {error}"
        ) from error


def expect_supported(model: nn.Module, *, kv_cache_dtype: str, replay: bool) -> None:
    """Refuse an engine that FlashInfer cannot serve.

    Args:
        kv_cache_dtype, replay: as in `quire.models.engine.config.EngineConfig`.

    Raises:
        NotImplementedError: the layer if it is one, the reason, and what is supported.
    """
    name = model.config.name
    if not isinstance(model.config, ModelConfig):
        kind = model.config.layer_types[0]
        _refuse(f"{name!r}: layer 0 is {kind}, over latents, supported are full and sliding ones")
    for layer, kind in enumerate(model.config.layer_types):
        shape, donor = model.config.attention(layer), model.config.kv_donor(layer)
        of_layer = f"{name!r}: layer {layer} ({kind})"
        if shape.head_dim not in HEAD_DIMS:
            _refuse(f"{of_layer} has a head_dim of {shape.head_dim}, supported are {HEAD_DIMS}")
        if shape.sliding_window == 1:  # no page keeps the row of the only key
            _refuse(f"{of_layer} has a window of 1, supported are 2 and more")
        if any(key.endswith("sinks") for key, _ in model.layers[layer].named_parameters()):
            _refuse(f"{of_layer} has attention sinks, supported are layers without")
        if donor != layer:
            _refuse(f"{of_layer} reads the keys and values of layer {donor}, supported are its own")
    if model.device.type not in DEVICES:
        _refuse(f"tensors on {model.device.type!r}, supported is {DEVICES}")
    if model.dtype not in DTYPES:
        _refuse(f"a model in {model.dtype}, supported are {DTYPES}")
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        _refuse(
            f"kv_cache_dtype={kv_cache_dtype!r}: FlashInfer takes no scales of rows, "
            f"supported are {KV_CACHE_DTYPES}"
        )
    if replay:
        _refuse("replay=True: FlashInfer takes no first row of a window, supported is False")


def _refuse(reason: str) -> None:
    raise NotImplementedError(f"impl: 'flashinfer' cannot serve {reason}")


class _Group(NamedTuple):
    """Wrappers of a cache group, for sequences of one and of several new tokens."""

    reach: int  # tokens that a query sees before its own
    options: dict[str, Any]  # keywords of a plan
    one: Any
    several: Any


class FlashInfer:
    """The wrappers of an engine, in the order of its cache groups.

    Args:
        model: gives its config, dtype and device.
        groups: full attention is dense, sliding windows are not.
        kv_cache_dtype: one of `KV_CACHE_DTYPES`.
    """

    def __init__(self, model: nn.Module, groups: Sequence[GroupSpec], kv_cache_dtype: str) -> None:
        make = import_flashinfer().BatchPrefillWithPagedKVCacheWrapper
        # Wrappers may share it, as they run one after another.
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=model.device)
        self.groups: list[_Group] = []
        for group in groups:
            shape = model.config.full if group.kind == "dense" else model.config.sliding
            reach = ENDLESS if shape.sliding_window is None else shape.sliding_window - 1
            options = {
                "num_qo_heads": shape.num_heads,
                "num_kv_heads": shape.num_kv_heads,
                "head_dim_qk": shape.head_dim,
                "page_size": group.block_size,
                "causal": True,
                "sm_scale": model.config.softmax_scale,
                "window_left": -1 if reach == ENDLESS else reach,
                "q_data_type": model.dtype,
                "kv_data_type": model.dtype if kv_cache_dtype == "auto" else E4M3,
            }
            one, several = (make(workspace, LAYOUT, backend=BACKEND) for _ in range(2))
            self.groups.append(_Group(reach, options, one, several))


class FlashInferAttend(PagedAttend):
    """Attention of one step: plans when it is made, runs in each layer.

    Args:
        attn: the step's tables, lengths and slots.
        pool: pages, written and then read.
        flashinfer: the engine's wrappers, which a later step plans again.
    """

    def __init__(
        self, config: ModelConfig, attn: AttnMetadata, pool: PageTensors, flashinfer: FlashInfer
    ) -> None:
        super().__init__(config, attn, pool)
        self._groups = flashinfer.groups
        # {group: ([num_kept] pages and rows, their and the new rows' places among the copies)}
        self._copied: dict[int, list[Tensor]] = {}
        # Waits until the device has what earlier plans send from pinned memory that this one reuses.
        self._cu, self._ends = _on_host(attn.cu_seqlens_q), _on_host(attn.seq_lens)
        counts = np.diff(self._cu)
        self._starts = self._ends - counts
        longer = np.flatnonzero(counts > 1)
        # Sequences of one new token come first.
        n = self._num_ones = int(longer[0]) if len(longer) else len(counts)
        for g, group in enumerate(self._groups):
            table = _on_host(attn.block_tables[g])
            if n:
                self._plan_pages(group.one, g, slice(0, n), table)
            if n < len(counts):
                plan = self._plan_pages if group.reach == ENDLESS else self._plan_copies
                plan(group.several, g, slice(n, len(counts)), table)

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `Attend`."""
        assert k is not None and v is not None and sinks is None, "`expect_supported` refuses it"
        cache, n = self._pool.layers[layer], self._num_ones
        group, pages = self._groups[cache.group], (cache.k_pages, cache.v_pages)
        scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        # Before the write: a new row may take the place of one that the first queries still see.
        copies = self._copies(cache, k, v) if cache.group in self._copied else None
        self._write(layer, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if n:
            group.one.run(q[:n], pages, out=out[:n], **scales)
        if copies is not None:
            group.several.run(q[n:], copies, out=out[n:])
        elif n < len(q):
            group.several.run(q[n:], pages, out=out[n:], **scales)
        return out

    def _plan_pages(self, wrapper: Any, g: int, seqs: slice, table: Any) -> None:
        """Plan sequences over pages, those that they start too, which no table has yet."""
        starts, ends, group = self._starts[seqs], self._ends[seqs], self._groups[g]
        size = group.options["page_size"]
        first = np.maximum(starts - group.reach, 0) // size
        counts = -(-ends // size) - first
        rows, blocks = ragged_arange(first, counts)
        ahead = blocks * size - starts[rows]  # tokens from a sequence's first new one to a block
        slots = _on_host(self._attn.slot_mappings[g])
        started = slots[self._cu[seqs][rows] + np.maximum(ahead, 0)] // size
        pages = np.where(ahead < 0, table[seqs][rows, blocks % table.shape[1]], started)
        self._plan(wrapper, seqs, counts, pages, (ends - 1) % size + 1, group.options)

    def _plan_copies(self, wrapper: Any, g: int, seqs: slice, table: Any) -> None:
        """Plan sequences over copies of the keys that they see, each a page of its own."""
        starts, ends, group = self._starts[seqs], self._ends[seqs], self._groups[g]
        size = group.options["page_size"]
        first = np.maximum(starts - group.reach, 0)
        counts = ends - first
        places = np.cumsum(counts) - counts - first  # of position 0 of each sequence
        rows, kept = ragged_arange(first, starts - first)
        new_rows, new = ragged_arange(starts, ends - starts)
        pages = table[seqs][rows, kept // size % table.shape[1]]
        arrays = pages, kept % size, places[rows] + kept, places[new_rows] + new
        device = self._attn.seq_lens.device
        self._copied[g] = [torch.from_numpy(array).to(device) for array in arrays]
        options = {"page_size": 1, "kv_data_type": group.options["q_data_type"]}
        copies, ones = np.arange(counts.sum()), np.ones(len(ends))
        self._plan(wrapper, seqs, counts, copies, ones, group.options | options)

    def _plan(
        self, wrapper: Any, seqs: slice, counts: Any, pages: Any, last: Any, options: dict[str, Any]
    ) -> None:
        """Plan queries that are the last keys of their sequence, ``counts`` pages each."""
        cu = self._cu[seqs.start : seqs.stop + 1]
        indptr = np.concatenate(([0], np.cumsum(counts)))
        wrapper.plan(*(_int32(x) for x in (cu - cu[0], indptr, pages, last)), **options)

    def _copies(self, cache: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Pages [num_copies, 1, num_kv_heads, head_dim] of keys and of values."""
        page, row, kept_at, new_at = self._copied[cache.group]
        size = len(kept_at) + len(new_at)
        copies = k.new_empty(size, 1, *k.shape[1:]), v.new_empty(size, 1, *v.shape[1:])
        context = cache.rows(page, row, k.dtype)
        for pages, kept, new in zip(copies, context, (k, v), strict=True):
            pages[kept_at, 0], pages[new_at, 0] = kept, new[self._num_ones :]
        return copies


def _on_host(tensor: Tensor) -> Any:
    return tensor.cpu().numpy().astype(np.int64)


def _int32(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int32))
