"""How the work of ``index_topk`` is split, from host integers alone.

Queries are split in chunks, a row of scores in blocks, and blocks are selected from in levels.
Scores are kept for one chunk of queries at a time. A *level* splits each row into blocks of
BLOCK values and keeps the best ``topk`` of each; what is kept is the row of the next level,
until one block is left. The best of a row are among the best of its blocks, so the result is exact,
and as every block keeps its lowest ids among equals and lists them in ascending order, the rule for
ties survives the levels. With blocks of 4 and topk = 2::

    level 0   7 3 9 1 | 2 8 4 6 | 5 0      10 scores, 3 blocks
    level 1   7 9 8 6 | 5 0                 6 candidates, 2 blocks
    level 2   9 8 5 0                       4 candidates, 1 block
              9 8                           the result

Workspace of a query, in elements of 4 bytes: the scores, then for every level but the last the
scores and the ids that its blocks kept.
"""

from __future__ import annotations

from dataclasses import dataclass

# fp32 elements of the workspace that is allocated (64 MiB), unless a single query needs more: it
# stays in the L2 cache of a large GPU.
WORKSPACE_NUMEL = 1 << 24
# Values that one program selects from: at least twice as many as it keeps.
BLOCK = 8192
# Scores of a query begin at multiples of this.
ROW_ALIGNMENT = 64


@dataclass(frozen=True)
class IndexPlan:
    """How one call is split.

    Attributes:
        num_entries: entries that a sequence can have.
        topk: entries that are kept.
        block: values of a block.
        num_blocks: of a row at each level; the last is 1.
        query_numel: elements of the workspace for one query; 0 if nothing is scored.
        chunk: queries at a time.
    """

    num_entries: int
    topk: int
    block: int
    num_blocks: tuple[int, ...]
    query_numel: int
    chunk: int

    @property
    def row_numel(self) -> int:
        """Elements from the scores of one query to those of the next."""
        return -(-self.num_entries // ROW_ALIGNMENT) * ROW_ALIGNMENT

    @property
    def workspace_numel(self) -> int:
        """Elements of the workspace that one chunk fills."""
        return self.chunk * self.query_numel

    def candidates(self, level: int) -> int:
        """First element of the scores that a level kept, in the workspace; as many ids follow."""
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
    """Plan a call.

    Args:
        num_tokens: queries.
        topk, compress_ratio, max_seq_len: as in ``index_topk``.
        score_all: score the entries of queries that see no more than ``topk``, too.
        available: elements of the caller's workspace; None: as many as are allocated for a call.

    Returns:
        IndexPlan; its chunk is 0 where ``available`` does not hold a single query.
    """
    num_entries = max_seq_len // compress_ratio
    if num_entries <= (0 if score_all else topk):
        return IndexPlan(num_entries, topk, BLOCK, (1,), 0, num_tokens)
    num_blocks = [-(-num_entries // BLOCK)]
    while num_blocks[-1] > 1:
        num_blocks.append(-(-num_blocks[-1] * topk // BLOCK))
    kept = 2 * topk * sum(num_blocks[:-1])
    query_numel = -(-num_entries // ROW_ALIGNMENT) * ROW_ALIGNMENT + kept
    if available is None:
        available = max(WORKSPACE_NUMEL, query_numel)
    chunk = min(num_tokens, available // query_numel)
    return IndexPlan(num_entries, topk, BLOCK, tuple(num_blocks), query_numel, chunk)
