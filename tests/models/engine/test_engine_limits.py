"""Settings and shapes that an engine refuses when it is made, and shapes that it takes."""

from dataclasses import replace

import pytest
import torch

from quire.kernels.common.checks import HEAD_DIMS
from quire.kvcore import GroupSpec, KVCache
from quire.kvcore.device import BatchBuilder
from quire.models.config.model import FULL
from quire.models.config.named import get_config
from quire.models.deepseek_v4.cache import CacheFormat, plan_cache
from quire.models.engine.config import EngineConfig
from quire.models.engine.engine import Engine
from quire.models.loading.random_weights import random_model
from tests.models.deepseek_v4.test_engine import V4Recorder
from tests.models.engine.test_engine import Recorder


def resized(name, head_dim, num_heads, num_kv_heads):
    base = get_config(name)
    sizes = {"head_dim": head_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    sliding = None if base.sliding is None else replace(base.sliding, **sizes)
    return replace(base, full=replace(base.full, **sizes), sliding=sliding)


@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads", "name", "kv_cache_dtype"),
    [
        (24, 4, 2, "gemma3-tiny", "auto"), (6, 3, 1, "gpt-oss-tiny", "fp8"),
        (2, 5, 5, "gemma3-tiny", "fp8"), (96, 6, 2, "gpt-oss-tiny", "auto"),
        (40, 7, 1, "gemma3-tiny", "auto"), (100, 4, 4, "gpt-oss-tiny", "fp8"),
        (768, 1, 1, "gemma3-tiny", "fp8"),
    ],
)  # fmt: skip
def test_torch_takes_any_head_size(name, head_dim, num_heads, num_kv_heads, kv_cache_dtype):
    model = random_model(resized(name, head_dim, num_heads, num_kv_heads))
    run = Recorder(model, kv_cache_dtype=kv_cache_dtype)
    ids = [run.add(tokens, 4) for tokens in ([5, 6, 7] * 11, [8] * 70, [9, 10])]
    run.run()
    for request_id in ids:
        assert len(run.outputs[request_id].token_ids) == 4
        if kv_cache_dtype == "auto":
            run.check(request_id)


def test_head_sizes_that_kernels_are_not_made_for_are_refused_at_once(monkeypatch):
    monkeypatch.setattr("quire.models.engine.runner.expect_impl", lambda *_: None)  # as on a GPU
    for head_dim in (24, 96, 768):
        model = random_model(resized("gemma3-tiny", head_dim, 2, 1))
        message = (
            r"impl: 'triton' is supported with a head_dim in \[16, .*"
            rf"'gemma3-tiny' has {head_dim} in layers of .*; 'torch' takes any"
        )
        with pytest.raises(NotImplementedError, match=message):
            Engine(model, EngineConfig(impl="triton", num_pages=200))
    for head_dim in HEAD_DIMS:
        random_model(resized("llama-tiny", head_dim, 2, 1)).expect_impl("triton")
    base = get_config("gemma3-tiny")
    only_full = replace(
        base,
        layer_types=(FULL,) * len(base.layer_types),
        sliding=replace(base.sliding, head_dim=24),
    )
    random_model(only_full).expect_impl("triton")  # no layer has 24


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_dim": 6}, "rope_dim: supported are powers of two, 'deepseek-v4-tiny' has 6"),
        ({"index_num_heads": 129}, "index_num_heads: supported are up to 128, .* has 129"),
        ({"index_topk": 5000}, "index_topk: supported are up to 4096, .* has 5000"),
        ({"head_dim": 48}, r"head_dim: 48 is not one of"),
        ({"index_head_dim": 24}, r"index_dim: 24 is not one of"),
    ],
)
def test_sizes_of_deepseek_v4_are_refused_at_once(changes, message):
    model = random_model(replace(get_config("deepseek-v4-tiny"), **changes))
    with pytest.raises(NotImplementedError, match=message):
        Engine(model, EngineConfig(num_pages=100))


@pytest.mark.parametrize(
    ("window", "csa", "hca", "blocks"),
    [
        (24, 4, 16, (32, 8)), (16, 4, 8, (16, 8)), (128, 4, 128, (256, 64)),
        (1, 2, 3, (6, 1)), (127, 4, 128, (256, 32)), (7, 6, 4, (12, 3)),
    ],
)  # fmt: skip
def test_default_blocks_of_deepseek_v4_fit_every_window_and_ratio(window, csa, hca, blocks):
    config = replace(
        get_config("deepseek-v4-tiny"), sliding_window=window, csa_ratio=csa, hca_ratio=hca
    )
    plan = plan_cache(config, CacheFormat(torch.float32))
    sizes = {g.block_size for g in plan.groups if g.name.startswith("window")}
    assert (plan.groups[0].block_size, *sizes) == blocks
    if hca < 100:
        model = random_model(config)
        run = V4Recorder(model, max_num_batched_tokens=37)
        request_id = run.add([5, 6, 7] * 25, 5)
        run.run()
        run.check(request_id)


def test_a_batch_refuses_state_groups():
    """A model that makes its own groups learns it at once, not from wrong logits."""
    groups = [GroupSpec("a", "dense", 16, 4096), GroupSpec("b", "state", 16, 4096)]
    kv = KVCache(groups, num_pages=9, max_requests=1, max_model_len=64, track_deltas=True)
    with pytest.raises(NotImplementedError, match="supported are dense and window groups"):
        BatchBuilder(kv, "cpu")
