"""nano-vllm, not a line of it changed, with our kernels as its flash_attn: greedy tokens are those of transformers.

Runs where nano-vllm's sources are at hand; `nano_vllm_cpu.py` is the program.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.models.chats import write_tokenizer

ROOT = Path(__file__).resolve().parents[3]
SOURCES = Path(os.environ.get("QUIRE_NANO_VLLM") or ROOT / ".peers" / "nano-vllm")
PROGRAM = Path(__file__).with_name("nano_vllm_cpu.py").read_text(encoding="utf-8")
CONFIG = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "dtype": "float32", "eos_token_id": 1,
}  # fmt: skip
BLOCK = 256  # tokens of a page, the least that nano-vllm takes
PAGE_BYTES = 2 * 2 * BLOCK * 2 * 16 * 4
NEW_TOKENS = 10

# Behind the program: counts what the engine does, and answers the requests of a file.
DRIVER = """
import functools, json
from collections import Counter
from nanovllm.engine.scheduler import Scheduler
from nanovllm.layers import attention
from quire.kernels.attention import api

job = json.load(open(sys.argv[1]))
memory = job["memory"]
seen = Counter()

def counted(name, function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        seen[name + ("-paged" if kwargs.get("block_table") is not None else "")] += 1
        return function(*args, **kwargs)
    return call

Scheduler.preempt = counted("preempt", Scheduler.preempt)
for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
    setattr(attention, name, counted(name, getattr(attention, name)))
if job["impl"]:
    for name in ("paged_attention", "sliding_window_attention", "write_kv"):
        module = flash_attn if name == "write_kv" else api  # `attention_for` looks there
        setattr(module, name, functools.partial(getattr(module, name), impl=job["impl"]))
llm = LLM(job["model"], enforce_eager=True, max_model_len=1024, max_num_batched_tokens=job["batch"])
seen.clear()
greedy = SamplingParams(temperature=1e-9, max_tokens=job["max_tokens"], ignore_eos=True)
answers = [x["token_ids"] for x in llm.generate(job["prompts"], greedy, use_tqdm=False)]
pages = len(llm.scheduler.block_manager.blocks)
json.dump({"answers": answers, "seen": seen, "pages": pages}, open(job["out"], "w"))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    if not (SOURCES / "nanovllm").is_dir():
        pytest.skip(f"no sources of nano-vllm in {SOURCES} (QUIRE_NANO_VLLM names them)")
    if importlib.util.find_spec("xxhash") is None:
        pytest.skip("nano-vllm needs xxhash")
    folder = tmp_path_factory.mktemp("nano") / "qwen3"
    write_tokenizer(folder, "turns", starts=False)
    run_oracle([{"make": str(folder), "config": CONFIG, "seed": 0}], folder.parent)
    return folder


def run_oracle(jobs, folder):
    """By transformers in a process of its own."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    oracle = ROOT / "tests" / "support" / "models" / "oracle.py"
    subprocess.run([sys.executable, oracle, folder / "jobs.json"], check=True, cwd=folder)


def answers_of(job, folder):
    program = folder / "program.py"
    program.write_text(PROGRAM.split("\ndef main():")[0] + DRIVER)
    (folder / "job.json").write_text(json.dumps({**job, "out": str(folder / "said.json")}))
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), str(folder / "job.json")]
    subprocess.run(command, check=True, cwd=folder, env=environment)
    return json.loads((folder / "said.json").read_text())


def expect_greedy(job, said, folder):
    """Each token is the likeliest by transformers, given those before it."""
    jobs = [
        {"load": job["model"], "input_ids": [*prompt, *answer], "out": str(folder / f"{i}.pt")}
        for i, (prompt, answer) in enumerate(zip(job["prompts"], said["answers"], strict=True))
    ]
    run_oracle(jobs, folder)
    for prompt, answer, done in zip(job["prompts"], said["answers"], jobs, strict=True):
        assert len(answer) == job["max_tokens"]
        expected = torch.load(done["out"])[len(prompt) - 1 : -1].argmax(-1)
        assert expected.tolist() == answer


def run(checkpoint, folder, prompts, **limits):
    """Counts of calls, once the answers are known to be right."""
    job = {"model": str(checkpoint), "prompts": prompts, "impl": None} | limits
    said = answers_of(job, folder)
    expect_greedy(job, said, folder)
    return said


@pytest.mark.slow
def test_tokens_are_those_of_transformers(checkpoint, tmp_path):
    """36 requests through 7 pages: prefix hits, a prompt in chunks, preemption."""
    draw = random.Random(0)
    shared = [draw.randrange(6, 512) for _ in range(BLOCK)]
    prompts = [[draw.randrange(6, 512) for _ in range(draw.choice([1, 30, 250]))] for _ in range(36)]  # fmt: skip
    prompts[::3] = [shared + prompt for prompt in prompts[::3]]
    prompts[4] = shared + shared + prompts[4][:7]
    said = run(checkpoint, tmp_path, prompts, max_tokens=NEW_TOKENS, batch=400, memory=8 * PAGE_BYTES)  # fmt: skip
    seen = said["seen"]
    assert said["pages"] == 7
    assert seen["preempt"] and seen["flash_attn_varlen_func"] and seen["flash_attn_varlen_func-paged"]  # fmt: skip
    assert seen["flash_attn_with_kvcache-paged"] >= 2 * NEW_TOKENS


@pytest.mark.slow
def test_tokens_by_the_triton_kernels(checkpoint, tmp_path):
    draw = random.Random(1)
    shared = [draw.randrange(6, 512) for _ in range(BLOCK)]
    prompts = [[*shared, 7, 8], [*shared, 9], [5, 6, 7]]
    limits = {"max_tokens": 3, "batch": 300, "memory": 40 * PAGE_BYTES, "impl": "triton"}
    assert run(checkpoint, tmp_path, prompts, **limits)["seen"]["flash_attn_varlen_func-paged"]
