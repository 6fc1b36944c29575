"""Speculation: n-gram drafts, what stays of them, rejection sampling, and outputs that do not show it."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.models.engine.device_drafter import DeviceDrafter
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import (
    ACCEPT,
    RESAMPLE,
    rejection_sample,
    uniform,
)
from quire.models.engine.speculative import NGramDrafter
from tests.models.engine.test_engine import Recorder, build
from tests.models.engine.test_engine_many import alone, workload
from tests.support.models.drafters import Oracle
from tests.support.models.toy import VOCAB, ToyModel, finish


def plain_lookup(tokens, max_ngram, min_ngram, k):
    """The continuation by trying every length and place; of equally long matches the newest with k tokens behind it, else the oldest."""
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


@pytest.mark.parametrize("kind", ["drawn", "one-hot", "equal", "disjoint"])
def test_rejection_sampling_gives_the_targets_distribution(kind):
    """Pearson's chi-squared over 40,000 tokens; for 9 degrees of freedom 99.99 % lie below 34."""
    n, generator = 40_000, torch.Generator().manual_seed(3)
    p = torch.softmax(1.5 * torch.randn(10, generator=generator), 0)
    if kind == "drawn":
        q = torch.softmax(1.5 * torch.randn(10, generator=generator), 0)
    elif kind == "one-hot":
        q = torch.zeros(10).index_fill_(0, torch.tensor(4), 1.0)
    elif kind == "equal":
        q = p.clone()
    else:
        p[:5], q = 0, torch.tensor([0.2] * 5 + [0.0] * 5)
        p = p / p.sum()
    drafts = torch.multinomial(q, n, replacement=True, generator=generator)
    u = [torch.from_numpy(uniform([11] * n, range(n), purpose)) for purpose in (ACCEPT, RESAMPLE)]
    ids = rejection_sample(p.expand(n, -1), drafts, q.expand(n, -1), *u)
    counts, expected = torch.bincount(ids, minlength=10).double(), n * p.double()
    assert (counts[expected == 0] == 0).all()
    alive = expected > 0
    assert ((counts - expected)[alive] ** 2 / expected[alive]).sum() < 34
    rate = torch.minimum(p, q).sum().item()
    assert abs((ids == drafts).double().mean().item() - rate) < 4 * (0.25 / n) ** 0.5


class DeviceOracle(DeviceDrafter):
    """A drafter of the model: drafts stay on the device, equally many for each request."""

    def __init__(self, oracle):
        self.oracle, self.max_draft_tokens, self.sender = oracle, oracle.max_draft_tokens, None

    def attach(self, pool, builder, **_):
        pass

    def observe(self, batch, hidden, next_ids, last_rows, slots):
        assert (batch.input_ids >= 0).all() and (next_ids >= 0).all()

    def propose(self, requests):
        rows = torch.full((len(requests), self.max_draft_tokens), 3)
        for row, drafts in zip(rows, self.oracle.propose(requests), strict=True):
            row[: len(drafts)] = torch.from_numpy(drafts)
        return rows

    def sample(self, requests):
        return self.propose(requests), [None] * len(requests)


@pytest.mark.parametrize("method", ["strict", "standard"])
def test_drafts_that_only_the_device_knows(method):
    """Penalties count them, rejection sampling verifies them, and the host learns them with the tokens."""

    class Model(ToyModel):
        def forward(self, *args, return_hidden=False, **more):
            logits = super().forward(*args, **more)
            return (logits, logits) if return_hidden else logits

    rng = random.Random(3)
    config = EngineConfig(
        max_num_seqs=8, max_num_batched_tokens=48, num_pages=60, rejection_sample_method=method
    )
    work = [(tokens, params) for tokens, params, _ in workload(rng, 30, VOCAB, 150)]
    if method == "standard":  # other draws than those of `alone`
        work = [(tokens, replace(params, temperature=0.0)) for tokens, params in work]
    expected = {str(i): alone(ToyModel(), *one) for i, one in enumerate(work)}
    drafter = DeviceOracle(Oracle(expected, 3))
    engine, outputs = Engine(Model(), config, drafter=drafter), {}
    for i, (tokens, params) in enumerate(work):
        engine.add_request(tokens, params, request_id=str(i))
    if method == "standard":
        engine.add_request([5] * 9, SamplingParams(40, temperature=0.9, seed=1), request_id="drawn")
    outputs |= {o.request_id: o for o in finish(engine)}
    assert {key: outputs[key].token_ids for key in expected} == expected
    assert sum(len(t) for t in expected.values()) > 300
    assert 50 < engine.totals.num_accepted < engine.totals.num_drafts
    assert any(p.repetition_penalty != 1 and outputs[str(i)].num_accepted for i, (_, p) in enumerate(work))  # fmt: skip


def test_drafts_leave_room_for_the_longest_sequence():
    run = Recorder(build("gemma3-tiny"), max_model_len=64, drafter=NGramDrafter(8, min_ngram=1))
    for n in (55, 62, 63):
        request_id = run.add(([5, 6] * 40)[:n], 100)
        run.run()
        assert len(run.check(request_id).token_ids) == 64 - n
