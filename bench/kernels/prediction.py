"""How long a kernel should take: a model simple enough to be wrong in ways that one can name, printed beside what was measured.

    predicted = max(memory, l2, tensor cores, issue, launch)

memory        bytes over the copy rate, or over what the copies of the programs' loops sustain where that is less
l2            bytes of the K/V tiles that all programs load over the rate of the L2 cache, or over the same: a tile serves the rows of one
              program only
tensor cores  operations of whole tiles, padding included, over the matmul rate; tiles of 16 or 32 rows run on mma.sync, which is slower
issue         one exponential and ``FP32_OPS`` fp32 operations for each element of the score tiles, over their issue rates; over e4m3 pages,
              where every program widens the codes that it loads, all instructions of the compiled loop instead, if its count is known
launch        a constant for each kernel

floor         max(bytes / copy rate, operations / matmul rate) without padding, limits and overheads: no kernel is faster.

A loop asks for a tile when the products of the tile ``num_stages - 1`` before it are done (`bench.static.ttgir`), and needs it a latency later:
``num_stages - 1`` tiles in (latency + products of a tile) are what its copies sustain. With two stages, copies and products take turns. It is
less where the last wave of programs does not fill the device.

The five overlap completely in this model but for that; a kernel that overlaps them less is slower than predicted. Source of the constants: beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from quire.kernels.attention.configs import Config, plan_decode, select_config
from quire.kernels.common.arch import Arch, named
from quire.kernels.common.decode_plans import MIN_SPLIT_KEYS
from quire.kernels.common.tile_shapes import MAX_REGISTERS, tile_heads

from ..cases.shapes import Case, Shape
from ..common.floors import visible_pairs

ITEM_BYTES = 2  # bf16 and fp16
SCALE_BYTES = 4  # of a quantised row
# mma.sync reaches 63 % of the rate of wgmma (arXiv 2402.13499, Hopper).
MMA_SYNC_SHARE = 0.63
# Scale, subtract, two maxima, sum, conversion, and the rescaling of the accumulator spread over a tile. Own estimate.
FP32_OPS = 8
# The scales of a quantised key and of its value.
SCALE_OPS = 2
# Cycles of an SM to widen one quantised value: 50 for the 512 of a key of V3.2 (FlashMLA's documentation of its sparse decode kernel).
WIDEN_CYCLES = 50 / 512
# Instructions that each warp issues for a tile of e4m3 keys, by head_dim and rows: `bench/results/static`, sm_90, pages of 128 tokens, a scale a
# row, to 1 %. Warps divide the tile, and four of them issue one instruction each a clock.
E4M3_INSTRUCTIONS = {
    (64, 16): 373, (128, 16): 506, (256, 16): 532, (512, 16): 722,
    (64, 32): 688, (128, 32): 775, (256, 32): 783, (512, 32): 1043,
    (64, 64): 616, (128, 64): 732, (256, 64): 968, (512, 64): 936,
    (64, 128): 784, (128, 128): 567, (256, 128): 589, (512, 128): 539,
}  # fmt: skip
FP32_PER_CLOCK, EXP_PER_CLOCK = (
    128,
    16,
)  # of an SM (CUDA programming guide, arithmetic instructions, 9.0)
REGISTERS = 65536  # of an SM


@dataclass(frozen=True)
class Device:
    """What the model knows of a GPU.

    arch: of the GPU. copy_bytes_per_s, matmul_flops_per_s: measured where there is a device.
    l2_bytes_per_s: reads. latency: seconds from a load to its data under load. launch: seconds of one kernel in a CUDA graph.
    """

    name: str
    arch: Arch
    num_sms: int
    copy_bytes_per_s: float
    matmul_flops_per_s: float
    clock_hz: float
    l2_bytes_per_s: float = 5.5e12
    latency: float = 0.9e-6
    launch: float = 2.0e-6


# Copy and matmul rates as measured on an H200 by others; L2 rate, latency and launch are estimates. A run on a GPU replaces the rates by its own.
H200 = Device("NVIDIA H200", named("sm_90"), 132, 4.3e12, 780e12, 1.755e9)
# Published peaks, which no program reaches: AMD's data sheets; instructions of a tile are those counted on sm_90, and nothing was measured.
MI300X = Device(
    "AMD Instinct MI300X, published peaks", named("gfx942"), 304, 5.3e12, 1307e12, 2.1e9, 17.2e12
)
MI355X = Device(
    "AMD Instinct MI355X, published peaks", named("gfx950"), 256, 8.0e12, 2517e12, 2.4e9, 17.2e12
)
DEVICES = {"h200": H200, "mi300x": MI300X, "mi355x": MI355X}


@dataclass(frozen=True)
class Prediction:
    """Seconds of each term, and the floor. ``bound`` names the largest term."""

    memory: float
    l2: float
    tensor_cores: float
    issue: float
    launch: float
    floor: float

    @property
    def terms(self) -> dict[str, float]:
        """The five terms by name."""
        names = ("memory", "l2", "tensor_cores", "issue", "launch")
        return {name: getattr(self, name) for name in names}

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return max(self.terms.values())

    @property
    def bound(self) -> str:
        """Name of the term that decides."""
        return max(self.terms, key=self.terms.__getitem__)


@dataclass
class _Work:
    """Sums over the kernels of a case: device memory traffic, tile loads and operations, cycles of SMs to issue the rest; and what the copies
    of its loops sustain, bytes per second."""

    partial_bytes: float = 0.0
    loaded_bytes: float = 0.0
    wgmma_flops: float = 0.0
    mma_sync_flops: float = 0.0
    issue_cycles: float = 0.0
    kernels: int = 0
    sustained: float = math.inf


def case_bytes(case: Case) -> float:
    """Bytes that must move: visible keys and values read once, queries read, results written."""
    rows = sum(case.q_lens) * case.shape.num_heads * case.shape.head_dim
    return case.cache_bytes + 2 * rows * ITEM_BYTES


def case_flops(case: Case) -> float:
    """Operations of visible pairs: two products of two operations, for each pair, head and channel."""
    pairs = visible_pairs(np.array(case.q_lens), np.array(case.seq_lens), case.shape.sliding_window)
    return 4.0 * pairs * case.shape.num_heads * case.shape.head_dim


def predict(case: Case, device: Device) -> Prediction:
    """The prediction for one case on one device, for this repository's kernels with all keys in pages."""
    work = _Work()
    if case.num_decodes:
        _add_decode(case, device, work)
    if case.num_decodes < case.batch:
        _add_prefill(case, device, work)
    clocks = device.num_sms * device.clock_hz
    flops = case_flops(case)
    return Prediction(
        memory=(case_bytes(case) + work.partial_bytes)
        / min(device.copy_bytes_per_s, work.sustained),
        l2=work.loaded_bytes / min(device.l2_bytes_per_s, work.sustained),
        tensor_cores=work.wgmma_flops / device.matmul_flops_per_s
        + work.mma_sync_flops / (device.matmul_flops_per_s * MMA_SYNC_SHARE),
        issue=work.issue_cycles / clocks,
        launch=work.kernels * device.launch,
        floor=max(case_bytes(case) / device.copy_bytes_per_s, flops / device.matmul_flops_per_s),
    )


def _add_decode(case: Case, device: Device, work: _Work) -> None:
    shape = case.shape
    window = shape.sliding_window
    plan = plan_decode(
        num_decodes=case.num_decodes,
        max_seqlen_q=1,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_sms=device.num_sms,
        max_seq_len=max(case.seq_lens),
        sliding_window=window,
    )
    config = _config(case, "decode", device, plan.block_m)
    _, _, head_tiles = tile_heads(shape.num_heads // shape.num_kv_heads, config.block_m)
    keys = [n if window is None else min(n, window) for n in case.seq_lens[: case.num_decodes]]
    split_keys = max(MIN_SPLIT_KEYS, -(-sum(keys) // plan.target_items))
    splits = [-(-n // split_keys) if plan.workspace_numel else 1 for n in keys]
    partials = sum(count for count in splits if count > 1)
    programs = sum(splits) * shape.num_kv_heads * head_tiles
    # fp32 partial rows are written, and read by the merge.
    work.partial_bytes += 2 * 4 * partials * shape.num_heads * (shape.head_dim + 1)
    tile_rows = config.block_m * shape.num_kv_heads * head_tiles * sum(keys)
    _add_tiles(work, config, tile_rows, shape)
    work.kernels += 2 if plan.workspace_numel else 1
    work.sustained = copy_rate(config, shape, programs, device)


def _add_prefill(case: Case, device: Device, work: _Work) -> None:
    shape = case.shape
    config = _config(case, "prefill", device)
    block_q, _, head_tiles = tile_heads(shape.num_heads // shape.num_kv_heads, config.block_m)
    programs = 0
    for q_len, seq_len in list(zip(case.q_lens, case.seq_lens, strict=True))[case.num_decodes :]:
        first = np.arange(0, q_len, block_q) + seq_len - q_len
        last = np.minimum(first + block_q, seq_len)
        low = 0 if shape.sliding_window is None else np.maximum(0, first - shape.sliding_window + 1)
        tiles = -(-last // config.block_n) - low // config.block_n
        heads = shape.num_kv_heads * head_tiles * config.value_parts
        programs += len(first) * heads
        tile_rows = config.block_m * config.block_n * float(tiles.sum()) * heads
        _add_tiles(work, config, tile_rows, shape)
    work.kernels += 1
    if not case.num_decodes:
        work.sustained = copy_rate(config, shape, programs, device)


def page_bytes(shape: Shape) -> int:
    """Bytes of one element in the pages."""
    return 1 if shape.fp8 else ITEM_BYTES


def _config(case: Case, phase: str, device: Device, rows: int = 16) -> Config:
    """The tile shape that the kernel of a phase has."""
    shape = case.shape
    return select_config(
        shape.head_dim,
        ITEM_BYTES,
        phase,
        case.block_size,
        device.arch,
        rows=rows,
        page_bytes=page_bytes(shape),
    )


def _add_tiles(work: _Work, config: Config, tile_rows: float, shape: Shape) -> None:
    """tile_rows: elements of all score tiles, those of each of ``value_parts`` programs."""
    # Of a key and its values, for one program.
    channels = shape.head_dim + shape.head_dim / config.value_parts
    keys = tile_rows / config.block_m
    work.loaded_bytes += keys * channels * page_bytes(shape)
    fp32_ops = FP32_OPS
    if shape.fp8:
        work.loaded_bytes += keys * 2 * SCALE_BYTES
        fp32_ops += SCALE_OPS
    instructions = E4M3_INSTRUCTIONS.get((shape.head_dim, config.block_m)) if shape.fp8 else None
    if instructions is not None:
        work.issue_cycles += keys / config.block_n * instructions * config.num_warps / 4
    else:
        work.issue_cycles += tile_rows * max(1 / EXP_PER_CLOCK, fp32_ops / FP32_PER_CLOCK)
        if shape.fp8:
            work.issue_cycles += keys * channels * WIDEN_CYCLES
    # wgmma takes 64 rows at least, by a group of four warps.
    if config.block_m >= 64:
        work.wgmma_flops += 2.0 * tile_rows * channels
    else:
        work.mma_sync_flops += 2.0 * tile_rows * channels


def copy_rate(config: Config, shape: Shape, programs: int, device: Device) -> float:
    """Bytes of K/V tiles per second that the loops of ``programs`` programs can ask for."""
    tile = _Work()
    _add_tiles(tile, config, config.block_m * config.block_n, shape)
    elements = config.block_n * (shape.head_dim + shape.head_dim // config.value_parts)
    stage = elements * page_bytes(shape)
    shared = config.num_stages * stage + config.block_m * shape.head_dim * ITEM_BYTES
    if shape.fp8 and config.block_m >= 64:
        shared += elements * ITEM_BYTES  # wgmma reads the widened tile from there
    resident = resident_programs(shared, config.num_warps, device) * device.num_sms
    at_work = resident * filled_share(programs, resident)
    flops = tile.wgmma_flops + tile.mma_sync_flops / MMA_SYNC_SHARE
    seconds = products_seconds(flops, tile.issue_cycles, device)
    return sustained_rate(stage, config.num_stages, at_work, seconds, device)


def products_seconds(flops: float, issue_cycles: float, device: Device) -> float:
    """Seconds of an SM from a tile's arrival until its place is free.

    Args:
        flops: of its products, as many as would take their time at the full rate.
        issue_cycles: of the SM, for all else.
        device: its rates are shared by its SMs.
    """
    return max(flops * device.num_sms / device.matmul_flops_per_s, issue_cycles / device.clock_hz)


def sustained_rate(
    tile_bytes: float, num_stages: int, programs: float, products: float, device: Device
) -> float:
    """Bytes per second that the copies of ``programs`` loops at work sustain.

    Args:
        tile_bytes: of a tile.
        num_stages: of the loops.
        programs: at work at once.
        products: seconds of ``products_seconds``.
        device: its latency counts.
    """
    return tile_bytes * (num_stages - 1) * programs / (device.latency + products)


def resident_programs(shared: int, num_warps: int, device: Device) -> int:
    """Programs of ``shared`` bytes of shared memory that an SM holds; at least 1."""
    most = device.arch.shared_memory
    return max(1, min(most // shared, REGISTERS // (MAX_REGISTERS * 32 * num_warps)))


def filled_share(programs: int, resident: int) -> float:
    """How full the device is, which holds ``resident`` programs at once.

    More come in waves, of which the last may be thin.
    """
    waves = -(-programs // resident)
    return programs / (waves * resident)
