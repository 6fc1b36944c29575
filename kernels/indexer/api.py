"""``index_topk``: which compressed entries each query attends to, by the lightning indexer.

Next: `call`, the checks, with `plan`, how the work is split; then `triton_impl`, or `torch_impl` on
a CPU.
"""

from __future__ import annotations

import torch

from ..common import checks
from ..common.impls import implementation
from ..common.latent_pages import IndexPages
from .call import IndexCall, expect_sizes
from .plan import plan


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
    """Select the ``topk`` visible entries of the highest index score for each query.

    The selection is exact; among equal scores the lowest ids are taken.

        score(t, w) = sum_h weights[t, h] * relu(q[t, h] . key_w)    in fp32

    over the entries w < floor((p_t + 1) / compress_ratio), where p_t = seq_len - q_len + i is the
    position of query i of its sequence. A query that sees at most ``topk`` entries gets them all,
    and its scores are not computed. The order in which scores are summed does not depend on the
    batch, on chunks or on whether a sequence decodes or prefills, so neither does the choice.

    Workspace: scores of a chunk of queries at a time, and what the levels of the selection keep of
    them: 4 bytes an entry and query, and 8 * topk bytes for each 8192 entries. At most 64 MiB are
    allocated, or one query's need where that is more (1.3 MB at 262,144 entries and topk 1024): a
    longer step runs chunk by chunk.

    Args:
        q: [num_tokens, index_heads, index_dim] bf16, fp16 or fp32, roped, last stride 1; the
            sequences one after another.
        weights: [num_tokens, index_heads] fp32 head weights, which hold every factor; any sign.
        pages: IndexPages of q's dtype, or quantized.
        block_table: [num_seqs, width] int32, the page of entries [b * storage_block_size, ...) of
            sequence s at [s, b]; any row stride. Table entries and keys that no query sees are
            never read, and may hold anything. Entries behind its end are not there: none of them
            is selected.
        seq_lens: [num_seqs] int32, raw tokens of each sequence including this step's; 0 for a
            padding row.
        cu_seqlens_q: [num_seqs + 1] int32, prefix sums of the new tokens.
        topk: entries to select, 1..4096.
        compress_ratio: raw tokens of an entry, 1..2**30.
        max_seqlen_q: host int, at least the new tokens of the longest sequence. It sizes tiles
            only.
        max_seq_len: host int, upper bound of seq_lens. Entries from max_seq_len // compress_ratio
            on are not looked at.
        out: [num_tokens, topk] int32, filled in place; None allocates.
        lens: [num_tokens] int32, filled in place; None allocates.
        scores: [num_tokens, topk] fp32, filled in place with the scores of the selected entries,
            then -inf: for those who merge selections. Then all scores are computed. None: they are
            not given.
        workspace: [n] fp32 scratch, n >= ``index_topk_workspace_numel(num_tokens=1, ...)``; the
            more queries it holds the fewer launches. None allocates. Calls that may run at the same
            time need different ones.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        (out, lens): the ids of the selected entries within their sequence, ascending, then -1; and
        how many they are.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: topk > 4096 or more than 128 index heads.

    Source: DeepSeek-V4, lightning indexer; DeepSeek-V3.2 (arXiv 2512.02556) 2.1.
    """
    chosen = implementation(impl, q)
    call = IndexCall(
        q=q,
        weights=weights,
        pages=pages,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        topk=topk,
        max_seqlen_q=max_seqlen_q,
        max_seq_len=max_seq_len,
        compress_ratio=compress_ratio,
        out=out,
        lens=lens,
        scores=scores,
        workspace=workspace,
    )
    if chosen == "triton":
        from .triton_impl import index_topk as run
    else:
        from .torch_impl import index_topk as run
    run(call)
    return call.out, call.lens


def index_topk_workspace_numel(
    *,
    num_tokens: int,
    topk: int,
    compress_ratio: int = 4,
    max_seq_len: int,
    scores: bool = False,
) -> int:
    """How many fp32 elements of ``workspace`` a call of ``num_tokens`` queries makes use of.

    At most 2**24, or what one query needs.

    Args:
        num_tokens: queries of the step, at most; 1 gives the least that a workspace may have.
        topk, compress_ratio, max_seq_len: as in ``index_topk``.
        scores: whether the call gives the scores as well.

    Returns:
        Elements; 0 where nothing is scored.

    Raises:
        ValueError: a value is out of range.
        NotImplementedError: topk > 4096.

    Source: ``indexer.plan``.
    """
    checks.expect_int("num_tokens", num_tokens, 0)
    expect_sizes(topk, compress_ratio, max_seq_len)
    if not isinstance(scores, bool):
        raise ValueError(f"scores: expected a bool, got {scores!r}")
    return plan(
        num_tokens=num_tokens,
        topk=topk,
        compress_ratio=compress_ratio,
        max_seq_len=max_seq_len,
        score_all=scores,
    ).workspace_numel
