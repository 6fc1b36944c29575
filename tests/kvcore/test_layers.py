"""Cache groups from the shapes of layers, as an engine without `quire.models` makes them."""

import random

import pytest

from quire.kvcore import KVCache, LayerShape, cache_groups

FULL, SLIDING = LayerShape(4096), LayerShape(4096, 1024)


def test_layers_are_dealt_in_turn():
    """Five sliding layers go to three groups of at most two; full layers (2, 5) to group 0."""
    layers = [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING]
    groups, placement = cache_groups(layers)
    dealt = [(1, 0), (2, 0), (0, 0), (3, 0), (1, 1), (0, 1), (2, 1)]
    assert [(p.group, p.tensor) for p in placement] == dealt
    assert [g.name for g in groups] == ["full.0", "sliding.0", "sliding.1", "sliding.2"]
    assert [g.sliding_window for g in groups] == [None, 1024, 1024, 1024]
    KVCache(groups, num_pages=9, max_requests=1, max_model_len=100)


@pytest.mark.parametrize("seed", range(30))
def test_no_two_layers_share_rows_and_pages_have_one_size(seed):
    """Random shapes, three of them or fewer: each layer's rows of a page fit, and are its own."""
    rng = random.Random(seed)
    sizes, windows = (96, 128, 256, 512, 640), (None, None, 16, 128)
    shapes = [LayerShape(rng.choice(sizes), rng.choice(windows), rng.choice((0, 8))) for _ in range(rng.randint(1, 3))]  # fmt: skip
    layers = [rng.choice(shapes) for _ in range(rng.randint(1, 40))]
    base = rng.choice((1, 8, 16))
    groups, placement = cache_groups(layers, base_block_size=base)
    assert len(set(placement)) == len(layers)
    assert len({g.page_bytes for g in groups}) == 1 and groups[0].page_bytes % 16 == 0
    assert len({g.name for g in groups}) == len(groups)
    dense = [g.kind == "dense" for g in groups]
    assert dense == sorted(dense, reverse=True)
    for shape, place in zip(layers, placement, strict=True):
        group = groups[place.group]
        assert group.sliding_window == shape.sliding_window
        assert group.block_size * (shape.token_bytes + shape.scale_bytes) <= group.page_bytes
        same = [s for s, p in zip(layers, placement, strict=True) if p.group == place.group]
        assert set(same) == {shape}
    tensors = 1 + max(p.tensor for p in placement)
    counts = sorted(layers.count(s) for s in set(layers))
    assert tensors == (counts[-1] if counts[-1] < 1.5 * counts[0] else counts[0])
    heaviest = max(s.token_bytes for s in layers)
    assert all(groups[p.group].block_size == base for s, p in zip(layers, placement, strict=True) if s.token_bytes == heaviest)  # fmt: skip
