"""``index_topk`` against the float64 oracle, both implementations, on batches full of poison and of
equal scores."""

import dataclasses

import pytest
import torch
import triton

from quire.bench.common.bounds import bounding
from quire.kernels import IndexPages, index_topk, index_topk_workspace_numel
from quire.kernels.common.arch import named
from quire.kernels.indexer import kernel as indexer_kernel
from tests.kernels.oracles import indexer as reference_indexer
from tests.support.helpers import DEVICE, NAN, needs_e4m3_conversions
from tests.support.kernels.indexer_cases import IndexCase, exact_scores, make_index_batch

BF16, FP16 = torch.bfloat16, torch.float16
# Raw tokens that have just closed 0, 1, topk - 1, topk and topk + 1 entries, and one token fewer.
AROUND_TOPK = [3, 4, 7, 28, 31, 32, 35, 36]

CASES = [
    IndexCase("decode-around-topk", AROUND_TOPK, [1] * 8),
    IndexCase("decode-empty", [0, 200, 0, 3], [1, 1, 0, 1]),
    IndexCase("decode-all-empty", [0, 0], [1, 1]),
    IndexCase("decode-all-selected", [20, 32], [1, 1]),
    IndexCase("decode-speculative", [90, 41, 200], [3, 2, 3]),
    IndexCase("decode-long-table", [90, 41], [1, 1], max_seq_len=4096),
    IndexCase("decode-real-heads", [700], [1], num_heads=64, index_dim=128, rows=64, dtype=BF16, topk=32),
    IndexCase("decode-real-heads-fp8", [700], [1], num_heads=64, index_dim=128, rows=64, dtype=BF16, fp8=True, topk=32),
    IndexCase("decode-fp32-fp8", [300, 51], [1, 1], fp8=True),
    IndexCase("decode-fp16-one-head", [300, 51], [1, 1], num_heads=1, dtype=FP16),
    IndexCase("decode-3-heads-d32-pages-of-2", [300], [1], num_heads=3, index_dim=32, rows=2, dtype=BF16),
    IndexCase("decode-128-heads", [90], [2], num_heads=128),
    IndexCase("decode-ratio-128", [128 * 40 + 127], [1], compress_ratio=128, rows=2),
    IndexCase("decode-pages-of-128", [800], [1], rows=128, dtype=BF16),
    IndexCase("decode-pages-of-128-fp8", [800], [1], rows=128, dtype=BF16, fp8=True),
    IndexCase("decode-ratio-1", [50, 8, 9], [1] * 3, compress_ratio=1),
    IndexCase("decode-topk-1", [300, 4, 8], [1] * 3, topk=1),
    IndexCase("decode-topk-100", [1000, 404, 403], [1] * 3, topk=100),
    IndexCase("decode-two-turns", [2500, 1], [1, 0], compress_ratio=1, topk=1000, rows=64, dtype=BF16),
    IndexCase("prefill-first", [1, 4, 43], [1, 4, 43], dtype=BF16),
    IndexCase("prefill-chunk", [300, 40], [5, 9]),
    IndexCase("prefill-borders-in-tiles", [100, 60, 44, 81], [3, 1, 0, 5], dtype=BF16),
    IndexCase("prefill-padding", [0, 60, 0], [5, 3, 2], dtype=FP16),
    IndexCase("prefill-bf16-pages-of-64", [600], [5], rows=64, dtype=BF16),
    IndexCase("prefill-fp8-pages-of-2", [120, 90], [5, 3], rows=2, dtype=BF16, fp8=True),
    IndexCase("prefill-fp8-fp16-d64", [120], [9], index_dim=64, dtype=FP16, fp8=True, rows=64),
    IndexCase("mixed", [200, 90, 61, 55], [1, 1, 9, 4], dtype=BF16),
    IndexCase("ties-all", [300, 200], [3, 1], values="zeros"),
    IndexCase("ties-below-zero", [300, 200], [3, 1], values="negative", num_heads=2),
]  # fmt: skip
NORMAL = [
    IndexCase("decode", [400, 90], [1, 1]),
    IndexCase("decode-bf16-64-heads", [500], [1], num_heads=64, index_dim=128, rows=64, dtype=BF16),
    IndexCase("prefill-fp16", [300, 90], [4, 3], dtype=FP16),
    IndexCase("prefill-fp8", [300], [4], dtype=BF16, fp8=True, num_heads=16, index_dim=32),
]


def assert_selected(got, want):
    for have, expected in zip(got, want, strict=True):
        assert have.dtype == torch.int32
        assert have.cpu().equal(expected)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exact_scores_give_exactly_the_oracle_s_selection(case, impl):
    batch = make_index_batch(case)
    want = reference_indexer.select(exact_scores(batch), case.topk)
    assert_selected(index_topk(**batch, impl=impl), want)


@pytest.mark.parametrize("case", NORMAL, ids=lambda case: case.name)
def test_rounding_can_only_swap_what_is_as_good(case, impl):
    batch = make_index_batch(dataclasses.replace(case, values="normal"))
    assert_as_good(index_topk(**batch, impl=impl), batch)


def assert_as_good(got, batch):
    """Require selections that differ from the best only where rounding can have swapped scores."""
    (out, lens), topk = got, batch["topk"]
    with bounding():
        scores = exact_scores(batch)
    for t, exact in enumerate(scores):
        selected = out[t, : lens[t]].long().cpu()
        assert lens[t] == min(topk, len(exact)) and (out[t, lens[t] :] == -1).all()
        assert (selected.diff() > 0).all()
        if len(exact) <= topk:
            continue
        others = ~torch.isin(torch.arange(len(exact)), selected)
        highest, lowest = exact + exact.error, exact - exact.error
        assert highest[selected].min() >= lowest[others].max()
        assert exact.error.max() < exact.std() / 100


@pytest.mark.parametrize(
    "values, lanes",
    [("integers", 8), ("integers", 2048), ("zeros", 8), ("negative", 8), ("normal", 2048)],
)
def test_blocks_change_nothing(values, lanes, monkeypatch):
    """Blocks of 16 scores in two turns or in one, and top-k 8: rows of one, two and seven blocks."""
    monkeypatch.setattr(indexer_kernel, "LANES", lanes)
    monkeypatch.setattr(indexer_kernel, "BLOCK", 16)
    batch = make_index_batch(IndexCase("", [400, 64, 68], [1, 1, 1], values=values))
    got = index_topk(**batch, impl="triton")
    if values == "normal":
        assert_as_good(got, batch)
    else:
        assert_selected(got, reference_indexer.select(exact_scores(batch), 8))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("block", [16, indexer_kernel.BLOCK])
def test_scores_that_are_no_numbers(block, impl, monkeypatch):
    """NaN is the largest and -inf the least there is, but more than no score."""
    monkeypatch.setattr(indexer_kernel, "BLOCK", block)
    monkeypatch.setattr(indexer_kernel, "LANES", 8)
    batch = make_index_batch(IndexCase("", [400, 72, 90], [1, 1, 1]), seed=1)
    batch["weights"][:] = torch.tensor([1.0, 0, 0, 0])
    nan = [(row == 0).nonzero().flatten().tolist() for row in exact_scores(batch)]
    assert len(nan[0]) > 8 > len(nan[1])
    batch["weights"][:, 0] = -torch.inf
    out, lens = index_topk(**batch, impl=impl)
    assert lens.tolist() == [8] * 3
    for row, first, num_entries in zip(out.tolist(), nan, [100, 18, 22], strict=True):
        others = [w for w in range(num_entries) if w not in first]
        assert row == sorted([*first, *others][:8])


@pytest.mark.parametrize("queries", [1, 3, 100])
def test_chunks_change_nothing_and_stay_within_the_workspace(queries):
    batch = make_index_batch(IndexCase("", [120, 90], [3, 2]))
    want = reference_indexer.select(exact_scores(batch), 8)
    one = index_topk_workspace_numel(num_tokens=1, topk=8, max_seq_len=120)
    assert one == 64
    guarded = torch.full((queries * one + 50,), NAN, device=DEVICE)
    workspace = guarded[: queries * one]
    assert_selected(index_topk(**batch, workspace=workspace, impl="triton"), want)
    assert guarded[queries * one :].isnan().all() and not workspace.isnan().all()


def test_given_memory_is_filled_and_nothing_else(impl):
    """Rows of padding, a sequence of length 0 as a captured graph has them, select nothing."""
    batch = make_index_batch(IndexCase("", [120, 9, 0], [2, 1, 1]))
    want = index_topk(**batch, impl=impl)
    for name in ("q", "weights"):
        batch[name] = torch.cat([batch[name], torch.full_like(batch[name], NAN)])
    batch["seq_lens"] = torch.nn.functional.pad(batch["seq_lens"], (0, 1))
    batch["cu_seqlens_q"] = torch.nn.functional.pad(batch["cu_seqlens_q"], (0, 1), value=8)
    batch["block_table"] = torch.cat([batch["block_table"], batch["block_table"][:1]])
    batch["max_seqlen_q"] = 4
    wide = torch.full((8, 11), -7, dtype=torch.int32, device=DEVICE)
    lens = torch.full((8,), -7, dtype=torch.int32, device=DEVICE)
    out, counts = index_topk(**batch, impl=impl, out=wide[:, 1:9], lens=lens)
    assert out.data_ptr() == wide[:, 1:9].data_ptr() and counts is lens
    assert out[:4].equal(want[0]) and lens[:4].equal(want[1])
    assert (out[4:] == -1).all() and not lens[4:].any()
    assert (wide[:, [0, 9, 10]] == -7).all()
    none = batch | {name: batch[name][:0] for name in ("q", "weights", "block_table", "seq_lens")}
    out, lens = index_topk(**none | {"cu_seqlens_q": batch["cu_seqlens_q"][:1]}, impl=impl)
    assert out.shape == (0, 8) and lens.shape == (0,)


@pytest.mark.parametrize("seq_len", [2**20 - 1, 2**20])
def test_a_million_tokens(seq_len, monkeypatch):
    """262,144 entries in a table of 4,096 pages, almost all one page, whose keys score 0."""
    interpreted = triton.knobs.runtime.interpret
    if interpreted:
        # Tiles that no device has room for: the interpreter takes its time for each.
        monkeypatch.setattr(indexer_kernel, "FP32_TILE", (8192, 64, 8))
    rows, topk = 64, 512
    data = torch.full((6, rows, 16), NAN, device=DEVICE)
    data[1] = 0
    data[[2, 4, 5]] = torch.arange(rows, device=DEVICE)[:, None].float().expand(rows, 16)
    table = torch.ones(1, 4096, dtype=torch.int32, device=DEVICE)
    best = []
    for page, block in ((4, 17), (5, 2048), (2, 4095)):
        table[0, block] = page
        # Row 0 scores 0 as well, and the very last entry is there for who closes it.
        best += [w for w in range(block * rows + 1, block * rows + rows) if w < seq_len // 4]
    batch = {
        "q": torch.ones(1, 2, 16, device=DEVICE),
        "weights": torch.ones(1, 2, device=DEVICE),
        "pages": IndexPages(data, rows, 16),
        "block_table": table,
        "seq_lens": torch.tensor([seq_len], dtype=torch.int32, device=DEVICE),
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
        "topk": topk,
        "max_seqlen_q": 1,
        "max_seq_len": 2**20,
    }
    assert len(best) == (189 if seq_len == 2**20 else 188)
    for impl in ("torch",) if interpreted and seq_len == 2**20 else ("triton", "torch"):
        out, lens = index_topk(**batch, impl=impl)
        assert out[0].tolist() == [*range(topk - len(best)), *best] and lens.tolist() == [topk]


def test_the_workspace_is_bounded():
    sizes = {"topk": 1024, "compress_ratio": 4, "max_seq_len": 2**20}
    one = index_topk_workspace_numel(num_tokens=1, **sizes)
    assert one == 2**18 + 2 * 1024 * 32
    assert index_topk_workspace_numel(num_tokens=8192, **sizes) == 2**24 // one * one
    assert index_topk_workspace_numel(num_tokens=0, **sizes) == 0
    assert index_topk_workspace_numel(num_tokens=8192, topk=512, max_seq_len=2051) == 0
    assert index_topk_workspace_numel(num_tokens=1, topk=512, max_seq_len=2052) == 576


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("power", [-126, 0, 118])
def test_any_bf16_query_meets_quantised_keys(power, arch, monkeypatch):
    """Every second head is out of the range of fp16; its weight brings it to the scale of others."""
    if named(arch).widens_e4m3:
        needs_e4m3_conversions()
    monkeypatch.setattr(indexer_kernel, "arch_and_sms", lambda tensor: (named(arch), 2))
    batch = make_index_batch(IndexCase("", [300, 51], [2, 1], fp8=True, dtype=BF16))
    want = reference_indexer.select(exact_scores(batch), batch["topk"])
    batch["q"][:, ::2] *= 2.0**power
    batch["weights"][:, ::2] *= 2.0**-power
    assert_selected(index_topk(**batch, impl="triton"), want)
