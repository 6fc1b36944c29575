"""DeepSeek-V4 in an engine on the device, in bf16 and over each of its caches, with each drafter; and what other models cache in e4m3.

`bench.prefill_decode` proves the output right, token by token against full passes without a cache, and gives exit status 1 where it cannot.
"""

import pytest
import torch

from quire.bench.prefill_decode.__main__ import main
from quire.models.config.named import get_config
from quire.models.loading.random_weights import random_model
from tests.gpu.conftest import DRY_RUN
from tests.gpu.logits import error_over_budget, first_layers
from tests.support.helpers import DEVICE

pytestmark = pytest.mark.gpu

JOBS = {
    "v4": "--model deepseek-v4-small --dtype float32",
    "v4-bf16": "--model deepseek-v4-tiny --dtype bfloat16",
    "v4-fp8": "--model deepseek-v4-small --dtype float32 --kv-cache-dtype fp8",
    "v4-mtp": "--model deepseek-v4-tiny --dtype float32 --speculate mtp --draft-tokens 2",
    "v4-ngram": "--model deepseek-v4-tiny --dtype float32 --speculate ngram --draft-tokens 3",
    "fp8": "--model gemma4-small --dtype float32 --kv-cache-dtype fp8",
    "fp8-per-tensor": "--model gemma4-small --dtype float32 --kv-cache-dtype fp8_per_tensor",
    "fp8-bf16": "--model gemma4-small --dtype bfloat16 --kv-cache-dtype fp8",
    "ngram": "--model gemma4-small --dtype float32 --speculate ngram --draft-tokens 3",
    "few-pages": "--model gemma4-tiny --dtype float32 --max-num-seqs 4 --num-pages 90",
}
# In a dry run one: tests/bench/test_prefill_decode.py has the others.
NAMES = ["v4-bf16"] if DRY_RUN else list(JOBS)


@pytest.mark.parametrize("name", NAMES)
def test_jobs_are_right(name, capsys):
    size = "--limit 1 --scale 0.02 --check 1 --no-baseline" if DRY_RUN else "--limit 4 --scale 0.5"
    status = main([*JOBS[name].split(), *size.split(), "--device", DEVICE])
    assert status == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["deepseek-v4-tiny"] if DRY_RUN else ["deepseek-v4-tiny", "deepseek-v4-small"])  # fmt: skip
def test_bf16_logits_are_within_the_budget(name):
    with torch.inference_mode():
        model = random_model(get_config(name), device=DEVICE, dtype=torch.bfloat16)
        assert error_over_budget(model, 40 if DRY_RUN else 700) <= 1


@pytest.mark.skipif(DRY_RUN, reason="16 GB of weights")
def test_real_widths():
    """Four layers of Flash, of each kind, with fewer experts."""
    config = first_layers("deepseek-v4-flash", 4, 8)
    with torch.inference_mode():
        model = random_model(config, device=DEVICE, dtype=torch.bfloat16)
        assert error_over_budget(model, 700) <= 1
