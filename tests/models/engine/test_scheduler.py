"""Decisions of the scheduler, seen with a model of integers (`tests.support.models.toy`)."""

from dataclasses import replace

import torch

from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from tests.models.engine.test_engine_many import alone
from tests.support.models.toy import ToyModel


def engine(model=None, **settings):
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_pages": 100} | settings
    return Engine(model or ToyModel(), EngineConfig(**settings))


def finish(engine):
    """Outputs by id of all that is left, and the tokens of each sequence in each step."""
    outputs, q_lens = {}, []
    while engine.has_work:
        report = engine.step()
        outputs |= {o.request_id: o for o in report.finished}
        q_lens.append(report.q_lens.tolist())
    return outputs, q_lens


def test_a_chunk_that_does_not_fit_is_halved_until_it_does():
    """A long chunk keeps more boundaries than a short one; what is left of the prompt is tried as a whole again."""
    small = engine(max_num_seqs=1, num_pages=10, retention="dense", max_num_batched_tokens=512)
    assert small.max_model_len == 80
    small.add_request([5] * 78, SamplingParams(2, ignore_eos=True))
    assert finish(small)[1] == [[39], [19], [20], [1]]


def test_a_preempted_request_keeps_its_salt_and_what_is_told_of_its_first_admission():
    tokens = list(range(3, 43))
    run = engine()
    salted = run.add_request(tokens, SamplingParams(30, ignore_eos=True), salt=b"tenant")
    for _ in range(20):
        run.step()
    run.scheduler._requeue(run.scheduler.running[-1:])
    outputs, q_lens = finish(run)
    # Of 60 tokens, those up to a boundary are found again, but the output tells of the first time.
    assert q_lens[0] == [12] and outputs[salted].num_cached_tokens == 0
    stats = run.kv.stats()
    assert (stats["requests"], stats["hits"], stats["prompt_tokens"]) == (1, 0, 40)
    assert (stats["resumed_requests"], stats["resumed_hit_tokens"]) == (1, 48)
    known = (tokens + list(outputs[salted].token_ids))[:-1]
    other = run.add_request(known)
    same = run.add_request(known, salt=b"tenant")
    hits = {i: o.num_cached_tokens for i, o in finish(run)[0].items()}
    assert hits[other] == 0 and hits[same] >= 48


def test_a_request_that_never_fits_is_dropped_with_its_samples_and_the_others_go_on():
    """Another user of the allocator holds pages, so that the longest request does not fit."""
    run = engine(num_pages=10, max_num_seqs=3)
    foreign = [9] * 40
    slot = run.kv.admit("foreign", run.kv.match(foreign))
    run.kv.commit(run.kv.plan([slot], [40]), foreign)
    sampled = SamplingParams(3, ignore_eos=True, temperature=1.0, n=2)
    run.add_request([5] * 70, sampled, request_id="long")
    run.add_request([6] * 5, SamplingParams(2, ignore_eos=True), request_id="short")
    ended = []
    while "long" in run.unfinished:
        ended += run.step().finished
    assert [(o.request_id, o.sample, o.finish_reason) for o in ended] == [
        ("long", 0, "error"),
        ("long", 1, "error"),
    ]
    assert "request 'long', sample 0, after 70 tokens: RuntimeError: does not fit even" in str(
        ended[0].error
    )
    assert list(finish(run)[0]) == ["short"]
    run.kv.release("foreign")
    run.add_request([5] * 70, sampled, request_id="long")
    assert list(finish(run)[0]) == ["long"]


def test_samples_share_the_prompt_and_come_before_requests_that_came_later():
    run, ended = engine(max_num_seqs=1), []
    run.add_request([5] * 53, SamplingParams(2, temperature=1.0, n=3, ignore_eos=True))
    run.add_request([6] * 20, SamplingParams(2, ignore_eos=True))
    while run.has_work:
        ended += [(o.request_id, o.sample, o.num_cached_tokens) for o in run.step().finished]
    assert ended == [("0", 0, 0), ("0", 1, 48), ("0", 2, 48), ("1", 0, 0)]
    # Of a sample, nothing but the rest behind the last boundary is computed again.
    assert run.totals.num_tokens == (53 + 1) + 2 * (5 + 1) + (20 + 1)
    run.abort(run.add_request([5] * 20, SamplingParams(2, n=3)))  # before its prompt ran
    assert not run.has_work and not run.scheduler.siblings and not run.scheduler.waiting


def test_samples_that_wait_for_a_first_one_end_with_it():
    model = ToyModel()
    forward = model.forward
    model.forward = lambda *args, **more: forward(*args, **more) * torch.nan
    run = engine(model)
    run.add_request([5] * 20, SamplingParams(2, n=3))
    finished = run.step().finished
    assert [(o.sample, o.finish_reason) for o in finished] == [(0, "nan"), (1, "nan"), (2, "nan")]
    assert not run.has_work and run.totals.num_tokens == 20


def test_a_dropped_row_of_nan_is_not_found():
    """The row behind the last token of a request is cached before it is known to be bad. A request
    that was admitted with it waits again, and computes the row itself."""
    tokens = [5 + n % 7 for n in range(14)]
    params = SamplingParams(20)
    model = ToyModel()
    [_, last, *_] = alone(model, tokens, replace(params, max_tokens=3))
    model.config.eos_token_ids = (last,)  # its row, the 16th, ends a block
    forward = model.forward

    def spoiled(input_ids, positions, *args, **more):
        logits = forward(input_ids, positions, *args, **more)
        return logits.index_fill(
            0, (positions[more["logits_rows"]] == 15).nonzero()[:, 0], torch.nan
        )

    model.forward = spoiled
    engine = Engine(
        model,
        EngineConfig(
            max_num_seqs=4, max_num_batched_tokens=24, num_pages=60, async_scheduling=True
        ),
    )
    cleared, clear = [], engine.kv.clear
    engine.kv.clear = lambda: (
        cleared.append(engine.kv.match([*tokens, *outputs[0].token_ids, 9]).num_tokens),
        clear(),
    )
    engine.add_request(tokens, params)
    outputs = []
    engine.add_request([9] * 30, SamplingParams(30, ignore_eos=True))
    late, take_back, waiting = None, engine.scheduler.take_back_admitted, []
    engine.scheduler.take_back_admitted = lambda step: (
        take_back(step),
        waiting.extend(r.request_id for r in step.taken_back),
    )
    while engine.has_work:  # `cleared` reads the outputs so far
        outputs += engine.step().finished
        if outputs and late is None:
            prompt = [*tokens, *outputs[0].token_ids, 9]
            late = engine.add_request(prompt, SamplingParams(3, ignore_eos=True))
    assert [o.finish_reason for o in outputs] == ["stop", "length", "length"]
    assert outputs[0].token_ids[-1] == last and cleared[0] == 16
    again = outputs[1]
    assert waiting[0] == again.request_id == late
    assert again.num_cached_tokens == again.num_preemptions == 0


def test_where_it_is_on():
    """By default on a GPU, and never with a drafter: drafts follow tokens that the host knows."""
    small = {"num_pages": 50, "max_num_seqs": 2}
    for wanted, drafter, on in (
        (None, None, False),
        (True, None, True),
        (False, None, False),
        (True, NGramDrafter(2), False),
    ):
        engine = Engine(ToyModel(), EngineConfig(async_scheduling=wanted, **small), drafter=drafter)
        assert engine.runner.is_async == on
        runs = []
        engine.model.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        request_id = engine.add_request([5] * 9, SamplingParams(4, ignore_eos=True))
        reports = [engine.step() for _ in range(4 + on)]
        assert [r.num_generated for r in reports] == [0] * on + [1] * 4
        assert [r.num_tokens for r in reports] == [0] * on + [9, 1, 1, 1]
        assert engine.totals.num_steps == 4 and not engine.has_work
        assert len(runs) == 4, "its length is known before its last token is"
        assert [o.request_id for o in reports[-1].finished] == [request_id]
