"""Bytes and groups of the caches, and what the allocator really holds."""

from dataclasses import replace

import pytest
import torch

from quire.models.deepseek_v4.cache import CacheFormat, V4PagePool, plan_cache
from quire.models.deepseek_v4.config import CONFIGS, CSA, HCA, MOE, SLIDING

FP8 = CacheFormat(torch.bfloat16, fp8=True)
TINY = CONFIGS["deepseek-v4-tiny"]
RELEASED = ("deepseek-v4-flash", "deepseek-v4-pro")


@pytest.mark.parametrize(("name", "page_bytes"), [(RELEASED[0], 1_002_240), (RELEASED[1], 1_435_968)])  # fmt: skip
def test_groups_of_the_released_models(name, page_bytes):
    """The page is vLLM's block to the byte: 21 (30) times 37440 + 8640, and 20 (31) times 1728."""
    config = CONFIGS[name]
    plan = plan_cache(config, FP8)
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


def test_arguments():
    with pytest.raises(ValueError, match="num_pages"):
        V4PagePool(TINY, plan_cache(TINY, CacheFormat(torch.float32)), num_pages=1, max_requests=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", range(1, 9))
def test_windows_of_all_layers_lie_inside_their_pages(layers, dtype):
    """However few layers share a page with however large entries."""
    kinds = (SLIDING, CSA, HCA, SLIDING, SLIDING, HCA, SLIDING, CSA)[:layers]
    config = replace(TINY, layer_types=kinds, mlp_layer_types=(MOE,) * layers)
    plan = plan_cache(config, CacheFormat(dtype))
    size = 8 * config.head_dim * dtype.itemsize
    places = {(place.window_group, place.window) for place in plan.layers}
    assert len(places) == layers + 1  # and the drafter's, all different
    assert all(start % size == 0 and start + size <= plan.groups[0].page_bytes for _, start in places)  # fmt: skip
    names = {plan.groups[group].name for group, _ in places}
    assert names == {group.name for group in plan.groups if group.name.startswith("window")}
