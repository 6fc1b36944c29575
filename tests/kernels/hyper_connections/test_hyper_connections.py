"""collapse_streams and expand_streams, both implementations, against the oracle."""

import math

import pytest
import torch

from quire.bench.common.bounds import UNIT, bounded, bounding, rounded
from quire.kernels import collapse_streams, expand_streams
from quire.kernels.common import launching
from tests.kernels.oracles import hyper_connections as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing, wider

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ONE_CHANNEL = dict(num_tokens=5, iterations=1, one_channel=True)
TWO_STREAMS = dict(num_tokens=2, n=2, hidden_size=130, iterations=2)
# Arguments of `make`; sms: multiprocessors, among which few tokens are split.
CASES = {
    "fp32": dict(),
    "one-token": dict(num_tokens=1),
    "no-tokens": dict(num_tokens=0),
    "more-tokens-than-a-tile": dict(num_tokens=19, hidden_size=16, iterations=2),
    "channels-of-no-power-of-two": dict(hidden_size=40),
    "several-tiles-of-a-stream": dict(num_tokens=2, hidden_size=200),
    "four-splits": TWO_STREAMS | dict(sms=132),
    "splits-of-two-lengths": TWO_STREAMS | dict(sms=3),
    "one-split": TWO_STREAMS | dict(sms=1),
    "two-tiles-of-tokens": dict(num_tokens=70, n=1, hidden_size=16, iterations=1, sms=3),
    "one-column-normalization": dict(iterations=1),
    "two": dict(iterations=2),
    "large-eps": dict(iterations=3, eps=0.3),
    "one-stream": dict(n=1),
    "three-streams": dict(n=3, hidden_size=24),
    "five-streams": dict(n=5, hidden_size=16, iterations=4),
    "bf16": dict(dtype=BF16, norm=BF16),
    "fp16": dict(dtype=FP16),
    "shared": dict(shared=True),
    "head": dict(head=True),
    "head-bf16": dict(head=True, dtype=BF16),
    "one-channel": ONE_CHANNEL,
    "one-channel-bf16": ONE_CHANNEL | dict(dtype=BF16),
    "one-channel-fp16": ONE_CHANNEL | dict(dtype=FP16),
}


def make(
    num_tokens=3, n=4, hidden_size=32, dtype=FP32, iterations=20, norm=FP32, shared=False,
    head=False, eps=1e-6, one_channel=False,
):  # fmt: skip
    """Arguments of ``collapse_streams``; tokens are parts of wider rows.

    shared: all streams of a token are one in memory, as before the first layer. head: fn has n rows.
    one_channel: only one channel of a token is not 0. Then a product has one term: fn rounded to 11
        bits would be off by more than all sums may be.
    """
    _, normal = drawing(3)
    streams = normal(num_tokens, n + 1, hidden_size + 16).to(dtype)[:, 1:, 16:]
    if shared:
        streams = streams[:, :1].expand(-1, n, -1)
    if one_channel:
        streams = torch.zeros_like(streams)
        for i, channel in enumerate((0, 3, 30, 64, 127)):
            streams[i].view(-1)[channel] = 1.0 + i
    rows = n if head else (2 + n) * n
    return {
        "streams": streams,
        "fn": wider(normal(rows, n * hidden_size) * (n * hidden_size) ** -0.5),
        "base": normal(rows) / 2,
        "scale": 1 + 0.3 * normal(1 if head else 3),
        "norm_weight": (1 + 0.3 * normal(hidden_size)).to(norm),
        "norm_eps": 1e-3,
        "eps": eps,
        "iterations": iterations,
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
    case = {"sms": 2} | CASES[name]
    monkeypatch.setattr(launching, "INTERPRETER_SMS", case.pop("sms"))
    call = make(**case)
    streams, n = call["streams"], call["streams"].shape[1]
    out, post, comb = collapse_streams(**call, impl=impl)
    assert out.shape == streams[:, 0].shape and out.dtype == streams.dtype
    assert (post is None) == (comb is None) == (len(call["fn"]) == n)
    for t, x in enumerate(streams.double()):
        with bounding():
            mixes = reference.mixes(x, call["fn"], call["norm_eps"])
            pre, exact_post, softmax = reference.weights(
                mixes, call["base"], call["scale"], call["eps"], n
            )
            exact = reference.collapsed(
                x, pre, call["norm_weight"], call["norm_eps"], lambda u: rounded(u, out.dtype)
            )
        assert_within_budget(f"out of {t}", out[t], exact)
        if post is not None:
            assert_within_budget(f"post of {t}", post[t], exact_post)
            exact = reference.sinkhorn(softmax.value, call["eps"], call["iterations"])
            exact = sinkhorn_bound(softmax, exact, call["iterations"])
            assert_within_budget(f"comb of {t}", comb[t], exact)


def make_expand(k, **case):
    """Arguments of ``expand_streams``; k: rows of a token that are added to y."""
    generator, normal = drawing(5)
    streams = make(**case)["streams"]
    (t, n, size), dtype = streams.shape, streams.dtype
    return {
        "streams": streams,
        "y": wider(normal(t, size).to(dtype)),
        "post": torch.rand(t, n, generator=generator).to(DEVICE) * 2,
        "comb": torch.rand(t, n, n, generator=generator).to(DEVICE),
        "rows": normal(t * k, size).to(dtype) if k else None,
        "weights": normal(t, k) if k else None,
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
    call = make_expand(k, **CASES[name])
    streams, dtype = call["streams"], call["streams"].dtype
    out = expand_streams(**call, impl=impl)
    assert out.shape == streams.shape and out.dtype == dtype and out.is_contiguous()
    for i, x in enumerate(streams.double()):
        with bounding():
            rows = call["rows"][i * k : (i + 1) * k].double() if k else None
            weights = call["weights"][i].double() if k else None
            y = reference.written(call["y"][i].double(), rows, weights)
            if impl == "torch" and k:
                y = rounded(y, dtype)
            mixing = call["post"][i].to(dtype).double(), call["comb"][i].to(dtype).double()
            terms = reference.expanded(x, y, *mixing)
            if impl == "torch":
                terms = [rounded(term, dtype) for term in terms]
            exact = terms[0] + terms[1]
        assert_within_budget(f"token {i}", out[i], exact)


@pytest.mark.parametrize(("y", "weights", "total"), [
    (0.0, [2**24, 1, -(2**24)], 0), (0.0, [2**24, -(2**24), 1], 1), (1.0, [2**24, -(2**24)], 0),
    (-(2.0**24), [2**24, 1], 1),
])  # fmt: skip
def test_rows_are_added_in_their_order(impl, y, weights, total):
    """Terms of 2^24, 1 and -2^24 in fp32, y first: their sum depends on its order alone."""
    call = make_expand(len(weights), num_tokens=2, n=2, hidden_size=16)
    call["weights"][:] = torch.tensor(weights)
    for name, value in (("y", y), ("post", 1), ("comb", 0), ("rows", 1)):
        call[name].fill_(value)
    assert expand_streams(**call, impl=impl).eq(total).all()


@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter's maximum
def test_padding_rows(impl):
    """NaN in the streams, rows or weights of a token stays with it; zeros stay finite."""
    call = make(num_tokens=19)
    expected = collapse_streams(**call, impl=impl)
    call["streams"][::2] = NAN
    got = collapse_streams(**call, impl=impl)
    for a, b in zip(got, expected, strict=True):
        assert a[1::2].equal(b[1::2]) and a[::2].isnan().all()
    call["streams"].zero_()
    assert all(part.isfinite().all() for part in collapse_streams(**call, impl=impl))
    for name in ("streams", "rows", "weights"):
        call = make_expand(2, num_tokens=4)
        expected = expand_streams(**call, impl=impl)
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
