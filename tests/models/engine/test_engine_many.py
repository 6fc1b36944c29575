"""Many requests, aborted at random steps, in a pool that is too small for them.

Every output, text and stream is what the request gives alone. The model is that of integers of
`tests.support.models.toy`. In some cases calls of one kind fail at times: a step that fails is done
again by the next call, a call for one request ends that request alone, and pages whose copy fails
are lost, not wrong. In others some states of the model have logits that give no token, or passes
write wrong rows.
"""

import math
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.kernels import sample_tokens
from quire.kvcore.device import Staging
from quire.kvcore.invariants import check_index
from quire.models.engine import scheduler
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.host_tier import PageCopier
from quire.models.engine.outputs import RequestError
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import Sampled, derived_seed, draw_columns, uniform
from quire.models.engine.speculative import NGramDrafter
from quire.models.tokenizer import ByteTokenizer, TextStream
from tests.support.models.toy import BLOCK, PAGE_BYTES, VOCAB, ToyModel, plain_logits

SAMPLING = (
    {},
    {"logprobs": 0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "top_k": 8, "seed": 2},
    {"temperature": 1.2, "top_p": 0.8, "seed": 3},
    {"temperature": 1.5, "min_p": 0.1, "seed": 4, "repetition_penalty": 1.3, "logprobs": 3},
    {"repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 5, "stop": ("5", "1", "07"), "logprobs": 2},
    {"temperature": 1.0, "seed": 6, "n": 2, "prompt_logprobs": 1},
)
# By state of the model, what gives no token: rows of its logits.
BAD = {13: [0.0] * 3 + [math.nan] + [0.0] * 60, 29: [math.inf] + [0.0] * 63, 51: [-math.inf] * 64}


def workload(rng, count, vocab_size, longest):
    """(prompt, params, step of its life in which it is aborted, or None) of ``count`` requests;
    some share prefixes.
    """
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
    """Add requests as others end, and abort those that have to be aborted.

    Returns:
        (outputs by (place in ``work``, sample), [ids, text] of their streams, steps that failed).
    """
    waiting, left, deadlines, outputs = list(enumerate(work)), {}, {}, {}
    streams = defaultdict(lambda: [(), ""])
    step = failed = 0
    while waiting or engine.has_work:
        while waiting and len(left) < in_flight and rng.random() < 0.9:
            place, (tokens, params, abort_after) = waiting.pop(0)
            engine.add_request(tokens, params, request_id=str(place), stream=place % 2 == 0)
            left[place] = params.n
            if abort_after is not None and params.n == 1:
                deadlines[place] = step + abort_after
        for place in [i for i, when in deadlines.items() if when <= step]:
            del deadlines[place], left[place]
            outputs[place, 0] = engine.abort(str(place))
        had_work = engine.has_work
        try:
            with torch.inference_mode(step % 3 == 0):  # a caller's own mode
                report = engine.step()
            assert (report is not None) == had_work
        except STEP_ERRORS:
            report, failed = None, failed + 1
        for delta in report.deltas if report else []:
            stream = streams[int(delta.request_id), delta.sample]
            stream[0] += delta.token_ids
            stream[1] += delta.text
        for output in report.finished if report else []:
            place = int(output.request_id)
            outputs[place, output.sample] = output
            left[place] -= 1
            if not left[place]:
                del left[place]
                deadlines.pop(place, None)
            if output.finish_reason == "nan":
                assert engine.kv.match(output.prompt_token_ids).num_tokens == 0
                assert not engine.host_tier or not engine.host_tier.tiers.index.num_segments
        after_step(step)
        step += 1
    assert len(outputs) == sum(params.n for _, params, _ in work)
    return outputs, streams, failed


def answer(model, tokens, params, stop_ids=(1,), longest=2048, sample=0):
    """(ids, text, finish reason) of one request of the toy, token by token from the definitions."""
    out, text, reason = [], "", None
    staging, stop_ids = Staging("cpu"), () if params.ignore_eos else stop_ids
    while reason is None:
        logits = plain_logits(model, [*tokens, *out])
        if params.repetition_penalty != 1:
            seen = torch.zeros(VOCAB, dtype=torch.bool)
            seen[[*tokens, *out]] = True
            f = params.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / f, logits * f), logits)
        if not logits.max().isfinite():
            return tuple(out), text, "nan"
        if params.temperature:
            u = uniform([derived_seed(params.seed, sample)], [len(out)])
            [given] = draw_columns([params], [u], staging)
            out.append(int(sample_tokens(logits[None], **given)))
        else:
            out.append(int(logits.argmax()))
        if out[-1] in stop_ids:
            reason = "stop"
            continue
        text += ByteTokenizer().decode(out[-1:])
        if ends := [text.index(s) for s in params.stop if s in text]:
            text, reason = text[: min(ends)], "stop"
        elif len(out) == params.max_tokens or len(tokens) + len(out) == longest:
            reason = "length"
    return tuple(out), text, reason


def alone(model, tokens, params):
    """Ids of `answer`."""
    return answer(model, tokens, params)[0]


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
    if engine.host_tier is not None:
        check_index(engine.host_tier.tiers.index, [], [], [], Counter())


def end(engine):
    """All that ran has ended, and all pages are free once nothing is cached."""
    tiers = engine.host_tier
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
    """Numbers of requests and of drafts, settings of the engine, and what fails at times.

    fails: a key of `disturb`, "logits" (`BAD`) or "rows" (`spoil`).
    """

    count: int = 150
    drafts: int = 0
    fails: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


def of_host(host_pages, **more):
    return {"num_pages": 30, "max_num_seqs": 6, "host_cache_gib": host_pages * GIB_OF_A_PAGE} | more


SMALL = {"num_pages": 34, "max_num_seqs": 8, "max_num_batched_tokens": 24}
AHEAD = {"async_scheduling": True}
# Calls for one request, and the share of them that fails.
OF_A_REQUEST = {"match": 0.1, "propose": 1, "append": 0.005, "text": 0.005, "decode": 0.01}
# What calls raise; a panic of the tokenizers library is a BaseException.
OUT_OF_MEMORY = (torch.OutOfMemoryError,)
ERRORS = {"decode": (KeyError, SystemExit, BaseException)}
ERRORS |= dict.fromkeys(("evict", "copy"), OUT_OF_MEMORY)
ERRORS |= {what: (KeyError,) for what in OF_A_REQUEST if what not in ERRORS}
STEP_ERRORS = (*OUT_OF_MEMORY, KeyboardInterrupt)
CASES = {
    "plain": Case(),
    "drafts": Case(drafts=3, settings={"decode_graphs": True}),
    "drafts, sampled in Triton": Case(15, 3, settings=SMALL | {"impl": "triton", "num_pages": 26}),
    "a step ahead": Case(settings=AHEAD | {"num_pages": 26, "retention": "dense"}),
    "host memory, drafts": Case(80, 3, "copy", of_host(300)),
    "host memory, a step ahead": Case(80, 0, "copy", of_host(60, **AHEAD)),
    **{f"{where} fail": Case(30, 3, where, SMALL) for where in ("tensors", "sample", "evict")},
    "written, and fail": Case(30, 0, "written", SMALL),
    **{f"{where} fail ahead": Case(15, 0, where, SMALL | AHEAD) for where in ("tensors", "written", "wait")},
    **{f"{where} of a request fail": Case(80, 3, where, SMALL) for where in OF_A_REQUEST},
    "no token": Case(80, 0, "logits"),
    "no token, drafts": Case(80, 3, "logits", {"decode_graphs": True}),
    "no token, a step ahead": Case(80, 0, "logits", AHEAD),
    "no token, host memory": Case(160, 0, "logits", of_host(300)),
    "wrong rows": Case(160, 0, "rows"),
    "wrong rows, a step ahead": Case(300, 0, "rows", AHEAD),
}  # fmt: skip


def is_doomed(request):
    """True if the drafter fails for a request, or an output of it."""
    return int(request.request_id) % 7 == 3


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
        "match": (engine.kv, "match"),
        "propose": (engine.drafter, "propose"),
        "append": (scheduler, "_append"),
        "text": (TextStream, "append"),
        "decode": (ByteTokenizer, "decode"),
    }[what]
    work, share = getattr(owner, name), OF_A_REQUEST.get(what, 0.27)
    kinds = ERRORS.get(what, STEP_ERRORS)

    def flaky(*args, **more):
        is_due = rng.random() < share
        if what == "propose":  # each call for one of these, alone or beside others
            is_due = any(is_doomed(request) for request in args[0])
        if not (engine._is_stepping and is_due):
            return work(*args, **more)
        failed.append(args)
        if what in OF_A_REQUEST:
            raise kinds[len(failed) % len(kinds)](what)
        if what == "copy":
            this, direction, *lists = args
            work(this, direction, *(pages[: len(pages) // 2] for pages in lists))
        if after:
            work(*args, **more)
        raise kinds[len(failed) % len(kinds)](what)

    flaky.score_prompts = engine._sampler.score_prompts
    monkeypatch.setattr(owner, name, flaky)
    return failed


def spoil(engine, rng):
    """Let passes write wrong rows of some sequences, and give NaN for the tokens after these."""
    model, run, steps = engine.model, engine._forward, []
    engine._forward, forward = lambda step: (steps.append(step), run(step)), model.forward

    def careless(*args, pool, **more):
        logits, step = forward(*args, pool=pool, **more), steps[-1]
        for row, i in enumerate(step.ready):
            fills_blocks = step.plan.seq_lens[i] % BLOCK < step.num_new_tokens[i]
            if rng.random() < (0.3 if fills_blocks else 0.01):
                rows = slice(*step.plan.cu_seqlens_q[i : i + 2])
                for pages, slots in zip(pool.pages, step.plan.slot_mapping, strict=True):
                    pages.reshape(-1, 2)[slots[rows][slots[rows] >= 0], 0] += 1
                logits[row] = math.nan
        return logits

    model.forward = careless
    # Else a request takes the rows of another that computes the same tokens in the same step.
    engine.kv._chains.adopt = False


def later(engine, ends):
    """Let each copy of the host tier end when ``ends()`` says so, or when it is waited for.

    Returns:
        A list to which each wait appends.
    """
    copier, start, waits = engine.host_tier.copier, engine.host_tier.copier.start, []

    def held(job):
        start(job)
        waited = []

        def wait():
            waited.append(job)
            waits.append(job)

        query = lambda: bool(waited) or ends()  # noqa: E731
        copier._running[-1].event = SimpleNamespace(query=query, synchronize=wait)

    copier.start = held
    return waits


def expect_scores(model, tokens, first, scores, num_top):
    """Log-probabilities of tokens [first, ...), before penalties, temperature and filters."""
    for i, got in enumerate(scores or (), first):
        want = plain_logits(model, tokens[:i]).log_softmax(-1)
        assert got.logprob == pytest.approx(float(want[tokens[i]]), abs=1e-5, nan_ok=True)
        if not want.isnan().any():
            values, ids = want.topk(num_top)
            assert [token for token, _ in got.top] == ids.tolist()
            assert [x for _, x in got.top] == pytest.approx(values.tolist(), abs=1e-5)


def expect(output, expected, model, params, early=("abort", "error")):
    """Compare an output with `answer`; of one that ended for a reason in ``early``, what it has."""
    tokens, n = output.prompt_token_ids, len(output.token_ids)
    if output.finish_reason in early:
        assert output.token_ids == expected[0][:n] and expected[1].startswith(output.text or "")
    else:
        assert (output.token_ids, output.text, output.finish_reason) == expected
    assert (output.logprobs is None) == (params.logprobs is None)
    assert output.logprobs is None or len(output.logprobs) == n
    expect_scores(model, tokens + output.token_ids, len(tokens), output.logprobs, params.logprobs)
    scores = output.prompt_logprobs or (None,)
    assert len(scores) in (1, len(tokens)) or output.finish_reason in ("abort", "error")
    expect_scores(model, tokens, 1, scores[1:], params.prompt_logprobs)
    assert (output.error is not None) == (output.finish_reason in ("nan", "error"))
    if output.error is not None:
        assert isinstance(output.error, RequestError)
        assert str(output.error).startswith(f"request '{output.request_id}'")
    if output.finish_reason == "nan":
        assert str(output.error).endswith(f"for position {len(tokens) + n}")


@pytest.mark.parametrize("name", CASES)
def test_many_requests_equal_each_alone(name, monkeypatch):
    """Aborted, preempted, stopped by ids, sampled, with penalties and prefixes in common."""
    case, model, rng = CASES[name], ToyModel(), random.Random(5)
    model.config.eos_token_ids = (7, 20, 33)
    for state, row in BAD.items() if case.fails == "logits" else ():
        model.scores[state] = torch.tensor(row)
    settings = {"num_pages": 52, "max_num_seqs": 16, "max_num_batched_tokens": 64} | case.settings
    drafter = NGramDrafter(case.drafts, min_ngram=1) if case.drafts else None
    config = EngineConfig(**settings)
    engine = Engine(model, config, tokenizer=ByteTokenizer(), drafter=drafter)
    longest, ahead, waits = engine.max_model_len, counting(engine), []
    work = list(workload(rng, case.count, VOCAB, longest))
    if engine.host_tier is not None:  # all of them come back
        waits = later(engine, lambda: rng.random() < 0.3)
        half = [(tokens, params) for tokens, params, _ in work[: case.count // 2]]
        work = work[: len(half)] + [([*t, 5, 6], replace(p, max_tokens=3), None) for t, p in half]
    early = ("abort", "error")
    if case.fails == "rows":  # half of them go on where others ended
        spoil(engine, rng)
        early = (*early, "nan")
        for i, (tokens, params, _) in enumerate(work[: case.count // 2]):
            known = [
                *tokens,
                *answer(model, tokens, params, model.config.eos_token_ids, longest)[0],
            ]
            work[case.count // 2 + i] = ([*known, 9][: longest - 2], params, None)
    disturbed = []
    if case.fails not in ("", "logits", "rows"):
        disturbed = disturb(engine, case.fails, rng, monkeypatch)

    def distrust(step):
        engine.pool.poison(engine.kv.pool.free_pages())
        if step % 8 == 0 or case.fails:
            recount(engine)

    in_flight = 9 if engine.host_tier else 24
    outputs, streams, failed = run_all(engine, work, rng, distrust, in_flight)
    monkeypatch.undo()
    for (place, sample), output in outputs.items():
        tokens, params, _ = work[place]
        expected = answer(model, tokens, params, model.config.eos_token_ids, longest, sample)
        expect(output, expected, model, params, early)
        if place % 2 == 0:
            ids, text = streams[place, sample]
            assert output.token_ids[: len(ids)] == ids and output.text.startswith(text)
            assert output.finish_reason == "abort" or (ids, text) == (output.token_ids, output.text)
    outputs = outputs.values()

    # What the case is about has happened.
    totals, stats = engine.totals, engine.kv.stats()
    reasons = Counter(o.finish_reason for o in outputs)
    assert min(reasons[reason] for reason in ("abort", "stop", "length")) >= case.count // 30
    assert any(isinstance(o.stop_reason, str) for o in outputs) or case.fails
    preempted = sum(output.num_preemptions for output in outputs)
    assert len(waits) > 5 or engine.host_tier is None
    if case.fails in ("logits", "rows"):
        assert reasons["nan"] > 8
    elif case.fails in OF_A_REQUEST:
        assert failed == 0 and 0 < reasons["error"] <= len(disturbed)
        for output in outputs:
            if output.error is not None:
                cause = output.error.__cause__
                assert {type(cause), type(cause.__cause__)} & {*ERRORS[case.fails]}
            if case.fails == "propose" and is_doomed(output):
                assert len(output.token_ids) <= 1  # no draft is asked for before the first token
    elif case.fails == "copy":
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
    elif "impl" not in case.settings:
        assert totals.num_preempted > 2
        assert sum(o.num_cached_tokens for o in outputs) > case.count
    if case.drafts and case.fails not in OF_A_REQUEST:
        assert case.count // 4 < totals.num_accepted < totals.num_drafts - case.count // 4
        assert sum(o.num_drafts for o in outputs) == totals.num_drafts
        assert sum(o.num_accepted for o in outputs) == totals.num_accepted
    if settings.get("async_scheduling"):
        assert ahead[True] > 5 and (case.fails or ahead[False] > 10)
    end(engine)
