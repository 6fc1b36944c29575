"""Write rows of keys and values to their slots: one program moves some heads of one row, a row with slot -1 moves nothing.

Layout: k, v [num_rows, num_kv_heads, head_dim] -> pages [num_pages, block_size, num_kv_heads, head_dim] of any strides, slot =
page * block_size + row. Bound by memory: each row is read once and written once.

Source: PagedAttention (arXiv 2309.06180) 4.3.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..attention.configs import next_power_of_2
from ..common import launch_cache
from ..common.checks import check_write, expect_head_dim
from ..common.launching import Launch

# Elements of K that one program holds; V the same.
ELEMENTS_PER_PROGRAM = 2048


@triton.jit
def _write_kv_kernel(
    k,
    v,
    k_pages,
    v_pages,
    slot_mapping,
    num_kv_heads,
    k_stride_row,
    k_stride_head,
    v_stride_row,
    v_stride_head,
    k_pages_stride_page,
    k_pages_stride_row,
    k_pages_stride_head,
    v_pages_stride_page,
    v_pages_stride_row,
    v_pages_stride_head,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + row)
    if slot < 0:
        return
    page = slot // BLOCK_SIZE
    page_row = slot % BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
    dim = tl.arange(0, HEAD_DIM)[None, :]
    live = (head < num_kv_heads)[:, None]
    head = head[:, None]
    k_row = tl.load(k + row * k_stride_row + head * k_stride_head + dim, mask=live, other=0.0)
    v_row = tl.load(v + row * v_stride_row + head * v_stride_head + dim, mask=live, other=0.0)
    k_slot = k_pages + page * k_pages_stride_page + page_row * k_pages_stride_row
    v_slot = v_pages + page * v_pages_stride_page + page_row * v_pages_stride_row
    tl.store(k_slot + head * k_pages_stride_head + dim, k_row, mask=live)
    tl.store(v_slot + head * v_pages_stride_head + dim, v_row, mask=live)


def block_heads(num_kv_heads: int, head_dim: int) -> int:
    """Heads that one program moves: a power of two."""
    return min(next_power_of_2(num_kv_heads), max(1, ELEMENTS_PER_PROGRAM // head_dim))


def write(arguments: dict[str, Any]) -> None:
    """Check and launch ``ops.write_kv(**arguments)``."""
    launch_cache.run(prepare, arguments, _checked)


def _checked(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
    check_write(**arguments)
    expect_head_dim("k_pages", arguments["k_pages"].shape[3])
    rows = [arguments[name] for name in ("k", "v", "k_pages", "v_pages", "slot_mapping")]
    if arguments["k_scale"] is None:
        return dict(arguments), [prepare(*rows)]
    from . import triton_e4m3 as cache_write_e4m3

    launch = cache_write_e4m3.prepare(*rows, arguments["k_scale"], arguments["v_scale"])
    return dict(arguments), [launch]


def prepare(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> Launch:
    """The launch that writes checked arguments; shapes as in ``quire.kernels.write_kv``."""
    num_rows, num_kv_heads, head_dim = k.shape
    heads = block_heads(num_kv_heads, head_dim)
    return Launch(
        _write_kv_kernel,
        (num_rows, triton.cdiv(num_kv_heads, heads)),
        {
            "k": k,
            "v": v,
            "k_pages": k_pages,
            "v_pages": v_pages,
            "slot_mapping": slot_mapping,
            "num_kv_heads": num_kv_heads,
            "k_stride_row": k.stride(0),
            "k_stride_head": k.stride(1),
            "v_stride_row": v.stride(0),
            "v_stride_head": v.stride(1),
            "k_pages_stride_page": k_pages.stride(0),
            "k_pages_stride_row": k_pages.stride(1),
            "k_pages_stride_head": k_pages.stride(2),
            "v_pages_stride_page": v_pages.stride(0),
            "v_pages_stride_row": v_pages.stride(1),
            "v_pages_stride_head": v_pages.stride(2),
            "BLOCK_SIZE": k_pages.shape[1],
            "HEAD_DIM": head_dim,
            "BLOCK_HEADS": heads,
            "num_warps": 4,
        },
    )
