"""Keys and values in e4m3 pages, end to end; kernels are exact to the value in `tests/kernels`."""

import itertools

import pytest
import torch

from quire.kernels.common import e4m3
from quire.models.engine.memory import model_cache
from quire.models.layers.kv_cache import cache_groups
from tests.models.engine.test_engine import DEVICE, Recorder, build, prompt

E4M3 = torch.float8_e4m3fn
NAMES = ("gemma3-tiny", "gemma4-tiny", "gemma4-e-tiny", "llama-tiny", "gpt-oss-tiny")


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return build(request.param)


def as_e4m3(rows):
    return e4m3.dequantize(*e4m3.quantize(rows))


def by_scales(scales):
    """Rounds keys and values of one layer after another, each by its scale."""
    each = itertools.cycle(itertools.chain.from_iterable(scales))

    def rounded(rows):
        scale = next(each)
        return ((rows / scale).to(E4M3).float() * scale).to(rows.dtype)

    return rounded


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_per_tensor"])
def test_logits_err_as_much_as_rounded_rows_make_them(model, kv_cache_dtype):
    """In chunks, then token by token; a step's own rows are not rounded, so it errs a little less."""
    rounded = as_e4m3
    if kv_cache_dtype == "fp8_per_tensor":
        owners = model.config.num_kv_owners
        model.kv_scales = [(0.03 * 1.3**i, 0.05 * 1.2**i) for i in range(model.config.num_layers)]
        rounded = by_scales(model.kv_scales[:owners])
    run = Recorder(model, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=48)
    request_id = run.add(prompt(100), 30)
    tokens = [*prompt(100), *run.run()[request_id].token_ids][:-1]
    ids = torch.tensor(tokens, device=DEVICE)
    exact = model.full_forward(ids)[99:]
    error = (torch.stack(run.logits[request_id]) - exact).pow(2).mean().sqrt()
    expected = (model.full_forward(ids, stored=rounded)[99:] - exact).pow(2).mean().sqrt()
    assert 0.3 * expected < error < 1.3 * expected < exact.std()


def test_pages_with_one_scale_a_tensor_are_half_of_bf16(model, monkeypatch):
    config = model.config
    groups = model_cache(model, kv_cache_dtype="fp8_per_tensor").groups
    assert 2 * groups[0].page_bytes == cache_groups(config, torch.bfloat16)[0][0].page_bytes
    monkeypatch.setattr(model, "kv_scales", [(1.0, 1.0)])
    with pytest.raises(ValueError, match=f"kv_scales: expected {config.num_layers} pairs, got 1"):
        model_cache(model, kv_cache_dtype="fp8_per_tensor")
