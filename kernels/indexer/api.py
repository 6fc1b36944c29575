"""``index_topk``: which compressed entries each query attends to, by the scores of the lightning indexer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attention.api import _implementation
from ..common import checks
from ..common.latent_pages import IndexPages
from .plan import IndexPlan, plan

MAX_TOPK = 4096
MAX_HEADS = 128


@dataclass(frozen=True)
class IndexCall:
    """The checked arguments of one call; fields are named and shaped as in ``index_topk``."""

    q: torch.Tensor
    weights: torch.Tensor
    pages: IndexPages
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    out: torch.Tensor
    lens: torch.Tensor
    workspace: torch.Tensor | None
    plan: IndexPlan
    compress_ratio: int
    max_seqlen_q: int


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
    """Pick the ``topk`` visible entries of the highest index score for each query; exact, among equal scores the lowest ids.

        score(t, w) = sum_h weights[t, h] * relu(q[t, h] . key_w)    in fp32, over the entries w < floor((p_t + 1) / compress_ratio)

    p_t = seq_len - q_len + i is the position of query i of its sequence. A query that sees at most ``topk`` entries gets them all, and its
    scores are not computed. The order in which scores are summed does not depend on the batch, on chunks or on whether a sequence decodes
    or prefills, so neither does the choice.

    Workspace: scores of a chunk of queries at a time, and what the levels of the selection keep of them: 4 bytes an entry and query, and
    8 * topk bytes for each 8192 entries. At most 64 MiB are allocated, or one query's need where that is more (1.3 MB at 262,144 entries
    and topk 1024): a longer step runs chunk by chunk.

    Args:
        q: [num_tokens, index_heads, index_dim] bf16, fp16 or fp32, roped, last stride 1; the sequences one after another.
        weights: [num_tokens, index_heads] fp32 head weights, which hold every factor; any sign.
        pages: IndexPages of q's dtype, or quantised.
        block_table: [num_seqs, width] int32, the page of entries [b * storage_block_size, ...) of sequence s at [s, b]; any row stride.
            Table entries of what no query sees are never read, and rows of it may hold anything. Entries behind its end are not there: none
            of them is picked.
        seq_lens: [num_seqs] int32, raw tokens of each sequence including this step's; 0 for a padding row.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        topk: entries to pick, 1..4096.
        compress_ratio: raw tokens of an entry, 1..2**30.
        max_seqlen_q: host int, at least the new tokens of the longest sequence. It sizes tiles only.
        max_seq_len: host int, upper bound of seq_lens. Entries from max_seq_len // compress_ratio on are not looked at.
        out: [num_tokens, topk] int32, filled in place; None allocates.
        lens: [num_tokens] int32, filled in place; None allocates.
        workspace: [n] fp32 scratch, n >= ``index_topk_workspace_numel(num_tokens=1, ...)``; the more queries it holds the fewer launches.
            None allocates. Calls that may run at the same time need different ones.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        (out, lens): the ids of the picked entries within their sequence, ascending, then -1; and how many they are.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: topk > 4096 or more than 128 index heads.

    Source: DeepSeek-V4, lightning indexer; DeepSeek-V3.2 (arXiv 2512.02556) 2.1.
    """
    arguments = locals()  # all of them, by name
    if _implementation(arguments.pop("impl"), q) == "triton":
        from . import triton_impl as indexer_triton

        return indexer_triton.topk(arguments)
    from . import torch_impl as indexer_torch

    call = _checked(**arguments)
    indexer_torch.index_topk(call)
    return call.out, call.lens


def index_topk_workspace_numel(
    *, num_tokens: int, topk: int, compress_ratio: int = 4, max_seq_len: int
) -> int:
    """How many fp32 elements of ``workspace`` a call of ``num_tokens`` queries makes use of: at most 2**24, or what one query needs.

    Args:
        num_tokens: queries of the step, at most; 1 gives the least that a workspace may have.
        topk, compress_ratio, max_seq_len: as in ``index_topk``.

    Returns:
        Elements; 0 where no query can see more than ``topk`` entries.

    Raises:
        ValueError: a value is out of range.
        NotImplementedError: topk > 4096.

    Source: ``indexer_plan.plan``.
    """
    checks.expect_int("num_tokens", num_tokens, 0)
    _expect_sizes(topk, compress_ratio, max_seq_len)
    return plan(
        num_tokens=num_tokens, topk=topk, compress_ratio=compress_ratio, max_seq_len=max_seq_len
    ).workspace_numel


def _checked(
    q: torch.Tensor,
    weights: torch.Tensor,
    pages: IndexPages,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    topk: int,
    compress_ratio: int,
    max_seqlen_q: int,
    max_seq_len: int,
    out: torch.Tensor | None,
    lens: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> IndexCall:
    """Check the arguments of a call and fill in the defaults."""
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
    checks.expect_tensor("weights", weights, (num_tokens, num_heads), torch.float32, device=device)
    checks.expect_tensor("seq_lens", seq_lens, (None,), torch.int32, device=device)
    num_seqs = seq_lens.shape[0]
    cu_shape = (num_seqs + 1,)
    checks.expect_tensor("cu_seqlens_q", cu_seqlens_q, cu_shape, torch.int32, device=device)
    checks.expect_tensor("block_table", block_table, (num_seqs, None), torch.int32, device=device)
    _expect_sizes(topk, compress_ratio, max_seq_len)
    checks.expect_int("max_seqlen_q", max_seqlen_q, 0)
    if num_seqs * max_seqlen_q < num_tokens:
        raise ValueError(
            f"max_seqlen_q: expected the longest of {num_seqs} sequences with {num_tokens} tokens, got {max_seqlen_q}"
        )
    if (num_heads - 1) * q.stride(1) >= 2**31:
        # The kernel addresses the heads of a token with 32 bits.
        raise ValueError(f"q: expected heads within 2**31 elements, got {q.stride()}")
    if out is not None:
        checks.expect_tensor("out", out, (num_tokens, topk), torch.int32, device=device)
        checks.expect_apart("out", out)
    if lens is not None:
        checks.expect_tensor("lens", lens, (num_tokens,), torch.int32, device=device)
    if workspace is not None:
        checks.expect_tensor("workspace", workspace, (None,), torch.float32, device=device)
    # Entries behind the end of the table are not there.
    room = block_table.shape[1] * pages.storage_block_size
    cut = plan(
        num_tokens=num_tokens,
        topk=topk,
        compress_ratio=compress_ratio,
        max_seq_len=min(max_seq_len, room * compress_ratio),
        available=None if workspace is None else workspace.numel(),
    )
    if workspace is not None and num_tokens and not cut.chunk:
        raise ValueError(
            f"workspace: expected float32 [>= {cut.query_numel}], got float32 [{workspace.numel()}]"
        )
    if out is None:
        out = torch.empty(num_tokens, topk, dtype=torch.int32, device=device)
    if lens is None:
        lens = torch.empty(num_tokens, dtype=torch.int32, device=device)
    return IndexCall(
        q=q,
        weights=weights,
        pages=pages,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        out=out,
        lens=lens,
        workspace=workspace,
        plan=cut,
        compress_ratio=compress_ratio,
        max_seqlen_q=max_seqlen_q,
    )


def _expect_sizes(topk: int, compress_ratio: int, max_seq_len: int) -> None:
    checks.expect_int("topk", topk, 1)
    if topk > MAX_TOPK:
        raise NotImplementedError(f"topk: {topk} is not in 1..{MAX_TOPK}")
    checks.expect_int("compress_ratio", compress_ratio, 1, checks.MAX_TOKENS)
    checks.expect_int("max_seq_len", max_seq_len, 0, 2**31 - 1)
