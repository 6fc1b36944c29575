"""Many requests, aborted at random steps, in a pool that is too small for them: every output is what the request gives alone.

The model is that of integers of `tests.support.models.toy`.
"""

import random
from collections import Counter

import pytest
import torch

from quire.kernels import sample_tokens
from quire.kvcore.device import Staging
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import draw_columns, uniform
from quire.models.engine.speculative import NGramDrafter
from tests.support.models.toy import VOCAB, ToyModel, plain_logits

SAMPLING = (
    {},
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "top_k": 8, "seed": 2},
    {"temperature": 1.2, "top_p": 0.8, "seed": 3},
    {"temperature": 1.5, "min_p": 0.1, "seed": 4, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.2},
)


def workload(rng, count, vocab_size, longest):
    """(prompt, params, step of its life in which it is aborted, or None) of ``count`` requests; some share prefixes."""
    stems = [[rng.randrange(3, vocab_size) for _ in range(n)] for n in (16, 40, 70)]
    for _ in range(count):
        stem = rng.choice(stems) if rng.random() < 0.4 else []
        own = [
            rng.randrange(3, vocab_size)
            for _ in range(rng.choice((1, 2, 15, 17, rng.randrange(1, 60))))
        ]
        tokens = [*stem, *own][: longest - 2]
        params = SamplingParams(
            max_tokens=rng.choice((1, 2, rng.randrange(1, 60))),
            ignore_eos=rng.random() < 0.5,
            **rng.choice(SAMPLING),
        )
        yield tokens, params, rng.randrange(30) if rng.random() < 0.3 else None


def run_all(engine, work, rng, after_step, in_flight=24):
    """Adds requests as others end, aborts those that have to be aborted, and returns every output by place in ``work``."""
    waiting, places, deadlines, outputs = list(enumerate(work)), {}, {}, {}
    step = 0
    while waiting or engine.has_work:
        while waiting and len(places) < in_flight and rng.random() < 0.9:
            place, (tokens, params, abort_after) = waiting.pop(0)
            request_id = engine.add_request(tokens, params)
            places[request_id] = place
            if abort_after is not None:
                deadlines[request_id] = step + abort_after
        for request_id in [i for i, when in deadlines.items() if when <= step]:
            del deadlines[request_id]
            outputs[places.pop(request_id)] = engine.abort(request_id)
        had_work = engine.has_work
        report = engine.step()
        assert (report is not None) == had_work
        for output in report.finished if report else []:
            outputs[places.pop(output.request_id)] = output
            deadlines.pop(output.request_id, None)
        after_step(step)
        step += 1
    return [outputs[i] for i in range(len(work))]


def alone(model, tokens, params):
    """Output of one request of the toy, token by token from the definitions."""
    out, stop = [], () if params.ignore_eos else model.config.eos_token_ids
    staging = Staging("cpu")
    while len(out) < params.max_tokens and not (out and out[-1] in stop):
        logits = plain_logits(model, [*tokens, *out])
        if params.repetition_penalty != 1:
            seen = torch.zeros(VOCAB, dtype=torch.bool)
            seen[[*tokens, *out]] = True
            f = params.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / f, logits * f), logits)
        if params.temperature:
            u = uniform([params.seed], [len(out)])
            [given] = draw_columns([params], [u], staging)
            out.append(int(sample_tokens(logits[None], **given)))
        else:
            out.append(int(logits.argmax()))
    return tuple(out)


def assert_equal_each_alone(model, work, outputs, longest):
    """Outputs of ``run_all`` are those of `alone`, up to an abort or the longest sequence."""
    for (tokens, params, _), output in zip(work, outputs, strict=True):
        expected = alone(model, tokens, params)[: longest - len(tokens)]
        if output.finish_reason == "abort":
            expected = expected[: len(output.token_ids)]
        assert output.token_ids == expected


def counting(engine):
    """Counts the steps that ran ahead, and those that could not."""
    counts, schedule = Counter(), engine.scheduler.schedule

    def count(*, ahead=False):
        step = schedule(ahead=ahead)
        counts[step is not None] += ahead
        return step

    engine.scheduler.schedule = count
    return counts


CASES = {
    "plain": {"num_pages": 52},
    "drafts": {"num_pages": 52, "drafter": NGramDrafter(3, min_ngram=1), "decode_graphs": True},
    "a step ahead": {"num_pages": 26, "retention": "dense", "async_scheduling": True},
}


@pytest.mark.parametrize("name", CASES)
def test_hundreds_of_requests_equal_each_alone(name):
    """Aborted, preempted, stopped by ids, sampled, with penalties and prefixes in common."""
    model, rng, budget = ToyModel(), random.Random(5), 150
    model.config.eos_token_ids = (7, 20, 33)
    settings = dict(CASES[name])
    drafter = settings.pop("drafter", None)
    config = EngineConfig(max_num_seqs=16, max_num_batched_tokens=64, **settings)
    engine = Engine(model, config, drafter=drafter)
    longest, ahead = engine.max_model_len, counting(engine)
    work = list(workload(rng, budget, VOCAB, longest))

    def distrust(step):
        engine.pool.poison(engine.kv.pool.free_pages())
        if step % 8 == 0:
            engine.kv.check_invariants()

    outputs = run_all(engine, work, rng, distrust)
    reasons = Counter(output.finish_reason for output in outputs)
    assert_equal_each_alone(model, work, outputs, longest)
    assert min(reasons[reason] for reason in ("abort", "stop", "length")) > 8
    assert engine.totals.num_preempted > 2
    assert sum(o.num_cached_tokens for o in outputs) > budget
    if drafter is not None:
        assert engine.totals.num_accepted > budget // 4
        assert engine.totals.num_drafts - engine.totals.num_accepted > budget // 4
    if config.async_scheduling:
        assert ahead[True] > 80 and ahead[False] > 10
    engine.kv.check_invariants()
    assert engine.kv.stats()["pages_in_use"] == 0
    engine.kv.clear()
    assert engine.kv.num_free_pages == engine.kv.num_pages - 1
