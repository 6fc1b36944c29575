"""Every argument of ``paged_attention`` and its like: a bad value is refused by name, an odd one gives the oracle's result in both implementations."""

import pytest
import torch

import quire.kernels
from quire.kernels import (
    merge_partials,
    paged_attention,
    sliding_window_attention,
    workspace_numel,
    write_kv,
)
from quire.kernels.attention.api import AttentionCall
from tests.kernels.oracles import attention as reference
from tests.kernels.oracles import write_kv as reference_write
from tests.support.helpers import DEVICE, NAN, AttentionCase, make_batch
from tests.support.kernels.edges import (
    HUGE,
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

E4M3 = torch.float8_e4m3fn
BF16, F16, I64 = torch.bfloat16, torch.float16, torch.int64


def attention_arguments(window=None, scale=None):
    """A batch of integers, whose dot products are exact in any arithmetic; ``out`` and ``lse`` included."""
    case = AttentionCase(
        "", [20, 3], [1, 2], num_heads=2, num_kv_heads=1, sliding_window=window, max_seq_len=20
    )
    batch = make_batch(case)
    for name in ("q", "k", "v", "k_pages", "v_pages"):
        batch[name] = batch[name].round()
    batch |= {"workspace": zeros(1 << 16), "k_scale": None, "v_scale": None}
    batch |= {"out": zeros(3, 2, 16), "lse": zeros(2, 3), "sinks": zeros(2)}
    if scale is not None:
        for name in ("k_pages", "v_pages"):
            batch[name] = batch[name].to(E4M3)
        batch |= {"k_scale": scale, "v_scale": scale}
    return batch


def attention_oracle(dtype, **arguments):
    """The oracle of attention by arguments, as the other oracles are called."""
    return reference.attention(AttentionCall(**arguments), dtype)


def expect_right_attention(function, oracle, arguments, impl):
    """Require the oracle's output and lse, and no gradient."""
    exact_lse = torch.full(arguments["lse"].shape, NAN, dtype=torch.float64, device=DEVICE)
    known = {name: x for name, x in arguments.items() if name not in ("out", "lse")}
    exact = oracle(**{**known, "lse": exact_lse, "dtype": torch.float64})
    scale = arguments["softmax_scale"] or 0.25
    k_scale = arguments["k_scale"] if isinstance(arguments["k_scale"], float) else 1.0
    v_scale = arguments["v_scale"] if isinstance(arguments["v_scale"], float) else 1.0
    keys = largest(arguments["k_pages"]) * k_scale, largest(arguments["k"])
    logit = largest(arguments["q"]) * max(keys) * 16 * scale
    value = max(largest(arguments["v_pages"]) * v_scale, largest(arguments["v"]))
    # Dots are exact: of logits whose steps are so far apart, all but the highest weigh nothing, without an error.
    sharp = min(scale, scale * k_scale) >= 2**8 or (
        scale * k_scale > 2**8 and arguments["k"] is None
    )
    bound = attention_bound(0.0 if sharp else logit, 40, 16, value)
    lse_bound = bound + 64 * 2.0**-24 * logit
    # A sequence on the decode path, the other one on the prefill path.
    if arguments["num_decodes"] is None and arguments["seq_lens"].shape[0]:
        arguments["num_decodes"] = 1
    out = function(**arguments, impl=impl)
    assert not out.requires_grad and (arguments["out"] is None or out is arguments["out"])
    assert_near("out", out, exact, bound)
    assert_near("lse", arguments["lse"], exact_lse, lse_bound)


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
    *no_tensors("q", torch.float64, first=True),
    *refused("q", lambda a: zeros(3, 0, 16)),
    *refused("q", lambda a: a["q"][..., :8], blamed="k_pages"),
    *right("q", spread_heads, lambda a: a["q"][:1].expand(3, 2, 16), no_tokens, no_sequences),
    *right("q", lambda a: {n: a[n].requires_grad_() for n in ("q", "k", "v")}),
    *no_tensors("k_pages", F16, optional=False),
    *refused("k_pages", lambda a: a["k_pages"][:0], blamed="v_pages"),
    *refused("k_pages", lambda a: {n: a[n][:0] for n in ("k_pages", "v_pages")}, blamed="k_pages: num_pages"),
    *refused("k_pages", lambda a: {n: a[n][:, :0] for n in ("k_pages", "v_pages")}, blamed="k_pages: block_size"),
    *right("k_pages", lambda a: {n: a[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("k_pages", "v_pages")}),
    *no_tensors("v_pages", F16, optional=False),
    *no_tensors("block_table", I64, optional=False),
    *refused("block_table", lambda a: a["block_table"][:, :0], blamed="block_table: width"),
    *right("block_table", lambda a: a["block_table"].clone()),
    *no_tensors("seq_lens", I64, optional=False),
    *right("seq_lens", lambda a: torch.tensor([0, -5], dtype=torch.int32, device=DEVICE)),
    *no_tensors("cu_seqlens_q", I64, optional=False),
    *integers("max_seqlen_q", 0, odd=[2**31, 2**40]),
    *no_tensors("k", F16),
    *refused("k", None),
    *no_tensors("v", F16),
    *refused("v", None),
    *right("v", lambda a: {"k": a["k"][:1].expand(3, 1, 16), "v": a["v"][:1].expand(3, 1, 16)}),
    *refused("k_scale", 1.0, zeros(1)),
    *refused("v_scale", 1.0, zeros(1)),
    *integers("max_seq_len", 0, odd=[2**40]),
    *integers("num_decodes", 0, 2, odd=[0, 1, 2]),
    *factors("softmax_scale", -30, 16),
    *factors("softcap", -30, 30),
    *right("softcap", 1e-3),
    *no_tensors("sinks", F16),
    *right("sinks", lambda a: a["sinks"] + float("inf"), None),
    *no_tensors("out", F16),
    *overlapping("out"),
    *right("out", None, lambda a: zeros(2, 3, 16).transpose(0, 1)),
    *no_tensors("lse", F16),
    *overlapping("lse"),
    *right("lse", lambda a: zeros(2, 9)[:, :3]),
    *no_tensors("workspace", F16),
    *refused("workspace", lambda a: zeros(99, 2)[:, 0], zeros(0, 1)),
    *right("workspace", None),
    *refused("impl", "cuda", 3, "Triton"),
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
]
# Of pages of e4m3.
SCALED = [
    *factors("k_scale", -30, 30),
    *factors("v_scale", -30, 30),
    *refused("k_scale", None, zeros(2), zeros(1, dtype=torch.float64), zeros(1).to("meta")),
    *refused("v_scale", None, zeros(2), zeros(1, dtype=torch.float64), zeros(1).to("meta")),
    *refused("v_scale", lambda a: zeros(1) + 1.0, lambda a: zeros(a["v_pages"].shape[0], 16, 1) + 1.0, lambda a: zeros(1, 16, 1)),
    *right("k_scale", lambda a: {n: zeros(1) + 0.5 for n in ("k_scale", "v_scale")}),
    *right("k_scale", lambda a: {n: zeros(1, 1, 1).expand(a["k_pages"].shape[:3]) + 0.5 for n in ("k_scale", "v_scale")}),
]  # fmt: skip

CASES = [
    ("full", paged_attention, attention_oracle, {}, FULL),
    ("window", sliding_window_attention, attention_oracle, {"window": 40}, WINDOW),
    ("e4m3", paged_attention, attention_oracle, {"scale": 0.5}, SCALED),
]  # fmt: skip


def pairs(cases):
    """(case without rows, row, implementation) for each row of each case."""
    return [
        pytest.param(*case[1:-1], row, impl, id=f"{case[0]}-{row}-{impl}")
        for case in cases
        for row in case[-1]
        for impl in row.impls
    ]


@pytest.mark.parametrize("function, oracle, options, row, impl", pairs(CASES))
def test_attention(function, oracle, options, row, impl):
    arguments = attention_arguments(**options)
    if row.outcome is RIGHT:
        expect_right_attention(function, oracle, copied(row.applied(arguments)), impl)
    else:
        expect_refusal(function, row, arguments, impl)


def merge_arguments():
    generator = torch.Generator().manual_seed(3)
    parts = torch.randn(3, 5, 4, 16, generator=generator).to(DEVICE)
    lse = torch.randn(3, 4, 5, generator=generator).to(DEVICE)
    lse[1, :, 2], parts[1, 2] = -float("inf"), NAN
    return {
        "partial_out": parts, "partial_lse": lse, "sinks": zeros(4), "out": zeros(5, 4, 16), "lse": zeros(4, 5),
    }  # fmt: skip


MERGE = [
    *no_tensors("partial_out", torch.float64, first=True),
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
    *no_tensors("partial_lse", F16, optional=False),
    *right("partial_lse", lambda a: a["partial_lse"] - float("inf"), lambda a: a["partial_lse"] + 1e30),
    *no_tensors("sinks", F16),
    *right("sinks", lambda a: a["sinks"] + float("inf"), lambda a: a["sinks"] - float("inf"), None),
    *no_tensors("out", torch.float64),
    *overlapping("out"),
    *right("out", None, lambda a: a["partial_out"][0]),
    *no_tensors("lse", F16),
    *overlapping("lse"),
    *right("lse", None),
    *refused("impl", "cuda", 3),
]  # fmt: skip


@pytest.mark.parametrize("row, impl", pairs([("merge", MERGE)]))
def test_merge(row, impl):
    arguments = merge_arguments()
    if row.outcome is not RIGHT:
        expect_refusal(merge_partials, row, arguments, impl)
        return
    given = row.applied(arguments)
    exact_lse = torch.empty(given["partial_lse"].shape[1:], dtype=torch.float64, device=DEVICE)
    inputs = {n: given[n].detach().clone() if given[n] is not None else None for n in ("partial_out", "partial_lse", "sinks")}  # fmt: skip
    exact = reference.merge_partials(**inputs, out=None, lse=exact_lse, dtype=torch.float64)
    out = merge_partials(**given, impl=impl)
    assert not out.requires_grad
    logit, value = (
        largest(given["partial_lse"].detach().clamp(-99, 99)),
        largest(inputs["partial_out"]),
    )
    bound = attention_bound(logit, 3, 1, value)
    assert_near("out", out, exact, bound)
    if given["lse"] is not None:
        assert_near(
            "lse", given["lse"], exact_lse, bound + 2.0**-22 * largest(exact_lse.clamp(-1e31, 1e31))
        )


def write_arguments(scale=None):
    rows = torch.arange(4 * 2 * 16, device=DEVICE).view(4, 2, 16) % 29 - 14.0
    pages = zeros(3, 8, 2, 16, dtype=torch.float32 if scale is None else E4M3)
    return {
        "k": rows, "v": rows.flip(0), "k_pages": pages, "v_pages": pages.clone(), "slot_mapping": torch.tensor([9, -1, 0, 23], device=DEVICE),
        "k_scale": scale, "v_scale": scale,
    }  # fmt: skip


WRITE = [
    *no_tensors("k", torch.float64, first=True),
    *right("k", lambda a: a["k"][:1].expand(4, 2, 16), lambda a: a["k"].transpose(0, 1).contiguous().transpose(0, 1)),
    *right("k", lambda a: {n: a[n][:0] for n in ("k", "v", "slot_mapping")}),
    *right("k", lambda a: {n: a[n].requires_grad_() for n in ("k", "v")}),
    *no_tensors("v", F16, optional=False),
    *no_tensors("k_pages", F16, optional=False),
    *refused("k_pages", lambda a: {n: a[n][..., :0, :] for n in ("k_pages", "v_pages")}, blamed="k_pages: num_kv_heads"),
    *right("k_pages", lambda a: {n: zeros(3, 2, 8, 16).transpose(1, 2) for n in ("k_pages", "v_pages")}),
    *no_tensors("v_pages", F16, optional=False),
    *no_tensors("slot_mapping", torch.int32, optional=False),
    *right("slot_mapping", lambda a: a["slot_mapping"] * 0 - 1),
    Row("slot_mapping", lambda a: a["slot_mapping"] + 1, impls=("torch",)),
    *refused("k_scale", 1.0),
    *refused("v_scale", 1.0),
    *refused("impl", "cuda", 3),
]  # fmt: skip
WRITE_SCALED = [row for row in SCALED if row.name != "k_scale" or row.outcome is not RIGHT or not callable(row.value)]  # fmt: skip


@pytest.mark.parametrize("scale, row, impl", pairs([("plain", None, WRITE), ("e4m3", 0.5, WRITE_SCALED)]))  # fmt: skip
def test_write(scale, row, impl):
    arguments = write_arguments(scale)
    if row.outcome is not RIGHT:
        expect_refusal(write_kv, row, arguments, impl)
        return
    given = row.applied(arguments)
    expected = {
        n: x.detach().clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()
    }
    reference_write.write_kv(**expected)
    write_kv(**given, impl=impl)
    for name in ("k_pages", "v_pages"):
        assert not given[name].requires_grad
        assert torch.equal(given[name].float(), expected[name].float())


SIZES = {"num_decodes": 4, "max_seqlen_q": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "num_sms": 8}  # fmt: skip
WORKSPACE = [
    row for name in SIZES for row in refused(name, 0, -1, 1.5, True, None, float("nan"))
] + refused("num_kv_heads", 3, blamed="num_heads")


@pytest.mark.parametrize("row", WORKSPACE, ids=str)
def test_workspace(row):
    expect_refusal(workspace_numel, row, SIZES, None)


def test_every_argument_has_a_row():
    tables = {
        "paged_attention": FULL,
        "sliding_window_attention": WINDOW,
        "merge_partials": MERGE,
        "write_kv": WRITE,
        "workspace_numel": WORKSPACE,
    }
    for name, rows in tables.items():
        expect_all_arguments(getattr(quire.kernels, name), rows)


def test_fresh_rows_too_far_apart_for_32_bits():
    rows = torch.empty_strided((2, 1, 16), (2**24, 16, 1), device="meta")
    pages = torch.empty(1, 16, 1, 16, device="meta")
    numbers = torch.empty(3, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=r"^k: expected tokens < 2\*\*24 elements apart"):
        paged_attention(
            torch.empty(2, 1, 16, device="meta"), pages, pages, numbers[:2, None], numbers[:2], numbers,
            max_seqlen_q=1, k=rows, v=rows,
        )  # fmt: skip
