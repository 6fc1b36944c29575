"""Launch choices of attention: tiles fit shared memory, plans and workspaces."""

import itertools

import pytest

from quire.kernels import compressed_attention_workspace_numel, workspace_numel
from quire.kernels.attention import tiles
from quire.kernels.common import tile_shapes
from quire.kernels.common.arch import named
from quire.kernels.latent import tiles as latent_tiles


@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"])  # fmt: skip
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("dtype_bytes, page_bytes", [(2, 2), (4, 4), (2, 1), (4, 1)])
def test_every_config_fits_shared_memory(name, head_dim, dtype_bytes, page_bytes):
    arch = named(name)

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
        assert (keys + config.block_m) * head_dim * dtype_bytes <= arch.shared_memory


@pytest.mark.parametrize("name", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("num_heads", [1, 5, 8, 40, 64, 65, 128])
def test_the_stated_workspace_suffices(name, num_heads):
    """Whatever the tiles are; ``workspace_numel`` serves ``mla_attention`` too."""
    arch, sizes = named(name), dict(num_heads=num_heads, num_kv_heads=1, head_dim=512)
    rules = itertools.product((False, True), (2, 4), (1, 3, 9), (1, 7, 132))
    for quantized, dtype_bytes, tokens, num_sms in rules:
        stated = workspace_numel(num_decodes=9, max_seqlen_q=tokens, num_sms=num_sms, **sizes)
        rows = tile_shapes.tile_rows(num_heads, tokens)
        tile = tiles.select_config(512, dtype_bytes, arch, quantized=quantized, rows=rows)
        block_q, _, head_tiles = tile_shapes.tile_heads(num_heads, tile.block_m)
        splits = tiles.target_splits(num_sms, 1, head_tiles)
        assert splits * block_q * num_heads * 513 <= stated
        for lists in (False, True):
            tile = latent_tiles.select_config(
                dtype_bytes=dtype_bytes, quantized=quantized, arch=arch, num_heads=num_heads,
                tokens=1 if lists else tokens,
            )  # fmt: skip
            block_q, _, head_tiles = tile_shapes.tile_heads(num_heads, tile.block_m)
            splits = latent_tiles.target_splits(num_sms, tile, head_tiles)
            numel = splits * (1 if lists else block_q) * num_heads * 513
            assert splits == 1 or numel <= compressed_attention_workspace_numel(
                head_dim=512, num_sms=num_sms
            )
            assert splits == 1 or numel <= stated
