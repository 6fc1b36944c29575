"""``index_topk``: checks and plain torch; ``kernel`` has the kernels and their launch."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..common import checks
from ..common.checks import expect_device, expect_int, expect_tensor
from ..common.latent_pages import IndexPages
from .kernel import launch, make_plan

MAX_TOPK = 4096
MAX_HEADS = 128
# Products of a head and a key that the torch implementation holds at once.
MAX_PRODUCTS = 1 << 24


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
    workspace: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the ``topk`` visible entries with the highest index score for each query::

        score(t, w) = sum_h weights[t, h] * relu(q[t, h] . key_w)    in fp32

    over entries w < floor((p_t + 1) / compress_ratio), where p_t = seq_len - q_len + i is the
    position of query i of its sequence. The selection is exact, among equal scores the lowest ids
    win, and NaN counts as infinity. It does not depend on the batch, on chunks, or on decode or
    prefill. A query that sees at most ``topk`` entries gets them all without scores.

    Args:
        q: [num_tokens, index_heads, index_dim] bf16, fp16 or fp32, roped, last stride 1; the
            sequences one after another.
        weights: [num_tokens, index_heads] fp32 head weights with all factors; any sign.
        pages: IndexPages of q's dtype, or quantized.
        block_table: [num_seqs, width] int32, the page of entries [b * storage_block_size, ...) of
            sequence s at [s, b]; any row stride. Those that no query sees are never read, and
            entries past its end never selected.
        seq_lens: [num_seqs] int32, raw tokens of each sequence including this step's; 0 for a
            padding row.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens, up to num_tokens.
        topk: entries to select, 1..4096.
        compress_ratio: raw tokens of an entry, 1..2**30.
        max_seqlen_q: host int, at least the new tokens of the longest sequence.
        max_seq_len: host int, upper bound of seq_lens; later entries are ignored.
        out: [num_tokens, topk] int32, filled in place; None allocates.
        lens: [num_tokens] int32, filled in place; None allocates.
        workspace: [n] fp32 scratch, n >= ``index_topk_workspace_numel(num_tokens=1, ...)``; with
            less than a step needs, it runs chunk by chunk. None allocates up to 64 MiB, or the need
            of one query. Concurrent calls need different ones.
        impl: see ``quire.kernels``, also for errors.

    Returns:
        (out, lens): the ids of the selected entries within their sequence, ascending, then -1; and
        their number.

    Raises:
        NotImplementedError: topk > 4096 or more than 128 index heads.

    Source: DeepSeek-V4, lightning indexer; DeepSeek-V3.2 (arXiv 2512.02556) 2.1.
    """
    chosen = checks.accept(
        impl, _check, q, weights, pages, block_table, seq_lens, cu_seqlens_q, topk, compress_ratio,
        max_seqlen_q, out, lens, workspace,
    )  # fmt: skip
    expect_int("max_seq_len", max_seq_len, 0, 2**31 - 1)
    num_tokens, device, fp32, int32 = q.shape[0], q.device, torch.float32, torch.int32
    out = torch.empty(num_tokens, topk, dtype=int32, device=device) if out is None else out
    lens = torch.empty(num_tokens, dtype=int32, device=device) if lens is None else lens
    # Entries past the end of the table do not exist.
    reach = min(max_seq_len, block_table.shape[1] * pages.storage_block_size * compress_ratio)
    available = None if workspace is None else workspace.numel()
    plan = make_plan(num_tokens, topk, compress_ratio, reach, available)
    if num_tokens and not plan.chunk:
        raise ValueError(
            f"workspace: expected float32 [>= {plan.query_numel}], got float32 [{available}]"
        )
    if chosen == "torch" or checks.is_readable(q):
        checks.read_batch(seq_lens, cu_seqlens_q, num_tokens)
        entries = (seq_lens // compress_ratio).clamp(max=plan.num_entries)
        scored = (entries > topk) & (cu_seqlens_q.diff() > 0)
        block = torch.arange(block_table.shape[1], device=device)
        read = scored[:, None] & (block * pages.storage_block_size < entries[:, None])
        checks.expect_ids("block_table", block_table[read], pages.data.shape[0])
    if chosen == "torch":
        _torch(
            q, weights, pages, block_table, seq_lens, cu_seqlens_q, topk, compress_ratio,
            plan.num_entries, out, lens,
        )  # fmt: skip
    else:
        if workspace is None:
            numel = plan.chunk * plan.query_numel
            workspace = torch.empty(numel, dtype=fp32, device=device)
        launch(
            q, weights, pages, block_table, seq_lens, cu_seqlens_q, topk, compress_ratio,
            max_seqlen_q, plan, out, lens, workspace,
        )  # fmt: skip
    return out, lens


def index_topk_workspace_numel(
    *, num_tokens: int, topk: int, compress_ratio: int = 4, max_seq_len: int
) -> int:
    """fp32 elements of ``workspace`` that a call of ``num_tokens`` queries uses.

    At most 2**24, or the need of one query if that is more; 0 if no call computes a score.
    ``num_tokens`` 1 gives the smallest workspace that is accepted. The other arguments, and the
    errors, are those of ``index_topk``.
    """
    expect_int("num_tokens", num_tokens, 0)
    _check_sizes(topk, compress_ratio)
    expect_int("max_seq_len", max_seq_len, 0, 2**31 - 1)
    plan = make_plan(num_tokens, topk, compress_ratio, max_seq_len)
    return plan.chunk * plan.query_numel


def _check(
    q, weights, pages, block_table, seq_lens, cu_seqlens_q, topk, compress_ratio, max_seqlen_q,
    out, lens, workspace,
) -> None:  # fmt: skip
    if not isinstance(pages, IndexPages):
        raise ValueError(f"pages: expected IndexPages, got {type(pages).__name__}")
    dtypes = checks.MODEL_DTYPES if pages.fp8 else pages.data.dtype
    expect_tensor("q", q, (None, None, pages.index_dim), dtypes)
    (num_tokens, num_heads, _), device = q.shape, q.device
    expect_device("pages", pages.data, device)
    expect_int("q: index_heads", num_heads, 1)
    if num_heads > MAX_HEADS:
        raise NotImplementedError(f"q: {num_heads} index heads, supported are up to {MAX_HEADS}")
    if (num_heads - 1) * q.stride(1) >= 2**31:
        # The kernel addresses the heads of a token with 32 bits.
        raise ValueError(f"q: expected heads within 2**31 elements, got {q.stride()}")
    fp32, int32 = torch.float32, torch.int32
    expect_tensor("weights", weights, (num_tokens, num_heads), fp32, device=device)
    num_seqs = checks.expect_batch(seq_lens, cu_seqlens_q, max_seqlen_q, device)
    checks.expect_longest(num_tokens, num_seqs, max_seqlen_q)
    expect_tensor("block_table", block_table, (num_seqs, None), int32, device=device)
    _check_sizes(topk, compress_ratio)
    checks.expect_output("out", out, (num_tokens, topk), int32, device)
    expect_tensor("lens", lens, (num_tokens,), int32, device=device, optional=True)
    expect_tensor("workspace", workspace, (None,), fp32, device=device, optional=True)


def _check_sizes(topk: int, compress_ratio: int) -> None:
    expect_int("topk", topk, 1)
    if topk > MAX_TOPK:
        raise NotImplementedError(f"topk: {topk} is not in 1..{MAX_TOPK}")
    expect_int("compress_ratio", compress_ratio, 1, checks.MAX_TOKENS)


@torch.no_grad()
def _torch(
    q, weights, pages, block_table, seq_lens, cu_seqlens_q, topk, compress_ratio, most_entries,
    out, lens,
) -> None:  # fmt: skip
    """One sequence and a bounded number of scores at a time."""
    device, rows = q.device, pages.storage_block_size
    rank = torch.arange(topk, device=device)
    out.fill_(-1)
    lens.zero_()
    for s, (first, last) in enumerate(pairwise(cu_seqlens_q.tolist())):
        seq_len = int(seq_lens[s])
        num_entries = min(seq_len // compress_ratio, most_entries)
        if last == first or num_entries <= 0:
            continue
        position = seq_len - last + torch.arange(first, last, device=device)
        visible = ((position + 1) // compress_ratio).clamp(0, num_entries)
        lens[first:last] = visible.clamp(max=topk).int()
        out[first:last] = torch.where(rank < visible[:, None], rank, -1).int()
        scored = (visible > topk).nonzero()[:, 0]
        if not len(scored):
            continue
        entry = torch.arange(num_entries, device=device)
        keys = pages.read(block_table[s].long()[entry // rows] * rows + entry % rows)
        for part in scored.split(max(1, MAX_PRODUCTS // (num_entries * q.shape[1]))):
            row = first + part
            products = (q[row].float() @ keys.T).relu_()  # [queries, heads, entries]
            # One order of summation for any number of queries, which no matrix product promises.
            scores = products.mul_(weights[row][..., None]).sum(1)
            scores = scores.nan_to_num(torch.inf, torch.inf, -torch.inf)
            scores = scores.masked_fill(entry >= visible[part][:, None], -torch.inf)
            least = torch.topk(scores, topk).values[:, -1:]
            above, equal = scores > least, scores == least
            needed = topk - above.sum(1, keepdim=True)
            taken = above | (equal & (equal.cumsum(1) <= needed))
            out[row] = taken.nonzero()[:, 1].view(-1, topk).int()
