"""Cache groups and the integer arithmetic of pages, blocks and boundaries: the only copy of it.

A *group* is a set of layers that share block tables. Three kinds exist, by what they need to resume
at position B:

* ``dense``: every block in [0, B) (full attention, latents, compressed entries);
* ``window``: the last ``ceil((W - 1) / block_size)`` blocks before B (sliding layers);
* ``state``: one snapshot of a state that each token changes, taken at B (Mamba).

A *boundary* is a multiple of the alignment (the LCM of all block sizes): hits end there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal

import numpy as np

from .arguments import as_int, refusal
from .arrays import Int32, Int64

NULL_BLOCK = 0
MOST_TOKENS = 2**31 - 1  # of a sequence, or a segment: lengths are int32


@dataclass(frozen=True)
class GroupSpec:
    """One KV-cache group.

    Args:
        name: unique among the groups of a model; appears in errors and reports.
        kind: ``"dense"``, ``"window"`` or ``"state"``.
        block_size: tokens that a block covers. A state group has its snapshots at multiples of the
            alignment: give it the size of a dense group, as a larger one makes hits coarser.
        page_bytes: bytes of one page, the same in all groups of a pool.
        sliding_window: W tokens including the query itself; window groups only.
        lookahead: rows at position t depend on the tokens up to t + lookahead, as a drafter's do. A
            request that ends at a boundary leaves the next hit one boundary shorter.

    Raises:
        ValueError: a field is out of range, or `sliding_window` does not fit `kind`.
        NotImplementedError: a state group with a lookahead.
    """

    name: str
    kind: Literal["dense", "window", "state"]
    block_size: int
    page_bytes: int
    sliding_window: int | None = None
    lookahead: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("dense", "window", "state"):
            raise refusal("kind", "'dense', 'window' or 'state'", repr(self.kind))
        least = {"block_size": 1, "page_bytes": 1, "lookahead": 0}
        if self.kind == "window":
            least["sliding_window"] = 1
        elif self.sliding_window is not None:
            expected = f"None for a {self.kind} group"
            raise refusal("sliding_window", expected, repr(self.sliding_window))
        for field, low in least.items():
            high = 2**63 - 1 if field in ("page_bytes", "sliding_window") else MOST_TOKENS
            object.__setattr__(self, field, as_int(field, getattr(self, field), low, high))
        if self.kind == "state" and self.lookahead:
            # Its snapshot is copied at the boundary, before the tokens that its last rows wait for.
            raise NotImplementedError(
                f"lookahead: supported are dense and window groups, got {self.lookahead}"
            )

    @property
    def tail_blocks(self) -> int:
        """Most blocks of this group in a resume point; 0 for a dense group."""
        if self.sliding_window is None:
            return int(self.kind == "state")
        return -(-(self.sliding_window - 1) // self.block_size)


class GroupClass:
    """Tables of one spec (kind, block size, window): every step treats them in one operation.

    The table of a window group is a *ring*: block b has column ``b % width``. A window of 33 tokens
    in blocks of 16 (alignment 32) after 100 tokens:

        tokens    32   48   64   80   96   112     width = blocks_in_reach + per_segment + lag
        block     | 2  | 3  | 4  | 5  | 6..|                  = 2 + 2 + 0 = 4
        window                  [68 ....100)            a query at 100 sees blocks 4, 5 and 6
        tail of 96          [ 4    5 ]                  what a resume point at 96 holds
        column      2    3    0    1    2               block 6 has the column of block 2

    Attributes:
        tables: [k] groups of this spec.
        per_segment, tail: blocks in a segment, and in a resume point.
        reach: rows before a position that a query there, or after a rollback, can see.
        blocks_in_reach: blocks behind the open one that a request may still read, drafts included.
        lag: blocks past a boundary before the segment that ends there gets its key.
        holds_all: a step gives pages to all of its rows, not only to those that outlive it.
        width: columns of a table; for a state, the live page and the newest snapshot.
        offset, tail_offset, segment_offset: first column in the fused table, in the pages of a
            resume point, and in those of a segment.
    """

    def __init__(
        self,
        spec: GroupSpec,
        tables: list[int],
        alignment: int,
        lookahead: int,
        drafts: int,
        max_len: int,
        reads_pages: bool,
    ) -> None:
        self.spec = spec
        self.holds_all = reads_pages or spec.kind == "dense"
        self.tables: Int64 = np.array(tables, dtype=np.int64)
        self.num_tables = len(tables)
        self.block_size = spec.block_size
        self.per_segment = alignment // spec.block_size
        # A window past the longest sequence is all of it.
        window = min(spec.sliding_window or 1, max_len)
        self.tail = (
            spec.tail_blocks if spec.kind == "state" else -(-(window - 1) // spec.block_size)
        )
        self.reach = window - 1 + drafts
        self.blocks_in_reach = -(-self.reach // spec.block_size)
        self.lag = -(-lookahead // spec.block_size)
        if spec.kind == "dense":
            self.width = -(-max_len // spec.block_size)
        elif spec.kind == "window":
            self.width = self.blocks_in_reach + self.per_segment + self.lag
        else:
            self.width = 2
        self.offset = self.tail_offset = self.segment_offset = 0

    @property
    def num_columns(self) -> int:
        """Columns of the fused table that this class takes."""
        return self.num_tables * self.width

    def tails(self, pages: Int32) -> Int32:
        """View [.., num_tables, tail] of `pages` [.., pages_per_point] of resume points."""
        part = pages[..., self.tail_offset : self.tail_offset + self.num_tables * self.tail]
        return part.reshape(*pages.shape[:-1], self.num_tables, self.tail)


class Layout:
    """Values that follow from a list of groups: alignment, classes, columns, sizes. The arguments
    are those of `KVCache`; `reads_pages` is ``reads="pages"``.
    """

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        max_model_len: int,
        max_draft_tokens: int,
        reads_pages: bool = False,
    ):
        self.groups = tuple(groups)
        if not self.groups:
            raise refusal("groups", "at least one GroupSpec", "none")
        for g in self.groups:
            if not isinstance(g, GroupSpec):
                raise refusal("groups", "GroupSpecs", repr(g))
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise refusal("groups", "unique names", names)
        sizes = {g.name: g.page_bytes for g in self.groups}
        if len(set(sizes.values())) != 1:
            expected = "one page size for all groups (choose block sizes so that page_bytes match)"
            raise refusal("groups", expected, sizes)
        self.page_bytes = self.groups[0].page_bytes
        self.alignment = math.lcm(*(g.block_size for g in self.groups))
        if self.alignment > MOST_TOKENS:
            expected = f"a least common multiple <= {MOST_TOKENS}"
            raise refusal("block_size", expected, f"{self.alignment:.6g}")
        self.drafts, self.max_model_len = max_draft_tokens, max_model_len
        self.lookahead = max(g.lookahead for g in self.groups)
        if self.lookahead > self.alignment:
            expected = f"at most one segment of {self.alignment} tokens"
            raise refusal("lookahead", expected, self.lookahead)
        members: dict[tuple[str, int, int | None], list[int]] = {}
        for t, g in enumerate(self.groups):
            members.setdefault((g.kind, g.block_size, g.sliding_window), []).append(t)
        self.classes = [
            GroupClass(
                self.groups[ids[0]],
                ids, self.alignment, self.lookahead, max_draft_tokens, max_model_len, reads_pages,
            )
            for ids in members.values()
        ]  # fmt: skip
        self.hybrid = any(g.kind != "dense" for g in self.groups)
        self.num_columns = self.pages_per_segment = self.pages_per_point = 0
        self._columns = [(0, 0)] * len(self.groups)  # first column and width of each
        for c in self.classes:
            c.offset = self.num_columns
            self.num_columns += c.num_columns
            for i, t in enumerate(c.tables.tolist()):
                self._columns[t] = c.offset + i * c.width, c.width
            if c.spec.kind == "dense":
                c.segment_offset = self.pages_per_segment
                self.pages_per_segment += c.num_tables * c.per_segment
            c.tail_offset = self.pages_per_point
            self.pages_per_point += c.num_tables * c.tail

    def span(self, exact: bool) -> int:
        """Most segments between two resume points that hold all tails in between. `exact`: only the
        last ``sliding_window - 1`` rows of a tail are sure to be right, as after a replay."""
        windows = [c for c in self.classes if c.tail]
        if any(c.spec.kind == "state" for c in windows):
            return 0
        reach = [
            (c.spec.sliding_window or 1) - 1 if exact else c.tail * c.block_size for c in windows
        ]
        return min(reach, default=1 << 62) // self.alignment

    def tail_between(
        self, depth: int, first: int, before: Int32 | None, last: int, after: Int32
    ) -> Int32:
        """Pages of the tail at `depth` between two resume points no further apart than `span`: one
        at `first` with pages `before` (0 and None for the start), one at `last` with `after`.
        """
        pages: Int32 = np.zeros(self.pages_per_point, dtype=np.int32)
        for c in self.classes:
            tail, longer = c.tails(pages), c.tails(after)
            since_first, until_last = (
                (depth - first) * c.per_segment,
                (last - depth) * c.per_segment,
            )
            cut = max(0, c.tail - since_first)  # columns from here on are past the boundary before
            tail[:, cut:] = longer[:, cut - until_last : c.tail - until_last]
            if before is not None:
                tail[:, :cut] = c.tails(before)[:, c.tail - cut :]
        return pages

    def columns(self, group: int) -> tuple[int, int]:
        """First column and width of the table of `group` in the fused table."""
        try:
            if 0 <= index(group) < len(self.groups):
                return self._columns[group]
        except TypeError:  # not an int
            pass
        raise refusal("group", f"0..{len(self.groups) - 1}", repr(group))
