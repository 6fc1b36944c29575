"""The checked arguments of one call of ``compress``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common import checks
from ..common.latent_pages import IndexPages, LatentPages
from ..latent_write.call import check_cos_sin, check_device, check_norm


@dataclass(frozen=True)
class CompressCall:
    """The arguments of one call, checked when it is made.

    Named and shaped as in ``compress``, which says what is raised.
    """

    kv: torch.Tensor
    gate: torch.Tensor
    ape: torch.Tensor
    state: torch.Tensor
    state_index: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    ratio: int
    overlap: bool
    norm_weight: torch.Tensor
    eps: float
    cos_sin: torch.Tensor
    pages: LatentPages | IndexPages
    slot_mapping: torch.Tensor
    max_seqlen_q: int

    def __post_init__(self) -> None:
        if not isinstance(self.pages, LatentPages | IndexPages):
            raise ValueError(
                f"pages: expected LatentPages or IndexPages, got {type(self.pages).__name__}"
            )
        checks.expect_int("ratio", self.ratio, 1, checks.MAX_TOKENS)
        if not isinstance(self.overlap, bool):
            raise ValueError(f"overlap: expected a bool, got {self.overlap!r}")
        channels = self.pages.dim * (1 + self.overlap)
        checks.expect_tensor("kv", self.kv, (None, channels), checks.MODEL_DTYPES)
        num_tokens, device = self.kv.shape[0], self.kv.device
        checks.expect_tensor(
            "gate", self.gate, (num_tokens, channels), checks.MODEL_DTYPES, device=device
        )
        checks.expect_tensor("ape", self.ape, (self.ratio, channels), torch.float32, device=device)
        checks.expect_tensor(
            "state", self.state, (None, None, 2, channels), torch.float32, device=device
        )
        checks.expect_apart("state", self.state)
        checks.expect_int(
            "state: ring", self.state.shape[1], max(1, self.ratio * (1 + self.overlap) - 1)
        )
        checks.expect_tensor("seq_lens", self.seq_lens, (None,), torch.int32, device=device)
        num_seqs = self.seq_lens.shape[0]
        checks.expect_tensor(
            "state_index", self.state_index, (num_seqs,), torch.int32, device=device
        )
        checks.expect_tensor(
            "cu_seqlens_q", self.cu_seqlens_q, (num_seqs + 1,), torch.int32, device=device
        )
        check_norm(self.norm_weight, self.eps, self.pages.dim, device)
        rope_dim = self.pages.rope_dim if isinstance(self.pages, LatentPages) else None
        check_cos_sin(self.cos_sin, self.pages.dim, rope_dim, device)
        check_device("pages", self.pages.data, device)
        checks.expect_tensor(
            "slot_mapping", self.slot_mapping, (num_tokens,), torch.int64, device=device
        )
        checks.expect_int("max_seqlen_q", self.max_seqlen_q, 0)
        if num_seqs * self.max_seqlen_q < num_tokens:
            raise ValueError(
                f"max_seqlen_q: expected the longest of {num_seqs} sequences with {num_tokens} "
                f"tokens, got {self.max_seqlen_q}"
            )
