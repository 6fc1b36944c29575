"""Released weights, where they were fetched (`make test-real`): against transformers over every way
through the cache; the second turn of a chat; perplexity with an e4m3 cache."""

from __future__ import annotations

import argparse
import difflib
import pydoc
import statistics

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
pytestmark = pytest.mark.skipif(
    not cached("smollm2").is_file(), reason="no SmolLM2: python -m bench.released smollm2"
)
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
CHUNKED = EngineConfig(num_pages=2000, max_num_seqs=16, max_num_batched_tokens=24)
WAYS = {
    "preempted": EngineConfig(num_pages=70, max_num_seqs=16),
    "drafted": EngineConfig(num_pages=2000, max_num_seqs=16),
}


@pytest.fixture(scope="module")
def theirs():
    """The model in transformers, in fp32."""
    file = cached("smollm2")
    return transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )


@pytest.mark.parametrize(
    "way", ["chunked", *(pytest.param(way, marks=pytest.mark.nightly) for way in WAYS)]
)
def test_2000_greedy_tokens_are_those_of_transformers(theirs, way):
    drafter = NGramDrafter(4) if way == "drafted" else None
    llm = LLM(cached("smollm2"), dtype="float32", engine=WAYS.get(way, CHUNKED), drafter=drafter)
    for output in llm.generate(PROMPTS, PARAMS, progress=False):
        ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
        with torch.no_grad():
            logits = theirs(ids[:, :-1], logits_to_keep=NUM_TOKENS).logits
        assert tuple(logits[0].argmax(-1).tolist()) == output.token_ids
    assert (llm.engine.totals.num_preempted > 0) == (way == "preempted")
    assert not drafter or llm.engine.totals.num_accepted > 0


def documentation():
    """Text of the standard library's documentation."""
    modules = (difflib, statistics, argparse)
    return "\n".join(pydoc.plain(pydoc.render_doc(module)) for module in modules)


@pytest.mark.nightly
def test_second_turn_of_a_chat_computes_a_tenth_of_its_tokens():
    llm = LLM(cached("smollm2"), dtype="float32", engine=EngineConfig(num_pages=400))
    pages = llm.tokenizer.decode(llm.tokenizer.encode(documentation())[:2000])
    chat = [{"role": "user", "content": f"{pages}\n\nWhich modules are these?"}]
    [first] = llm.chat(chat, SamplingParams(max_tokens=16))
    assert first.num_cached_tokens == 0 and len(first.prompt_token_ids) > 2000
    chat += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And which of them compares sequences?"},
    ]
    [second] = llm.chat(chat, SamplingParams(max_tokens=1))
    num_tokens = len(second.prompt_token_ids)
    assert num_tokens - second.num_cached_tokens <= num_tokens / 10


def perplexity(kv_cache_dtype):
    """Of 5,000 tokens, in steps of the default size."""
    engine = EngineConfig(num_pages=400, max_num_seqs=1, kv_cache_dtype=kv_cache_dtype)
    llm = LLM(cached("smollm2"), dtype="bfloat16", engine=engine)
    ids = llm.tokenizer.encode(documentation())[:5000]
    runner, logprobs = llm.engine.runner, []
    forward = runner.forward

    def all_rows(input_ids, positions, attn, *, logits_rows):
        logits = forward(input_ids, positions, attn)
        known = positions < len(ids) - 1
        following = torch.tensor(ids)[positions[known] + 1]
        logprobs.append(logits[known].log_softmax(-1).gather(1, following[:, None]))
        return logits[logits_rows]

    runner.forward = all_rows
    llm.generate([ids], SamplingParams(max_tokens=1), progress=False)
    scores = torch.cat(logprobs)
    assert len(scores) == len(ids) - 1 == 4999
    return float((-scores).mean().exp())


@pytest.mark.nightly
def test_perplexity_with_an_e4m3_cache_is_within_half_a_percent_of_that_with_bf16():
    assert perplexity("fp8") == pytest.approx(perplexity("auto"), rel=0.005)
