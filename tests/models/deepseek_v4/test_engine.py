"""DeepSeek-V4 in the engine, with and without its drafter: every logit that a token is sampled from is that of a run without a cache.

Pages that nobody owns and rings of nobody's are NaN throughout.
"""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from quire.models.config.named import get_config
from quire.models.deepseek_v4.config import CSA, HCA, MOE, SLIDING
from quire.models.deepseek_v4.drafters import MTPDrafter
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.speculative import NGramDrafter
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.support.models.drafters import Watched
from tests.support.models.few import few
from tests.support.models.tolerance import tolerance

NAN = 255  # as bytes: NaN in fp32


class V4Recorder(Recorder):
    def _poison(self, pages):
        self.engine.pool.data[pages] = NAN
        used = {request.slot for request in self.engine.scheduler.running}
        idle = [s for s in range(self.engine.kv.max_requests + 1) if s not in used]
        for ring in self.engine.pool.rings:
            ring[idle] = float("nan")


class Knowing(Watched, MTPDrafter):
    """Drafts as MTP does, and the truth now and then."""


@pytest.fixture(scope="module")
def model():
    """A layer of each kind, and a drafter."""
    drafters = get_config("deepseek-v4-tiny").num_mtp_layers
    config = replace(few("deepseek-v4-tiny"), num_mtp_layers=drafters)
    return random_model(config, device=DEVICE)


def check_forced(run, oracle, length, max_tokens, hit):
    """Known tokens one by one after a prompt of ``length``: all logits are transformers'."""
    tokens = oracle.input_ids.tolist()
    request_id = run.add(tokens[:length], max_tokens=max_tokens)
    run.forced[request_id] = tokens
    run.run()
    got = torch.stack(run.logits[request_id])
    expected = oracle.logits[length - 1 : length + max_tokens - 1]
    assert (got - expected).abs().max() < tolerance(run.engine.model)
    assert run.outputs[request_id].num_cached_tokens == hit


def test_released_ratios(v4_oracles):
    """Entries of 4 and 128 tokens, a window of 128: pages of 256 and 64 tokens, as released."""
    oracle = v4_oracles["long"]
    run = V4Recorder(load_model(oracle.path), max_num_batched_tokens=77)
    groups = run.engine.memory.groups
    assert [(g.block_size, g.sliding_window) for g in groups[:2]] == [(256, None), (64, 128)]
    check_forced(run, oracle, 252, 7, 0)  # decodes over the end of a window of each kind
    check_forced(run, oracle, 510, 4, 256)
    check_forced(run, oracle, 600, 10, 512)


@pytest.mark.parametrize("boundary", [16, 48, 80, 192])
def test_hits_at_every_boundary(boundary, v4_oracles):
    """Also at boundaries that are no multiple of the rings' lengths."""
    run = V4Recorder(load_model(v4_oracles["ours"].path), retention="dense")
    check_forced(run, v4_oracles["ours"], boundary + 1, 1, 0)
    check_forced(run, v4_oracles["ours"], 200, 3, boundary)


@pytest.mark.parametrize("kinds", [(SLIDING, SLIDING), (SLIDING, HCA), (SLIDING, CSA)])
def test_models_without_some_kind_of_layer(kinds):
    """No entries, no indexer, or no HCA: such a model has no groups for them."""
    config = replace(few("deepseek-v4-tiny"), layer_types=kinds, mlp_layer_types=(MOE, MOE))
    run = V4Recorder(random_model(config, device=DEVICE), max_num_batched_tokens=41)
    names = {group.name for group in run.engine.memory.groups}
    assert ("compressed" in names) == (set(kinds) != {SLIDING})
    assert ("overlap" in names) == (CSA in kinds)
    for hit in (0, 88 if set(kinds) == {SLIDING} else 80):
        request_id = run.add(prompt(90), 4)
        run.run()
        assert run.check(request_id).num_cached_tokens == hit


def test_kernels_in_the_interpreter():
    """The same calls through the Triton kernels: windows of both kinds close, then a decode step."""
    config = replace(few("deepseek-v4-tiny"), layer_types=(CSA, HCA), mlp_layer_types=(MOE, MOE), index_topk=1)  # fmt: skip
    run = V4Recorder(random_model(config, device=DEVICE), impl="triton")
    request_id = run.add(prompt(9), 2)
    run.run()
    run.check(request_id)


WORK = [
    (20, {}),
    (60, {}),
    (33, {"temperature": 0.9, "seed": 4}),
    (9, {"repetition_penalty": 1.3}),
    (1, {}),
    (16, {"temperature": 0.7, "top_p": 0.9, "seed": 1}),
]
DRAFTERS = {
    "mtp, right now and then": lambda model: Knowing(model, 3),
    "n-gram": lambda model: NGramDrafter(3, min_ngram=1),
}


def work(model, drafter=None):
    run = V4Recorder(model, drafter=drafter)
    ids = [run.add(prompt(n, n), 14, sampling=s) for n, s in WORK]
    run.run()
    assert run.engine.kv.stats()["pages_in_use"] == 0
    assert any(r.num_decodes and r.num_prefills for r in run.reports)  # ragged batches
    return run, {i: run.check(i).token_ids for i in ids}


@pytest.fixture(scope="module")
def plain(model):
    return work(model)[1]


@pytest.mark.parametrize("name", DRAFTERS)
def test_outputs_do_not_depend_on_drafts(model, plain, name):
    """Greedy, sampled and penalized requests beside each other."""
    drafter = DRAFTERS[name](model)
    drafter.outputs = plain
    run, drafted = work(model, drafter)
    assert drafted == plain
    totals = run.engine.totals
    assert totals.num_drafts > 0
    assert name == "n-gram" or 10 < totals.num_accepted < totals.num_drafts


def test_steps_that_fail_leave_no_trace(model, plain):
    """Rings and open windows had been written: a request starts from what is cached."""
    run, rng = V4Recorder(model), random.Random(3)
    sampler, failed = run.engine._sampler, []

    def flaky(*args):
        if rng.random() < 0.3:
            failed.append(args)
            raise torch.OutOfMemoryError
        return sampler(*args)

    run.engine._sampler = flaky
    ids = [run.add(prompt(n, n), 14, sampling=s) for n, s in WORK]
    while run.engine.has_work:
        with suppress(torch.OutOfMemoryError):
            run.run()
    assert len(failed) > 3
    assert {i: run.outputs[i].token_ids for i in ids} == plain


def test_logits_with_a_quantized_cache_err_by_the_quantization(v4_oracles):
    """Prompts in odd chunks, cold and then from a hit, and known tokens one by one.

    The error is so large that rows are quantized, and so small that the model is still the same;
    `tests/kernels` has the layout and the kernels, to the value.
    """
    oracle = v4_oracles["wide"]
    run = V4Recorder(load_model(oracle.path), kv_cache_dtype="fp8", max_num_batched_tokens=37)
    least = 10 * tolerance(run.engine.model)
    tokens = oracle.input_ids.tolist()
    for length, end in ((107, 116), (140, 150)):
        request_id = run.add(tokens[:length], max_tokens=end - length)
        run.forced[request_id] = tokens[:end]
        run.run()
        assert (run.outputs[request_id].num_cached_tokens > 0) == (length == 140)
        error = torch.stack(run.logits[request_id]) - oracle.logits[length - 1 : end - 1]
        assert least < error.pow(2).mean().sqrt() < 0.25 * oracle.logits.std()


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("deepseek-v4-small", torch.float16, "models in bfloat16 and float32"),
        ("deepseek-v4-tiny", torch.float32, r"\(head_dim, rope_dim\) = \(512, 64\)"),
    ],
)
def test_a_quantized_cache_is_refused(name, dtype, words):
    model = random_model(get_config(name), dtype=dtype)
    with pytest.raises(NotImplementedError, match=f"'fp8' is supported with {words}"):
        Engine(model, EngineConfig(kv_cache_dtype="fp8"))
