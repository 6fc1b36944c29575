"""transformers' results for tiny DeepSeek-V4 checkpoints."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

NUM_TOKENS = 203
LONG_TOKENS = 620


@dataclass(frozen=True)
class Oracle:
    """A checkpoint directory and transformers' fp32 logits [num_tokens, vocab_size] for ``input_ids``."""

    path: Path
    input_ids: torch.Tensor
    logits: torch.Tensor


def input_ids(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 259, (num_tokens,), generator=generator)


def long_config():
    """The tiny model with the released rates and window: two entries of 128 tokens close within the test."""
    from quire.models.deepseek_v4.config import CONFIGS

    tiny = CONFIGS["deepseek-v4-tiny"]
    return replace(tiny, name="long", hca_ratio=128, sliding_window=128, index_topk=16)


def prompts() -> dict[str, torch.Tensor]:
    """The tokens that each checkpoint is asked about."""
    ids = {"ours": input_ids(NUM_TOKENS), "long": input_ids(LONG_TOKENS, 1)}
    return ids | {"wide": input_ids(150, 3)}


def ask_transformers(root: Path) -> None:
    """Fills a directory with checkpoints and their logits: "ours", "long" and "wide"."""
    from quire.bench.common.hf_checkpoint import save_checkpoint
    from quire.models.deepseek_v4.config import CONFIGS
    from quire.models.loading.random_weights import random_model
    from tests.support.forked import RUN, printed

    tiny = CONFIGS["deepseek-v4-tiny"]
    save_checkpoint(random_model(tiny), root / "ours")
    save_checkpoint(random_model(long_config(), seed=1), root / "long")
    save_checkpoint(random_model(CONFIGS["deepseek-v4-small"], seed=2), root / "wide")
    jobs = [{"load": n, "input_ids": i.tolist(), "out": f"{n}.pt"} for n, i in prompts().items()]
    (root / "jobs.json").write_text(json.dumps(jobs))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = Path(__file__).resolve().with_name("oracle.py")
    printed(RUN, str(program), "jobs.json", cwd=root, env=environment)


def answers(root: Path) -> dict[str, Oracle]:
    """Read the results of `ask_transformers` from a directory, by name."""
    return {n: Oracle(root / n, i, torch.load(root / f"{n}.pt")) for n, i in prompts().items()}
