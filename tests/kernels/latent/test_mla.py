"""``mla_attention`` against the float64 oracle, both implementations, on batches full of poison."""

import pytest
import torch

from quire.kernels import mla_attention
from quire.kernels.common.arch import named
from quire.kernels.latent import launch as latent_launch
from quire.kernels.latent import tiles
from tests.support.helpers import assert_attends, in_dtypes
from tests.support.kernels.mla_cases import MlaCase, make_mla_batch, mla_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REAL = {"head_dim_v": 512, "rope_dim": 64, "dtype": BF16}

CASES = [
    MlaCase("decode-around-block", [1, 15, 16, 17, 33], [1] * 5),
    MlaCase("decode-pages-only", [1, 15, 16, 17, 33], [1] * 5, in_step=False),
    MlaCase("decode-empty-sequences", [0, 50, 0, 30], [1, 1, 0, 1]),
    MlaCase("decode-empty-pages-only", [0, 50, 0, 30], [1, 1, 0, 1], in_step=False),
    MlaCase("decode-all-empty", [0, 0], [1, 1], in_step=False),
    MlaCase("decode-speculative", [9, 21, 3], [3, 3, 3], num_decodes=3),
    MlaCase("decode-long-q-in-front", [40, 21], [20, 1], num_decodes=2),
    MlaCase("decode-8-heads-of-v3", [40], [1], num_heads=8, block_size=64, **REAL),
    MlaCase("decode-16-heads-of-v3", [90, 7], [1, 1], num_heads=16, **REAL),
    MlaCase("decode-32-heads-of-v3", [70], [1], num_heads=32, in_step=False, **REAL),
    MlaCase("decode-64-heads-of-v3", [70], [1], num_heads=64, block_size=64, **REAL),
    MlaCase("decode-128-heads", [40], [1], num_heads=128, head_dim_v=64, dtype=BF16),
    MlaCase("decode-40-heads-fp16", [50], [1], num_heads=40, dtype=FP16),
    MlaCase("decode-5-heads-odd-pages", [50, 9], [1, 1], num_heads=5, block_size=12, apart=True, dtype=BF16),
    MlaCase("decode-one-head", [33], [1], num_heads=1, head_dim_v=32),
    MlaCase("split", [700, 3, 0, 300], [1] * 4, block_size=64, num_heads=2),
    MlaCase("split-speculative-bf16", [620, 9], [3, 1], num_decodes=2, num_heads=2, dtype=BF16),
    MlaCase("split-several-tiles", [1400, 30, 520], [7, 2, 1], num_decodes=3, num_heads=6),
    MlaCase("split-128-heads-speculative", [900], [3], num_decodes=1, num_heads=128, in_step=False, dtype=BF16),
    MlaCase("split-pages-only", [600], [2], num_decodes=1, in_step=False, num_heads=2),
    MlaCase("whole-max-seq-len-256", [256], [1], max_seq_len=256, num_heads=2),
    MlaCase("prefill-first", [1, 15, 17, 33], [1, 15, 17, 33], dtype=BF16),
    MlaCase("prefill-chunk", [40, 90, 33], [7, 9, 1], num_decodes=0),
    MlaCase("prefill-pages-only", [40, 17, 1], [7, 17, 1], in_step=False, dtype=FP16),
    MlaCase("prefill-empty-q", [9, 60, 5], [0, 12, 0]),
    MlaCase("prefill-padding", [0, 20], [3, 5]),
    MlaCase("prefill-24-heads-tail", [60], [5], num_heads=24, apart=True, dtype=BF16),
    MlaCase("prefill-16-heads-of-v3", [70], [9], num_heads=16, **REAL),
    MlaCase("prefill-128-heads", [40], [2], num_heads=128, head_dim_v=64, rope_dim=32, dtype=BF16, num_decodes=0),
    MlaCase("mixed", [40, 9, 50, 17], [1, 1, 12, 17], num_decodes=2, dtype=BF16),
    MlaCase("mixed-long-decode", [60, 9, 50], [10, 1, 9], num_decodes=2),
]  # fmt: skip


@pytest.mark.parametrize("case", in_dtypes(CASES, (FP16, FP32)), ids=lambda case: case.name)
def test_against_float64(case):
    batch = make_mla_batch(case)
    assert_attends(mla_attention, batch, mla_reference(batch))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("block_n", [16, 64])
def test_every_shape_of_tile(rows, block_n, dtype, monkeypatch):
    """Pages that are a multiple of a tile, or not."""
    batch = make_mla_batch(MlaCase("", [70, 41], [1, 3], num_heads=6, dtype=dtype, block_size=32))
    config = tiles.Config(rows, block_n, 4, 2)
    monkeypatch.setattr(tiles, "select_config", lambda **_: config)
    monkeypatch.setattr(latent_launch, "select_config", lambda **_: config)
    assert_attends(mla_attention, batch, mla_reference(batch), "triton")


def test_where_shared_memory_is_small_tiles_have_fewer_rows(monkeypatch):
    """64 rows would be wanted, for 4 tokens of 16 heads or for 40 heads; there are 32."""
    monkeypatch.setattr(latent_launch, "arch_and_sms", lambda _: (named("sm_86"), 2))
    for num_heads, seq_lens, q_lens in (16, [300, 40], [2, 4]), (40, [50], [1]):
        count = len(seq_lens)
        batch = make_mla_batch(
            MlaCase("", seq_lens, q_lens, num_decodes=count, num_heads=num_heads, dtype=BF16)
        )
        assert_attends(mla_attention, batch, mla_reference(batch), "triton")
