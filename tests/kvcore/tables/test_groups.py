"""Chunks of state groups, and drafters whose keys look ahead."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache
from tests.kvcore.engine import Engine, groups

STATE = GroupSpec("state", "state", 32, 4096)
DENSE = GroupSpec("dense", "dense", 32, 4096)
MAMBA = (DENSE, STATE)


def tokens(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


def engine(specs, **options) -> Engine:
    base = {"num_pages": 2000, "max_requests": 8, "max_model_len": 4096}
    return Engine(groups(*specs), **(base | options))


def test_cut_ends_chunks_where_a_point_is_due():
    e = engine(MAMBA, retention=64)
    e.admit("a", tokens(200))
    slot = e.slots["a"]
    counts = []
    while e.computed("a") < 200:
        (n,) = e.kv.cut([slot], [min(150, 200 - e.computed("a"))]).tolist()
        counts.append(n)
        e.step({"a": n})
    assert counts == [64, 64, 64, 8]
    plain = engine((DENSE,))
    plain.admit("a", tokens(200))
    assert plain.kv.cut([plain.slots["a"]], [150]).tolist() == [150]


def test_multi_token_drafters():
    spec = GroupSpec("draft", "window", 16, 4096, 64, lookahead=3)
    e = engine((DENSE, spec))
    prompt = tokens(99)
    e.run("a", prompt)
    assert e.kv.match([*prompt[:98], 1001, 1]).dense_tokens == 64, (
        "98 is within the lookahead of 96"
    )
    assert e.kv.match([*prompt, 1]).dense_tokens == 96
    assert e.kv.match(prompt[:98]).dense_tokens == 64, "96 cannot be verified without token 98"
    with pytest.raises(ValueError, match="lookahead: expected at most one segment of 32"):
        KVCache(
            groups(DENSE, GroupSpec("d", "dense", 32, 4096, lookahead=33)),
            num_pages=9, max_requests=1, max_model_len=99,
        )  # fmt: skip
