"""collapse_streams and expand_streams, both implementations, against the oracle."""

import dataclasses
import math

import pytest
import torch

from quire.bench.common.bounds import UNIT, bounded, bounding, rounded
from quire.kernels import collapse_streams, expand_streams
from quire.kernels.common import launching
from tests.kernels.oracles import hyper_connections as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing

BF16, FP16 = torch.bfloat16, torch.float16


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    shared: all streams of a token are one in memory, as before the first layer.
    head: fn has n rows.
    one_channel: only one channel of a token is not 0. Then a product has one term: fn rounded to 11
        bits would be off by more than all sums may be.
    sms: multiprocessors, among which few tokens are split.
    """

    num_tokens: int = 3
    n: int = 4
    hidden_size: int = 32
    dtype: torch.dtype = torch.float32
    iterations: int = 20
    norm: torch.dtype = torch.float32
    shared: bool = False
    head: bool = False
    eps: float = 1e-6
    one_channel: bool = False
    sms: int = 2


CASES = {
    "fp32": Case(),
    "one-token": Case(num_tokens=1),
    "no-tokens": Case(num_tokens=0),
    "more-tokens-than-a-tile": Case(num_tokens=19, hidden_size=16, iterations=2),
    "channels-of-no-power-of-two": Case(hidden_size=40),
    "several-tiles-of-a-stream": Case(num_tokens=2, hidden_size=200),
    "four-splits": Case(2, 2, 130, iterations=2, sms=132),
    "splits-of-two-lengths": Case(2, 2, 130, iterations=2, sms=3),
    "one-split": Case(2, 2, 130, iterations=2, sms=1),
    "two-tiles-of-tokens": Case(70, 1, 16, iterations=1, sms=3),
    "one-column-normalization": Case(iterations=1),
    "two": Case(iterations=2),
    "three": Case(iterations=3),
    "large-eps": Case(iterations=3, eps=0.3),
    "one-stream": Case(n=1),
    "three-streams": Case(n=3, hidden_size=24),
    "five-streams": Case(n=5, hidden_size=16, iterations=4),
    "bf16": Case(dtype=BF16, norm=BF16),
    "fp16": Case(dtype=FP16),
    "shared": Case(shared=True),
    "head": Case(head=True),
    "head-bf16": Case(head=True, dtype=BF16),
    "one-channel": Case(5, iterations=1, one_channel=True),
    "one-channel-bf16": Case(5, dtype=BF16, iterations=1, one_channel=True),
    "one-channel-fp16": Case(5, dtype=FP16, iterations=1, one_channel=True),
}


def make_call(case, seed=3):
    """Keyword arguments of ``collapse_streams``; tokens are parts of wider rows."""
    _, normal = drawing(seed)
    t, n, size = case.num_tokens, case.n, case.hidden_size
    streams = normal(t, n + 1, size + 16).to(case.dtype)[:, 1:, 16:]
    if case.shared:
        streams = streams[:, :1].expand(-1, n, -1)
    if case.one_channel:
        one = torch.zeros_like(streams)
        for i, channel in enumerate((0, 3, 30, 64, 127)):
            one[i].view(-1)[channel] = 1.0 + i
        streams = one
    rows = n if case.head else (2 + n) * n
    return {
        "streams": streams,
        "fn": normal(rows, n * size + 8)[:, 8:] * (n * size) ** -0.5,
        "base": normal(rows) / 2,
        "scale": 1 + 0.3 * normal(1 if case.head else 3),
        "norm_weight": (1 + 0.3 * normal(size)).to(case.norm),
        "norm_eps": 1e-3,
        "eps": case.eps,
        "iterations": case.iterations,
    }


def sinkhorn_bound(softmax, exact, iterations):
    """``exact``, Sinkhorn's result, with how far a program may be from it.

    Step k divides by sums: entries are u_i A_ij v_j, where A is the softmax + eps and the errors of
    entries so far, in logarithms at most a_k = a_0 + 3 k (n + 2) UNIT (a sum of n + 1 terms, a
    division, an addition of eps). A new factor is 1 / (sum_j A_ij v_j + eps / u_i) (or that of
    columns): what changes log A by at most a, log v by b and log u by c changes it by at most
    max(a + b, c). So each step adds at most a_k to what the factors may be off by, and an entry is
    off by a_K and both of its factors.
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


@pytest.mark.parametrize("name", CASES)
def test_collapse(impl, name, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr(launching, "INTERPRETER_SMS", case.sms)
    call = make_call(case)
    out, post, comb = collapse_streams(**call, impl=impl)
    assert out.shape == (case.num_tokens, case.hidden_size) and out.dtype == case.dtype
    assert (post is None) == (comb is None) == case.head
    for t, x in enumerate(call["streams"].double()):
        with bounding():
            mixes = reference.mixes(x, call["fn"], call["norm_eps"])
            pre, exact_post, softmax = reference.weights(
                mixes, call["base"], call["scale"], call["eps"], case.n
            )
            exact = reference.collapsed(
                x, pre, call["norm_weight"], call["norm_eps"], lambda u: rounded(u, case.dtype)
            )
        assert_within_budget(f"out of {t}", out[t], exact)
        if not case.head:
            assert_within_budget(f"post of {t}", post[t], exact_post)
            exact = reference.sinkhorn(softmax.value, call["eps"], call["iterations"])
            exact = sinkhorn_bound(softmax, exact, call["iterations"])
            assert_within_budget(f"comb of {t}", comb[t], exact)


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


# Case, and rows of experts that are added.
EXPANDED = [
    *((name, 0) for name in ("fp32", "no-tokens", "bf16", "fp16", "shared", "one-stream")),
    *((name, 0) for name in ("channels-of-no-power-of-two", "five-streams")),
    *((name, 6) for name in ("no-tokens", "one-token", "bf16", "fp16", "shared", "three-streams")),
    *(("fp32", k) for k in (1, 2, 7)),
    ("channels-of-no-power-of-two", 3),
]


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


def test_rows_are_added_in_their_order(impl):
    """Terms of 2^24, 1 and -2^24 in fp32, y first: their sum depends on its order alone."""
    big = 2.0**24
    for y, weights, total in (
        (0.0, [big, 1.0, -big], 0.0),
        (0.0, [big, -big, 1.0], 1.0),
        (1.0, [big, -big], 0.0),
        (-big, [big, 1.0], 1.0),
    ):
        call = make_expand(Case(num_tokens=2, n=2, hidden_size=16), len(weights))
        call["y"] = torch.full((2, 16), y, device=DEVICE)
        call["weights"][:] = torch.tensor(weights)
        call["post"].fill_(1)
        call["comb"].zero_()
        call["rows"].fill_(1)
        assert expand_streams(**call, impl=impl).eq(total).all()


@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter's maximum
def test_padding_rows(impl):
    """NaN in the streams, rows or weights of a token stays with it; zeros stay finite."""
    call = make_call(Case(num_tokens=19))
    streams = call.pop("streams").clone()
    expected = collapse_streams(streams, **call, impl=impl)
    streams[::2] = NAN
    got = collapse_streams(streams, **call, impl=impl)
    for name, a, b in zip(("out", "post", "comb"), got, expected, strict=True):
        assert a[1::2].equal(b[1::2]), name
        assert a[::2].isnan().all(), name
    zeros = collapse_streams(torch.zeros_like(streams), **call, impl=impl)
    assert all(part.isfinite().all() for part in zeros)
    for name in ("streams", "rows", "weights"):
        call = make_expand(Case(num_tokens=4), 2)
        expected = expand_streams(**call, impl=impl)
        call[name] = call[name].clone()
        call[name].unflatten(0, (4, -1))[1::2] = NAN
        out = expand_streams(**call, impl=impl)
        assert out[::2].equal(expected[::2]) and out[1::2].isnan().all()


@pytest.mark.parametrize("num_tokens, least, most", [(1, 32, 32), (256, 16, 33), (8192, 1, 1)])
def test_released_shapes_are_split(num_tokens, least, most, monkeypatch):
    """A decode step of V4-Flash keeps every SM of an H100 busy; a chunk needs one split."""
    grids = []
    monkeypatch.setattr(launching, "launch", lambda function, grid, **arguments: grids.append(grid))
    monkeypatch.setattr(launching, "INTERPRETER_SMS", 132)
    shapes = {"fn": (24, 16384), "base": (24,), "scale": (3,), "norm_weight": (4096,)}
    call = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    streams = torch.empty(num_tokens, 4, 4096, dtype=BF16, device="meta")
    collapse_streams(streams, **call, impl="triton")
    assert least <= grids[0][1] <= most
