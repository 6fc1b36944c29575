"""Log-probabilities of prompts against a forward pass without a cache and a float64 softmax."""

import pytest
import torch

from quire.models.engine import memory
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.support.models.few import few
from tests.support.models.tolerance import tolerance

TOP = 3
WANTED = {"prompt_logprobs": TOP}


@pytest.fixture(
    scope="module", params=["gemma3-tiny", "gemma4-tiny", "gemma4-e-tiny", "deepseek-v4-tiny"]
)
def model(request):
    return random_model(few(request.param), device=DEVICE)


def check(model, output, top=TOP):
    """Logits differ by `tolerance` at most, so log-probabilities by twice that: log-sum-exp moves
    no more than they do. Rounding of fp32's log-softmax, of numbers below 32, comes on top.
    """
    ids = output.prompt_token_ids
    exact = model.full_forward(torch.tensor(ids, device=DEVICE)).double().log_softmax(dim=-1).cpu()
    allowed = 2 * tolerance(model) + 32 * 4 * 2.0**-24
    first, *scores = output.prompt_logprobs
    assert first is None and len(scores) == len(ids) - 1
    for row, token, got in zip(exact[:-1], ids[1:], scores, strict=True):
        assert abs(got.logprob - row[token]) <= allowed
        assert len({i for i, _ in got.top}) == len(got.top) == top
        values = torch.tensor([value for _, value in got.top], dtype=torch.float64)
        assert (values - row[[i for i, _ in got.top]]).abs().le(allowed).all()
        assert (values - row.topk(top).values).abs().le(allowed).all()
    return output


@pytest.mark.parametrize(("budget", "max_rows"), [(17, 400), (500, 5)])
def test_in_chunks_beside_others_and_where_a_hit_was_possible(model, budget, max_rows, monkeypatch):
    monkeypatch.setattr(memory, "MAX_PROMPT_LOGITS", max_rows * model.config.vocab_size + 3)
    run, counts = Recorder(model, max_num_batched_tokens=budget), []
    sampler = run.engine._sampler
    score = sampler.score_prompts
    sampler.score_prompts = lambda logits, rows: counts.append(len(logits)) or score(logits, rows)
    run.add(prompt(70), request_id="others", max_tokens=30)
    run.add([*prompt(70)[:60], *prompt(9, seed=1)], request_id="a", sampling=WANTED)
    run.add(prompt(40, seed=2), request_id="b", sampling={"prompt_logprobs": 0, "logprobs": 2})
    run.run()
    run.add(prompt(90), request_id="again", sampling=WANTED | {"temperature": 0.7, "n": 1})
    run.add([7], request_id="one token", sampling=WANTED)
    run.add([7, 8], request_id="two tokens", sampling=WANTED)
    run.add(prompt(90), request_id="hit", max_tokens=3)
    outputs = run.run()
    for name in outputs:
        run.check(name)  # the logits that it samples from
    for name, top in (("a", TOP), ("b", 0), ("again", TOP), ("two tokens", TOP)):
        assert check(model, outputs[name], top).num_cached_tokens == 0
    assert outputs["again"].limited_by == "max-tokens"
    assert outputs["one token"].prompt_logprobs == (None,)
    assert outputs["others"].prompt_logprobs is outputs["hit"].prompt_logprobs is None
    assert outputs["hit"].num_cached_tokens > 0 and len(outputs["b"].logprobs) == 8
    # No row is scored twice, and a step has as many as fit.
    assert sum(counts) == 68 + 39 + 89 + 1
    assert max_rows == 400 or max(counts) == max_rows
