"""Every argument of the latent attention functions: a bad value is refused by name, an odd one gives the oracle's result in both implementations."""

import dataclasses

import pytest
import torch

import quire.kernels
from quire.kernels import (
    IndexPages,
    LatentPages,
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
from tests.kernels.oracles import compressor as reference_compress
from tests.kernels.oracles import latent_write as reference_latent
from tests.kernels.oracles.compressed_attention import slots_attention
from tests.support.helpers import DEVICE, NAN
from tests.support.kernels import compressed_cases, indexer_cases
from tests.support.kernels import mla_cases as dense_cases
from tests.support.kernels.edges import (
    HUGE,
    IMPLS,
    RIGHT,
    Row,
    assert_near,
    attention_bound,
    copied,
    expect_all_arguments,
    expect_refusal,
    factors,
    integers,
    largest,
    no_tensors,
    overlapping,
    refused,
    right,
    zeros,
)

F16, I64, I32 = torch.float16, torch.int64, torch.int32


def ints(*values):
    return torch.tensor(values, dtype=I32, device=DEVICE)


# Implementations that look at values in memory.
CHECKED = IMPLS if DEVICE == "cpu" else ("torch",)


def rounded(pages):
    return dataclasses.replace(pages, data=pages.data.round())


def cases(name, rows):
    """(row, implementation) for each row."""
    return pytest.mark.parametrize(
        "row, impl",
        [pytest.param(row, impl, id=f"{name}-{row}-{impl}") for row in rows for impl in row.impls],
    )


def of_pages(name, **changes):
    """A value: the argument ``name`` with other fields."""
    return lambda a: dataclasses.replace(a[name], **changes)


# MLA.


def mla_arguments():
    case = dense_cases.MlaCase("", [40, 3], [1, 2], num_heads=2, max_seq_len=40)
    batch = dense_cases.make_mla_batch(case)
    for name in ("q", "pages", "kv"):
        batch[name] = batch[name].round()
    batch |= {"softmax_scale": 0.25, "out": zeros(3, 2, 16), "lse": zeros(2, 3)}
    return batch | {"num_decodes": 1, "workspace": zeros(1 << 16)}


MLA = [
    *no_tensors("q", torch.float64, first=True),
    *refused("q", lambda a: zeros(3, 0, 32), blamed="q: num_heads"),
    *refused("q", lambda a: zeros(3, 2, 24), error=NotImplementedError),
    *right("q", lambda a: a["q"][:1].expand(3, 2, 32)),
    *right("q", lambda a: {n: a[n].requires_grad_() for n in ("q", "kv")}),
    *right("q", lambda a: {"q": a["q"][:0], "kv": None, "out": None, "lse": a["lse"][:, :0], "cu_seqlens_q": ints(0, 0, 0)}),
    *no_tensors("pages", F16, optional=False),
    *refused("pages", lambda a: a["pages"][..., :16]),
    *refused("pages", lambda a: a["pages"][:0], blamed="pages: num_pages"),
    *refused("pages", lambda a: a["pages"][:, :0], blamed="pages: block_size"),
    *no_tensors("block_table", I64, optional=False),
    *refused("block_table", lambda a: a["block_table"][:, :0], blamed="block_table: width"),
    Row("block_table", lambda a: a["block_table"] * 0 + 99, impls=CHECKED),
    *right("block_table", lambda a: a["block_table"][:, :2]),
    *no_tensors("seq_lens", I64, optional=False),
    *right("seq_lens", lambda a: ints(0, -5)),
    *no_tensors("cu_seqlens_q", I64, optional=False),
    *refused("cu_seqlens_q", lambda a: a["cu_seqlens_q"][:2]),
    *integers("max_seqlen_q", 0, odd=[2**40]),
    *refused("max_seqlen_q", lambda a: {"max_seqlen_q": 1, "num_decodes": 2}),
    *right("max_seqlen_q", lambda a: {"max_seqlen_q": 2**31, "num_decodes": 2}),
    *factors("softmax_scale", -30, 16),
    *refused("softmax_scale", None),
    *refused("head_dim_v", 0, -1, 1.5, None),
    *refused("head_dim_v", 24, error=NotImplementedError),
    *refused("head_dim_v", 8, 2**40, error=NotImplementedError),
    *no_tensors("kv", F16),
    *refused("kv", lambda a: a["kv"][:, :16]),
    *right("kv", lambda a: a["kv"][:1].expand(3, 32)),
    *integers("max_seq_len", 0, odd=[2**40]),
    *integers("num_decodes", 0, 2, odd=[0, 2]),
    *no_tensors("out", F16),
    *overlapping("out"),
    *right("out", None),
    *no_tensors("lse", F16),
    *overlapping("lse"),
    *no_tensors("workspace", F16),
    *right("workspace", lambda a: {"workspace": None, "max_seq_len": None}),
    *refused("impl", "cuda", 3),
]  # fmt: skip


@cases("mla", MLA)
def test_mla(row, impl):
    arguments = mla_arguments()
    if row.outcome is not RIGHT:
        expect_refusal(mla_attention, row, arguments, impl)
        return
    given = copied(row.applied(arguments))
    oracle = {n: x for n, x in given.items() if n not in ("out", "lse", "workspace")}
    exact, exact_lse = dense_cases.mla_reference(oracle)
    out = mla_attention(**given, impl=impl)
    assert not out.requires_grad
    rows = max(largest(given["pages"]), largest(given["kv"]))
    logit = largest(given["q"]) * rows * 32 * given["softmax_scale"]
    # Dots are exact: of logits whose steps are so far apart, all but the highest weigh nothing, without an error.
    sharp = given["softmax_scale"] >= 2**8
    bound = attention_bound(0.0 if sharp else logit, 40, 32, rows)
    assert_near("out", out, exact, bound)
    assert_near("lse", given["lse"], exact_lse, bound + 64 * 2.0**-24 * logit)


# Window and compressed entries.


def compressed_arguments(topk=3, **options):
    case = compressed_cases.Case("", [20, 3], [1, 2], ratio=4, topk=topk, sliding_window=20, ring=False, **options)  # fmt: skip
    batch = compressed_cases.make_batch(case)
    batch |= {"window_pages": rounded(batch["window_pages"]), "q": batch["q"].round()}
    batch |= {"compressed_pages": rounded(batch["compressed_pages"])}
    if batch["kv"] is not None:
        batch["kv"] = batch["kv"].round()
    batch |= {"out": zeros(3, 2, 16), "lse": zeros(2, 3), "workspace": zeros(1 << 18)}
    return batch | {"num_decodes": 1, "max_seq_len": 20}


def all_entries(**changes):
    """A value: another one of another argument, where every entry is seen."""
    return lambda a: {"topk_indices": None, "topk_lens": None, **changes}


COMPRESSED = [
    *no_tensors("q", torch.float64, first=True),
    *refused("q", lambda a: zeros(3, 0, 16), blamed="q: num_heads"),
    *right("q", lambda a: a["q"][:1].expand(3, 2, 16), lambda a: a["q"].transpose(0, 1).contiguous().transpose(0, 1)),
    *right("q", lambda a: {"q": a["q"].requires_grad_()}),
    *refused("window_pages", None, 3, lambda a: a["window_pages"].data),
    *refused("window_pages", lambda a: LatentPages(a["window_pages"].data.half(), 4, 16, 4)),
    *refused("window_pages", lambda a: LatentPages(a["window_pages"].data.to("meta"), 4, 16, 4)),
    *refused("window_pages", lambda a: LatentPages(a["window_pages"].data[:0], 4, 16, 4), blamed="window_pages: num_pages"),
    *refused("window_pages", lambda a: LatentPages(zeros(1, 4, 16).expand(2**29, 4, 16), 4, 16, 4), error=NotImplementedError),
    *no_tensors("window_table", I64, optional=False),
    *right("window_table", lambda a: a["window_table"][:, :0], lambda a: a["window_table"][:, :1], lambda a: a["window_table"][:, :3]),
    *no_tensors("seq_lens", I64, optional=False),
    *right("seq_lens", lambda a: ints(0, -5)),
    *no_tensors("cu_seqlens_q", I64, optional=False),
    *integers("sliding_window", 1, odd=[1, 2**30 - 1, *HUGE]),
    *right("sliding_window", *(all_entries(sliding_window=n) for n in HUGE)),
    *integers("max_seqlen_q", 0, odd=[2**40]),
    *right("max_seqlen_q", lambda a: {"max_seqlen_q": 2**31, "num_decodes": 2}),
    *refused("max_seqlen_q", lambda a: {"max_seqlen_q": 1, "num_decodes": 2}),
    *no_tensors("kv", F16),
    *refused("kv", lambda a: a["kv"][:1]),
    *refused("compressed_pages", None, 3),
    *refused("compressed_pages", of_pages("compressed_pages", rope_dim=8)),
    *refused("compressed_pages", lambda a: LatentPages(zeros(1, 4, 16).expand(2**29, 4, 16), 4, 16, 4), error=NotImplementedError),
    *no_tensors("compressed_table", I64),
    *refused("compressed_table", None, blamed="compressed_pages"),
    *refused("compressed_table", lambda a: a["compressed_table"][:, :0], blamed="compressed_table: width"),
    *right("compressed_table", lambda a: a["compressed_table"][:, :1]),
    *right("compressed_table", lambda a: all_entries(compressed_table=a["compressed_table"][:, :1])(a)),
    *integers("compress_ratio", 1, 2**30, odd=[2**30]),
    *refused("compress_ratio", None, blamed="compressed_pages"),
    *no_tensors("topk_indices", I64),
    *right("topk_indices", lambda a: a["topk_indices"][:, :0], lambda a: a["topk_indices"] * 0 - 1),
    *no_tensors("topk_lens", I64),
    *refused("topk_lens", lambda a: a["topk_lens"][:1]),
    *right("topk_lens", lambda a: ints(-1, 4, -3), lambda a: {"topk_lens": ints(2**31 - 1, -2**31, 3), "num_decodes": 2}),
    *no_tensors("sinks", F16),
    *right("sinks", lambda a: a["sinks"] + float("inf"), None),
    *factors("softmax_scale", -30, 16),
    *no_tensors("cos_sin", F16),
    *refused("cos_sin", lambda a: a["cos_sin"][:, :2]),
    Row("cos_sin", lambda a: a["cos_sin"][:19], impls=CHECKED),
    *right("cos_sin", None),
    *integers("max_seq_len", 0, odd=[2**40]),
    *integers("num_decodes", 0, 2, odd=[0, 2]),
    *no_tensors("out", F16),
    *overlapping("out"),
    *right("out", None),
    *no_tensors("lse", F16),
    *overlapping("lse"),
    *no_tensors("workspace", F16),
    *right("workspace", lambda a: {"workspace": None, "max_seq_len": None}),
    *refused("impl", "cuda", 3),
]  # fmt: skip


def fill(pages):
    """Rows that nothing names and the table still does, seen where a table is shorter or indices are others."""
    return dataclasses.replace(pages, data=pages.data.nan_to_num(1.0))


@cases("compressed", COMPRESSED)
def test_compressed(row, impl):
    arguments = compressed_arguments()
    if row.outcome is not RIGHT:
        expect_refusal(compressed_attention, row, arguments, impl)
        return
    arguments |= {n: fill(arguments[n]) for n in ("window_pages", "compressed_pages")}
    tables = ("compressed_table", "topk_indices")
    arguments |= {n: torch.where(arguments[n] == compressed_cases.NO_PAGE, 0, arguments[n]) for n in tables}  # fmt: skip
    given = copied(row.applied(arguments))
    oracle = {n: x for n, x in given.items() if n not in ("out", "lse", "workspace")}
    exact, exact_lse = compressed_cases.exactly(oracle)
    out = compressed_attention(**given, impl=impl)
    assert not out.requires_grad
    pages = given["window_pages"].data, given["compressed_pages"].data, given["kv"]
    rows = max(largest(x) for x in pages)
    scale = given["softmax_scale"] or 0.25
    logit = largest(given["q"]) * rows * 16 * scale
    bound = attention_bound(0.0 if scale >= 2**8 else logit, 30, 16, rows)
    # The inverse RoPE is two products and a sum more.
    assert_near("out", out, exact, 2 * bound)
    assert_near("lse", given["lse"], exact_lse, bound + 64 * 2.0**-24 * logit)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [0, 1, 2, 5])
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_a_ring_too_small_for_the_window_without_in_step_rows(impl, width, num_decodes):
    """The oldest rows are overwritten: the last width * 4 positions are seen, whichever query asks."""
    batch = compressed_arguments(None, in_step=False) | {"num_decodes": num_decodes}
    batch |= {n: fill(batch[n]) for n in ("window_pages", "compressed_pages")}
    batch["window_table"] = batch["window_table"][:, :width]
    del batch["out"], batch["workspace"]
    lse = batch.pop("lse")
    exact, exact_lse = compressed_cases.exactly(batch)
    out = compressed_attention(**batch, lse=lse, impl=impl)
    logit = largest(batch["q"]) * largest(batch["window_pages"].data) * 4.0
    bound = attention_bound(logit, 30, 16, 5.0)
    assert_near("out", out, exact, 2 * bound)
    assert_near("lse", lse, exact_lse, bound + 64 * 2.0**-24 * logit)


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
    *no_tensors("q", torch.float64, first=True),
    *refused("q", lambda a: zeros(2, 1, 2, 256)),
    *refused("q", lambda a: {"q": zeros(2, 1, 0, 512), "out": None, "lse": None}, blamed="q: num_heads"),
    *right("q", lambda a: a["q"][:1].expand(2, 1, 2, 512)),
    *no_tensors("k_cache", F16, optional=False),
    *refused("k_cache", lambda a: a["k_cache"][:0], blamed="k_cache: num_pages"),
    *refused("k_cache", lambda a: a["k_cache"][:1, :1].expand(2**29, 4, 1, 512), error=NotImplementedError),
    *refused("k_cache", lambda a: {"is_fp8_kvcache": True, "k_cache": zeros(2, 4 * 584 + 8, dtype=torch.uint8)[:, :-8].unflatten(1, (4, 1, 584))}),
    *refused("block_table", 3, error=NotImplementedError, blamed="indices"),
    *refused("cache_seqlens", 3, error=NotImplementedError, blamed="indices"),
    *refused("head_dim_v", 0, 128, None, error=NotImplementedError),
    *right("tile_scheduler_metadata", 3),
    *refused("num_splits", 1),
    *factors("softmax_scale", -30, 16),
    *refused("causal", True, error=NotImplementedError, blamed="indices"),
    *refused("is_fp8_kvcache", None, 1, "no"),
    *no_tensors("indices", I64),
    *refused("indices", None, error=NotImplementedError),
    *refused("indices", lambda a: a["indices"][..., :0], blamed="indices: topk"),
    *right("indices", lambda a: a["indices"] * 0 - 1),
    Row("indices", lambda a: a["indices"] + 8, impls=("torch",)),
    *no_tensors("attn_sink", F16),
    *no_tensors("extra_k_cache", F16),
    *refused("extra_k_cache", None),
    *no_tensors("extra_indices_in_kvcache", I64),
    *refused("extra_indices_in_kvcache", None, blamed="extra_k_cache"),
    *refused("extra_indices_in_kvcache", lambda a: a["indices"].expand(2, 2, 5)),
    *no_tensors("topk_length", I64),
    *refused("topk_length", lambda a: ints(1, 2, 3)),
    *right("topk_length", lambda a: ints(-1, 6), lambda a: ints(-2**31, 2**31 - 1)),
    *no_tensors("extra_topk_length", I64),
    *right("extra_topk_length", lambda a: ints(99, -2)),
    *no_tensors("out", F16),
    *refused("out", lambda a: zeros(2, 1, 512, 2).transpose(2, 3), lambda a: zeros(1, 1, 2, 512).expand(2, 1, 2, 512)),
    *no_tensors("lse", F16),
    *overlapping("lse"),
    *no_tensors("workspace", F16),
    *right("workspace", None),
    *refused("impl", "cuda", 3),
]  # fmt: skip


@cases("flash", FLASH)
def test_flash_mla(row, impl):
    arguments = flash_arguments()
    if row.outcome is not RIGHT:
        expect_refusal(flash_mla_with_kvcache, row, arguments, impl)
        return
    given = row.applied(arguments)
    lists = [
        (LatentPages(given[cache].squeeze(2), 4), given[rows][:, 0], given[lens])
        for cache, rows, lens in (
            ("k_cache", "indices", "topk_length"),
            ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
        )
    ]
    scale = given["softmax_scale"] or 512**-0.5
    exact, exact_lse = slots_attention(
        given["q"][:, 0], lists, softmax_scale=scale, sinks=given["attn_sink"], dtype=torch.float64
    )
    out, lse = flash_mla_with_kvcache(**given, impl=impl)
    rows = largest(given["k_cache"])
    logit = largest(given["q"]) * rows * 512 * scale
    bound = attention_bound(0.0 if scale >= 2**8 else logit, 10, 512, rows)
    assert_near("out", out[:, 0], exact, bound)
    exact_lse = torch.where(exact_lse.isneginf(), float("inf"), exact_lse)
    assert_near("lse", lse[:, :, 0].T, exact_lse, bound + 64 * 2.0**-24 * logit)


# The indexer.


def index_arguments():
    batch = indexer_cases.make_index_batch(indexer_cases.IndexCase("", [60, 9], [1, 2], topk=4))
    batch["pages"] = dataclasses.replace(batch["pages"], data=batch["pages"].data.nan_to_num(1.0))
    batch |= {"out": zeros(3, 4, dtype=I32), "lens": zeros(3, dtype=I32)}
    return batch | {"workspace": zeros(1 << 16)}


INDEX = [
    *no_tensors("q", torch.float64, first=True),
    *refused("q", lambda a: {"q": zeros(3, 0, 16), "weights": zeros(3, 0)}, blamed="q: index_heads"),
    *refused("q", lambda a: {"q": zeros(3, 129, 16), "weights": zeros(3, 129)}, error=NotImplementedError),
    *right("q", lambda a: {n: a[n].requires_grad_() for n in ("q", "weights")}),
    *no_tensors("weights", F16, optional=False),
    *refused("pages", None, 3, lambda a: a["pages"].data),
    *refused("pages", lambda a: IndexPages(a["pages"].data.to("meta"), 4, 16)),
    *no_tensors("block_table", I64, optional=False),
    *right("block_table", lambda a: a["block_table"][:, :0], lambda a: a["block_table"][:, :1], lambda a: a["block_table"][:, :2]),
    Row("block_table", lambda a: a["block_table"] * 0 - 1, impls=CHECKED),
    Row("block_table", lambda a: a["block_table"] + 99, impls=CHECKED),
    *no_tensors("seq_lens", I64, optional=False),
    *right("seq_lens", lambda a: ints(0, -5)),
    *no_tensors("cu_seqlens_q", I64, optional=False),
    Row("cu_seqlens_q", lambda a: ints(0, 4, 3), impls=CHECKED),
    Row("cu_seqlens_q", lambda a: ints(0, 1, 4), impls=CHECKED),
    *refused("topk", 0, -1, 1.5, True, None),
    *refused("topk", 4097, 2**40, error=NotImplementedError),
    *right("topk", lambda a: {"topk": 40, "out": None}),
    *integers("compress_ratio", 1, 2**30, odd=[2**30]),
    *refused("max_seqlen_q", -1, 1.5, True, None),
    *right("max_seqlen_q", *HUGE),
    *integers("max_seq_len", 0, 2**31 - 1, odd=[16, 2**31 - 1]),
    *no_tensors("out", I64),
    *overlapping("out"),
    *right("out", None),
    *no_tensors("lens", I64),
    *refused("lens", lambda a: zeros(3, 2, dtype=I32)[:, 0]),
    *no_tensors("workspace", F16),
    *refused("workspace", lambda a: zeros(1)),
    *right("workspace", None),
    *refused("impl", "cuda", 3),
]  # fmt: skip


@cases("index", INDEX)
def test_index(row, impl):
    arguments = index_arguments()
    if row.outcome is not RIGHT:
        expect_refusal(index_topk, row, arguments, impl)
        return
    given = row.applied(arguments)
    known = given | {n: given[n].detach() for n in ("q", "weights")}
    scores = indexer_cases.exact_scores(known)
    scores = [x[: given["max_seq_len"] // given["compress_ratio"]] for x in scores]
    exact, exact_lens = indexer_cases.reference_indexer.select(scores, given["topk"])
    out, lens = index_topk(**given, impl=impl)
    assert torch.equal(out.cpu(), exact) and torch.equal(lens.cpu(), exact_lens)


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
    *no_tensors("x", torch.float64, first=True),
    *right("x", lambda a: a["x"][:1].expand(3, 16), lambda a: a["x"].requires_grad_(), lambda a: a["x"] * 0),
    *right("x", lambda a: {n: a[n][:0] for n in ("x", "slot_mapping", "positions", "out")}),
    *refused("pages", 3, None),
    *refused("pages", lambda a: LatentPages(a["pages"].data.to("meta"), 4, 16, 4)),
    *no_tensors("slot_mapping", I32, optional=False),
    Row("slot_mapping", lambda a: a["slot_mapping"] + 3, impls=CHECKED),
    *no_tensors("positions", I32),
    *refused("positions", None),
    *right("positions", lambda a: a["positions"] * 0 - 1, lambda a: a["positions"] - 2),
    Row("positions", lambda a: a["positions"] + 1, impls=CHECKED),
    *right("positions", lambda a: {"positions": torch.tensor([4, 99, 0], device=DEVICE), "out": None}),
    *no_tensors("cos_sin", F16),
    *refused("cos_sin", None),
    *right("cos_sin", lambda a: {"cos_sin": a["cos_sin"][:0], "positions": a["positions"] * 0 - 1}),
    *no_tensors("norm_weight", I32),
    *right("norm_weight", None),
    *factors("eps", -100, 30),
    *no_tensors("out", F16),
    *overlapping("out"),
    *right("out", None),
    *refused("impl", "cuda", 3),
]  # fmt: skip


@cases("write_latent", LATENT)
def test_write_latent(row, impl):
    arguments = latent_arguments()
    if row.outcome is not RIGHT:
        expect_refusal(write_latent, row, arguments, impl)
        return
    given = row.applied(arguments)
    names = ("x", "positions", "cos_sin", "norm_weight", "eps")
    oracle = {
        n: given[n].detach() if isinstance(given[n], torch.Tensor) else given[n] for n in names
    }
    if given["out"] is None:
        oracle["positions"] = torch.where(given["slot_mapping"] < 0, -1, oracle["positions"])
    exact = reference_latent.write_latent(**oracle, dtype=torch.float64)
    write_latent(**given, impl=impl)
    assert not given["pages"].data.requires_grad
    # A sum of 16 squares, a root, two products; two products and a sum of the turn; 32 roundings are more than these.
    bound = 32 * 2.0**-24 * max(1.0, largest(exact))
    live = given["slot_mapping"] >= 0
    assert_near(
        "pages", given["pages"].data.view(8, 16)[given["slot_mapping"][live]], exact[live], bound
    )
    if given["out"] is not None:
        assert not given["out"].requires_grad
        assert_near("out", given["out"], exact, bound)


def compress_arguments():
    """Two sequences that close window 1 and window 0 of 4 tokens, the first with rows of an earlier step."""
    generator = torch.Generator().manual_seed(11)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    angle = torch.arange(8.0, device=DEVICE)[:, None] * torch.tensor([1.0, 0.1], device=DEVICE)
    return {
        "kv": normal(6, 16), "gate": normal(6, 16), "ape": normal(4, 16), "state": normal(3, 8, 2, 16), "state_index": ints(2, 0),
        "seq_lens": ints(8, 4), "cu_seqlens_q": ints(0, 2, 6), "ratio": 4, "overlap": False, "norm_weight": zeros(16) + 1.5, "eps": 1e-6,
        "cos_sin": torch.cat([angle.cos(), angle.sin()], 1), "pages": LatentPages(torch.full((2, 4, 16), NAN, device=DEVICE), 4, 16, 4),
        "slot_mapping": torch.tensor([99, 5, 99, 99, 99, 0], device=DEVICE), "max_seqlen_q": 4,
    }  # fmt: skip


COMPRESS = [
    *no_tensors("kv", torch.float64, first=True),
    *right("kv", lambda a: a["kv"].requires_grad_(), lambda a: a["kv"][:1].expand(6, 16)),
    *no_tensors("gate", torch.float64, optional=False),
    *no_tensors("ape", F16, optional=False),
    *no_tensors("state", F16, optional=False),
    *overlapping("state"),
    *refused("state", lambda a: a["state"][:, :2], blamed="state: ring"),
    *no_tensors("state_index", I64, optional=False),
    *right("state_index", lambda a: ints(2, -1), lambda a: ints(-1, 0), lambda a: ints(-1, -7)),
    Row("state_index", lambda a: ints(2, 3), impls=CHECKED),
    *no_tensors("seq_lens", I64, optional=False),
    *right("seq_lens", lambda a: ints(8, 0), lambda a: {"seq_lens": ints(8, -3), "state_index": ints(2, 99)}),
    *no_tensors("cu_seqlens_q", I64, optional=False),
    Row("cu_seqlens_q", lambda a: ints(1, 2, 6), impls=CHECKED),
    Row("cu_seqlens_q", lambda a: ints(0, 2, 7), impls=CHECKED),
    *integers("ratio", 1, 2**30),
    *refused("ratio", 5, blamed="ape"),
    *refused("overlap", None, 0, "no"),
    *refused("overlap", True, blamed="kv"),
    *no_tensors("norm_weight", I32, optional=False),
    *factors("eps", -100, 30),
    *no_tensors("cos_sin", F16, optional=False),
    Row("cos_sin", lambda a: a["cos_sin"][:4], impls=CHECKED),
    *refused("pages", None, 3),
    *refused("pages", lambda a: LatentPages(a["pages"].data.to("meta"), 4, 16, 4)),
    *no_tensors("slot_mapping", I32, optional=False),
    *right("slot_mapping", lambda a: a["slot_mapping"] * 0 - 1),
    Row("slot_mapping", lambda a: a["slot_mapping"] + 3, impls=CHECKED),
    *integers("max_seqlen_q", 0, odd=HUGE),
    *refused("max_seqlen_q", 2),
    *refused("impl", "cuda", 3),
]  # fmt: skip


@cases("compress", COMPRESS)
def test_compress(row, impl):
    arguments = compress_arguments()
    if row.outcome is not RIGHT:
        expect_refusal(compress, row, arguments, impl)
        return
    given = row.applied(arguments)
    state = given["state"].clone()
    kv, gate = given["kv"].detach(), given["gate"]
    options = {n: given[n] for n in ("ape", "ratio", "overlap", "norm_weight", "eps", "cos_sin")}
    expected, kept = {}, state.clone()
    for s, (first, last) in enumerate([(0, 2), (2, 6)]):
        index, length = int(given["state_index"][s]), int(given["seq_lens"][s])
        if index < 0 or length < last - first:
            continue
        context = length - (last - first)
        earlier = state[index, :context] - torch.stack([torch.zeros_like(state[0, 0, 0]).expand(context, 16), given["ape"][torch.arange(context) % 4]], 1)  # fmt: skip
        rows = torch.cat([earlier[:, 0], kv[first:last]]).double(), torch.cat([earlier[:, 1], gate[first:last]]).double()  # fmt: skip
        entries = reference_compress.compress(*rows, **options, dtype=torch.float64)
        slot = int(given["slot_mapping"][last - 1])
        if slot >= 0:
            expected[slot] = entries[length // 4 - 1]
        for t in range(first, last):
            position = context + t - first
            kept[index, position, 0] = kv[t]
            kept[index, position, 1] = gate[t] + given["ape"][position % 4]
    compress(**given, impl=impl)
    data = given["pages"].data
    assert not data.requires_grad and not given["state"].requires_grad
    assert torch.equal(given["state"], kept)
    written = torch.nonzero(~data.view(8, 16)[:, 0].isnan())[:, 0].tolist()
    assert written == sorted(expected)
    for slot, entry in expected.items():
        # A softmax over 4 logits below 8, a mean of 4, then what a latent row takes: 128 roundings are more than these.
        bound = 128 * 2.0**-24 * max(1.0, largest(entry))
        assert_near("entry", data.view(8, 16)[slot], entry, bound)


# Pages and sizes.

PLAIN = {"data": torch.zeros(2, 4, 16), "storage_block_size": 4, "head_dim": 16, "rope_dim": 4}
U8 = torch.uint8
LATENT_PAGES = [
    *refused("data", None, 3, torch.zeros(2, 4, 16, dtype=torch.float64), torch.zeros(2, 4, 8)),
    *refused("data", lambda a: a["data"].transpose(0, 1)),
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
    *refused("data", lambda a: a["data"].transpose(0, 1)),
    *refused("data", torch.zeros(2, 79, dtype=U8), torch.zeros(2, 81, dtype=U8), torch.zeros(2, 2**31, dtype=U8, device="meta")),
    *refused("storage_block_size", 0, -1, 1.5, True, None),
    *refused("storage_block_size", 5, blamed="data"),
    *refused("index_dim", 0, 24, 1024, -16, error=NotImplementedError),
]  # fmt: skip


@pytest.mark.parametrize("row", LATENT_PAGES, ids=str)
def test_latent_pages(row):
    expect_refusal(LatentPages, row, PLAIN, None)


@pytest.mark.parametrize("row", INDEX_PAGES, ids=str)
def test_index_pages(row):
    good = {"data": PLAIN["data"], "storage_block_size": 4, "index_dim": 16}
    expect_refusal(IndexPages, row, good, None)


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


@pytest.mark.parametrize("row", WORKSPACE, ids=str)
def test_workspace(row):
    good = {"head_dim": 512, "num_sms": 8}
    expect_refusal(compressed_attention_workspace_numel, row, good, None)


@pytest.mark.parametrize("row", INDEX_WORKSPACE, ids=str)
def test_index_workspace(row):
    expect_refusal(index_topk_workspace_numel, row, INDEX_SIZES, None)


@pytest.mark.parametrize("row", PAGE_BYTES, ids=str)
def test_page_bytes(row):
    expect_refusal(page_bytes, row, {"storage_block_size": 4, "row_bytes": 584}, None)


def test_every_argument_has_a_row():
    tables = {
        "IndexPages": INDEX_PAGES, "LatentPages": LATENT_PAGES, "compress": COMPRESS, "compressed_attention": COMPRESSED,
        "compressed_attention_workspace_numel": WORKSPACE, "flash_mla_with_kvcache": FLASH, "index_topk": INDEX,
        "index_topk_workspace_numel": INDEX_WORKSPACE, "mla_attention": MLA, "page_bytes": PAGE_BYTES, "write_latent": LATENT,
    }  # fmt: skip
    home = quire.kernels._HOME
    folders = {"common", "compressor", "indexer", "latent", "latent_write"}
    assert set(tables) == {n for n in home if home[n].split(".")[0] in folders}
    for name, rows in tables.items():
        expect_all_arguments(getattr(quire.kernels, name), rows)


def test_heads_too_far_apart_for_32_bits():
    arguments = {
        n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in index_arguments().items()
    }
    arguments["pages"] = IndexPages(arguments["pages"].data.to("meta"), 4, 16)
    arguments["q"] = torch.empty_strided((3, 4, 16), (16, 2**30, 1), device="meta")
    with pytest.raises(ValueError, match=r"^q: expected heads within 2\*\*31 elements"):
        index_topk(**arguments)
