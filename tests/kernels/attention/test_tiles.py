"""Launch choices of attention: tiles fit shared memory, plans and workspaces."""

import pytest

from quire.kernels import workspace_numel
from quire.kernels.attention import tiles
from quire.kernels.common import tile_shapes
from quire.kernels.common.arch import named


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
        assert chosen[-1].block_m <= rows
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
