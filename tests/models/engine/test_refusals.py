"""Settings, sizes, prompts and parameters of another type or out of range: each is refused by its name.

Also sizes that are taken, at their limits.
"""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
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
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from quire.models.loading.random_weights import random_model
from tests.models.deepseek_v4.test_engine import V4Recorder
from tests.models.engine.test_engine import Recorder
from tests.support.models.toy import ToyModel, finish

INTS, FLAGS = ("4", 4.0, True, -1, [4]), ("yes", 1, 0)
SETTINGS = {
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "seed", "tensor_parallel_size"), (*INTS, None)),
    **dict.fromkeys(("max_model_len", "num_pages"), INTS),
    **dict.fromkeys(("enable_caching", "replay"), (*FLAGS, None)),
    **dict.fromkeys(("decode_graphs", "async_scheduling"), FLAGS),
    "memory_fraction": ("0.5", True, [0.5], 0, 1.5, -1),
    "retention": ("no such", -4, 2.5),
    "kv_cache_dtype": ("fp4", 8),
    "host_cache_gib": ("0.5", True, [0.5], 0, float("nan")),
    "impl": ("cuda", 1),
    "rejection_sample_method": ("none", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", EngineConfig.__dataclass_fields__)
def test_settings_of_another_type_are_named(name):
    for value in SETTINGS[name]:
        with pytest.raises(ValueError, match=rf"^{name}: "):
            Engine(ToyModel(), EngineConfig(**{"num_pages": 100, name: value}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory_fraction": 0.5}, r"expected one of them at most, got 20, 0\.5"),
        ({"max_num_seqs": 5, "max_num_batched_tokens": 4}, r"max_num_seqs: expected 1\.\.max_num_batched_tokens=4, got 5"),
        ({"max_model_len": 5000}, r"max_model_len: expected 2\.\.4096, got 5000"),
        ({"num_pages": 4}, r"num_pages: expected at least 5 .*of 2 tokens, got 4"),
        ({"num_pages": 40, "max_model_len": 800}, r"expected at least 60 \(960 KiB\) for one request of 800 tokens, got 40"),
        ({"num_pages": 10**9}, "num_pages: expected pages that fit the memory, got 1"),
        ({"num_pages": 10**40}, r"num_pages: expected an int in 0\.\.2147483647, got 1"),
        ({"max_num_seqs": 10**13, "max_num_batched_tokens": 10**13}, r"max_num_seqs: expected an int in 1\.\.2147483647, got 1"),
        ({"host_cache_gib": 1, "enable_caching": False}, "^enable_caching: expected True with host"),
    ],
)  # fmt: skip
def test_settings_out_of_range(settings, message):
    model = random_model(get_config("gemma3-tiny"))
    with pytest.raises(ValueError, match=message):
        Engine(model, EngineConfig(**{"num_pages": 20} | settings))


def test_settings_that_a_model_or_the_memory_does_not_allow(monkeypatch):
    message = r"^kv_cache_dtype: ToyModel supports \['auto'\], got 'fp8'"
    with pytest.raises(NotImplementedError, match=message):
        Engine(ToyModel(), EngineConfig(num_pages=50, kv_cache_dtype="fp8"))
    no_memory = Mock(side_effect=MemoryError("no room"))
    monkeypatch.setattr("quire.models.engine.runner.KVCache", no_memory)
    with pytest.raises(ValueError, match="config: expected settings that fit the memory: no room"):
        Engine(ToyModel(), EngineConfig(num_pages=100, max_num_seqs=4))


def test_prompts_of_any_kind():
    engine, ids = Engine(ToyModel(), EngineConfig(num_pages=60, max_model_len=64)), [5, 6, 7] * 9

    def run(prompt, new=None):
        engine.add_request(prompt, SamplingParams(4, ignore_eos=True))
        if new is not None:
            prompt[:] = new
        return finish(engine)[0].token_ids

    kinds = [np.array(ids, dtype=d) for d in ("u1", "i2", "u8", "i8")]
    kinds += [torch.tensor(ids), torch.tensor(ids, dtype=torch.uint8)]
    kinds += [tuple(ids), [np.int64(i) for i in ids]]
    assert {run(kind) for kind in kinds} == {run(ids)} == {run(np.array(ids), new=60)}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([], r"1\.\.63 ids .*got 0"), ([5] * 64, r"1\.\.63 ids .*got 64"), (range(10**12), r"1\.\.63 ids"),
        ([3, 64], r"ints in 0\.\.63, got \[3, 64\]"), ([-1], r"ints in 0\.\.63, got \[-1\]"), ([0.5], "ints in"),
        ([True], "ints in"), (torch.ones(3), "ints in"), (np.array([5, -1]), "ints in"), ([10**30], ""),
        ([[1, 2]], r"a list of ids, got shape \[1, 2\]"), (torch.zeros((2, 2), dtype=torch.int64), "a list of ids"),
        (7, "a list of ids, got 7"), ([[1], [2, 3]], "a list of ids"), ("text", ""), (b"abc", ""), (None, "a list of ids"),
        ({1: 2}, ""), (object(), "a list of ids"), ([torch.tensor(1.5)], ""), (iter([1]), "a list of ids"),
    ],
)  # fmt: skip
def test_what_is_no_prompt(prompt, expected):
    engine = Engine(ToyModel(), EngineConfig(max_model_len=64, num_pages=60))
    with pytest.raises(ValueError, match=f"^prompt_token_ids: expected {expected}"):
        engine.add_request(prompt)
    assert not engine.has_work


def test_arguments_of_requests():
    engine = Engine(ToyModel(), EngineConfig(num_pages=60))
    engine.add_request([5], request_id="a")
    names = {"params": [{"max_tokens": 3}], "request_id": [5, [], "a"], "salt": ["x"]}
    for name, value in [(name, value) for name, values in names.items() for value in values]:
        with pytest.raises(ValueError, match=f"^{name}: expected "):
            engine.add_request([5], **{name: value})
    for unknown in ("x", 5, [], None):
        with pytest.raises(ValueError, match=r"^request_id: expected an unfinished request"):
            engine.abort(unknown)
    assert engine.unfinished == {"a"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -1, r"a number in 0\.\.1e\+30, got -1"), ("temperature", "1", r"a number in 0\.\.1e\+30, got '1'"),
        ("temperature", float("nan"), "a number"), ("temperature", 1e31, "a number"),
        ("top_k", -1, r"an int in 0\.\.2147483647, got -1"), ("top_k", 10**30, "an int"), ("top_k", 2.5, "an int"),
        ("top_p", 0, "a number above 0 and at most 1, got 0"), ("min_p", 2, r"a number in 0\.\.1, got 2"),
        ("repetition_penalty", 0, r"a number in 1e-30\.\.1e\+30, got 0"),
        ("n", 0, r"an int in 1\.\.16384, got 0"), ("n", 2.0, r"an int in 1\.\.16384, got 2.0"),
        ("logprobs", 65, r"an int in 0\.\.64, got 65"), ("logprobs", True, r"an int in 0\.\.64, got True"),
        ("prompt_logprobs", -1, r"an int in 0\.\.64, got -1"), ("prompt_logprobs", 2.5, r"an int in 0\.\.64, got 2.5"),
        ("max_tokens", 0, r"an int in 1\.\.2147483647, got 0"), ("max_tokens", None, "an int in .*, got None"),
        ("seed", 1.5, "an int in .*, got 1.5"),
        ("stop", ("a", ""), "a text, not an empty one, got ''"), ("stop", (5,), "a text, not an empty one, got 5"),
        ("stop", 7, "a list, got 7"), ("stop_token_ids", ("a",), "an int in .*, got 'a'"),
        ("stop_token_ids", 2.5, "a list, got 2.5"), ("ignore_eos", "no", "True or False, got 'no'"),
        ("stop_token_ids", np.array(3), r"a list, got array\(3\)"), ("skip_special_tokens", 1, "True or False, got 1"),
    ],
)  # fmt: skip
def test_sampling_parameters(name, value, expected):
    with pytest.raises(ValueError, match=rf"^{name}(\[\d\])?: expected {expected}"):
        SamplingParams(**{name: value})


def test_what_settings_and_parameters_keep():
    params = SamplingParams(
        np.int64(3), temperature=np.float32(1), stop=None, stop_token_ids=np.int8(7)
    )
    assert type(params.max_tokens) is int and type(params.temperature) is float
    assert params.stop == () and params.stop_token_ids == (7,)
    assert SamplingParams(stop="a").stop == ("a",)
    assert SamplingParams(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))
    ids = SamplingParams(stop_token_ids=np.array([1, 2])).stop_token_ids
    assert ids == (1, 2) and all(type(i) is int for i in ids)
    config = EngineConfig(max_num_seqs=np.int64(3), num_pages=np.int32(100), seed=np.uint8(1))
    assert type(config.max_num_seqs) is type(config.num_pages) is type(config.seed) is int


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_draft_tokens": 0}, "max_draft_tokens: expected >= 1, got 0"),
        ({"max_ngram": 2, "min_ngram": 3}, "min_ngram <= max_ngram, got 3 and 2"),
    ],
)
def test_drafters(arguments, message):
    with pytest.raises(ValueError, match=message):
        NGramDrafter(**arguments)


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


V4 = get_config("deepseek-v4-tiny")
REFUSED = [
    *((resized("gemma3-tiny", size, 2, 1), "triton",
       r"impl: 'triton' is supported with a head_dim in \[16, .*"
       rf"'gemma3-tiny' has {size} in layers of .*; 'torch' takes any") for size in (24, 96, 768)),
    *((replace(V4, **changes), None, message) for changes, message in (
        ({"rope_dim": 6}, "rope_dim: supported are powers of two, 'deepseek-v4-tiny' has 6"),
        ({"index_num_heads": 129}, "index_num_heads: supported are up to 128, .* has 129"),
        ({"index_topk": 5000}, "index_topk: supported are up to 4096, .* has 5000"),
        ({"head_dim": 48}, "head_dim: 48 is not one of"),
        ({"index_head_dim": 24}, "index_dim: 24 is not one of"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("config", "impl", "message"), REFUSED)
def test_sizes_that_kernels_are_not_made_for_are_refused_at_once(
    config, impl, message, monkeypatch
):
    monkeypatch.setattr("quire.models.engine.runner.expect_impl", lambda *_: None)  # as on a GPU
    with pytest.raises(NotImplementedError, match=message):
        Engine(random_model(config), EngineConfig(impl=impl, num_pages=200))


def test_sizes_that_kernels_are_made_for():
    for head_dim in HEAD_DIMS:
        random_model(resized("llama-tiny", head_dim, 2, 1)).expect_impl("triton")
    base = resized("gemma3-tiny", 32, 2, 1)
    sliding = replace(base.sliding, head_dim=24)  # of no layer
    only_full = replace(base, layer_types=(FULL,) * len(base.layer_types), sliding=sliding)
    random_model(only_full).expect_impl("triton")


@pytest.mark.parametrize(
    ("window", "csa", "hca", "blocks"),
    [
        (24, 4, 16, (32, 8)), (16, 4, 8, (16, 8)), (128, 4, 128, (256, 64)),
        (1, 2, 3, (6, 1)), (127, 4, 128, (256, 32)), (7, 6, 4, (12, 3)),
    ],
)  # fmt: skip
def test_default_blocks_of_deepseek_v4_fit_every_window_and_ratio(window, csa, hca, blocks):
    config = replace(V4, sliding_window=window, csa_ratio=csa, hca_ratio=hca)
    plan = plan_cache(config, CacheFormat(torch.float32))
    sizes = {g.block_size for g in plan.groups if g.name.startswith("window")}
    assert (plan.groups[0].block_size, *sizes) == blocks
    if hca < 100:
        run = V4Recorder(random_model(config), max_num_batched_tokens=37)
        request_id = run.add([5, 6, 7] * 25, 5)
        run.run()
        run.check(request_id)


def test_a_batch_refuses_state_groups():
    """A model that makes its own groups learns it at once, not from wrong logits."""
    groups = [GroupSpec("a", "dense", 16, 4096), GroupSpec("b", "state", 16, 4096)]
    kv = KVCache(groups, num_pages=9, max_requests=1, max_model_len=64, track_deltas=True)
    with pytest.raises(NotImplementedError, match="supported are dense and window groups"):
        BatchBuilder(kv, "cpu")
