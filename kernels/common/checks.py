"""Argument checks of the public functions: one error format, shapes and dtypes only, no device synchronisation.

A message reads ``block_table: expected int32 [4, *], got int64 [4, 9]``. ``AttentionCall`` carries the arguments of one attention
call after these checks, with every default filled in, so that the implementations need none of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 32, 64, 128, 256, 512)
E4M3 = torch.float8_e4m3fn
# What a sequence has fewer tokens than: within 32 bits two positions add up, or a position and a window.
MAX_TOKENS = 2**30
# Rows of a tile, at most. The kernels address those of a tile of fresh rows with 32 bits.
MAX_TILE = 128


@dataclass(frozen=True)
class AttentionCall:
    """The checked arguments of one attention call; fields are named and shaped as in ``ops.paged_attention``."""

    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    sinks: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor | None
    workspace: torch.Tensor | None
    max_seqlen_q: int
    max_seq_len: int | None
    num_decodes: int
    softmax_scale: float
    softcap: float | None
    sliding_window: int | None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None

    @property
    def scales(self) -> str:
        """What k_scale and v_scale are: "none", "number", "tensor" (of one number) or "rows"."""
        return scale_kind(self.k_scale)

    @property
    def num_seqs(self) -> int:
        """Sequences in the batch."""
        return self.seq_lens.shape[0]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.k_pages.shape[2]


def expect_tensor(
    name: str,
    tensor: Any,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype],
    *,
    device: torch.device | None = None,
) -> None:
    """Require a tensor of a shape (None: any size), of one of some dtypes, whose last dimension has stride 1.

    Args:
        name: the argument's name, which starts the message.
        tensor: the value to check.
        shape: expected sizes; None matches any size and prints as ``*``.
        dtypes: accepted dtypes.
        device: where the tensor has to be; None accepts any place.

    Raises:
        ValueError: naming what was expected and what came.

    Source: style rule 16 of this project (raise at the edge, one format).
    """
    accepted = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    have = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else None
    same_shape = (
        have is not None
        and len(shape) == len(have)
        and all(want is None or want == n for want, n in zip(shape, have, strict=True))
    )
    if not same_shape or tensor.dtype not in accepted:
        sizes = ", ".join("*" if n is None else str(n) for n in shape)
        came = type(tensor).__name__ if have is None else _described(tensor)
        raise ValueError(f"{name}: expected {_names(accepted)} [{sizes}], got {came}")
    # A dimension of size 0 or 1 is never stepped over, so its stride says nothing.
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got {tensor.stride()}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")


def expect_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Require a host integer in [low, high] (high None: no upper bound); ValueError otherwise."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or value < low or (high is not None and value > high):
        bound = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name}: expected an int {bound}, got {value!r}")


def expect_positive(name: str, value: Any, *, least: int = -30, most: int = 30) -> None:
    """Require a host number in [2**least, 2**most], of which the kernels' products are normal fp32 numbers; ValueError otherwise."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
    if not 2.0**least <= value <= 2.0**most:
        raise ValueError(f"{name}: expected a number in [2**{least}, 2**{most}], got {value!r}")


def softmax_factor(softmax_scale: float | None, head_dim: int) -> float:
    """The given factor of q . k, in [2**-30, 2**16], or the default; ValueError otherwise."""
    if softmax_scale is None:
        return head_dim**-0.5
    # Larger ones would take ordinary logits to where fp32 has no digits left for their differences.
    expect_positive("softmax_scale", softmax_scale, most=16)
    return float(softmax_scale)


def window_tokens(sliding_window: Any) -> int:
    """The given window, >= 1, as far as a sequence reaches; ValueError otherwise."""
    expect_int("sliding_window", sliding_window, 1)
    return min(sliding_window, MAX_TOKENS)


def expect_apart(name: str, tensor: torch.Tensor) -> None:
    """Require a tensor that is written to to have no two elements in one place (expanded tensors have); ValueError otherwise."""
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride < end:
                raise ValueError(
                    f"{name}: expected elements that share no memory, got {list(tensor.shape)} with strides {tensor.stride()}"
                )
            end += stride * (size - 1)


def expect_ids(name: str, ids: torch.Tensor, count: int, what: str = "ids") -> None:
    """Require values in [0, count), which waits for the device; ValueError otherwise."""
    if ids.numel():
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= count:
            raise ValueError(
                f"{name}: expected {what} in [0, {count}), got {low if low < 0 else high}"
            )


def expect_offsets(name: str, offsets: Sequence[int], total: int) -> None:
    """Require prefix sums: from 0 on, never falling, up to ``total`` at most; ValueError otherwise."""
    if offsets[0] != 0 or list(offsets) != sorted(offsets) or offsets[-1] > total:
        raise ValueError(
            f"{name}: expected prefix sums from 0 to at most {total}, got {list(offsets)}"
        )


def expect_head_dim(name: str, head_dim: int) -> None:
    """Require a head dimension that the Triton kernels are built for; NotImplementedError otherwise."""
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"{name}: head_dim {head_dim} is not one of {list(HEAD_DIMS)}")


def check_pages(
    k_pages: torch.Tensor, v_pages: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    """Require a K and a V page tensor ``[num_pages, block_size, num_kv_heads, head_dim]`` of equal shape, both of ``dtype`` or both
    e4m3; ValueError otherwise."""
    expect_tensor("k_pages", k_pages, (None,) * 4, (dtype, E4M3), device=device)
    expect_tensor("v_pages", v_pages, tuple(k_pages.shape), k_pages.dtype, device=device)
    for axis, what in ((0, "num_pages"), (1, "block_size"), (2, "num_kv_heads")):
        expect_int(f"k_pages: {what}", k_pages.shape[axis], 1)
    for name, pages in (("k_pages", k_pages), ("v_pages", v_pages)):
        # The kernels address rows within a page with 32 bits.
        if pages.shape[1] * max(1, pages.stride(1)) >= 2**31:
            raise ValueError(f"{name}: expected pages of < 2**31 elements, got {pages.stride()}")


def scale_kind(scale: float | torch.Tensor | None) -> str:
    """What a scale argument is: "none", "number", "tensor" (of one number) or "rows"."""
    if scale is None:
        return "none"
    if isinstance(scale, torch.Tensor):
        return "tensor" if scale.dim() <= 1 else "rows"
    return "number"


def check_scales(
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
    k_pages: torch.Tensor,
) -> None:
    """Require scales of one kind for e4m3 pages, and none for others; shapes as in ``ops.write_kv``, ValueError otherwise."""
    named = (("k_scale", k_scale), ("v_scale", v_scale))
    rows = tuple(k_pages.shape[:3])
    for name, scale in named:
        if k_pages.dtype != E4M3:
            if scale is not None:
                raise ValueError(
                    f"{name}: expected None with pages of {_names((k_pages.dtype,))}, got {_described(scale)}"
                )
            continue
        expected = f"a number, float32 [] or float32 {list(rows)} with float8_e4m3fn pages"
        if not isinstance(scale, torch.Tensor):
            if not isinstance(scale, (int, float)) or isinstance(scale, bool):
                raise ValueError(f"{name}: expected {expected}, got {_described(scale)}")
            expect_positive(name, scale)
            continue
        if scale.dtype != torch.float32 or tuple(scale.shape) not in ((), (1,), rows):
            raise ValueError(f"{name}: expected {expected}, got {_described(scale)}")
        if scale.device != k_pages.device:
            raise ValueError(
                f"{name}: expected a tensor on {k_pages.device}, got one on {scale.device}"
            )
        # The kernels address rows within a page with 32 bits.
        if scale.dim() == 3 and scale.shape[1] * scale.stride(1) >= 2**31:
            raise ValueError(f"{name}: expected pages of < 2**31 elements, got {scale.stride()}")
    if scale_kind(k_scale) != scale_kind(v_scale):
        raise ValueError(
            f"v_scale: expected the kind of k_scale, {_described(k_scale)}, got {_described(v_scale)}"
        )


def check_write(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
) -> None:
    """Check the arguments of ``ops.write_kv``, which says what they are and what is raised."""
    expect_tensor("k", k, (None, None, None), MODEL_DTYPES)
    expect_tensor("v", v, tuple(k.shape), k.dtype, device=k.device)
    check_pages(k_pages, v_pages, k.dtype, k.device)
    check_scales(k_scale, v_scale, k_pages)
    if k.shape[1:] != k_pages.shape[2:]:
        raise ValueError(
            f"k: expected [*, {k_pages.shape[2]}, {k_pages.shape[3]}], got {list(k.shape)}"
        )
    expect_tensor("slot_mapping", slot_mapping, (k.shape[0],), torch.int64, device=k.device)


def check_merge(
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> torch.Tensor:
    """Check the arguments of ``ops.merge_partials``, which says what they are and what is raised; ``out``, or new memory for it."""
    expect_tensor("partial_out", partial_out, (None,) * 4, MODEL_DTYPES)
    num_parts, num_tokens, num_heads, head_dim = partial_out.shape
    device = partial_out.device
    expect_head_dim("partial_out", head_dim)
    expect_int("partial_out: num_parts", num_parts, 1)
    lse_shape = (num_heads, num_tokens)
    expect_tensor("partial_lse", partial_lse, (num_parts, *lse_shape), torch.float32, device=device)
    if sinks is not None:
        expect_tensor("sinks", sinks, (num_heads,), torch.float32, device=device)
    if lse is not None:
        expect_tensor("lse", lse, lse_shape, torch.float32, device=device)
        expect_apart("lse", lse)
    if out is None:
        return torch.empty(partial_out.shape[1:], dtype=partial_out.dtype, device=device)
    expect_tensor("out", out, (num_tokens, num_heads, head_dim), MODEL_DTYPES, device=device)
    expect_apart("out", out)
    return out


def check_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_seqlen_q: int,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    max_seq_len: int | None,
    num_decodes: int | None,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    workspace: torch.Tensor | None,
    sliding_window: int | None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
) -> AttentionCall:
    """Check the arguments of one attention call and fill in the defaults; see ``ops.paged_attention`` for shapes and errors."""
    expect_tensor("q", q, (None, None, None), MODEL_DTYPES)
    num_tokens, num_heads, head_dim = q.shape
    device = q.device
    check_pages(k_pages, v_pages, q.dtype, device)
    check_scales(k_scale, v_scale, k_pages)
    num_kv_heads = k_pages.shape[2]
    if k_pages.shape[3] != head_dim:
        raise ValueError(f"k_pages: expected head_dim {head_dim}, got {k_pages.shape[3]}")
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"q: expected num_heads to be a multiple of num_kv_heads {num_kv_heads}, got {num_heads}"
        )
    expect_tensor("seq_lens", seq_lens, (None,), torch.int32, device=device)
    num_seqs = seq_lens.shape[0]
    expect_tensor("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), torch.int32, device=device)
    expect_tensor("block_table", block_table, (num_seqs, None), torch.int32, device=device)
    expect_int("block_table: width", block_table.shape[1], 1)
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise ValueError(f"{missing}: expected fresh rows of both k and v or of neither, got None")
    if k is not None and v is not None:
        fresh_shape = (num_tokens, num_kv_heads, head_dim)
        expect_tensor("k", k, fresh_shape, q.dtype, device=device)
        expect_tensor("v", v, fresh_shape, q.dtype, device=device)
        for name, rows in (("k", k), ("v", v)):
            if num_tokens > 1 and MAX_TILE * rows.stride(0) >= 2**31:
                raise ValueError(
                    f"{name}: expected tokens < 2**24 elements apart, got {rows.stride()}"
                )
    if sinks is not None:
        expect_tensor("sinks", sinks, (num_heads,), torch.float32, device=device)
    if out is not None:
        expect_tensor("out", out, (num_tokens, num_heads, head_dim), q.dtype, device=device)
        expect_apart("out", out)
    if lse is not None:
        expect_tensor("lse", lse, (num_heads, num_tokens), torch.float32, device=device)
        expect_apart("lse", lse)
    if workspace is not None:
        expect_tensor("workspace", workspace, (None,), torch.float32, device=device)
    expect_int("max_seqlen_q", max_seqlen_q, 0)
    if max_seq_len is not None:
        expect_int("max_seq_len", max_seq_len, 0)
    if num_decodes is None:
        num_decodes = num_seqs if max_seqlen_q <= 1 else 0
    expect_int("num_decodes", num_decodes, 0, num_seqs)
    if num_decodes == num_seqs and num_seqs * max_seqlen_q < num_tokens:
        # No prefill kernel is launched for what the decode tile cannot hold.
        raise ValueError(
            f"max_seqlen_q: expected the longest of {num_seqs} sequences with {num_tokens} tokens, got {max_seqlen_q}"
        )
    softmax_scale = softmax_factor(softmax_scale, head_dim)
    if softcap is not None:
        expect_positive("softcap", softcap)
    if sliding_window is not None:
        sliding_window = window_tokens(sliding_window)
    return AttentionCall(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        block_table=block_table,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        k=k,
        v=v,
        sinks=sinks,
        out=torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out,
        lse=lse,
        workspace=workspace,
        max_seqlen_q=max_seqlen_q,
        max_seq_len=max_seq_len,
        num_decodes=num_decodes,
        softmax_scale=softmax_scale,
        softcap=None if softcap is None else float(softcap),
        sliding_window=sliding_window,
        k_scale=float(k_scale) if isinstance(k_scale, int) else k_scale,
        v_scale=float(v_scale) if isinstance(v_scale, int) else v_scale,
    )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_names((value.dtype,))} {list(value.shape)}"
    return repr(value)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return "|".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
