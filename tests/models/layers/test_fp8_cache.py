"""Keys and values in e4m3 pages, end to end; kernels are exact to the value in `tests/kernels`."""

import itertools

import pytest
import torch

from quire.kernels.common import e4m3
from quire.models.engine.memory import model_cache
from quire.models.layers.kv_cache import cache_groups
from tests.models.engine.test_engine import DEVICE, Recorder, build, prompt

NAMES = ("gemma3-tiny", "gemma4-tiny", "gemma4-e-tiny", "llama-tiny", "gpt-oss-tiny")


def as_e4m3(rows):
    return e4m3.dequantize(*e4m3.quantize(rows))


def by_scales(scales):
    """Rounds keys and values of one layer after another, each by its scale."""
    each = itertools.cycle(itertools.chain.from_iterable(scales))

    def rounded(rows):
        scale = next(each)
        return ((rows / scale).to(torch.float8_e4m3fn).float() * scale).to(rows.dtype)

    return rounded


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_per_tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_err_as_much_as_rounded_rows_make_them(name, kv_cache_dtype):
    """In chunks, then token by token; a step's own rows are not rounded, so it errs a little less."""
    model, rounded = build(name), as_e4m3
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


def test_pages_with_one_scale_a_tensor_are_half_of_bf16():
    model = build("gemma4-e-tiny")
    groups = model_cache(model, kv_cache_dtype="fp8_per_tensor").groups
    assert 2 * groups[0].page_bytes == cache_groups(model.config, torch.bfloat16)[0][0].page_bytes
    model.kv_scales = [(1.0, 1.0)]
    with pytest.raises(ValueError, match="kv_scales: expected 9 pairs, got 1"):
        model_cache(model, kv_cache_dtype="fp8_per_tensor")
