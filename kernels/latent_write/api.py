"""``write_latent``: check once, choose the implementation by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attention.api import _implementation
from ..common import checks
from ..common.latent_pages import DIMS, LatentPages


@dataclass(frozen=True)
class LatentCall:
    """The arguments of one call, checked when it is made; named and shaped as in ``write_latent``, which says what is raised."""

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
            checks.expect_tensor(
                "positions", self.positions, (num_rows,), torch.int64, device=self.x.device
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


def write_latent(
    x: torch.Tensor,
    pages: LatentPages | None,
    slot_mapping: torch.Tensor | None,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor | None:
    """Norm latent rows, rope them, and write them to their slots, in one pass; any of the three can be left out.

    The arithmetic is fp32 and rounds once, to the dtype of the pages. ``out`` gets what a reader of the page will see, so that attention over
    fresh rows gives what attention over cached rows gives.

    Args:
        x: [num_rows, head_dim] bf16, fp16 or fp32, last stride 1.
        pages: where to write; None fills only ``out``. No two of the slots written may share memory.
        slot_mapping: [num_rows] int64, page * storage_block_size + row; -1 = do not write this row. None without pages.
        positions: [num_rows] int64 absolute positions in tokens, rows of ``cos_sin``; None = no RoPE. -1 = none, for padding: the row is not turned.
        cos_sin: [max_position, rope_dim] fp32, the cosines of rope_dim / 2 pairs and then their sines. Pair i is channels 2i and 2i + 1 of the
            trailing rope_dim channels and turns by +angle.
        norm_weight: [head_dim] bf16, fp16 or fp32, weight of an RMS norm before RoPE; None = no norm.
        eps: added to the mean square, in 2**-100 .. 2**30.
        out: [num_rows, head_dim] x's dtype, filled in place, rows of slot -1 too; None = not wanted.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above, or of two arguments that go together one is missing.
        NotImplementedError: head_dim is not a power of two in 16..512.

    Source: DeepSeek-V4, kv_norm and RoPE of the latent.
    """
    arguments = locals()  # all of them, by name
    if _implementation(arguments.pop("impl"), x) == "triton":
        from . import triton_impl as latent_triton

        latent_triton.write(arguments)
        return out
    from . import torch_impl as latent_torch

    latent_torch.write_latent(LatentCall(**arguments))
    return out


def check_cos_sin(
    cos_sin: torch.Tensor, dim: int, rope_dim: int | None, device: torch.device
) -> None:
    """Require a table [*, rope_dim] fp32 of an even rope_dim <= dim (None: any); ValueError otherwise."""
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
