"""A failure in one request ends that request alone; `test_engine_many` has more of them."""

import math
import threading
from dataclasses import replace

import pytest

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.named import get_config
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.generate import main
from quire.models.llm import LLM
from quire.models.loading.random_weights import random_model
from tests.support.models.few import few
from tests.support.models.toy import ToyModel, plain_logits

BAD = 63  # an id whose rows are spoiled
PROMPTS = {"a": [5, 6, 7] * 9, "b": [8, 9] * 20, "bad": [11, BAD, 12] * 7, "c": [13] * 33}


def run(engine, prompts, params):
    """Outputs by id and sample; the allocator is recounted after each step."""
    for name, prompt in prompts.items():
        engine.add_request(prompt, params, request_id=name)
    outputs = {}
    while engine.has_work:
        report = engine.step()
        outputs |= {(o.request_id, o.sample): o for o in report.finished}
        engine.kv.check_invariants()
    assert engine.kv.stats()["pages_in_use"] == 0
    return outputs


def config(**more):
    return EngineConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_pages": 60} | more)


def test_samples_of_a_prompt_without_a_token_all_end():
    model, params = ToyModel(), SamplingParams(4, temperature=1.0, n=3)
    plain_logits(model, PROMPTS["bad"]).fill_(math.nan)
    outputs = run(Engine(model, config()), {"bad": PROMPTS["bad"]}, params)
    assert {o.sample: o.finish_reason for o in outputs.values()} == dict.fromkeys(range(3), "nan")


def poisoned(name, **changes):
    """A model with an embedding of NaN for token `BAD`; its logits are numbers."""
    base = replace(few(name), **changes)
    if hasattr(base, "tie_word_embeddings"):
        base = replace(base, tie_word_embeddings=False)
    model = random_model(base)
    model.embed_tokens.weight.data[BAD] = math.nan
    return model


@pytest.mark.parametrize("name", ["gemma4-e-tiny", "deepseek-v4-tiny"])
def test_nan_of_a_model_reaches_no_other_request_and_no_cached_page(name):
    prompts = {
        key: [t + 20 if t != BAD else BAD for t in tokens] * 3 for key, tokens in PROMPTS.items()
    }
    params = SamplingParams(6, ignore_eos=True)
    settings = config(num_pages=300, max_num_batched_tokens=48)
    model = poisoned(name)
    whole = Engine(model, settings)
    expected = run(whole, {k: v for k, v in prompts.items() if k != "bad"}, params)
    engine = Engine(model, settings)
    for _ in range(2):  # the second time with what the first one left in pages, rings and cache
        outputs = run(engine, prompts, params)
        assert outputs.pop(("bad", 0)).finish_reason == "nan"
        assert {k: o.token_ids for k, o in outputs.items()} == {
            k: o.token_ids for k, o in expected.items()
        }
    # The prompt is the same up to the spoiled token, and after it: neither is found.
    assert engine.kv.match(prompts["bad"]).num_tokens == 0
    model.embed_tokens.weight.data[BAD] = 0.5
    again, alone = run(engine, {"bad": prompts["bad"]}, params), Engine(model, settings)
    assert (
        again[("bad", 0)].token_ids
        == run(alone, {"bad": prompts["bad"]}, params)[("bad", 0)].token_ids
    )


def test_a_nan_of_the_trunk_ends_a_request_whose_drafts_the_model_makes():
    llm = LLM(
        poisoned("deepseek-v4-tiny", num_mtp_layers=1), engine=config(num_pages=300), drafter=_mtp
    )
    outputs = llm.generate(
        [[30, BAD] * 9, [30, 31] * 9], SamplingParams(6, ignore_eos=True), progress=False
    )
    assert [o.finish_reason for o in outputs] == ["nan", "length"]


def _mtp(model):
    from quire.models.deepseek_v4.drafters import MTPDrafter

    return MTPDrafter(model, 2)


def test_generate_exits_with_an_error_for_logits_of_nan(tmp_path, capsys):
    model = random_model(get_config("gemma3-tiny"))
    model.norm.weight.data.fill_(3e38)  # finite weights, as a checkpoint may have them
    save_checkpoint(model, tmp_path)
    for arguments in (["--prompt", "a"], ["--prompt", "a", "--prompt", "b"]):
        assert main(["--model", str(tmp_path), *arguments, "--max-tokens", "3"]) == 2
        assert (
            "error: request '0': expected logits whose largest is a number"
            in capsys.readouterr().err
        )


@pytest.mark.parametrize("kind", [KeyError, SystemExit, BaseException])
def test_text_that_cannot_be_decoded_at_the_end_leaves_the_other_outputs(kind, monkeypatch):
    """A panic of the tokenizers library is a BaseException."""
    llm = LLM("gemma3-tiny", engine=config(num_pages=200))
    decode, bad = llm.tokenizer.decode, []

    def fails_once(ids):
        if not bad:
            bad.append(ids)
            raise kind(7)
        return decode(ids)

    monkeypatch.setattr(llm.tokenizer, "decode", fails_once)
    first, second = llm.generate(["a", "b"], SamplingParams(4, ignore_eos=True), progress=False)
    cause = first.error.__cause__
    assert first.finish_reason == "error" and kind in (type(cause), type(cause.__cause__))
    assert len(first.token_ids) == 4 and first.text is None
    assert second.error is None and second.text == decode(second.token_ids)


@pytest.mark.parametrize("name", ["add_request", "abort", "step"])
@pytest.mark.parametrize("thread", [False, True])
def test_calls_while_a_step_runs_are_refused(name, thread):
    """From within it, and from a second thread."""
    model = ToyModel()
    engine, forward, refused = Engine(model, config()), model.forward, []
    first = engine.add_request(PROMPTS["a"], SamplingParams(3, ignore_eos=True))
    argument = {"add_request": [PROMPTS["b"]], "abort": [first], "step": []}[name]

    def call():
        message = f"^{name}: expected to be called between steps, got"
        with pytest.raises(RuntimeError, match=message):
            getattr(engine, name)(*argument)
        refused.append(name)

    def calling(*args, **more):
        if thread:
            second = threading.Thread(target=call)
            second.start()
            second.join()
        else:
            call()
        return forward(*args, **more)

    model.forward = calling
    outputs = run(engine, {}, None)
    assert list(outputs) == [(first, 0)] and len(outputs[(first, 0)].token_ids) == 3
    assert refused == [name] * engine.totals.num_steps
