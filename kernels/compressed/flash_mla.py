"""FlashMLA's calling convention for DeepSeek-V4 over the kernels of ``compressed_attention``.

An engine that calls ``flash_mla_with_kvcache`` with a window cache and an extra cache can call this
instead: any number of heads (FlashMLA takes 64 and 128), plain bf16 caches besides the quantized
ones, and every architecture that Triton compiles for.

Source: FlashMLA, flash_mla_interface (signature, index convention, meaning of the sink and of the
lengths); its tests for empty rows.
"""

from __future__ import annotations

from typing import Any

import torch

from ..common import checks
from ..common.impls import implementation
from ..common.latent_pages import HEAD_DIM, ROW_BYTES, SCALE_BYTES, LatentPages
from .call import CompressedCall, check_rows

# Pages, physical rows [num_tokens, n] of them, and how many of a sequence's rows count (None: all).
Keys = tuple[LatentPages, torch.Tensor, torch.Tensor | None]


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

    Differences from FlashMLA's: work is divided on the device, so ``tile_scheduler_metadata`` is
    ignored; rows are never dereferenced past the lengths. Attention over all keys of a sequence
    (``block_table``, ``cache_seqlens``, ``causal``) is ``mla_attention``.

    Args:
        q: [batch, seq_len_q, num_heads, 512] bf16, fp16 or fp32, last stride 1.
        k_cache: [num_blocks, block_size, 1, 584] one-byte values in V4's page layout (any block
            stride of a multiple of 16 bytes, the page's own padding included), or
            [num_blocks, block_size, 1, 512] of q's dtype.
        block_table, cache_seqlens: None.
        head_dim_v: 512.
        tile_scheduler_metadata: ignored.
        num_splits: None.
        softmax_scale: factor of q . k, in 2**-30 .. 2**16; default 512 ** -0.5.
        causal: False.
        is_fp8_kvcache: whether the caches are quantized.
        indices: [batch, seq_len_q, topk] int32 physical rows of k_cache,
            block * block_size + offset; -1 = none.
        attn_sink: [num_heads] fp32 logits that join the denominator only.
        extra_k_cache, extra_indices_in_kvcache: the same for the second cache; both or neither.
        topk_length, extra_topk_length: [batch] int32, how many of the leftmost indices count: below
            0 none, above topk all; None = all.
        out: [batch, seq_len_q, num_heads, 512] q's dtype, contiguous, filled in place; None
            allocates.
        lse: [num_heads, batch * seq_len_q] fp32, filled in place; None allocates.
        workspace: as in ``compressed_attention``.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        (out, lse [batch, num_heads, seq_len_q] fp32, natural log, without the sink, a view of the
        given one). A query without keys gets 0 and, as in FlashMLA, lse +inf.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above, or one of two
            arguments that go together is missing.
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
    arguments: dict[str, Any] = {
        "q": q, "window_pages": k_cache, "window_table": indices, "window_lens": topk_length,
        "compressed_pages": extra_k_cache, "topk_indices": extra_indices_in_kvcache,
        "topk_lens": extra_topk_length, "sinks": attn_sink, "softmax_scale": softmax_scale,
        "fp8": is_fp8_kvcache, "out": out, "lse": lse, "workspace": workspace,
    }  # fmt: skip
    if isinstance(q, torch.Tensor) and q.dim() == 4 and q.shape[1] != 1:
        arguments |= _even_rows(arguments)
    if implementation(impl, q) == "triton":
        from . import triton_impl as compressed_triton

        compressed_triton.attend_slots(arguments, _checked, _returned)
    else:
        from . import torch_impl as compressed_torch

        call = _checked(arguments)
        compressed_torch.attention(call)
        arguments |= _returned(call, q)
    return arguments["out"], arguments["lse"] if lse is None else _by_sequence(lse, q)


def _returned(call: CompressedCall, q: torch.Tensor) -> dict[str, torch.Tensor]:
    """``out`` and ``lse`` of the call of ``q``, as ``flash_mla_with_kvcache`` returns them."""
    assert call.lse is not None
    return {"out": call.out.view(q.shape), "lse": _by_sequence(call.lse, q)}


def _by_sequence(lse: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """lse [num_heads, num_tokens] as [batch, num_heads, seq_len_q]."""
    batch, seq_len_q, num_heads = q.shape[:3]
    shape, strides = (batch, num_heads, seq_len_q), (seq_len_q, lse.stride(0), 1)
    return lse.as_strided(shape, strides)


def _even_rows(arguments: dict[str, Any]) -> dict[str, Any]:
    """Contiguous copies of the arguments whose rows are not evenly strided over all tokens."""
    found = {}
    for name in ("q", "window_table", "topk_indices"):
        rows = arguments[name]
        if not isinstance(rows, torch.Tensor) or rows.is_contiguous() or rows.dim() < 2:
            continue
        if rows.stride(0) != rows.shape[1] * rows.stride(1):
            found[name] = rows.contiguous()
    return found


def _checked(arguments: dict[str, Any]) -> CompressedCall:
    """Check the arguments of ``flash_mla_with_kvcache``, named as in ``CompressedCall``.

    Makes ``out`` and ``lse`` where they are None.
    """
    q, fp8, out, lse = (arguments[name] for name in ("q", "fp8", "out", "lse"))
    extra_cache, extra_indices, extra_lens = (
        arguments[name] for name in ("compressed_pages", "topk_indices", "topk_lens")
    )
    checks.expect_tensor("q", q, (None, None, None, HEAD_DIM), checks.MODEL_DTYPES)
    batch, seq_len_q, num_heads = q.shape[:3]
    given = (extra_cache is not None, extra_indices is not None)
    if given[0] != given[1] or (extra_lens is not None and not given[0]):
        raise ValueError(
            "extra_k_cache: expected extra_k_cache and extra_indices_in_kvcache "
            "(with extra_topk_length or without) or none"
        )
    if not isinstance(fp8, bool):
        raise ValueError(f"is_fp8_kvcache: expected a bool, got {fp8!r}")
    names = ("k_cache", "indices", "topk_length")
    window = _keys(
        names,
        q,
        arguments["window_pages"],
        arguments["window_table"],
        arguments["window_lens"],
        fp8,
    )
    extra = None
    if extra_cache is not None:
        names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
        extra = _keys(names, q, extra_cache, extra_indices, extra_lens, fp8)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    else:
        checks.expect_tensor("out", out, tuple(q.shape), q.dtype, device=q.device)
        if not out.is_contiguous():
            raise ValueError(f"out: expected a contiguous tensor, got strides {out.stride()}")
    lse_shape = (num_heads, batch * seq_len_q)
    if lse is None:
        lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    else:
        checks.expect_tensor("lse", lse, lse_shape, torch.float32, device=q.device)
        checks.expect_apart("lse", lse)
    return slots_call(
        q.flatten(0, 1),
        window,
        extra,
        sinks=arguments["sinks"],
        softmax_scale=arguments["softmax_scale"],
        out=out.flatten(0, 1),
        lse=lse,
        workspace=arguments["workspace"],
        tokens_per_len=seq_len_q,
    )


def slots_call(
    q: torch.Tensor,
    window: Keys,
    extra: Keys | None,
    *,
    sinks: torch.Tensor | None,
    softmax_scale: float | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    tokens_per_len: int = 1,
) -> CompressedCall:
    """The call of queries [num_tokens, num_heads, head_dim] over lists of physical rows.

    A row without keys gets lse +inf. Errors are those of ``flash_mla_with_kvcache``.
    """
    pages, indices, lens = window
    extra_pages, extra_indices, extra_lens = extra or (None, None, None)
    check_rows(q, pages, extra_pages, sinks, out, ("k_cache", "extra_k_cache", "attn_sink"))
    return CompressedCall(
        q=q,
        window_pages=pages,
        window_table=indices,
        seq_lens=None,
        cu_seqlens_q=None,
        sliding_window=indices.shape[1],
        max_seqlen_q=1,
        compressed_pages=extra_pages,
        topk_indices=extra_indices,
        topk_lens=extra_lens,
        sinks=sinks,
        softmax_scale=softmax_scale,
        num_decodes=q.shape[0],
        out=out,
        lse=lse,
        workspace=workspace,
        slots=True,
        window_lens=lens,
        tokens_per_len=tokens_per_len,
    )


def _keys(
    names: tuple[str, str, str],
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor | None,
    lens: torch.Tensor | None,
    fp8: bool,
) -> Keys:
    """One cache with its list, a row a token, and the lengths, one a sequence.

    Args:
        names: of the three arguments in the call, for error texts.
    """
    batch, seq_len_q = q.shape[:2]
    shape = (batch, seq_len_q, None)
    checks.expect_tensor(names[1], indices, shape, torch.int32, device=q.device)
    assert indices is not None
    checks.expect_int(f"{names[1]}: topk", indices.shape[2], 1)
    if lens is not None:
        checks.expect_tensor(names[2], lens, (batch,), torch.int32, device=q.device)
    try:
        return _pages(names[0], cache, fp8), indices.flatten(0, 1), lens
    except ValueError as error:
        raise ValueError(str(error).replace("data:", f"{names[0]}:", 1)) from None


def _pages(name: str, cache: torch.Tensor, fp8: bool) -> LatentPages:
    """FlashMLA's cache tensor as pages."""
    if not fp8:
        checks.expect_tensor(name, cache, (None, None, 1, HEAD_DIM), checks.MODEL_DTYPES)
        return LatentPages(cache.squeeze(2), cache.shape[1])
    one_byte = (torch.uint8, torch.int8, torch.float8_e4m3fn)
    width = ROW_BYTES + SCALE_BYTES
    checks.expect_tensor(name, cache, (None, None, 1, width), one_byte)
    num_blocks, block_size = cache.shape[:2]
    if block_size > 1 and cache.stride(1) != width:
        raise ValueError(f"{name}: expected rows {width} bytes apart, got {cache.stride(1)}")
    # Rows of 584 bytes are in the shape only: a page holds all values first and all scales last.
    data = cache.view(torch.uint8).as_strided(
        (num_blocks, block_size * width), (cache.stride(0), 1), cache.storage_offset()
    )
    return LatentPages(data, block_size)
