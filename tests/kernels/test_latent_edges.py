"""Every argument of the latent attention functions: a bad value is refused by name, an odd one gives the oracle's result in both implementations."""

import dataclasses

import pytest
import torch

from quire.bench.common.bounds import Bounded, bounded
from quire.kernels import (
    IndexPages,
    LatentPages,
    PoolPages,
    compress,
    compressed_attention,
    compressed_attention_workspace_numel,
    flash_mla_with_kvcache,
    index_topk,
    index_topk_workspace_numel,
    mla_attention,
    page_bytes,
    write_latent,
)
from tests.kernels.latent import test_flash_mla as flash_cases
from tests.kernels.oracles import latent_write as reference_latent
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing
from tests.support.kernels import compressed_cases, indexer_cases
from tests.support.kernels import mla_cases as dense_cases
from tests.support.kernels.edges import (
    HUGE,
    IMPLS,
    Row,
    cases,
    expect_refusal,
    factors,
    far,
    integers,
    plain,
    refused,
    right,
    tensors,
    values,
    zeros,
)
from tests.support.oracles import once

I32, U8 = torch.int32, torch.uint8
RESULTS = ("out", "lse", "workspace")


def ints(*values):
    return torch.tensor(values, dtype=I32, device=DEVICE)


# MLA.


def mla_arguments():
    case = dense_cases.MlaCase("", [40, 3], [1, 2], num_heads=2, max_seq_len=40)
    batch = dense_cases.make_mla_batch(case)
    batch |= {"softmax_scale": 0.25, "out": zeros(3, 2, 16), "lse": zeros(2, 3)}
    return batch | {"num_decodes": 1, "workspace": zeros(1 << 16)}


def no_sequences(a):
    """Neither tokens nor sequences."""
    empty = {n: a[n][:0] for n in ("q", "kv", "block_table", "seq_lens", "out")}
    return empty | {
        "lse": a["lse"][:, :0],
        "cu_seqlens_q": a["cu_seqlens_q"][:1],
        "num_decodes": None,
    }


MLA = [
    *tensors(mla_arguments(), "q", ("kv", *RESULTS), (), ("out", "lse")),
    *refused("q", lambda a: zeros(3, 0, 32), blamed="q: num_heads"),
    *refused("q", lambda a: zeros(3, 2, 24), error=NotImplementedError),
    *right("q", lambda a: a["q"][:1].expand(3, 2, 32)),
    *right("q", lambda a: {n: a[n].requires_grad_() for n in ("q", "kv")}),
    *right("q", lambda a: {"q": a["q"][:0], "kv": None, "out": None, "lse": a["lse"][:, :0], "cu_seqlens_q": ints(0, 0, 0)}),
    *right("q", no_sequences),
    *refused("pages", lambda a: a["pages"][..., :16]),
    *refused("pages", far("pages", (1, 2, 32), (32, 2**30, 1))),
    *refused("pages", lambda a: a["pages"][:0], blamed="pages: num_pages"),
    *refused("pages", lambda a: a["pages"][:, :0], blamed="pages: block_size"),
    *refused("block_table", lambda a: a["block_table"][:, :0], blamed="block_table: width"),
    *values("block_table", lambda a: a["block_table"] * 0 + 99),
    *right("block_table", lambda a: a["block_table"][:, :2]),
    *right("seq_lens", lambda a: ints(0, 0)),
    *values("seq_lens", lambda a: ints(-4, 9), lambda a: ints(20, 1)),
    *refused("cu_seqlens_q", lambda a: a["cu_seqlens_q"][:2]),
    *values("cu_seqlens_q", lambda a: ints(0, 1, 2), lambda a: ints(0, 1, 4)),
    *integers("max_seqlen_q", 0, odd=[2**40]),
    *refused("max_seqlen_q", lambda a: {"max_seqlen_q": 1, "num_decodes": 2}),
    *right("max_seqlen_q", lambda a: {"max_seqlen_q": 2**31, "num_decodes": 2}),
    *factors("softmax_scale", -30, 16),
    *refused("softmax_scale", None),
    *refused("head_dim_v", 0, -1, 1.5, None),
    *refused("head_dim_v", 24, 8, 2**40, error=NotImplementedError),
    *refused("kv", lambda a: a["kv"][:, :16]),
    *right("kv", lambda a: a["kv"][:1].expand(3, 32)),
    *integers("max_seq_len", 0, odd=[2**40]),
    *integers("num_decodes", 0, 2, odd=[0, 2]),
    *right("out", None),
    *right("workspace", lambda a: {"workspace": None, "max_seq_len": None}),
]  # fmt: skip


def expect_near(function, given, impl, oracle):
    """Require the oracle's output and lse, and no gradient."""
    exact, exact_lse = oracle(plain(given, *RESULTS))
    out = function(**given, impl=impl)
    assert not out.requires_grad
    assert_within_budget("out", out.cpu(), exact.cpu())
    assert_within_budget("lse", given["lse"].cpu(), exact_lse.cpu())


def expect_mla(function, given, impl):
    expect_near(function, given, impl, dense_cases.mla_reference)


# Window and compressed entries.


def compressed_arguments(topk=3, **options):
    case = compressed_cases.Case("", [20, 3], [1, 2], ratio=4, topk=topk, sliding_window=20, ring=False, **options)  # fmt: skip
    batch = compressed_cases.make_batch(case)
    for name in ("window_pages", "compressed_pages"):  # rows that another table or list names
        data = batch[name].data.nan_to_num(1.0)
        batch[name] = dataclasses.replace(batch[name], data=data)
    batch |= {"out": zeros(3, 2, 16), "lse": zeros(2, 3), "workspace": zeros(1 << 18)}
    tables = ("compressed_table", "topk_indices") if topk else ("compressed_table",)
    batch |= {n: torch.where(batch[n] == compressed_cases.NO_PAGE, 0, batch[n]) for n in tables}
    return batch | {"num_decodes": 1, "max_seq_len": 20}


def all_entries(**changes):
    """A value: another one of another argument, where every entry is seen."""
    return lambda a: {"topk_indices": None, "topk_lens": None, **changes}


COMPRESSED = [
    *tensors(
        compressed_arguments(), "q", ("kv", "compressed_table", "topk_indices", "topk_lens", "sinks", "cos_sin", *RESULTS), (), ("out", "lse")
    ),
    *refused("q", lambda a: zeros(3, 0, 16), blamed="q: num_heads"),
    *right("q", lambda a: a["q"][:1].expand(3, 2, 16), lambda a: a["q"].transpose(0, 1).contiguous().transpose(0, 1)),
    *right("q", lambda a: {"q": a["q"].requires_grad_()}),
    *refused("window_pages", None, 3, lambda a: a["window_pages"].data),
    *refused("window_pages", lambda a: LatentPages(a["window_pages"].data.half(), 4, 16, 4)),
    *refused("window_pages", lambda a: LatentPages(a["window_pages"].data.to("meta"), 4, 16, 4)),
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
    *refused("kv", lambda a: a["kv"][:1]),
    *refused("compressed_pages", None, 3),
    *refused("compressed_pages", lambda a: dataclasses.replace(a["compressed_pages"], rope_dim=8)),
    *refused("compressed_pages", lambda a: LatentPages(zeros(1, 4, 16).expand(2**29, 4, 16), 4, 16, 4), error=NotImplementedError),
    *refused("compressed_table", None, blamed="compressed_pages"),
    *refused("compressed_table", lambda a: a["compressed_table"][:, :0], blamed="compressed_table: width"),
    *right("compressed_table", lambda a: a["compressed_table"][:, :1]),
    *right("compressed_table", lambda a: all_entries(compressed_table=a["compressed_table"][:, :1])(a)),
    *integers("compress_ratio", 1, 2**30, odd=[2**30]),
    *refused("compress_ratio", None, blamed="compressed_pages"),
    *right("topk_indices", lambda a: a["topk_indices"][:, :0], lambda a: a["topk_indices"] * 0 - 1),
    *refused("topk_lens", lambda a: a["topk_lens"][:1]),
    *right("topk_lens", lambda a: ints(-1, 4, -3), lambda a: {"topk_lens": ints(2**31 - 1, -2**31, 3), "num_decodes": 2}),
    *right("sinks", lambda a: a["sinks"] + float("inf"), None),
    *factors("softmax_scale", -30, 16),
    *refused("cos_sin", lambda a: a["cos_sin"][:, :2]),
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


def expect_compressed(function, given, impl):
    expect_near(function, given, impl, compressed_cases.exactly)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [0, 1, 2, 5])
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_a_ring_too_small_for_the_window_without_in_step_rows(impl, width, num_decodes):
    """The oldest rows are overwritten: the last width * 4 positions are seen, whichever query asks."""
    batch = compressed_arguments(None, in_step=False) | {"num_decodes": num_decodes}
    batch["window_table"] = batch["window_table"][:, :width]
    expect_compressed(compressed_attention, batch, impl)


# FlashMLA's calling convention.


def flash_arguments():
    generator = torch.Generator().manual_seed(5)
    cache = torch.randn(2, 4, 1, 512, generator=generator).round().to(DEVICE)
    q = torch.randn(2, 1, 2, 512, generator=generator).round().to(DEVICE)
    rows = torch.randint(0, 8, (2, 1, 5), generator=generator, dtype=I32).to(DEVICE)
    return {
        "q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512, "indices": rows, "topk_length": ints(3, 5),
        "attn_sink": zeros(2), "extra_k_cache": cache.flip(0), "extra_indices_in_kvcache": rows.flip(2), "extra_topk_length": ints(0, 4),
        "tile_scheduler_metadata": None, "num_splits": None, "softmax_scale": None, "causal": False, "is_fp8_kvcache": False,
        "out": zeros(2, 1, 2, 512), "lse": zeros(2, 2), "workspace": zeros(1 << 18),
    }  # fmt: skip


FLASH = [
    *tensors(
        flash_arguments(), "q", ("indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length", *RESULTS), (), ("lse",)
    ),
    *refused("q", lambda a: zeros(2, 1, 2, 256)),
    *refused("q", lambda a: {"q": zeros(2, 1, 0, 512), "out": None, "lse": None}, blamed="q: num_heads"),
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
    Row("indices", lambda a: a["indices"] + 8, impls=("torch",)),
    *refused("extra_k_cache", None),
    *refused("extra_indices_in_kvcache", None, blamed="extra_k_cache"),
    *refused("extra_indices_in_kvcache", lambda a: a["indices"].expand(2, 2, 5)),
    *refused("topk_length", lambda a: ints(1, 2, 3)),
    *right("topk_length", lambda a: ints(-1, 6), lambda a: ints(-2**31, 2**31 - 1)),
    *right("extra_topk_length", lambda a: ints(99, -2)),
    *refused("out", lambda a: zeros(2, 1, 512, 2).transpose(2, 3), lambda a: zeros(1, 1, 2, 512).expand(2, 1, 2, 512)),
    *right("workspace", None),
]  # fmt: skip


def expect_flash(function, given, impl):
    """FlashMLA has lse +inf where a query sees no keys."""
    names = ("k_cache", "indices", "topk_length"), ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")  # fmt: skip
    lists = [(LatentPages(given[x].squeeze(2), 4), given[y], given[z]) for x, y, z in names]
    exact, exact_lse = flash_cases.exactly(given, lists, given["softmax_scale"] or 512**-0.5)
    out, lse = function(**given, impl=impl)
    assert_within_budget("out", out[:, 0].cpu(), exact)
    lse = lse[:, :, 0].T.cpu()
    none = exact_lse.isneginf()
    assert lse[none].isposinf().all()
    assert_within_budget("lse", torch.where(none, -torch.inf, lse), exact_lse)


# The indexer.


def index_arguments():
    batch = indexer_cases.make_index_batch(indexer_cases.IndexCase("", [60, 9], [1, 2], topk=4))
    batch["pages"] = dataclasses.replace(batch["pages"], data=batch["pages"].data.nan_to_num(1.0))
    batch |= {"out": zeros(3, 4, dtype=I32), "lens": zeros(3, dtype=I32)}
    return batch | {"workspace": zeros(1 << 16)}


INDEX = [
    *tensors(index_arguments(), "q", ("out", "lens", "workspace"), (), ("out",)),
    *values("block_table", lambda a: a["block_table"] * 0 - 1, lambda a: a["block_table"] + 99),
    *values("cu_seqlens_q", lambda a: ints(0, 4, 3), lambda a: ints(0, 1, 2)),
    *refused("q", lambda a: {"q": zeros(3, 0, 16), "weights": zeros(3, 0)}, blamed="q: index_heads"),
    *refused("q", far("q", (3, 4, 16), (16, 2**30, 1))),
    *refused("q", lambda a: {"q": zeros(3, 129, 16), "weights": zeros(3, 129)}, error=NotImplementedError),
    *right("q", lambda a: {n: a[n].requires_grad_() for n in ("q", "weights")}),
    *refused("pages", None, 3, lambda a: a["pages"].data),
    *refused("pages", lambda a: IndexPages(a["pages"].data.to("meta"), 4, 16)),
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
    x = torch.arange(3 * 16, device=DEVICE).view(3, 16) % 13 - 6.0
    angle = torch.arange(5.0, device=DEVICE)[:, None] * torch.tensor([1.0, 0.1], device=DEVICE)
    return {
        "x": x, "pages": LatentPages(torch.full((2, 4, 16), NAN, device=DEVICE), 4, 16, 4), "slot_mapping": torch.tensor([5, -1, 0], device=DEVICE),
        "positions": torch.tensor([4, 2, 0], device=DEVICE), "cos_sin": torch.cat([angle.cos(), angle.sin()], 1),
        "norm_weight": zeros(16) + 1.5, "eps": 1e-6, "out": zeros(3, 16),
    }  # fmt: skip


LATENT = [
    *tensors(latent_arguments(), "x", ("positions", "cos_sin", "norm_weight", "out"), (), ("out",)),
    *values("slot_mapping", lambda a: a["slot_mapping"] + 3),
    *values("positions", lambda a: a["positions"] + 1, lambda a: {"cos_sin": a["cos_sin"][:0], "positions": a["positions"] * 0}),
    *right("x", lambda a: a["x"][:1].expand(3, 16), lambda a: a["x"].requires_grad_(), lambda a: a["x"] * 0),
    *right("x", lambda a: {n: a[n][:0] for n in ("x", "slot_mapping", "positions", "out")}),
    *refused("pages", 3, None),
    *refused("pages", lambda a: LatentPages(a["pages"].data.to("meta"), 4, 16, 4)),
    *refused("positions", None),
    *right("positions", lambda a: a["positions"] * 0 - 1, lambda a: a["positions"] - 2),
    *right("positions", lambda a: {"positions": torch.tensor([4, 99, 0], device=DEVICE), "out": None}),
    *refused("cos_sin", None),
    *right("cos_sin", lambda a: {"cos_sin": a["cos_sin"][:0], "positions": a["positions"] * 0 - 1}),
    *right("norm_weight", None),
    *factors("eps", -100, 30),
    *right("out", None),
]  # fmt: skip


def expect_written(function, given, impl):
    """Require the oracle's rows, and no gradient."""
    known = {n: plain(given)[n] for n in ("x", "positions", "cos_sin", "norm_weight", "eps")}
    if given["out"] is None:  # a row without a slot is not read
        known["positions"] = torch.where(given["slot_mapping"] < 0, -1, known["positions"])
    exact = once(reference_latent.write_latent, **known)
    exact = exact if isinstance(exact, Bounded) else bounded(exact)
    function(**given, impl=impl)
    live = given["slot_mapping"] >= 0
    written = given["pages"].data.view(8, 16)[given["slot_mapping"][live]]
    assert not written.requires_grad
    assert_within_budget("pages", written, exact[live])
    if given["out"] is not None:
        assert not given["out"].requires_grad
        assert_within_budget("out", given["out"], exact)


def compress_arguments():
    """Two sequences that close window 1 and window 0 of 4 tokens, the first with rows of an earlier step."""
    _, normal = drawing(11)
    angle = torch.arange(8.0, device=DEVICE)[:, None] * torch.tensor([1.0, 0.1], device=DEVICE)
    return {
        "kv": normal(6, 16), "gate": normal(6, 16), "ape": normal(4, 16), "state": normal(3, 8, 2, 16), "state_index": ints(2, 0),
        "seq_lens": ints(8, 4), "cu_seqlens_q": ints(0, 2, 6), "ratio": 4, "overlap": False, "norm_weight": zeros(16) + 1.5, "eps": 1e-6,
        "cos_sin": torch.cat([angle.cos(), angle.sin()], 1), "pages": LatentPages(torch.full((2, 4, 16), NAN, device=DEVICE), 4, 16, 4),
        "slot_mapping": torch.tensor([99, 5, 99, 99, 99, 0], device=DEVICE), "max_seqlen_q": 4,
    }  # fmt: skip


COMPRESS = [
    *tensors(compress_arguments(), "kv", (), (), ("state",)),
    *values("state_index", lambda a: ints(2, 3)),
    *values("cu_seqlens_q", lambda a: ints(1, 2, 6), lambda a: ints(0, 2, 5)),
    *values("cos_sin", lambda a: a["cos_sin"][:4]),
    *values("slot_mapping", lambda a: a["slot_mapping"] + 3),
    *right("kv", lambda a: a["kv"].requires_grad_(), lambda a: a["kv"][:1].expand(6, 16)),
    *refused("state", lambda a: a["state"][:, :2], blamed="state: ring"),
    *right("state_index", lambda a: ints(2, -1), lambda a: ints(-1, 0), lambda a: ints(-1, -7)),
    *right("seq_lens", lambda a: {"seq_lens": ints(8, 0), "state_index": ints(2, 99)}),
    *values("seq_lens", lambda a: ints(8, -3), lambda a: ints(8, 3)),
    *integers("ratio", 1, 2**30),
    *refused("ratio", 5, blamed="ape"),
    *refused("overlap", None, 0, "no"),
    *refused("overlap", True, blamed="kv"),
    *factors("eps", -100, 30),
    *refused("pages", None, 3),
    *refused("pages", lambda a: LatentPages(a["pages"].data.to("meta"), 4, 16, 4)),
    *right("slot_mapping", lambda a: a["slot_mapping"] * 0 - 1),
    *integers("max_seqlen_q", 0, odd=HUGE),
    *refused("max_seqlen_q", 2),
]  # fmt: skip


def expect_as_ever(function, given, impl):
    """Require the sequences with a state and a slot as `test_compressor` has them; no others change."""
    usual = compress_arguments() | {"eps": given["eps"], "kv": given["kv"].detach().clone()}
    function(**usual, impl=impl)
    before = compress_arguments()["state"]
    function(**given, impl=impl)
    data = given["pages"].data.view(8, 16)
    assert not data.requires_grad and not given["state"].requires_grad
    whole = given["seq_lens"] >= ints(2, 4)
    for s, (state, last) in enumerate(((2, 1), (0, 5))):
        there = bool(whole[s]) and int(given["state_index"][s]) >= 0
        expected = usual["state"] if there else before
        assert given["state"][state].equal(expected[state])
        slot = int(usual["slot_mapping"][last])
        if there and given["slot_mapping"][last] >= 0:
            assert data[slot].equal(usual["pages"].data.view(8, 16)[slot])
        else:
            assert data[slot].isnan().all()


# Pages and sizes.

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


WORKSPACE = [
    row for name in ("head_dim", "num_sms") for row in refused(name, 0, -1, 1.5, True, None)
]
INDEX_SIZES = {"num_tokens": 3, "topk": 4, "compress_ratio": 4, "max_seq_len": 99}
INDEX_WORKSPACE = [
    *refused("num_tokens", -1, 1.5, True, None),
    *refused("topk", 0, -1, 1.5, True, None),
    *refused("topk", 4097, error=NotImplementedError),
    *refused("compress_ratio", 0, 2**30 + 1, 1.5, True, None),
    *refused("max_seq_len", -1, 2**31, 1.5, True, None),
]
PAGE_BYTES = [row for name in ("storage_block_size", "row_bytes") for row in refused(name, 0, -1, 1.5, True, None)]  # fmt: skip


def page(*shape):
    return zeros(*shape, dtype=U8)


POOL_PAGES = [
    *refused("tensors", (), page(3, 16)),
    *(row for tensor in (
        3, zeros(3, 16), page(16, 3).t(), page(1, 16).expand(3, -1), page(3, 0), page(3, 20), page(3, 20)[:, :16],
        page(3, 32)[:, 4:20],
    ) for row in refused("tensors", [tensor], blamed="tensors[0]")),
    *refused("tensors", [page(3, 16), page(4, 16)], blamed="tensors[1]"),
]  # fmt: skip


SIZES = [
    (PoolPages, {"tensors": [page(3, 16)]}, POOL_PAGES),
    (LatentPages, PLAIN, LATENT_PAGES),
    (IndexPages, {"data": PLAIN["data"], "storage_block_size": 4, "index_dim": 16}, INDEX_PAGES),
    (compressed_attention_workspace_numel, {"head_dim": 512, "num_sms": 8}, WORKSPACE),
    (index_topk_workspace_numel, INDEX_SIZES, INDEX_WORKSPACE),
    (page_bytes, {"storage_block_size": 4, "row_bytes": 584}, PAGE_BYTES),
]
TABLES = [
    (mla_attention, mla_arguments, MLA, expect_mla),
    (compressed_attention, compressed_arguments, COMPRESSED, expect_compressed),
    (flash_mla_with_kvcache, flash_arguments, FLASH, expect_flash),
    (index_topk, index_arguments, INDEX, expect_selected),
    (write_latent, latent_arguments, LATENT, expect_written),
    (compress, compress_arguments, COMPRESS, expect_as_ever),
]


@cases(*(table[:3] for table in TABLES), right=False)
def test_refused(function, arguments, row, impl):
    expect_refusal(function, row, arguments(), impl)


@cases(*TABLES, right=True)
def test_right(function, arguments, row, impl, expect):
    expect(function, row.applied(arguments()), impl)


@pytest.mark.parametrize(("function", "good", "row"), [
    pytest.param(function, good, row, id=f"{function.__name__}-{row}")
    for function, good, rows in SIZES for row in rows
])  # fmt: skip
def test_pages_and_sizes(function, good, row):
    expect_refusal(function, row, good, None)
