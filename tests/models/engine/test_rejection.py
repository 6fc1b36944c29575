"""Rejection sampling in the engine: whatever is drafted, outputs have the distribution that the rules of sampling give.

A Markov chain of four tokens stands in for a model, so that the probability of every output is a product of table entries. Whole
outputs are counted, so a draft that is wrongly kept, or wrongly replaced, shows in the tokens behind it too. Bounds are those that a
right program exceeds with a probability of 1e-4; seeds are fixed.
"""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from quire.models.config.named import get_config
from quire.models.deepseek_v4.config import CSA, HCA, MOE, SLIDING
from quire.models.deepseek_v4.mtp import MTPDrafter
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import DRAFT, draw, uniform
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_sampling import plain_probabilities
from tests.support.models.toy import ToyModel

V = 4  # tokens of the chain
Z = 3.719  # a standard normal exceeds it with a probability of 1e-4
PROMPT = [2, 0]


class Chain(ToyModel):
    """Logits depend on the last token alone."""

    def __init__(self):
        super().__init__()
        self.config.vocab_size, self.config.eos_token_ids = V, ()
        self.table = 0.8 * torch.randn(V, V, generator=torch.Generator().manual_seed(5))

    def forward(self, input_ids, positions, attn, pool, *, logits_rows=None, impl=None):
        return self.table[input_ids if logits_rows is None else input_ids[logits_rows]]


class Guess:
    """Drafts that are not drawn: the token with the largest logit (or mass), one after another. table: [V, V]."""

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


def drafter(kind, model, params, k):
    p = torch.stack(
        [torch.tensor(plain_probabilities(row.tolist(), params)) for row in model.table]
    )
    return {
        "good": lambda: Drawn((0.8 * p + 0.2 / V).float(), k),
        "bad": lambda: Drawn(p.roll(1, dims=1).float(), k),
        "guess, good": lambda: Guess(model.table, k),
        "guess, bad": lambda: Guess(-model.table, k),
    }[kind]()


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


def run(model, drafter, params, *, num_tokens, num_outputs, method="standard", **more):
    """(outputs in the order of their seeds, drafts, accepted drafts)."""
    settings = {"max_num_seqs": 200, "max_num_batched_tokens": 4000, "num_pages": 3000} | more
    engine = Engine(
        model, EngineConfig(rejection_sample_method=method, **settings), drafter=drafter
    )
    fields = vars(params) | {"max_tokens": num_tokens, "ignore_eos": True}
    for seed in range(num_outputs):
        engine.add_request(PROMPT, SamplingParams(**fields | {"seed": seed}), request_id=str(seed))
    outputs = {}
    while engine.has_work:
        for output in engine.step().finished:
            outputs[int(output.request_id)] = output.token_ids
    totals = engine.totals
    return [outputs[i] for i in range(num_outputs)], totals.num_drafts, totals.num_accepted


def excess(outputs, expected):
    """Pearson's chi-squared over all outputs, rare ones taken together, as a standard normal (Wilson and Hilferty)."""
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


@pytest.mark.parametrize("budget", [1500])
@pytest.mark.parametrize(
    ("kind", "name"), [("bad", "temperature"), *(("guess, good", name) for name in PARAMS)]
)
def test_outputs_have_the_targets_distribution(kind, name, budget):
    model, params = Chain(), PARAMS[name]
    expected = {o: probability(model.table, params, o) for o in product(range(V), repeat=4)}
    guess = drafter(kind, model, params, 2)
    outputs, drafts, _ = run(model, guess, params, num_tokens=4, num_outputs=budget)
    assert drafts > budget
    assert excess(outputs, expected) < Z


@pytest.mark.parametrize("name", PARAMS)
def test_the_same_seeds_and_drafts_give_the_same_outputs(name):
    """Whatever else runs beside a request. Under "strict", the same seeds are enough."""
    model, params = Chain(), PARAMS[name]

    def outputs(kind, method, **more):
        guess = kind and drafter(kind, model, params, 3)
        return run(model, guess, params, num_tokens=9, num_outputs=60, method=method, **more)[0]

    together = outputs("good", "standard")
    assert outputs("good", "standard", max_num_seqs=7) == together
    plain = outputs(None, "standard")
    assert together != plain and len(set(together)) > 20
    for kind in ("good", "bad", "guess, good"):
        assert outputs(kind, "strict") == plain


@pytest.mark.nightly
@pytest.mark.slow
def test_drafts_of_deepseek_v4_are_drawn_and_outputs_have_the_targets_distribution():
    """Its own drafter, two drafts a step; greedy requests beside the sampled ones draft as ever."""
    few = {"layer_types": (SLIDING, CSA, HCA), "mlp_layer_types": (MOE,) * 3}
    model = random_model(replace(get_config("deepseek-v4-tiny"), **few))
    params = SamplingParams(temperature=1.5, top_k=3)
    prompt = [5, 9, 200, 31]

    def outputs(method):
        engine = Engine(
            model,
            EngineConfig(max_num_seqs=64, num_pages=600, rejection_sample_method=method),
            drafter=MTPDrafter(model, 2),
        )
        fields = vars(params) | {"max_tokens": 4, "ignore_eos": True}
        for seed in range(300):
            more = {"seed": seed} | ({"temperature": 0.0} if seed % 50 == 49 else {})
            engine.add_request(prompt, SamplingParams(**fields | more), request_id=str(seed))
        got = {}
        while engine.has_work:
            got |= {int(o.request_id): o for o in engine.step().finished}
        drawn = [o for seed, o in got.items() if seed % 50 != 49]
        same = {o.token_ids for seed, o in got.items() if seed % 50 == 49}
        accepted = sum(o.num_accepted for o in drawn) / sum(o.num_drafts for o in drawn)
        return [o.token_ids[:3] for o in drawn], same, accepted

    got, greedy, standard = outputs("standard")
    assert len(greedy) == 1
    expected = {(): 1.0}
    for _ in range(3):
        longer = {}
        for output, p in expected.items():
            [logits] = model.full_forward(
                torch.tensor([*prompt, *output]), logits_rows=torch.tensor([-1])
            )
            mass = plain_probabilities(logits.tolist(), params)
            longer |= {(*output, t): p * m for t, m in enumerate(mass) if m > 0}
        expected = longer
    assert excess(got, expected) < Z
    _, again, strict = outputs("strict")
    assert again == greedy
    assert standard >= strict
