"""FlashInfer's wrappers for attention over pages: how they are made and planned.

A wrapper is planned once for the lengths and pages of a step, and then runs for each layer with
these. FlashInfer compiles a kernel when it first plans one, unless it was compiled ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

BACKEND = "fa2"
LAYOUT = "NHD"
WORKSPACE_BYTES = 256 * 2**20
# Grouped heads go over tensor cores, which its kernels have for head_dim up to this.
MOST_CHANNELS = 256


@dataclass(frozen=True)
class Shape:
    """What a plan depends on besides lengths and pages.

    Attributes:
        block_size: tokens in a page.
        sliding_window: tokens that a query sees, itself included; None = all.
        dtype, kv_dtype: of queries and outputs, and of pages.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    sliding_window: int | None
    softmax_scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype


class Rows(NamedTuple):
    """Keys of each sequence in compressed rows of pages, all int32.

    Attributes:
        indptr: [num_seqs + 1] where each sequence's pages start in `indices`.
        indices: [num_pages] page ids.
        last_page_len: [num_seqs] keys in the last page, 1..block_size.
    """

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def make_workspace(device: torch.device) -> Tensor:
    """What all wrappers of a device may share that run one after another."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def decode_wrapper(
    flashinfer: Any, workspace: Tensor, *, head_dim: int, fixed: Rows | None = None
) -> Any:
    """A wrapper for sequences of one query.

    Args:
        workspace: of `make_workspace`.
        fixed: buffers on the device that plans copy their rows to, so that CUDA graphs of its runs
            can be replayed after another plan of as many sequences.
    """
    buffers: dict[str, Any] = {}
    if fixed is not None:
        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": fixed.indptr,
            "paged_kv_indices_buffer": fixed.indices,
            "paged_kv_last_page_len_buffer": fixed.last_page_len,
        }
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, LAYOUT, use_tensor_cores=head_dim <= MOST_CHANNELS, backend=BACKEND, **buffers
    )


def prefill_wrapper(flashinfer: Any, workspace: Tensor) -> Any:
    """A wrapper for sequences of any number of queries, the last ones of their keys.

    Args:
        workspace: of `make_workspace`.
    """
    return flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, LAYOUT, backend=BACKEND)


def plan_decode(wrapper: Any, shape: Shape, rows: Rows) -> None:
    """Prepares runs of one query a sequence, which is the last of its keys."""
    wrapper.plan(*rows, *_heads(shape), **_options(shape))


def plan_prefill(wrapper: Any, shape: Shape, cu_seqlens_q: Tensor, rows: Rows) -> None:
    """Prepares runs of several queries a sequence, which are the last of its keys.

    Args:
        cu_seqlens_q: [num_seqs + 1] int32.
    """
    wrapper.plan(cu_seqlens_q, *rows, *_heads(shape), causal=True, **_options(shape))


def _heads(shape: Shape) -> tuple[int, int, int, int]:
    return shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size


def _options(shape: Shape) -> dict[str, Any]:
    return {
        "window_left": -1 if shape.sliding_window is None else shape.sliding_window - 1,
        "sm_scale": shape.softmax_scale,
        "q_data_type": shape.dtype,
        "kv_data_type": shape.kv_dtype,
    }
