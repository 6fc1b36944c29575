"""DeepSeek-V4 with a quantized cache; `tests/kernels` has the layout and the kernels, to the value."""

import pytest
import torch

from quire.models.config.named import get_config
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.models.deepseek_v4.test_engine import V4Recorder
from tests.support.models.tolerance import tolerance


@pytest.fixture(scope="module")
def oracle(v4_oracles):
    return v4_oracles["wide"]


@pytest.fixture(scope="module")
def model(oracle):
    return load_model(oracle.path)


@pytest.mark.parametrize("cold", [38, 107])
def test_logits_err_by_the_quantization(model, oracle, cold):
    """Prompts in odd chunks, cold and then from a hit, and known tokens one by one.

    The error is so large that rows are quantized, and so small that the model is still the same.
    """
    run = V4Recorder(model, kv_cache_dtype="fp8", max_num_batched_tokens=37)
    tokens = oracle.input_ids.tolist()
    for length, end in ((cold, cold + 9), (140, 150)):
        request_id = run.add(tokens[:length], max_tokens=end - length)
        run.forced[request_id] = tokens[:end]
        run.run()
        assert (run.outputs[request_id].num_cached_tokens > 0) == (length == 140)
        error = torch.stack(run.logits[request_id]) - oracle.logits[length - 1 : end - 1]
        assert 10 * tolerance(model) < error.pow(2).mean().sqrt() < 0.25 * oracle.logits.std()


def test_other_head_sizes_and_fp16_are_refused():
    model = random_model(get_config("deepseek-v4-small"), dtype=torch.float16)
    with pytest.raises(
        NotImplementedError, match="'fp8' is supported with models in bfloat16 and float32"
    ):
        Engine(model, EngineConfig(kv_cache_dtype="fp8"))
    with pytest.raises(
        NotImplementedError, match=r"'fp8' is supported with \(head_dim, rope_dim\) = \(512, 64\)"
    ):
        Engine(random_model(get_config("deepseek-v4-tiny")), EngineConfig(kv_cache_dtype="fp8"))
