"""Batches of ``mla_attention``: those of one KV head, without its values."""

import dataclasses
from collections.abc import Sequence

import torch

from quire.bench.common.bounds import bounding
from tests.kernels.oracles.mla_attention import mla_attention
from tests.support.helpers import DEVICE, NAN, AttentionCase, make_batch


@dataclasses.dataclass(frozen=True)
class MlaCase:
    """One ragged batch; the fields are the arguments of ``mla_attention`` and what shapes them.

    apart: a row of NaN between one row of a page and the next.
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
    apart: bool = False
    num_decodes: int | None = None
    max_seq_len: int | None = None


def make_mla_batch(case):
    """Arguments of ``mla_attention`` for a case; NaN and NO_PAGE as in ``make_batch``."""
    head_dim = case.head_dim_v + case.rope_dim
    batch = make_batch(
        AttentionCase(
            case.name, case.seq_lens, case.q_lens, case.num_heads, 1, head_dim, case.block_size,
            case.dtype, case.in_step, layout="interleaved" if case.apart else "nhd",
            num_decodes=case.num_decodes, max_seq_len=case.max_seq_len,
        )
    )  # fmt: skip
    batch["v_pages"].fill_(NAN)
    names = ("q", "block_table", "seq_lens", "cu_seqlens_q", "max_seqlen_q", "num_decodes", "max_seq_len")  # fmt: skip
    return {name: batch[name] for name in names} | {
        "pages": batch["k_pages"][:, :, 0],
        "kv": batch["k"][:, 0] if case.in_step else None,
        "softmax_scale": 1.25 * head_dim**-0.5,
        "head_dim_v": case.head_dim_v,
    }


def mla_reference(batch):
    """Output and lse of the oracle with bounds."""
    with bounding(weights=batch["q"].dtype):
        shape = batch["q"].shape[1], batch["q"].shape[0]
        lse = torch.full(shape, NAN, dtype=torch.float64, device=DEVICE)
        return mla_attention(**batch, lse=lse), lse
