"""Every family against transformers, on random checkpoints that transformers made: logits, and the
tokens that follow a prompt however its steps are cut. Qwen3 is no family of quire: it is the code
of docs/extend.md, run here as a module of its own."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models import (
    LLM,
    EngineConfig,
    NGramDrafter,
    SamplingParams,
    from_hf,
    load_model,
    random_model,
)
from quire.models.config.hf import to_hf
from quire.models.config.model import RopeConfig
from quire.models.config.named import get_config
from quire.models.families.registry import Family, families, register_family
from quire.models.layers import rotary
from tests.models.conftest import NEW_TOKENS, NUM_TOKENS, QWEN3

PAGE = Path(__file__).parents[3] / "docs" / "extend.md"
OTHERS = [[3 + (7 * i + n) % 250 for i in range(n)] for n in (40, 50, 30)]
DIFFERENCE = 1e-4
ROPES = {
    "default": RopeConfig("default", 1e4),
    "linear": RopeConfig("linear", 1e6, factor=8.0),
    "proportional": RopeConfig("proportional", 1e6, partial_rotary_factor=0.25),
    "llama3": RopeConfig("llama3", 5e5, 8.0, 1.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
    "llama3 of other bands": RopeConfig(
        "llama3", 1e4, 3.0, 1.0, 100, low_freq_factor=2.0, high_freq_factor=5.0
    ),
    "yarn": RopeConfig("yarn", 1.5e5, 32.0, 1.0, 4096),
    "yarn, not truncated": RopeConfig("yarn", 1.5e5, 32.0, 1.0, 4096, truncate=False),
    "yarn, one mscale": RopeConfig("yarn", 1.5e5, 8.0, 1.0, 64, mscale=1.0, mscale_all_dim=1.0),
    "yarn, mscale": RopeConfig("yarn", 1.5e5, 8.0, 1.0, 64, mscale=0.707, mscale_all_dim=1.0),
    "yarn without low frequencies": RopeConfig("yarn", 1e4, 4.0, 1.0, 10**9, attention_factor=1.5),
    "yarn without high frequencies": RopeConfig(
        "yarn", 1e4, 4.0, 1.0, 20, beta_slow=4.0, beta_fast=8.0
    ),
}


@pytest.fixture(scope="module", autouse=True)
def qwen3():
    """The family of the page: its first block."""
    [code] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[:1]
    module = ModuleType("qwen3")
    sys.modules[module.__name__] = module
    exec(compile(code, str(PAGE), "exec"), vars(module))
    return code


@pytest.fixture(scope="module")
def model(parity):
    return load_model(parity.directory, dtype=torch.float32)


def said(model, prompts, drafter=None, **settings):
    """The output of the last prompt, beside which the others run; the engine; most pages in use."""
    settings = {"num_pages": 600, "max_num_seqs": 4, "max_num_batched_tokens": 512} | settings
    engine = LLM(model, engine=EngineConfig(**settings), drafter=drafter).engine
    params, outputs, peak = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True), {}, 0
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    while (report := engine.step()) is not None:
        outputs |= {output.request_id: output for output in report.finished}
        peak = max(peak, engine.kv.stats()["pages_in_use"])
    return outputs[ids[-1]], engine, peak


def test_logits(model, parity):
    got = model.full_forward(torch.tensor([*parity.prompt, *parity.new_tokens]))
    assert parity.logits.std() > 0.5  # a dead model would agree with anything
    assert (got - parity.logits).abs().max() <= DIFFERENCE


# Settings of an engine, and what is asked besides the prompt.
WAYS = {
    "whole": {},
    "in chunks beside others": {"others": OTHERS, "max_num_batched_tokens": 48},
    "single steps": {"max_num_seqs": 1, "max_num_batched_tokens": 1},
    "drafted": {"drafter": NGramDrafter(3, min_ngram=1)},
    "hit": {"before": 100},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens(model, parity, way):
    """``before``: so many tokens of the prompt were asked before it."""
    settings = dict(WAYS[way])
    others, before = settings.pop("others", []), settings.pop("before", 0)
    if before:
        others, settings["max_num_seqs"] = [parity.prompt[:before]], 1
    output, engine, _ = said(model, [*others, parity.prompt], **settings)
    assert output.token_ids == parity.new_tokens
    assert (output.num_cached_tokens > 0) == (way == "hit")
    assert (engine.totals.num_drafts > 0) == (way == "drafted")
    assert way != "single steps" or engine.totals.num_steps >= NUM_TOKENS


def test_tokens_after_a_preemption(model, parity):
    """With fewer pages than all requests fill at the end, and enough to start them all."""
    prompts = [*OTHERS, parity.prompt]
    _, _, peak = said(model, prompts)
    for share in (7 / 8, 3 / 4, 15 / 16, 5 / 8):
        output, _, _ = said(model, prompts, num_pages=1 + int(peak * share))
        assert output.token_ids == parity.new_tokens
        if output.num_preemptions > 0:
            return
    pytest.fail("no preemption")


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_of_rope(name):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    base = get_config("llama-tiny")
    config = replace(base, full=replace(base.full, rope=ROPES[name], head_dim=64))
    theirs = LlamaRotaryEmbedding(transformers.AutoConfig.for_model(**to_hf(config)))
    rope = config.full.rope
    # Each of the two errs by 3 units in a frequency (a power, a reciprocal), and so by 6 in the turns of which llama3 takes high - low. With
    # the ramp's other operations, 16 units of the share that keeps its value, which counts ``factor`` times where all else is divided by it.
    rtol = 2 * (4 + 16 * (rope.factor or 1)) * UNIT
    got = rotary.inverse_frequencies(rope, 64)
    torch.testing.assert_close(got, theirs.inv_freq, rtol=rtol, atol=0)
    assert rope.amplitude == theirs.attention_scaling


TWO_RANKS = """
import sys, qwen3
from quire.models import LLM, EngineConfig, SamplingParams
engine = EngineConfig(num_pages=100, tensor_parallel_size=2)
llm = LLM("tiny", engine=engine, device="cpu", dtype="float32")
params = SamplingParams(max_tokens=12, ignore_eos=True)
print(*llm.generate([[1, 2, 3, 4]], params, progress=False)[0].token_ids)
"""


def test_ranks_that_are_started_know_the_family(qwen3, tmp_path):
    (tmp_path / "qwen3.py").write_text(qwen3)
    model = random_model(from_hf(QWEN3))
    save_checkpoint(model, tmp_path / "tiny")
    ids = [1, 2, 3, 4]
    for _ in range(12):
        ids.append(model.full_forward(torch.tensor(ids))[-1].argmax().item())
    done = subprocess.run(
        [sys.executable, "-c", TWO_RANKS], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(i) for i in ids[4:]], done.stderr


def test_a_family_is_registered_once_and_may_write_no_files():
    [family] = [family for family in families() if family.name == "qwen3"]
    register_family(family)  # as a notebook's cell that runs twice
    with pytest.raises(ValueError, match=r"model_types.*\['qwen3'\] of 'qwen3'"):
        register_family(Family("other", ("qwen3",), family.config_from_hf, family.build))
    register_family(Family("qwen3", ("qwen3",), family.config_from_hf, family.build))
    with pytest.raises(NotImplementedError, match="config_to_hf: the family 'qwen3' has none"):
        to_hf(family.config_from_hf(QWEN3, "x"))
    register_family(family)
