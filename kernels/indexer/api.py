"""``index_topk``: checks, and the choice between ``kernel`` (with ``selection``) and ``torch_impl``."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.latent_pages import IndexPages
from .plan import IndexPlan, plan

MAX_TOPK = 4096
MAX_HEADS = 128


def index_topk(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: IndexPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    topk: int,
    compress_ratio: int = 4,
    max_seqlen_q: int,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    lens: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the ``topk`` visible entries with the highest index score for each query.

    The selection is exact and deterministic: among equal scores the lowest ids win.

        score(t, w) = sum_h weights[t, h] * relu(q[t, h] . key_w)    in fp32

    over entries w < floor((p_t + 1) / compress_ratio), where p_t = seq_len - q_len + i is the
    position of query i of its sequence. A query that sees at most ``topk`` entries gets them all
    without scores. The order of the sum does not depend on the batch, on chunks, or on decode or
    prefill; so neither does the selection. A score of NaN counts as infinity.

    The workspace holds the scores of a chunk of queries and the candidates of the selection. That
    is 4 bytes per entry and query, and 8 * topk bytes for each 8192 entries. At most 64 MiB are
    allocated, or the need of one query if that is more (1.3 MB at 262,144 entries and topk 1024);
    a longer step runs chunk by chunk.

    Args:
        q: [num_tokens, index_heads, index_dim] bf16, fp16 or fp32, roped, last stride 1; the
            sequences one after another.
        weights: [num_tokens, index_heads] fp32 head weights with all factors; any sign.
        pages: IndexPages of q's dtype, or quantized.
        block_table: [num_seqs, width] int32, the page of entries [b * storage_block_size, ...) of
            sequence s at [s, b]; any row stride. Table entries and keys that no query sees are
            never read. Entries past the end of the table are never selected.
        seq_lens: [num_seqs] int32, raw tokens of each sequence including this step's; 0 for a
            padding row.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        topk: entries to select, 1..4096.
        compress_ratio: raw tokens of an entry, 1..2**30.
        max_seqlen_q: host int, at least the new tokens of the longest sequence. It sizes tiles
            only.
        max_seq_len: host int, upper bound of seq_lens. Entries from max_seq_len // compress_ratio
            on are ignored.
        out: [num_tokens, topk] int32, filled in place; None allocates.
        lens: [num_tokens] int32, filled in place; None allocates.
        scores: [num_tokens, topk] fp32, filled in place with the scores of the selected entries,
            then -inf, to merge selections of several ranks; all scores are then computed. None =
            not wanted.
        workspace: [n] fp32 scratch, n >= ``index_topk_workspace_numel(num_tokens=1, ...)``; more
            queries in it mean fewer launches. None allocates. Concurrent calls need different ones.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        (out, lens): the ids of the selected entries within their sequence, ascending, then -1; and
        their number.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above; prefix sums or
            page ids of CPU tensors are out of range.
        NotImplementedError: topk > 4096 or more than 128 index heads.

    Source: DeepSeek-V4, lightning indexer; DeepSeek-V3.2 (arXiv 2512.02556) 2.1.
    """
    chosen = checks.implementation(impl, q)
    _check(
        q, weights, pages, block_table, seq_lens, cu_seqlens_q, topk, compress_ratio,
        max_seqlen_q, max_seq_len, out, lens, scores, workspace,
    )  # fmt: skip
    num_tokens, device = q.shape[0], q.device
    # Entries past the end of the table do not exist.
    room = block_table.shape[1] * pages.storage_block_size
    divided = plan(
        num_tokens=num_tokens,
        topk=topk,
        compress_ratio=compress_ratio,
        max_seq_len=min(max_seq_len, room * compress_ratio),
        score_all=scores is not None,
        available=None if workspace is None else workspace.numel(),
    )
    if workspace is not None and num_tokens and not divided.chunk:
        raise ValueError(
            f"workspace: expected float32 [>= {divided.query_numel}], "
            f"got float32 [{workspace.numel()}]"
        )
    if chosen == "torch" or checks.is_readable(q):
        checks.expect_offsets("cu_seqlens_q", cu_seqlens_q.tolist(), num_tokens)
        _check_pages(pages, block_table, seq_lens, cu_seqlens_q, compress_ratio, divided)
    if out is None:
        out = torch.empty(num_tokens, topk, dtype=torch.int32, device=device)
    if lens is None:
        lens = torch.empty(num_tokens, dtype=torch.int32, device=device)
    arguments = q, weights, pages, block_table, seq_lens, cu_seqlens_q, compress_ratio, divided
    if chosen == "triton":
        from .kernel import index_topk as run

        if workspace is None:
            workspace = torch.empty(divided.workspace_numel, dtype=torch.float32, device=device)
        run(*arguments, max_seqlen_q, out, lens, scores, workspace)
    else:
        from .torch_impl import index_topk as run_torch

        run_torch(*arguments, out, lens, scores)
    return out, lens


def index_topk_workspace_numel(
    *,
    num_tokens: int,
    topk: int,
    compress_ratio: int = 4,
    max_seq_len: int,
    scores: bool = False,
) -> int:
    """Elements (fp32) of ``workspace`` that a call of ``num_tokens`` queries uses.

    At most 2**24, or the need of one query if that is more.

    Args:
        num_tokens: most queries of a step; 1 gives the smallest workspace that is accepted.
        topk, compress_ratio, max_seq_len: as in ``index_topk``.
        scores: True if the call returns scores.

    Returns:
        Elements; 0 if no call computes a score.

    Raises:
        ValueError: a value is out of range.
        NotImplementedError: topk > 4096.

    Source: ``indexer.plan``.
    """
    checks.expect_int("num_tokens", num_tokens, 0)
    _check_sizes(topk, compress_ratio, max_seq_len)
    if not isinstance(scores, bool):
        raise ValueError(f"scores: expected a bool, got {scores!r}")
    return plan(
        num_tokens=num_tokens,
        topk=topk,
        compress_ratio=compress_ratio,
        max_seq_len=max_seq_len,
        score_all=scores,
    ).workspace_numel


def _check(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: IndexPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    topk: int,
    compress_ratio: int,
    max_seqlen_q: int,
    max_seq_len: int,
    out: torch.Tensor | None,
    lens: torch.Tensor | None,
    scores: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    if not isinstance(pages, IndexPages):
        raise ValueError(f"pages: expected IndexPages, got {type(pages).__name__}")
    dtypes = checks.MODEL_DTYPES if pages.fp8 else pages.data.dtype
    checks.expect_tensor("q", q, (None, None, pages.index_dim), dtypes)
    num_tokens, num_heads, _ = q.shape
    device = q.device
    if pages.data.device != device:
        raise ValueError(f"pages: expected data on {device}, got data on {pages.data.device}")
    checks.expect_int("q: index_heads", num_heads, 1)
    if num_heads > MAX_HEADS:
        raise NotImplementedError(f"q: {num_heads} index heads, supported are up to {MAX_HEADS}")
    fp32, int32 = torch.float32, torch.int32
    checks.expect_tensor("weights", weights, (num_tokens, num_heads), fp32, device=device)
    num_seqs = checks.expect_batch(seq_lens, cu_seqlens_q, max_seqlen_q, device)
    checks.expect_longest(num_tokens, num_seqs, max_seqlen_q)
    checks.expect_tensor("block_table", block_table, (num_seqs, None), int32, device=device)
    _check_sizes(topk, compress_ratio, max_seq_len)
    if (num_heads - 1) * q.stride(1) >= 2**31:
        # The kernel addresses the heads of a token with 32 bits.
        raise ValueError(f"q: expected heads within 2**31 elements, got {q.stride()}")
    if out is not None:
        checks.expect_tensor("out", out, (num_tokens, topk), int32, device=device)
        checks.expect_apart("out", out)
    if lens is not None:
        checks.expect_tensor("lens", lens, (num_tokens,), int32, device=device)
    if scores is not None:
        checks.expect_tensor("scores", scores, (num_tokens, topk), fp32, device=device)
        checks.expect_apart("scores", scores)
    if workspace is not None:
        checks.expect_tensor("workspace", workspace, (None,), fp32, device=device)


def _check_sizes(topk: int, compress_ratio: int, max_seq_len: int) -> None:
    checks.expect_int("topk", topk, 1)
    if topk > MAX_TOPK:
        raise NotImplementedError(f"topk: {topk} is not in 1..{MAX_TOPK}")
    checks.expect_int("compress_ratio", compress_ratio, 1, checks.MAX_TOKENS)
    checks.expect_int("max_seq_len", max_seq_len, 0, 2**31 - 1)


def _check_pages(
    pages: IndexPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    compress_ratio: int,
    divided: IndexPlan,
) -> None:
    """Require page ids that exist for all entries that are scored; ValueError otherwise."""
    if not divided.query_numel:
        return
    entries = (seq_lens // compress_ratio).clamp(max=divided.num_entries)
    least = 0 if divided.score_all else divided.topk
    entries = torch.where((entries > least) & (cu_seqlens_q.diff() > 0), entries, 0)
    block = torch.arange(block_table.shape[1], device=block_table.device)
    read = block * pages.storage_block_size < entries[:, None]
    checks.expect_ids("block_table", block_table[read], pages.data.shape[0])
