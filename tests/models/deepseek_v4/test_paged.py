"""The paged model under kvcore's plans against transformers: any cut of the work gives the logits of one uncached forward."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from quire.models.deepseek_v4.config import CSA, HCA, MOE
from quire.models.layers.unpaged_attention import V4UnpagedAttend
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.support.models.tolerance import tolerance
from tests.support.models.v4_engine import SmallEngine

ODD_CHUNKS = [1, 37, 64, 5, 19, 77]


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape and got.isfinite().all()
    return (got - expected).abs().max().item()


@pytest.fixture(scope="module")
def oracle(v4_oracles):
    return v4_oracles["ours"]


@pytest.fixture(scope="module")
def model(oracle):
    return load_model(oracle.path, dtype=torch.float32)


def assert_right(engine, name, got, oracle, start):
    """Logits from token ``start`` on up to what is computed."""
    stop = engine.computed(name)
    assert difference(got, oracle.logits[start:stop]) < tolerance(engine.model)


@pytest.mark.parametrize(
    ("chunks", "caching"),
    [([203], False), (ODD_CHUNKS, False), (ODD_CHUNKS, True), ([160] + [1] * 43, True)],
    ids=["full", "odd", "odd-caching", "steps-caching"],
)
def test_chunks(oracle, model, chunks, caching):
    engine = SmallEngine(model, caching=caching)
    engine.admit("a", oracle.input_ids)
    got = [engine.run("a", engine.computed("a") + chunk) for chunk in chunks]
    assert difference(torch.cat(got), oracle.logits) < tolerance(model)


def test_released_rates(model, v4_oracles):
    """Entries of 4 and 128 tokens, a window of 128: pages of 256 and 64 tokens, as the released models have them."""
    oracle = v4_oracles["long"]
    engine = SmallEngine(load_model(oracle.path, dtype=torch.float32))
    assert [(g.block_size, g.sliding_window) for g in engine.groups[:2]] == [(256, None), (64, 128)]
    engine.admit("a", oracle.input_ids)
    got = [engine.run("a", upto, chunk) for upto, chunk in ((253, 77), (258, 1), (510, 249), (620, 50))]  # fmt: skip
    assert difference(torch.cat(got), oracle.logits) < tolerance(engine.model)
    engine.release("a")
    assert engine.admit("b", oracle.input_ids[:600]) == 512
    assert_right(engine, "b", engine.run("b", 600, 50), oracle, 512)


def test_ragged_batches(oracle, model):
    """Decodes beside chunks of several requests, some shorter than any window, one joining and one leaving midway."""
    engine = SmallEngine(model)
    ids = oracle.input_ids
    engine.admit("a", ids)
    engine.admit("b", ids)
    engine.admit("c", ids[:3])
    steps = [{"a": 50, "c": 1}, {"a": 1, "b": 17, "c": 2}, {"b": 1, "a": 1}, {"a": 99, "b": 33}, {"b": 7, "a": 1}]  # fmt: skip
    for counts in steps:
        before = {name: engine.computed(name) for name in counts}
        for name, got in engine.step(counts).items():
            assert_right(engine, name, got, oracle, before[name])
    engine.release("c")
    engine.admit("d", ids)
    for counts in ({"d": 3, "a": 1, "b": 4}, {"d": 1, "a": 1, "b": 1}, {"d": 90, "a": 5, "b": 1}):
        before = {name: engine.computed(name) for name in counts}
        for name, got in engine.step(counts).items():
            assert_right(engine, name, got, oracle, before[name])


@pytest.mark.parametrize("boundary", [16, 32, 48, 80, 128, 192])
def test_hit_at_every_boundary(oracle, model, boundary):
    """Also boundaries that are no multiple of the ring lengths, and with the rest computed in chunks and in steps."""
    engine = SmallEngine(model, retention="dense")
    ids = oracle.input_ids
    engine.admit("a", ids)
    assert_right(engine, "a", engine.run("a", boundary + 1, 30), oracle, 0)
    engine.release("a")
    assert engine.admit("b", ids) == boundary
    rest = [engine.run("b", min(203, boundary + n)) for n in (1, 7, 40)]
    assert_right(engine, "b", torch.cat(rest), oracle, boundary)


def test_hits_of_every_kind(oracle, model):
    """A resend, a longer sibling, a junction, a next turn after the answer: each resumes where it should, with the right logits."""
    engine = SmallEngine(model)
    ids = oracle.input_ids

    def turn(name, tokens, expected_hit, upto):
        assert engine.admit(name, tokens) == expected_hit
        assert_right(engine, name, engine.run(name, upto), oracle, expected_hit)
        engine.release(name)

    turn("cold", ids[:96], 0, 96)
    turn("resend", ids[:96], 80, 96)
    turn("longer sibling", ids[:170], 96, 170)
    turn("next turn", ids, 160, 203)
    other = torch.cat([ids[:50], ids[:30]])  # leaves the chain at 48, where nothing was kept yet
    assert engine.admit("junction", other) == 0
    engine.run("junction", 80)
    engine.release("junction")
    turn("third", ids[:60], 48, 60)


@pytest.mark.parametrize("stop", [64, 101, 128])
def test_preempted_requests_resume(oracle, model, stop):
    """At an aligned or an unaligned position, while another request goes on and takes over the pages."""
    engine = SmallEngine(model, num_pages=110)
    ids = oracle.input_ids
    engine.admit("a", ids)
    engine.admit("b", ids.flip(0))
    engine.step({"a": 40, "b": 9})
    engine.run("a", stop, 31)
    engine.release("a")
    engine.run("b", 120, 50)
    hit = engine.admit("a", ids)
    assert 0 < hit <= stop and hit % 16 == 0
    before = engine.computed("b")
    got = engine.step({"a": 50, "b": 1})
    assert_right(engine, "a", got["a"], oracle, hit)
    assert engine.computed("b") == before + 1
    got = engine.run("a", 203, 60)
    assert difference(got, oracle.logits[-len(got) :]) < tolerance(model)


@pytest.fixture(scope="module")
def greedy(model, oracle):
    """A prompt of 37 tokens and its greedy continuation of 55, decoded one by one, with logits of one uncached forward over both."""
    engine = SmallEngine(model)
    engine.admit("a", oracle.input_ids[:37])
    logits = engine.run("a", 37)
    for _ in range(55):
        engine.tokens["a"].append(int(logits[-1].argmax()))
        logits = engine.run("a", engine.computed("a") + 1)
    tokens = torch.tensor(engine.tokens["a"])
    logits = model.full_forward(tokens)
    assert torch.equal(logits[36:-1].argmax(-1), tokens[37:])
    return tokens, logits


@pytest.mark.nightly
def test_drafts_accepted_and_rejected(model, greedy):
    """Up to three drafts a step, some right and some wrong: tokens and logits are those of decoding one by one."""
    tokens, logits = greedy
    engine = SmallEngine(model, max_draft_tokens=3)
    engine.admit("a", tokens[:37])
    engine.run("a", 36)
    pairs = cycle([(num_drafts, right) for num_drafts in range(4) for right in range(num_drafts + 1)])  # fmt: skip
    while (start := engine.computed("a")) < 86:
        num_drafts, right = next(pairs)
        drafts = tokens[start + 1 : start + 1 + num_drafts].clone()
        drafts[right:] = (drafts[right:] + 1) % 259
        got = engine.step({"a": 1}, drafts={"a": drafts.tolist()})["a"]
        taken = right + 1
        assert engine.computed("a") == start + taken
        assert engine.tokens["a"] == tokens[: start + taken + 1].tolist()
        assert difference(got[:taken], logits[start : start + taken]) < tolerance(model)
    # What was cached on the way is right too.
    engine.release("a")
    hit = engine.admit("b", tokens)
    assert hit == 80
    assert difference(engine.run("b", len(tokens)), logits[hit:]) < tolerance(model)


def draft_logits(model, tokens, logits):
    """The drafter on a whole sequence without a cache: [num_tokens, vocab_size]."""
    with torch.inference_mode():
        positions, attend = torch.arange(len(tokens)), V4UnpagedAttend(model.config)
        streams = model.streams(tokens, positions, attend)
        after = torch.cat([tokens[1:], logits[-1:].argmax(-1)])
        return model.draft_logits(0, model.draft_streams(0, streams, after, positions, attend))


@pytest.mark.parametrize("depth", [0, 1])
def test_drafter_over_pages(model, greedy, depth):
    """Its rows live in a window group of their own lookahead; its drafts are those of an uncached run, whatever was rejected."""
    tokens, logits = greedy
    expected = draft_logits(model, tokens, logits)
    engine = SmallEngine(model, drafters=True, max_draft_tokens=1)
    assert [group.lookahead for group in engine.groups].count(1) == 1
    engine.admit("a", tokens[:37])
    engine.run("a", 20, 13)
    engine.run("a", 37)
    assert difference(engine.draft_logits["a"], expected[20:37]) < tolerance(model)
    engine.tokens["a"].append(int(tokens[37]))
    accepted = 0
    while (start := engine.computed("a")) < 75:
        draft = int(expected[start - 1].argmax())
        if depth and start % 3 == 0:
            draft = int(tokens[start + 1])  # a drafter with random weights never guesses right
        got = engine.step({"a": 1}, drafts={"a": [draft]})["a"]
        taken = engine.computed("a") - start
        accepted += taken - 1
        assert difference(got[:taken], logits[start : start + taken]) < tolerance(model)
        drafted = engine.draft_logits["a"][:taken]
        assert difference(drafted, expected[start : start + taken]) < tolerance(model)
    assert engine.tokens["a"] == tokens[: len(engine.tokens["a"])].tolist()
    assert accepted >= 5 * depth
    engine.release("a")
    hit = engine.admit("b", tokens)
    got = engine.run("b", len(tokens) - 1)
    assert difference(got, logits[hit:-1]) < tolerance(model)
    assert difference(engine.draft_logits["b"], expected[hit:-1]) < tolerance(model)


def test_chained_drafts(model, greedy):
    """Four drafts from one drafter layer, of two requests at once: those of the layer run on its own streams without a cache."""
    tokens, logits = greedy
    engine = SmallEngine(model, drafters=True)
    for name, length in (("a", 71), ("b", 44)):
        engine.admit(name, tokens[:length])
        engine.run(name, length - 1, 40)
    engine.step({"a": 1, "b": 1})
    got = engine.chain({"a": 0, "b": 0}, 4)
    positions, attend = torch.arange(90), V4UnpagedAttend(model.config)
    for name, length in (("a", 71), ("b", 44)):
        with torch.inference_mode():
            rows = model.streams(tokens[:length], positions[:length], attend)
            ids, drafts = tokens[1 : length + 1], []
            while len(drafts) < 4:
                out = model.draft_streams(0, rows, ids, positions[: len(ids)], attend)[-1:]
                drafts.append(int(model.draft_logits(0, out).argmax()))
                rows = torch.cat([rows, out])
                ids = torch.cat([ids, torch.tensor(drafts[-1:])])
        assert got[name] == drafts and len(set(drafts)) > 1
    engine.tokens["a"].append(int(tokens[71]))  # guesses left nothing behind
    assert difference(engine.step({"a": 1})["a"], logits[71:72]) < tolerance(model)


def test_hits_with_a_drafter_are_those_without(oracle, model):
    """A drafter's rows depend on one token more; no block is dropped for it."""
    ids = oracle.input_ids
    hits = []
    for drafters in (False, True):
        engine = SmallEngine(model, drafters=drafters)
        found = []
        for name, length in (("a", 100), ("b", 100), ("c", 150), ("d", 203), ("e", 97)):
            found.append(engine.admit(name, ids[:length]))
            got = engine.run(name, length)
            assert_right(engine, name, got, oracle, found[-1])
            engine.release(name)
        hits.append(found)
    assert hits[0] == hits[1] and hits[0][1] == 96


def test_a_prefix_that_ends_differently_has_other_drafter_rows(oracle, model):
    """Two prompts share exactly 96 tokens: the drafter's row of token 95 depends on the next, so the second resumes before it."""
    ids = oracle.input_ids
    engine = SmallEngine(model, drafters=True, retention="dense")
    engine.admit("a", ids)
    engine.run("a", 203)
    engine.release("a")
    other = torch.cat([ids[:96], (ids[96:130] + 1) % 256 + 3])
    hit = engine.admit("b", other)
    assert hit == 80
    logits = model.full_forward(other)
    assert difference(engine.run("b", 130), logits[80:]) < tolerance(model)
    assert difference(
        engine.draft_logits["b"], draft_logits(model, other, logits)[80:]
    ) < tolerance(model)


def test_kernels_in_the_interpreter(model):
    """The same calls through the Triton kernels: a prompt that closes windows of both kinds, and a decode step."""
    config = replace(model.config, layer_types=(CSA, HCA), mlp_layer_types=(MOE, MOE), num_mtp_layers=0, index_topk=1)  # fmt: skip
    model, ids = random_model(config), torch.arange(40, 50)
    engine = SmallEngine(model, impl="triton")
    engine.admit("a", ids)
    got = torch.cat([engine.run("a", 9), engine.run("a", 10)])
    assert difference(got, model.full_forward(ids)) < tolerance(model)
