"""A failure in one request ends that request alone: logits that give no token, and an exception at any call that is made for it."""

import math
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.config.named import get_config
from quire.models.engine import scheduler
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.outputs import RequestError
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from quire.models.generate import main
from quire.models.llm import LLM
from quire.models.loading.random_weights import random_model
from quire.models.tokenizer import ByteTokenizer, TextStream
from tests.support.models.few import few
from tests.support.models.toy import ToyModel

BAD = 63  # an id whose rows are spoiled
PROMPTS = {"a": [5, 6, 7] * 9, "b": [8, 9] * 20, "bad": [11, BAD, 12] * 7, "c": [13] * 33}
KINDS = {
    "nan": lambda row: row.index_fill(0, torch.tensor([3]), math.nan),
    "inf": lambda row: row.index_fill(0, torch.tensor([3]), math.inf),
    "all -inf": lambda row: torch.full_like(row, -math.inf),
}
PARAMS = {
    "greedy": SamplingParams(12, ignore_eos=True),
    "sampled": SamplingParams(12, ignore_eos=True, temperature=0.8, top_p=0.9, min_p=0.01, seed=1),
    "penalty": SamplingParams(12, ignore_eos=True, repetition_penalty=1.3),
    "logprobs": SamplingParams(12, ignore_eos=True, temperature=1.0, seed=3, logprobs=4),
}


class SpoiledModel(ToyModel):
    """Rows of logits after a sequence with `BAD` in it, from token number ``after`` on, are spoiled."""

    def __init__(self, spoil, after=0):
        super().__init__()
        self.spoil, self.after = spoil, after
        self.scores[:, BAD] = -50.0  # no request generates it

    def forward(self, input_ids, positions, attn, pool, *, logits_rows=None, impl=None):
        logits = super().forward(
            input_ids, positions, attn, pool, logits_rows=logits_rows, impl=impl
        )
        rows = torch.arange(len(input_ids)) if logits_rows is None else logits_rows
        sequence = torch.searchsorted(attn.cu_seqlens_q[1:].long(), rows, right=True)
        for i, (row, seq) in enumerate(zip(rows.tolist(), sequence.tolist(), strict=True)):
            start = int(attn.cu_seqlens_q[seq])
            context = int(attn.seq_lens[seq] - attn.cu_seqlens_q[seq + 1]) + start
            old = np.arange(context)
            table = attn.block_tables[0][seq].numpy()
            known = pool.pages[0][table[old // 16 % len(table)], old % 16, 0].tolist()
            tokens = [*known, *input_ids[start : row + 1].tolist()]
            if self.spoil and BAD in tokens and len(tokens) >= self.after:
                logits[i] = self.spoil(logits[i])
        return logits


def run(engine, prompts, params, **more):
    """Outputs of all requests by id; the allocator is recounted after each step."""
    for name, prompt in prompts.items():
        engine.add_request(prompt, params, request_id=name, **more)
    outputs = {}
    while engine.has_work:
        report = engine.step()
        outputs |= {(o.request_id, o.sample): o for o in report.finished}
        engine.kv.check_invariants()
    assert engine.kv.stats()["pages_in_use"] == 0
    return outputs


def config(**more):
    return EngineConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_pages": 60} | more)


MODES = {
    "plain": (None, {}),
    "drafts": (NGramDrafter(3, min_ngram=1), {}),
    "drafts, standard": (NGramDrafter(3, min_ngram=1), {"rejection_sample_method": "standard"}),
    "a step ahead": (None, {"async_scheduling": True}),
}


@pytest.mark.parametrize(
    ("kind", "way", "mode"),
    [(kind, way, list(MODES)[(i + j) % len(MODES)]) for i, kind in enumerate(KINDS) for j, way in enumerate(PARAMS)],
)  # fmt: skip
def test_logits_that_give_no_token_end_their_request_alone(kind, way, mode):
    spoil, after = KINDS[kind], 26
    drafter, settings = MODES[mode]
    settings = config(**settings)
    spoiled = run(
        Engine(SpoiledModel(spoil, after), settings, drafter=drafter), PROMPTS, PARAMS[way]
    )
    whole = run(Engine(SpoiledModel(None), settings, drafter=drafter), PROMPTS, PARAMS[way])
    bad, good = spoiled.pop(("bad", 0)), whole.pop(("bad", 0))
    assert (bad.finish_reason, len(bad.token_ids)) == ("nan", after - len(PROMPTS["bad"]))
    assert bad.token_ids == good.token_ids[: len(bad.token_ids)]
    assert isinstance(bad.error, RequestError)
    assert str(bad.error).startswith("request 'bad': expected logits whose largest is a number")
    assert str(bad.error).endswith(f"for position {after}")
    if bad.logprobs is not None:
        assert len(bad.logprobs) == len(bad.token_ids)
    for key, output in whole.items():
        assert spoiled[key].token_ids == output.token_ids and spoiled[key].error is None
        assert spoiled[key].logprobs == output.logprobs


def test_samples_of_a_prompt_without_a_token_all_end():
    params = SamplingParams(4, temperature=1.0, n=3)
    engine = Engine(SpoiledModel(KINDS["nan"]), config())
    outputs = run(engine, {"bad": PROMPTS["bad"]}, params)
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
        assert {k: o.token_ids for k, o in outputs.items()} == {k: o.token_ids for k, o in expected.items()}  # fmt: skip
    # The prompt is the same up to the spoiled token, and after it: neither is found.
    assert engine.kv.match(prompts["bad"]).num_tokens == 0
    model.embed_tokens.weight.data[BAD] = 0.5
    again, alone = run(engine, {"bad": prompts["bad"]}, params), Engine(model, settings)
    assert again[("bad", 0)].token_ids == run(alone, {"bad": prompts["bad"]}, params)[("bad", 0)].token_ids  # fmt: skip


def test_a_nan_of_the_trunk_ends_a_request_whose_drafts_the_model_makes():
    llm = LLM(
        poisoned("deepseek-v4-tiny", num_mtp_layers=1), engine=config(num_pages=300), drafter=_mtp
    )
    outputs = llm.generate([[30, BAD] * 9, [30, 31] * 9], SamplingParams(6, ignore_eos=True), progress=False)  # fmt: skip
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
        assert "error: request '0': expected logits whose largest is a number" in capsys.readouterr().err  # fmt: skip


def run_faulty(monkeypatch, name="", at=0):
    """(outputs, streamed texts, engine, calls by name) of four requests in a pool too small for all. The ``at``-th call of ``name`` that is
    made for request "bad" raises."""
    drafter, bad, calls = NGramDrafter(3, min_ngram=1), [], Counter()
    engine = Engine(ToyModel(), config(num_pages=16), tokenizer=ByteTokenizer(), drafter=drafter)

    def is_bad_match(tokens):
        if hasattr(tokens, "keys"):
            return tokens is bad[0].match.prompt
        return np.shares_memory(np.asarray(tokens), bad[0].buffer)

    def wrap(owner, method, is_bad):
        work = getattr(owner, method)

        def faulty(*args, **more):
            if bad and is_bad(*args):
                calls[method] += 1
                if method == name and calls[method] > at:
                    raise KeyError(f"fault in {method}")
            return work(*args, **more)

        patch.setattr(owner, method, faulty)

    with monkeypatch.context() as patch:
        wrap(engine.kv, "match", is_bad_match)
        wrap(drafter, "propose", lambda requests: bad[0] in requests)
        wrap(scheduler, "_append", lambda new, *_: new.request is bad[0])
        wrap(TextStream, "append", lambda text, *_: text is bad[0].text)
        params = SamplingParams(40, ignore_eos=True, stop="~~", temperature=0.5, seed=4)
        for request_id, prompt in PROMPTS.items():
            engine.add_request(prompt, params, request_id=request_id, stream=True)
            if request_id == "bad":
                bad.extend(engine.scheduler.unfinished["bad"])
        outputs, texts = {}, Counter()
        while engine.has_work:
            report = engine.step()
            outputs |= {o.request_id: o for o in report.finished}
            for delta in report.deltas:
                texts[delta.request_id] = (texts[delta.request_id] or "") + delta.text
            engine.kv.check_invariants()
    assert engine.kv.stats()["pages_in_use"] == 0 and not engine.scheduler.siblings
    return outputs, texts, engine, calls


@pytest.mark.parametrize("name", ["_append", "append", "match", "propose"])
def test_an_exception_at_any_call_for_one_request_ends_it_alone(name, monkeypatch):
    whole, whole_texts, engine, calls = run_faulty(monkeypatch)
    assert engine.totals.num_preempted > 0 and whole["bad"].error is None and calls[name] > 0
    for at in sorted({0, calls[name] // 2, calls[name] - 1}):
        outputs, texts, _, _ = run_faulty(monkeypatch, name, at)
        bad = outputs.pop("bad")
        assert bad.finish_reason == "error" and isinstance(bad.error, RequestError)
        assert isinstance(bad.error.__cause__, KeyError)
        assert str(bad.error).startswith("request 'bad', after ")
        assert bad.token_ids == whole["bad"].token_ids[: len(bad.token_ids)]
        for key, output in outputs.items():
            assert output.token_ids == whole[key].token_ids and output.text == whole[key].text
            assert output.error is None and texts[key] == whole_texts[key] == output.text


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
