"""Asynchronous scheduling on a CPU: a step is launched before the tokens of the last are known."""

from dataclasses import replace

import pytest
import torch

from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from tests.models.engine import test_isolation
from tests.models.engine.test_engine_many import alone
from tests.support.models.toy import ToyModel, finish


def test_a_dropped_row_of_nan_is_not_found():
    """The row behind the last token of a request is cached before it is known to be bad."""
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
    engine = Engine(model, test_isolation.config(async_scheduling=True))
    cleared, clear = [], engine.kv.clear
    engine.kv.clear = lambda: (
        cleared.append(engine.kv.match([*tokens, *outputs[0].token_ids, 9]).num_tokens),
        clear(),
    )
    engine.add_request(tokens, params)
    outputs = []
    engine.add_request([9] * 30, SamplingParams(30, ignore_eos=True))
    while engine.has_work:  # `cleared` reads the outputs so far
        outputs += engine.step().finished
    assert [o.finish_reason for o in outputs] == ["stop", "length"]
    assert outputs[0].token_ids[-1] == last and cleared[0] == 16
    assert engine.kv.match([*tokens, *outputs[0].token_ids, 9]).num_tokens == 0


class Careless(ToyModel):
    """A model whose first pass writes wrong rows and gives NaN; logits of the second are wrong."""

    passes = 0

    def forward(self, input_ids, positions, attn, pool, **more):
        logits = super().forward(input_ids, positions, attn, pool, **more)
        self.passes += 1
        if self.passes == 2:
            logits = logits.roll(1, dims=1)
        if self.passes == 1:
            for group, pages in enumerate(pool.pages):
                slots = attn.slot_mappings[group].numpy()
                pages.reshape(-1, 2)[slots[slots >= 0], 0] += 1
            logits = torch.full_like(logits, torch.nan)
        return logits


@pytest.mark.parametrize("n", [1, 3])
def test_who_was_admitted_ahead_and_found_bad_rows_begins_anew(n):
    """No row computed from bad ones is kept, nor the token of that step; others go on."""
    model, tokens, params = Careless(), [5, 9] * 24, SamplingParams(4, ignore_eos=True)
    config = test_isolation.config(
        async_scheduling=True, max_num_seqs=5, max_num_batched_tokens=len(tokens)
    )
    engine = Engine(model, config)
    found, schedule = [], engine.scheduler.schedule

    def note(*, ahead):
        step = schedule(ahead=ahead)
        if ahead:
            found.append([r.num_cached_tokens for r in (step.admitted if step else ())])
        return step

    engine.scheduler.schedule = note
    prompts = [tokens, *([*tokens, 8 + i] for i in range(n)), [7] * 9]
    for i, ids in enumerate(prompts):
        engine.add_request(ids, params, request_id=str(i))
    outputs = {o.request_id: o for o in finish(engine)}
    assert sorted(found[0]) == [0] + [48] * n and len(found[1]) > 0
    assert outputs["0"].finish_reason == "nan"
    for i, ids in enumerate(prompts[1:], 1):
        assert outputs[str(i)].token_ids == alone(ToyModel(), ids, params)
        assert outputs[str(i)].num_preemptions == 0
    assert outputs["1"].num_cached_tokens == 0
    assert engine.kv.stats()["pages_in_use"] == 0


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
