"""The division of decode on the device: every split is found once, and whoever merges knows whose parts are whose."""

import random

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.common import split_kv
from quire.kernels.common.split_kv import MIN_SPLIT_KEYS, DecodePlan, plan_decode
from tests.support.helpers import DEVICE

BLOCK_Q = 2


@triton.jit
def _division_kernel(
    seq_lens, cu, items, seqs, found, splits, num_decodes, decode_tokens, target_splits, window, ratio,
    most_entries, num_items, num_seqs, NEW_KV: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    batch = split_kv.DecodeBatch(
        seq_lens, cu, num_decodes, decode_tokens, target_splits, window, ratio, most_entries,
    )  # fmt: skip
    for i in range(num_items):
        seq, tile, split, count, part = split_kv.find_split(
            tl.load(items + i), batch, True, NEW_KV, BLOCK_Q
        )
        tl.store(found + 5 * i, seq)
        tl.store(found + 5 * i + 1, tile)
        tl.store(found + 5 * i + 2, split)
        tl.store(found + 5 * i + 3, count)
        tl.store(found + 5 * i + 4, part)
    for i in range(num_seqs):
        first, count = split_kv.splits_of(tl.load(seqs + i), batch, NEW_KV, BLOCK_Q)
        tl.store(splits + 2 * i, first)
        tl.store(splits + 2 * i + 1, count)


@pytest.mark.parametrize("decode_tokens", [2, 4], ids=["one-tile", "two-tiles"])
@pytest.mark.parametrize("window, ratio", [(None, None), (700, None), (50, 4)])
@pytest.mark.parametrize("num_decodes", [1, 2, 128, 300])
def test_every_split_is_found_once(num_decodes, window, ratio, decode_tokens):
    """Of many sequences those at the edges of the chunks that a program looks at together, and a few between."""
    rng, most_entries, target = random.Random(num_decodes), 400, 37
    q_lens = [rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(num_decodes)]
    lengths = [q + rng.choice([0, 1, 255, 300, 2000]) for q in q_lens]
    keys, tiles = [], []
    for n, q in zip(lengths, q_lens, strict=True):
        raw = n - q if window is None else min(n - q, window - 1)
        keys.append(raw + (0 if ratio is None else min(n // ratio, most_entries)))
        tiles.append(-(-q // BLOCK_Q) if q <= decode_tokens else 0)
    total = sum(n * count for n, count in zip(keys, tiles, strict=True))
    per_split = max(MIN_SPLIT_KEYS // 2, -(-total // target))
    splits = [max(1, n // per_split) for n in keys]
    want, starts, parts, items = {}, [], 0, 0
    for s, (count, num_splits) in enumerate(zip(tiles, splits, strict=True)):
        starts.append(parts)
        for tile in range(count):
            for split in range(num_splits):
                want[items] = [s, tile, split, num_splits, parts]
                items += 1
                parts += num_splits > 1
    assert parts <= target, "the workspace holds them"
    assert items <= target + sum(tiles), "the host's bound"
    seqs = set(rng.sample(range(num_decodes), min(num_decodes, 8)))
    for edge in range(0, num_decodes + 129, 128):
        seqs |= set(range(edge - 2, edge + 2))
    seqs = sorted((seqs | {num_decodes - 1}) & set(range(num_decodes)))
    asked = [item for item, (s, *_) in want.items() if s in seqs] + [items, items + target]

    def device(values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    found, firsts = device([[-7] * 5] * len(asked)), device([[-7] * 2] * len(seqs))
    _division_kernel[(1,)](
        device(lengths), device([0, *q_lens]).cumsum(0).int(), device(asked), device(seqs), found, firsts,
        num_decodes, decode_tokens, target, window, ratio, most_entries, len(asked), len(seqs), True, BLOCK_Q,
    )  # fmt: skip
    assert found[-2:, 0].tolist() == [num_decodes] * 2
    for item, row in zip(asked[:-2], found[:-2].tolist(), strict=True):
        # Where nothing is split, no part is written.
        assert row[:4] == want[item][:4] and (row[3] == 1 or row[4] == want[item][4])
    for s, (first, count) in zip(seqs, firsts.tolist(), strict=True):
        assert count == splits[s] and (count == 1 or first == starts[s])


def plan(**changes):
    sizes = dict(
        num_decodes=4, max_seqlen_q=1, block_q=4, target_splits=20, row_numel=10, max_keys=None,
        bounded=False,
    )  # fmt: skip
    return plan_decode(**sizes | changes)


def test_plan_decode():
    """Enough query tiles are not split if all have about as many keys; else one of them may be long."""
    whole = DecodePlan(4, 20, 4, 0)
    assert plan() == plan(max_keys=256) == DecodePlan(4, 20, 24, 20 * 4 * 10)
    assert plan(max_keys=255) == whole
    assert (
        plan(num_decodes=20).workspace_numel
        == plan(num_decodes=19, bounded=True).workspace_numel
        == 800
    )
    assert (
        plan(num_decodes=20, bounded=True).workspace_numel
        == plan(target_splits=1).workspace_numel
        == 0
    )
    assert plan(max_seqlen_q=9) == DecodePlan(9, 20, 32, 800)
