"""From the integers of `quire.kvcore` to the tensors of `quire.kernels`, once per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from quire.kvcore import KVCache, StepPlan


@dataclass(frozen=True)
class AttnMetadata:
    """What attention must know about one ragged step; sequences with one new token come first.

    cu_seqlens_q: [num_seqs + 1] int32, prefix sums of new tokens.
    seq_lens: [num_seqs] int32, KV tokens including this step's.
    block_tables: per group [num_seqs, width] int32, page ids of the context before this step.
    slot_mappings: per group [num_tokens] int64, where a row is written; -1 = nowhere.
    max_seqlen_q, max_seq_len: host ints, longest q_len and an upper bound of seq_lens.
    num_decodes: host int, leading sequences with one new token.
    """

    cu_seqlens_q: Tensor
    seq_lens: Tensor
    block_tables: tuple[Tensor, ...]
    slot_mappings: tuple[Tensor, ...]
    max_seqlen_q: int
    max_seq_len: int
    num_decodes: int


@dataclass(frozen=True)
class Batch:
    """Everything that one forward pass reads.

    input_ids, positions: [num_tokens] int64. logits_rows: [num_rows] int64, rows whose logits are wanted.
    """

    input_ids: Tensor
    positions: Tensor
    logits_rows: Tensor
    attn: AttnMetadata


class BatchBuilder:
    """Keeps a copy of the block tables on the device, and makes the tensors of a step from its plan.

    Only table entries that changed since the last step travel to the device.

    kv: an allocator made with ``track_deltas=True``; nobody else may take its deltas.
    """

    def __init__(self, kv: KVCache, device: torch.device | str) -> None:
        self._kv = kv
        self._groups = kv.layout.groups
        self._columns = [kv.layout.columns(g) for g in range(len(self._groups))]
        self._device = torch.device(device)
        kv.take_deltas()  # the copy below starts from the present state
        self._tables = torch.from_numpy(kv.tables).to(self._device, copy=True)

    def build(
        self, plan: StepPlan, slots: Sequence[int], input_ids: np.ndarray, logits_rows: np.ndarray
    ) -> Batch:
        """Tensors of one step, to be called between the plan and its commit.

        plan: of ``kv.plan(slots, ...)``, sequences with one new token first.
        input_ids: [num_tokens] int32, the new tokens of all sequences. logits_rows: [num_rows] int64.
        """
        self._update_tables()
        rows = self._to_device(np.asarray(slots, dtype=np.int64))
        q_lens = np.diff(plan.cu_seqlens_q)
        max_seq_len = int(plan.seq_lens.max())
        block_tables = []
        for spec, (first, width) in zip(self._groups, self._columns, strict=True):
            # Columns past the last block are never read: a ring that has not come round is still a linear table.
            width = min(width, -(-max_seq_len // spec.block_size))
            block_tables.append(self._tables[:, first : first + width].index_select(0, rows))
        attn = AttnMetadata(
            cu_seqlens_q=self._to_device(plan.cu_seqlens_q),
            seq_lens=self._to_device(plan.seq_lens),
            block_tables=tuple(block_tables),
            slot_mappings=tuple(self._to_device(plan.slot_mapping).unbind(0)),
            max_seqlen_q=int(q_lens.max()),
            max_seq_len=max_seq_len,
            num_decodes=int(np.cumprod(q_lens == 1).sum()),
        )
        return Batch(
            input_ids=self._to_device(input_ids.astype(np.int64)),
            positions=self._to_device(plan.positions),
            logits_rows=self._to_device(logits_rows),
            attn=attn,
        )

    def _update_tables(self) -> None:
        index, _ = self._kv.take_deltas()
        if len(index):
            # An entry may have changed twice; its present value for both makes their order irrelevant on the device.
            value = self._kv.tables.reshape(-1)[index]
            self._tables.view(-1)[self._to_device(index)] = self._to_device(value)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
