"""Bytes, operations and predicted times of the latent kernels: `bench.kernels.prediction` for rows that are key and value at once.

What differs from there: programs are few and large, so all rates but the launch are those of the share of the device that has a program;
products with swapped operands read both of them from shared memory, which is what bounds them at few heads; quantised rows are widened on
the CUDA cores, once for each tile of heads; the indexer scores with relu and weights instead of a softmax, and then selects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.kernels.common import tile_shapes
from quire.kernels.common.decode_plans import MIN_SPLIT_KEYS, SPLIT_COST
from quire.kernels.compressed import configs as compressed_configs
from quire.kernels.indexer import plan as indexer_plan
from quire.kernels.mla import configs as mla_configs

from ..cases.latent_shapes import LatentCase
from .prediction import (
    EXP_PER_CLOCK,
    FP32_OPS,
    FP32_PER_CLOCK,
    ITEM_BYTES,
    MMA_SYNC_SHARE,
    WIDEN_CYCLES,
    Device,
    Prediction,
    filled_share,
    products_seconds,
    resident_programs,
    sustained_rate,
)

# Instructions that each of four warps issues for a tile of 64 keys and the 64 heads of one token, and of two: `bench/results/static`, sm_90, plain
# keys and quantised ones. An SM issues four in a clock.
INDEX_INSTRUCTIONS = {False: {1: 197, 2: 308}, True: {1: 278, 2: 360}}
# Codes become fp16 by one of the three conversions that lead to scaled bf16.
INDEX_WIDEN_CYCLES = WIDEN_CYCLES / 3
# Cycles of an SM for each score in a selection, 128 instructions of a thread in each: 11 for the range, 15 for each of 6 passes, which is what
# 8,192 random scores take on average (16 at most), and 89 for the positions and the writes (sm_90, of the loops in the machine code).
SELECT_CYCLES = (11 + 6 * 15 + 89) / 128


@dataclass
class _Work:
    """Sums over the kernels of a case.

    row_bytes: of rows, which come as fast as the loops' copies allow. bytes: all others. loaded_bytes: of all tiles. flops: of whole tiles,
    at the full rate. issue: cycles of SMs. filled: share of the device in use. sustained: bytes per second that the copies of rows sustain.
    """

    row_bytes: float
    bytes: float
    loaded_bytes: float = 0.0
    flops: float = 0.0
    issue: float = 0.0
    kernels: int = 0
    filled: float = 1.0
    sustained: float = math.inf


@dataclass(frozen=True)
class _Tile:
    """A loop over tiles of keys. rows: of the query tile. keys: of a tile. channels: of a key and of its value together. key_bytes: stored."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    swap: bool
    channels: int
    key_bytes: int
    widened: int
    query_bytes: int


def case_bytes(case: LatentCase) -> float:
    """Bytes that must move: rows that some query sees read once, queries read, results written; for "write" and "compress" rows and states."""
    shape, tokens = case.shape, case.num_tokens
    if shape.op == "write":
        return tokens * (2 * ITEM_BYTES * shape.head_dim + case.row_bytes)
    if shape.op == "compress":
        # Entries, and the new rows' place in the state.
        kept = min(shape.ratio * (1 + shape.overlap), case.q_lens[0])
        entries = max(1, case.q_lens[0] // shape.ratio) * case.row_bytes
        return _rows_bytes(case) + case.batch * (kept * _pooled_row_bytes(case) + entries)
    if shape.op == "index":
        results = 4 * (shape.topk + 1)
        queries = shape.num_heads * (shape.head_dim * ITEM_BYTES + 4)
        return _rows_bytes(case) + tokens * (queries + results)
    value = shape.head_dim_v if shape.op == "mla" else shape.head_dim
    queries = tokens * shape.num_heads * (shape.head_dim + value) * ITEM_BYTES
    return _rows_bytes(case) + queries + 4.0 * tokens * shape.topk


def _rows_bytes(case: LatentCase) -> float:
    """Bytes of the rows that a case reads: of the cache, or for "compress" of the step and of the state."""
    shape, q_len = case.shape, case.q_lens[0]
    if shape.op == "write":
        return 0.0
    if shape.op == "compress":
        # Of the state the windows that close have all rows but one, or those of the window before.
        pooled = shape.ratio * (1 + shape.overlap)
        old = pooled - 1 if case.phase == "decode" else shape.overlap * shape.ratio
        return float(case.batch * (q_len * _pooled_row_bytes(case) + 8 * shape.head_dim * old))
    seen = case.num_entries
    if shape.op == "csa":
        seen = min(seen, q_len * shape.topk)
    if shape.op in ("window", "csa", "hca"):
        seen += min(case.context, shape.sliding_window - 1 + q_len)
    return float(case.batch * seen * case.row_bytes)


def _pooled_row_bytes(case: LatentCase) -> int:
    """Bytes of a token's fp32 row and gate."""
    return 2 * 4 * case.shape.head_dim * (1 + case.shape.overlap)


def case_flops(case: LatentCase) -> float:
    """Operations of the products of visible pairs; 0 for what forms none."""
    shape = case.shape
    if shape.op in ("write", "compress"):
        return 0.0
    pairs = float(case.batch * _visible(case).sum())
    if shape.op == "index":
        return 2.0 * pairs * shape.num_heads * shape.head_dim
    value = shape.head_dim_v if shape.op == "mla" else shape.head_dim
    return 2.0 * pairs * shape.num_heads * (shape.head_dim + value)


def predict(case: LatentCase, device: Device) -> Prediction:
    """The prediction for one case on one device, for this repository's kernels with all rows in pages."""
    rows = _rows_bytes(case)
    work = _Work(rows, case_bytes(case) - rows)
    ops = {"index": _add_index, "compress": _add_compress, "write": _add_write, "mla": _add_mla}
    ops.get(case.shape.op, _add_compressed)(case, device, work)
    cycles = device.num_sms * device.clock_hz * work.filled
    return Prediction(
        memory=work.row_bytes / min(device.copy_bytes_per_s, work.sustained)
        + work.bytes / device.copy_bytes_per_s,
        l2=work.loaded_bytes / min(device.l2_bytes_per_s * work.filled, work.sustained),
        tensor_cores=work.flops / (device.matmul_flops_per_s * work.filled),
        issue=work.issue / cycles,
        launch=work.kernels * device.launch,
        floor=max(
            case_bytes(case) / device.copy_bytes_per_s,
            case_flops(case) / device.matmul_flops_per_s,
        ),
    )


def _visible(case: LatentCase) -> np.ndarray:
    """Rows that each new token of one sequence sees, or that the indexer scores for it."""
    shape = case.shape
    position = np.arange(case.context - case.q_lens[0], case.context, dtype=np.int64)
    seen = np.zeros_like(position)
    if shape.op in ("window", "csa", "hca"):
        seen += np.minimum(position + 1, shape.sliding_window)
    if case.num_entries:
        entries = (position + 1) // shape.ratio
        if shape.op == "index":
            # Who sees no more than topk takes all, unscored.
            entries = np.where(entries > shape.topk, entries, 0)
        seen += np.minimum(entries, shape.topk) if shape.op == "csa" else entries
    return seen


def _add_compressed(case: LatentCase, device: Device, work: _Work) -> None:
    """compressed_attention: "window", "csa" and "hca"."""
    shape, q_len = case.shape, case.q_lens[0]
    picked, decode = shape.op == "csa", case.phase == "decode"
    rows = tile_shapes.tile_rows(shape.num_heads, 1 if picked or decode else 64)
    config = compressed_configs.select_config(
        shape.head_dim, ITEM_BYTES, case.fp8, device.arch, rows=rows
    )
    block_q, _, head_tiles = tile_shapes.tile_heads(shape.num_heads, config.block_m)
    tile = _Tile(
        rows=config.block_m,
        keys=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        swap=config.swap,
        channels=2 * shape.head_dim,
        key_bytes=case.row_bytes,
        widened=shape.head_dim - shape.rope_dim if case.fp8 else 0,
        query_bytes=config.block_m * shape.head_dim * ITEM_BYTES,
    )
    # Keys of a tile of tokens: those of its last one, and what the window of its first one adds.
    keys = _visible(case)[block_q - 1 :: block_q] if q_len >= block_q else _visible(case)[-1:]
    keys = keys + min(block_q, q_len) - 1
    if not decode:
        _add_tiles(work, device, tile, np.tile(keys, case.batch), 1, head_tiles)
        work.kernels += 1
        return
    most = shape.sliding_window + (shape.topk if picked else case.num_entries)
    plan = compressed_configs.plan_decode(
        num_decodes=case.batch,
        seq_tiles=1,
        block_q=block_q,
        block_m=config.block_m,
        num_heads=shape.num_heads,
        head_tiles=head_tiles,
        head_dim=shape.head_dim,
        num_sms=device.num_sms,
        max_keys=most,
        bounded=shape.op != "hca",
    )
    work.kernels += 2 if plan.is_split else 1
    count = case.batch
    if plan.programs:
        left = 1 if 2 * count <= plan.programs else 2
        least = compressed_configs.MIN_SPLIT_KEYS
        cost = left * SPLIT_COST * config.block_m
        partials = _add_stream_k(work, device, tile, count, int(keys[0]), plan.programs, head_tiles, least, cost)  # fmt: skip
    else:
        # Whole waves of programs, and one of KV splits.
        partials = (count - plan.num_unsplit) * plan.num_splits if plan.num_splits > 1 else 0
        _add_tiles(work, device, tile, np.full(count - plan.num_unsplit if partials else count, keys[0]), plan.num_splits, head_tiles)  # fmt: skip
        if partials and plan.num_unsplit:
            share, filled, sustained = plan.num_unsplit / count, work.filled, work.sustained
            _add_tiles(work, device, tile, np.full(plan.num_unsplit, keys[0]), 1, head_tiles)
            work.filled = 1 / (share / work.filled + (1 - share) / filled)
            work.sustained = 1 / (share / work.sustained + (1 - share) / sustained)
    work.bytes += 2 * 4 * partials * shape.num_heads * (shape.head_dim + 1)


def _add_mla(case: LatentCase, device: Device, work: _Work) -> None:
    """mla_attention."""
    shape, decode = case.shape, case.phase == "decode"
    rows = mla_configs.PREFILL_ROWS
    if decode:
        rows = mla_configs.decode_rows(num_heads=shape.num_heads, max_seqlen_q=1, arch=device.arch)
    config = mla_configs.select_config(ITEM_BYTES, rows, device.arch)
    rows = config.block_m
    block_q, _, head_tiles = tile_shapes.tile_heads(shape.num_heads, rows)
    tile = _Tile(
        rows=rows,
        keys=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        swap=config.swap,
        channels=shape.head_dim + shape.head_dim_v,
        key_bytes=case.row_bytes,
        widened=0,
        query_bytes=rows * shape.head_dim * ITEM_BYTES,
    )
    if not decode:
        last = np.minimum(np.arange(0, case.q_lens[0], block_q) + block_q, case.q_lens[0])
        keys = np.tile(case.context - case.q_lens[0] + last, case.batch)
        _add_tiles(work, device, tile, keys, 1, head_tiles)
        work.kernels += 1
        return
    plan = mla_configs.plan_decode(
        config=config,
        num_heads=shape.num_heads,
        head_dim_v=shape.head_dim_v,
        num_sms=device.num_sms,
        max_seq_len=case.context,
    )
    least = MIN_SPLIT_KEYS if plan.workspace_numel else case.context
    cost = 2 * SPLIT_COST * rows
    partials = _add_stream_k(work, device, tile, case.batch, case.context, plan.programs, head_tiles, least, cost)  # fmt: skip
    work.bytes += 2 * 4 * partials * shape.num_heads * (shape.head_dim_v + 1)
    work.kernels += 2 if plan.workspace_numel else 1


def _add_stream_k(
    work: _Work,
    device: Device,
    tile: _Tile,
    count: int,
    keys: int,
    programs: int,
    head_tiles: int,
    least: int,
    cost: int,
) -> int:
    """Stream-K decode (``stream_k.share``) of ``count`` query tiles of ``keys`` each.

    Returns:
        How many query tiles, or parts of one, leave partial results.
    """
    size = max(least, count * keys / programs)
    if size + cost >= min(-(-count // programs) * keys, count * keys / programs + keys):
        _add_tiles(work, device, tile, np.full(count, keys), 1, head_tiles)
        return 0
    at_work = round(count * keys / size)
    _add_tiles(work, device, tile, np.full(at_work, count * keys // at_work), 1, head_tiles)
    # Of each program the end of one query tile and the beginning of another.
    return at_work + min(at_work, count)


def _add_tiles(
    work: _Work, device: Device, tile: _Tile, keys: np.ndarray, splits: int, head_tiles: int
) -> None:
    """Work of tiles of ``keys`` [n], each of which ``splits`` programs share, times ``head_tiles``."""
    programs = len(keys) * splits * head_tiles
    whole = -(-keys // (splits * tile.keys)) * splits * tile.keys
    loaded = float(whole.sum()) * head_tiles
    work.loaded_bytes += float(keys.sum()) * head_tiles * tile.key_bytes
    flops = 2.0 * tile.channels * _matrix_rows(tile)  # of a key, as is the next
    issue = tile.rows * max(1 / EXP_PER_CLOCK, FP32_OPS / FP32_PER_CLOCK)
    issue += tile.widened * WIDEN_CYCLES
    work.flops += loaded * flops
    work.issue += loaded * issue
    stage = tile.keys * tile.key_bytes
    shared = tile.num_stages * stage + tile.query_bytes
    resident = resident_programs(shared, tile.num_warps, device) * device.num_sms
    work.filled = filled_share(programs, resident)
    products = products_seconds(tile.keys * flops, tile.keys * issue, device)
    work.sustained = sustained_rate(
        stage, tile.num_stages, resident * work.filled, products, device
    )


def _matrix_rows(tile: _Tile) -> float:
    """Rows of a query tile, as many as would take its time at the full rate.

    Swapped, they are n columns of an instruction of 64 x n x 16: n / 2 clocks, or what reading 64 x 16 and n x 16 values from shared memory
    takes at 128 bytes a clock, 16 + n / 4. Below 64 rows unswapped runs on mma.sync.
    """
    if tile.swap:
        return max(tile.rows, 32 + tile.rows / 2)
    return tile.rows if tile.rows >= 64 else tile.rows / MMA_SYNC_SHARE


def _add_index(case: LatentCase, device: Device, work: _Work) -> None:
    """index_topk: the scores, written and read again, and every level of the selection."""
    shape, tokens = case.shape, case.num_tokens
    plan = indexer_plan.plan(
        num_tokens=tokens, topk=shape.topk, compress_ratio=shape.ratio, max_seq_len=case.context
    )
    if not plan.query_numel:
        work.kernels += 1
        return
    pairs = float(case.batch * _visible(case).sum())
    # The columns of two tokens fill an instruction; one token has half of them.
    per_tile = 1 if case.phase == "decode" else 2
    columns = per_tile * max(16, tile_shapes.next_power_of_2(shape.num_heads))
    products = pairs / per_tile * columns
    work.flops += 2.0 * products * shape.head_dim
    work.loaded_bytes += pairs / per_tile * case.row_bytes + 8 * pairs
    widened = 64 * shape.head_dim * INDEX_WIDEN_CYCLES if case.fp8 else 0.0
    tiles = products / (64 * 64 * per_tile)
    work.issue += tiles * max(INDEX_INSTRUCTIONS[case.fp8][per_tile], widened)
    kept = sum(plan.num_blocks[:-1]) * shape.topk * tokens
    work.issue += (pairs + kept) * SELECT_CYCLES
    work.kernels += -(-tokens // max(1, plan.chunk)) * (1 + len(plan.num_blocks))


def _add_compress(case: LatentCase, device: Device, work: _Work) -> None:
    """compress: a program for each entry, which reads one tile of rows after another."""
    from quire.kernels.compressor import triton_impl as compress_triton

    programs = case.batch * max(1, case.q_lens[0] // case.shape.ratio)
    tile = compress_triton.BLOCK_TOKENS * case.shape.head_dim
    in_flight = 2 * 4 * tile * min(programs, 4 * device.num_sms)
    work.sustained = in_flight / device.latency
    work.kernels += 1 if case.phase == "decode" else 2


def _add_write(case: LatentCase, device: Device, work: _Work) -> None:
    work.kernels += 1
