"""Sampling against plain loops over one row at a time, and its promises: the same draws whatever
else is in the batch.
"""

import math

import numpy as np
import pytest
import torch

from quire.kvcore.device import Staging
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import (
    Sampler,
    derived_seed,
    draw,
    uniform,
)
from quire.models.engine.speculative import NGramDrafter
from tests.models.engine.test_engine import DEVICE, Recorder, build, prompt
from tests.support.models.captured import Waits
from tests.support.models.toy import finish

CPU = Staging("cpu")


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


# In the engine.

MIXED = (
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 5, "seed": 2},
    {},
    {"temperature": 1.0, "top_p": 0.7, "seed": 1, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.8, "logprobs": 2},
    {"temperature": 1.5, "min_p": 0.1, "seed": 3, "logprobs": 0},
)


@pytest.mark.parametrize("method", ["strict", "standard"])
@pytest.mark.skipif(DEVICE != "cpu", reason="on a device engines sample in Triton anyway")
def test_the_sampler_in_triton_draws_the_same_and_reads_nothing(method):
    """With penalties, drafts and log-probabilities."""

    def outputs(impl):
        settings = {
            "max_num_seqs": 6,
            "max_num_batched_tokens": 512,
            "rejection_sample_method": method,
        }
        run = Recorder(build("gemma3-tiny"), drafter=NGramDrafter(2, min_ngram=1), **settings)
        vocab_size = run.engine.model.config.vocab_size
        placeholders = run.engine.runner.builder.sampled
        sampler = Sampler(
            vocab_size, "cpu", placeholders, rejection_sample_method=method, impl=impl
        )

        def sample(*args):
            with reads:
                return sampler(*args)

        reads, run.engine._sampler = Waits(), sample
        # Whatever is drawn has been there, so that the next one is guessed.
        ids = [run.add(list(range(3, 259)), 3, sampling=s) for s in MIXED]
        run.run()
        assert run.engine.totals.num_drafts > 0
        return [(run.outputs[i].token_ids, run.outputs[i].logprobs) for i in ids], reads.found

    plain, reads = outputs("torch")
    in_triton, none = outputs("triton")
    assert [ids for ids, _ in in_triton] == [ids for ids, _ in plain]
    assert [logprobs for _, logprobs in in_triton] == [logprobs for _, logprobs in plain]
    assert reads and not none


def test_samples_share_the_pages_of_their_prompt():
    run = Recorder(build("gemma3-tiny"), max_num_batched_tokens=64)
    a = run.engine.kv.alignment
    tokens = prompt(3 * a + 5)
    params = SamplingParams(6, temperature=1.0, seed=9, n=4, ignore_eos=True)
    run.engine.add_request(tokens, params, request_id="r")
    outputs = {(o.request_id, o.sample): o for o in finish(run.engine)}
    assert sorted(outputs) == [("r", i) for i in range(4)]
    assert [outputs["r", i].num_cached_tokens for i in range(4)] == [0, 3 * a, 3 * a, 3 * a]
    # Nothing but the rest behind the last boundary was computed again.
    assert run.engine.totals.num_tokens == (3 * a + 5) + 3 * 5 + 4 * 5
    assert len({o.token_ids for o in outputs.values()}) == 4
    one = run.add(tokens, 6, sampling={"temperature": 1.0, "seed": 9})
    run.run()
    assert run.outputs[one].token_ids == outputs["r", 0].token_ids
