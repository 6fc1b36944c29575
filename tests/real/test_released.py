"""Released weights, where they were fetched (`make test-real`): against transformers, over every way through the cache."""

from __future__ import annotations

import pytest
import torch

from quire.bench.released import cached
from quire.models.engine.engine import EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from quire.models.llm import LLM

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason="transformers reads GGUF weights with accelerate only")
pytest.importorskip("gguf", reason="the package gguf is not installed")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not cached("smollm2").is_file(), reason="no SmolLM2: python -m bench.released smollm2"
    ),
]
PROMPTS = [
    "The capital of France is", "Write a Python function that adds two numbers.\n",
    "Once upon a time, in a small village by the sea,", "The three laws of motion are",
    "A recipe for bread: take flour, water,", "In 1969, two astronauts", "def fibonacci(n):\n",
    "My favourite season is autumn because", "The difference between a list and a tuple is",
    "Dear Sir or Madam,\n", "Photosynthesis is the process by which", "1, 1, 2, 3, 5, 8,",
    "The river ran slowly past the old mill, and", "To sort an array of numbers, first",
    "Water boils at", "SELECT name FROM users WHERE",
]  # fmt: skip
NUM_TOKENS = 125  # of each: 2,000 in all
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
WAYS = {
    "batch of 16, chunked": EngineConfig(
        num_pages=2000, max_num_seqs=16, max_num_batched_tokens=24
    ),
    "one by one": EngineConfig(num_pages=2000, max_num_seqs=1),
    "preempted": EngineConfig(num_pages=70, max_num_seqs=16),
    "drafted": EngineConfig(num_pages=2000, max_num_seqs=16),
}


@pytest.fixture(scope="module")
def reference():
    """Token ids of each prompt and its greedy continuation by transformers, in fp32."""
    file = cached("smollm2")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    prompts = [tokenizer(prompt).input_ids for prompt in PROMPTS]
    answers = []
    for ids in prompts:
        made = theirs.generate(
            torch.tensor([ids]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
            do_sample=False, eos_token_id=None,
        )  # fmt: skip
        answers.append(tuple(made[0, len(ids) :].tolist()))
    return prompts, answers


@pytest.mark.parametrize("way", WAYS)
def test_2000_greedy_tokens_are_those_of_transformers(reference, way):
    prompts, answers = reference
    drafter = NGramDrafter(4) if way == "drafted" else None
    llm = LLM(cached("smollm2"), dtype="float32", engine=WAYS[way], drafter=drafter)
    outputs = llm.generate(prompts, PARAMS, progress=False)
    assert [output.token_ids for output in outputs] == answers
    assert (llm.engine.totals.num_preempted > 0) == (way == "preempted")
    assert not drafter or llm.engine.totals.num_accepted > 0
    if way == "one by one":  # from the cache: all but the last 40 tokens are given
        given = [
            prompt + list(answer[:-40]) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        hits = llm.generate(given, SamplingParams(max_tokens=40, ignore_eos=True), progress=False)
        assert [output.token_ids for output in hits] == [answer[-40:] for answer in answers]
        assert all(output.num_cached_tokens >= 80 for output in hits)
