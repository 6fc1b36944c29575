"""Paged attention, full and sliding-window: one kernel body for prefill and for split-KV decode.

    out_i = sum_j softmax_j(cap(softmax_scale * q_i . k_j)) v_j   over the keys j <= p_i (and p_i - j < sliding_window)

A query tile packs the tokens of a sequence with the query heads of one KV head (row = token * heads + head), so every K/V tile is read
once for all of them. Its keys come from two sources, pages and the step's fresh rows, merged by one online softmax (exp2 domain, fp32).
Per source, tiles that every row sees whole run in a loop without masks, the tiles at the edges in a loop with masks. The page id of the
next tile is loaded one tile ahead and carried around the loop: loaded inside it, Triton keeps one K/V tile in flight instead of
``num_stages``. If block_size is a multiple of BLOCK_N a tile has one page id, else each of its rows has one.

In prefill a `Config` may ask for tensor descriptors, which copy whole tiles of fresh rows, and for few programs that take query tiles in
turns. Neither changes a bit of the result.

Layout: q, out [num_tokens, num_heads, head_dim]; pages [num_pages, block_size, num_kv_heads, head_dim] of any strides; block_table
[num_seqs, width] where block b is entry b % width. Decode partials, fp32: [items, BLOCK_Q, num_heads, head_dim], then their lse.

Source: FlashAttention-2 (arXiv 2307.08691); PagedAttention (arXiv 2309.06180); FlashDecoding (split-KV).
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common import launch_cache, split_kv
from ..common.checks import expect_head_dim
from ..common.decode_plans import MIN_SPLIT_KEYS
from ..common.launching import Launch, arch_and_sms, partials
from ..common.query_tiles import (
    LOG2E,
    find_query_tile,
    fold_sink,
    natural_lse,
    row_pointers,
    rows_of_tile,
)
from ..common.tile_shapes import MAX_REGISTERS, tile_heads
from . import merge
from .call import AttentionCall, check_attention
from .configs import Config, plan_decode, select_config, uses_fp16_values
from .query_tile import Scales, Source, Tiles, attend_query_tile

# The first architecture with an instruction that widens e4m3.
E4M3_ARCH = 89

V_STRIDES = ("v_stride_page", "v_stride_row", "v_stride_head")


@triton.jit
def _store_final(acc, row_max, row_sum, out_rows, lse_rows, sinks, live, HEAD_DIM: tl.constexpr):
    """Normalise, fold the sinks in (pointers to each row's, or None) and store output rows and lse."""
    if sinks is not None:
        sink = tl.load(sinks, mask=live, other=float("-inf")) * LOG2E
    else:
        sink = float("-inf")
    factor = fold_sink(row_max, row_sum, sink)
    dim = tl.arange(0, HEAD_DIM)
    rows = (acc * factor[:, None]).to(out_rows.dtype.element_ty)
    tl.store(out_rows[:, None] + dim[None, :], rows, mask=live[:, None])
    if lse_rows is not None:
        tl.store(lse_rows, natural_lse(row_max, row_sum), mask=live)


# What changes from step to step is not specialised on: a new batch size must not compile a new kernel.
@triton.jit(do_not_specialize=["num_seqs", "num_decodes", "decode_tokens", "num_tiles"])
def _prefill_kernel(
    q, k_pages, v_pages, k_fresh, v_fresh, k_tiles, v_tiles, block_table, seq_lens, cu_seqlens_q, sinks, out, lse,
    num_seqs, num_decodes, decode_tokens, num_tiles, num_kv_heads, width, sliding_window, inner_scale, outer_scale,
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head, table_stride,
    k_stride_page, k_stride_row, k_stride_head, v_stride_page, v_stride_row, v_stride_head,
    k_scale, v_scale, k_scale_stride_page, k_scale_stride_row, k_scale_stride_head,
    v_scale_stride_page, v_scale_stride_row, v_scale_stride_head,
    k_fresh_stride_token, k_fresh_stride_head, v_fresh_stride_token, v_fresh_stride_head,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WRAP: tl.constexpr, MASK_ALL: tl.constexpr,
    EQUAL_STRIDES: tl.constexpr, SCALES: tl.constexpr, HARDWARE_E4M3: tl.constexpr, HALF: tl.constexpr, PTX: tl.constexpr, DIVIDE: tl.constexpr, PERSISTENT: tl.constexpr,
):  # fmt: skip
    # Items next to each other share a query tile: its head tiles, and the parts of the values.
    PARTS: tl.constexpr = HEAD_DIM // VALUE_DIM
    num_head_tiles = num_kv_heads * HEAD_TILES
    if PERSISTENT:
        turns = tl.cdiv(num_tiles * num_head_tiles * PARTS, tl.num_programs(0))
    else:
        turns: tl.constexpr = 1
    for turn in tl.range(0, turns, disable_licm=True):
        item = split_kv.item_of_turn(turn)
        part = item % PARTS
        head_index = item // PARTS % num_head_tiles
        kv_head = (head_index // HEAD_TILES).to(tl.int64)
        # Later tiles of a sequence see more keys; they start first, so that no long tile runs alone at the end.
        tile = num_tiles - 1 - item // PARTS // num_head_tiles
        seq, q_first = find_query_tile(cu_seqlens_q, tl.maximum(tile, 0), num_seqs, BLOCK_Q)
        first_token = tl.load(cu_seqlens_q + seq)
        q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
        if (tile >= 0) & (q_first < q_len) & ((seq >= num_decodes) | (q_len > decode_tokens)):
            context = tl.load(seq_lens + seq) - q_len
            tile_token = first_token + q_first
            token, group_head, live = rows_of_tile(
                head_index % HEAD_TILES, q_len - q_first, GROUP, BLOCK_Q, HEADS, BLOCK_M
            )
            q_rows = row_pointers(q, tile_token, kv_head * GROUP, token, group_head, q_stride_token, q_stride_head)  # fmt: skip
            q_tile = tl.load(
                q_rows[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=live[:, None], other=0.0
            )
            channel = part * VALUE_DIM
            scales = None
            if SCALES == "rows":
                scales = Scales(
                    k_scale + kv_head * k_scale_stride_head, v_scale + kv_head * v_scale_stride_head,
                    k_scale_stride_page, k_scale_stride_row, v_scale_stride_page, v_scale_stride_row,
                )  # fmt: skip
            pages = Source(
                k_pages + kv_head * k_stride_head, v_pages + (kv_head * v_stride_head + channel),
                k_stride_page, k_stride_row, v_stride_page, v_stride_row,
                block_table + seq.to(tl.int64) * table_stride, width, scales, None,
            )  # fmt: skip
            row = first_token.to(tl.int64)
            k_rows = None
            v_rows = None
            tiles = None
            if k_fresh is not None:
                k_rows = k_fresh + row * k_fresh_stride_token + kv_head * k_fresh_stride_head
                v_rows = v_fresh + (
                    row * v_fresh_stride_token + kv_head * v_fresh_stride_head + channel
                )
            if k_tiles is not None:
                k_column = (kv_head * k_fresh_stride_head).to(tl.int32)
                v_column = (kv_head * v_fresh_stride_head).to(tl.int32) + channel
                tiles = Tiles(k_tiles, v_tiles, first_token, k_column, v_column)
            fresh = Source(k_rows, v_rows, 0, k_fresh_stride_token, 0, v_fresh_stride_token, None, 1, None, tiles)  # fmt: skip
            acc, row_max, row_sum = attend_query_tile(
                q_tile, q_first + token, q_first, tl.minimum(q_first + BLOCK_Q, q_len) - 1, context, pages, fresh, k_scale, v_scale,
                0, context + q_len, True, sliding_window, inner_scale, outer_scale,
                HEAD_DIM, VALUE_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, WRAP, EQUAL_STRIDES, SCALES, HARDWARE_E4M3, HALF, PTX, DIVIDE, MASK_ALL,
            )  # fmt: skip
            out_rows = row_pointers(out + part * VALUE_DIM, tile_token, kv_head * GROUP, token, group_head, out_stride_token, out_stride_head)  # fmt: skip
            lse_rows = None
            if lse is not None:
                lse_rows = row_pointers(lse, tile_token, kv_head * GROUP, token, group_head, 1, lse_stride_head)  # fmt: skip
            sink_rows = None
            if sinks is not None:
                sink_rows = sinks + kv_head * GROUP + group_head
            _store_final(acc, row_max, row_sum, out_rows, lse_rows, sink_rows, live, VALUE_DIM)


@triton.jit(do_not_specialize=["num_decodes", "target_items"])
def _decode_kernel(
    q, k_pages, v_pages, k_fresh, v_fresh, block_table, seq_lens, cu_seqlens_q, sinks, out, lse,
    partial_out, first_lse,
    num_decodes, target_items, num_kv_heads, width, sliding_window, inner_scale, outer_scale,
    q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride_head, table_stride,
    k_stride_page, k_stride_row, k_stride_head, v_stride_page, v_stride_row, v_stride_head,
    k_scale, v_scale, k_scale_stride_page, k_scale_stride_row, k_scale_stride_head,
    v_scale_stride_page, v_scale_stride_row, v_scale_stride_head,
    k_fresh_stride_token, k_fresh_stride_head, v_fresh_stride_token, v_fresh_stride_head,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, HEADS: tl.constexpr, HEAD_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WRAP: tl.constexpr, MASK_ALL: tl.constexpr,
    EQUAL_STRIDES: tl.constexpr, SCALES: tl.constexpr, HARDWARE_E4M3: tl.constexpr, HALF: tl.constexpr, PTX: tl.constexpr, DIVIDE: tl.constexpr,
    MIN_TOKENS: tl.constexpr,
):  # fmt: skip
    num_head_tiles = num_kv_heads * HEAD_TILES
    head_index = tl.program_id(0) % num_head_tiles
    kv_head = (head_index // HEAD_TILES).to(tl.int64)
    item = tl.program_id(0) // num_head_tiles
    seq = item
    piece = 0
    if partial_out is not None:
        tokens = split_kv.piece_tokens(
            seq_lens, cu_seqlens_q, num_decodes, target_items, sliding_window, k_fresh is not None, MIN_TOKENS
        )  # fmt: skip
        seq, first_item = split_kv.find_item(
            item, seq_lens, cu_seqlens_q, num_decodes, tokens, sliding_window, k_fresh is not None, BLOCK_Q
        )  # fmt: skip
        if seq >= num_decodes:
            return
        piece = item - first_item
    first_token = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - first_token
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - q_len
    low, high = split_kv.paged_range(seq_len, q_len, sliding_window, k_fresh is not None)
    if (q_len == 0) | (q_len > BLOCK_Q):
        return
    pieces = 1
    if partial_out is not None:
        pieces = split_kv.num_pieces(
            seq_len, q_len, tokens, sliding_window, k_fresh is not None, BLOCK_Q
        )
        first_tile = low // BLOCK_N
        num_tiles = (high + BLOCK_N - 1) // BLOCK_N - first_tile
        low = tl.maximum(low, (first_tile + num_tiles * piece // pieces) * BLOCK_N)
        high = tl.minimum(high, (first_tile + num_tiles * (piece + 1) // pieces) * BLOCK_N)

    token, group_head, live = rows_of_tile(
        head_index % HEAD_TILES, q_len, GROUP, BLOCK_Q, HEADS, BLOCK_M
    )
    q_rows = row_pointers(q, first_token, kv_head * GROUP, token, group_head, q_stride_token, q_stride_head)  # fmt: skip
    q_tile = tl.load(
        q_rows[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=live[:, None], other=0.0
    )
    scales = None
    if SCALES == "rows":
        scales = Scales(
            k_scale + kv_head * k_scale_stride_head, v_scale + kv_head * v_scale_stride_head,
            k_scale_stride_page, k_scale_stride_row, v_scale_stride_page, v_scale_stride_row,
        )  # fmt: skip
    pages = Source(
        k_pages + kv_head * k_stride_head, v_pages + kv_head * v_stride_head, k_stride_page, k_stride_row, v_stride_page, v_stride_row,
        block_table + seq.to(tl.int64) * table_stride, width, scales, None,
    )  # fmt: skip
    if k_fresh is not None:
        row = first_token.to(tl.int64)
        k_fresh += row * k_fresh_stride_token + kv_head * k_fresh_stride_head
        v_fresh += row * v_fresh_stride_token + kv_head * v_fresh_stride_head
    fresh = Source(k_fresh, v_fresh, 0, k_fresh_stride_token, 0, v_fresh_stride_token, None, 1, None, None)  # fmt: skip
    acc, row_max, row_sum = attend_query_tile(
        q_tile, token, 0, q_len - 1, context, pages, fresh, k_scale, v_scale,
        low, high, piece == pieces - 1, sliding_window, inner_scale, outer_scale,
        HEAD_DIM, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_N, WRAP, EQUAL_STRIDES, SCALES, HARDWARE_E4M3, HALF, PTX, DIVIDE, MASK_ALL,
    )  # fmt: skip
    if SCALES != "none" and not HARDWARE_E4M3:
        # Bits moved by hand take more registers: rather than keep what is known of the rows, which would spill, work it out again.
        q_len = tl.load(cu_seqlens_q + seq + 1, volatile=True) - first_token
        token, group_head, live = rows_of_tile(
            head_index % HEAD_TILES, q_len, GROUP, BLOCK_Q, HEADS, BLOCK_M
        )
    if pieces == 1:
        out_rows = row_pointers(out, first_token, kv_head * GROUP, token, group_head, out_stride_token, out_stride_head)  # fmt: skip
        lse_rows = None
        if lse is not None:
            lse_rows = row_pointers(lse, first_token, kv_head * GROUP, token, group_head, 1, lse_stride_head)  # fmt: skip
        sink_rows = None
        if sinks is not None:
            sink_rows = sinks + kv_head * GROUP + group_head
        _store_final(acc, row_max, row_sum, out_rows, lse_rows, sink_rows, live, HEAD_DIM)
    elif partial_out is not None:
        num_heads = num_kv_heads * GROUP
        part_row = (item.to(tl.int64) * BLOCK_Q + token) * num_heads + kv_head * GROUP + group_head
        _store_final(
            acc, row_max, row_sum, partial_out + part_row * HEAD_DIM, partial_out + first_lse + part_row, None, live, HEAD_DIM
        )  # fmt: skip


def attention(arguments: dict[str, Any]) -> torch.Tensor:
    """Check and launch ``check_attention(**arguments)``; returns ``out``. Calls that look alike are checked once (``common.launch_cache``).

    Raises: ValueError, NotImplementedError: as ``quire.kernels.paged_attention``.
    """
    aligned = launch_cache.at_16_bytes(arguments["k"], arguments["v"])
    values = arguments["v_pages"]
    odd = isinstance(values, torch.Tensor) and values.storage_offset() % 2
    return launch_cache.run((select_config, aligned, odd), arguments, _checked)


def _checked(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
    call = check_attention(**arguments)
    expect_head_dim("k_pages", call.k_pages.shape[3])
    return dict(vars(call)), prepare(call, *arch_and_sms(call.q))


def prepare(call: AttentionCall, arch: int, num_sms: int) -> list[Launch]:
    """The launches of a checked call.

    In a mixed batch the host does not know how many new tokens the decode sequences have: the decode kernel takes those that fit its query
    tile and the prefill kernel all others, so each sequence is computed once whatever the caller put first.

    Args:
        call: the checked call.
        arch: compute capability as major * 10 + minor.
        num_sms: streaming multiprocessors of the device.
    """
    launches: list[Launch] = []
    decode_tokens = 0
    if call.num_decodes > 0:
        launches = _prepare_decode(call, arch, num_sms)
        decode_tokens = launches[0].arguments["BLOCK_Q"]
    if call.num_decodes < call.num_seqs or (call.num_seqs and call.max_seqlen_q > decode_tokens):
        launches.append(_prepare_prefill(call, arch, num_sms, decode_tokens))
    return launches


def _shared_arguments(call: AttentionCall) -> dict[str, Any]:
    """Kernel arguments that both kernels take."""
    if call.softcap is None:
        inner_scale, outer_scale = call.softmax_scale * LOG2E.value, None
    else:
        inner_scale = call.softmax_scale / call.softcap
        outer_scale = call.softcap * LOG2E.value
    k_page, v_page = call.k_pages.stride(), call.v_pages.stride()
    k_fresh = (0, 0) if call.k is None else call.k.stride()
    v_fresh = (0, 0) if call.v is None else call.v.stride()
    k_pages, v_pages = call.k_pages, call.v_pages
    if call.scales != "none":
        # As bytes: below sm_89 Triton has no such type.
        k_pages, v_pages = k_pages.view(torch.uint8), v_pages.view(torch.uint8)
    k_scale = v_scale = (None, None, None)
    if call.scales == "rows":
        k_scale, v_scale = call.k_scale.stride(), call.v_scale.stride()
    return {
        "q": call.q,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "k_fresh": call.k,
        "v_fresh": call.v,
        "block_table": call.block_table,
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cu_seqlens_q,
        "sinks": call.sinks,
        "out": call.out,
        "lse": call.lse,
        "num_kv_heads": call.k_pages.shape[2],
        "width": call.block_table.shape[1],
        "sliding_window": call.sliding_window,
        "inner_scale": inner_scale,
        "outer_scale": outer_scale,
        "q_stride_token": call.q.stride(0),
        "q_stride_head": call.q.stride(1),
        "out_stride_token": call.out.stride(0),
        "out_stride_head": call.out.stride(1),
        "lse_stride_head": 0 if call.lse is None else call.lse.stride(0),
        "table_stride": call.block_table.stride(0),
        "k_stride_page": k_page[0],
        "k_stride_row": k_page[1],
        "k_stride_head": k_page[2],
        "v_stride_page": v_page[0],
        "v_stride_row": v_page[1],
        "v_stride_head": v_page[2],
        "k_scale": call.k_scale,
        "v_scale": call.v_scale,
        "k_scale_stride_page": k_scale[0],
        "k_scale_stride_row": k_scale[1],
        "k_scale_stride_head": k_scale[2],
        "v_scale_stride_page": v_scale[0],
        "v_scale_stride_row": v_scale[1],
        "v_scale_stride_head": v_scale[2],
        "k_fresh_stride_token": k_fresh[0],
        "k_fresh_stride_head": k_fresh[1],
        "v_fresh_stride_token": v_fresh[0],
        "v_fresh_stride_head": v_fresh[1],
    }


def _shape_arguments(call: AttentionCall, phase: str, config: Config, arch: int) -> dict[str, Any]:
    """Compile-time constants and launch options that both kernels take."""
    block_q, heads, head_tiles = tile_heads(call.group, config.block_m)
    head_dim = call.q.shape[2]
    quantised = call.scales != "none"
    half = quantised and call.q.element_size() == 2
    return {
        "GROUP": call.group,
        "BLOCK_Q": block_q,
        "HEADS": heads,
        "HEAD_TILES": head_tiles,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": call.k_pages.shape[1],
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "WRAP": _table_wraps(call, config),
        "MASK_ALL": config.mask_all,
        "EQUAL_STRIDES": _equal_strides(call),
        "SCALES": call.scales,
        "HARDWARE_E4M3": quantised and arch >= E4M3_ARCH,
        "HALF": half and uses_fp16_values(config, call.scales == "rows"),
        # The interpreter, which runs what is on a CPU, knows none.
        "PTX": quantised and not call.q.is_cpu,
        "DIVIDE": call.q.element_size() == 2 and not quantised and _divides(config, arch),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": MAX_REGISTERS,
    }


def _divides(config: Config, arch: int) -> bool:
    """Whether warps have to be made to divide the scores of a tile of two-byte keys: where mma.sync forms them, each warp gets whole rows of
    a product that another one takes, unless it has more columns than rows; with fewer than 16 rows a warp, several compute the same. Where
    quantised values are widened, dividing costs more than it saves."""
    rows = config.block_m
    return not 90 <= arch < 120 and config.block_n <= rows < 16 * config.num_warps


def _table_wraps(call: AttentionCall, config: Config) -> str:
    """``WRAP`` of `paged_tiles.load_page`. Without a window a table holds all blocks."""
    if call.sliding_window is None:
        return "never"
    block_size, width = call.k_pages.shape[1], call.block_table.shape[1]
    return "once" if -(-config.block_n // block_size) <= width else "often"


def _equal_strides(call: AttentionCall) -> bool:
    """Whether rows of keys lie as far apart as rows of values."""
    pages = call.k_pages.stride(1) == call.v_pages.stride(1)
    return pages and (call.k is None or call.k.stride(0) == call.v.stride(0))


def _prepare_prefill(call: AttentionCall, arch: int, num_sms: int, decode_tokens: int) -> Launch:
    """The launch for all sequences but the first ``num_decodes`` of up to ``decode_tokens`` new tokens."""
    head_dim, block_size = call.q.shape[2], call.k_pages.shape[1]
    config = select_config(
        head_dim,
        call.q.element_size(),
        "prefill",
        block_size,
        arch,
        page_bytes=call.k_pages.element_size(),
    )
    if not _equal_strides(call):
        # The second set of offsets takes the registers of half a tile.
        config = replace(config, block_n=max(16, config.block_n // 2))
    constants = _shape_arguments(call, "prefill", config, arch)
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    num_tiles = call.q.shape[0] // constants["BLOCK_Q"] + call.num_seqs
    num_items = num_tiles * call.k_pages.shape[2] * constants["HEAD_TILES"] * config.value_parts
    programs = num_items
    if config.programs_per_sm:
        programs = min(num_items, config.programs_per_sm * num_sms)
    k_tiles, v_tiles = _fresh_tiles(call, config)
    return Launch(
        _prefill_kernel,
        (programs,),
        {
            "k_tiles": k_tiles,
            "v_tiles": v_tiles,
            "num_seqs": call.num_seqs,
            "num_decodes": call.num_decodes,
            "decode_tokens": decode_tokens,
            "num_tiles": num_tiles,
            **_shared_arguments(call),
            **constants,
            "VALUE_DIM": head_dim // config.value_parts,
            "PERSISTENT": config.programs_per_sm > 0,
        },
    )


def _value_pairs(call: AttentionCall, config: Config) -> bool:
    """Whether values are read as pairs of codes: where these lie in pairs, and products of fp16 have tiles whose few rows leave each warp
    enough columns of half the channels."""
    if call.scales == "none" or call.q.element_size() != 2:
        return False
    places = (call.v_pages.storage_offset(), *call.v_pages.stride()[:3])
    few_rows = config.block_m <= 32 and call.q.shape[2] >= 4 * config.block_m
    return few_rows and not any(place % 2 for place in places)


def _fresh_tiles(
    call: AttentionCall, config: Config
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Descriptors of tiles of the fresh keys and values, if the launch copies by them and they can be described; else None twice.

    Rows [num_tokens, num_kv_heads, head_dim] are described as [num_tokens, columns], a head being some columns: a tile is a rectangle.
    """
    made = []
    wanted = config.new_kv_tma and not config.mask_all
    # Descriptors need tensors at multiples of 16 bytes; the strides are another matter.
    if (
        wanted
        and call.k is not None
        and call.v is not None
        and launch_cache.at_16_bytes(call.k, call.v)
    ):
        head_dim = call.q.shape[2]
        for rows, dim in (call.k, head_dim), (call.v, head_dim // config.value_parts):
            stride_token, stride_head = rows.stride()[:2]
            columns = (rows.shape[1] - 1) * stride_head + head_dim
            in_16_bytes = stride_token > 0 and stride_token * rows.element_size() % 16 == 0
            if in_16_bytes and rows.shape[0] > 0 and columns < 2**31:
                shape, strides = [rows.shape[0], columns], [stride_token, 1]
                made.append(TensorDescriptor(rows, shape, strides, [config.block_n, dim]))
    return (made[0], made[1]) if len(made) == 2 else (None, None)


def _prepare_decode(call: AttentionCall, arch: int, num_sms: int) -> list[Launch]:
    """The launches for the first ``num_decodes`` sequences of few new tokens: attention, and the merge where a sequence may be cut into pieces."""
    num_heads, head_dim = call.q.shape[1:]
    num_kv_heads, block_size = call.k_pages.shape[2], call.k_pages.shape[1]
    plan = plan_decode(
        num_decodes=call.num_decodes,
        max_seqlen_q=call.max_seqlen_q if call.num_decodes == call.num_seqs else 1,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_sms=num_sms,
        dtype_bytes=call.q.element_size(),
        max_seq_len=call.max_seq_len,
        sliding_window=call.sliding_window,
    )
    config = select_config(
        head_dim,
        call.q.element_size(),
        "decode",
        block_size,
        arch,
        rows=plan.block_m,
        page_bytes=call.k_pages.element_size(),
    )
    constants = _shape_arguments(call, "decode", config, arch)
    shared = _shared_arguments(call)
    if _value_pairs(call, config):
        shared["v_pages"] = call.v_pages.view(torch.uint16)
        shared |= {name: shared[name] // 2 for name in V_STRIDES}
    partial_out, first_lse = partials(plan.workspace_numel, head_dim, call.workspace, call.q.device)
    attention = Launch(
        _decode_kernel,
        (plan.max_items * num_kv_heads * constants["HEAD_TILES"],),
        {
            "partial_out": partial_out,
            "first_lse": first_lse,
            "num_decodes": call.num_decodes,
            "target_items": plan.target_items,
            "MIN_TOKENS": MIN_SPLIT_KEYS,
            **shared,
            **constants,
        },
    )
    if partial_out is None:
        return [attention]
    return [
        attention,
        merge.prepare_pieces(call, partial_out, first_lse, plan, constants["BLOCK_Q"]),
    ]
