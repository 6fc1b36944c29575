"""Tiny random checkpoints, and what transformers says about them (computed once a run, in a process of its own)."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from quire.bench.common.hf_checkpoint import save_checkpoint, to_hf
from quire.models.config.model import ModelConfig, RopeConfig
from quire.models.config.named import get_config
from quire.models.families.decoder import Decoder
from quire.models.loading.random_weights import random_model
from tests.support.forked import RUN, printed
from tests.support.models import chats
from tests.support.shared import once_a_run

TINY = (
    "gemma3-tiny",
    "gemma4-tiny",
    "gemma4-e-tiny",
    "gemma4-moe-tiny",
    "llama-tiny",
    "gpt-oss-tiny",
)
ROPES = {
    "default": RopeConfig("default", 1e4),
    "linear": RopeConfig("linear", 1e6, factor=8.0),
    "llama3": RopeConfig("llama3", 5e5, factor=8.0, original_max_positions=8192),
    "llama3 of other bands": RopeConfig(
        "llama3", 1e4, factor=3.0, original_max_positions=100, low=2.0, high=5.0
    ),
    "yarn": RopeConfig("yarn", 1.5e5, factor=32.0, original_max_positions=4096, high=32.0),
    "yarn, not truncated": RopeConfig(
        "yarn", 1.5e5, factor=32.0, original_max_positions=4096, high=32.0, truncate=False
    ),
    "yarn without low frequencies": RopeConfig(
        "yarn", 1e4, factor=4.0, original_max_positions=10**9, high=32.0, amplitude=1.5
    ),
    "yarn without high frequencies": RopeConfig(
        "yarn", 1e4, factor=4.0, original_max_positions=20, high=8.0, low=4.0
    ),
}
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
class Oracle:
    """A checkpoint of one tiny model, written by save_checkpoint, and transformers' fp32 logits for ``input_ids``."""

    name: str
    model: Decoder
    input_ids: torch.Tensor
    ours: Path
    ours_logits: torch.Tensor


@dataclass(frozen=True)
class Parity:
    """A random checkpoint that transformers made, what it greedily says after a prompt, and its fp32 logits of both."""

    directory: Path
    prompt: list[int]
    new_tokens: tuple[int, ...]
    logits: torch.Tensor


def rope_config(rope: RopeConfig) -> ModelConfig:
    """A model of 64 channels a head with this RoPE."""
    base = get_config("llama-tiny")
    return replace(base, full=replace(base.full, rope=rope, head_dim=64))


@pytest.fixture(scope="session")
def oracle_root(tmp_path_factory) -> Path:
    """Directory of one run of the oracle, which all workers share: everything that tests ask of transformers is asked here, for its
    import is slow."""
    # Found, not imported: transformers looks for a package named kernels and must not find this repository's.
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers, the oracle of this test, is not installed")
    return once_a_run(tmp_path_factory, "oracle", _ask_transformers)


def _ask_transformers(root: Path) -> None:
    jobs = []
    for seed, name in enumerate(TINY):
        model = random_model(get_config(name), seed=seed)
        save_checkpoint(model, root / name / "ours")
        asked = {"load": str(root / name / "ours"), "out": str(root / name / "ours.pt")}
        jobs.append(asked | {"input_ids": _input_ids(seed).tolist()})
    for seed, (name, config) in enumerate(PARITY.items()):
        theirs = root / "parity" / name
        made = {"config": config or to_hf(get_config(name)), "seed": seed + 20}
        jobs.append({"make": str(theirs)} | made)
        asked = {"load": str(theirs), "out": str(theirs / "said.pt"), "new_tokens": NEW_TOKENS}
        jobs.append(asked | {"input_ids": _input_ids(seed).tolist()})
    kinds = ["llama", "gpt_oss", "gemma3_text", "gemma4_text", "deepseek_v4"]
    jobs.append({"keys": kinds, "out": str(root / "keys.json")})
    ropes = [to_hf(rope_config(rope)) for rope in ROPES.values()]
    jobs.append({"ropes": ropes, "out": str(root / "ropes.pt")})
    directories = [root / f"chat{i}" for i in range(len(chats.CASES))]
    for directory, case in zip(directories, chats.CASES, strict=True):
        chats.write_tokenizer(directory, *case)
    asked = {"texts": chats.TEXTS, "messages": chats.MESSAGES, "tools": chats.TOOLS}
    out = {"chats": [str(d) for d in directories], "out": str(root / "chats.json")}
    jobs.append(asked | out)
    _run_oracle(root, jobs)


@pytest.fixture(scope="session")
def oracles(oracle_root) -> dict[str, Oracle]:
    return {
        name: Oracle(
            name=name,
            model=random_model(get_config(name), seed=seed),
            input_ids=_input_ids(seed),
            ours=oracle_root / name / "ours",
            ours_logits=torch.load(oracle_root / name / "ours.pt"),
        )
        for seed, name in enumerate(TINY)
    }


@pytest.fixture(scope="session", params=PARITY)
def parity(request, oracle_root) -> Parity:
    directory = oracle_root / "parity" / request.param
    ids, logits = torch.load(directory / "said.pt")
    return Parity(directory, ids[:NUM_TOKENS], tuple(ids[NUM_TOKENS:]), logits)


def _input_ids(seed: int) -> torch.Tensor:
    return torch.randint(3, 259, (NUM_TOKENS,), generator=torch.Generator().manual_seed(seed))


def _run_oracle(cwd: Path, jobs: list[dict]) -> None:
    (cwd / "jobs.json").write_text(json.dumps(jobs))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = Path(chats.__file__).with_name("oracle.py")
    printed(RUN, str(program), "jobs.json", cwd=cwd, env=environment)


@pytest.fixture(params=TINY)
def every_oracle(request, oracles) -> Oracle:
    """Each tiny model of every family in turn."""
    return oracles[request.param]
