"""Division of the work of ``index_topk``, from host integers alone.

Scores are kept for one chunk of queries at a time. A *level* of the selection splits each row into
blocks of BLOCK values and keeps the best ``topk`` of each; these are the row of the next level,
until one block is left. Every block keeps the lowest ids among equals in ascending order, so the
result is that of one sort. With blocks of 4 and topk = 2::

    level 0   7 3 9 1 | 2 8 4 6 | 5 0      10 scores, 3 blocks
    level 1   7 9 8 6 | 5 0                 6 candidates, 2 blocks
    level 2   9 8 5 0                       4 candidates, 1 block
              9 8                           the result
"""

from __future__ import annotations

from dataclasses import dataclass

# fp32 elements of the workspace that is allocated (64 MiB), unless one query needs more.
WORKSPACE_NUMEL = 1 << 24
# Values that one program selects from: at least twice as many as it keeps.
BLOCK = 8192
# Scores of a query begin at multiples of this.
ROW_ALIGNMENT = 64


@dataclass(frozen=True)
class IndexPlan:
    """Division of one call.

    The workspace of a query has 4 bytes for each score, then for every level but the last the
    scores and the ids of its candidates.
    """

    num_entries: int  # most entries of a sequence
    topk: int  # entries that are kept
    score_all: bool  # also score queries that see at most ``topk`` entries
    block: int  # values of a block
    num_blocks: tuple[int, ...]  # blocks of a row at each level; the last is 1
    query_numel: int  # elements of the workspace for one query; 0 if nothing is scored
    chunk: int  # queries at a time; 0 if the workspace is too small for one

    @property
    def row_numel(self) -> int:
        """Elements from the scores of one query to those of the next."""
        return -(-self.num_entries // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def workspace_numel(self) -> int:
        """Elements of the workspace that one chunk fills."""
        return self.chunk * self.query_numel

    def candidates(self, level: int) -> int:
        """First element of the candidates' scores of a level; as many ids follow."""
        return self.chunk * (self.row_numel + 2 * self.topk * sum(self.num_blocks[:level]))


def plan(
    *,
    num_tokens: int,
    topk: int,
    compress_ratio: int,
    max_seq_len: int,
    score_all: bool = False,
    available: int | None = None,
) -> IndexPlan:
    """Plan a call; available: elements of the caller's workspace, None = allocated for the call."""
    num_entries = max_seq_len // compress_ratio
    if num_entries <= (0 if score_all else topk):
        return IndexPlan(num_entries, topk, score_all, BLOCK, (1,), 0, num_tokens)
    num_blocks = [-(-num_entries // BLOCK)]
    while num_blocks[-1] > 1:
        num_blocks.append(-(-num_blocks[-1] * topk // BLOCK))
    kept = 2 * topk * sum(num_blocks[:-1])
    query_numel = -(-num_entries // ROW_ALIGNMENT) * ROW_ALIGNMENT + kept
    if available is None:
        available = max(WORKSPACE_NUMEL, query_numel)
    chunk = min(num_tokens, available // query_numel)
    return IndexPlan(num_entries, topk, score_all, BLOCK, tuple(num_blocks), query_numel, chunk)
