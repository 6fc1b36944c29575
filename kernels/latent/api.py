"""Attention over latent rows: MLA of DeepSeek-V2 and V3, and the attention of DeepSeek-V4."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.latent_pages import LatentPages, RowPages
from ..common.tile_shapes import MAX_ROWS
from .call import LatentCall, check_latent_pages, check_values

MLA_SCORE_DIMS = (16, 32, 64, 128)


def mla_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    softmax_scale: float,
    head_dim_v: int = 512,
    kv: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    num_decodes: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Causal attention of many query heads over one paged latent row a token.

        out_i = sum_j softmax_j(softmax_scale * q_i . row_j) row_j[:head_dim_v],   j <= p_i

    Queries are in latent form: q = (q_nope absorbed through the key up-projection, q_rope), and the
    value up-projection follows. Sequences, positions p and new rows are as in ``paged_attention``.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32, last stride 1; any number of heads,
            so also a tensor-parallel shard.
        pages: [num_pages, block_size, head_dim] q's dtype, any page and row stride, last stride 1.
        block_table, seq_lens, cu_seqlens_q, max_seqlen_q, max_seq_len, num_decodes, lse, impl: as
            in ``paged_attention``.
        softmax_scale: factor of q . row, in 2**-30 .. 2**16: of the model's uncompressed head size
            (192 ** -0.5 in V2 and V3, times YaRN's factor), so there is no default.
        head_dim_v: leading channels of a row that are its value; head_dim - head_dim_v further ones
            (the roped key) only score.
        kv: [num_tokens, head_dim] q's dtype, the step's own rows, ragged like q; None: all keys are
            in the pages.
        out: [num_tokens, num_heads, head_dim_v] q's dtype, filled in place; None allocates.
        workspace: [n] fp32 scratch of the KV splits, n >= ``quire.kernels.workspace_numel`` of
            num_kv_heads 1 and head_dim ``head_dim_v``; None allocates.

    Returns:
        ``out``. A query that sees no key gets out 0 and lse -inf.

    Raises:
        NotImplementedError: head_dim_v is not a power of two in 16..512, or head_dim - head_dim_v
            not one in 16..128.

    Source: DeepSeek-V2 (arXiv 2405.04434) 2.1, decoupled RoPE and absorbed projections.
    """
    call = LatentCall(
        q, pages, block_table, seq_lens, cu_seqlens_q, max_seqlen_q, head_dim_v, softmax_scale,
        kv=kv, max_seq_len=max_seq_len, num_decodes=num_decodes, out=out, lse=lse,
        workspace=workspace,
    )  # fmt: skip
    chosen = checks.complete(call, _check_mla, impl)
    call.pages = RowPages(pages, pages.shape[1])
    return run(call, chosen)


def compressed_attention(
    q: torch.Tensor,
    window_pages: LatentPages,
    window_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    sliding_window: int,
    max_seqlen_q: int,
    kv: torch.Tensor | None = None,
    compressed_pages: LatentPages | None = None,
    compressed_table: torch.Tensor | None = None,
    compress_ratio: int | None = None,
    topk_indices: torch.Tensor | None = None,
    topk_lens: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    cos_sin: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    num_decodes: int | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Attention over latent rows that are key and value at once: raw rows and compressed entries.

    Query i of sequence s stands at position p = seq_lens[s] - q_len + i. It sees the raw rows of
    positions p - sliding_window + 1 .. p and, with ``compressed_pages``, the entries
    w < floor((p + 1) / compress_ratio): all of them (HCA), or those that ``topk_indices`` names
    (CSA). All share one softmax and one sink. Rows and table entries that no query sees are never
    read, and may hold anything.

    Args:
        q: [num_tokens, num_heads, head_dim] bf16, fp16 or fp32, last stride 1, roped; any number of
            heads.
        window_pages: raw rows, roped; q's dtype, or quantized (q bf16 or fp32).
        window_table: [num_seqs, width] int32, page of block b at entry b % width: a ring, or a
            linear table. Only the last width * storage_block_size positions in the pages are seen,
            as later rows overwrite earlier ones. With width 0 and no ``kv`` a query sees entries
            alone.
        seq_lens, cu_seqlens_q, max_seqlen_q, max_seq_len, num_decodes, softmax_scale, sinks, out,
            lse, impl: as in ``paged_attention``.
        sliding_window: raw rows that a query sees, its own included; >= 1. From 2**30 on all.
        kv: [num_tokens, head_dim] q's dtype, the step's own raw rows: only positions before the
            step are read from the pages. With quantized pages pass the rows that ``write_latent``
            returns, rounded as in the pages. None: the pages hold all.
        compressed_pages: entries of all closed windows, also of those that this step closed; the
            same format as ``window_pages``.
        compressed_table: [num_seqs, width] int32, page of entry w at w // storage_block_size.
            Entries past its end do not exist.
        compress_ratio: raw tokens of an entry, 1..2**30.
        topk_indices: [num_tokens, topk] int32, entries of the token's own sequence, each at most
            once, in any order. -1 = none; entries that the query does not see yet count nothing.
        topk_lens: [num_tokens] int32, number of leading indices of a row that count: below 0 none,
            above topk all; None = all.
        cos_sin: [max_position, rope_dim] fp32, cosines then sines. Values carry the
            rotation of their own positions, so the trailing rope_dim channels of the output get the
            inverse RoPE of the query's position. None = not applied.
        workspace: [n] fp32, n >= ``compressed_attention_workspace_numel(...)``, scratch of the KV
            splits; None allocates. Calls that may run at the same time need different ones.

    Returns:
        ``out``. A query that sees no key gets out 0 and lse -inf.

    Raises:
        NotImplementedError: quantized pages together with plain ones or with fp16 queries; a
            rope_dim that is no power of two; a pool of 2**31 rows or more.

    Source: DeepSeek-V4 report 2.3; transformers models/deepseek_v4.
    """
    call = LatentCall(
        q, window_pages, window_table, seq_lens, cu_seqlens_q, max_seqlen_q,
        softmax_scale=softmax_scale, sliding_window=sliding_window, kv=kv, entries=compressed_pages,
        entry_table=compressed_table, ratio=compress_ratio, topk_indices=topk_indices,
        topk_lens=topk_lens, sinks=sinks, cos_sin=cos_sin, max_seq_len=max_seq_len,
        num_decodes=num_decodes, out=out, lse=lse, workspace=workspace,
    )  # fmt: skip
    return run(call, checks.complete(call, _check_compressed, impl))


def compressed_attention_workspace_numel(*, head_dim: int, num_sms: int) -> int:
    """Elements (fp32) of ``workspace`` for any batch, any heads and any lengths: a row of head_dim
    + 1 values for each of 64 query rows on each multiprocessor.

    Args:
        head_dim: channels of a row, >= 1.
        num_sms: ``torch.cuda.get_device_properties(device).multi_processor_count``.
    """
    checks.expect_int("head_dim", head_dim, 1)
    checks.expect_int("num_sms", num_sms, 1)
    return num_sms * MAX_ROWS * (head_dim + 1)


def run(call: LatentCall, chosen: str) -> torch.Tensor:
    """Compute a checked call by the implementation of that name; returns ``out``."""
    # It sizes grids. A tile never holds more tokens than rows, so its shape stays.
    call.max_seqlen_q = min(call.max_seqlen_q, max(call.q.shape[0], MAX_ROWS))
    call.head_dim_v = call.head_dim_v or call.q.shape[2]
    if call.out is None:
        shape = *call.q.shape[:2], call.head_dim_v
        call.out = torch.empty(shape, dtype=call.q.dtype, device=call.q.device)
    if checks.is_readable(call.q):
        check_values(call)
    if chosen == "triton":
        from .launch import launch_attention as attend
    else:
        from .torch_impl import attend_in_torch as attend
    return attend(call)


def _check_mla(call: LatentCall) -> None:
    q, pages, head_dim_v = call.q, call.pages, call.head_dim_v
    checks.expect_tensor("q", q, (None, None, None), checks.MODEL_DTYPES)
    head_dim = q.shape[2]
    checks.expect_int("q: num_heads", q.shape[1], 1)
    checks.expect_int("head_dim_v", head_dim_v, 1)
    checks.expect_head_dim("head_dim_v", head_dim_v)
    if head_dim - head_dim_v not in MLA_SCORE_DIMS:
        raise NotImplementedError(
            f"q: head_dim {head_dim} is not head_dim_v {head_dim_v} and one of "
            f"{list(MLA_SCORE_DIMS)} more"
        )
    checks.expect_tensor("pages", pages, (None, None, head_dim), q.dtype, device=q.device)
    for axis, what in ((0, "num_pages"), (1, "block_size")):
        checks.expect_int(f"pages: {what}", pages.shape[axis], 1)
    checks.expect_short_pages("pages", pages)
    checks.check_batch(call, "block_table", call.table, head_dim_v)
    checks.expect_int("block_table: width", call.table.shape[1], 1)
    shape = (q.shape[0], head_dim)
    checks.expect_tensor("kv", call.kv, shape, q.dtype, device=q.device, optional=True)
    checks.expect_positive("softmax_scale", call.softmax_scale, most=16)


def _check_compressed(call: LatentCall) -> None:
    check_latent_pages(call.q, call.pages, call.entries)
    num_tokens, _, head_dim = call.q.shape
    checks.check_batch(call, "window_table", call.table, head_dim)
    device, int32 = call.q.device, torch.int32
    given = tuple(x is not None for x in (call.entries, call.entry_table, call.ratio))
    if any(given) and not all(given):
        raise ValueError(
            "compressed_pages: expected compressed_pages, compressed_table and "
            f"compress_ratio together or none, got {given}"
        )
    if call.topk_indices is not None and call.entries is None:
        raise ValueError("topk_indices: expected None without compressed_pages, got a tensor")
    if call.topk_lens is not None and call.topk_indices is None:
        raise ValueError("topk_lens: expected None without topk_indices, got a tensor")
    for name, tensor, shape, dtype in (
        ("kv", call.kv, (num_tokens, head_dim), call.q.dtype),
        ("compressed_table", call.entry_table, (call.num_seqs, None), int32),
        ("topk_indices", call.topk_indices, (num_tokens, None), int32),
        ("topk_lens", call.topk_lens, (num_tokens,), int32),
        ("cos_sin", call.cos_sin, (None, call.pages.rope_dim), torch.float32),
    ):
        checks.expect_tensor(name, tensor, shape, dtype, device=device, optional=True)
    if call.entry_table is not None:
        checks.expect_int("compressed_table: width", call.entry_table.shape[1], 1)
        checks.expect_int("compress_ratio", call.ratio, 1, checks.MAX_TOKENS)
    checks.expect_int("sliding_window", call.sliding_window, 1)
