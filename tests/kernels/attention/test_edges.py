"""Every argument of ``paged_attention`` and its like: a bad value is refused by name, an odd one gives the oracle's result in both implementations."""

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import (
    merge_partials,
    paged_attention,
    sliding_window_attention,
    workspace_numel,
    write_kv,
)
from tests.kernels.oracles import attention as reference
from tests.kernels.oracles import write_kv as reference_write
from tests.support.helpers import (
    DEVICE,
    NAN,
    AttentionCase,
    assert_within_budget,
    attention_reference,
    make_batch,
)
from tests.support.kernels.edges import (
    HUGE,
    RIGHT,
    cases,
    copied,
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

E4M3 = torch.float8_e4m3fn


def attention_arguments(window=None, scale=None):
    """Arguments of attention; ``out`` and ``lse`` included."""
    case = AttentionCase(
        "", [20, 3], [1, 2], num_heads=2, num_kv_heads=1, sliding_window=window, max_seq_len=20
    )
    batch = make_batch(case)
    batch |= {"workspace": zeros(1 << 16), "k_scale": None, "v_scale": None}
    batch |= {"out": zeros(3, 2, 16), "lse": zeros(2, 3), "sinks": zeros(2)}
    if scale is not None:
        for name in ("k_pages", "v_pages"):
            batch[name] = batch[name].to(E4M3)
        batch |= {"k_scale": scale, "v_scale": scale}
    return batch


def expect_attention(function, given, impl):
    """Require the oracle's output and lse, and no gradient."""
    exact, exact_lse = attention_reference(plain(given, "out", "lse"))
    # A sequence on the decode path, the other one on the prefill path.
    if given["num_decodes"] is None and given["seq_lens"].shape[0]:
        given["num_decodes"] = 1
    out = function(**given, impl=impl)
    assert not out.requires_grad and (given["out"] is None or out is given["out"])
    assert_within_budget("out", out, exact)
    assert_within_budget("lse", given["lse"], exact_lse)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def spread_heads(a):
    """q with heads outside tokens."""
    return a["q"].transpose(0, 1).contiguous().transpose(0, 1)


def no_tokens(a):
    empty = {name: a[name][:0] for name in ("q", "k", "v", "out")}
    return empty | {
        "lse": a["lse"][:, :0],
        "cu_seqlens_q": torch.zeros_like(a["cu_seqlens_q"]),
        "max_seqlen_q": 0,
    }


def no_sequences(a):
    """Neither tokens nor sequences."""
    empty = {name: a[name][:0] for name in ("block_table", "seq_lens")}
    return no_tokens(a) | empty | {"cu_seqlens_q": a["cu_seqlens_q"][:1]}


ATTENTION = [
    *tensors(attention_arguments(), "q", ("k", "v", "sinks", "out", "lse", "workspace"), (), ("out", "lse")),
    *refused("q", lambda a: zeros(3, 0, 16)),
    *refused("q", lambda a: a["q"][..., :8], blamed="k_pages"),
    *right("q", spread_heads, lambda a: a["q"][:1].expand(3, 2, 16), no_tokens, no_sequences),
    *right("q", lambda a: {n: a[n].requires_grad_() for n in ("q", "k", "v")}),
    *refused("k_pages", lambda a: a["k_pages"][:0], blamed="v_pages"),
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
    *values(
        "block_table",
        lambda a: {
            "block_table": a["block_table"][:, :1],
            "sliding_window": 17,
            "k": None,
            "v": None,
        },
    ),
]
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


def merge_arguments():
    generator = torch.Generator().manual_seed(3)
    parts = torch.randn(3, 5, 4, 16, generator=generator).to(DEVICE)
    lse = torch.randn(3, 4, 5, generator=generator).to(DEVICE)
    lse[1, :, 2], parts[1, 2] = -float("inf"), NAN
    return {
        "partial_out": parts, "partial_lse": lse, "sinks": zeros(4), "out": zeros(5, 4, 16), "lse": zeros(4, 5),
    }  # fmt: skip


MERGE = [
    *tensors(merge_arguments(), "partial_out", ("sinks", "out", "lse"), (), ("out", "lse")),
    *refused("partial_out", lambda a: a["partial_out"][:0], blamed="partial_out: num_parts"),
    *refused("partial_out", lambda a: a["partial_out"][..., :12], error=NotImplementedError),
    *right("partial_out", lambda a: a["partial_out"][:1].expand(3, 5, 4, 16)),
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


def expect_merged(function, given, impl):
    """Require the oracle's output and lse, and no gradient."""
    inputs = plain(copied(plain(given)), "out", "lse")
    with bounding():
        shape = given["partial_lse"].shape[1:]
        exact_lse = torch.full(shape, NAN, dtype=torch.float64, device=DEVICE)
        exact = reference.merge_partials(**inputs, lse=exact_lse)
    out = function(**given, impl=impl)
    assert not out.requires_grad
    assert_within_budget("out", out, exact)
    if given["lse"] is not None:
        assert_within_budget("lse", given["lse"], exact_lse)


def write_arguments(scale=None):
    rows = torch.arange(4 * 2 * 16, device=DEVICE).view(4, 2, 16) % 29 - 14.0
    pages = zeros(3, 8, 2, 16, dtype=torch.float32 if scale is None else E4M3)
    return {
        "k": rows, "v": rows.flip(0), "k_pages": pages, "v_pages": pages.clone(), "slot_mapping": torch.tensor([9, -1, 0, 23], device=DEVICE),
        "k_scale": scale, "v_scale": scale,
    }  # fmt: skip


WRITE = [
    *tensors(write_arguments(), "k"),
    *right("k", lambda a: a["k"][:1].expand(4, 2, 16), lambda a: a["k"].transpose(0, 1).contiguous().transpose(0, 1)),
    *right("k", lambda a: {n: a[n][:0] for n in ("k", "v", "slot_mapping")}),
    *right("k", lambda a: {n: a[n].requires_grad_() for n in ("k", "v")}),
    *refused("k_pages", lambda a: {n: a[n][..., :0, :] for n in ("k_pages", "v_pages")}, blamed="k_pages: num_kv_heads"),
    *right("k_pages", lambda a: {n: zeros(3, 2, 8, 16).transpose(1, 2) for n in ("k_pages", "v_pages")}),
    *refused("k_pages", far("k_pages", (3, 8, 2, 16), (32, 2**30, 16, 1))),
    *right("slot_mapping", lambda a: a["slot_mapping"] * 0 - 1),
    *values("slot_mapping", lambda a: a["slot_mapping"] + 1),
    *refused("k_scale", 1.0),
    *refused("v_scale", 1.0),
]  # fmt: skip
WRITE_SCALED = [row for row in SCALED if row.name != "k_scale" or row.outcome is not RIGHT or not callable(row.value)]  # fmt: skip


def expect_written(function, given, impl):
    """Require the oracle's pages."""
    expected = copied(plain(given))
    reference_write.write_kv(**expected)
    function(**given, impl=impl)
    for name in ("k_pages", "v_pages"):
        assert not given[name].requires_grad
        assert torch.equal(given[name].float(), expected[name].float())


TABLES = [
    (paged_attention, attention_arguments, FULL, expect_attention),
    (sliding_window_attention, lambda: attention_arguments(window=40), WINDOW, expect_attention),
    (paged_attention, lambda: attention_arguments(scale=0.5), SCALED, expect_attention),
    (merge_partials, merge_arguments, MERGE, expect_merged),
    (write_kv, write_arguments, WRITE, expect_written),
    (write_kv, lambda: write_arguments(0.5), WRITE_SCALED, expect_written),
]


@cases(*(table[:3] for table in TABLES), right=False)
def test_refused(function, arguments, row, impl):
    expect_refusal(function, row, arguments(), impl)


@cases(*TABLES, right=True)
def test_right(function, arguments, row, impl, expect):
    expect(function, row.applied(arguments()), impl)


SIZES = {"num_decodes": 4, "max_seqlen_q": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_sms": 8}  # fmt: skip
WORKSPACE = [
    row for name in SIZES for row in refused(name, 0, -1, 1.5, True, None, float("nan"))
] + refused("num_kv_heads", 3, blamed="num_heads")


@pytest.mark.parametrize("row", WORKSPACE, ids=str)
def test_workspace(row):
    expect_refusal(workspace_numel, row, SIZES, None)
