"""Sampling and drafts: random numbers, n-grams, and rejection sampling in the engine.

Whatever is drafted, outputs have the distribution that the rules of sampling give. A Markov chain
of four tokens stands in for a model, so that the probability of every output is a product of table
entries. Whole outputs are counted, so a draft that is wrongly kept, or wrongly replaced, shows in
the tokens behind it too. Bounds are those that a right program exceeds with a probability of 1e-4;
seeds are fixed.
"""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from quire.models.engine.device_drafter import DeviceDrafter
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import DRAFT, derived_seed, draw, uniform
from quire.models.engine.speculative import NGramDrafter
from tests.support.models.toy import ToyModel, finish


def plain_probabilities(logits, p):
    """The rules one after another, in float64, with lists and loops."""
    logits = [x / p.temperature for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if p.top_k:
        order = order[: p.top_k]
    top = logits[order[0]]
    mass = {i: math.exp(logits[i] - top) for i in order}
    total, kept, before = sum(mass.values()), [], 0.0
    for i in order:
        if not kept or before < p.top_p or p.top_p == 1:
            kept.append(i)
        before += mass[i] / total
    kept = [i for i in kept if mass[i] >= p.min_p * mass[kept[0]]]
    total = sum(mass[i] for i in kept)
    return [mass[i] / total if i in kept else 0.0 for i in range(len(logits))]


def test_draws_follow_the_distribution():
    """Pearson's chi-squared over 40,000 draws; for 30 degrees of freedom 99.99 % lie below 72."""
    n = 40_000
    logits = torch.randn(1, 31, generator=torch.Generator().manual_seed(1))
    mass = logits.softmax(dim=1)
    for u in (uniform([5] * n, range(n)), uniform(range(n), [7] * n)):
        ids = draw(mass.expand(n, -1), torch.from_numpy(u))
        counts = torch.bincount(ids, minlength=31).double()
        expected = n * mass[0].double()
        assert ((counts - expected) ** 2 / expected).sum() < 72
    # Neighbours are independent: of seeds, of positions, and of purposes.
    base = uniform(range(n), [3] * n)
    for other in (
        uniform(range(1, n + 1), [3] * n),
        uniform(range(n), [4] * n),
        uniform(range(n), [3] * n, 1),
    ):
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / math.sqrt(n)
    assert base.min() >= 0 and base.max() < 1


def test_seeds_of_samples():
    assert derived_seed(7, 0) == 7
    assert len({derived_seed(seed, sample) for seed in range(20) for sample in range(20)}) == 400
    assert uniform([-1], [0]) == uniform([2**64 - 1], [0])


def plain_lookup(tokens, max_ngram, min_ngram, k):
    """Try every length and place: the newest match with k tokens behind it, else the oldest."""
    for size in range(max_ngram, min_ngram - 1, -1):
        tail = tokens[len(tokens) - size :]
        ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tail]
        if len(tail) == size and ends:
            whole = [e for e in ends if e + k <= len(tokens)]
            start = whole[-1] if whole else ends[0]
            return tokens[start : start + k]
    return []


@pytest.mark.parametrize(
    ("max_ngram", "min_ngram", "k"), [(4, 2, 4), (1, 1, 3), (3, 3, 1), (5, 1, 8)]
)
def test_ngram_drafts_equal_a_search_of_every_place(max_ngram, min_ngram, k):
    rng = np.random.default_rng(0)
    drafter = NGramDrafter(k, max_ngram=max_ngram, min_ngram=min_ngram)
    hits = 0
    for _ in range(400):
        tokens = rng.integers(0, rng.integers(1, 6), rng.integers(1, 30)).astype(np.int32)
        got = drafter._continuation(tokens).tolist()
        assert got == plain_lookup(tokens.tolist(), max_ngram, min_ngram, k), tokens
        hits += bool(got)
    assert 50 < hits < 400


V = 4  # tokens of the chain
Z = 3.719  # a standard normal exceeds it with a probability of 1e-4
PROMPT = [2, 0]


class Chain(ToyModel):
    """Logits depend on the last token alone."""

    group = None  # of ranks

    def __init__(self):
        super().__init__()
        self.config.vocab_size, self.config.eos_token_ids = V, ()
        self.table = 0.8 * torch.randn(V, V, generator=torch.Generator().manual_seed(5))

    def forward(
        self, input_ids, positions, attn, pool, *, logits_rows=None, impl=None, return_hidden=False
    ):
        assert (input_ids >= 0).all()  # no place of a draft that only the device knows
        logits = self.table[input_ids if logits_rows is None else input_ids[logits_rows]]
        return (logits, input_ids) if return_hidden else logits


class Guess:
    """Drafts that are not drawn: the largest logit or mass of each row. table: [V, V]."""

    def __init__(self, table, max_draft_tokens):
        self.table, self.max_draft_tokens = table, max_draft_tokens

    def propose(self, requests):
        best = self.table.argmax(dim=1).numpy()
        return list(self._follow(requests, lambda tokens, i: best[tokens]))

    def _follow(self, requests, choose):
        tokens = [np.array([r.tokens[-1] for r in requests])]
        for i in range(self.max_draft_tokens):
            tokens.append(choose(tokens[-1], i))
        self.before = np.stack(tokens[:-1], axis=1)
        return np.stack(tokens[1:], axis=1).astype(np.int32)


class Drawn(Guess):
    """Drafts drawn from the rows of ``table``, which sum to 1."""

    def sample(self, requests):
        seeds, first = [r.seed for r in requests], np.array([r.num_output for r in requests])

        def choose(tokens, i):
            u = uniform(seeds, first + i, DRAFT)
            return draw(self.table[tokens], torch.from_numpy(u)).numpy()

        ids = self._follow(requests, choose)
        return list(zip(ids, self.table[self.before], strict=True))


class OfModel(DeviceDrafter):
    """Drafts on the device, drawn under their request's parameters. table: [V, V] logits."""

    def __init__(self, model, max_draft_tokens, table):
        super().__init__(model, max_draft_tokens)
        self.table = table

    def observe(self, batch, hidden, next_ids, *arrays):
        assert (next_ids >= 0).all()
        self._receive(next_ids, *arrays)

    def _drafts(self, request_slots, seq_lens, block_tables, *, num_drafts, max_seq_len, choose):
        tokens = [self._newest[request_slots]]
        for _ in range(num_drafts):
            tokens.append(choose(self.table[tokens[-1]]))
        return torch.stack(tokens[1:], dim=1)


def drafter(kind, model, params, k):
    if kind == "of the model":
        return OfModel(model, k, 0.6 * model.table)
    if kind == "guess":
        return Guess(model.table, k)
    p = torch.tensor([plain_probabilities(row.tolist(), params) for row in model.table]).float()
    return Drawn(0.8 * p + 0.2 / V if kind == "good" else p.roll(1, dims=1), k)


PARAMS = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.3, top_k=3),
    "top_p, min_p": SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1),
    "penalty": SamplingParams(temperature=1.0, repetition_penalty=4.0),
}


def probability(table, params, output):
    """Of a whole output, by plain loops."""
    tokens, p = list(PROMPT), 1.0
    for token in output:
        logits, factor = table[tokens[-1]].tolist(), params.repetition_penalty
        for seen in set(tokens):
            logits[seen] = logits[seen] / factor if logits[seen] > 0 else logits[seen] * factor
        p *= plain_probabilities(logits, params)[token]
        tokens.append(token)
    return p


def run(model, drafter, params, num_tokens, num_outputs, *, method="standard", **more):
    """(outputs in the order of their seeds, drafts, accepted drafts).

    params: of all, or a list for requests in turn.
    """
    settings = {"max_num_seqs": 200, "max_num_batched_tokens": 4000, "num_pages": 3000} | more
    config = EngineConfig(rejection_sample_method=method, **settings)
    engine = Engine(model, config, drafter=drafter)
    params = params if isinstance(params, list) else [params]
    for seed in range(num_outputs):
        own = replace(params[seed % len(params)], max_tokens=num_tokens, ignore_eos=True, seed=seed)
        engine.add_request(PROMPT, own, request_id=str(seed))
    outputs = {int(output.request_id): output.token_ids for output in finish(engine)}
    totals = engine.totals
    return [outputs[i] for i in range(num_outputs)], totals.num_drafts, totals.num_accepted


def excess(outputs, expected):
    """Pearson's chi-squared, rare outputs as one, as a standard normal (Wilson and Hilferty)."""
    counts, n = Counter(outputs), len(outputs)
    assert abs(sum(expected.values()) - 1) < 1e-6
    assert all(expected[output] > 0 for output in counts), "an output that no rule allows"
    cells = [(counts[o], n * p) for o, p in expected.items() if n * p >= 5]
    rest = [(counts[o], n * p) for o, p in expected.items() if 0 < n * p < 5]
    if rest:
        cells.append(tuple(map(sum, zip(*rest, strict=True))))
    statistic, freedom = sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1
    assert freedom >= 6
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("bad", "temperature"), ("of the model", "top_k"), ("of the model", "top_p, min_p"),
        *(("guess", name) for name in PARAMS),
    ],
)  # fmt: skip
def test_outputs_have_the_targets_distribution(kind, name):
    model, params, budget = Chain(), PARAMS[name], 1500
    expected = {o: probability(model.table, params, o) for o in product(range(V), repeat=4)}
    guess = drafter(kind, model, params, 2)
    outputs, drafts, accepted = run(model, guess, params, num_tokens=4, num_outputs=budget)
    # Were drawn drafts taken for certain ones, a third of these would be accepted.
    assert drafts > budget and (kind != "of the model" or accepted > 0.6 * drafts)
    assert excess(outputs, expected) < Z


@pytest.mark.parametrize("name", PARAMS)
def test_the_same_seeds_and_drafts_give_the_same_outputs(name):
    """Whatever else runs beside a request. Under "strict", the same seeds are enough."""
    model, params = Chain(), PARAMS[name]

    def outputs(kind, method, num_outputs=60, **more):
        guess, sizes = kind and drafter(kind, model, params, 3), (9, num_outputs)
        return run(model, guess, params, *sizes, method=method, **more)[0]

    together = outputs("good", "standard")
    assert outputs("good", "standard", max_num_seqs=7) == together
    assert outputs("good", "standard", num_outputs=4, impl="triton") == together[:4]
    plain = outputs(None, "standard")
    assert together != plain and len(set(together)) > 20
    for kind in ("good", "bad", "of the model", "guess"):
        assert outputs(kind, "strict") == plain


@pytest.mark.parametrize("kind", ["bad", "of the model"])
def test_greedy_outputs_do_not_depend_on_drafts(kind):
    """Beside sampled requests, whose drafts are drawn."""
    model, penalty = Chain(), PARAMS["penalty"]
    params = [SamplingParams(), replace(penalty, temperature=0.0), penalty]
    settings = {"num_tokens": 40, "num_outputs": 12}
    plain, _, _ = run(model, None, params, **settings)
    outputs, drafts, accepted = run(model, drafter(kind, model, penalty, 3), params, **settings)
    assert 0 < accepted < drafts
    for i in (0, 1):
        assert outputs[i::3] == plain[i::3]
