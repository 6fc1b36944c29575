"""Batches of ``mla_attention`` with poison wherever nothing may be read."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from quire.bench.common.bounds import Bounded, bounding
from tests.kernels.oracles.mla_attention import mla_attention
from tests.support.helpers import DEVICE, NAN, NO_PAGE


@dataclasses.dataclass(frozen=True)
class MlaCase:
    """One ragged batch; the fields are the arguments of ``mla_attention`` and what shapes them.

    tail: NaN elements between one row of a page and the next, and between pages.
    """

    name: str
    seq_lens: Sequence[int]
    q_lens: Sequence[int]
    num_heads: int = 4
    head_dim_v: int = 16
    rope_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    in_step: bool = True
    tail: int = 0
    num_decodes: int | None = None
    max_seq_len: int | None = None


def make_mla_batch(case: MlaCase, seed: int = 42) -> dict[str, Any]:
    """Arguments of ``mla_attention`` for a case; pages permuted, and NaN or NO_PAGE in all that no query sees."""
    generator = torch.Generator().manual_seed(seed)
    head_dim, block_size = case.head_dim_v + case.rope_dim, case.block_size

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(case.dtype)

    num_seqs, num_tokens = len(case.seq_lens), sum(case.q_lens)
    width = max([1, *(-(-n // block_size) for n in case.seq_lens)])
    num_pages = num_seqs * width + 3
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    shape = (num_pages, block_size + (case.tail > 0), head_dim + case.tail)
    pages = torch.full(shape, NAN, dtype=case.dtype)[:, :block_size, :head_dim]
    # One column more than used, so that rows are strided as those of a shared table are.
    table = torch.full((num_seqs, width + 1), NO_PAGE, dtype=torch.int32)[:, :width]
    kv = normal(num_tokens, head_dim)
    cu = [0, *accumulate(case.q_lens)]
    for s, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        context = seq_len - q_len
        for j in range((context if case.in_step else seq_len) if q_len else 0):
            if j % block_size == 0:
                table[s, j // block_size] = order.pop()
            pages[table[s, j // block_size].item(), j % block_size] = normal(head_dim)
        # A padding row has more new tokens than keys: its first in-step rows are keys of nobody.
        kv[cu[s] : cu[s] + max(0, -context)] = NAN
    return {
        "q": normal(num_tokens, case.num_heads, head_dim).to(DEVICE),
        "pages": _on_device(pages),
        "block_table": _on_device(table),
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32, device=DEVICE),
        "cu_seqlens_q": torch.tensor(cu, dtype=torch.int32, device=DEVICE),
        "kv": kv.to(DEVICE) if case.in_step else None,
        "softmax_scale": 1.25 * head_dim**-0.5,
        "head_dim_v": case.head_dim_v,
        "max_seqlen_q": max(case.q_lens, default=0),
        "num_decodes": case.num_decodes,
        "max_seq_len": case.max_seq_len,
    }


def mla_reference(batch: dict[str, Any]) -> tuple[Bounded, Bounded]:
    """Output and lse of the oracle with bounds, computed on the host."""
    host = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
    with bounding(weights=batch["q"].dtype):
        lse = torch.full((batch["q"].shape[1], batch["q"].shape[0]), NAN, dtype=torch.float64)
        return mla_attention(**host, lse=lse, dtype=torch.float64), lse


def _on_device(view: torch.Tensor) -> torch.Tensor:
    """The same view of the same base, on the device: ``to`` alone would drop what lies between the rows."""
    base = view._base
    assert base is not None
    return base.to(DEVICE).as_strided(view.shape, view.stride(), view.storage_offset())
