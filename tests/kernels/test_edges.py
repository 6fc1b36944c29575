"""Every argument of every operator: a bad value is refused by name and nothing is written, an odd one
gives the oracle's result in both implementations."""

import dataclasses
import random

import pytest
import torch
from torch.overrides import TorchFunctionMode

from quire import kernels
from quire.kernels import IndexPages, LatentPages, PoolPages
from tests.kernels.attention import test_merge as merge
from tests.kernels.attention.test_fp8 import quantised
from tests.kernels.compressor import test_compressor as compressor
from tests.kernels.hyper_connections import test_hyper_connections as hyper_connections
from tests.kernels.latent import test_flash_mla as flash
from tests.kernels.latent_write import test_latent_write as latent_write
from tests.kernels.layers import test_experts as experts
from tests.kernels.layers import test_norm as norm
from tests.kernels.layers import test_rope as rope
from tests.kernels.layers import test_routing as routing
from tests.kernels.layers import test_sampling as sampling
from tests.kernels.pages import test_overlap as overlap
from tests.kernels.pages import test_page_copy as page_copy
from tests.kernels.pages import test_write_kv as page_write
from tests.support.helpers import (
    DEVICE,
    AttentionCase,
    assert_within_budget,
    attention_reference,
    make_batch,
)
from tests.support.kernels import compressed_cases, indexer_cases, mla_cases
from tests.support.kernels.edges import (
    HUGE,
    IMPLS,
    RIGHT,
    Row,
    Table,
    copied,
    expect_refusal,
    factors,
    far,
    integers,
    numbers,
    plain,
    refused,
    right,
    rows_of,
    unsupported,
    values,
    zeros,
)

E4M3, U8 = torch.float8_e4m3fn, torch.uint8
F64, I32, I64 = torch.float64, torch.int32, torch.int64
RESULTS = ("out", "lse", "workspace")
COLUMNS = ("temperature", "top_k", "top_p", "min_p", "u")


def ints(*values):
    return torch.tensor(values, dtype=I32, device=DEVICE)


def ids(*shape):
    return zeros(*shape, dtype=I64)


def near(oracle):
    """A check of a call: output and lse within the budget of an oracle's, and no gradient."""

    def expect(function, given, impl):
        exact = oracle(copied(plain(given, *RESULTS)))
        out = function(**given, impl=impl)
        assert not out.requires_grad and (given["out"] is None or out is given["out"])
        for name, found, want in zip(("out", "lse"), (out, given["lse"]), exact, strict=True):
            if found is not None:
                assert_within_budget(name, found.cpu(), want.cpu())

    return expect


def no_sequences(a):
    """Neither tokens nor sequences."""
    names = ("q", "k", "v", "kv", "block_table", "seq_lens", "out")
    empty = {name: a[name][:0] for name in names if name in a}
    return empty | {
        "lse": a["lse"][:, :0], "cu_seqlens_q": a["cu_seqlens_q"][:1], "num_decodes": None,
    }  # fmt: skip


def with_results(batch):
    """A batch of 3 tokens of 2 heads, with memory for the results."""
    more = {"out": zeros(3, 2, 16), "lse": zeros(2, 3), "workspace": zeros(1 << 18)}
    return batch | {"num_decodes": 1} | more


# Attention.


def attention_arguments(window=None, kind=None):
    case = AttentionCase("", [20, 3], [1, 2], 2, 1, sliding_window=window, max_seq_len=20, sinks=True)  # fmt: skip
    batch = make_batch(case) | {"k_scale": None, "v_scale": None}
    return with_results(quantised(batch, kind) if kind else batch)


def spread_heads(a):
    """q with heads outside tokens."""
    return a["q"].transpose(0, 1).contiguous().transpose(0, 1)


def no_tokens(a):
    empty = {name: a[name][:0] for name in ("q", "k", "v", "out")}
    return empty | {
        "lse": a["lse"][:, :0], "cu_seqlens_q": a["cu_seqlens_q"] * 0, "max_seqlen_q": 0,
        "num_decodes": None,
    }  # fmt: skip


ATTENTION = [
    *refused("q", lambda a: zeros(3, 0, 16)),
    *right("q", spread_heads, lambda a: a["q"][:1].expand(3, 2, 16), no_tokens, no_sequences),
    *right("q", lambda a: {n: a[n].requires_grad_() for n in ("q", "k", "v")}),
    unsupported("q", lambda a: {n: a[n].repeat_interleave(3, -1)[..., :24].clone() for n in ("q", "k", "v", "k_pages", "v_pages", "out")}, "k_pages"),
    *refused("k_pages", lambda a: {n: a[n][:0] for n in ("k_pages", "v_pages")}, blamed="k_pages: num_pages"),
    *refused("k_pages", lambda a: {n: a[n][:, :0] for n in ("k_pages", "v_pages")}, blamed="k_pages: block_size"),
    *right("k_pages", lambda a: {n: a[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("k_pages", "v_pages")}),
    *refused("block_table", lambda a: a["block_table"][:, :0], blamed="block_table: width"),
    *right("block_table", lambda a: a["block_table"].clone()),
    *right("seq_lens", lambda a: ints(0, 0)),
    *values("seq_lens", lambda a: ints(-4, 3), lambda a: ints(20, 1)),
    *values("cu_seqlens_q", lambda a: ints(0, 1, 2), lambda a: ints(0, 3, 2)),
    *integers("max_seqlen_q", 0, odd=[2**31, 2**40]),
    *refused("k", None, far("k", (3, 1, 16), (2**24, 16, 1))),
    *refused("v", None),
    *right("v", lambda a: {"k": a["k"][:1].expand(3, 1, 16), "v": a["v"][:1].expand(3, 1, 16)}),
    *refused("k_scale", 1.0, zeros(1)),
    *refused("v_scale", 1.0, zeros(1)),
    *integers("max_seq_len", 0, odd=[2**40]),
    *integers("num_decodes", 0, 2, odd=[0, 1, 2]),
    *factors("softmax_scale", -30, 16),
    *factors("softcap", -30, 30),
    *right("softcap", 1e-3),
    *right("sinks", lambda a: a["sinks"] + float("inf"), lambda a: a["sinks"] - float("inf"), None),
    *right("out", None, lambda a: zeros(2, 3, 16).transpose(0, 1)),
    *right("lse", lambda a: zeros(2, 9)[:, :3]),
    *right("workspace", None),
]  # fmt: skip
FULL = [
    *ATTENTION,
    *refused("context_only", True, 1, None),
    *right("context_only", False, lambda a: {"k": None, "v": None, "context_only": True}),
    # A page is 16 rows: all that the second sequence has and less than the first, of 3 pages.
    *right("block_table", lambda a: a["block_table"][:, :2]),
]
WINDOW = [
    *(row for row in ATTENTION if row.outcome is not RIGHT),
    *integers("sliding_window", 1, odd=[1, 17, 2**30 - 1, *HUGE]),
    # The first sequence has 19 rows of 16 a page in its pages, and 20 without new rows.
    *values("block_table", lambda a: a["block_table"][:, :1]),
    *right("block_table", lambda a: {"block_table": a["block_table"][:, :1], "sliding_window": 17}),
    *values("block_table", lambda a: dict(block_table=a["block_table"][:, :1], sliding_window=17, k=None, v=None)),
]  # fmt: skip
# Of pages of e4m3.
SCALED = [
    *(row for row in factors("k_scale", -30, 30) if row.value != 2.0**30),
    *right("k_scale", lambda a: {"k_scale": 2.0**30, "softmax_scale": 2.0**-30}),
    *factors("v_scale", -30, 30),
    *refused("k_scale", None, zeros(2), zeros(1, dtype=torch.float64), zeros(1).to("meta")),
    *refused("v_scale", None, zeros(2), zeros(1, dtype=torch.float64), zeros(1).to("meta")),
    *refused("v_scale", lambda a: zeros(1) + 1.0, lambda a: zeros(a["v_pages"].shape[0], 16, 1) + 1.0, lambda a: zeros(1, 16, 1)),
    *right("k_scale", lambda a: {n: zeros(1) + 0.5 for n in ("k_scale", "v_scale")}),
    *right("k_scale", lambda a: {n: zeros(1, 1, 1).expand(a["k_pages"].shape[:3]) + 0.5 for n in ("k_scale", "v_scale")}),
]  # fmt: skip


MERGE = [
    *refused("partial_out", lambda a: a["partial_out"][:0], blamed="partial_out: num_parts"),
    *refused("partial_out", lambda a: a["partial_out"][..., :12], error=NotImplementedError),
    *right("partial_out", lambda a: a["partial_out"][1:2].expand(3, -1, -1, -1)),
    *right("partial_out", lambda a: {n: a[n].requires_grad_() for n in ("partial_out", "partial_lse")}),
    *right("partial_out", lambda a: {
        "partial_out": a["partial_out"][:, :0], "partial_lse": a["partial_lse"][..., :0], "out": None, "lse": None,
    }),
    *right("partial_out", lambda a: {
        "partial_out": a["partial_out"][:, :, :0], "partial_lse": a["partial_lse"][:, :0], "sinks": None, "out": None, "lse": None,
    }),
    *right("partial_lse", lambda a: a["partial_lse"] - float("inf"), lambda a: a["partial_lse"] + 1e4),
    *right("sinks", lambda a: a["sinks"] + float("inf"), lambda a: a["sinks"] - float("inf"), None),
    *right("out", None, lambda a: a["partial_out"][0]),
    *right("lse", None),
]  # fmt: skip


WRITE = [
    *right("k", lambda a: a["k"][:1].expand(5, 2, 16), lambda a: a["k"].transpose(0, 1).contiguous().transpose(0, 1)),
    *right("k", lambda a: {n: a[n][:0] for n in ("k", "v", "slot_mapping")}),
    *right("k", lambda a: {n: a[n].requires_grad_() for n in ("k", "v")}),
    *refused("k_pages", lambda a: {n: a[n][..., :0, :] for n in ("k_pages", "v_pages")}, blamed="k_pages: num_kv_heads"),
    *right("k_pages", lambda a: {n: zeros(8, 2, 16, 16).transpose(1, 2) for n in ("k_pages", "v_pages")}),
    *refused("k_pages", far("k_pages", (8, 16, 2, 16), (32, 2**30, 16, 1))),
    *right("slot_mapping", lambda a: a["slot_mapping"] * 0 - 1),
    *values("slot_mapping", lambda a: a["slot_mapping"] + 99),
    *refused("k_scale", 1.0),
    *refused("v_scale", 1.0),
]  # fmt: skip
WRITE_SCALED = [row for row in SCALED if row.name != "k_scale" or row.outcome is not RIGHT or not callable(row.value)]  # fmt: skip


# MLA.


def mla_arguments():
    case = mla_cases.MlaCase("", [40, 3], [1, 2], num_heads=2, max_seq_len=40)
    return with_results(mla_cases.make_mla_batch(case) | {"softmax_scale": 0.25})


MLA = [
    *refused("q", lambda a: zeros(3, 0, 32), blamed="q: num_heads"),
    *refused("q", lambda a: zeros(3, 2, 24), error=NotImplementedError),
    *right("q", lambda a: a["q"][:1].expand(3, 2, 32)),
    *right("q", lambda a: {n: a[n].requires_grad_() for n in ("q", "kv")}),
    *right("q", lambda a: {"q": a["q"][:0], "kv": None, "out": None, "lse": a["lse"][:, :0], "cu_seqlens_q": ints(0, 0, 0)}),
    *right("q", no_sequences),
    *refused("pages", far("pages", (1, 2, 32), (32, 2**30, 1))),
    *refused("pages", lambda a: a["pages"][:0], blamed="pages: num_pages"),
    *refused("pages", lambda a: a["pages"][:, :0], blamed="pages: block_size"),
    *refused("block_table", lambda a: a["block_table"][:, :0], blamed="block_table: width"),
    *values("block_table", lambda a: a["block_table"] * 0 + 99),
    *right("block_table", lambda a: a["block_table"][:, :2]),
    *right("seq_lens", lambda a: ints(0, 0)),
    *values("seq_lens", lambda a: ints(-4, 9), lambda a: ints(20, 1)),
    *values("cu_seqlens_q", lambda a: ints(0, 1, 2), lambda a: ints(0, 1, 4)),
    *integers("max_seqlen_q", 0, odd=[2**40]),
    *refused("max_seqlen_q", lambda a: {"max_seqlen_q": 1, "num_decodes": 2}),
    *right("max_seqlen_q", lambda a: {"max_seqlen_q": 2**31, "num_decodes": 2}),
    *factors("softmax_scale", -30, 16),
    *refused("softmax_scale", None),
    *refused("head_dim_v", 0, -1, 1.5, None),
    *refused("head_dim_v", 24, 8, 2**40, error=NotImplementedError),
    *right("kv", lambda a: a["kv"][:1].expand(3, 32)),
    *integers("max_seq_len", 0, odd=[2**40]),
    *integers("num_decodes", 0, 2, odd=[0, 2]),
    *right("out", None),
    *right("workspace", lambda a: {"workspace": None, "max_seq_len": None}),
]  # fmt: skip


# Window and compressed entries.


def compressed_arguments(topk=3, **options):
    case = compressed_cases.Case("", [20, 3], [1, 2], ratio=4, topk=topk, sliding_window=20, ring=False, **options)  # fmt: skip
    batch = compressed_cases.make_batch(case)
    for name in ("window_pages", "compressed_pages"):  # rows that another table or list names
        data = batch[name].data.nan_to_num(1.0)
        batch[name] = dataclasses.replace(batch[name], data=data)
    tables = ("compressed_table", "topk_indices") if topk else ("compressed_table",)
    batch |= {n: torch.where(batch[n] == compressed_cases.NO_PAGE, 0, batch[n]) for n in tables}
    return with_results(batch) | {"max_seq_len": 20}


def all_entries(**changes):
    """A value: another one of another argument, where every entry is seen."""
    return lambda a: {"topk_indices": None, "topk_lens": None, **changes}


COMPRESSED = [
    *refused("q", lambda a: zeros(3, 0, 16), blamed="q: num_heads"),
    *right("q", lambda a: a["q"][:1].expand(3, 2, 16), lambda a: a["q"].transpose(0, 1).contiguous().transpose(0, 1)),
    *right("q", lambda a: {"q": a["q"].requires_grad_()}),
    *refused("window_pages", lambda a: a["window_pages"].data),
    *refused("window_pages", lambda a: LatentPages(a["window_pages"].data.half(), 4, 16, 4)),
    *refused("window_pages", lambda a: LatentPages(a["window_pages"].data[:0], 4, 16, 4), blamed="window_pages: num_pages"),
    *refused("window_pages", lambda a: LatentPages(zeros(1, 4, 16).expand(2**29, 4, 16), 4, 16, 4), error=NotImplementedError),
    *right("window_table", lambda a: a["window_table"][:, :0], lambda a: a["window_table"][:, :1], lambda a: a["window_table"][:, :3]),
    *right("seq_lens", lambda a: ints(0, 0)),
    *values("seq_lens", lambda a: ints(-4, 9), lambda a: ints(20, 1)),
    *integers("sliding_window", 1, odd=[1, 2**30 - 1, *HUGE]),
    *right("sliding_window", *(all_entries(sliding_window=n) for n in HUGE)),
    *integers("max_seqlen_q", 0, odd=[2**40]),
    *right("max_seqlen_q", lambda a: {"max_seqlen_q": 2**31, "num_decodes": 2}),
    *refused("max_seqlen_q", lambda a: {"max_seqlen_q": 1, "num_decodes": 2}),
    *refused("compressed_pages", lambda a: dataclasses.replace(a["compressed_pages"], rope_dim=8)),
    *refused("compressed_pages", lambda a: LatentPages(zeros(1, 4, 16).expand(2**29, 4, 16), 4, 16, 4), error=NotImplementedError),
    *refused("compressed_table", None, blamed="compressed_pages"),
    *refused("compressed_table", lambda a: a["compressed_table"][:, :0], blamed="compressed_table: width"),
    *right("compressed_table", lambda a: a["compressed_table"][:, :1]),
    *right("compressed_table", lambda a: all_entries(compressed_table=a["compressed_table"][:, :1])(a)),
    *integers("compress_ratio", 1, 2**30, odd=[2**30]),
    *refused("compress_ratio", None, blamed="compressed_pages"),
    *right("topk_indices", lambda a: a["topk_indices"][:, :0], lambda a: a["topk_indices"] * 0 - 1),
    *right("topk_lens", lambda a: ints(-1, 4, -3), lambda a: {"topk_lens": ints(2**31 - 1, -2**31, 3), "num_decodes": 2}),
    *right("sinks", lambda a: a["sinks"] + float("inf"), None),
    *factors("softmax_scale", -30, 16),
    *values("cos_sin", lambda a: a["cos_sin"][:19]),
    *values("window_table", lambda a: a["window_table"] * 0 - 1, lambda a: a["window_table"] * 0 + 9999),
    *values("compressed_table", lambda a: a["compressed_table"] * 0 + 9999),
    *values("cu_seqlens_q", lambda a: ints(0, 1, 2), lambda a: ints(0, 1, 4)),
    *right("cos_sin", None),
    *integers("max_seq_len", 0, odd=[2**40]),
    *integers("num_decodes", 0, 2, odd=[0, 2]),
    *right("out", None),
    *right("workspace", lambda a: {"workspace": None, "max_seq_len": None}),
]  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [0, 1, 2, 5])
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_a_ring_too_small_for_the_window_without_in_step_rows(impl, width, num_decodes):
    """The oldest rows are overwritten: the last width * 4 positions are seen, whichever query asks."""
    batch = compressed_arguments(None, in_step=False) | {"num_decodes": num_decodes}
    batch["window_table"] = batch["window_table"][:, :width]
    near(compressed_cases.exactly)(kernels.compressed_attention, batch, impl)


# FlashMLA's calling convention.


def flash_arguments():
    call, _ = flash.make_call(fp8=False, num_heads=2, lens=False)
    return call | {
        "topk_length": ints(3, 5), "extra_topk_length": ints(0, 4), "softmax_scale": None,
        "out": torch.zeros_like(call["q"]), "lse": zeros(2, 2), "workspace": zeros(1 << 18),
    }  # fmt: skip


FLASH = [
    *refused("q", lambda a: {"q": a["q"][:, :, :0], "out": None, "lse": None}, blamed="q: num_heads"),
    *right("q", lambda a: a["q"][:1].expand(2, 1, 2, 512)),
    *refused("k_cache", lambda a: a["k_cache"][:0], blamed="k_cache: num_pages"),
    *refused("k_cache", lambda a: a["k_cache"][:1, :1].expand(2**29, 4, 1, 512), error=NotImplementedError),
    *refused("k_cache", lambda a: {"is_fp8_kvcache": True, "k_cache": zeros(2, 4 * 584 + 8, dtype=torch.uint8)[:, :-8].unflatten(1, (4, 1, 584))}),
    *refused("block_table", 3, error=NotImplementedError, blamed="indices"),
    *refused("cache_seqlens", 3, error=NotImplementedError, blamed="indices"),
    *refused("head_dim_v", 0, 128, None, error=NotImplementedError),
    *right("tile_scheduler_metadata", 3),
    *refused("num_splits", 1),
    *(row for row in factors("softmax_scale", -30, 16) if row.value != 2.0**16),
    *right("softmax_scale", lambda a: {"softmax_scale": 2.0**16, "q": a["q"] * 2.0**-16}),
    *refused("causal", True, error=NotImplementedError, blamed="indices"),
    *refused("is_fp8_kvcache", None, 1, "no"),
    *refused("indices", None, error=NotImplementedError),
    *refused("indices", lambda a: a["indices"][..., :0], blamed="indices: topk"),
    *right("indices", lambda a: a["indices"] * 0 - 1),
    Row("indices", lambda a: a["indices"] + 3 * 64, impls=("torch",)),
    *refused("extra_k_cache", None),
    *refused("extra_indices_in_kvcache", None, blamed="extra_k_cache"),
    *refused("extra_indices_in_kvcache", lambda a: a["indices"].expand(2, 2, 9)),
    *right("topk_length", lambda a: ints(-1, 6), lambda a: ints(-2**31, 2**31 - 1)),
    *right("extra_topk_length", lambda a: ints(99, -2)),
    *refused("out", lambda a: a["out"].mT.contiguous().mT),
    *right("workspace", None),
]  # fmt: skip


def expect_flash(function, given, impl):
    names = ("k_cache", "indices", "topk_length"), ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")  # fmt: skip
    lists = [(LatentPages(given[x].squeeze(2), given[x].shape[1]), given[y], given[z]) for x, y, z in names]  # fmt: skip
    exact = flash.exactly(given, lists, given["softmax_scale"] or 512**-0.5)
    flash.assert_attends(function(**given, impl=impl), exact)


# The indexer.


def index_arguments():
    batch = indexer_cases.make_index_batch(indexer_cases.IndexCase("", [60, 9], [1, 2], topk=4))
    batch["pages"] = dataclasses.replace(batch["pages"], data=batch["pages"].data.nan_to_num(1.0))
    out, lens = zeros(3, 4, dtype=I32), zeros(3, dtype=I32)
    return batch | {"out": out, "lens": lens, "workspace": zeros(1 << 16)}


INDEX = [
    *values("block_table", lambda a: a["block_table"] * 0 - 1, lambda a: a["block_table"] + 99),
    *values("cu_seqlens_q", lambda a: ints(0, 4, 3), lambda a: ints(0, 1, 2)),
    *refused("q", lambda a: {"q": zeros(3, 0, 16), "weights": zeros(3, 0)}, blamed="q: index_heads"),
    *refused("q", far("q", (3, 4, 16), (16, 2**30, 1))),
    *refused("q", lambda a: {"q": zeros(3, 129, 16), "weights": zeros(3, 129)}, error=NotImplementedError),
    *right("q", lambda a: {n: a[n].requires_grad_() for n in ("q", "weights")}),
    *refused("pages", lambda a: a["pages"].data),
    *right("block_table", lambda a: a["block_table"][:, :0], lambda a: a["block_table"][:, :1], lambda a: a["block_table"][:, :2]),
    *right("seq_lens", lambda a: ints(0, 0)),
    *values("seq_lens", lambda a: ints(-4, 9), lambda a: ints(20, 1)),
    *refused("topk", 0, -1, 1.5, True, None),
    *refused("topk", 4097, 2**40, error=NotImplementedError),
    *right("topk", lambda a: {"topk": 40, "out": None}),
    *integers("compress_ratio", 1, 2**30, odd=[2**30]),
    *refused("max_seqlen_q", -1, 1.5, True, None),
    *right("max_seqlen_q", *HUGE),
    *integers("max_seq_len", 0, 2**31 - 1, odd=[16, 2**31 - 1]),
    *right("out", None),
    *refused("lens", lambda a: zeros(3, 2, dtype=I32)[:, 0]),
    *refused("workspace", lambda a: zeros(1)),
    *right("workspace", None),
]  # fmt: skip


def expect_selected(function, given, impl):
    known = plain(given)
    scores = indexer_cases.exact_scores(known)
    scores = [x[: known["max_seq_len"] // known["compress_ratio"]] for x in scores]
    exact = indexer_cases.reference_indexer.select(scores, known["topk"])
    for got, want in zip(function(**given, impl=impl), exact, strict=True):
        assert torch.equal(got.cpu(), want)


# Writing rows and entries.


def latent_arguments():
    return latent_write.make(3, 16, 4) | {"out": zeros(3, 16)}


LATENT = [
    *refused("slot_mapping", None),
    *values("slot_mapping", lambda a: a["slot_mapping"] + 999),
    *values("positions", lambda a: a["positions"] + 50, lambda a: {"cos_sin": a["cos_sin"][:0], "positions": a["positions"] * 0}),
    *right("x", lambda a: a["x"][:1].expand(3, 16), lambda a: a["x"].requires_grad_(), lambda a: a["x"] * 0),
    *right("x", lambda a: {n: a[n][:0] for n in ("x", "slot_mapping", "positions", "out")}),
    *refused("positions", None),
    *right("positions", lambda a: a["positions"] * 0 - 1, lambda a: a["positions"] * 0 - 2),
    *right("positions", lambda a: {"positions": a["positions"].where(a["slot_mapping"] >= 0, 99), "out": None}),
    *refused("cos_sin", None),
    *right("cos_sin", lambda a: {"cos_sin": a["cos_sin"][:0], "positions": a["positions"] * 0 - 1}),
    *right("norm_weight", None),
    *factors("eps", -100, 30),
    *right("out", None),
]  # fmt: skip


# One sequence closes a window with rows of an earlier step, the other one such a window and one more.
NEW = (2, 6)


def compress_arguments():
    run = compressor.Run(compressor.Case([NEW], overlap=False, start=6))
    return run.arguments([6, 6], NEW)


COMPRESS = [
    *values("state_index", lambda a: a["state_index"] + 4),
    *values("cu_seqlens_q", lambda a: ints(1, 2, 8), lambda a: ints(0, 2, 7)),
    *values("cos_sin", lambda a: a["cos_sin"][:8]),
    *values("slot_mapping", lambda a: a["slot_mapping"] + 99),
    *right("kv", lambda a: a["kv"].requires_grad_(), lambda a: a["kv"][:1].expand(8, 16)),
    *refused("state", lambda a: a["state"][:, :2], blamed="state: ring"),
    *right("state_index", lambda a: a["state_index"] - ints(0, 9), lambda a: a["state_index"] - ints(9, 0), lambda a: ints(-1, -7)),
    *right("seq_lens", lambda a: {"seq_lens": ints(8, 0), "state_index": a["state_index"] + ints(0, 99)}),
    *values("seq_lens", lambda a: ints(8, -3), lambda a: ints(8, 5)),
    *integers("ratio", 1, 2**30),
    *refused("ratio", 5, blamed="ape"),
    *refused("overlap", None, 0, "no"),
    *refused("overlap", True, blamed="kv"),
    *factors("eps", -100, 30),
    *right("slot_mapping", lambda a: a["slot_mapping"] * 0 - 1),
    *integers("max_seqlen_q", 0, odd=HUGE),
    *refused("max_seqlen_q", 2),
]  # fmt: skip


def expect_as_ever(function, given, impl):
    """Require the sequences with a state and a slot as `test_compressor` has them; no others change."""
    usual, before = compress_arguments(), compress_arguments()
    usual |= {"eps": given["eps"], "kv": given["kv"].detach()}
    function(**usual, impl=impl)
    function(**given, impl=impl)
    data, pages = (call["pages"].data.flatten(0, 1) for call in (given, usual))
    assert not data.requires_grad and not given["state"].requires_grad
    for s, first in enumerate((0, NEW[0])):
        live = int(given["seq_lens"][s]) >= NEW[s] and int(given["state_index"][s]) >= 0
        state = usual["state_index"][s]
        found, expected = given["state"][state], (usual if live else before)["state"][state]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        for token in range(first, first + NEW[s]):
            slot = int(usual["slot_mapping"][token])
            if slot == compressor.NO_SLOT:
                continue
            if live and given["slot_mapping"][token] >= 0:
                assert data[slot].equal(pages[slot])
            else:
                assert data[slot].isnan().all()


# Pages and sizes.


def page(*shape):
    return zeros(*shape, dtype=U8)


PLAIN = {"data": torch.zeros(2, 4, 16), "storage_block_size": 4, "head_dim": 16, "rope_dim": 4}
LATENT_PAGES = [
    *refused("data", None, 3, torch.zeros(2, 4, 16, dtype=torch.float64), torch.zeros(2, 4, 8)),
    *refused("data", lambda a: a["data"].transpose(0, 1), far("data", (2, 4, 16), (16, 2**30, 1))),
    *refused("data", *(
        lambda a, data=data: {"data": data, "storage_block_size": 2, "head_dim": 512, "rope_dim": 64}
        for data in (
            torch.zeros(3, 2 * 584 - 1, dtype=U8), torch.zeros(3, 2, 584, dtype=U8), torch.zeros(3, 1729, dtype=U8),
            torch.zeros(3, 1744, dtype=U8)[:, 8:],
        )
    )),
    *refused("storage_block_size", 0, -1, 1.5, True, None),
    *refused("storage_block_size", 5, blamed="data"),
    *refused("head_dim", 0, 24, 1024, -16, error=NotImplementedError),
    *refused("data", lambda a: {"data": page(3, 1728), "storage_block_size": 2}, error=NotImplementedError),
    *refused("rope_dim", -2, 1.5, 3, 18, None),
]  # fmt: skip
INDEX_PAGES = [
    *refused("data", None, 3, torch.zeros(2, 4, 16, dtype=torch.float64), torch.zeros(2, 4, 8)),
    *refused("data", lambda a: a["data"].transpose(0, 1), far("data", (2, 4, 16), (16, 2**30, 1))),
    *refused("data", torch.zeros(2, 79, dtype=U8), torch.zeros(2, 81, dtype=U8), torch.zeros(2, 2**31, dtype=U8, device="meta")),
    *refused("storage_block_size", 0, -1, 1.5, True, None),
    *refused("storage_block_size", 5, blamed="data"),
    *refused("index_dim", 0, 24, 1024, -16, error=NotImplementedError),
]  # fmt: skip


SIZES = {"num_decodes": 4, "max_seqlen_q": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_sms": 8}  # fmt: skip
WORKSPACE = [row for name in SIZES for row in refused(name, 0, -1, 1.5, True, None, float("nan"))]
WORKSPACE += refused("num_kv_heads", 3, blamed="num_heads")
LATENT_WORKSPACE = [row for name in ("head_dim", "num_sms") for row in refused(name, 0, -1, 1.5, True, None)]  # fmt: skip
INDEX_SIZES = {"num_tokens": 3, "topk": 4, "compress_ratio": 4, "max_seq_len": 99}
INDEX_WORKSPACE = [
    *refused("num_tokens", -1, 1.5, True, None),
    *refused("topk", 0, -1, 1.5, True, None),
    *refused("topk", 4097, error=NotImplementedError),
    *refused("compress_ratio", 0, 2**30 + 1, 1.5, True, None),
    *refused("max_seq_len", -1, 2**31, 1.5, True, None),
]
PAGE_BYTES = [row for name in ("storage_block_size", "row_bytes") for row in refused(name, 0, -1, 1.5, True, None)]  # fmt: skip


POOL_PAGES = [
    *refused("tensors", (), page(3, 16)),
    *(row for tensor in (
        3, zeros(3, 16), page(16, 3).t(), page(1, 16).expand(3, -1), page(3, 0), page(3, 20), page(3, 20)[:, :16],
        page(3, 32)[:, 4:20],
    ) for row in refused("tensors", [tensor], blamed="tensors[0]")),
    *refused("tensors", [page(3, 16), page(4, 16)], blamed="tensors[1]"),
]  # fmt: skip


# Around attention.


NORM = [
    *refused("x", lambda a: zeros(3, 0), blamed="x: size"),
    *factors("eps", -100, 30),
    *refused("eps", None),
    *numbers("offset"),
    *refused("residual", None),
    *refused("residual", lambda a: dict.fromkeys(("residual", "post_weight", "scalar", "weight", "out"))),
    *refused("out", lambda a: {"weight": None}),
]  # fmt: skip


ROPE = [
    *refused("qkv", lambda a: zeros(3, 6, 0), blamed="qkv: head_dim"),
    *refused("qkv", lambda a: zeros(3, 6, 17)),
    unsupported("qkv", lambda a: {"qkv": zeros(3, 6, 24), "cos": zeros(3, 12), "sin": zeros(3, 12), "q_weight": None, "k_weight": None}),
    *integers("num_kv_heads", 0, 3),
    *refused("has_v", 1, None, "yes"),
    *refused("k_weight", None, lambda a: {"q_weight": None}),
    *refused("norm_v", 1, None, lambda a: {"num_kv_heads": 0, "k_weight": None}),
    *factors("eps", -100, 30),
    *numbers("offset"),
]  # fmt: skip


OF_A_GATE = [
    *refused("activation", "relu", None, 3),
    *factors("limit", -30, 30),
    *factors("alpha", -30, 30),
    *refused("alpha", lambda a: {"alpha": 2.0, "activation": "gelu_tanh"}),
    *numbers("up_offset"),
]


def far_matrices(a):
    """Matrices of 2**31 elements, without memory."""
    gate_up = torch.empty(2, 2, 2**15, 2**15, device="meta")
    gate_up = gate_up.as_strided((4, 2, 24, 40), (2**31, 960, 40, 1))
    return {k: v.to("meta") for k, v in a.items() if isinstance(v, torch.Tensor)} | {
        "gate_up": gate_up
    }


EXPERTS = [
    *refused("x", lambda a: zeros(5, 0), blamed="x: hidden_size"),
    *refused("ids", lambda a: ids(5, 0), blamed="ids: k"),
    *values("ids", lambda a: a["ids"] + 4, lambda a: a["ids"] - 1),
    *refused("gate_up", lambda a: zeros(0, 2, 24, 40), blamed="gate_up: num_experts"),
    *refused("gate_up", lambda a: zeros(4, 2, 0, 40), blamed="gate_up: width"),
    *refused("gate_up", lambda a: zeros(4, 2, 24, 20, dtype=U8)),
    *refused("gate_up", lambda a: a["gate_up"].to(E4M3), blamed="gate_up_scale"),
    unsupported("gate_up", far_matrices),
    *refused("gate_up_scale", lambda a: zeros(4, 2, 1, 1)),
    *refused("down_scale", lambda a: zeros(4, 1, 1)),
    *OF_A_GATE,
]  # fmt: skip
QUANTIZED = [
    *refused("gate_up", lambda a: a["gate_up"].transpose(2, 3).contiguous().mT),
    *refused("gate_up_scale", None, lambda a: a["gate_up_scale"].repeat(1, 1, 2, 1)),
    *refused("down_scale", None, lambda a: a["down_scale"].repeat(1, 1, 2)),
]


def wide_streams(n, size):
    """Arguments of ``collapse_streams`` before the head."""
    fn = zeros(n, n * size)
    return {"streams": zeros(1, n, size), "fn": fn, "base": fn[:, 0].clone(), "scale": zeros(1), "norm_weight": zeros(size)}  # fmt: skip


COLLAPSE = [
    *refused("streams", lambda a: zeros(3, 0, 16), blamed="streams: n"),
    *refused("streams", lambda a: zeros(3, 2, 0), blamed="streams: hidden_size"),
    unsupported("streams", lambda a: wide_streams(9, 16), "streams: n"),
    unsupported("streams", lambda a: wide_streams(1, 20000), "streams: hidden_size"),
    *factors("norm_eps", -100, 30),
    *factors("eps", -100, 30),
    *integers("iterations", 1),
]


EXPAND = [
    *refused("post", lambda a: zeros(3, 4)[:, :2]),
    *refused("comb", lambda a: a["comb"].transpose(0, 1)[[0, 0, 0]]),
    *refused("rows", None),
    *refused("weights", None, lambda a: zeros(3, 4)[:, :2]),
    *refused("weights", lambda a: {"weights": zeros(3, 0), "rows": zeros(0, 16)}, blamed="weights: k"),
]  # fmt: skip


def softplus(**more):
    """Change of the score alone, beside one argument of the softmax."""
    return {"score": "sqrt_softplus", "logits_factor": 1.0, "logits_bias": None, "expert_scale": None} | more  # fmt: skip


ROUTE = [
    *refused("logits", lambda a: zeros(3, 0), blamed="logits: num_experts"),
    *integers("top_k", 1, 8),
    *factors("scale", -30, 30),
]
ROUTE_BY_TABLE = [
    *refused("bias", lambda a: zeros(8)),
    *refused("table", None),
    *refused("token_ids", None),
    *values("token_ids", lambda a: a["token_ids"] + 20, lambda a: a["token_ids"] * 0 - 1),
    *values("table", lambda a: a["table"] + 8, lambda a: a["table"] * 0 - 1),
]
ROUTE_BY_SOFTMAX = [
    *refused("score", "relu", None, 3),
    *factors("logits_factor", -30, 30),
    *refused("logits_factor", lambda a: softplus(logits_factor=0.5)),
    *refused("logits_bias", lambda a: softplus(logits_bias=zeros(8))),
    *refused("expert_scale", lambda a: softplus(expert_scale=zeros(8))),
    *refused("bias", lambda a: zeros(8)),
    *refused("table", lambda a: ids(9, 2)),
]


COMBINE = refused("weights", lambda a: zeros(3, 0), blamed="weights: k")
OVERLAP = [
    *(
        row
        for name in ("from_pages", "state_index", "state_rows", "to_pages", "tokens")
        for row in values(name, lambda a, name=name: a[name] + 9, lambda a, name=name: a[name] - 9)
    ),
]


def sample_arguments():
    call = sampling.make_call(sampling.make_logits(3, 16), [(0.7, 5, 0.9, 0.1)] * 3, [0.5] * 3)
    return call | {"probs": zeros(3, 16)}


SAMPLE = [
    *refused("logits", lambda a: {"logits": zeros(3, 0), "probs": None}, blamed="logits: vocab_size"),
    unsupported("logits", lambda a: dict.fromkeys((*COLUMNS, "probs")) | {"logits": zeros(1, 2**20 + 1)}),
    *(row for name in COLUMNS for row in refused(name, None)),
    *refused("probs", lambda a: dict.fromkeys(COLUMNS)),
    *(row for name in COLUMNS for row in values(name, lambda a, name=name: a[name] - 9)),
    *values("temperature", lambda a: a["temperature"] + float("nan")),
    *(row for name in ("min_p", "u") for row in values(name, lambda a, name=name: a[name] + 2)),
]  # fmt: skip


# Four pages of 3 * 1168 bytes, of 7; a buffer of 6 rows.
COPY = [
    *refused("pages", None, 3, lambda a: [*a["pages"].tensors]),
    *refused("page_ids", None, 3, lambda a: a["page_ids"].int(), lambda a: a["page_ids"][None]),
    *values("page_ids", lambda a: a["page_ids"] + 7, lambda a: a["page_ids"] - 7),
    *refused("buffer", None, 3, lambda a: a["buffer"].int(), lambda a: zeros(6, 16, dtype=U8)),
    *refused("buffer", lambda a: a["buffer"].to("meta")),
    *refused("buffer", lambda a: zeros(6, 3508, dtype=U8)[:, :3504]),
    *refused("buffer", lambda a: zeros(6, 3520, dtype=U8)[:, 4:3508]),
    *refused("rows", None, 3, lambda a: a["rows"].int(), lambda a: a["rows"][:2]),
    *values("rows", lambda a: a["rows"] + 6, lambda a: a["rows"] - 6),
    *refused("impl", "cuda", 3),
]
GATHER = [*COPY, *refused("buffer", lambda a: a["buffer"][:1].expand(6, -1))]


# Objects and sizes: no implementation, no tensors of a call.
MADE = [
    (PoolPages, {"tensors": [page(3, 16)]}, POOL_PAGES),
    (LatentPages, PLAIN, LATENT_PAGES),
    (IndexPages, {"data": PLAIN["data"], "storage_block_size": 4, "index_dim": 16}, INDEX_PAGES),
    (kernels.workspace_numel, SIZES, WORKSPACE),
    (kernels.compressed_attention_workspace_numel, {"head_dim": 512, "num_sms": 8}, LATENT_WORKSPACE),
    (kernels.index_topk_workspace_numel, INDEX_SIZES, INDEX_WORKSPACE),
    (kernels.page_bytes, {"storage_block_size": 4, "row_bytes": 584}, PAGE_BYTES),
]  # fmt: skip
OUT_LSE = ("out", "lse")
STACKS = ("gate_up", "down", "gate_up_bias", "down_bias")
TABLES = [
    Table(kernels.paged_attention, attention_arguments, FULL, near(attention_reference), OUT_LSE),
    Table(kernels.sliding_window_attention, lambda: attention_arguments(40), WINDOW, near(attention_reference), OUT_LSE),
    Table(kernels.paged_attention, lambda: attention_arguments(kind="number"), SCALED, near(attention_reference), generic=False),
    Table(kernels.merge_partials, lambda: merge.make(sinks=True), MERGE, near(merge.merge_reference), OUT_LSE),
    Table(kernels.write_kv, lambda: page_write.make(), WRITE, page_write.check),
    Table(kernels.write_kv, lambda: page_write.make(scale=0.5), WRITE_SCALED, page_write.check, generic=False),
    Table(kernels.mla_attention, mla_arguments, MLA, near(mla_cases.mla_reference), OUT_LSE),
    Table(kernels.compressed_attention, compressed_arguments, COMPRESSED, near(compressed_cases.exactly), OUT_LSE),
    Table(kernels.flash_mla_with_kvcache, flash_arguments, FLASH, expect_flash, OUT_LSE),
    Table(kernels.index_topk, index_arguments, INDEX, expect_selected, ("out",)),
    Table(kernels.write_latent, latent_arguments, LATENT, latent_write.check, ("out",)),
    Table(kernels.compress, compress_arguments, COMPRESS, expect_as_ever, ("state",)),
    Table(kernels.residual_norm, lambda: norm.make(3, 16, post=True, scalar=True, out="fp32"), NORM, None, ("residual", "out")),
    Table(kernels.norm_rope, lambda: rope.make(num_heads=2, norm=True, norm_v=True), ROPE),
    Table(kernels.gated_product, lambda: {"gate": zeros(3, 16), "up": zeros(3, 16), "activation": "silu"}, OF_A_GATE, any_stride=("gate", "up")),
    Table(kernels.expert_mlp, lambda: experts.make(bias=True), EXPERTS, any_stride=STACKS),
    Table(kernels.expert_mlp, lambda: experts.make(2, 3, 1, 64, 32, form="fp8"), QUANTIZED, generic=False),
    Table(kernels.expert_mlp, lambda: experts.make(2, 3, 1, 64, 32, form="fp4"), QUANTIZED, generic=False),
    Table(kernels.collapse_streams, lambda: hyper_connections.make(3, 2, 16), COLLAPSE),
    Table(kernels.expand_streams, lambda: hyper_connections.make_expand(2, num_tokens=3, n=2, hidden_size=16), EXPAND),
    Table(kernels.route_tokens, lambda: routing.make(bias=True), ROUTE),
    Table(kernels.route_tokens, lambda: routing.make(table=True), ROUTE_BY_TABLE),
    Table(kernels.route_tokens, lambda: routing.make(softmax=True, factor=0.5, logits_bias=True, expert_scale=True), ROUTE_BY_SOFTMAX),
    Table(kernels.combine_experts, lambda: {"weights": zeros(3, 2), "rows": zeros(6, 16), "addend": zeros(3, 16)}, COMBINE),
    Table(kernels.copy_overlap, lambda: overlap.make_call("one-sequence"), OVERLAP, None, ("state", "pages")),
    Table(kernels.sample_tokens, sample_arguments, SAMPLE, None, ("probs",)),
    Table(kernels.gather_pages, page_copy.make_call, GATHER, generic=False),
    Table(kernels.scatter_pages, page_copy.make_call, COPY, generic=False),
]  # fmt: skip


@rows_of(TABLES, right=False)
def test_refused(table, row, impl):
    expect_refusal(table.function, row, table.arguments(), impl)


@rows_of(TABLES, right=True)
def test_right(table, row, impl):
    table.check(table.function, row.applied(table.arguments()), impl)


@pytest.mark.parametrize(("function", "good", "row"), [
    pytest.param(function, good, row, id=f"{function.__name__}-{row}")
    for function, good, rows in MADE for row in rows
])  # fmt: skip
def test_objects_and_sizes(function, good, row):
    expect_refusal(function, row, good, None)


# One row for each form of a message.
MESSAGES = [
    ({"q": zeros(6, 4)}, r"q: expected bfloat16\|float16\|float32 \[\*, \*, \*\], got float32 \[6, 4\]"),
    ({"k_pages": zeros(3, 2, 64)}, r"k_pages: expected float32\|float8_e4m3fn \[num_pages, block_size, num_kv_heads, head_dim\], got float32 \[3, 2, 64\]"),
    ({"q": [1.0]}, r"q: expected .*, got list"),
    ({"q": zeros(6, 3, 16)}, "q: num_heads: expected a multiple of num_kv_heads 2, got 3"),
    ({"q": zeros(6, 4, 32)}, "k_pages: expected head_dim 32, got 16"),
    ({"q": zeros(6, 16, 4).transpose(1, 2)}, r"q: expected stride 1 in the last dimension, got \(64, 1, 4\)"),
    ({"v": None}, "v: expected new rows of both k and v or of neither, got None"),
    ({"max_seqlen_q": 5.0}, "max_seqlen_q: expected an int >= 0, got 5.0"),
    ({"max_seqlen_q": 1}, "max_seqlen_q: expected the longest of 2 sequences with 6 tokens, got 1"),
    ({"max_seqlen_q": 2, "num_decodes": 2}, "max_seqlen_q: expected the longest of 2 sequences with 6 tokens, got 2"),
    ({"num_decodes": 3}, r"num_decodes: expected an int in \[0, 2\], got 3"),
    ({"softmax_scale": 0.0}, "softmax_scale: expected a finite number > 0, got 0.0"),
    ({"softcap": float("inf")}, "softcap: expected a finite number > 0, got inf"),
    ({"impl": "cuda"}, "impl: expected 'triton', 'torch' or None, got 'cuda'"),
]  # fmt: skip
OF_VALUES = [
    ({"block_table": ints(9999, 1, 0, 0).view(2, 2)}, r"block_table: expected ids in \[0, \d+\), got 9999"),
    ({"block_table": ints(-3, 1, 0, 0).view(2, 2)}, r"block_table: expected ids in \[0, \d+\), got -3"),
    *(
        ({"cu_seqlens_q": ints(*sums)}, rf"cu_seqlens_q: expected prefix sums from 0 to 6, the number of tokens, got \[{', '.join(map(str, sums))}\]")
        for sums in ([0, 4, 3], [0, 1, 7], [0, 1, 5], [1, 2, 6])
    ),
    ({"seq_lens": ints(1, 2**30)}, r"seq_lens: expected values in \[0, 1073741823\], got 1073741824"),
    ({"seq_lens": ints(-4, 9)}, r"seq_lens: expected values in \[0, 1073741823\], got -4"),
    ({"seq_lens": ints(20, 2)}, "seq_lens: expected at least the 5 new tokens of sequence 1, or 0 for padding, got 2"),
    # A ring of one page of 16 rows would give the window of 40 the newest rows twice.
    ({"block_table": ints(0, 0).view(2, 1), "sliding_window": 40}, "block_table: expected at least 2 blocks of 16 rows, for a window of 40, got 1"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), MESSAGES + (OF_VALUES if DEVICE == "cpu" else []))
def test_messages(impl, changes, message):
    call = {"impl": impl} | make_batch(AttentionCase("", [20, 9], [1, 5])) | changes
    name = "sliding_window_attention" if "sliding_window" in call else "paged_attention"
    with pytest.raises(ValueError, match=f"^{message}$"):
        getattr(kernels, name)(**call)


@pytest.mark.parametrize("max_seqlen_q, num_decodes", [(3, 2), (1, 1), (0, 0), (99, 2)])
def test_lengths_that_the_host_cannot_refute(max_seqlen_q, num_decodes):
    """Only where no prefill kernel would be launched must the sequences be able to hold all rows."""
    call = make_batch(AttentionCase("", [20, 9], [1, 5]))
    call |= {"max_seqlen_q": max_seqlen_q, "num_decodes": num_decodes}
    kernels.paged_attention(**call, impl="torch")


class NoDefaultDevice(TorchFunctionMode):
    """Refuses new tensors whose device is not named: on a CPU they would be right by chance."""

    MAKERS = (torch.arange, torch.tensor, torch.zeros, torch.ones, torch.full, torch.empty)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in self.MAKERS or "device" in (kwargs or {}), function
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("table", [
    pytest.param(table, id=f"{table.function.__name__}-{i}") for i, table in enumerate(TABLES)
])  # fmt: skip
def test_tensors_of_plain_torch_are_on_the_device_of_the_arguments(table):
    call = table.arguments()
    with NoDefaultDevice():
        table.function(**call, impl="torch")


def is_index(value):
    return isinstance(value, torch.Tensor) and value.dtype in (I32, I64)


def with_others(tensor, rng):
    """A copy with a few values replaced by others, mostly out of range."""
    flat, limits = tensor.clone().view(-1), torch.iinfo(tensor.dtype)
    for _ in range(rng.choice((1, 1, 3))):
        flat[rng.randrange(flat.numel())] = rng.choice(
            [-1, -2, 0, 1, rng.randrange(-99, 99), 10**5, 2**30, limits.min, limits.max]
        )
    return flat.view_as(tensor)


@pytest.mark.skipif(DEVICE != "cpu", reason="values are checked on CPUs alone")
@pytest.mark.parametrize("num_random", [0, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("table", [
    pytest.param(table, id=f"{table.function.__name__}-{i}")
    for i, table in enumerate(TABLES) if any(map(is_index, table.arguments().values()))
])  # fmt: skip
def test_values_of_indices(impl, table, num_random):
    """Extreme and random values in tables, slots, lengths, prefix sums and indices: a result, or an
    error that names an argument."""
    rng, given, function, tried = random.Random(5), table.arguments(), table.function, []
    function(**copied(given), impl=impl)
    names = [name for name, value in given.items() if is_index(value) and value.numel()]
    for name in names:
        for value in (torch.iinfo(given[name].dtype).min, 2**30):
            tried.append((name, given[name].clone()))
            tried[-1][1].view(-1)[-1] = value
    names = [rng.choice(names) for _ in range(num_random)]
    for name, value in tried + [(name, with_others(given[name], rng)) for name in names]:
        try:
            function(**copied(given) | {name: value}, impl=impl)
        except (ValueError, NotImplementedError) as error:
            assert str(error).split(":")[0].split(".")[0] in given, (name, value, error)
        except Exception as error:
            pytest.fail(f"{name}={value.tolist()}: {error!r}")
