"""``write_latent``: checks, and the choice between ``kernel`` and ``torch_impl``."""

from __future__ import annotations

import torch

from ..common import checks
from ..common.latent_pages import DIMS, LatentPages


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
    """Norm latent rows, rotate them, and write them to their slots. Each step is optional.

    The arithmetic is fp32 and rounds once, to the dtype of the pages. ``out`` holds the rows as a
    reader of the page sees them, so attention over new rows equals attention over cached rows.

    Args:
        x: [num_rows, head_dim] bf16, fp16 or fp32, last stride 1.
        pages: destination; None fills only ``out``. No two written slots may share memory.
        slot_mapping: [num_rows] int64, page * storage_block_size + row; -1 = do not write this row.
            None without pages.
        positions: [num_rows] int64 absolute positions in tokens, rows of ``cos_sin``; None = no
            RoPE. -1 = no rotation of this row (padding). Without pages [num_tokens], each the
            position of num_rows / num_tokens consecutive rows, the heads of a token.
        cos_sin: [max_position, rope_dim] fp32, the cosines of rope_dim / 2 pairs and then their
            sines. Pair i is channels 2i and 2i + 1 of the trailing rope_dim channels and turns by
            +angle.
        norm_weight: [head_dim] bf16, fp16 or fp32, weight of an RMS norm before RoPE; None = no
            norm.
        eps: added to the mean square, in 2**-100 .. 2**30.
        out: [num_rows, head_dim] x's dtype, filled in place, rows of slot -1 too; it may be x. None
            = not wanted.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        ``out``.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above; one of two
            arguments that go together is missing; a slot or position of CPU tensors is out of
            range.
        NotImplementedError: head_dim is not a power of two in 16..512.

    Source: DeepSeek-V4, kv_norm and RoPE of the latent.
    """
    chosen = checks.implementation(impl, x)
    _check(x, pages, slot_mapping, positions, cos_sin, norm_weight, eps, out)
    if chosen == "torch" or checks.is_readable(x):
        _check_values(pages, slot_mapping, positions, cos_sin, out)
    if chosen == "triton":
        from .kernel import write_latent as write
    else:
        from .torch_impl import write_latent as write
    write(x, pages, slot_mapping, positions, cos_sin, norm_weight, eps, out)
    return out


def _check(
    x: torch.Tensor,
    pages: LatentPages | None,
    slot_mapping: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    out: torch.Tensor | None,
) -> None:
    checks.expect_tensor("x", x, (None, None), checks.MODEL_DTYPES)
    (num_rows, head_dim), device = x.shape, x.device
    if pages is not None:
        if not isinstance(pages, LatentPages):
            raise ValueError(f"pages: expected LatentPages or None, got {type(pages).__name__}")
        checks.expect_tensor("x", x, (None, pages.head_dim), checks.MODEL_DTYPES)
        check_device("pages", pages.data, device)
        checks.expect_tensor("slot_mapping", slot_mapping, (num_rows,), torch.int64, device=device)
    elif out is None or slot_mapping is not None:
        raise ValueError("pages: expected LatentPages, or None with out and without slot_mapping")
    elif head_dim not in DIMS:
        raise NotImplementedError(f"x: head_dim {head_dim} is not one of {list(DIMS)}")
    if (positions is None) != (cos_sin is None):
        missing = "positions" if positions is None else "cos_sin"
        raise ValueError(f"{missing}: expected positions and cos_sin or neither, got None")
    if positions is not None and cos_sin is not None:
        expected = None if pages is None else num_rows
        checks.expect_tensor("positions", positions, (expected,), torch.int64, device=device)
        num_tokens = positions.shape[0]
        if num_rows % num_tokens if num_tokens else num_rows:
            raise ValueError(f"positions: expected a divisor of {num_rows} rows, got {num_tokens}")
        check_cos_sin(cos_sin, head_dim, None if pages is None else pages.rope_dim, device)
    if norm_weight is not None:
        check_norm(norm_weight, eps, head_dim, device)
    if out is not None:
        checks.expect_tensor("out", out, (num_rows, head_dim), x.dtype, device=device)
        checks.expect_apart("out", out)


def _check_values(
    pages: LatentPages | None,
    slot_mapping: torch.Tensor | None,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Require slots of the pages, and rows of the table; ValueError otherwise."""
    if pages is not None and slot_mapping is not None:
        num_slots = pages.data.shape[0] * pages.storage_block_size
        checks.expect_ids("slot_mapping", slot_mapping[slot_mapping >= 0], num_slots)
        if out is None and positions is not None:
            positions = positions[slot_mapping >= 0]  # of the others nothing is read
    if positions is not None and cos_sin is not None:
        rotated = positions[positions >= 0]
        checks.expect_ids("positions", rotated, cos_sin.shape[0], "positions")


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
