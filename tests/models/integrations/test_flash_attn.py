"""flash-attn's two functions over our kernels, against plain float64 attention; refusals; `install`."""

from __future__ import annotations

import importlib
import sys
from itertools import accumulate, product

import pytest
import torch

from quire.models.integrations import flash_attn
from quire.models.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing
from tests.support.models import exact_attention

HEADS, KV_HEADS, DIM = 4, 2, 16
# Arguments of a call: softmax_scale, causal, window_size, softcap.
MASKS = [
    {"causal": True},
    {"causal": True, "softmax_scale": 0.7, "softcap": 5.0},
    {"causal": True, "window_size": (6, 3)},
    {"causal": False, "window_size": (0, 0)},
    {"causal": False, "window_size": (-1, 0)},
]


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def offsets(lengths):
    return ints([0, *accumulate(lengths)])


def rows_of(q_lens, k_lens, dtype=torch.float32):
    """q, k and v of each sequence."""
    _, draw = drawing(0)
    parts = (q_lens, HEADS), (k_lens, KV_HEADS), (k_lens, KV_HEADS)
    return [[draw(n, heads, DIM).to(dtype) for n in lengths] for lengths, heads in parts]


def paged(rows, tables, block_size, num_pages):
    """A pool, NaN but for the rows of each sequence at the pages that its table names."""
    shape = num_pages, block_size, *rows[0].shape[1:]
    pool = torch.full(shape, NAN, device=DEVICE, dtype=rows[0].dtype)
    for keys, table in zip(rows, tables, strict=True):
        for j, row in enumerate(keys):
            pool[table[j // block_size], j % block_size] = row
    return pool


def expect_equal(
    out, lse, q, k, v, causal=False, window_size=(-1, -1), softmax_scale=None, softcap=0.0
):
    """``out`` and ``lse`` of sequences one after another along the tokens are those of float64."""
    mask = {"left": window_size[0], "right": 0 if causal else window_size[1]}
    mask |= {"scale": softmax_scale, "softcap": softcap}
    lengths = [len(one) for one in q]
    for got, got_lse, *one in zip(out.split(lengths), lse.split(lengths, 1), q, k, v, strict=True):
        exact, exact_lse = exact_attention.attention(*one, **mask)
        assert_within_budget("out", got, exact)
        assert_within_budget("lse", got_lse, exact_lse)


TABLES = [[3, 9], [7, -1], [1, 8], [5, -1], [2, -1]]
# A chunk, a prompt, a decode, no token at all, and more tokens than keys; and prompts alone.
MIXED, PROMPTS = ([5, 9, 1, 0, 4], [23, 9, 30, 7, 2]), ([9, 1, 17],) * 2
# One new token each needs no causal: bottom-right aligned, no key is behind the query.
DECODES = [1, 1, 1], [23, 1, 6]
NOT_CAUSAL = {}, {"window_size": (4, 2)}, {"window_size": (-1, 7)}
VARLEN = [
    *product([MIXED], MASKS, [torch.float32], [None, TABLES]),
    *product([PROMPTS], MASKS, [torch.float16], [None]),
    *product([DECODES], NOT_CAUSAL, [torch.float32], [None]),
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
    expect_equal(out, lse, q, k, v, **mask)


CACHES = {
    "paged": (16, [[3, 6, 9, -1], [5, 8, -1, -1], [1, 4, 2, 10]]),
    "rows": (51, [[0], [1], [2]]),
    "rows-by-index": (51, [[4], [2], [0]]),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_new"), [(1, 0), (3, 0), (2, 1), (2, 20)])
@pytest.mark.parametrize("cache", CACHES)
def test_with_kvcache_against_float64(cache, seqlen_q, seqlen_new, mask):
    """New rows are written behind ``cache_seqlens``, over page boundaries; nothing else changes."""
    before = [15, 0, 30] if seqlen_new else [23, 1, 30]
    q, k, v = rows_of([seqlen_q] * 3, [n + seqlen_new for n in before])
    size, tables = CACHES[cache]
    where = {"block_table": ints(tables)} if cache == "paged" else {}
    if cache == "rows-by-index":
        where["cache_batch_idx"] = ints(tables)[:, 0]
    old = [[x[:n] for x, n in zip(rows, before, strict=True)] for rows in (k, v)]
    new = [torch.stack([x[n:] for x, n in zip(rows, before, strict=True)]) for rows in (k, v)]
    caches = [paged(rows, tables, size, 11) for rows in old]
    given = [*caches, *new] if seqlen_new else caches
    lengths = {"cache_seqlens": ints(before), "return_softmax_lse": True}
    out, lse = flash_attn_with_kvcache(torch.stack(q), *given, **lengths, **where, **mask)
    assert out.shape == (3, seqlen_q, HEADS, DIM) and lse.shape == (3, HEADS, seqlen_q)
    expect_equal(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), q, k, v, **mask)
    for held, rows in zip(caches, (k, v), strict=True):
        assert held.nan_to_num(77.0).equal(paged(rows, tables, size, 11).nan_to_num(77.0))


@torch.no_grad()
def test_lengths_as_one_number_and_a_full_cache():
    q, k, v = map(torch.stack, rows_of([1, 1], [12, 12]))
    full = flash_attn_with_kvcache(q.requires_grad_(), k, v)
    assert full.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=12))
    assert not full.equal(flash_attn_with_kvcache(q, k, v, cache_seqlens=11))
    # Rows whose last stride is not 1 are taken too, as by flash-attn.
    assert full.equal(flash_attn_with_kvcache(q.mT.contiguous().mT, k, v))


PROMPT, Q = rows_of([3], [3]), torch.zeros(1, 1, HEADS, DIM, device=DEVICE)
KEYS = torch.zeros(1, 8, KV_HEADS, DIM, device=DEVICE)
CALLS = {
    flash_attn_varlen_func: {
        **dict(zip("qkv", map(torch.cat, PROMPT), strict=True)), "cu_seqlens_q": offsets([3]),
        "cu_seqlens_k": offsets([3]), "max_seqlen_q": 3, "max_seqlen_k": 3, "causal": True,
    },
    flash_attn_with_kvcache: {"q": Q, "k_cache": KEYS, "v_cache": KEYS},
}  # fmt: skip
ROWS = torch.ones(1, 2, KV_HEADS, DIM, device=DEVICE)
SERVED = {"k": ROWS, "v": ROWS, "cache_seqlens": 1}
REFUSED = {
    (flash_attn_varlen_func, NotImplementedError): [
        ({"dropout_p": 0.1}, "dropout_p: is not served"),
        ({"alibi_slopes": torch.zeros(HEADS)}, "alibi_slopes: is not served"),
        ({"causal": False, "window_size": (2, 1)}, "causal: expected True, or window_size"),
        ({"q": torch.zeros(3, HEADS, DIM, requires_grad=True)}, "q: gradients are not served"),
    ],
    (flash_attn_varlen_func, ValueError): [
        ({"max_seqlen_k": 2}, "max_seqlen_k: expected lengths in"),
    ],
    (flash_attn_with_kvcache, NotImplementedError): [
        ({"rotary_cos": torch.zeros(4, 8)}, "rotary_cos: is not served"),
        ({"rotary_sin": torch.zeros(4, 8)}, "rotary_sin: is not served"),
        ({"num_splits": 1}, "num_splits: is not served"),
        ({"cache_leftpad": ints([0])}, "cache_leftpad: is not served"),
        ({"alibi_slopes": torch.zeros(HEADS)}, "alibi_slopes: is not served"),
    ],
    (flash_attn_with_kvcache, ValueError): [
        ({"cache_seqlens": 9}, "cache_seqlens: expected lengths that the cache holds in"),
        (SERVED | {"cache_seqlens": 7}, "cache_seqlens: expected lengths that"),
        (SERVED | {"cache_seqlens": None}, "cache_seqlens: expected lengths with k"),
        (SERVED | {"v": None}, "v: expected rows of both"),
        (SERVED | {"k": ROWS[..., :8]}, r"k: expected float32 \[1, \*, 2, 16\]"),
        (SERVED | {"softcap": -1.0}, "softcap: expected"),
        ({"cache_batch_idx": ints([0]), "block_table": ints([[0]])}, "cache_batch_idx: expected N"),
        ({"cache_batch_idx": ints([0, 1])}, r"cache_batch_idx: expected int32 \[1\]"),
        ({"q": ROWS[0]}, "q: expected"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("function", "error", "change", "message"),
    [(*key, *row) for key, rows in REFUSED.items() for row in rows],
)
def test_a_refused_call_names_the_argument_and_writes_nothing(function, error, change, message):
    with pytest.raises(error, match=f"^{message}"):
        function(**CALLS[function] | change)
    assert not KEYS.any()


def test_install(monkeypatch):
    """Imports find what is installed; another flash_attn, and other versions, are left alone."""
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.5.9.post1")
    with pytest.raises(NotImplementedError, match=r"flash-attn: expected 2.6 to 2.8, got 2.5.9"):
        flash_attn.install()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.8.3.post2")
    sys.modules["flash_attn"] = importlib
    with pytest.raises(RuntimeError, match="flash_attn: expected install"):
        flash_attn.install()
    del sys.modules["flash_attn"]
    package = flash_attn.install()
    assert flash_attn.install() is package and package.__version__ == "2.8.3.post2"
    assert importlib.import_module("flash_attn").flash_attn_varlen_func is flash_attn_varlen_func
    interface = importlib.import_module("flash_attn.flash_attn_interface")
    assert interface.flash_attn_with_kvcache is flash_attn_with_kvcache
    assert importlib.util.find_spec("flash_attn") is not None
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.bert_padding"):
        importlib.import_module("flash_attn.bert_padding")
    assert not hasattr(package, "flash_attn_func")
