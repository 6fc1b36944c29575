"""Keys: tenants, images and adapters part prompts exactly from where they begin."""

import itertools
import struct

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache
from quire.kvcore.events import split_keys
from quire.kvcore.prefix.extra_keys import Mark

SEEDS = [b"", b"a", b"ab", b"abc", b"\0", b"\0\0", b"\0" * 8, b"\0" * 16]


def int32(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def keys(tokens, salt: bytes = b"", *, seed: bytes = b"", lookahead: int = 0, block_size: int = 4):
    spec = GroupSpec("g", "dense", block_size, 1, lookahead=lookahead)
    kv = KVCache([spec], num_pages=9, max_requests=1, max_model_len=400, hash_seed=seed)
    return split_keys(kv.match(tokens, salt=salt).prompt.keys)


def test_no_two_of_many_crafted_prompts_share_a_key():
    """Salts imitate lengths, seeds, tokens and digests; bytes move between seeds and salts."""
    base = [1, 2, 3, 4, 5, 6, 7, 8]
    (first, _) = keys(base)
    salts = [
        *SEEDS, int32(1, 2, 3, 4), int32(1), int32(*base), first, first + int32(5, 6, 7, 8),
        struct.pack("<QQ", 0, 0), struct.pack("<QQ", 0, 1), struct.pack("<QQ", 1, 0) + b"a",
        b"x" * 64, b"x" * 65, "\u00fc".encode(), "u\u0308".encode(),
    ]  # fmt: skip
    prompts = [
        base, [*base[:4], 5, 6, 7, 9], [5, 6, 7, 8, 1, 2, 3, 4], [1, 2, 3, 0], [0, 1, 2, 3],
        [0] * 8, [256, 2, 3, 4], [1, 512, 3, 4], [2**31 - 1] * 4, base[:4],
    ]  # fmt: skip
    owner: dict[bytes, tuple] = {}
    for seed, salt, prompt in itertools.product(SEEDS, dict.fromkeys(salts), prompts):
        for i, key in enumerate(keys(prompt, salt, seed=seed)):
            prefix = (seed, salt, tuple(prompt[: 4 * (i + 1)]))
            assert owner.setdefault(key, prefix) == prefix
    assert len(owner) > 1800
    assert not set(keys([1] * 16)) & set(keys([1] * 16, block_size=8))


@pytest.mark.parametrize("lookahead", [1, 2])
def test_a_lookahead_moves_no_token_between_segments(lookahead):
    owner: dict[bytes, tuple] = {}
    for prompt in itertools.product([0, 1], repeat=8 + lookahead):
        for i, key in enumerate(keys(prompt, lookahead=lookahead)):
            prefix = prompt[: 4 * (i + 1) + lookahead]
            assert owner.setdefault(key, prefix) == prefix
    assert len(owner) == 2 ** (4 + lookahead) + 2 ** (8 + lookahead)
    assert keys([1], lookahead=1, block_size=1) == ()


def test_marks_of_several_keys_never_pack_alike():
    marks = (1, False, 1, b"ab"), (1, False, 1, b"a"), (1, True, 1, b"ab"), (2, False, 2, b"")
    packed = [Mark(*mark).packed() for mark in marks]
    for a, b in itertools.permutations(packed, 2):
        assert not a.startswith(b)
