"""What transformers says about tiny DeepSeek-V4 checkpoints, in a process of its own: transformers looks for a package named
``kernels`` and must not find this repository's. `ask_transformers` runs it; started as a program in another directory it is that process.

Usage: python v4_oracle.py JOBS.json, a list of
    {"load": checkpoint directory, "input_ids": [...], "out": file}                     logits [num_tokens, vocab_size]
    {"make": directory, "config": {...}, "seed": n, "original": bool}                   a random checkpoint of its own
"""

from __future__ import annotations

import json
import os
import sys
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
    ids |= {name: input_ids(60, 2) for name in ("hybrid", "pure")}
    return ids | {"wide": input_ids(150, 3)}


def ask_transformers(root: Path) -> None:
    """Fills a directory with checkpoints and their logits: "ours", "long" and "wide", written by save_checkpoint; "hybrid" and "pure", made
    and saved by transformers itself."""
    from quire.bench.common.hf_checkpoint import save_checkpoint, to_hf
    from quire.models.deepseek_v4.config import CONFIGS
    from quire.models.loading.random_weights import random_model
    from tests.support.forked import RUN, printed

    tiny = CONFIGS["deepseek-v4-tiny"]
    save_checkpoint(random_model(tiny), root / "ours")
    save_checkpoint(random_model(long_config(), seed=1), root / "long")
    save_checkpoint(random_model(CONFIGS["deepseek-v4-small"], seed=2), root / "wide")
    jobs = [
        {"make": name, "config": to_hf(tiny), "seed": 7, "original": name == "hybrid"}
        for name in ("hybrid", "pure")
    ]
    jobs += [{"load": n, "input_ids": i.tolist(), "out": f"{n}.pt"} for n, i in prompts().items()]
    (root / "jobs.json").write_text(json.dumps(jobs))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    printed(RUN, str(Path(__file__).resolve()), "jobs.json", cwd=root, env=environment)


def answers(root: Path) -> dict[str, Oracle]:
    """What `ask_transformers` left in a directory, by name."""
    return {n: Oracle(root / n, i, torch.load(root / f"{n}.pt")) for n, i in prompts().items()}


def randomise(model, seed):
    """Every tensor random; most start out constant, and such a bug could not show."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        leaf = name.split(".")[-1]
        if leaf == "tid2eid":
            order = torch.rand(len(tensor), model.config.n_routed_experts, generator=generator)
            tensor.copy_(order.argsort(dim=1)[:, : tensor.shape[1]])
        elif leaf in ("scale", "hc_scale") or (leaf == "weight" and tensor.ndim == 1):
            tensor.normal_(1.0, 0.3, generator=generator)
        elif leaf in ("sinks", "position_bias") or "embed_tokens" in name:
            tensor.normal_(0.0, 1.0, generator=generator)
        elif leaf in ("base", "hc_base", "e_score_correction_bias"):
            tensor.normal_(0.0, 0.5 if "base" in leaf else 0.2, generator=generator)
        elif leaf in ("fn", "hc_fn"):
            tensor.normal_(0.0, 0.05, generator=generator)
        else:
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)


def main():
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for job in json.loads(Path(sys.argv[1]).read_text()):
        if "make" in job:
            config = AutoConfig.for_model(**job["config"])
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            randomise(model, job["seed"])
            model.save_pretrained(job["make"], save_original_format=job["original"])
        else:
            model = AutoModelForCausalLM.from_pretrained(
                job["load"], dtype=torch.float32, attn_implementation="eager"
            )
            ids = torch.tensor([job["input_ids"]])
            torch.save(model.eval()(ids, use_cache=False).logits[0], job["out"])


if __name__ == "__main__":
    main()
