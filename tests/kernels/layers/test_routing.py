"""route_tokens and combine_experts, both implementations, against the oracle."""

import dataclasses

import pytest
import torch

from quire.bench.common.bounds import UNIT, allowed, bounded, bounding, rounded
from quire.kernels import combine_experts, route_tokens
from tests.kernels.oracles import routing as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; spread: factor of the logits; table: experts by token id; the last three: of a
    softmax."""

    num_tokens: int = 3
    num_experts: int = 8
    top_k: int = 2
    scale: float = 1.5
    bias: bool = False
    table: bool = False
    spread: float = 2.0
    softmax: bool = False
    factor: float = 1.0
    logits_bias: bool = False
    expert_scale: bool = False


SOFTMAX = Case(4, 11, 3, softmax=True)
CASES = {
    "small": Case(bias=True),
    "no-tokens": Case(num_tokens=0, bias=True),
    "no-bias": Case(scale=1.0),
    "one-expert": Case(num_experts=1, top_k=1, bias=True),
    "all-experts": Case(num_experts=5, top_k=5, bias=True),
    "released": Case(num_tokens=2, num_experts=384, top_k=6, scale=2.5, bias=True),
    "many-experts": Case(num_tokens=1, num_experts=600, top_k=3, bias=True),
    "large-logits": Case(spread=60.0, bias=True),
    "table": Case(table=True),
    "table-large-logits": Case(table=True, num_experts=11, top_k=3, spread=60.0),
    "softmax": Case(softmax=True, scale=1.0),
    "softmax-factor-and-scales": dataclasses.replace(SOFTMAX, factor=0.25, expert_scale=True),
    "softmax-bias": dataclasses.replace(SOFTMAX, logits_bias=True, scale=1.0),
    "softmax-large-logits": dataclasses.replace(SOFTMAX, logits_bias=True, spread=60.0),
}


def make_call(case):
    """Keyword arguments of ``route_tokens``; logits are columns of a wider product."""
    generator, normal = drawing(3)
    n = case.num_experts
    call = {
        "logits": (normal(case.num_tokens, n + 8) * case.spread)[:, 8:],
        "top_k": case.top_k,
        "scale": case.scale,
        "score": "softmax" if case.softmax else "sqrt_softplus",
        "logits_factor": case.factor,
        "logits_bias": normal(n).bfloat16() if case.logits_bias else None,
        "expert_scale": normal(n).exp().bfloat16() if case.expert_scale else None,
        "bias": 0.2 * normal(n) if case.bias else None,
    }
    if case.table:
        rows = [torch.randperm(n, generator=generator)[: case.top_k] for _ in range(20)]
        token_ids = torch.randint(20, (case.num_tokens,), generator=generator)
        call |= {"table": torch.stack(rows).to(DEVICE), "token_ids": token_ids.to(DEVICE)}
    return call


def exact_scores(logits):
    """Scores in float64 with bounds: the exponent is rounded, and an exponential, a logarithm of
    three roundings and their sum err by less than 16 units, of which the root halves all. An
    exponential below fp32's normal numbers may be 0."""
    scores = reference.scores(logits)
    lost = torch.where(logits < -80, torch.finfo(torch.float32).tiny ** 0.5, 0.0)
    return bounded(scores, scores * (logits.abs() + 16) * UNIT + lost)


def wide(tensor):
    return None if tensor is None else tensor.double()


@pytest.mark.parametrize("name", CASES)
def test_route(impl, name):
    case = CASES[name]
    call = make_call(case)
    ids, weights = route_tokens(**call, impl=impl)
    assert ids.shape == weights.shape == (case.num_tokens, case.top_k)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32
    for t in range(case.num_tokens):
        logits, bias = call["logits"][t].double(), call["bias"]
        if case.softmax:
            logits_bias = wide(call["logits_bias"])
            with bounding():
                scores = reference.logits_that_count(logits, case.factor, logits_bias)
        else:
            scores = exact_scores(logits)
        if case.table:
            want = call["table"][call["token_ids"][t]].tolist()
        else:
            want = reference.best(scores.value, bias, case.top_k)
            ranks = (scores.value if bias is None else scores.value + bias).sort(descending=True)
            margin = 2 * float(allowed(scores, torch.float32).max()) + 1e-6
            gaps = ranks.values.diff()[: case.top_k].abs()
            assert not len(gaps) or gaps.min() > margin  # else any order of the two would be right
        assert ids[t].tolist() == want
        with bounding():
            if case.softmax:
                factors = wide(call["expert_scale"])
                exact = reference.softmax_weights(scores, want, case.scale, factors)
            else:
                exact = reference.weights(scores, want, case.scale)
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
    call = make_call(Case(num_tokens=5, softmax=softmax, bias=not softmax))
    expected = route_tokens(**call, impl=impl)
    call["logits"] = call["logits"].clone()
    call["logits"][::2] = NAN
    ids, weights = route_tokens(**call, impl=impl)
    assert ids[1::2].equal(expected[0][1::2]) and weights[1::2].equal(expected[1][1::2])
    assert ((ids >= 0) & (ids < 8)).all() and weights[::2].isnan().all()


# num_tokens, k, size, dtype
COMBINED = [
    (3, 2, 16, torch.float32),
    (1, 1, 40, torch.float32),
    (0, 2, 16, torch.float32),
    (2, 6, 1100, torch.bfloat16),
    (2, 3, 24, torch.float16),
]


@pytest.mark.parametrize("addend", [False, True])
@pytest.mark.parametrize(("num_tokens", "k", "size", "dtype"), COMBINED)
def test_combine(impl, addend, num_tokens, k, size, dtype):
    generator = torch.Generator().manual_seed(4)

    def rows_of(count):
        return torch.randn(count, size + 8, generator=generator).to(DEVICE, dtype)[:, 8:]

    rows, more = rows_of(num_tokens * k), rows_of(num_tokens) if addend else None
    weights = torch.randn(num_tokens, k, generator=generator).to(DEVICE)
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
