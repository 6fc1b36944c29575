"""The engine on the device, end to end, against full forward passes without a cache."""

import pytest
import torch

from quire.bench import layers
from quire.models.configs import get_config
from quire.models.runner import EngineConfig
from quire.models.weights import random_model
from tests.gpu.conftest import DRY_RUN
from tests.helpers import DEVICE
from tests.models.test_engine import Recorder, build, prompt

pytestmark = pytest.mark.gpu

LENGTHS = (1, 17, 49) if DRY_RUN else (1, 15, 16, 17, 47, 48, 49, 140, 31)
NAMES = ("gemma4-tiny",) if DRY_RUN else ("gemma3-tiny", "gemma4-tiny", "gemma4-small")


@pytest.mark.parametrize("name", NAMES)
def test_ragged_requests_equal_each_alone(name):
    """fp32, every page that nobody owns is NaN, every sampled logit compared."""
    run = Recorder(build(name))
    ids = [run.add(prompt(n, seed=n), max_tokens=3 + n % 20) for n in LENGTHS]
    run.run()
    for request_id in ids:
        run.check(request_id)
    assert any(report.num_decodes and report.num_prefills for report in run.reports)


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_hit_equals_a_cold_run(name):
    run = Recorder(build(name))
    base = prompt(100)
    run.add(base, max_tokens=4)
    run.run()
    request_id = run.add(base + prompt(20, seed=9), max_tokens=4)
    run.run()
    assert run.check(request_id).num_cached_tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_bf16_logits_are_within_the_budget(name):
    model = random_model(get_config(name), device=DEVICE, dtype=torch.bfloat16)
    settings = EngineConfig(num_pages=400, max_num_seqs=2, max_model_len=2000)
    length = 40 if DRY_RUN else 700
    with torch.inference_mode():
        assert layers.check_logits(model, settings, length) <= 1
