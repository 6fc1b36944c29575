"""The budgets themselves: results in any order of summation are within them, and each kind of mistake is outside."""

import dataclasses
import functools
import math

import pytest
import torch

from quire.bench.common.bounds import (
    EXP_UNITS,
    TILE,
    UNIT,
    allowed,
    bounded,
    bounding,
    gamma,
    rounded,
)
from tests.support.budgets import ordinary
from tests.support.helpers import (
    AttentionCase,
    assert_within_budget,
    attention_reference,
    make_batch,
)
from tests.support.kernels import compressed_cases
from tests.support.kernels.compressed_cases import Case, exactly
from tests.support.kernels.mla_cases import MlaCase, make_mla_batch, mla_reference

BF16, FP32 = torch.bfloat16, torch.float32


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shuffled_sum(terms, seed):
    """The sum of terms [n, ...] in fp32, pair by pair of a random binary tree."""
    generator = torch.Generator().manual_seed(seed)
    parts = list(terms.float())
    while len(parts) > 1:
        i, j = torch.randperm(len(parts), generator=generator)[:2].tolist()
        total = parts[i] + parts[j]
        parts = [part for k, part in enumerate(parts) if k not in (i, j)] + [total]
    return parts[0]


def attention_in_any_order(q, keys, values, dtype, seed):
    """One query's result in fp32: sums as a random tree of random tiles has them, weights rounded to ``dtype``."""
    logits = shuffled_sum((keys.float() * q.float()).T, seed) * q.shape[0] ** -0.5
    order = torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))
    parts = []
    for tile in order.split(16):
        highest = logits[tile].max()
        weights = torch.exp(logits[tile] - highest)
        acc = shuffled_sum(weights.to(dtype).float()[:, None] * values[tile].float(), seed)
        parts.append((highest, shuffled_sum(weights, seed), acc))
    highest = max(part[0] for part in parts)
    share = [torch.exp(part[0] - highest) for part in parts]
    total = shuffled_sum(torch.stack([s * p[1] for s, p in zip(share, parts, strict=True)]), seed)
    acc = shuffled_sum(torch.stack([s * p[2] for s, p in zip(share, parts, strict=True)]), seed)
    return (acc / total).to(dtype), highest + torch.log(total)


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
def test_attention_in_any_order_is_within_the_budget(dtype):
    q, keys, values = (numbers(*s, seed=i).to(dtype) for i, s in enumerate([(24,), (90, 24), (90, 8)]))  # fmt: skip
    with bounding(weights=dtype):
        logits = keys.double() @ q.double() * 24**-0.5
        exact, lse = torch.softmax(logits, 0) @ values.double(), torch.logsumexp(logits, 0)
    for seed in range(6):
        out, found = attention_in_any_order(q, keys, values, dtype, seed)
        assert_within_budget("out", out, exact)
        assert_within_budget("lse", found, lse)


def test_sums_and_products_are_within_their_bounds():
    """The worst order and the worst numbers: where each addition loses half a unit, a bound of half as many units does not hold."""
    terms = torch.cat([torch.ones(1), torch.full((4096,), 2.0**-24)]).double()
    with bounding():
        exact = terms.sum()
    in_order = torch.tensor(1.0)
    for term in terms[1:].float():
        in_order = in_order + term
    error = (in_order.double() - exact).abs()
    assert in_order == 1 and 4096 * 2.0**-24 == error <= exact.error
    assert exact.error < 3 * error
    a, b = numbers(30, 70), numbers(70, 20, seed=1)
    with bounding():
        product = a.float().double() @ b.float().double()
    for seed in range(3):
        got = shuffled_sum((a.float().T[:, :, None] * b.float()[:, None]), seed)
        assert_within_budget("product", got, product)
    assert product.error.max() < gamma(70) * 1.01 * 70 * a.abs().max() * b.abs().max()


def worst_sum(logits, values, signs, by):
    """Sum of exp(logit - maximum) * value in tiles, one key after another, as a machine has it whose every operation errs by as much as a right one may.

    Args:
        logits, values: [n] float64; values are 0 or 1, whose products are exact.
        signs: [n] which way each logit, times log2(e), and its exponential err.
        by: which way products and sums err; exponentials of rescalings err downwards.
    """
    logits = logits + signs * UNIT * logits.abs()
    total, highest = 0.0, -math.inf
    parts = (x.split(TILE) for x in (logits, values, signs))
    for tile, value, sign in zip(*parts, strict=True):
        before, highest = highest, max(highest, tile.max().item())
        total *= math.exp(before - highest) * (1 - EXP_UNITS * UNIT) * (1 + by * UNIT)
        weights = torch.exp(tile - highest) * (1 + sign * EXP_UNITS * UNIT)
        for term in (weights * value).tolist():
            total = (total + term) * (1 + by * UNIT)
    return total, highest


@pytest.mark.parametrize(("count", "size"), [(4096, 0.0), (64, 300.0)])
def test_softmax_by_the_worst_of_right_machines_is_within_its_bounds(count, size):
    """With many keys, whose sums lose most, and with large logits, whose products with log2(e) do."""
    logits = size + torch.linspace(
        0, 1e-3, count, dtype=torch.float64
    )  # each tile has a new maximum
    ones, mine = torch.ones_like(logits), (torch.arange(count) % 8 == 0).double()
    with bounding():
        weights, lse = torch.softmax(logits, 0), torch.logsumexp(logits, 0)
        out = weights @ mine
    above, _ = worst_sum(logits, mine, 1 - 2 * mine, -1)
    below, _ = worst_sum(logits, ones, 1 - 2 * mine, 1)
    low, top = worst_sum(logits, ones, -ones, -1)
    reached = []
    for exact, found in ((out, above / below), (lse, top + math.log(low))):
        error = (exact.value - found).abs()
        assert error <= exact.error
        reached.append((error / exact.error).item())
    # Rescalings lose less than the margin of the sum, which no order of it uses up: none is missed where they are not counted.
    assert max(reached) > 0.05, f"the bounds are {1 / max(reached):.3g} times what was reached"


def test_errors_of_operands_reach_results():
    """Each rule against the largest change that operands within their errors make."""
    a, b = numbers(5, 6).abs() + 1, numbers(5, 6, seed=1).abs() + 1
    off = 1e-3
    rules = {
        "add": lambda x, y: x + y,
        "sub": lambda x, y: x - y,
        "mul": lambda x, y: x * y,
        "div": lambda x, y: x / y,
        "sqrt": lambda x, y: torch.sqrt(x),
        "rsqrt": lambda x, y: torch.rsqrt(x),
        "tanh": lambda x, y: torch.tanh(x),
        "sigmoid": lambda x, y: torch.sigmoid(x),
        "mean": lambda x, y: x.mean(1, keepdim=True),
        "matmul": lambda x, y: x @ y.T,
        "softmax": lambda x, y: torch.softmax(x, 1),
        "logsumexp": lambda x, y: torch.logsumexp(x, 1),
    }
    for name, rule in rules.items():
        with bounding():
            result = rule(bounded(a, torch.full_like(a, off)), bounded(b, torch.full_like(b, off)))
        reached = 0.0
        for seed in range(20):
            signs = [numbers(5, 6, seed=2 * seed + i).sign() * off for i in (0, 1)]
            moved = (rule(a + signs[0], b + signs[1]) - rule(a, b)).abs()
            assert (moved <= result.error).all(), name
            reached = max(reached, (moved / result.error).max().item())
        assert reached > 0.3, f"{name}: the bound is {1 / reached:.3g} times what was reached"


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_what_is_kept_in_a_narrower_dtype_between_operations(dtype):
    a, b, c = (numbers(*s, seed=i).to(dtype).double() for i, s in enumerate([(9, 24), (24, 7), (7, 5)]))  # fmt: skip
    with bounding():
        exact = rounded(a @ b, dtype) @ c
        finer = a @ b @ c
    got = (a @ b).to(dtype).float() @ c.float()
    assert_within_budget("rounded", got, exact)
    with pytest.raises(AssertionError, match=r"^finer: error"):
        assert_within_budget("finer", got, finer)


def test_what_has_no_rule_is_refused():
    with bounding():
        x = torch.zeros(3, dtype=torch.float64)
        with pytest.raises(NotImplementedError, match="no rule for cumsum"):
            x.cumsum(0)
        with pytest.raises(NotImplementedError, match=r"became torch\.float32"):
            x.to(FP32)
    assert allowed(bounded(torch.ones(1, dtype=torch.float64)), BF16).item() >= 2.0**-9
    assert torch.finfo(FP32).eps == UNIT


def changed(**fields):
    return lambda batch: batch | fields


def scaled(batch):
    """A softmax scale that is off by 5 %."""
    scale = batch["softmax_scale"] or batch["q"].shape[2] ** -0.5
    return batch | {"softmax_scale": 1.05 * scale}


def last_value_twice(batch):
    """The newest key is not read, and the one before it twice: an index that is off by one."""
    name = "k" if "k" in batch else "kv"
    rows = batch[name].clone()
    rows[-1] = rows[-2]
    return batch | {name: rows}


def newest_entry_not_selected(batch):
    """Entries are selected in any order, the newest first."""
    topk_indices = batch["topk_indices"].clone()
    topk_indices[:, 0] = -1
    return batch | {"topk_indices": topk_indices}


def sink_twice(batch):
    return batch | {"sinks": batch["sinks"] + math.log(2.0)}


def window(by):
    return lambda batch: batch | {"sliding_window": batch["sliding_window"] + by}


PAGED = AttentionCase("paged", [330, 40], [3, 2], sinks=True, head_dim=64)
LOCAL = dataclasses.replace(PAGED, name="local", sliding_window=100)
LONG = AttentionCase("long", [900], [2], num_heads=2, num_kv_heads=1)
CSA = Case("csa", [600, 90], [3, 2], ratio=4, topk=40, entry_rows=64, scattered=False)
HCA = Case("hca", [1300], [2], ratio=4, entry_rows=64, head_dim=64)
MLA = MlaCase("mla", [330, 40], [3, 2])
LONG_MLA = MlaCase("long-mla", [900], [2])
BREAKS = [
    (PAGED, scaled), (PAGED, last_value_twice), (PAGED, sink_twice), (PAGED, changed(sinks=None)), (PAGED, changed(softcap=5.0)),
    (LOCAL, scaled), (LOCAL, window(-1)), (LOCAL, sink_twice), (LONG, scaled),
    (CSA, scaled), (CSA, window(-1)), (CSA, sink_twice), (CSA, changed(cos_sin=None)), (CSA, newest_entry_not_selected), (CSA, last_value_twice),
    (HCA, scaled), (HCA, window(-1)), (HCA, changed(compress_ratio=5)),
    (MLA, scaled), (MLA, last_value_twice), (LONG_MLA, scaled),
]  # fmt: skip

# One of many hundred keys moves a mean by less than bf16 rounds it by.
FINE_BREAKS = [(LONG, last_value_twice), (HCA, sink_twice), (LONG_MLA, last_value_twice)]

CASES = {case.name: case for case, _ in BREAKS}


@functools.cache
def right(name, dtype):
    """The batch of a case, a function from a batch to output and lse with bounds, and what it gives."""
    case = dataclasses.replace(CASES[name], dtype=dtype)
    make, oracle = {
        AttentionCase: (make_batch, attention_reference),
        Case: (compressed_cases.make_batch, exactly),
        MlaCase: (make_mla_batch, mla_reference),
    }[type(case)]
    batch = make(case)
    return batch, oracle, oracle(batch)


@ordinary("paged", "long-mla")
@pytest.mark.parametrize("case, mistake, dtype", [(*b, d) for b in BREAKS for d in (FP32, BF16)] + [(*b, FP32) for b in FINE_BREAKS], ids=lambda x: getattr(x, "name", None) or getattr(x, "__name__", None))  # fmt: skip
def test_a_mistake_is_outside_of_the_budget(case, mistake, dtype):
    batch, oracle, (exact, _) = right(case.name, dtype)
    wrong, _ = oracle(mistake(batch))
    assert_within_budget("itself", exact.value.to(dtype), exact)
    with pytest.raises(AssertionError, match=r"^out: error"):
        assert_within_budget("out", wrong.value.to(dtype), exact)
