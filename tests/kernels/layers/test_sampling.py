"""sample_tokens, both implementations, against the oracle."""

import math

import pytest
import torch

from quire.bench.common.bounds import UNIT, bounded
from quire.kernels import sample_tokens
from quire.kernels.layers import sampling
from tests.kernels.oracles import sampling as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])

# temperature, top_k, top_p, min_p
GREEDY = (0.0, 3, 0.5, 0.5)
FILTERS = [
    GREEDY,
    (1.0, 0, 1.0, 0.0),
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
# Rows, tokens, steps of the logits (None: any), dtype, tokens that are not to come.
CASES = {
    "one": (1, None, torch.float32, 0),
    "long": (450, None, torch.float32, 60),
    "long-equal": (450, 0.5, torch.float32, 0),
    "bf16": (97, None, torch.bfloat16, 0),
    "fp16": (97, None, torch.float16, 90),
}


def make_logits(num_rows, vocab_size, step=None, dtype=torch.float32, missing=0, seed=6):
    """Rows of a wider product; no row lacks its largest logits."""
    generator = torch.Generator().manual_seed(seed)
    wide = 2 * torch.randn(num_rows, vocab_size + 8, generator=generator)
    if step:
        wide = (wide / step).round() * step
    logits = wide.to(dtype)[:, 8:]
    if missing:
        lowest = logits.float().argsort(dim=1)[:, :missing]
        logits.scatter_(1, lowest, -torch.inf)
    return logits.to(DEVICE)


def make_call(logits, filters, u):
    """Keyword arguments of ``sample_tokens``; filters, u: of each row."""
    columns = [torch.tensor(column, device=DEVICE) for column in zip(*filters, strict=True)]
    temperature, top_k, top_p, min_p = columns
    return {
        "logits": logits,
        "temperature": temperature.float(),
        "top_k": top_k.int(),
        "top_p": top_p.float(),
        "min_p": min_p.float(),
        "u": torch.tensor(u, dtype=torch.float64, device=DEVICE),
    }


def small_blocks(monkeypatch):
    monkeypatch.setattr(sampling, "BLOCK", 128)


def errors(logits, temperature):
    """Relative errors [vocab_size] of exp(x): a difference, a quotient and an exponential, whose base two takes one more product; and
    what is lost of a weight in units of 2**-42."""
    x = ((logits - logits.max()) / temperature).exp().double()
    return (4 * x.log().abs().clamp(max=90) + 4) * UNIT, 2.0**-42


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


@IMPLS
@pytest.mark.parametrize("name", CASES)
def test_sample(impl, name, monkeypatch):
    """The distributions of rows, and the token that u selects."""
    small_blocks(monkeypatch)
    vocab_size, step, dtype, missing = CASES[name]
    # In another precision 0.9 and the like are other numbers.
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
        relative, lost = errors(row, filters[i][0])
        mass = ((row - row.max()) / filters[i][0]).exp()
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


@IMPLS
def test_a_draw_between_any_two_borders(impl):
    """Each token's own share of u gives that token."""
    logits = make_logits(1, 40).expand(40, 40)
    mass = reference.probabilities(logits[0].tolist(), 1.0, 0, 1.0, 0.0)
    u = [math.fsum(mass[:token]) + mass[token] / 2 for token in range(40)]
    call = make_call(logits, [(1.0, 0, 1.0, 0.0)] * 40, u)
    assert min(mass) > 1e-5
    assert sample_tokens(**call, impl=impl).tolist() == list(range(40))


def test_torch_draws_the_first_id_whose_cumulative_mass_exceeds_u():
    mass = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]])
    for u, expected in ((0.0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 2**-32, 4)):
        assert sampling.draw(mass, torch.tensor([u], dtype=torch.float64)).tolist() == [expected]
        assert sampling.draw(3 * mass, torch.tensor([u], dtype=torch.float64)).tolist() == [
            expected
        ]
    # 1.0 stands for a product that is rounded up.
    mass, u = torch.tensor([[0.3, 0.4, 0.0]]), torch.tensor([1.0], dtype=torch.float64)
    assert sampling.draw(mass, u).tolist() == [1]


@IMPLS
@pytest.mark.parametrize(
    ("filters", "num_kept"),
    [
        ((1.0, 4, 1.0, 0.0), 4),
        ((1.0, 0, 0.5, 0.0), 4),
        ((1.0, 6, 0.5, 0.0), 3),
        ((1.0, 0, 1.0, 1.0), 8),
    ],
)
def test_equal_logits_are_cut_in_the_order_of_ids(impl, filters, num_kept):
    """Also where their shares add up to top_p exactly."""
    logits = torch.zeros(1, 9, device=DEVICE)
    logits[0, 2] = -torch.inf
    probs = torch.full((1, 9), NAN, device=DEVICE)
    sample_tokens(**make_call(logits, [filters], [0.5]), probs=probs, impl=impl)
    kept = [token for token in range(9) if token != 2][:num_kept]
    assert probs[0].nonzero().squeeze(1).tolist() == kept


@IMPLS
@pytest.mark.parametrize("temperature", [1e-30, 1e30])
@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter's numbers
def test_extreme_temperatures(impl, temperature):
    logits = torch.tensor([[1e4, -1e4, 0.0]], device=DEVICE)
    probs = torch.full((1, 3), NAN, device=DEVICE)
    call = make_call(logits, [(temperature, 0, 1.0, 0.0)], [0.9])
    ids = sample_tokens(**call, probs=probs, impl=impl)
    if temperature < 1:
        assert ids.tolist() == [0] and probs.tolist() == [[1.0, 0.0, 0.0]]
    else:
        assert ids.tolist() == [2]
        assert (probs - 1 / 3).abs().max() < 2 * UNIT


@IMPLS
def test_the_lowest_of_equal_largest_logits(impl, monkeypatch):
    small_blocks(monkeypatch)
    logits = torch.zeros(4, 700, device=DEVICE)
    logits[0, [699, 300, 44]] = 2.0
    logits[1, [128, 256]] = 2.0
    logits[3] = -torch.inf
    logits[3, 650] = -9.0
    want = [44, 128, 0, 650]
    assert sample_tokens(logits, impl=impl).tolist() == want
    call = make_call(logits, [(0.0, 0, 1.0, 0.0)] * 4, [0.5] * 4)
    assert sample_tokens(**call, impl=impl).tolist() == want


@IMPLS
@pytest.mark.parametrize("with_filters", [False, True])
@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # the interpreter's numbers
def test_rows_that_give_no_token(impl, with_filters, monkeypatch):
    small_blocks(monkeypatch)
    logits = make_logits(7, 300)
    filters = [(0.7, 20, 0.9, 0.01), GREEDY] * 3 + [(1.0, 0, 0.5, 0.0)]
    call = make_call(logits, filters, [0.4] * 7) if with_filters else {"logits": logits}
    expected = sample_tokens(**call, impl=impl).tolist()
    assert min(expected) >= 0
    logits[1, 299] = NAN
    logits[2, 7] = torch.inf
    logits[3] = -torch.inf
    logits[4] = NAN
    logits[6, 5] = NAN
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


@IMPLS
def test_no_rows(impl):
    logits = torch.zeros(0, 50, device=DEVICE)
    assert sample_tokens(logits, impl=impl).shape == (0,)


def test_more_than_triton_supports():
    logits = torch.zeros(1, 2**20 + 1, device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"^logits: up to 1048576 tokens are supported"):
        sample_tokens(logits, impl="triton")
