"""An engine's logits in half precision against full passes without a cache."""

from __future__ import annotations

import dataclasses

import torch

from quire.models.config.named import get_config
from quire.models.deepseek_v4.config import DeepseekV4Config
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.loading.weights import build_model


def first_layers(name, num_layers, num_experts):
    """The first layers of a DeepSeek-V4 configuration with fewer experts and without a drafter."""
    config = get_config(name)
    return dataclasses.replace(
        config,
        layer_types=config.layer_types[:num_layers],
        mlp_layer_types=config.mlp_layer_types[:num_layers],
        num_experts=num_experts,
        num_mtp_layers=0,
    )


def error_over_budget(model, length):
    """The largest error of the logits of a prompt and a few tokens, over twice that of a full pass.

    Args:
        length: tokens of the prompt, which is computed in chunks.
    """
    # Replayed graphs do not call the hook.
    settings = EngineConfig(
        num_pages=400, max_num_seqs=2, max_model_len=2000, decode_graphs=False,
        async_scheduling=False, max_num_batched_tokens=max(2, length // 3),
    )  # fmt: skip
    engine, found = Engine(model, settings), []
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, model.config.vocab_size, (length,), generator=generator).tolist()
    engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True))
    hook = model.register_forward_hook(lambda module, args, output: found.append(output))
    while engine.has_work:
        finished = engine.step().finished
    hook.remove()
    [output] = finished
    assert output.error is None
    # Chunks that do not end the prompt have no logits.
    got = torch.cat(found).float()
    sequence = torch.tensor([*output.prompt_token_ids, *output.token_ids][:-1], device=model.device)
    rows = torch.arange(length - 1, len(sequence), device=model.device)
    plain = model.full_forward(sequence, logits_rows=rows).float()
    wide = build_model(model.config, device=model.device, dtype=torch.float32)
    for target, source in zip(wide.parameters(), model.parameters(), strict=True):
        target.copy_(source)
    exact = wide.full_forward(sequence, logits_rows=rows)
    rounding = torch.finfo(model.dtype).eps / 2 * exact.abs().max()
    budget = 2 * ((plain - exact).abs().max() + rounding)
    errors = (got - exact).abs().amax(1)
    # Another expert or entry in a few tokens of DeepSeek-V4 is no mistake.
    several = isinstance(model.config, DeepseekV4Config)
    return ((errors.median() if several else errors.max()) / budget).item()
