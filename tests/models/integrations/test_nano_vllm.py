"""nano-vllm, not a line of it changed, with our kernels as its flash_attn, beside transformers.

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

from tests.support.models.chats import write_tokenizer

ROOT = Path(__file__).resolve().parents[3]
SOURCES = Path(os.environ.get("QUIRE_NANO_VLLM") or ROOT / ".peers" / "nano-vllm")
CONFIG = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024,
    "tie_word_embeddings": True, "dtype": "float32", "eos_token_id": 1,
}  # fmt: skip
BLOCK = 256  # tokens of a page, the least that nano-vllm takes
PAGE_BYTES = 2 * 2 * BLOCK * 2 * 16 * 4
NEW_TOKENS = 10


@pytest.mark.slow
def test_tokens_are_those_of_transformers(oracle, tmp_path):
    """36 requests through 7 pages: prefix hits, a prompt in chunks, preemption."""
    if not (SOURCES / "nanovllm").is_dir():
        pytest.skip(f"no sources of nano-vllm in {SOURCES} (QUIRE_NANO_VLLM names them)")
    if importlib.util.find_spec("xxhash") is None:
        pytest.skip("nano-vllm needs xxhash")
    model, theirs = tmp_path / "qwen3", oracle.make(CONFIG, 0)
    write_tokenizer(model, "turns", starts=False)
    theirs.save_pretrained(model)
    draw = random.Random(0)
    shared = [draw.randrange(6, 512) for _ in range(BLOCK)]
    lengths = [draw.choice([1, 30, 250]) for _ in range(36)]
    prompts = [[draw.randrange(6, 512) for _ in range(length)] for length in lengths]
    prompts[::3] = [shared + prompt for prompt in prompts[::3]]
    prompts[4] = shared + shared + prompts[4][:7]

    job = {"model": str(model), "prompts": prompts, "max_tokens": NEW_TOKENS}
    (tmp_path / "job.json").write_text(json.dumps(job | {"memory": 8 * PAGE_BYTES}))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCES)}
    command = [
        sys.executable,
        Path(__file__).with_name("nano_vllm_cpu.py"),
        "job.json",
        "said.json",
    ]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    said = json.loads((tmp_path / "said.json").read_text())
    seen = said["seen"]
    assert said["pages"] == 7
    assert seen.keys() >= {"preempt", "flash_attn_varlen_func", "flash_attn_varlen_func-paged"}
    assert seen["flash_attn_with_kvcache-paged"] >= 2 * NEW_TOKENS

    for prompt, answer in zip(prompts, said["answers"], strict=True):
        expected = oracle.logits(theirs, [*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1)
        assert expected.tolist() == answer and len(answer) == NEW_TOKENS
