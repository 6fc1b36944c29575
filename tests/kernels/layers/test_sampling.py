"""sample_tokens, both implementations, against the oracle."""

import math

import pytest
import torch

from quire.bench.common.bounds import UNIT, bounded
from quire.kernels import sample_tokens
from quire.kernels.layers import sampling
from tests.kernels.oracles import sampling as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing, wider

# temperature, top_k, top_p, min_p
GREEDY = (0.0, 3, 0.5, 0.5)
PLAIN = (1.0, 0, 1.0, 0.0)
FILTERS = [
    GREEDY,
    PLAIN,
    (0.3, 0, 1.0, 0.0),
    (7.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 300, 1.0, 0.0),  # more than a small block
    (1.0, 5000, 1.0, 0.0),  # more than there are
    (1.0, 0, 0.5, 0.0),
    (40.0, 0, 0.5, 0.0),  # nearly flat: more tokens than a small block
    (1.0, 0, 1e-9, 0.0),
    (1.5, 11, 0.9, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 0, 1.0, 1.0),
    (0.8, 20, 0.8, 0.05),
    (2.0, 400, 0.9, 0.01),
]
# Rows, tokens, steps of the logits (None: any), dtype, tokens of -inf.
CASES = {
    "one": (1, None, torch.float32, 0),
    "long": (450, None, torch.float32, 60),
    "long-equal": (450, 0.5, torch.float32, 0),
    "bf16": (97, None, torch.bfloat16, 0),
    "fp16": (97, None, torch.float16, 90),
}


def make_logits(num_rows, vocab_size, step=None, dtype=torch.float32, missing=0):
    """Rows of a wider product; no row lacks its largest logits."""
    logits = 2 * drawing(6)[1](num_rows, vocab_size)
    if step:
        logits = (logits / step).round() * step
    logits = wider(logits.to(dtype))
    if missing:
        logits.scatter_(1, logits.float().argsort(dim=1)[:, :missing], -torch.inf)
    return logits


def make_call(logits, filters, u):
    """Keyword arguments of ``sample_tokens``; filters, u: of each row."""
    columns = (torch.tensor(column, device=DEVICE) for column in zip(*filters, strict=True))
    temperature, top_k, top_p, min_p = columns
    return {
        "logits": logits, "temperature": temperature.float(), "top_k": top_k.int(),
        "top_p": top_p.float(), "min_p": min_p.float(),
        "u": torch.tensor(u, dtype=torch.float64, device=DEVICE),
    }  # fmt: skip


def expect_sure(logits, mass, filters, unsure):
    """Require every border of the filters to be farther from each token than rounding reaches."""
    _, top_k, top_p, min_p = filters
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k and top_k < len(order):
        border = logits[order[top_k - 1]]
        near = 8 * UNIT * abs(max(border, -1e30) - logits[order[0]])
        assert all(x == border or abs(x - border) > near for x in logits)
        order = order[:top_k]
    share = mass[order] / mass[order].sum()
    if top_p < 1:
        assert ((share.cumsum(0) - share - top_p).abs()[1:] > unsure).all()
    if min_p not in (0.0, 1.0):
        assert ((mass[order] - min_p).abs() > unsure).all()


@pytest.mark.parametrize("name", CASES)
def test_sample(impl, name, monkeypatch):
    """The distributions of rows, and the token that u selects."""
    monkeypatch.setattr(sampling, "BLOCK", 128)
    vocab_size, step, dtype, missing = CASES[name]
    # In fp32, 0.9 and the like are other numbers.
    filters = [
        (*torch.tensor([t]).tolist(), k, *torch.tensor([p, m]).tolist()) for t, k, p, m in FILTERS
    ]
    num_rows = len(filters)
    u = ([0.37, 0.0, 1 - 2.0**-32, 0.81] * num_rows)[:num_rows]
    logits = make_logits(num_rows, vocab_size, step, dtype, missing)
    probs = torch.full((num_rows, vocab_size + 3), NAN, device=DEVICE)[:, :vocab_size]
    ids = sample_tokens(**make_call(logits, filters, u), probs=probs, impl=impl)
    assert ids.shape == (num_rows,) and ids.dtype == torch.int64
    for i, (row, token) in enumerate(zip(logits.double().cpu(), ids.tolist(), strict=True)):
        if filters[i][0] == 0:
            assert token == reference.largest(row.tolist())
            assert probs[i].nonzero().tolist() == [[token]] and probs[i, token] == 1
            continue
        want = torch.tensor(reference.probabilities(row.tolist(), *filters[i]), dtype=torch.float64)
        mass = ((row - row.max()) / filters[i][0]).exp()
        # A difference, a quotient and an exponential, whose base two takes one more product; and
        # what is lost of a weight in units of 2**-42.
        relative, lost = (4 * mass.log().abs().clamp(max=90) + 4) * UNIT, 2.0**-42
        of_sum = float((mass * relative).sum() / mass.sum()) + vocab_size * (UNIT + lost)
        expect_sure(row.tolist(), mass, filters[i], 2 * of_sum)
        got = probs[i].cpu()
        # fp32 has no smaller one, and an exponential may be 0 before that.
        assert torch.equal((got > 0)[want > 1e-37], (want > 0)[want > 1e-37])
        assert not (got[want == 0] > 0).any()
        error = want * (relative + of_sum + 4 * UNIT) + lost
        assert_within_budget(f"probs of {filters[i]}", got, bounded(want, error))
        # A draw is over exact sums, or over those in float64.
        near = 2 * float((want * relative).sum()) + vocab_size * lost + 2.0**-32
        after = want.cumsum(0)
        assert want[token] > 0
        assert after[token] - want[token] - near <= u[i] <= after[token] + near
        if float((after - u[i]).abs().min()) > near:
            assert token == reference.drawn(want.tolist(), u[i])


def test_draws_at_and_between_borders(impl):
    """Each token's own share of u gives that token; the border of two gives the later one."""
    logits = make_logits(1, 40).expand(40, 40)
    mass = reference.probabilities(logits[0].tolist(), *PLAIN)
    u = [math.fsum(mass[:token]) + mass[token] / 2 for token in range(40)]
    assert min(mass) > 1e-5
    call = make_call(logits, [PLAIN] * 40, u)
    assert sample_tokens(**call, impl=impl).tolist() == list(range(40))
    equal = torch.tensor([[-torch.inf, 0, -torch.inf, 0, 0, 0, -torch.inf]] * 5, device=DEVICE)
    call = make_call(equal, [PLAIN] * 5, [0.0, 0.2499, 0.25, 0.75, 1.0])
    assert sample_tokens(**call, impl=impl).tolist() == [1, 1, 3, 5, 5]


def test_equal_logits_are_cut_in_the_order_of_ids(impl):
    """Also where their shares add up to top_p exactly, and where a quotient is -0."""
    filters = [(1e30, 4, 1.0, 0.0), (1e30, 0, 0.5, 0.0), (1e30, 6, 0.5, 0.0), (1e30, 0, 1.0, 1.0)]
    logits = torch.tensor([-1e-30, 0, 0] * 3, device=DEVICE).repeat(4, 1)
    logits[:, 2] = -torch.inf
    probs = torch.full((4, 9), NAN, device=DEVICE)
    sample_tokens(**make_call(logits, filters, [0.5] * 4), probs=probs, impl=impl)
    for row, num_kept in zip(probs, (4, 4, 3, 8), strict=True):
        kept = [token for token in range(9) if token != 2][:num_kept]
        assert row.nonzero().squeeze(1).tolist() == kept


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's numbers
def test_extreme_temperatures(impl):
    logits = torch.tensor([[1e4, -1e4, 0.0]] * 2, device=DEVICE)
    probs = torch.full((2, 3), NAN, device=DEVICE)
    call = make_call(logits, [(1e-30, 0, 1.0, 0.0), (1e30, 0, 1.0, 0.0)], [0.9] * 2)
    assert sample_tokens(**call, probs=probs, impl=impl).tolist() == [0, 2]
    assert probs[0].tolist() == [1.0, 0.0, 0.0]
    assert (probs[1] - 1 / 3).abs().max() < 2 * UNIT


def test_the_lowest_of_equal_largest_logits(impl, monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK", 128)
    logits = torch.zeros(4, 700, device=DEVICE)
    logits[0, [699, 300, 44]] = 2.0
    logits[1, [128, 256]] = 2.0
    logits[3] = -torch.inf
    logits[3, 650] = -9.0
    for call in ({"logits": logits}, make_call(logits, [(0.0, 0, 1.0, 0.0)] * 4, [0.5] * 4)):
        assert sample_tokens(**call, impl=impl).tolist() == [44, 128, 0, 650]
    assert sample_tokens(logits[:0], impl=impl).shape == (0,)


@pytest.mark.parametrize("with_filters", [False, True])
@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # the interpreter's numbers
def test_rows_that_give_no_token(impl, with_filters, monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK", 128)
    logits = make_logits(7, 300)
    filters = [(0.7, 20, 0.9, 0.01), GREEDY] * 3 + [(1.0, 0, 0.5, 0.0)]
    call = make_call(logits, filters, [0.4] * 7) if with_filters else {"logits": logits}
    expected = sample_tokens(**call, impl=impl).tolist()
    assert min(expected) >= 0
    for row, token, value in ((1, 299, NAN), (2, 7, torch.inf), (4, 0, NAN), (6, 5, NAN)):
        logits[row, token] = value
    logits[3] = -torch.inf
    got = sample_tokens(**call, impl=impl).tolist()
    assert got == [expected[0], -1, -1, -1, -1, expected[5], -1]


def test_no_result_depends_on_how_a_row_is_divided(monkeypatch):
    """Sums of weights are exact."""
    filters = FILTERS[::3]
    logits = make_logits(len(filters), 700, step=0.25)
    call = make_call(logits, filters, [0.37] * len(filters))
    results = []
    for block in (128, 512, 1024):
        monkeypatch.setattr(sampling, "BLOCK", block)
        probs = torch.full((len(filters), 700), NAN, device=DEVICE)
        results.append((sample_tokens(**call, probs=probs, impl="triton"), probs))
    for ids, probs in results[1:]:
        assert ids.equal(results[0][0]) and probs.equal(results[0][1])
