"""The checked arguments of one call of ``write_latent``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..common import checks
from ..common.latent_pages import DIMS, LatentPages


@dataclass(frozen=True)
class LatentCall:
    """The arguments of one call, checked when it is made.

    Named and shaped as in ``write_latent``, which says what is raised.
    """

    x: torch.Tensor
    pages: LatentPages | None
    slot_mapping: torch.Tensor | None
    positions: torch.Tensor | None
    cos_sin: torch.Tensor | None
    norm_weight: torch.Tensor | None
    eps: float
    out: torch.Tensor | None

    def __post_init__(self) -> None:
        checks.expect_tensor("x", self.x, (None, None), checks.MODEL_DTYPES)
        num_rows, head_dim = self.x.shape
        if self.pages is not None:
            if not isinstance(self.pages, LatentPages):
                raise ValueError(
                    f"pages: expected LatentPages or None, got {type(self.pages).__name__}"
                )
            checks.expect_tensor("x", self.x, (None, self.pages.head_dim), checks.MODEL_DTYPES)
            check_device("pages", self.pages.data, self.x.device)
            checks.expect_tensor(
                "slot_mapping", self.slot_mapping, (num_rows,), torch.int64, device=self.x.device
            )
        elif self.out is None or self.slot_mapping is not None:
            raise ValueError(
                "pages: expected LatentPages, or None with out and without slot_mapping"
            )
        elif head_dim not in DIMS:
            raise NotImplementedError(f"x: head_dim {head_dim} is not one of {list(DIMS)}")
        if (self.positions is None) != (self.cos_sin is None):
            missing = "positions" if self.positions is None else "cos_sin"
            raise ValueError(f"{missing}: expected positions and cos_sin or neither, got None")
        if self.positions is not None and self.cos_sin is not None:
            num_tokens = None if self.pages is None else num_rows
            checks.expect_tensor(
                "positions", self.positions, (num_tokens,), torch.int64, device=self.x.device
            )
            num_tokens = self.positions.shape[0]
            if num_rows % num_tokens if num_tokens else num_rows:
                raise ValueError(
                    f"positions: expected a divisor of {num_rows} rows, got {num_tokens}"
                )
            check_cos_sin(
                self.cos_sin,
                head_dim,
                None if self.pages is None else self.pages.rope_dim,
                self.x.device,
            )
        if self.norm_weight is not None:
            check_norm(self.norm_weight, self.eps, head_dim, self.x.device)
        if self.out is not None:
            checks.expect_tensor(
                "out", self.out, (num_rows, head_dim), self.x.dtype, device=self.x.device
            )
            checks.expect_apart("out", self.out)


def check_cos_sin(
    cos_sin: torch.Tensor, dim: int, rope_dim: int | None, device: torch.device
) -> None:
    """Require a table [*, rope_dim] fp32 of an even rope_dim <= dim (None: any).

    ValueError otherwise.
    """
    checks.expect_tensor("cos_sin", cos_sin, (None, rope_dim), torch.float32, device=device)
    if cos_sin.shape[1] % 2 or not 0 < cos_sin.shape[1] <= dim:
        raise ValueError(
            f"cos_sin: expected an even rope_dim in 2..{dim}, got {list(cos_sin.shape)}"
        )


def check_norm(norm_weight: torch.Tensor, eps: float, dim: int, device: torch.device) -> None:
    """Require a weight [dim] and an eps in [2**-100, 2**30]; ValueError otherwise."""
    checks.expect_tensor("norm_weight", norm_weight, (dim,), checks.MODEL_DTYPES, device=device)
    checks.expect_positive("eps", eps, least=-100)


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Require a tensor on a device; ValueError otherwise."""
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")
