"""Many requests, aborted at random steps, in a pool that is too small for them: every output is what the request gives alone.

The model is that of integers of `tests.support.models.toy`. In some cases calls of one kind fail at times: a step that fails is done again
by the next call, as if nothing had happened, and pages whose copy fails are lost, not wrong.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from quire.kernels import sample_tokens
from quire.kvcore.device import Staging
from quire.kvcore.invariants import check_index
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.host_tier import PageCopier
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import Sampled, draw_columns, uniform
from quire.models.engine.speculative import NGramDrafter
from tests.support.models.toy import PAGE_BYTES, VOCAB, ToyModel, plain_logits

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
    """(every output by place in ``work``, steps that failed); adds requests as others end, and aborts those that have to be aborted."""
    waiting, places, deadlines, outputs = list(enumerate(work)), {}, {}, {}
    step = failed = 0
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
        try:
            report = engine.step()
            assert (report is not None) == had_work
        except torch.OutOfMemoryError:
            report, failed = None, failed + 1
        for output in report.finished if report else []:
            outputs[places.pop(output.request_id)] = output
            deadlines.pop(output.request_id, None)
        after_step(step)
        step += 1
    return [outputs[i] for i in range(len(work))], failed


def alone(model, tokens, params, stop_ids=(1,)):
    """Output of one request of the toy, token by token from the definitions."""
    out, stop = [], () if params.ignore_eos else stop_ids
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


def counting(engine):
    """Counts the steps that ran ahead, and those that could not."""
    counts, schedule = Counter(), engine.scheduler.schedule

    def count(*, ahead=False):
        step = schedule(ahead=ahead)
        counts[step is not None] += ahead
        return step

    engine.scheduler.schedule = count
    return counts


def recount(engine):
    """Every page is accounted for, of the pool and of the host; after a step or at the end."""
    engine.kv.check_invariants()
    if engine.tiers is not None:
        check_index(engine.tiers.tiers.index, [], [], [], Counter())


def end(engine):
    """All that ran has ended, and all pages are free once nothing is cached."""
    tiers = engine.tiers
    if tiers is not None:
        tiers.settle()
        assert not tiers.tiers.jobs and not tiers.copier.has_jobs and not tiers.is_loading
    recount(engine)
    assert engine.kv.stats()["pages_in_use"] == 0
    engine.kv.clear()
    for pool in (engine.kv.pool, *([tiers.tiers.index.pool] if tiers else [])):
        assert pool.num_free == pool.num_pages - 1
    engine.close()


GIB_OF_A_PAGE = PAGE_BYTES / 2**30


@dataclass(frozen=True)
class Case:
    """So many requests, settings of the engine and drafts, and what fails at times (`disturb`)."""

    count: int = 150
    drafts: int = 0
    fails: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def of_host(host_pages, **more):
    return {"num_pages": 30, "max_num_seqs": 6, "host_cache_gib": host_pages * GIB_OF_A_PAGE} | more


SMALL = {"num_pages": 34, "max_num_seqs": 8, "max_num_batched_tokens": 24}
AHEAD = {"async_scheduling": True}
CASES = {
    "plain": Case(),
    "drafts": Case(drafts=3, settings={"decode_graphs": True}),
    "a step ahead": Case(settings=AHEAD | {"num_pages": 26, "retention": "dense"}),
    "host memory, drafts": Case(80, 3, "copy", of_host(300)),
    "host memory, a step ahead": Case(80, 0, "copy", of_host(60, **AHEAD)),
    **{f"{where} fail": Case(30, 3, where, SMALL) for where in ("tensors", "sample", "evict")},
    "written, and fail": Case(30, 0, "written", SMALL),
    **{f"{where} fail ahead": Case(15, 0, where, SMALL | AHEAD) for where in ("tensors", "written", "wait")},
}  # fmt: skip


def disturb(engine, what, rng, monkeypatch):
    """Make calls raise instead of doing their work, or after it; returns those that did."""
    failed, after = [], what == "written"
    owner, name = {
        "tensors": (engine.runner.builder._staging, "send"),
        "written": (engine.model, "forward"),
        "sample": (engine, "_sampler"),
        "wait": (Sampled, "wait"),
        "evict": (engine.kv.index, "_evict_one"),
        "copy": (PageCopier, "_copy"),
    }[what]
    work = getattr(owner, name)

    def flaky(*args, **more):
        if rng.random() > 0.27:
            return work(*args, **more)
        failed.append(args)
        if what == "copy":
            this, direction, *lists = args
            work(this, direction, *(pages[: len(pages) // 2] for pages in lists))
        if after:
            work(*args, **more)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(owner, name, flaky)
    return failed


@pytest.mark.parametrize("name", CASES)
def test_many_requests_equal_each_alone(name, monkeypatch):
    """Aborted, preempted, stopped by ids, sampled, with penalties and prefixes in common."""
    case, model, rng = CASES[name], ToyModel(), random.Random(5)
    model.config.eos_token_ids = (7, 20, 33)
    settings = {"num_pages": 52, "max_num_seqs": 16, "max_num_batched_tokens": 64} | case.settings
    drafter = NGramDrafter(case.drafts, min_ngram=1) if case.drafts else None
    engine = Engine(model, EngineConfig(**settings), drafter=drafter)
    longest, ahead = engine.max_model_len, counting(engine)
    work = list(workload(rng, case.count, VOCAB, longest))
    if engine.tiers is not None:  # all of them come back
        half = [(tokens, params) for tokens, params, _ in work[: case.count // 2]]
        work = work[: len(half)] + [([*t, 5, 6], replace(p, max_tokens=3), None) for t, p in half]
    disturbed = disturb(engine, case.fails, rng, monkeypatch) if case.fails else []

    def distrust(step):
        engine.pool.poison(engine.kv.pool.free_pages())
        if step % 8 == 0 or case.fails:
            recount(engine)

    outputs, failed = run_all(engine, work, rng, distrust, 9 if engine.tiers else 24)
    monkeypatch.undo()
    for (tokens, params, _), output in zip(work, outputs, strict=True):
        expected = alone(ToyModel(), tokens, params, model.config.eos_token_ids)
        expected = expected[: longest - len(tokens)]
        if output.finish_reason == "abort":
            expected = expected[: len(output.token_ids)]
        assert output.token_ids == expected

    # What the case is about has happened.
    totals, stats = engine.totals, engine.kv.stats()
    reasons = Counter(o.finish_reason for o in outputs)
    assert min(reasons[reason] for reason in ("abort", "stop", "length")) >= case.count // 20
    preempted = sum(output.num_preemptions for output in outputs)
    if case.fails == "copy":
        assert Counter(direction for _, direction, *_ in disturbed).keys() == {
            "to_host",
            "to_device",
        }
        assert len(disturbed) > 10 and failed == 0
        for moved, least in (("stored", 10), ("loaded", 3)):
            assert sum(n for key, n in stats.items() if f"tier_{moved}_pages" in key) > least
    elif case.fails:
        assert failed == len(disturbed) > 5
        if case.fails != "evict":  # else no step had begun
            assert preempted > totals.num_preempted
    else:
        assert totals.num_preempted > 2
        assert sum(o.num_cached_tokens for o in outputs) > case.count
    if case.drafts:
        assert case.count // 4 < totals.num_accepted < totals.num_drafts - case.count // 4
    if settings.get("async_scheduling"):
        assert ahead[True] > 5 and (case.fails or ahead[False] > 10)
    end(engine)
