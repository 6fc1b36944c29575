"""Steps with drafts of DeepSeek-V4's own drafter: its chain in captured graphs, and one wait for the device in a step."""

from dataclasses import replace

import pytest
import torch

from quire.kernels import sample_tokens
from quire.kvcore.device import HostCopy
from quire.models.deepseek_v4 import mtp
from quire.models.deepseek_v4.mtp import MTPDrafter, greedy
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import prompt
from tests.models.engine.test_graphs import SAMPLING, Step
from tests.support.models.captured import (
    KERNELS,
    ON_HOST,
    Captures,
    NotCapturable,
    captured_engine,
)
from tests.support.models.few import few

CONFIG = EngineConfig(num_pages=500, max_num_seqs=4, max_num_batched_tokens=64, decode_graphs=True)


@pytest.fixture(scope="module")
def model():
    return random_model(replace(few("deepseek-v4-tiny"), num_mtp_layers=2), seed=6)


class Both(MTPDrafter):
    """Drafts through graphs, and compares with those of eager passes; now and then it knows the outputs."""

    replayed = eager = 0

    def propose(self, requests):
        graphs, shapes = self._graphs, []
        if graphs is not None:
            lengths = [request.num_tokens - 1 for request in requests]
            shapes = [graphs.shape_of(len(requests), max(lengths))]
        drafts = self._chain(requests, greedy).clone()
        assert torch.equal(drafts, self._chain(requests, lambda logits: greedy(logits)))
        if any(shapes):
            self.replayed += 1
        else:
            self.eager += 1
        for i, request in enumerate(requests):
            known = self.outputs.get(request.request_id, ())[request.num_output :]
            known = torch.tensor(known[: min(drafts.shape[1], (self.replayed + i) % 4)])
            drafts[i, : len(known)] = known
        return drafts


def run(engine, lengths, max_tokens=9):
    for n in lengths:
        params = SamplingParams(max_tokens, ignore_eos=True, **({} if n % 2 else SAMPLING))
        engine.add_request(prompt(n, seed=n), params, request_id=str(n))
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.token_ids for o in engine.step().finished}
    assert engine.kv.stats()["pages_in_use"] == 0
    return done


@pytest.mark.nightly
def test_chains_through_graphs_are_those_of_eager_passes(model):
    """Padded batches, accepted and rejected drafts, several layers; a chain that has no room runs eagerly."""
    lengths = (31, 5, 22, 50)
    expected = run(Engine(model, replace(CONFIG, decode_graphs=False)), lengths)
    drafter, captures = Both(model, 3), Captures()
    drafter.outputs = expected
    config = replace(CONFIG, max_model_len=50 + 9)
    engine = captured_engine(model, config, captures, drafter=drafter)
    assert len(captures.graphs) == 3 * 3, "one row, drafts, and chains of 1, 2 and 4 sequences"
    assert run(engine, lengths) == expected
    assert drafter.replayed > 3 and drafter.eager > 0
    assert 0 < engine.totals.num_accepted < engine.totals.num_drafts


def test_chains_that_cannot_be_captured_run_without(model):
    class Fails(MTPDrafter):
        def capture(self, sizes, max_seq_len, capture):
            def failing(work):
                raise NotCapturable("injected")

            super().capture(sizes, max_seq_len, failing)

    with pytest.warns(RuntimeWarning, match=r"draft graphs: 4 x 2, 2 x 2, 1 x 2 .* injected"):
        engine = Engine(model, CONFIG, drafter=Fails(model, 2))
    assert engine.drafter._graphs.shape_of(1, 5) is None
    assert len(run(engine, (9, 5))) == 2 and engine.totals.num_drafts > 0


@pytest.mark.parametrize(
    ("method", "sampling"),
    [("standard", SAMPLING | {"logprobs": 3})],
)
def test_a_step_with_drafts_waits_once(model, method, sampling, monkeypatch):
    """Tokens and drafts come to the host in one copy; which drafts stay follows from these."""
    step, capture, copies = Step(), Captures(), []
    config = replace(CONFIG, max_num_seqs=2, rejection_sample_method=method)
    engine = captured_engine(
        model, config, lambda work: step.unseen(capture(work)), drafter=MTPDrafter(model, 2)
    )
    for n in range(2):
        engine.add_request(prompt(11 + n, seed=n), SamplingParams(40, ignore_eos=True, **sampling))
    engine.step(), engine.step()
    for module, names in KERNELS.items():  # each is one operation
        for name in names:
            monkeypatch.setattr(module, name, step.unseen(getattr(module, name)))
    wait = HostCopy.wait
    monkeypatch.setattr(HostCopy, "wait", lambda copy: copies.append(copy) or wait(copy))

    def seen(name, original):
        def call(*args, **kwargs):
            step.see(name)
            return original(*args, **kwargs)

        return call

    for owner, names in ((torch.Tensor, ON_HOST), (torch, ("tensor", "as_tensor"))):
        for method in names:
            monkeypatch.setattr(owner, method, seen(method, getattr(owner, method)))
    for _ in range(6):
        step.found.clear(), copies.clear()
        with step:
            told = engine.step()
        assert told.num_generated >= 2 and told.num_drafts == 4
        assert step.found == ["tolist"] and len(copies) == 1


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # the interpreter's numbers
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_drafts_that_are_no_numbers_are_replaced_from_the_target(model, impl, monkeypatch):
    """None of them stays, and every request ends as ever."""
    monkeypatch.setattr(
        mtp,
        "sample_tokens",
        lambda *args, **given: sample_tokens(*args, **given | {"impl": impl}),
    )
    draft_logits = type(model).draft_logits
    monkeypatch.setattr(
        type(model), "draft_logits", lambda *args: draft_logits(*args).fill_(torch.nan)
    )
    config = replace(CONFIG, decode_graphs=False, rejection_sample_method="standard")
    engine = Engine(model, config, drafter=MTPDrafter(model, 2))
    params = SamplingParams(6, temperature=1.5, ignore_eos=True)
    for n in (11, 12):
        engine.add_request(prompt(n, seed=n), replace(params, seed=n))
    outputs = []
    while engine.has_work:
        outputs += engine.step().finished
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [("length", 6)] * 2
    assert engine.totals.num_drafts > 0 and engine.totals.num_accepted == 0
