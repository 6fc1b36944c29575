"""How decode work that grows with the context is divided on the device by stream-K, for attention
and the merge of its KV splits.

Work is counted in *units*: tiles of BLOCK_N keys of one query tile, which has one unit at least.
The units of all query tiles are numbered one after another, and each program takes an equal range
of them, wherever that begins and ends: all end together, whatever the batch. A query tile that a
border divides leaves partial results, of 64 heads as large as 128 keys are. So borders near the
edge of a query tile move there, by less than half of what a range has at least (``least``), since
it is longer by that; and if splitting would gain less than it costs, every border moves to the
nearest edge. With three query tiles, three programs and least = 2:

    query tile    0                   1     2
    units         9                   2     4            15 in all, 5 for a program
                  |-----------------| |---| |-------|
    unit          0         5         9 10  11      15
    borders                 5           10               10 moves to 11: tile 1 is shorter than
    programs      |---------|---------------|-------|    2 * least, so that no border divides it
                  0         1               2

Program 0 has units [0, 5), 1 has [5, 11), 2 has [11, 15). Query tile 0 has two splits, which the
merge combines; 1 and 2 have one each.

Every program derives this from the lengths of the batch, so that the host needs none of them and a
captured graph stays right. ``batch`` is the tuple (seq_lens, cu_seqlens_q, num_decodes,
decode_tokens, sliding_window, ratio) of kernel arguments, the last two None where queries see all
rows of the context.

What this costs, as instructions of a warp (sm_90, Triton 3.7.1): `work` is computed for CHUNK = 128
sequences at a time. Before its first copy a decode program does so four times: 95 for ``share``,
147 and 149 for the two ends of ``stretch``, 133 for ``locate``, of which 48 are barriers; a tile of 32
latents, for 64 heads, takes 808. The decode kernel of paged attention does so twice (`attention.split_kv`): 51
and 126, 14 of them barriers, beside 373 for a tile of 64 keys of 128 channels. So for up to 128
sequences the scans cost half a tile or two thirds of one, and as much again for each 128 more.

FlashInfer and FlashMLA plan once a step instead. The division depends on the window, the ratio, the
heads and the tile of a layer: a plan is another operator, a launch for each kind of layer, an
argument of three operators and of their merges, and one more thing that must fit the call. Since the
search in the prefix sums would remain (69, as in ``first_unit``), and operators must work without a
plan, every kernel would exist with either. No GPU has measured the scans yet; the instructions alone
do not pay for that.

Source: Stream-K (arXiv 2301.03598); FlashMLA's tile scheduler divides the batch's keys in a similar
way.
"""

import triton
import triton.language as tl

from .tiles import CHUNK


@triton.jit
def work(seq, batch, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr):
    """Query tiles of each sequence that are decode's to compute, and a bound of the units of each
    of them, at least 1."""
    seq_lens, cu_seqlens_q, num_decodes, decode_tokens, sliding_window, ratio = batch
    live = seq < num_decodes
    first = tl.load(cu_seqlens_q + seq, mask=live, other=0)
    q_len = tl.load(cu_seqlens_q + seq + 1, mask=live, other=0) - first
    # A sequence with more new tokens than that is the prefill kernel's.
    tiles = tl.where(q_len <= decode_tokens, (q_len + BLOCK_Q - 1) // BLOCK_Q, 0)
    keys = tl.maximum(tl.load(seq_lens + seq, mask=live, other=0), 0)
    if ratio is not None:
        keys = tl.minimum(keys, sliding_window - 1 + tl.minimum(q_len, BLOCK_Q)) + keys // ratio
    return tiles, tl.maximum((keys + BLOCK_N - 1) // BLOCK_N, 1)


@triton.jit
def share(batch, programs, least, cost, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr):
    """How many units each program gets.

    Args:
        batch: as in this file's docstring.
        programs: that divide the work.
        least: units of a program at least where splitting pays; a split has half of that at least.
        cost: units that a program could do instead of leaving partial results.

    Returns:
        (units of one program, ``least`` or, where splitting does not pay, a number that makes every
        border move to an edge, units in all).
    """
    total = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    longest = tl.zeros([], tl.int32)
    for start in range(0, batch[2], CHUNK):
        tiles, units = work(start + tl.arange(0, CHUNK), batch, BLOCK_Q, BLOCK_N)
        total += tl.sum(tiles * units, 0)
        count += tl.sum(tiles, 0)
        longest = tl.maximum(longest, tl.max(tl.where(tiles > 0, units, 0), 0))
    even = tl.maximum(tl.cdiv(total, programs), 1)
    # What the last program to end has to do if no query tile is split.
    unsplit = tl.minimum(tl.cdiv(count, programs) * longest, even + longest)
    split = tl.maximum(even, least)
    pays = split + cost < unsplit
    return tl.where(pays, split, even), tl.where(pays, least, 1 << 29), total


@triton.jit
def locate(position, batch, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr):
    """What lies at a unit.

    Returns:
        (sequence, query tile of the sequence, query tile among all, its first unit, its units);
        past the end the sequence is num_decodes.
    """
    seq = tl.zeros([], tl.int32)
    tiles_before = tl.zeros([], tl.int32)
    units_before = tl.zeros([], tl.int32)
    stop = tl.zeros([], tl.int32)
    for start in range(0, batch[2], CHUNK):
        some = start + tl.arange(0, CHUNK)
        tiles, units = work(some, batch, BLOCK_Q, BLOCK_N)
        stops = stop + tl.cumsum(tiles * units, 0)
        earlier = (stops <= position) & (some < batch[2])
        seq += tl.sum(earlier.to(tl.int32), 0)
        tiles_before += tl.sum(tl.where(earlier, tiles, 0), 0)
        units_before = tl.maximum(units_before, tl.max(tl.where(earlier, stops, 0), 0))
        stop += tl.sum(tiles * units, 0)
    _, units = work(seq, batch, BLOCK_Q, BLOCK_N)
    tile = (position - units_before) // units
    return seq, tile, tiles_before + tile, units_before + tile * units, units


@triton.jit
def first_unit(target, batch, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first unit of the query tiles of sequence ``target``."""
    before = tl.zeros([], tl.int32)
    for start in range(0, target, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        tiles, units = work(seq, batch, BLOCK_Q, BLOCK_N)
        before += tl.sum(tl.where(seq < target, tiles * units, 0), 0)
    return before


@triton.jit
def border(position, first, units, least):
    """Where the border of two programs lies that would divide the query tile [first, first + units)
    at ``position``."""
    inside = position - first
    stop = first + units
    near = tl.where(2 * inside < units, first, stop)
    snap = least // 2
    far = tl.where(inside < snap, first, tl.where(units - inside < snap, stop, position))
    return tl.where(units < 2 * least, near, far)


@triton.jit
def stretch(program, size, least, total, batch, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr):
    """The units [low, high) of a program, and how many query tiles lie in them, whole or in
    part."""
    low = tl.minimum(program * size, total)
    high = tl.minimum(low + size, total)
    _, _, low_tile, first, units = locate(low, batch, BLOCK_Q, BLOCK_N)
    low = border(low, first, units, least)
    low_tile += (low == first + units).to(tl.int32)
    _, _, high_tile, first, units = locate(high, batch, BLOCK_Q, BLOCK_N)
    high = border(high, first, units, least)
    high_tile += (high > first).to(tl.int32)
    return low, high, tl.maximum(high_tile - low_tile, 0)


@triton.jit
def programs_of(first, units, size, least):
    """The first program that has a part of the query tile [first, first + units), and how many have
    one, where splitting pays."""
    stop = first + units
    program = first // size
    begin = program + (border((program + 1) * size, first, units, least) == first).to(tl.int32)
    program = (stop - 1) // size
    at = program * size
    end = program - ((at > first) & (border(at, first, units, least) == stop)).to(tl.int32)
    return begin, end - begin + 1


@triton.jit
def next_tile(seq, tile, batch, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr):
    """The sequence and query tile behind a query tile; past the end the sequence is num_decodes."""
    tiles, _ = work(seq, batch, BLOCK_Q, BLOCK_N)
    tile += 1
    while (tile >= tiles) & (seq < batch[2]):
        seq += 1
        tile = 0
        tiles, _ = work(seq, batch, BLOCK_Q, BLOCK_N)
    return seq, tile
