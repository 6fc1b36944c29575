"""flash-attn's two functions over our kernels, against plain float64 attention, and what they
refuse.
"""

from __future__ import annotations

import importlib
import sys
from itertools import accumulate

import pytest
import torch

from quire.models.integrations import flash_attn
from quire.models.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.support.helpers import DEVICE, NAN, assert_within_budget
from tests.support.models import exact_attention

HEADS, KV_HEADS, DIM = 4, 2, 16
# Arguments of a call: softmax_scale, causal, window_size, softcap.
PLAIN = {"causal": True}
MASKS = {
    "causal": PLAIN,
    "scaled-capped": {"causal": True, "softmax_scale": 0.7, "softcap": 5.0},
    "window": {"causal": True, "window_size": (6, 3)},
    "left-window": {"causal": False, "window_size": (0, 0)},
    "right-0": {"causal": False, "window_size": (-1, 0)},
}
masks = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def numbers(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=DEVICE, dtype=dtype)


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def offsets(lengths):
    return ints([0, *accumulate(lengths)])


def rows_of(q_lens, k_lens, dtype=torch.float32):
    """q, k and v of each sequence."""
    q = [numbers(n, HEADS, DIM, seed=i, dtype=dtype) for i, n in enumerate(q_lens)]
    k = [numbers(n, KV_HEADS, DIM, seed=10 + i, dtype=dtype) for i, n in enumerate(k_lens)]
    v = [numbers(n, KV_HEADS, DIM, seed=20 + i, dtype=dtype) for i, n in enumerate(k_lens)]
    return q, k, v


def paged(rows, tables, block_size, num_pages):
    """A pool, NaN but for the rows of each sequence at the pages that its table names."""
    pool = torch.full(
        (num_pages, block_size, *rows[0].shape[1:]), NAN, device=DEVICE, dtype=rows[0].dtype
    )
    for keys, table in zip(rows, tables, strict=True):
        for j, row in enumerate(keys):
            pool[table[j // block_size], j % block_size] = row
    return pool


def attention(q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0):
    """One sequence in float64, by flash-attn's arguments."""
    mask = {"left": window_size[0], "right": 0 if causal else window_size[1]}
    return exact_attention.attention(q, k, v, scale=softmax_scale, softcap=softcap, **mask)


def expect_equal(out, lse, q, k, v, mask):
    """``out`` and ``lse`` of sequences one after another along the tokens are those of float64."""
    first = 0
    for one in zip(q, k, v, strict=True):
        exact, exact_lse = attention(*one, **mask)
        tokens = slice(first, first + one[0].shape[0])
        assert_within_budget("out", out[tokens], exact)
        assert_within_budget("lse", lse[:, tokens], exact_lse)
        first = tokens.stop
    assert first == out.shape[0]


TABLES = [[3, 9], [7, -1], [1, 8], [5, -1], [2, -1]]
# A chunk, a prompt, a decode, no token at all, and more tokens than keys; and prompts alone.
MIXED, PROMPTS = ([5, 9, 1, 0, 4], [23, 9, 30, 7, 2]), ([9, 1, 17],) * 2
VARLEN = [
    (MIXED, mask, torch.float32, tables) for mask in MASKS.values() for tables in (None, TABLES)
]
VARLEN += [(PROMPTS, mask, torch.float16, None) for mask in MASKS.values()]
# One new token each needs no causal: bottom-right aligned, no key is behind the query.
VARLEN += [
    (([1, 1, 1], [23, 1, 6]), mask, torch.float32, None)
    for mask in ({}, {"window_size": (4, 2)}, {"window_size": (-1, 7)})
]


@pytest.mark.parametrize(("lengths", "mask", "dtype", "tables"), VARLEN)
def test_varlen_against_float64(lengths, mask, dtype, tables):
    """Packed or paged; prompts alone have one tensor of offsets."""
    q_lens, k_lens = lengths
    q, k, v = rows_of(q_lens, k_lens, dtype)
    cu_q = offsets(q_lens)
    lengths = cu_q, cu_q if k_lens is q_lens else offsets(k_lens), max(q_lens), max(k_lens)
    keys = [torch.cat(x) if tables is None else paged(x, tables, 16, 10) for x in (k, v)]
    table = None if tables is None else ints(tables)
    out, lse, empty = flash_attn_varlen_func(
        torch.cat(q), *keys, *lengths, return_attn_probs=True, block_table=table, **mask
    )
    assert out.dtype == dtype and empty.numel() == 0
    expect_equal(out, lse, q, k, v, mask)


@masks
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize(
    ("tables", "block_size"),
    [([[3, 6], [5, -1], [1, 4]], 16), ([[0], [1], [2]], 37), ([[4], [2], [0]], 37)],
    ids=["paged", "rows", "rows-by-index"],
)
def test_with_kvcache_against_float64(tables, block_size, seqlen_q, mask):
    k_lens = [23, 1, 30]
    q, k, v = rows_of([seqlen_q] * 3, k_lens)
    where = {"block_table": ints(tables)} if block_size == 16 else {}
    if tables[0] == [4]:
        where["cache_batch_idx"] = ints(tables)[:, 0]
    caches = [paged(rows, tables, block_size, 7) for rows in (k, v)]
    lengths = {"cache_seqlens": ints(k_lens), "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(torch.stack(q), *caches, **lengths, **where, **mask)
    assert out.shape == (3, seqlen_q, HEADS, DIM) and lse.shape == (3, HEADS, seqlen_q)
    expect_equal(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), q, k, v, mask)


@pytest.mark.parametrize("seqlen_new", [1, 20])
@pytest.mark.parametrize("cache", ["paged", "rows"])
def test_with_kvcache_writes_and_then_reads(cache, seqlen_new):
    """Rows behind ``cache_seqlens``, over page boundaries; nothing else in the cache changes."""
    before = [15, 0, 30]
    q, k, v = rows_of([2] * 3, [n + seqlen_new for n in before])
    size, num_pages, tables = 16, 11, [[3, 6, 9, 0], [5, 8, 7, 0], [1, 4, 2, 10]]
    where = {"block_table": ints(tables)}
    if cache == "rows":
        size, num_pages, tables, where = 51, 3, [[0], [1], [2]], {}
    old = [[x[:n] for x, n in zip(rows, before, strict=True)] for rows in (k, v)]
    new = [torch.stack([x[n:] for x, n in zip(rows, before, strict=True)]) for rows in (k, v)]
    held = [paged(rows, tables, size, num_pages) for rows in old]
    lengths = {"cache_seqlens": ints(before), "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(torch.stack(q), *held, *new, **lengths, **PLAIN, **where)
    for got, rows in zip(held, (k, v), strict=True):
        expected = paged(rows, tables, size, num_pages)
        assert got.nan_to_num(77.0).equal(expected.nan_to_num(77.0))
    expect_equal(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), q, k, v, PLAIN)


def test_lengths_as_one_number_and_a_full_cache():
    q, k, v = map(torch.stack, rows_of([1, 1], [12, 12]))
    full = flash_attn_with_kvcache(q, k, v)
    assert full.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=12))
    assert not full.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=11))
    # Rows whose last stride is not 1 are taken too, as by flash-attn.
    odd = q.transpose(2, 3).contiguous().transpose(2, 3)
    out = flash_attn_with_kvcache(odd, k, v)
    for i in range(2):
        assert_within_budget("out", out[i], attention(q[i], k[i], v[i])[0])


def packed():
    """Arguments of ``flash_attn_varlen_func`` for a prompt of three tokens."""
    return [*(torch.cat(x) for x in rows_of([3], [3])), offsets([3]), offsets([3]), 3, 3]


REFUSED = {
    flash_attn_varlen_func: {
        "dropout_p": 0.1, "alibi_slopes": torch.zeros(HEADS), "causal": False, "window_size": (2, 1),
    },
    flash_attn_with_kvcache: {
        "rotary_cos": torch.zeros(4, 8), "rotary_sin": torch.zeros(4, 8), "num_splits": 1,
        "cache_leftpad": ints([0]), "alibi_slopes": torch.zeros(HEADS),
    },
}  # fmt: skip


@pytest.mark.parametrize(("function", "name"), [(f, name) for f in REFUSED for name in REFUSED[f]])
def test_what_is_not_served_is_refused_by_name(function, name):
    args, options = packed(), {"causal": name != "window_size"}
    if function is flash_attn_with_kvcache:
        args, options = [torch.stack(x) for x in rows_of([1], [3])], {}
    shown = "causal" if name == "window_size" else name
    with pytest.raises(NotImplementedError, match=f"^{shown}: "):
        function(*args, **options | {name: REFUSED[function][name]})


def test_gradients_are_refused():
    q, *args = packed()
    q.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"^q: gradients"):
        flash_attn_varlen_func(q, *args, causal=True)
    with torch.no_grad():
        flash_attn_varlen_func(q, *args, causal=True)


ROWS = numbers(1, 2, KV_HEADS, DIM)
WRONG = [
    ({"cache_seqlens": 9}, "cache_seqlens: expected lengths that the cache holds in"),
    ({"k": ROWS, "v": ROWS, "cache_seqlens": 7}, "cache_seqlens: expected lengths that"),
    ({"k": ROWS, "v": ROWS}, "cache_seqlens: expected lengths with k"),
    ({"k": ROWS, "cache_seqlens": 1}, "v: expected rows of both"),
    ({"k": ROWS[..., :8], "v": ROWS, "cache_seqlens": 1}, r"k: expected float32 \[1, \*, 2, 16\]"),
    ({"block_table": ints([[0]]), "cache_batch_idx": ints([0])}, "cache_batch_idx: expected None"),
    ({"cache_batch_idx": ints([0, 1])}, r"cache_batch_idx: expected int32 \[1\]"),
    ({"q": ROWS[0]}, "q: expected"),
    ({"softcap": -1.0, "k": ROWS, "v": ROWS, "cache_seqlens": 1}, "softcap: expected"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[m for _, m in WRONG])
def test_a_refused_call_names_the_argument_and_writes_nothing(change, message):
    call = {"q": numbers(1, 1, HEADS, DIM), "k_cache": numbers(1, 8, KV_HEADS, DIM)}
    call["v_cache"] = call["k_cache"].clone()
    before = call["k_cache"].clone()
    with pytest.raises(ValueError, match=f"^{message}"):
        flash_attn_with_kvcache(**call | change)
    assert call["k_cache"].equal(before) and call["v_cache"].equal(before)


def test_lengths_of_packed_keys_are_checked():
    *args, _ = packed()
    with pytest.raises(ValueError, match=r"^max_seqlen_k: expected lengths in"):
        flash_attn_varlen_func(*args, 2, causal=True, block_table=None)


@pytest.fixture
def no_flash_attn(monkeypatch):
    """No flash_attn is loaded, here and afterwards."""
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)


def test_an_import_finds_what_is_installed(no_flash_attn):
    package = flash_attn.install()
    assert flash_attn.install() is package
    assert importlib.import_module("flash_attn").flash_attn_varlen_func is flash_attn_varlen_func
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    assert interface.flash_attn_with_kvcache is flash_attn_with_kvcache
    assert importlib.util.find_spec("flash_attn") is not None
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.bert_padding"):
        importlib.import_module("flash_attn.bert_padding")
    with pytest.raises(AttributeError):
        package.flash_attn_func  # noqa: B018


def test_another_flash_attn_is_left_alone(no_flash_attn, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.5.9.post1")
    with pytest.raises(NotImplementedError, match=r"flash-attn: expected 2.6 to 2.8, got 2.5.9"):
        flash_attn.install()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.8.3.post2")
    monkeypatch.setitem(sys.modules, "flash_attn", importlib)
    with pytest.raises(RuntimeError, match="flash_attn: expected install"):
        flash_attn.install()
    del sys.modules["flash_attn"]
    assert flash_attn.install().__version__ == "2.8.3.post2"
