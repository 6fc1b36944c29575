"""Paged attention, full and sliding-window: what is launched for a call.

    out_i = sum_j softmax_j(cap(softmax_scale * q_i . k_j)) v_j
            over the keys j <= p_i (and p_i - j < sliding_window)

A query tile packs the tokens of a sequence with the query heads of one KV head (row = token * heads
+ head), so every K/V tile is read once for all of them. Its keys come from two sources, pages and
the step's new K/V, merged by one online softmax (exp2 domain, fp32). Per source, tiles that every
row sees whole run in a loop without masks, the tiles at the edges in a loop with masks. The page id
of the next tile is loaded one tile ahead and carried around the loop: loaded inside it, Triton
keeps one K/V tile in flight instead of ``num_stages``. If block_size is a multiple of BLOCK_N a
tile has one page id, else each of its rows has one.

Next: `prefill_kernel` and `decode_kernel`, which share all that, in `query_tile`; `merge` has the
merge of KV splits.

Layout: q, out [num_tokens, num_heads, head_dim]; pages [num_pages, block_size, num_kv_heads,
head_dim] of any strides; block_table [num_seqs, width] where block b is entry b % width. Decode
partials, fp32: [items, BLOCK_Q, num_heads, head_dim], then their lse.

Source: FlashAttention-2 (arXiv 2307.08691); PagedAttention (arXiv 2309.06180); FlashDecoding
(split-KV).
"""

from dataclasses import replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common import strided
from ..common.arch import Arch
from ..common.checks import expect_head_dim
from ..common.decode_plans import MIN_SPLIT_KEYS
from ..common.launching import Launch, arch_and_sms, given, partials, run
from ..common.query_tiles import LOG2E
from ..common.tile_shapes import MAX_REGISTERS, tile_heads
from . import merge
from .arguments import Softmax, TileConfig
from .call import AttentionCall
from .configs import Config, plan_decode, select_config, uses_fp16_values
from .decode_kernel import decode_kernel
from .prefill_kernel import prefill_kernel


def attention(call: AttentionCall) -> torch.Tensor:
    """Launch a checked call; returns ``out``.

    Raises:
        NotImplementedError: as ``quire.kernels.paged_attention``.
    """
    expect_head_dim("k_pages", call.k_pages.shape[3])
    run(prepare(call, *arch_and_sms(call.q)), call.q)
    return call.out


def prepare(call: AttentionCall, arch: Arch, num_sms: int) -> list[Launch]:
    """The launches of a checked call.

    In a mixed batch the host does not know how many new tokens the decode sequences have: the
    decode kernel takes those that fit its query tile and the prefill kernel all others, so each
    sequence is computed once whatever the caller put first.

    Args:
        call: the checked call.
        arch: of the GPU.
        num_sms: streaming multiprocessors of the device.
    """
    launches: list[Launch] = []
    decode_tokens = 0
    if call.num_decodes > 0:
        launches = _prepare_decode(call, arch, num_sms)
        decode_tokens = launches[0].values["BLOCK_Q"]
    if call.num_decodes < call.num_seqs or (call.num_seqs and call.max_seqlen_q > decode_tokens):
        launches.append(_prepare_prefill(call, arch, num_sms, decode_tokens))
    return launches


def _shared_arguments(call: AttentionCall, value_pairs: bool = False) -> dict[str, Any]:
    """Kernel arguments that both kernels take; value_pairs: read values as 16-bit numbers."""
    if call.softcap is None:
        inner_scale, outer_scale = call.softmax_scale * LOG2E.value, None
    else:
        inner_scale = call.softmax_scale / call.softcap
        outer_scale = call.softcap * LOG2E.value
    k_pages, v_pages = call.k_pages, call.v_pages
    if call.scales != "none":
        # As bytes: not every architecture has the type.
        k_pages = k_pages.view(torch.uint8)
        v_pages = v_pages.view(torch.uint16 if value_pairs else torch.uint8)
    scales = call.k_scale, call.v_scale
    if call.scales == "rows":
        scales = strided.pages(call.k_scale), strided.pages(call.v_scale)
    return {
        "q": strided.rows(call.q),
        "k_pages": strided.pages(k_pages),
        "v_pages": strided.pages(v_pages),
        "k_new": strided.rows(call.k),
        "v_new": strided.rows(call.v),
        "block_table": strided.table(call.block_table),
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cu_seqlens_q,
        "sinks": call.sinks,
        "out": strided.rows(call.out),
        "lse": strided.lse_rows(call.lse),
        "num_decodes": call.num_decodes,
        "num_kv_heads": call.k_pages.shape[2],
        "softmax": Softmax(call.sliding_window, inner_scale, outer_scale),
        "k_scale": scales[0],
        "v_scale": scales[1],
    }


def _tile_config(call: AttentionCall, phase: str, config: Config, arch: Arch) -> TileConfig:
    """Compile-time constants of either kernel."""
    block_q, heads, head_tiles = tile_heads(call.group, config.block_m)
    head_dim = call.q.shape[2]
    quantized = call.scales != "none"
    half = quantized and call.q.element_size() == 2
    return TileConfig(
        HEAD_DIM=head_dim,
        VALUE_DIM=head_dim // (config.value_parts if phase == "prefill" else 1),
        GROUP=call.group,
        BLOCK_Q=block_q,
        HEADS=heads,
        HEAD_TILES=head_tiles,
        BLOCK_SIZE=call.k_pages.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        WRAP=_table_wraps(call, config),
        MASK_ALL=config.mask_all,
        EQUAL_STRIDES=_equal_strides(call),
        SCALES=call.scales,
        HARDWARE_E4M3=quantized and arch.widens_e4m3,
        HALF=half and uses_fp16_values(config, call.scales == "rows"),
        # The interpreter, which runs what is on a CPU, knows none.
        PTX=quantized and arch.maker == "nvidia" and not call.q.is_cpu,
        PAGED_CONTEXT=call.paged_context,
        DIVIDE=call.q.element_size() == 2 and not quantized and _divides(config, arch),
    )


def _options(config: Config, arch: Arch) -> dict[str, Any]:
    """Launch options of either kernel."""
    return {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        **given(matrix_instr_nonkdim=config.matrix_instr_nonkdim),
        **arch.register_limit(MAX_REGISTERS),
    }


def _divides(config: Config, arch: Arch) -> bool:
    """Whether warps have to be made to divide the scores of a tile of two-byte keys.

    Where mma.sync forms them, each warp gets whole rows of a product that another one takes, unless
    it has more columns than rows; with fewer than 16 rows a warp, several compute the same. Where
    quantized values are widened, dividing costs more than it saves.
    """
    rows = config.block_m
    return arch.matrix == "mma" and config.block_n <= rows < 16 * config.num_warps


def _table_wraps(call: AttentionCall, config: Config) -> str:
    """``WRAP`` of `query_tiles.load_page`. Without a window a table holds all blocks."""
    if call.sliding_window is None:
        return "never"
    block_size, width = call.k_pages.shape[1], call.block_table.shape[1]
    return "once" if -(-config.block_n // block_size) <= width else "often"


def _equal_strides(call: AttentionCall) -> bool:
    """Whether rows of keys lie as far apart as rows of values."""
    pages = call.k_pages.stride(1) == call.v_pages.stride(1)
    return pages and (call.k is None or call.k.stride(0) == call.v.stride(0))


def _prepare_prefill(call: AttentionCall, arch: Arch, num_sms: int, decode_tokens: int) -> Launch:
    """The launch for all sequences but the first ``num_decodes`` of up to ``decode_tokens`` new
    tokens."""
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
    constants = _tile_config(call, "prefill", config, arch)
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    num_tiles = call.q.shape[0] // constants.BLOCK_Q + call.num_seqs
    num_items = num_tiles * call.k_pages.shape[2] * constants.HEAD_TILES * config.value_parts
    programs = num_items
    if config.programs_per_sm:
        programs = min(num_items, config.programs_per_sm * num_sms)
    k_tiles, v_tiles = _new_tiles(call, config)
    return Launch(
        prefill_kernel,
        (programs,),
        {
            "k_tiles": k_tiles,
            "v_tiles": v_tiles,
            "num_seqs": call.num_seqs,
            "decode_tokens": decode_tokens,
            "num_tiles": num_tiles,
            **_shared_arguments(call),
            "CONFIG": constants,
            "PERSISTENT": config.programs_per_sm > 0,
            **_options(config, arch),
        },
    )


def _value_pairs(call: AttentionCall, config: Config) -> bool:
    """Whether quantized values are read as pairs: where they lie in pairs, and products of fp16
    have tiles whose few rows leave each warp enough columns of half the channels."""
    if call.scales == "none" or call.q.element_size() != 2:
        return False
    offsets = (call.v_pages.storage_offset(), *call.v_pages.stride()[:3])
    few_rows = config.block_m <= 32 and call.q.shape[2] >= 4 * config.block_m
    return few_rows and not any(offset % 2 for offset in offsets)


def _new_tiles(
    call: AttentionCall, config: Config
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Descriptors of tiles of the new keys and values, if the launch copies by them and they can be
    described; else None twice.

    Rows [num_tokens, num_kv_heads, head_dim] are described as [num_tokens, columns], a head being
    some columns: a tile is a rectangle.
    """
    made = []
    wanted = config.new_kv_tma and not config.mask_all
    # Descriptors need tensors at multiples of 16 bytes; the strides are another matter.
    if wanted and call.k is not None and call.v is not None and strided.at_16_bytes(call.k, call.v):
        head_dim = call.q.shape[2]
        for rows, dim in (call.k, head_dim), (call.v, head_dim // config.value_parts):
            stride_token, stride_head = rows.stride()[:2]
            columns = (rows.shape[1] - 1) * stride_head + head_dim
            in_16_bytes = stride_token > 0 and stride_token * rows.element_size() % 16 == 0
            if in_16_bytes and rows.shape[0] > 0 and columns < 2**31:
                shape, strides = [rows.shape[0], columns], [stride_token, 1]
                made.append(TensorDescriptor(rows, shape, strides, [config.block_n, dim]))
    return (made[0], made[1]) if len(made) == 2 else (None, None)


def _prepare_decode(call: AttentionCall, arch: Arch, num_sms: int) -> list[Launch]:
    """The launches for the first ``num_decodes`` sequences of few new tokens: attention, and the
    merge where a sequence may be split."""
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
    constants = _tile_config(call, "decode", config, arch)
    partial_out, first_lse = partials(plan.workspace_numel, head_dim, call.workspace, call.q.device)
    attention = Launch(
        decode_kernel,
        (plan.max_items * num_kv_heads * constants.HEAD_TILES,),
        {
            "partial_out": partial_out,
            "first_lse": first_lse,
            "target_items": plan.target_items,
            **_shared_arguments(call, _value_pairs(call, config)),
            "CONFIG": constants,
            "MIN_TOKENS": MIN_SPLIT_KEYS,
            **_options(config, arch),
        },
    )
    if partial_out is None:
        return [attention]
    return [
        attention,
        merge.prepare_splits(call, arch, partial_out, first_lse, plan, constants.BLOCK_Q),
    ]
