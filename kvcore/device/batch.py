"""Tensors of a step for `quire.kernels`, from the integers of `quire.kvcore`, and back.

The block tables live on the device, one row per request slot. Before a step the cells that
changed since the last one are copied: so the tables describe the context, and a page that the step
starts is in its slot mapping only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..arguments import as_ints, refusal

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..plan import StepPlan
    from ..worker import StepArrays, WorkerTables

STRIDE = 16  # Triton compiles separate kernels for other strides
ALIGNMENT = 16  # bytes; of each array in a packed copy
_TORCH = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Staging:
    """Moves small host arrays to the device, all of a call in one copy that the host does not wait
    for.

    Args:
        device: where to.
        packed: False = no copy at all, which is right for a CPU and the default there.
    """

    def __init__(self, device: torch.device | str, *, packed: bool | None = None) -> None:
        self._device = torch.device(device)
        self._packed = self._device.type != "cpu" if packed is None else packed

    def send(self, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        """Tensors of the same shapes and dtypes as the arrays.

        On a CPU they may share the arrays' memory.
        """
        arrays = list(map(np.ascontiguousarray, arrays))
        if not self._packed:
            return list(map(torch.from_numpy, arrays))
        ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
        # Pinned memory of torch's own: it is not handed out again before the copy has read it.
        host = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        starts = [0, *ends[:-1]]
        for array, start in zip(arrays, starts, strict=True):
            host.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        device = host.to(self._device, non_blocking=True)
        return [
            device[start : start + array.nbytes].view(_TORCH[array.dtype]).view(array.shape)
            for array, start in zip(arrays, starts, strict=True)
        ]


@dataclass(frozen=True)
class AttnMetadata:
    """Metadata of one ragged step for attention; sequences with one new token come first.

    Attributes:
        cu_seqlens_q: [num_seqs + 1] int32 prefix sums of new tokens.
        seq_lens: [num_seqs] int32 KV tokens including this step's.
        block_tables: per group [num_seqs, width] int32 pages of the context before this step, block
            b in column b % width.
        slot_mappings: per group [num_tokens] int64 page * block_size + row; -1: do not write.
        max_seqlen_q, max_seq_len: longest q_len, and an upper bound of seq_lens.
        num_decodes: leading sequences for the kernels of few new tokens: those with one; all, where
            none has more than 1 + max_draft_tokens.
        request_slots: [num_seqs] int32 slots of the requests, for model state outside of pages.
        replay_rows, replay_slots: [num_replayed] int64 rows of the step that are computed again,
            and per group their slots (-1 unless dense); None without replays.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...]
    max_seqlen_q: int
    max_seq_len: int
    num_decodes: int
    request_slots: Tensor | None = None
    replay_rows: Tensor | None = None
    replay_slots: tuple[Tensor, ...] | None = None


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass.

    Attributes:
        input_ids, positions: [num_tokens] int64.
        logits_rows: [num_rows] int64 rows that need logits.
    """

    input_ids: Tensor
    positions: Tensor
    logits_rows: Tensor
    attn: AttnMetadata


class BatchBuilder:
    """Make the tensors of a step from its plan, and keep the block tables on the device.

    Input ids below 0 are placeholders for ids that the host does not know: -1 - i stands for
    ``sampled[i]``.

    Args:
        kv: cache made with ``track_deltas=True`` whose deltas this takes, or the `WorkerTables` of
            a cache in another process, updated before each build. NotImplementedError if it has a
            state group.
        max_placeholders: most placeholders of a step.

    Attributes:
        num_groups: cache groups.
        tables: [max_requests, columns] int32 on the device, all block tables side by side.
        sampled: [max_placeholders] int64 on the device.
    """

    def __init__(
        self, kv: KVCache | WorkerTables, device: torch.device | str, *, max_placeholders: int = 0
    ) -> None:
        self._kv, self._cells = kv, kv.tables.reshape(-1)
        self._groups = kv.layout.groups
        self.num_groups = len(self._groups)
        for g in self._groups:
            if g.kind == "state":
                raise NotImplementedError(f"kv: supported are dense and window groups, got {g}")
        self._decode_tokens = 1 + kv.max_draft_tokens
        self._columns = [kv.layout.columns(g) for g in range(len(self._groups))]
        self._staging = Staging(device)
        kv.take_deltas()  # the copy below starts from the present state
        # Columns are read past the last one, too (`gather`).
        shape = kv.tables.shape
        flat = torch.zeros(kv.tables.size + STRIDE, dtype=torch.int32, device=device)
        self.tables = flat[: kv.tables.size].view(shape)
        self.tables.copy_(torch.from_numpy(kv.tables))
        self._views = [self.tables[:, :0]] * len(self._groups)
        self.sampled = torch.zeros(max_placeholders, dtype=torch.int64, device=device)
        # Cells that changed and are not in the copy yet: a step that fails must not lose them.
        self._stale = np.empty(0, dtype=np.int64)

    def build(self, plan: StepPlan | StepArrays, input_ids: Any, logits_rows: Any) -> Batch:
        """Tensors of one step, between the plan and its commit.

        Args:
            plan: sequences with one new token first.
            input_ids: [num_tokens] ints, new tokens of all sequences, or placeholders.
            logits_rows: [num_rows] ints, rows of the step.

        Raises:
            ValueError: another number of tokens than planned, no ints, or a value out of range.
        """
        ids, rows_wanted = as_ints("input_ids", input_ids), as_ints("logits_rows", logits_rows)
        total = len(plan.positions)
        if ids.shape != (total,):
            raise refusal("input_ids", f"{total} tokens as planned", list(ids.shape))
        lowest = int(ids.min())
        if lowest < -len(self.sampled):
            raise refusal("input_ids", f"ids >= {-len(self.sampled)}", lowest)
        if rows_wanted.ndim != 1 or not ((rows_wanted >= 0) & (rows_wanted < total)).all():
            raise refusal("logits_rows", f"rows in [0, {total})", rows_wanted.tolist())
        self.update_tables()
        arrays: list[np.ndarray] = [
            plan.slots,
            plan.cu_seqlens_q,
            plan.seq_lens,
            plan.slots.astype(np.int32),
            ids.astype(np.int64),  # a copy: the caller may use its own again
            plan.positions,
            rows_wanted,
            *plan.slot_mapping,
        ]
        if len(plan.replay_rows):
            arrays += plan.replay_rows, *plan.replay_slots
        slots, cu_seqlens_q, seq_lens, request_slots, sent_ids, positions, rows, *more = (
            self._staging.send(arrays)
        )
        slot_mappings, replays = more[: self.num_groups], more[self.num_groups :]
        # Lists: for a few numbers numpy's reductions cost more.
        counts, max_seq_len = plan.num_new_tokens.tolist(), max(plan.seq_lens.tolist())
        attn = AttnMetadata(
            cu_seqlens_q=cu_seqlens_q,
            seq_lens=seq_lens,
            block_tables=self.gather(slots, max_seq_len),
            slot_mappings=tuple(slot_mappings),
            max_seqlen_q=max(counts),
            max_seq_len=max_seq_len,
            num_decodes=len(counts) if max(counts) <= self._decode_tokens else counts.count(1),
            request_slots=request_slots,
            replay_rows=replays[0] if replays else None,
            replay_slots=tuple(replays[1:]) if replays else None,
        )
        sent_ids = self.token_ids(sent_ids) if lowest < 0 else sent_ids
        return Batch(sent_ids, positions, rows, attn)

    def token_ids(self, ids: Tensor) -> Tensor:
        """`known_ids` of input ids."""
        return known_ids(ids, self.sampled)

    def gather(self, rows: Tensor, max_seq_len: int) -> tuple[Tensor, ...]:
        """The block tables of `rows` [num_seqs] int64 slots: per group [num_seqs, width] int32.

        The columns are all of a ring, and those up to `max_seq_len` of a dense group, in multiples
        of `STRIDE`.
        """
        gathered = []
        for i, (spec, (first, width)) in enumerate(zip(self._groups, self._columns, strict=True)):
            if spec.kind == "dense":
                width = -(-min(width, -(-max_seq_len // spec.block_size)) // STRIDE) * STRIDE
            if self._views[i].shape[1] != width:
                size, stride = (len(self.tables), width), (self.tables.shape[1], 1)
                self._views[i] = self.tables.as_strided(size, stride, first)
            gathered.append(self._views[i].index_select(0, rows))
        return tuple(gathered)

    def update_tables(self) -> None:
        """Bring `tables` up to date."""
        cells, _ = self._kv.take_deltas()
        if len(self._stale):
            cells = np.concatenate((self._stale, cells))
        self._stale = cells
        if len(cells):
            # Repeated cells all get the present value, so their order does not matter.
            index, values = self._staging.send([cells, self._cells[cells]])
            self.tables.view(-1)[index] = values
            self._stale = cells[:0]


def known_ids(ids: Tensor, sampled: Tensor) -> Tensor:
    """Replace the placeholders in `ids` [n] int64 by `BatchBuilder.sampled`, on the device."""
    if not len(sampled):
        return ids
    return torch.where(ids < 0, sampled[(-1 - ids).clamp_(min=0)], ids)
