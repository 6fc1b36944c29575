"""``compressed_attention`` with queries and keys in parts of their channels, as GPUs with few registers take them, against the float64 oracle
on batches full of poison."""

import pytest
import torch

from quire.kernels.compressed import triton_impl as compressed_triton
from quire.kernels.compressed.configs import CompressedConfig
from tests.kernels.compressed.test_compressed import CASES, FP8, attend, attend_split
from tests.support.budgets import ordinary
from tests.support.helpers import DEVICE, NAN, assert_within_budget
from tests.support.kernels.compressed_cases import Case, exactly, make_batch

NAMES = ("window-decode-around-w", "window-decode-pages-only", "window-prefill-chunk-ring", "window-padding",
    "empty-sequences", "empty-sequences-pages-only", "hca-decode-around-a-closing-entry", "hca-decode-pages-of-2",
    "hca-prefill-chunk", "csa-decode", "csa-decode-no-lens", "csa-prefill-pages-of-2", "mixed-csa", "split-hca-ragged",
    "bf16-heads-24-prefill", "real-fp32", "fp8-hca-decode-in-step", "fp8-csa-decode", "fp8-prefill-chunk",
    "fp8-csa-prefill-fp32-queries")  # fmt: skip
CONFIGS = {
    "keys-on-columns": CompressedConfig(16, 8, 4, 1, swap=False, key_parts=8),
    "keys-on-rows": CompressedConfig(16, 32, 4, 1, swap=True, key_parts=16),
}


@ordinary(
    "keys-on-columns",
    "keys-on-rows-fp8-hca",
    "keys-on-rows-csa-decode]",
    "keys-on-rows-hca-prefill",
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", CONFIGS)
def test_keys_that_are_not_live_count_nothing(config, name, monkeypatch):
    """Nothing is masked but the scores: of a key that is not live another row is read, which may be poison."""
    case = next(case for case in CASES if case.name == name)
    monkeypatch.setattr(compressed_triton, "select_config", lambda *_, **__: CONFIGS[config])
    batch = make_batch(case)
    exact, exact_lse = exactly(batch)
    lse = torch.full(exact_lse.shape, NAN, device=DEVICE)
    if case.num_sms:
        out = attend_split(batch, case.num_sms, lse)
    else:
        out = attend(batch, "triton", lse=lse)
    assert_within_budget("out", out, exact)
    assert_within_budget("lse", lse, exact_lse)


def test_rows_past_the_last_are_not_read(monkeypatch):
    """Tiles have more rows than there are queries, and than new keys beside fp8 pages; the next ones would lie where there is no memory."""
    monkeypatch.setattr(
        compressed_triton, "select_config", lambda *_, **__: CONFIGS["keys-on-columns"]
    )
    for num_decodes in (0, 1):
        batch = make_batch(Case("", [40], [1], num_heads=1, num_decodes=num_decodes, **FP8))
        batch["q"] = batch["q"].as_strided((1, 1, 512), (2**44, 512, 1))
        batch["kv"] = batch["kv"].as_strided((1, 512), (2**44, 1))
        assert_within_budget("out", attend(batch, "triton"), exactly(batch)[0])
