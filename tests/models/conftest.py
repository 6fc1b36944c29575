"""Tiny random checkpoints, and what transformers computes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from quire.bench.common.hf_checkpoint import save_checkpoint, to_hf
from quire.models.deepseek_v4.config import CONFIGS
from quire.models.loading.random_weights import random_model
from tests.support.models.few import few

TINY = (
    "gemma3-tiny",
    "gemma4-tiny",
    "gemma4-e-tiny",
    "gemma4-moe-tiny",
    "llama-tiny",
    "gpt-oss-tiny",
)
NUM_TOKENS = 131  # more than eight windows of 16
NEW_TOKENS = 24
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
# What goes through tests/models/families/test_parity.py: families, and config.json of those that have no named configuration.
PARITY: dict[str, dict | None] = dict.fromkeys((*TINY, "deepseek-v4-tiny")) | {
    "qwen3": QWEN3 | {"tie_word_embeddings": False},
    "qwen3, tied": QWEN3 | {"tie_word_embeddings": True},
}


@dataclass(frozen=True)
class Parity:
    """A random checkpoint that transformers made, what it greedily says after a prompt, and its fp32 logits of both."""

    directory: Path
    prompt: list[int]
    new_tokens: tuple[int, ...]
    logits: torch.Tensor


@pytest.fixture(scope="session")
def oracle():
    """transformers, by `tests.support.models.oracle`."""
    return pytest.importorskip("tests.support.models.oracle", exc_type=ImportError)


@pytest.fixture(scope="session", params=PARITY)
def parity(request, oracle, tmp_path_factory) -> Parity:
    seed, config = [*PARITY].index(request.param), PARITY[request.param]
    theirs = oracle.make(config or to_hf(few(request.param)), seed + 20)
    directory = tmp_path_factory.mktemp("parity")
    theirs.save_pretrained(directory)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(3, 259, (NUM_TOKENS,), generator=generator).tolist()
    ids, logits = oracle.continued(theirs, prompt, NEW_TOKENS)
    return Parity(directory, prompt, tuple(ids[NUM_TOKENS:]), logits)


V4_TINY = CONFIGS["deepseek-v4-tiny"]
# (configuration, number of tokens). "long": the released rates and window, of which two entries of
# 128 tokens close within the test.
V4_CASES = {
    "ours": (V4_TINY, 203),
    "long": (replace(V4_TINY, hca_ratio=128, sliding_window=128, index_topk=16), 620),
    "wide": (CONFIGS["deepseek-v4-small"], 150),
}


@dataclass(frozen=True)
class V4Oracle:
    """A checkpoint of DeepSeek-V4 and transformers' fp32 logits [num_tokens, vocab_size] for ``input_ids``."""

    path: Path
    input_ids: torch.Tensor
    logits: torch.Tensor


@pytest.fixture(scope="session")
def v4_oracles(oracle, tmp_path_factory) -> dict[str, V4Oracle]:
    found = {}
    for seed, (name, (config, num_tokens)) in enumerate(V4_CASES.items()):
        path = tmp_path_factory.mktemp("v4") / name
        save_checkpoint(random_model(config, seed=seed), path)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 259, (num_tokens,), generator=generator)
        found[name] = V4Oracle(path, ids, oracle.logits(oracle.load(path), ids))
    return found
