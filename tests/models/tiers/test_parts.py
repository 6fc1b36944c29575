"""What entries of real models take in host memory, and copies of parts of pages."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from quire.kernels import E4m3Rows
from quire.kvcore import GroupSpec
from quire.kvcore.tier import Copies
from quire.models.config.named import CONFIGS
from quire.models.deepseek_v4.cache_plan import CSA, CacheFormat, plan_cache
from quire.models.deepseek_v4.config import CONFIGS as V4_CONFIGS
from quire.models.layers.kv_cache import E4M3, PageTensors, cache_groups
from quire.models.tiers.copier import PageCopier
from quire.models.tiers.host_pages import HostPages
from quire.models.tiers.parts import page_parts
from tests.models.tiers.test_copier import job

CPU = torch.device("cpu")
REAL = [name for name in CONFIGS if "tiny" not in name and "small" not in name]
V4 = ["deepseek-v4-flash", "deepseek-v4-pro"]
MOST = 0.05  # of the bytes that hold rows


def kv_pool(name, dtype):
    """(groups, tensors, filled, bytes of rows in a page of each group) of a model of K/V, from its layers' shapes."""
    config = CONFIGS[name]
    groups, placement = cache_groups(config, dtype)
    pool = PageTensors(config, groups, placement, num_pages=2, dtype=dtype, device=CPU)
    rows = [0] * len(groups)
    for layer in range(config.num_kv_owners):
        shape, group = config.attention(layer), placement[layer].group
        heads = 2 * shape.num_kv_heads * groups[group].block_size
        scales = 4 * heads if dtype == E4M3 else 0
        rows[group] += heads * shape.head_dim * dtype.itemsize + scales
    return groups, pool.tensors, pool.filled, rows


def v4_pool(name, fp8, drafters):
    """The same of a DeepSeek-V4, whose page is one row."""
    config = V4_CONFIGS[name]
    plan = plan_cache(config, CacheFormat(torch.bfloat16, fp8), drafters=drafters)
    kinds = config.all_layer_types if drafters else config.layer_types

    def latents(
        n,
    ):  # 448 values of e4m3 and 64 of bf16, 7 scales of a byte and one unused: 584, in blocks of 576
        return -(-n * 584 // 576) * 576 if fp8 else n * 512 * 2

    def keys(n):  # 128 values of e4m3 and a scale
        return -(-n * 132 // 576) * 576 if fp8 else n * 128 * 2

    csa = kinds.count(CSA)
    hca = sum(config.compress_ratio(i) == 128 for i in range(len(kinds)))
    first = math.ceil(len(kinds) / 2)
    rows = [
        csa * (latents(64) + keys(64)) + hca * latents(2),
        first * latents(64),
        (len(kinds) - first) * latents(64),
        csa * 4 * 2 * 4 * (512 + 128),  # fp32 kv and gate of four tokens, compressor and indexer
    ]
    tensors = [torch.empty(2, plan.groups[0].page_bytes, dtype=torch.uint8)]
    return plan.groups, tensors, [(1, size) for size in plan.filled], rows


POOLS = {f"{name} {dtype}".replace("torch.", ""): (kv_pool, name, dtype) for name in REAL for dtype in (torch.bfloat16, E4M3)}  # fmt: skip
POOLS |= {
    f"{name} {'fp8' if fp8 else 'bf16'} {'drafts' if drafters else ''}": (v4_pool, name, fp8, drafters)
    for name in V4 for fp8 in (False, True) for drafters in (False, True)
}  # fmt: skip


@pytest.mark.parametrize("pool", POOLS)
def test_entries_take_what_they_hold(pool):
    """Segments and resume points, each, to 5 %."""
    make, *arguments = POOLS[pool]
    groups, tensors, filled, rows = make(*arguments)
    assert [t * b for t, b in filled] == rows
    expect_little_waste(groups, tensors, filled, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", REAL)
def test_entries_in_e4m3_take_what_they_hold(name, dtype):
    """A byte of each element, and a scale of each row: of a head, or of what all sizes of heads are multiples of."""
    config = CONFIGS[name]
    groups, tensors, filled, rows = kv_pool(name, dtype)
    heads = [config.attention(layer).head_dim for layer in range(config.num_kv_owners)]
    dim = math.gcd(*heads)
    elements = [size // dtype.itemsize for size in rows]
    kept = [n + 4 * n // dim for n in elements]
    form = E4m3Rows(dtype, dim)
    parts = expect_little_waste(groups, tensors, filled, kept, e4m3_rows=form)
    assert parts.filled == tuple(kept)


def expect_little_waste(groups, tensors, filled, rows, **options):
    """That segments and resume points take at most 5 % more than `rows`, bytes of a page of each group; the parts."""
    segment_tokens = math.lcm(*(g.block_size for g in groups))
    parts = page_parts(groups, tensors, filled, **options)
    for kind in ("dense", "window"):
        held = taken = 0
        for g, size, count in zip(groups, rows, parts.counts, strict=True):
            if g.kind == kind:
                blocks = segment_tokens // g.block_size
                if kind == "window":
                    blocks = math.ceil((g.sliding_window - 1) / g.block_size)
                held += blocks * size
                taken += blocks * count * parts.pages.num_bytes
        assert held <= taken <= (1 + MOST) * held, (kind, parts.counts, taken / held)
    assert max(parts.counts) <= 32
    return parts


MIXES = {
    "tensors": ((4, 64), [(4, 64), (3, 64), (2, 64)]),
    "bytes": ((1, 256), [(1, 256), (1, 144), (1, 48)]),
    "whole": ((3, 64), [(3, 64), (3, 64), (3, 64)]),
    "bytes of tensors": ((2, 160), [(2, 160), (2, 80), (2, 160)]),
}


@pytest.mark.parametrize("name", MIXES)
def test_parts_come_back_as_they_were(name):
    """All rows of a page, over the host, into another page; and nothing else is touched."""
    (num_tensors, page_bytes), filled = MIXES[name]
    groups = [GroupSpec("full", "dense", 16, page_bytes), *(GroupSpec(f"w{i}", "window", 16, page_bytes, 17) for i in range(2))]  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    tensors = [
        torch.randint(256, (7, page_bytes), generator=generator, dtype=torch.uint8)
        for _ in range(num_tensors)
    ]
    parts = page_parts(groups, tensors, filled)
    assert (max(parts.counts) > 1) == (name != "whole")
    assert parts.unused[0] <= 0.04 and parts.unused[1] <= 0.04
    rows = 2 * sum(parts.counts) + 1
    copier = PageCopier(parts.pages, HostPages(rows, parts.pages.num_bytes, CPU))
    before, order = [t.clone() for t in tensors], np.random.default_rng(2).permutation

    def run(kind, copies):
        copier.start(job(kind, copies))
        [ended] = copier.wait()
        assert ended.error is None

    pages = {0: (1, 4), 1: (2, 5), 2: (3, 6)}  # of each group: from where to where
    at = {}  # rows of the host, of each part
    numbers = order(np.arange(1, rows)).tolist()
    for group, n in enumerate(parts.counts):
        at[group] = np.array([numbers.pop() for _ in range(n)], np.int32)

    def some(group, sources, targets):
        own = np.arange(len(sources), dtype=np.int32)
        mixed = order(len(sources))
        return Copies(group, sources[mixed], targets[mixed], own[mixed])

    for group, rows_ in at.items():
        run("store", some(group, np.full(len(rows_), pages[group][0], np.int32), rows_))
    for tensor in tensors:
        tensor[1:4] = 0
    for group, rows_ in at.items():
        run("load", some(group, rows_, np.full(len(rows_), pages[group][1], np.int32)))
    for group, (num, size) in enumerate(filled):
        source, target = pages[group]
        for t in range(num):
            assert tensors[t][target, :size].equal(before[t][source, :size])
    for tensor, old in zip(tensors, before, strict=True):
        assert tensor[0].equal(old[0]) and not tensor[1:4].any()


def test_views_of_a_pool_lie_in_what_is_filled():
    """Each layer's rows of DeepSeek-V4 are in the part of a page that tiers keep."""
    from quire.models.deepseek_v4.cache import V4PagePool

    for drafters in (False, True):
        config = V4_CONFIGS["deepseek-v4-tiny"]
        plan = plan_cache(config, CacheFormat(torch.float32), drafters=drafters)
        pool = V4PagePool(config, plan, num_pages=2, max_requests=1)
        start, ends = pool.data.data_ptr(), [0] * len(plan.groups)

        def end(tensor, start=start):
            last = tensor[0].contiguous().numel() * tensor.element_size()
            return tensor.data_ptr() - start + last

        names = [g.name for g in plan.groups]
        for layer in pool.layers:
            views = [(layer.window_group, layer.window.data)]
            for one in (layer.compressed, layer.index_keys):
                if one is not None:
                    views.append((names.index("compressed"), one.pages.data))
                    if one.overlap is not None:
                        views.append((names.index("overlap"), one.overlap))
            for group, view in views:
                ends[group] = max(ends[group], end(view))
        assert ends == [size for _, size in pool.filled]
