"""The model: logits of whole sequences, weights as they are released, and the groups of its cache."""

from dataclasses import replace

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.kernels.common.dequantize import dequantize_fp4, scale_values
from quire.models.deepseek_v4.attention import rope_table
from quire.models.deepseek_v4.cache import CacheFormat, V4PagePool, plan_cache
from quire.models.deepseek_v4.config import CONFIGS, CSA, HCA, MOE, SLIDING
from quire.models.layers.rotary import inverse_frequencies
from quire.models.loading.weights import load_model
from tests.support.models import v4_release
from tests.support.models.tolerance import tolerance

TINY = CONFIGS["deepseek-v4-tiny"]


def test_prefixes_of_every_shape(v4_oracles):
    """Shorter than a window of any kind, at its end, and around it: causality makes prefixes of the oracle's run oracles too."""
    oracle = v4_oracles["ours"]
    model = load_model(oracle.path, dtype=torch.float32)
    for length in (1, 3, 4, 7, 8, 9, 16, 17, 33):
        got = model.full_forward(oracle.input_ids[:length])
        assert (got - oracle.logits[:length]).abs().max() < tolerance(model), length


def test_bf16_keeps_in_fp32_what_must_be(v4_oracles):
    oracle = v4_oracles["ours"]
    model = load_model(oracle.path, dtype=torch.bfloat16)
    kept = {
        name.split(".")[-1] if "norm" not in name else "norm"
        for name, weight in model.named_parameters()
        if weight.dtype == torch.float32
    }
    assert kept == {
        "fn", "base", "scale", "hc_fn", "hc_base", "hc_scale", "norm", "sinks", "position_bias",
        "e_score_correction_bias",
    }  # fmt: skip
    got = model.full_forward(oracle.input_ids)
    assert got.dtype == torch.float32
    # Routers and indexers flip in bf16, so logits differ by much here and there, as transformers' own do.
    assert (got.argmax(-1) == oracle.logits.argmax(-1)).float().mean() > 0.8


def test_rotary_table_at_its_end():
    """The angles of position 1,048,575, as the fp32 product that models are trained with."""
    config = CONFIGS["deepseek-v4-flash"]
    frequencies = inverse_frequencies(config.rope, config.rope_dim)
    table = rope_table(frequencies, config.max_position_embeddings)
    angles = (torch.tensor(float(len(table) - 1)) * frequencies).double()
    # Sine and cosine are within a unit in the last place of numbers up to 1.
    assert len(table) == 1_048_576
    assert (table[-1].double() - torch.cat([angles.cos(), angles.sin()])).abs().max() <= UNIT


@pytest.mark.parametrize("num_nextn", [0, 1, 3, None])
def test_a_dspark_drafter(tmp_path, num_nextn):
    """As DeepSeek-V4-Flash-0731 has it: three stages in mtp.*, and keys that may count one of them."""

    def edit(stored):
        stored["mtp.2.confidence_head.proj.weight"] = torch.zeros(1, 168)

    path, model = tmp_path / "release", v4_release.with_dspark()
    exact = v4_release.write_release(path, model, "fp8", edit=edit)
    v4_release.say_ratios(path, num_nextn)
    loaded = load_model(path, dtype=torch.float32)
    assert loaded.config.dspark == model.config.dspark
    assert loaded.config.num_mtp_layers == 0
    tensors = v4_release.release_tensors(loaded)
    assert tensors.keys() == exact.keys()
    for name, weight in exact.items():
        assert torch.equal(tensors[name].double(), weight.double()), name


def test_every_fp4_value_and_every_scale_byte():
    quantized = torch.arange(256, dtype=torch.uint8)[None].repeat(2, 1)  # [2, 512 columns]
    scale = torch.tensor([[127] * 16, [130] * 16], dtype=torch.uint8)
    got = dequantize_fp4(quantized.view(torch.int8), scale, torch.float32)
    signed = [*v4_release.E2M1, *(-x for x in v4_release.E2M1)]
    row = [value for byte in range(256) for value in (signed[byte % 16], signed[byte // 16])]
    assert torch.equal(got[0], torch.tensor(row)) and torch.equal(got[1], 8 * got[0])
    values = scale_values(torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert values[:255].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert values[255].isnan()


@pytest.mark.parametrize(("name", "page_bytes"), [("deepseek-v4-flash", 1_002_240), ("deepseek-v4-pro", 1_435_968)])  # fmt: skip
def test_groups_of_the_released_models(name, page_bytes):
    """The page is vLLM's block to the byte: 21 (30) times 37440 + 8640, and 20 (31) times 1728."""
    config = CONFIGS[name]
    plan = plan_cache(config, CacheFormat(torch.bfloat16, fp8=True))
    csa, hca = config.layer_types.count(CSA), config.layer_types.count(HCA)
    assert page_bytes == csa * (37440 + 8640) + hca * 1728
    plain = plan_cache(config, CacheFormat(torch.bfloat16)).groups[0].page_bytes
    assert plain == csa * 2 * 64 * (512 + 128) + hca * 2 * 2 * 512
    got = [(g.name, g.kind, g.block_size, g.sliding_window, g.lookahead) for g in plan.groups]
    assert got == [
        ("compressed", "dense", 256, None, 0),
        ("window.0", "window", 64, 128, 0),
        ("window.1", "window", 64, 128, 1),
        ("overlap", "window", 256, 5, 0),
    ]
    assert {group.page_bytes for group in plan.groups} == {page_bytes}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_of_all_layers_lie_inside_their_pages(dtype):
    """However few layers share a page with however large entries; and every group with a drafter looks ahead."""
    kinds = (SLIDING, CSA, HCA, SLIDING, SLIDING, HCA, SLIDING, CSA)
    for layers, drafters in [*((n, 1) for n in range(1, 9)), *((6, n) for n in range(2, 9))]:
        config = replace(
            TINY, layer_types=kinds[:layers], mlp_layer_types=(MOE,) * layers, num_mtp_layers=drafters
        )  # fmt: skip
        plan = plan_cache(config, CacheFormat(dtype))
        size = 8 * config.head_dim * dtype.itemsize
        places = {(place.window_group, place.window) for place in plan.layers}
        assert len(places) == layers + drafters  # all different
        assert all(start % size == 0 and start + size <= plan.groups[0].page_bytes for _, start in places)  # fmt: skip
        names = {plan.groups[group].name for group, _ in places}
        assert names == {group.name for group in plan.groups if group.name.startswith("window")}
        ahead = [plan.groups[place.window_group].lookahead for place in plan.layers]
        assert ahead[layers:] == [1] * drafters
    assert ahead[0] == 0  # the trunk has a group of its own here
    with pytest.raises(ValueError, match="num_pages"):
        V4PagePool(config, plan, num_pages=1, max_requests=1)
