"""Prefill with small tile shapes: interior and edge tiles, rings, and rows of other sequences."""

import dataclasses

import pytest
import torch

from quire.kernels.attention import launch as paged
from quire.kernels.attention.tiles import Config
from tests.kernels.attention.test_attention import attend
from tests.support.helpers import (
    NAN,
    AttentionCase,
    assert_attends,
    attention_reference,
    make_batch,
)

BF16, FP16 = torch.bfloat16, torch.float16
PLAIN = Config(32, 16, 4, 2)
PARTS = dataclasses.replace(PLAIN, value_parts=2)
ONE = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "dtype": BF16}
CHUNKS = [223, 90], [10, 9]
CASES = {
    "chunks": AttentionCase("", [46, 0, 37], [36, 0, 37], **ONE),
    "long-chunks": AttentionCase("", [60, 0, 37], [50, 0, 37], **ONE),
    "window-fp16": AttentionCase("", [70, 30], [60, 30], sliding_window=37, sinks=True, **ONE | {"dtype": FP16}),
    "group-3-softcap": AttentionCase("", [40], [40], softcap=5.0, **ONE | {"num_heads": 3}),
    "padding": AttentionCase("", [0, 40], [12, 40], **ONE),
    "mixed": AttentionCase("", [40, 50], [1, 45], num_decodes=1, **ONE),
    "pages-only": AttentionCase("", [50], [45], in_step=False, **ONE),
    # A ring holds the window and the page in which it ends: a tile of 16 keys may go round it several times.
    "small-pages": AttentionCase("", *CHUNKS, block_size=4, **ONE),
    "ring-37": AttentionCase("", *CHUNKS, sliding_window=37, ring=True, **ONE),
    "ring-37-page-48": AttentionCase("", *CHUNKS, sliding_window=37, ring=True, block_size=48, **ONE),
    "ring-6-page-4": AttentionCase("", *CHUNKS, sliding_window=6, ring=True, block_size=4, **ONE),
    "ring-16-page-4": AttentionCase("", *CHUNKS, sliding_window=16, ring=True, block_size=4, **ONE),
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """A function that makes attention launch prefill with a tile shape; decode as ever."""
    select = paged.select_config

    def use(config):
        def chosen(*args, rows, **kwargs):
            return config if rows is None else select(*args, rows=rows, **kwargs)

        monkeypatch.setattr(paged, "select_config", chosen)

    return use


@pytest.mark.parametrize("name", CASES)
def test_small_tiles(name, launched):
    batch = make_batch(CASES[name])
    exact = attention_reference(batch)
    for config in (PLAIN, PARTS):
        launched(config)
        assert_attends(attend, batch, exact, "triton")


def test_no_row_of_another_sequence_is_copied_into_a_result(launched):
    """A sequence ends within a tile, but the tensor does not."""
    batch = make_batch(AttentionCase("", [40, 40], [40, 40], **ONE))
    launched(PLAIN)
    whole = attend(**batch, impl="triton")
    for name in "k", "v":
        batch[name][40:] = NAN
    assert attend(**batch, impl="triton")[:40].equal(whole[:40])
