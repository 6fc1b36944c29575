"""FlashMLA's calling convention for DeepSeek-V4 over the kernel of ``compressed_attention``."""

from __future__ import annotations

from typing import Any

import torch

from ..common import checks
from ..common.latent_pages import HEAD_DIM, ROW_BYTES, SCALE_BYTES, LatentPages
from .api import run
from .call import LatentCall, check_latent_pages


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sparse decode attention over lists of physical rows of a window cache and of an extra cache.

    It takes any number of heads (FlashMLA: 64 and 128), and plain caches as well as quantized ones.
    The device divides the work: ``tile_scheduler_metadata`` is ignored. Attention over all keys of
    a sequence is ``mla_attention``.

    Args:
        q: [batch, seq_len_q, num_heads, 512] bf16, fp16 or fp32, last stride 1.
        k_cache: [num_blocks, block_size, 1, 584] one-byte values in V4's page layout, any block
            stride that is a multiple of 16 bytes; or [num_blocks, block_size, 1, 512] of q's dtype.
        block_table, cache_seqlens, num_splits, causal: None, None, None, False.
        head_dim_v: 512.
        softmax_scale, workspace, impl: as in ``compressed_attention``.
        is_fp8_kvcache: True if the caches are quantized.
        indices: [batch, seq_len_q, topk] int32 physical rows of k_cache,
            block * block_size + offset; -1 = none.
        attn_sink: [num_heads] fp32 logits that join the denominator only.
        extra_k_cache, extra_indices_in_kvcache: the same for the second cache; both or neither.
        topk_length, extra_topk_length: [batch] int32, number of leading indices that count: below 0
            none, above topk all; None = all. Other rows are not read.
        out: [batch, seq_len_q, num_heads, 512] q's dtype, contiguous, filled in place; None
            allocates.
        lse: [num_heads, batch * seq_len_q] fp32, filled in place; None allocates.

    Returns:
        (out, lse [batch, num_heads, seq_len_q] fp32, natural log, without the sink, a view of the
        given one). A query without keys gets 0 and, as in FlashMLA, lse +inf.

    Raises:
        NotImplementedError: attention over all keys, another head_dim_v or cache layout, or a cache
            of 2**31 rows or more.

    Source: FlashMLA, flash_mla_interface.
    """
    if block_table is not None or cache_seqlens is not None or causal or indices is None:
        raise NotImplementedError(
            "indices: attention over all keys is not supported here; supported are indices "
            "without block_table, cache_seqlens, causal"
        )
    if num_splits is not None:
        raise ValueError(f"num_splits: expected None, got {type(num_splits).__name__}")
    if head_dim_v != HEAD_DIM:
        raise NotImplementedError(f"head_dim_v: {head_dim_v} is not {HEAD_DIM}")
    chosen = checks.implementation(impl, q)
    checks.expect_tensor("q", q, (None, None, None, HEAD_DIM), checks.MODEL_DTYPES)
    batch, seq_len_q, num_heads = q.shape[:3]
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None) or (
        extra_k_cache is None and extra_topk_length is not None
    ):
        raise ValueError(
            "extra_k_cache: expected extra_k_cache and extra_indices_in_kvcache "
            "(with extra_topk_length or without) or none"
        )
    if not isinstance(is_fp8_kvcache, bool):
        raise ValueError(f"is_fp8_kvcache: expected a bool, got {is_fp8_kvcache!r}")
    _check_lists(q, "indices", indices, "topk_length", topk_length)
    pages = _pages("k_cache", k_cache, is_fp8_kvcache)
    extra_pages = extra_lists = None
    if extra_indices_in_kvcache is not None:
        names = "extra_indices_in_kvcache", "extra_topk_length"
        _check_lists(q, names[0], extra_indices_in_kvcache, names[1], extra_topk_length)
        extra_pages = _pages("extra_k_cache", extra_k_cache, is_fp8_kvcache)
        extra_lists = extra_indices_in_kvcache.flatten(0, 1)
    flat = q.flatten(0, 1)
    check_latent_pages(flat, pages, extra_pages, ("k_cache", "extra_k_cache"))
    checks.expect_softmax_scale(softmax_scale)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    checks.expect_tensor("out", out, tuple(q.shape), q.dtype, device=q.device)
    if not out.is_contiguous():
        raise ValueError(f"out: expected a contiguous tensor, got strides {out.stride()}")
    lse_shape = (num_heads, batch * seq_len_q)
    if lse is None:
        lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    checks.check_outputs(*lse_shape, q.device, attn_sink, lse, workspace, sinks_name="attn_sink")
    call = LatentCall(
        flat, pages, indices.flatten(0, 1), None, None, max_seqlen_q=1, head_dim_v=HEAD_DIM,
        softmax_scale=HEAD_DIM**-0.5 if softmax_scale is None else softmax_scale,
        num_decodes=batch * seq_len_q,
        out=out.flatten(0, 1), entries=extra_pages, topk_indices=extra_lists,
        topk_lens=extra_topk_length, sinks=attn_sink, lse=lse, workspace=workspace, slots=True,
        window_lens=topk_length, tokens_per_len=seq_len_q,
    )  # fmt: skip
    run(call, chosen)
    return out, lse.unflatten(1, (batch, seq_len_q)).transpose(0, 1)


def _check_lists(
    q: torch.Tensor, name: str, indices: torch.Tensor, lens_name: str, lens: torch.Tensor | None
) -> None:
    checks.expect_tensor(name, indices, (*q.shape[:2], None), torch.int32, device=q.device)
    checks.expect_int(f"{name}: topk", indices.shape[2], 1)
    shape = (q.shape[0],)
    checks.expect_tensor(lens_name, lens, shape, torch.int32, device=q.device, optional=True)


def _pages(name: str, cache: Any, fp8: bool) -> LatentPages:
    """FlashMLA's cache tensor as pages; errors name the argument."""
    if not fp8:
        checks.expect_tensor(name, cache, (None, None, 1, HEAD_DIM), checks.MODEL_DTYPES)
        data = cache.squeeze(2)
    else:
        one_byte = (torch.uint8, torch.int8, torch.float8_e4m3fn)
        width = ROW_BYTES + SCALE_BYTES
        checks.expect_tensor(name, cache, (None, None, 1, width), one_byte)
        num_blocks, block_size = cache.shape[:2]
        if block_size > 1 and cache.stride(1) != width:
            raise ValueError(f"{name}: expected rows {width} bytes apart, got {cache.stride(1)}")
        # Rows of 584 bytes are in the shape only: a page holds all values first, all scales last.
        data = cache.view(torch.uint8).as_strided(
            (num_blocks, block_size * width), (cache.stride(0), 1), cache.storage_offset()
        )
    try:
        return LatentPages(data, cache.shape[1])
    except ValueError as error:
        raise ValueError(str(error).replace("data:", f"{name}:", 1)) from None
