"""Tiny random checkpoints, and what transformers says about them (computed once per session, in a process of its own)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the oracle of the model tests is transformers")

import torch

from quire.models.configs import get_config
from quire.models.gemma import Gemma
from quire.models.hf_config import to_hf
from quire.models.weights import random_model, save_checkpoint

TINY = ("gemma3-tiny", "gemma4-tiny")
NUM_TOKENS = 131  # more than eight windows of 16


@dataclass(frozen=True)
class Oracle:
    """Checkpoints of one tiny model and transformers' fp32 logits for ``input_ids``.

    ours, ours_logits: written by save_checkpoint. theirs, theirs_logits: other weights, written by save_pretrained.
    """

    name: str
    model: Gemma
    input_ids: torch.Tensor
    ours: Path
    theirs: Path
    ours_logits: torch.Tensor
    theirs_logits: torch.Tensor


@pytest.fixture(scope="session")
def oracles(tmp_path_factory) -> dict[str, Oracle]:
    root = tmp_path_factory.mktemp("oracle")
    models, ids, jobs = {}, {}, []
    for seed, name in enumerate(TINY):
        models[name] = random_model(get_config(name), seed=seed)
        save_checkpoint(models[name], root / name / "ours")
        generator = torch.Generator().manual_seed(seed)
        ids[name] = torch.randint(3, 259, (NUM_TOKENS,), generator=generator)
        theirs = str(root / name / "theirs")
        jobs.append({"make": theirs, "config": to_hf(models[name].config), "seed": seed})
        for which in ("ours", "theirs"):
            load, out = str(root / name / which), str(root / name / f"{which}.pt")
            jobs.append({"load": load, "input_ids": ids[name].tolist(), "out": out})
    _run_oracle(root, jobs)
    return {
        name: Oracle(
            name=name,
            model=models[name],
            input_ids=ids[name],
            ours=root / name / "ours",
            theirs=root / name / "theirs",
            ours_logits=torch.load(root / name / "ours.pt"),
            theirs_logits=torch.load(root / name / "theirs.pt"),
        )
        for name in TINY
    }


def _run_oracle(cwd: Path, jobs: list[dict]) -> None:
    (cwd / "jobs.json").write_text(json.dumps(jobs))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, str(Path(__file__).with_name("oracle.py")), "jobs.json"]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(params=TINY)
def oracle(request, oracles) -> Oracle:
    """Each tiny model in turn."""
    return oracles[request.param]
