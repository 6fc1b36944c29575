"""``write_latent``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from ..common.latent_pages import LatentPages
from .call import LatentCall


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
    """Norm latent rows, rope them, and write them to their slots, in one pass; any of the three can
    be left out.

    The arithmetic is fp32 and rounds once, to the dtype of the pages. ``out`` gets what a reader of
    the page will see, so that attention over new rows gives what attention over cached rows
    gives.

    Args:
        x: [num_rows, head_dim] bf16, fp16 or fp32, last stride 1.
        pages: where to write; None fills only ``out``. No two of the slots written may share
            memory.
        slot_mapping: [num_rows] int64, page * storage_block_size + row; -1 = do not write this row.
            None without pages.
        positions: [num_rows] int64 absolute positions in tokens, rows of ``cos_sin``; None = no
            RoPE. -1 = none, for padding: the row is not turned. Without pages [num_tokens], each
            of as many rows, the heads of a token, which follow each other.
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
        ValueError: a shape, dtype, stride, device or host value is not as above, or of two
            arguments that go together one is missing.
        NotImplementedError: head_dim is not a power of two in 16..512.

    Source: DeepSeek-V4, kv_norm and RoPE of the latent.
    """
    chosen = implementation(impl, x)
    call = LatentCall(
        x=x,
        pages=pages,
        slot_mapping=slot_mapping,
        positions=positions,
        cos_sin=cos_sin,
        norm_weight=norm_weight,
        eps=eps,
        out=out,
    )
    if chosen == "triton":
        from .triton_impl import write_latent as write
    else:
        from .torch_impl import write_latent as write
    write(call)
    return out
