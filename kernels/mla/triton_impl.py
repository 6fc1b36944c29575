"""Launches of ``mla_attention``: attention over one latent row a token.

    out_i = sum_j softmax_j(softmax_scale * (q_i . c_j + q'_i . r_j)) c_j   over the keys j <= p_i,
    row_j = (c_j, r_j)

``prefill_kernel`` and ``decode_kernel`` hold the kernels and ``query_tile`` their common body.

Layout: q [num_tokens, num_heads, HEAD_DIM_V + ROPE_DIM], out [num_tokens, num_heads, HEAD_DIM_V];
pages [num_pages, block_size, *] of any strides.

Source: DeepSeek-V2 (arXiv 2405.04434) 2.1; FlashAttention-2 (arXiv 2307.08691).
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..attention.configs import MIN_SPLIT_TOKENS
from ..common import launch_cache, strided
from ..common.launching import Launch, arch_and_sms, partials
from ..common.merging import block_parts, compressed_merge_kernel
from ..common.query_tiles import LOG2E
from ..common.stream_k import PIECE_COST
from ..common.tile_shapes import MAX_REGISTERS, next_power_of_2, tile_class, tile_heads
from ..common.tiles import hoists
from .call import MlaCall
from .decode_kernel import mla_decode_kernel
from .prefill_kernel import mla_prefill_kernel


@dataclass(frozen=True)
class MlaConfig:
    """One launch: keys of a tile, warps, stages.

    swap: keys take the rows of the matrix instructions. divide: as in ``_tiles.update``. per_sm: programs that share an SM and its registers.
    """

    block_n: int
    num_warps: int
    num_stages: int
    swap: bool
    divide: bool = False
    per_sm: int = 1


# Two-byte dtypes: rows of the query tile -> config, at 512 + 64 channels; narrower latents fit as well. Ampere does not pipeline tiles of
# swapped products. Tensor memory's instructions take more shared memory. With 99 KiB, 64 rows would leave room for tiles of 16 keys: too few
# for copies of 16 bytes by every thread, and half as many bytes under way.
CONFIGS = {
    "hopper": {
        16: MlaConfig(32, 8, 3, True, divide=True, per_sm=2),
        32: MlaConfig(32, 8, 3, True, divide=True),
        64: MlaConfig(32, 8, 3, False, divide=True),
    },
    "blackwell": {
        16: MlaConfig(32, 8, 3, True, divide=True, per_sm=2),
        32: MlaConfig(32, 8, 3, True, divide=True),
        64: MlaConfig(32, 8, 2, False),
    },
    "medium": {
        16: MlaConfig(32, 8, 3, False),
        32: MlaConfig(32, 8, 3, False, divide=True),
        64: MlaConfig(32, 8, 2, False, divide=True),
    },
    "small": {
        16: MlaConfig(32, 8, 2, False),
        32: MlaConfig(32, 8, 2, False, divide=True),
    },
}
# fp32 runs without tensor cores, for checks more than for speed.
FP32_CONFIG = MlaConfig(16, 8, 1, False)
# Tiles of a piece where nothing may be cut: more than any sequence has.
NEVER = 1 << 28
# Rows of a query tile in prefill, by bytes of an element.
PREFILL_ROWS = {2: 64, 4: 16}


def attention(arguments: dict[str, Any]) -> torch.Tensor:
    """Check and launch ``mla_attention(**arguments)``; returns ``out``.

    Calls that look alike are checked once (``common.launch_cache``).
    """
    aligned = launch_cache.at_16_bytes(arguments["pages"], arguments["kv"])
    return launch_cache.run((select_config, aligned), arguments, _prepared)


def _prepared(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Launch]]:
    call = MlaCall(**arguments)
    return dict(vars(call)), prepare(call, *arch_and_sms(call.q))


def prepare(call: MlaCall, arch: int, num_sms: int) -> list[Launch]:
    """The launches of a checked call.

    Each sequence is computed once, whatever the caller put first (see
    ``kernels.attention.triton_impl.prepare``).

    Args:
        call: the checked call.
        arch: compute capability as major * 10 + minor.
        num_sms: streaming multiprocessors of the device.
    """
    launches: list[Launch] = []
    decode_tokens = 0
    if call.num_decodes > 0:
        launches = _prepare_decode(call, arch, num_sms)
        decode_tokens = launches[0].arguments["decode_tokens"]
    if call.num_decodes < call.num_seqs:
        launches.append(_prepare_prefill(call, arch, decode_tokens))
    return launches


def select_config(dtype_bytes: int, rows: int, arch: int) -> MlaConfig:
    """Tile shape of the attention kernels.

    Args:
        dtype_bytes: 2 (bf16, fp16) or 4 (fp32).
        rows: rows of the query tile, of ``tile_rows``.
        arch: compute capability as major * 10 + minor.

    Returns:
        MlaConfig.
    """
    return FP32_CONFIG if dtype_bytes == 4 else CONFIGS[tile_class(arch)][rows]


def tile_rows(rows: int, arch: int) -> int:
    """Rows of the query tile where ``rows`` are wanted, 16, 32 or 64: at most 32 with 99 KiB of shared memory."""
    return min(rows, max(CONFIGS[tile_class(arch)]))


def _shared_arguments(call: MlaCall, rows: int, arch: int) -> dict[str, Any]:
    """Arguments, constants and options that both attention kernels take. rows: of the query tile."""
    num_heads, head_dim = call.q.shape[1:]
    block_q, heads, head_tiles = tile_heads(num_heads, rows)
    config = select_config(call.q.element_size(), rows, arch)
    return {
        "q": strided.rows(call.q),
        "pages": strided.PagedRows(call.pages, *call.pages.stride()[:2]),
        "kv": strided.matrix(call.kv),
        "block_table": strided.table(call.block_table),
        "seq_lens": call.seq_lens,
        "cu_seqlens_q": call.cu_seqlens_q,
        "out": strided.rows(call.out),
        "lse": strided.lse_rows(call.lse),
        "num_decodes": call.num_decodes,
        "scale": call.softmax_scale * LOG2E.value,
        "NUM_HEADS": num_heads,
        "BLOCK_Q": block_q,
        "HEADS": heads,
        "HEAD_TILES": head_tiles,
        "HEAD_DIM_V": call.head_dim_v,
        "ROPE_DIM": head_dim - call.head_dim_v,
        "BLOCK_SIZE": call.pages.shape[1],
        "BLOCK_M": rows,
        "BLOCK_N": config.block_n,
        "SWAP": config.swap,
        "DIVIDE": config.divide,
        "HOIST": hoists(config.swap, config.divide, arch),
        "ALIGNED": launch_cache.rows_at_16_bytes(call.pages, call.kv),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "maxnreg": min(MAX_REGISTERS, 2048 // config.num_warps // config.per_sm),
    }


def _prepare_prefill(call: MlaCall, arch: int, decode_tokens: int) -> Launch:
    """The launch for all sequences but the first ``num_decodes`` of up to ``decode_tokens`` new tokens."""
    shared = _shared_arguments(call, tile_rows(PREFILL_ROWS[call.q.element_size()], arch), arch)
    # Without the lengths on the host: each sequence adds at most one tile that is not full.
    num_tiles = call.q.shape[0] // shared["BLOCK_Q"] + call.num_seqs
    return Launch(
        mla_prefill_kernel,
        (num_tiles * shared["HEAD_TILES"],),
        {
            **shared,
            "num_seqs": call.num_seqs,
            "decode_tokens": decode_tokens,
            "num_tiles": num_tiles,
        },
    )


@dataclass(frozen=True)
class DecodePlan:
    """How the decode part of a batch is divided.

    rows: of a query tile. programs: those that share the keys of all of them. cut: whether a query tile may have several.
    """

    rows: int
    programs: int
    cut: bool


def plan_decode(
    *,
    num_heads: int,
    max_seqlen_q: int,
    num_sms: int,
    arch: int,
    block_size: int = 64,
    dtype_bytes: int = 2,
    max_seq_len: int | None = None,
) -> DecodePlan:
    """Plan decode from host integers only, so that a captured graph stays right at any sequence length.

    Args:
        num_heads: of the layer.
        max_seqlen_q: new tokens of the longest sequence on the decode path.
        num_sms: streaming multiprocessors of the device.
        arch: compute capability as major * 10 + minor.
        block_size: tokens of a page.
        dtype_bytes: 2 or 4; fp32 tiles have 16 rows only.
        max_seq_len: upper bound of the sequence lengths; None if unknown.

    Returns:
        DecodePlan: all programs are at work at once, and the device divides what keys there are evenly among them (``common.stream_k``).
    """
    wanted = next_power_of_2(num_heads * max(1, max_seqlen_q))
    # The loop over query tiles leaves no registers for 64 rows beside tensor memory's copy of them or, on Ampere, several page ids a tile.
    tiles = tile_class(arch)
    full = tiles == "blackwell" or (tiles == "medium" and block_size % 32 > 0)
    most = 16 if dtype_bytes == 4 else 32 if full else 64
    rows = tile_rows(min(most, max(16, wanted)), arch)
    config = select_config(dtype_bytes, rows, arch)
    programs = max(1, config.per_sm * num_sms // tile_heads(num_heads, rows)[2])
    short = max_seq_len is not None and max_seq_len < 2 * MIN_SPLIT_TOKENS
    return DecodePlan(rows, programs, programs > 1 and not short)


def _prepare_decode(call: MlaCall, arch: int, num_sms: int) -> list[Launch]:
    """The launches for the first ``num_decodes`` sequences: attention, and the merge of KV splits."""
    max_seqlen_q = call.max_seqlen_q if call.num_decodes == call.num_seqs else 1
    num_heads, dim = call.q.shape[1], call.head_dim_v
    plan = plan_decode(
        num_heads=num_heads,
        max_seqlen_q=max_seqlen_q,
        num_sms=num_sms,
        arch=arch,
        block_size=call.pages.shape[1],
        dtype_bytes=call.q.element_size(),
        max_seq_len=call.max_seq_len,
    )
    shared = _shared_arguments(call, plan.rows, arch)
    block_q, block_n = shared["BLOCK_Q"], shared["BLOCK_N"]
    # Of each program the end of one query tile and the beginning of another.
    numel = 2 * plan.programs * block_q * num_heads * (dim + 1) if plan.cut else 0
    partial_out, first_lse = partials(numel, dim, call.workspace, call.q.device)
    split = {
        "partial_out": partial_out,
        "first_lse": first_lse,
        "decode_tokens": max(max_seqlen_q, block_q),
        "programs": plan.programs,
        "LEAST": MIN_SPLIT_TOKENS // block_n if plan.cut else NEVER,
        "COST": 2 * PIECE_COST * plan.rows // block_n,
    }
    attention = Launch(
        mla_decode_kernel, (plan.programs * shared["HEAD_TILES"],), {**shared, **split}
    )
    if not plan.cut:
        return [attention]
    more = {
        **dict.fromkeys(("sinks", "cos_sin", "sliding_window", "ratio")),
        **dict.fromkeys(("num_whole", "pieces", "cos_sin_stride"), 0),
        "num_heads": num_heads,
        "out": call.out,
        "lse": call.lse,
        "out_stride_token": call.out.stride(0),
        "out_stride_head": call.out.stride(1),
        "lse_stride_head": 0 if call.lse is None else call.lse.stride(0),
        "SLOTS": False,
        "LINE": True,
        "HEAD_DIM": dim,
        "BLOCK_PARTS": block_parts(plan.programs, dim),
    }
    kernel = compressed_merge_kernel
    arguments = {name: (shared | split | more)[name] for name in kernel.arg_names}
    merging = Launch(kernel, (call.num_decodes * num_heads,), arguments | {"num_warps": 4})
    return [attention, merging]
