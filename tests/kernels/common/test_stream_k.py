"""How decode work is divided: every unit is one program's, whoever merges knows whose, and no batch size falls off a cliff."""

import heapq
import random

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.common import stream_k
from quire.kernels.common.arch import named
from quire.kernels.common.decode_plans import LAUNCH_COST, MIN_SPLIT_KEYS, SPLIT_COST
from quire.kernels.compressed import configs as compressed_configs
from quire.kernels.mla import configs as mla_configs
from tests.support.helpers import DEVICE

BLOCK_Q, BLOCK_N = 2, 64


@triton.jit
def _stretches_kernel(
    seq_lens, cu, stretches, splits, found, positions, num_decodes, decode_tokens, window, ratio, programs, num_found,
    LEAST: tl.constexpr, COST: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    batch = (seq_lens, cu, num_decodes, decode_tokens, window, ratio)
    size, least, total = stream_k.share(batch, programs, LEAST, COST, BLOCK_Q, BLOCK_N)
    for program in range(programs):
        low, high, count = stream_k.stretch(program, size, least, total, batch, BLOCK_Q, BLOCK_N)
        tl.store(stretches + 3 * program, low)
        tl.store(stretches + 3 * program + 1, high)
        tl.store(stretches + 3 * program + 2, count)
    for seq in range(num_decodes):
        _, units = stream_k.work(seq, batch, BLOCK_Q, BLOCK_N)
        first = stream_k.first_unit(seq, batch, BLOCK_Q, BLOCK_N)
        begin, count = stream_k.programs_of(first, units, size, least)
        tl.store(splits + 3 * seq, first)
        tl.store(splits + 3 * seq + 1, begin)
        tl.store(splits + 3 * seq + 2, count)
    for i in range(num_found):
        seq, tile, number, first, units = stream_k.locate(
            tl.load(positions + i), batch, BLOCK_Q, BLOCK_N
        )
        tl.store(found + 5 * i, seq)
        tl.store(found + 5 * i + 1, tile)
        tl.store(found + 5 * i + 2, number)
        tl.store(found + 5 * i + 3, first)
        tl.store(found + 5 * i + 4, units)


def query_tiles(lengths, q_lens, decode_tokens, window, ratio):
    """(sequence, query tile, first unit, units) of every query tile of decode, as the kernels should see them."""
    tiles, first = [], 0
    for s, (n, q_len) in enumerate(zip(lengths, q_lens, strict=True)):
        keys = n if ratio is None else min(n, window - 1 + min(q_len, BLOCK_Q)) + n // ratio
        units = max(1, -(-keys // BLOCK_N))
        for tile in range(-(-q_len // BLOCK_Q) if q_len <= decode_tokens else 0):
            tiles.append((s, tile, first, units))
            first += units
    return tiles, first


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_decodes, ratio, programs, equal",
    [(1, None, 1, False), (1, None, 40, False), (5, 4, 7, False), (130, 4, 60, False), (40, None, 20, True), (21, None, 20, True)],
)  # fmt: skip
def test_programs_take_every_unit_once(num_decodes, ratio, programs, equal):
    """Of lengths up to 9,000 keys, and none; or of equal ones, which are cut only where programs would have to wait for the last."""
    rng = random.Random(programs + num_decodes)
    q_lens = [rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(num_decodes - 1)] + [1]
    lengths = [q + rng.choice([0, 1, 60, 500, 9000]) for q in q_lens[:-1]] + [9001]
    if equal:
        q_lens, lengths = [1] * num_decodes, [9001] * num_decodes
    divided = programs > 1 and num_decodes % programs > 0
    decode_tokens, window, least, cost = 3, 128, 8, 4
    tiles, total = query_tiles(lengths, q_lens, decode_tokens, window, ratio)
    positions = [*sorted(rng.sample(range(total), min(total, 12))), total]

    def device(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    stretches, splits = device([[-7] * 3] * programs), device([[-7] * 3] * num_decodes)
    found = device([[-7] * 5] * len(positions))
    _stretches_kernel[(1,)](
        device(lengths), device([0, *q_lens]).cumsum(0).int(), stretches, splits, found, device(positions), num_decodes, decode_tokens,
        None if ratio is None else window, ratio, programs, len(positions), least, cost, BLOCK_Q, BLOCK_N,
    )  # fmt: skip
    for position, got in zip(positions[:-1], found.tolist(), strict=False):
        number = next(i for i, (*_, first, units) in enumerate(tiles) if position < first + units)
        seq, tile, first, units = tiles[number]
        assert got == [seq, tile, number, first, units]
    assert found[-1, 0] == num_decodes
    # The stretches follow each other, and end at edges of query tiles or a KV split away from them.
    bounds = [0]
    cut: dict[int, list[int]] = {}
    for program, (low, high, count) in enumerate(stretches.tolist()):
        assert low == bounds[-1] and high >= low
        bounds.append(high)
        inside = [i for i, (*_, first, units) in enumerate(tiles) if first < high and first + units > low]  # fmt: skip
        assert count == (len(inside) if high > low else 0)
        for i in inside if high > low else []:
            cut.setdefault(i, []).append(program)
            *_, first, units = tiles[i]
            for edge in (low, high):
                if first < edge < first + units:
                    assert min(edge - first, first + units - edge) >= least // 2
    assert bounds[-1] == total and list(cut) == list(range(len(tiles)))
    size, even = max(high - low for low, high, _ in stretches.tolist()), -(-total // programs)
    assert divided == any(len(owners) > 1 for owners in cut.values())
    assert size <= max(even, least) + (least if divided else max(t[3] for t in tiles))
    for i, (seq, tile, first, _) in enumerate(tiles):
        if divided and tile == 0:
            assert splits[seq].tolist() == [first, cut[i][0], len(cut[i])]


def makespan(items, places):
    """When the last item ends, of items that begin in order where a place is free."""
    ends = [0.0] * places
    for item in items:
        heapq.heapreplace(ends, ends[0] + item)
    return max(ends)


@pytest.mark.parametrize("num_heads, max_keys", [(8, 640), (64, 640), (64, 384), (128, 1152)])
def test_no_batch_size_of_bounded_keys_falls_off_a_cliff(num_heads, max_keys):
    """One query tile more never costs much more than its share, and cutting is never slower than not cutting, as the plan counts costs."""
    rows, head_tiles = min(64, max(16, num_heads)), max(1, num_heads // 64)
    places = 132 // head_tiles
    before = 0.0
    for batch in range(1, 513):
        plan = compressed_configs.plan_decode(
            num_decodes=batch, seq_tiles=1, block_q=1, block_m=rows, num_heads=num_heads, head_tiles=head_tiles,
            head_dim=512, num_sms=132, max_keys=max_keys, bounded=True,
        )  # fmt: skip
        assert plan.programs == 0 and (plan.num_splits == 1 or plan.num_unsplit % places == 0)
        cut = batch - plan.num_unsplit
        leave = SPLIT_COST * rows if plan.num_splits > 1 else 0
        split_keys = max_keys / plan.num_splits + leave
        assert (
            plan.num_splits == 1 or max_keys // plan.num_splits >= compressed_configs.MIN_SPLIT_KEYS
        )
        items = [max_keys] * plan.num_unsplit + [split_keys] * cut * plan.num_splits
        merge = LAUNCH_COST + leave * cut * plan.num_splits / places if leave else 0
        needed = makespan(items, places) + merge
        assert needed <= -(-batch // places) * max_keys
        # A tile more costs a KV split of the least keys at most, and what its partial results and the merge do.
        least = compressed_configs.MIN_SPLIT_KEYS + SPLIT_COST * rows
        if batch > 1:
            assert needed - before <= 1.1 * (least + LAUNCH_COST), batch
        before = needed


@triton.jit
def _shares_kernel(
    seq_lens, cu, batches, shares, num_batches, programs, LEAST: tl.constexpr, COST: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    for i in range(num_batches):
        batch = (seq_lens, cu, tl.load(batches + i), 1, None, None)
        size, least, _ = stream_k.share(batch, programs, LEAST, COST, 1, BLOCK_N)
        tl.store(shares + 2 * i, size)
        tl.store(shares + 2 * i + 1, least)


def longest_stretch(count, units, size, least, leave):
    """Units of the longest stretch of ``count`` query tiles of as many units each, with those that partial results cost."""

    def border(position):
        first = position // units * units
        inside = position - first
        if units < 2 * least:
            return first if 2 * inside < units else first + units
        if inside < least // 2:
            return first
        return first + units if units - inside < least // 2 else position

    total, longest, low = count * units, 0, 0
    for n in range(1, -(-total // size) + 1):
        high = border(min(n * size, total))
        left = (low % units > 0) + (high % units > 0 and high - high % units >= low)
        longest, low = max(longest, high - low + leave * left), high
    assert low == total
    return longest


def fair_share(count, units, programs, least, cost):
    """Units of a stretch and the least that one has, for ``count`` query tiles of as many units each."""
    even = max(-(-count * units // programs), 1)
    uncut = min(-(-count // programs) * units, even + units)
    cut = max(even, least)
    return (cut, least) if cut + cost < uncut else (even, 1 << 29)


@pytest.mark.parametrize("keys", [1024, 4096, 131072])
@pytest.mark.parametrize("num_heads", [16, 32, 64, 128])
def test_no_batch_size_of_latents_falls_off_a_cliff(num_heads, keys):
    """All programs begin at once, and end nearly so, at any batch size. What the device makes of one is looked at where waves of whole or equal
    KV splits would be almost empty."""
    rows = mla_configs.decode_rows(num_heads=num_heads, max_seqlen_q=1, arch=named("sm_90"))
    config = mla_configs.select_config(2, rows, named("sm_90"))
    plan = mla_configs.plan_decode(config=config, num_heads=num_heads, head_dim_v=512, num_sms=132)
    programs, block_n = plan.programs, config.block_n
    assert programs == {16: 264, 32: 132, 64: 132, 128: 66}[num_heads]
    least, leave = MIN_SPLIT_KEYS // block_n, SPLIT_COST * config.block_m // block_n
    edges = [programs // 3, programs // 2, 2 * programs // 3, programs, 3 * programs // 2]
    batches = [1, 7, *(edge + more for edge in edges for more in (-1, 0, 1, 2))]

    def device(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    shares = device([[-7] * 2] * len(batches))
    _shares_kernel[(1,)](
        device([keys] * max(batches)), device(range(max(batches) + 1)), device(batches), shares,
        len(batches), programs, least, 2 * leave, block_n,
    )  # fmt: skip
    units = keys // block_n
    expected = [fair_share(batch, units, programs, least, 2 * leave) for batch in batches]
    assert shares.tolist() == [list(share) for share in expected]
    for batch in range(1, 513):
        size, chosen = fair_share(batch, units, programs, least, 2 * leave)
        longest = longest_stretch(batch, units, size, chosen, leave)
        assert longest <= batch * units / programs + least + 2 * leave + 1, batch
