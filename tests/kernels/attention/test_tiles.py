"""Launch choices: what the host plans, and that the device divides the work as the host assumed."""

import heapq
import math
import random
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels import workspace_numel
from quire.kernels.attention import split_kv, tiles
from quire.kernels.common import tile_shapes
from quire.kernels.common.arch import named
from quire.kernels.common.decode_plans import MIN_SPLIT_KEYS
from tests.support.helpers import DEVICE


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16, 17, 64, 160])
@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
def test_tile_heads_covers_the_group(group, block_m):
    tokens, heads, tiles = tile_shapes.tile_heads(group, block_m)
    assert tokens >= 1
    assert tokens * heads <= block_m
    assert heads * (tiles - 1) < group <= heads * tiles


@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"])  # fmt: skip
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("dtype_bytes, page_bytes", [(2, 2), (4, 4), (2, 1), (4, 1)])
def test_every_config_fits_shared_memory(name, head_dim, dtype_bytes, page_bytes):
    kib = {"hopper": 227, "blackwell": 227, "medium": 163, "small": 99}
    arch = named(name)
    limit = kib[arch.tiles] << 10
    assert arch.shared_memory == limit

    def select(rows):
        return tiles.select_config(
            head_dim, dtype_bytes, arch, quantized=page_bytes == 1, rows=rows
        )

    chosen = [select(None)]
    for rows in (16, 32, 64) if dtype_bytes == 2 else (16,):
        chosen.append(select(rows))
        most = 64
        if head_dim == 512 and dtype_bytes == 2:  # registers are short
            most = 16 if page_bytes == 1 and not arch.widens_e4m3 else 32
        assert chosen[-1].block_m == min(rows, most)
    for config in chosen:
        # Triton keeps num_stages - 1 tiles of K and V, and one more and the query where wgmma reads them from there. Tiles of new K/V
        # are of the query's dtype, whatever pages hold.
        keys = 2 * config.block_n * max(1, config.num_stages - 1)
        assert (keys + config.block_m) * head_dim * dtype_bytes <= limit


def plan(**changes):
    shape = dict(
        num_decodes=4, max_seqlen_q=1, num_heads=8, num_kv_heads=2, head_dim=64, num_sms=10
    )
    return tiles.plan_decode(**shape | changes)


def test_plan_decode():
    assert plan() == tiles.DecodePlan(16, 20, 24, 24 * 4 * 8 * 65)
    assert plan(max_seqlen_q=8).block_m == 32
    assert plan(max_seqlen_q=100).block_m == 64
    assert plan(max_seqlen_q=8, dtype_bytes=4).block_m == 16
    assert plan(num_heads=128, num_kv_heads=1, max_seqlen_q=1).target_splits == 20
    assert plan(num_sms=1, num_kv_heads=8).target_splits == 1


def test_plan_decode_knows_when_nothing_can_be_split():
    whole = tiles.DecodePlan(16, 20, 4, 0)
    assert plan(max_seq_len=256) == whole
    assert plan(max_seq_len=257) == plan()
    assert plan(sliding_window=256) == whole
    assert plan(sliding_window=257) == plan()
    assert plan(num_decodes=20, sliding_window=4096).workspace_numel == 0
    assert plan(num_decodes=20).workspace_numel > 0


@pytest.mark.parametrize("num_heads", [2, 6, 16, 64, 128])
@pytest.mark.parametrize("max_seqlen_q", [1, 4, 64])
def test_workspace_numel_bounds_every_plan(num_heads, max_seqlen_q):
    shape = dict(num_decodes=9, max_seqlen_q=max_seqlen_q, num_heads=num_heads, num_kv_heads=2)
    shape |= dict(head_dim=64, num_sms=132)
    bound = workspace_numel(**shape)
    for dtype_bytes in (2, 4):
        for limits in ({}, {"max_seq_len": 100}, {"sliding_window": 999}):
            assert (
                tiles.plan_decode(**shape, dtype_bytes=dtype_bytes, **limits).workspace_numel
                <= bound
            )


def test_workspace_numel_refuses():
    good = dict(num_decodes=1, max_seqlen_q=1, num_heads=3, num_kv_heads=3, head_dim=64, num_sms=1)
    with pytest.raises(ValueError, match=r"^num_sms: expected an int >= 1, got 0"):
        workspace_numel(**good | {"num_sms": 0})
    with pytest.raises(
        ValueError, match=r"^num_heads: expected a multiple of num_kv_heads 2, got 3"
    ):
        workspace_numel(**good | {"num_kv_heads": 2})


@triton.jit
def _division_kernel(
    seq_lens, cu, items, seqs, found, first, counts, splits, num_decodes, target_splits, window, num_items,
    num_seqs, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    for i in range(num_items):
        seq, split, count = split_kv.find_split(
            tl.load(items + i), seq_lens, cu, num_decodes, target_splits, window, NEW_KV, BLOCK_Q
        )
        tl.store(found + i, seq)
        tl.store(first + i, tl.load(items + i) - split)
        tl.store(counts + i, count)
    for i in range(num_seqs):
        start, count = split_kv.splits_of(
            tl.load(seqs + i), seq_lens, cu, num_decodes, target_splits, window, NEW_KV, BLOCK_Q
        )
        tl.store(splits + 2 * i, start)
        tl.store(splits + 2 * i + 1, count)


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("num_decodes", [1, 2, 128, 300])
def test_every_split_is_found_once(num_decodes, window):
    """Of many sequences those at the edges of the chunks that a program looks at together, and a few between."""
    rng = random.Random(num_decodes)
    q_lens = [rng.choice([0, 1, 1, 2, 5]) for _ in range(num_decodes)]
    lengths = [q + rng.choice([0, 1, 255, 300, 2000]) for q in q_lens]
    block_q, target = 4, 37
    keys = [
        n - q if window is None else min(n - q, window - 1)
        for n, q in zip(lengths, q_lens, strict=True)
    ]
    per_split = max(MIN_SPLIT_KEYS, -(-sum(keys) // target))
    expected = [
        0 if q == 0 or q > block_q else max(1, -(-n // per_split))
        for q, n in zip(q_lens, keys, strict=True)
    ]
    starts = [sum(expected[:s]) for s in range(num_decodes)]
    max_items, num_items = target + num_decodes, sum(expected)
    assert num_items <= max_items, "the host's bound"
    seqs = set(rng.sample(range(num_decodes), min(num_decodes, 8)))
    for edge in range(0, num_decodes + 129, 128):
        seqs |= set(range(edge - 2, edge + 2))
    seqs = sorted((seqs | {num_decodes - 1}) & set(range(num_decodes)))
    want = {starts[s] + n: (s, starts[s]) for s in seqs for n in range(expected[s])}
    beyond = sorted({num_items, max_items - 1} - {num_items - 1})
    items = [*want, *beyond]

    def device(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    found, first, counts = (device([-7] * len(items)) for _ in range(3))
    splits = device([-7] * 2 * len(seqs))
    _division_kernel[(1,)](
        device(lengths), device([0, *q_lens]).cumsum(0).int(), device(items), device(seqs), found, first, counts,
        splits, num_decodes, target, window, len(items), len(seqs), True, block_q,
    )  # fmt: skip
    assert splits.view(-1, 2).tolist() == [[starts[s], expected[s]] for s in seqs]
    pairs = list(zip(found.tolist(), first.tolist(), strict=True))
    assert pairs[: len(want)] == list(want.values())
    assert counts.tolist() == [expected[s] for s, _ in want.values()] + [0] * len(beyond)
    assert set(found[len(want) :].tolist()) == {num_decodes}


def splits_of(lengths, target_splits):
    """Keys of each split of decode sequences with so many paged keys, as the device divides them: whole tiles but for the last."""
    per_split = max(MIN_SPLIT_KEYS, -(-sum(lengths) // target_splits))
    found = []
    for n in lengths:
        whole, count = -(-n // BLOCK_N), max(1, -(-n // per_split))
        cuts = [min(n, whole * i // count * BLOCK_N) for i in range(count + 1)]
        found += [b - a for a, b in pairwise(cuts)]
    return found


def seconds_over_floor(splits, num_sms, saturating):
    """How much longer reading the splits takes than at full bandwidth, where ``saturating`` programs are enough to draw it.

    Programs start in order, two an SM at a time; those at work share the bandwidth, and none draws more than its part of it.
    """
    slots = 2 * num_sms
    reads, finish, elapsed = (
        0.0,
        [],
        0.0,
    )  # keys that a program at work since the start would have read
    for split in [*splits, *[math.inf] * slots]:
        if len(finish) == slots or split == math.inf:
            if not finish:
                break
            done = heapq.heappop(finish)
            elapsed += (done - reads) * max(len(finish) + 1, saturating)
            reads = done
        if split < math.inf:
            heapq.heappush(finish, reads + split)
    return elapsed / sum(splits)


BLOCK_N = 64
# Half of what an H200 needs under way (bench.static: 36 KiB an SM, 132 SMs) is two stages of a K and a V tile of head_dim 128 each.
SATURATING = 132 * (36 << 10) // (2 * 2 * BLOCK_N * 128 * 2)


@pytest.mark.parametrize(("num_kv_heads", "keys"), [(8, 4096), (4, 1024), (1, 32768)])
def test_no_batch_size_falls_off_a_cliff(num_kv_heads, keys):
    """At the end, fewer programs than draw the whole bandwidth are left for at most a split: that bounds what a division can lose."""
    shape = dict(num_heads=4 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=128, num_sms=132)
    rng = random.Random(keys)
    # Later steps repeat the earlier ones, with more programs and so less to lose.
    for batch in range(1, 513) if num_kv_heads == 1 else [*range(1, 140), *range(140, 513, 12)]:
        target = plan(num_decodes=batch, **shape).target_splits
        ragged = [[rng.randint(1, 2 * keys) for _ in range(batch)]] if batch % 8 == 1 else []
        for lengths in ([keys] * batch, *ragged):
            splits = [split for split in splits_of(lengths, target) for _ in range(num_kv_heads)]
            total = sum(splits)
            ratio = seconds_over_floor(splits, 132, SATURATING)
            assert 1 <= ratio <= 1 + SATURATING * max(splits) / total + 1e-9, batch
            if total >= SATURATING * 8 * 256:
                assert ratio <= 1.2, (batch, ratio)
