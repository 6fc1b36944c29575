"""Attention with queries and keys in parts of their channels, as GPUs with few registers take them, against the float64 oracle on batches full of poison."""

import dataclasses

import pytest

from quire.kernels.attention import triton_impl as paged
from quire.kernels.attention.configs import Config
from tests.kernels.attention import test_attention, test_fp8
from tests.kernels.attention.test_fp8 import assert_exact, quantised
from tests.support.budgets import ordinary
from tests.support.helpers import AttentionCase, make_batch

FULL = ("decode-around-block", "decode-empty-sequences", "decode-empty-pages-only", "decode-all-empty",
    "decode-speculative", "decode-group-24", "decode-softcap-sinks", "split", "prefill-chunk", "prefill-pages-only",
    "prefill-padding", "prefill-group-5-page-48", "prefill-d128-hnd", "prefill-small-pages-bf16", "context-prefill",
    "context-speculative-split", "mixed-long-decode")  # fmt: skip
WINDOW = ("decode-around-w-pages-only", "decode-empty-ring", "window-1-pages-only", "decode-ring-shorter-than-a-tile",
    "prefill-ring-shorter-than-a-tile", "prefill-ring-page-48", "prefill-chunk-ring", "prefill-padding",
    "split-ring-sinks", "mixed-d512-bf16")  # fmt: skip
FP8 = ("decode-pages-only-bf16", "decode-d128-page-48-fp16", "decode-softcap-sinks", "split-bf16-sinks", "prefill-chunk",
    "prefill-group-3-page-8-bf16", "prefill-d512-fp16", "window-decode-ring", "window-prefill-chunk-ring",
    "window-mixed-d256-bf16")  # fmt: skip
CONFIGS = (
    Config(16, 16, 4, 1, key_parts=2),
    Config(32, 32, 4, 1, value_parts=2, key_parts=4),
    Config(16, 64, 4, 1, key_parts=4),
)


def named(prefix, table, names):
    """Some cases of a table, each with the name that pytest shows."""
    found = {case.name: case for case in table}
    return [pytest.param(found[name], id=f"{prefix}-{name}") for name in names]


CASES = [
    *named("full", test_attention.FULL, FULL),
    *named("window", test_attention.WINDOW, WINDOW),
]


@pytest.fixture(params=CONFIGS, ids=lambda c: f"{c.block_m}x{c.block_n}-parts-{c.key_parts}")
def in_parts(request, monkeypatch):
    def select(head_dim, dtype_bytes, phase, *_, rows=64, **__):
        return dataclasses.replace(request.param, block_m=min(rows, request.param.block_m))

    monkeypatch.setattr(paged, "select_config", select)


@ordinary(
    "[16x16",
    "[32x32-parts-4-full-prefill-chunk",
    "[32x32-parts-4-window-prefill-ring",
    "[16x64-parts-4-window-decode",
    "[16x64-parts-4-full-split",
)
@pytest.mark.parametrize("case", CASES)
def test_rows_and_tables_are_read_only_where_there_is_something(case, in_parts):
    """Without masks: keys and rows that are not live are those of others, and every other is poison."""
    assert_exact(make_batch(case), case.dtype, ["triton"])


@ordinary("[16x16", "[32x32-parts-4-fp8-window", "[16x64-parts-4-fp8-prefill-d512")
@pytest.mark.parametrize("case", named("fp8", test_fp8.CASES, FP8))
def test_e4m3_pages(case, in_parts):
    kind = test_fp8.KINDS[FP8.index(case.name) % 3]
    assert_exact(quantised(make_batch(case), kind), case.dtype, ["triton"])


def test_rows_of_queries_past_the_last_are_not_read(monkeypatch):
    """A tile has more rows than there are; the next one would lie where there is no memory."""
    monkeypatch.setattr(paged, "select_config", lambda *_, **__: CONFIGS[0])
    case = AttentionCase("", [40], [1], num_heads=1, num_kv_heads=1)
    for num_decodes in (0, 1):
        batch = make_batch(dataclasses.replace(case, num_decodes=num_decodes))
        batch["q"] = batch["q"].as_strided((1, 1, 16), (2**44, 16, 1))
        assert_exact(batch, case.dtype, ["triton"])
