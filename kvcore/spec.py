"""Cache groups and the integer arithmetic of pages, blocks and boundaries: the only copy of it.

A *group* is a set of layers that share one block table. Two kinds of group exist here:

* ``dense``: every block in [0, B) is needed to resume at position B (full attention, latents);
* ``window``: only the last ``ceil((W - 1) / block_size)`` blocks before B are needed.

A *boundary* is a multiple of the alignment (the LCM of all block sizes): hits end there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

NULL_BLOCK = 0

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class GroupSpec:
    """One KV-cache group.

    Args:
        name: unique among the groups of a model; appears in errors and reports.
        kind: ``"dense"`` or ``"window"``.
        block_size: tokens that one page covers.
        page_bytes: bytes of one page (all groups of a pool must agree, see `Layout`).
        sliding_window: W tokens including the query itself; window groups only.

    Raises:
        ValueError: a field is out of range, or `sliding_window` does not fit `kind`.
    """

    name: str
    kind: Literal["dense", "window"]
    block_size: int
    page_bytes: int
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("dense", "window"):
            raise ValueError(f"kind: expected 'dense' or 'window', got {self.kind!r}")
        for field in ("block_size", "page_bytes"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{field}: expected a positive int, got {value!r}")
        window = self.sliding_window
        if self.kind == "dense" and window is not None:
            raise ValueError(f"sliding_window: expected None for a dense group, got {window!r}")
        if self.kind == "window" and (not isinstance(window, int) or window < 1):
            raise ValueError(
                f"sliding_window: expected a positive int for a window group, got {window!r}"
            )

    @property
    def tail_blocks(self) -> int:
        """Blocks before a boundary that this group needs to resume there (0 for dense groups)."""
        if self.sliding_window is None:
            return 0
        return -(-(self.sliding_window - 1) // self.block_size)


class GroupClass:
    """Groups of one spec (kind, block size, window): every step treats them in one operation.

    Attributes:
        groups: [k] positions of these groups in the caller's list.
        per_segment: blocks in one aligned segment.
        tail: blocks that a resume point holds (window classes).
        live: blocks behind the open one that a request may still read, drafts included.
        width: columns of one group's table; window tables are rings of this many blocks.
        offset: first column of the class in the fused table.
    """

    def __init__(
        self, spec: GroupSpec, groups: list[int], alignment: int, drafts: int, max_len: int
    ) -> None:
        self.spec = spec
        self.is_window = spec.kind == "window"
        self.groups: Int64 = np.array(groups, dtype=np.int64)
        self.num_groups = len(groups)
        self.block_size = spec.block_size
        self.per_segment = alignment // spec.block_size
        self.tail = spec.tail_blocks
        # Rows before position p that a query at p, or a query after a rollback, can see.
        self.reach = (spec.sliding_window or 1) - 1 + drafts
        self.live = -(-self.reach // spec.block_size)
        if self.is_window:
            self.width = self.live + self.per_segment
        else:
            self.width = -(-max_len // spec.block_size)
        self.offset = 0
        self.tail_offset = 0
        self.segment_offset = 0

    @property
    def num_columns(self) -> int:
        """Columns of the fused table that this class takes."""
        return self.num_groups * self.width


class Layout:
    """Everything derived from a list of groups: alignment, classes, columns, sizes.

    Args:
        groups: the groups of a model, in the order of its tables.
        max_model_len: longest sequence, tokens.
        max_draft_tokens: rows of a step that may be rejected or rolled back.

    Raises:
        ValueError: no groups, duplicate names, or pages of different size.
    """

    def __init__(self, groups: Sequence[GroupSpec], max_model_len: int, max_draft_tokens: int):
        self.groups = tuple(groups)
        if not self.groups:
            raise ValueError("groups: expected at least one GroupSpec, got none")
        names = [g.name for g in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"groups: expected unique names, got {names}")
        sizes = {g.name: g.page_bytes for g in self.groups}
        if len(set(sizes.values())) != 1:
            raise ValueError(
                f"groups: expected one page size for all groups (choose block sizes so that "
                f"page_bytes match), got {sizes}"
            )
        self.page_bytes = self.groups[0].page_bytes
        self.alignment = math.lcm(*(g.block_size for g in self.groups))
        members: dict[tuple[str, int, int | None], list[int]] = {}
        for i, g in enumerate(self.groups):
            members.setdefault((g.kind, g.block_size, g.sliding_window), []).append(i)
        self.classes = [
            GroupClass(self.groups[ids[0]], ids, self.alignment, max_draft_tokens, max_model_len)
            for ids in members.values()
        ]
        self.dense = [c for c in self.classes if not c.is_window]
        self.windows = [c for c in self.classes if c.is_window]
        self.class_sizes = [c.num_groups for c in self.classes]
        self.num_columns = 0
        for c in self.classes:
            c.offset = self.num_columns
            self.num_columns += c.num_columns
        self.pages_per_segment = 0
        for c in self.dense:
            c.segment_offset = self.pages_per_segment
            self.pages_per_segment += c.num_groups * c.per_segment
        self.pages_per_point = 0
        for c in self.windows:
            c.tail_offset = self.pages_per_point
            self.pages_per_point += c.num_groups * c.tail

    def columns(self, group: int) -> tuple[int, int]:
        """First column and width of `group` in the fused table."""
        for c in self.classes:
            for i, g in enumerate(c.groups.tolist()):
                if g == group:
                    return c.offset + i * c.width, c.width
        raise ValueError(f"group: expected 0..{len(self.groups) - 1}, got {group}")


def ragged_arange(starts: Int64, lengths: Int64) -> tuple[Int64, Int64]:
    """Concatenate ranges: row ids and values of ``starts[i] .. starts[i] + lengths[i] - 1``.

    Args:
        starts: [n] int64, first value of each range.
        lengths: [n] int64, non-negative.

    Returns:
        (rows [total], values [total]) int64.
    """
    rows = np.repeat(np.arange(len(lengths)), lengths)
    before = np.cumsum(lengths) - lengths
    return rows, np.arange(len(rows)) + (starts - before)[rows]
