"""route_tokens and combine_experts, both implementations, against the oracle."""

import pytest
import torch

from quire.bench.common.bounds import UNIT, allowed, bounded, bounding, rounded
from quire.kernels import combine_experts, route_tokens
from tests.kernels.oracles import routing as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing, wider

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SOFTMAX = dict(num_tokens=4, num_experts=11, top_k=3, softmax=True)
# Arguments of `make`.
CASES = {
    "small": dict(bias=True),
    "no-tokens": dict(num_tokens=0, bias=True),
    "no-bias": dict(scale=1.0),
    "one-expert": dict(num_experts=1, top_k=1, bias=True),
    "all-experts": dict(num_experts=5, top_k=5, bias=True),
    "released": dict(num_tokens=2, num_experts=384, top_k=6, scale=2.5, bias=True),
    "many-experts": dict(num_tokens=1, num_experts=600, top_k=3, bias=True),
    "large-logits": dict(spread=60.0, bias=True),
    "table": dict(table=True),
    "table-large-logits": dict(table=True, num_experts=11, top_k=3, spread=60.0),
    "softmax": dict(softmax=True, scale=1.0),
    "softmax-factor-and-scales": SOFTMAX | dict(factor=0.25, expert_scale=True),
    "softmax-bias": SOFTMAX | dict(logits_bias=True, scale=1.0),
    "softmax-large-logits": SOFTMAX | dict(logits_bias=True, spread=60.0),
}


def make(
    num_tokens=3, num_experts=8, top_k=2, scale=1.5, bias=False, table=False, spread=2.0,
    softmax=False, factor=1.0, logits_bias=False, expert_scale=False,
):  # fmt: skip
    """Arguments of a call; spread: factor of the logits; table: experts by token id."""
    generator, normal = drawing(3)
    call = {
        "logits": wider(normal(num_tokens, num_experts) * spread),
        "top_k": top_k,
        "scale": scale,
        "score": "softmax" if softmax else "sqrt_softplus",
        "logits_factor": factor,
        "logits_bias": normal(num_experts).bfloat16() if logits_bias else None,
        "expert_scale": normal(num_experts).exp().bfloat16() if expert_scale else None,
        "bias": 0.2 * normal(num_experts) if bias else None,
    }
    if table:
        rows = torch.rand(20, num_experts, generator=generator).argsort(1)[:, :top_k].contiguous()
        token_ids = torch.randint(20, (num_tokens,), generator=generator)
        call |= {"table": rows.to(DEVICE), "token_ids": token_ids.to(DEVICE)}
    return call


def exact_scores(logits):
    """Scores in float64 with bounds: the exponent is rounded, and an exponential, a logarithm of
    three roundings and their sum err by less than 16 units, of which the root halves all. An
    exponential below fp32's normal numbers may be 0."""
    scores = reference.scores(logits)
    lost = torch.where(logits < -80, torch.finfo(FP32).tiny ** 0.5, 0.0)
    return bounded(scores, scores * (logits.abs() + 16) * UNIT + lost)


def double(tensor):
    return None if tensor is None else tensor.double()


@pytest.mark.parametrize("name", CASES)
def test_route(impl, name):
    call = make(**CASES[name])
    bias, top_k, softmax = call["bias"], call["top_k"], call["score"] == "softmax"
    ids, weights = route_tokens(**call, impl=impl)
    assert ids.shape == weights.shape == (len(call["logits"]), top_k)
    assert ids.dtype == torch.int64 and weights.dtype == FP32
    for t, logits in enumerate(call["logits"].double()):
        with bounding():
            added = double(call["logits_bias"])
            scores = reference.logits_that_count(logits, call["logits_factor"], added)
        if not softmax:
            scores = exact_scores(logits)
        if "table" in call:
            want = call["table"][call["token_ids"][t]].tolist()
        else:
            want = reference.best(scores.value, bias, top_k)
            ranks = (scores.value if bias is None else scores.value + bias).sort(descending=True)
            margin = 2 * float(allowed(scores, FP32).max()) + 1e-6
            gaps = ranks.values.diff()[:top_k].abs()
            assert not len(gaps) or gaps.min() > margin  # else any order of the two would be right
        assert ids[t].tolist() == want
        with bounding():
            if softmax:
                factors = double(call["expert_scale"])
                exact = reference.softmax_weights(scores, want, call["scale"], factors)
            else:
                exact = reference.weights(scores, want, call["scale"])
        assert_within_budget(f"weights of {t}", weights[t], exact)


def test_equal_scores():
    """The lowest expert of equals goes first, and none is taken twice, also among -inf and NaN."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]], device=DEVICE)
    ids, _ = route_tokens(logits, top_k=5, impl="triton")
    assert ids.tolist() == [[1, 2, 4, 0, 3]]
    bias = torch.tensor([-torch.inf, 0.0, NAN, -torch.inf, 0.0], device=DEVICE)
    ids, weights = route_tokens(logits, top_k=5, bias=bias, impl="triton")
    assert ids.tolist() == [[1, 4, 0, 2, 3]]
    assert weights.isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN")  # the interpreter's maximum
@pytest.mark.parametrize("softmax", [False, True])
def test_padding_rows(impl, softmax):
    """A row of NaN gives valid experts, and reaches no other row."""
    call = make(num_tokens=5, softmax=softmax, bias=not softmax)
    expected = route_tokens(**call, impl=impl)
    call["logits"][::2] = NAN
    ids, weights = route_tokens(**call, impl=impl)
    assert ids[1::2].equal(expected[0][1::2]) and weights[1::2].equal(expected[1][1::2])
    assert ((ids >= 0) & (ids < 8)).all() and weights[::2].isnan().all()


# num_tokens, k, size, dtype
COMBINED = [(3, 2, 16, FP32), (1, 1, 40, FP32), (0, 2, 16, FP32), (2, 6, 1100, BF16), (2, 3, 24, FP16)]  # fmt: skip


@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize(("num_tokens", "k", "size", "dtype"), COMBINED)
def test_combine(impl, addend, num_tokens, k, size, dtype):
    _, normal = drawing(4)
    rows, weights = wider(normal(num_tokens * k, size).to(dtype)), normal(num_tokens, k)
    more = wider(normal(num_tokens, size).to(dtype)) if addend else None
    out = combine_experts(rows, weights, addend=more, impl=impl)
    assert out.shape == (num_tokens, size) and out.dtype == dtype
    for t in range(num_tokens):
        with bounding():
            exact = reference.combined(rows[t * k : (t + 1) * k].double(), weights[t].double())
            if addend:
                exact = rounded(exact, dtype) + more[t].double()
        assert_within_budget(f"token {t}", out[t], exact)


@pytest.mark.parametrize(("weights", "total"), [((1, 0, -1), 0), ((1, -1, 0), 1), ((0, 1, -1), 0)])
def test_combine_sums_in_the_order_of_the_router(impl, weights, total):
    """Terms of 2^24, 1 and -2^24 in fp32, whose sum depends on its order."""
    weights = torch.tensor([[w * 2.0**24 if w else 1.0 for w in weights]], device=DEVICE)
    out = combine_experts(torch.ones(3, 4, device=DEVICE), weights, impl=impl)
    assert out.eq(total).all()
