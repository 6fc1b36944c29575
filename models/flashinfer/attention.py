"""The attention operator of all layers of one step, through FlashInfer."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kvcore.device import AttnMetadata

from ..config.named import ModelConfig
from ..layers.attention import PagedAttend
from ..layers.kv_cache import PageTensors
from .step import PreparedStep


class FlashInferAttend(PagedAttend):
    """`PagedAttend` through FlashInfer's wrappers, which read keys and values from pages only.

    So a layer writes its rows first, then attends. No query misses a row for that: pages that are
    started in a step are named by no table, and a slot of a window's ring is taken over only from a
    block that its one query no longer sees. Where a window does not keep all of a step's rows, the
    keys that its queries see are copied before.

    In pages of e4m3 queries see the step's own rows quantized, unless these were copied.

    Args:
        attn: with what `StepPlanner` prepared.
    """

    def __init__(self, config: ModelConfig, attn: AttnMetadata, pool: PageTensors) -> None:
        super().__init__(config, attn, pool)
        assert isinstance(attn.prepared, PreparedStep)
        self._step = attn.prepared

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
        cache, num_decodes = self._pool.layers[layer], self._step.num_decodes
        group = self._step.groups[cache.group]
        pages = cache.k_pages, cache.v_pages
        scales = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
        copies = None if group.gathered is None else group.gathered.copies(cache, k, v)
        self._write(layer, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if group.decode is not None:
            group.decode.run(q[:num_decodes], pages, out=out[:num_decodes], **scales)
        if group.prefill is not None:
            rest = {"out": out[num_decodes:]}
            if copies is None:
                group.prefill.run(q[num_decodes:], pages, **rest, **scales)
            else:
                group.prefill.run(q[num_decodes:], copies, **rest)
        return out
