"""Tiny checkpoints of DeepSeek-V4, and transformers' logits for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.models.deepseek_v4.config import CONFIGS
from quire.models.loading.random_weights import random_model

TINY = CONFIGS["deepseek-v4-tiny"]
# (configuration, number of tokens). "long": the released rates and window, of which two entries of
# 128 tokens close within the test.
CASES = {
    "ours": (TINY, 203),
    "long": (
        replace(TINY, name="long", hca_ratio=128, sliding_window=128, index_topk=16),
        620,
    ),
    "wide": (CONFIGS["deepseek-v4-small"], 150),
}


@dataclass(frozen=True)
class Oracle:
    """A checkpoint directory and transformers' fp32 logits [num_tokens, vocab_size] for ``input_ids``."""

    path: Path
    input_ids: torch.Tensor
    logits: torch.Tensor


@pytest.fixture(scope="session")
def v4_oracles(tmp_path_factory) -> dict[str, Oracle]:
    oracle = pytest.importorskip("tests.support.models.oracle", exc_type=ImportError)
    found = {}
    for seed, (name, (config, num_tokens)) in enumerate(CASES.items()):
        path = tmp_path_factory.mktemp("v4") / name
        save_checkpoint(random_model(config, seed=seed), path)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 259, (num_tokens,), generator=generator)
        found[name] = Oracle(path, ids, oracle.logits(oracle.load(path), ids))
    return found
