"""collapse_streams and expand_streams, both implementations, against the oracle."""

import dataclasses
import math

import pytest
import torch

from quire.bench.common.bounds import UNIT, bounded, bounding, rounded
from quire.kernels import collapse_streams, expand_streams
from quire.kernels.common import launching
from tests.kernels.oracles import hyper_connections as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. shared: all streams of a token are one in memory, as before the first layer; head: fn has n rows."""

    num_tokens: int = 3
    n: int = 4
    hidden_size: int = 32
    dtype: torch.dtype = torch.float32
    iterations: int = 20
    norm: torch.dtype | None = torch.float32
    shared: bool = False
    head: bool = False
    eps: float = 1e-6


CASES = {
    "fp32": Case(),
    "one-token": Case(num_tokens=1),
    "no-tokens": Case(num_tokens=0),
    "more-tokens-than-a-tile": Case(num_tokens=19, hidden_size=16, iterations=2),
    "channels-of-no-power-of-two": Case(hidden_size=40),
    "several-tiles-of-a-stream": Case(num_tokens=2, hidden_size=200),
    "one-column-normalization": Case(iterations=1),
    "two": Case(iterations=2),
    "three": Case(iterations=3),
    "large-eps": Case(iterations=3, eps=0.3),
    "one-stream": Case(n=1),
    "three-streams": Case(n=3, hidden_size=24),
    "five-streams": Case(n=5, hidden_size=16, iterations=4),
    "no-norm": Case(norm=None),
    "bf16": Case(dtype=torch.bfloat16, norm=torch.bfloat16),
    "fp16": Case(dtype=torch.float16),
    "bf16-no-norm": Case(dtype=torch.bfloat16, norm=None),
    "shared": Case(shared=True),
    "head": Case(head=True),
    "head-no-norm-bf16": Case(head=True, norm=None, dtype=torch.bfloat16),
}


def make_call(case, seed=3):
    """Keyword arguments of ``collapse_streams``; tokens are parts of wider rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE)

    t, n, size = case.num_tokens, case.n, case.hidden_size
    streams = normal(t, n + 1, size + 16).to(case.dtype)[:, 1:, 16:]
    if case.shared:
        streams = streams[:, :1].expand(-1, n, -1)
    rows = n if case.head else (2 + n) * n
    return {
        "streams": streams,
        "fn": normal(rows, n * size + 8)[:, 8:] * (n * size) ** -0.5,
        "base": normal(rows) / 2,
        "scale": 1 + 0.3 * normal(1 if case.head else 3),
        "norm_weight": None if case.norm is None else (1 + 0.3 * normal(size)).to(case.norm),
        "norm_eps": 1e-3,
        "eps": case.eps,
        "iterations": case.iterations,
    }


def sinkhorn_bound(softmax, exact, iterations):
    """``exact``, Sinkhorn's result, with how far a program may be from it.

    Step k divides by sums: entries are u_i A_ij v_j, where A is the softmax + eps and the errors of entries so far, in logarithms at most
    a_k = a_0 + 3 k (n + 2) UNIT (a sum of n + 1 terms, a division, an addition of eps). A new factor is 1 / (sum_j A_ij v_j + eps / u_i) (or
    that of columns): what changes log A by at most a, log v by b and log u by c changes it by at most max(a + b, c). So each step adds at most a_k
    to what the factors may be off by, and an entry is off by a_K and both of its factors.
    """
    n, steps = len(softmax), 2 * iterations - 1
    a = float((softmax.error / softmax.value).max()) if n > 1 else softmax.error.max().item()
    a = -math.log1p(-a) + 2 * UNIT
    off = {0: 0.0, 1: 0.0}  # of the factors of rows and of columns
    for step in range(steps):
        a += (n + 4) * UNIT
        side = (step + 1) % 2
        off[side] = max(off[side], a + off[1 - side])
    return bounded(exact, exact * math.expm1(a + off[0] + off[1]))


def exact_collapse(call, dtype):
    """(out, post, comb), each a list by token, in float64 with bounds; ``dtype``: what the sum is rounded to."""
    outs, posts, combs = [], [], []
    for x in call["streams"].double():
        n = len(x)
        with bounding():
            mixes = reference.mixes(x, call["fn"], call["norm_eps"])
            pre, post, softmax = reference.weights(
                mixes, call["base"], call["scale"], call["eps"], n
            )
            outs.append(reference.collapsed(
                x, pre, call["norm_weight"], call["norm_eps"], lambda u: rounded(u, dtype)
            ))  # fmt: skip
        posts.append(post)
        if len(call["fn"]) > n:
            exact = reference.sinkhorn(softmax.value, call["eps"], call["iterations"])
            combs.append(sinkhorn_bound(softmax, exact, call["iterations"]))
    return outs, posts, combs


@IMPLS
@pytest.mark.parametrize("name", CASES)
def test_collapse(impl, name):
    case = CASES[name]
    call = make_call(case)
    out, post, comb = collapse_streams(**call, impl=impl)
    assert out.shape == (case.num_tokens, case.hidden_size) and out.dtype == case.dtype
    assert (post is None) == (comb is None) == case.head
    outs, posts, combs = exact_collapse(call, case.dtype)
    for t in range(case.num_tokens):
        assert_within_budget(f"out of {t}", out[t], outs[t])
        if not case.head:
            assert_within_budget(f"post of {t}", post[t], posts[t])
            assert_within_budget(f"comb of {t}", comb[t], combs[t])


def make_expand(case, k, seed=5):
    """Keyword arguments of ``expand_streams``; k: rows of a token that are added to y."""
    generator = torch.Generator().manual_seed(seed)
    streams = make_call(case)["streams"]
    t, n, size = streams.shape
    return {
        "streams": streams,
        "y": torch.randn(t, size + 8, generator=generator).to(DEVICE, case.dtype)[:, 8:],
        "post": torch.rand(t, n, generator=generator).to(DEVICE) * 2,
        "comb": torch.rand(t, n, n, generator=generator).to(DEVICE),
        "rows": torch.randn(t * k, size, generator=generator).to(DEVICE, case.dtype) if k else None,
        "weights": torch.randn(t, k, generator=generator).to(DEVICE) if k else None,
    }


# Rows of experts: none, fewer than are fetched at once, as many, and more.
EXPANDED = [
    *((name, 0) for name, case in CASES.items() if not case.head),
    *((name, 6) for name in ("no-tokens", "one-token", "bf16", "fp16", "shared", "three-streams")),
    *(("fp32", k) for k in (1, 2, 6, 7, 13)),
    *(("channels-of-no-power-of-two", k) for k in (3, 8)),
]


@IMPLS
@pytest.mark.parametrize(("name", "k"), EXPANDED)
def test_expand(impl, name, k):
    case = CASES[name]
    call = make_expand(case, k)
    streams, dtype = call["streams"], case.dtype
    out = expand_streams(**call, impl=impl)
    assert out.shape == streams.shape and out.dtype == dtype and out.is_contiguous()
    for i in range(len(streams)):
        with bounding():
            rows = None if k == 0 else call["rows"][i * k : (i + 1) * k].double()
            weights = None if k == 0 else call["weights"][i].double()
            y = reference.written(call["y"][i].double(), rows, weights)
            if impl == "torch" and k:
                y = rounded(y, dtype)
            mixing = call["post"][i].to(dtype).double(), call["comb"][i].to(dtype).double()
            terms = reference.expanded(streams[i].double(), y, *mixing)
            if impl == "torch":
                terms = [rounded(term, dtype) for term in terms]
            exact = terms[0] + terms[1]
        assert_within_budget(f"token {i}", out[i], exact)


@IMPLS
def test_rows_are_added_in_their_order(impl):
    """Terms of 2^24, 1 and -2^24 in fp32, y first: their sum depends on its order, and on nothing else in the batch."""
    big = 2.0**24
    for y, weights, total in (
        (0.0, [big, 1.0, -big], 0.0),
        (0.0, [big, -big, 1.0], 1.0),
        (1.0, [big, -big], 0.0),
        (-big, [big, 1.0], 1.0),
    ):
        for num_tokens in (1, 3):
            out = expand_streams(
                torch.zeros(num_tokens, 2, 16, device=DEVICE),
                torch.full((num_tokens, 16), y, device=DEVICE),
                torch.ones(num_tokens, 2, device=DEVICE),
                torch.zeros(num_tokens, 2, 2, device=DEVICE),
                rows=torch.ones(num_tokens * len(weights), 16, device=DEVICE),
                weights=torch.tensor([weights] * num_tokens, device=DEVICE),
                impl=impl,
            )
            assert out.eq(total).all()


@IMPLS
def test_no_token_reads_the_rows_of_another(impl):
    """NaN in the rows, or weights, of a token stay with it; without rows nothing but y is read."""
    case = Case(num_tokens=4)
    for name in ("rows", "weights"):
        call = make_expand(case, 2)
        expected = expand_streams(**call, impl=impl)
        call[name] = call[name].clone()
        call[name].unflatten(0, (4, -1))[1::2] = NAN
        out = expand_streams(**call, impl=impl)
        assert out[::2].equal(expected[::2]) and out[1::2].isnan().all()


@IMPLS
@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter's maximum
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_padding_rows(impl, num_tokens):
    """Rows of NaN reach no other row, in either direction, and rows of zeros stay finite."""
    call = make_call(Case(num_tokens=2 * num_tokens + 1))
    streams = call.pop("streams").clone()
    expected = collapse_streams(streams, **call, impl=impl)
    streams[::2] = NAN
    got = collapse_streams(streams, **call, impl=impl)
    for name, a, b in zip(("out", "post", "comb"), got, expected, strict=True):
        assert a[1::2].equal(b[1::2]), name
        assert a[::2].isnan().all(), name
    y = torch.randn(2 * num_tokens + 1, 32, device=DEVICE)
    assert expand_streams(streams, y, *got[1:], impl=impl)[1::2].isfinite().all()
    zeros = collapse_streams(torch.zeros_like(streams), **call, impl=impl)
    assert all(part.isfinite().all() for part in zeros)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_part_of_fn_is_lost(dtype):
    """Of streams with one channel that is not 0 a product has one term: fn rounded to 11 bits would be off by more than all sums may be."""
    case = Case(num_tokens=5, dtype=dtype, iterations=1)
    call = make_call(case)
    one = torch.zeros_like(call["streams"])
    for i, channel in enumerate((0, 3, 30, 64, 127)):
        one[i].view(-1)[channel] = 1.0 + i
    call["streams"] = one
    _, post, comb = collapse_streams(**call, impl="triton")
    _, posts, combs = exact_collapse(call, dtype)
    for t in range(case.num_tokens):
        assert_within_budget(f"post of {t}", post[t], posts[t])
        assert_within_budget(f"comb of {t}", comb[t], combs[t])


def test_splits_of_the_reduction(monkeypatch):
    """Few tokens are split over many programs, many over none; splits of different lengths are complete."""
    seen = []
    original = launching.launch

    def launch(function, grid, **arguments):
        seen.append(grid)
        original(function, grid, **arguments)

    monkeypatch.setattr(launching, "launch", launch)
    for sms, num_tokens, splits in ((132, 2, 4), (3, 2, 3), (2, 2, 2), (3, 140, 1), (1, 1, 1)):
        monkeypatch.setattr(launching, "INTERPRETER_SMS", sms)
        size = 130 if num_tokens < 9 else 16
        case = Case(num_tokens=num_tokens, n=2, hidden_size=size, iterations=2)
        call = make_call(case)
        out, _, _ = collapse_streams(**call, impl="triton")
        assert seen[-2][1] == splits
        outs, _, _ = exact_collapse({**call, "streams": call["streams"][-2:]}, case.dtype)
        for got, exact in zip(out[-2:], outs, strict=True):
            assert_within_budget("out", got, exact)


@pytest.mark.parametrize("num_tokens, least, most", [(1, 32, 32), (256, 16, 33), (8192, 1, 1)])
def test_released_shapes_are_split(num_tokens, least, most, monkeypatch):
    """A decode step of V4-Flash keeps every SM of an H100 busy; a chunk needs one split."""
    grids = []
    monkeypatch.setattr(launching, "launch", lambda function, grid, **arguments: grids.append(grid))
    monkeypatch.setattr(launching, "INTERPRETER_SMS", 132)
    call = {n: torch.empty(s, device="meta") for n, s in (("fn", (24, 16384)), ("base", 24), ("scale", 3))}  # fmt: skip
    streams = torch.empty(num_tokens, 4, 4096, dtype=torch.bfloat16, device="meta")
    collapse_streams(streams, **call, impl="triton")
    assert least <= grids[0][1] <= most


def test_more_than_triton_supports():
    for n, size, message in ((9, 16, "n: supported are up to 8, got 9"), (1, 20000, "hidden_size")):
        streams = torch.zeros(1, n, size, device=DEVICE)
        fn = torch.zeros(n, n * size, device=DEVICE)
        with pytest.raises(NotImplementedError, match=f"^streams: {message}"):
            collapse_streams(streams, fn, fn[:, 0].clone(), fn[0, :1].clone(), impl="triton")
