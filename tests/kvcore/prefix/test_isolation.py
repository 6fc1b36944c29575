"""Tenants never share: different salts, seeds and prompts have different keys, whatever the boundaries look like."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache

SEEDS = [b"", b"a", b"ab", b"abc", b"\0", b"\0\0", b"\0" * 8, b"\0" * 16]


def int32(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def cache(seed: bytes = b"", *, lookahead: int = 0, block_size: int = 4) -> KVCache:
    spec = GroupSpec("g", "dense", block_size, 1, lookahead=lookahead)
    return KVCache([spec], num_pages=9, max_requests=1, max_model_len=400, hash_seed=seed)


def keys(tokens, salt: bytes = b"", **options) -> list[bytes]:
    data = cache(**options).match(tokens, salt=salt).prompt.keys
    return [data[i : i + 32] for i in range(0, len(data), 32)]


def test_no_two_of_many_crafted_prompts_share_a_key():
    """Salts that imitate lengths, seeds, tokens and earlier digests; seeds and salts that move bytes between them."""
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
            what = (seed, salt, tuple(prompt[: 4 * (i + 1)]))
            assert owner.setdefault(key, what) == what
    assert len(owner) > 1800


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_lookahead_moves_no_token_between_segments(lookahead):
    owner: dict[bytes, tuple] = {}
    for prompt in itertools.product([0, 1], repeat=8 + lookahead):
        for i, key in enumerate(keys(prompt, lookahead=lookahead)):
            what = prompt[: 4 * (i + 1) + lookahead]
            assert owner.setdefault(key, what) == what
    assert len(owner) == 2 ** (4 + lookahead) + 2 ** (8 + lookahead)


def test_lengths_and_alignments_do_not_collide_at_the_second_segment():
    short, long = keys([1] * 16), keys([1] * 16, block_size=8)
    assert not set(short) & set(long)


@pytest.mark.parametrize("salt", ["text", 1, bytearray(b"x")])
def test_a_salt_that_is_not_bytes_is_refused(salt):
    with pytest.raises(ValueError, match="salt: expected bytes, got"):
        cache().match([1, 2, 3], salt=salt)


def test_keys_are_the_same_in_every_process():
    code = (
        "from quire.kvcore import GroupSpec, KVCache\n"
        "kv = KVCache([GroupSpec('g', 'dense', 4, 1)], num_pages=9, max_requests=1,\n"
        "             max_model_len=99, hash_seed=b'seed')\n"
        "print(kv.match(list(range(12)), salt=b'tenant').prompt.keys.hex())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout.strip()
        for seed in ("0", "1", "4294967295")
    }  # fmt: skip
    assert found == {b"".join(keys(range(12), b"tenant", seed=b"seed")).hex()}


def test_the_first_key_is_the_published_formula():
    from hashlib import sha256

    root = sha256(struct.pack("<QQ", 4, 6) + b"seed" + b"tenant").digest()
    one = sha256(root + int32(0, 1, 2, 3)).digest()
    two = sha256(one + int32(4, 5, 6, 7)).digest()
    assert keys(range(8), b"tenant", seed=b"seed") == [one, two]


@pytest.mark.parametrize("options", [{"block_size": 8}, {"lookahead": 1}])
def test_a_prompt_of_another_caches_segments_is_refused(options):
    """Its keys stand for other numbers of tokens here: it would hit what it does not start with."""
    other, kv = cache(**options), cache()
    one, two = list(range(16)), [*range(8), *range(50, 58)]
    slot = kv.admit("x", kv.match(one))
    kv.commit(kv.plan([slot], [16]), one)
    kv.release("x")
    theirs = other.match(two)
    for call in (
        lambda: kv.match(theirs.prompt),
        lambda: kv.admit("y", theirs),
        lambda: kv.pin(theirs, now=0.0, ttl=1.0),
    ):
        with pytest.raises(
            ValueError, match=r"a prompt of this cache's segments \(alignment 4, lookahead 0\)"
        ):
            call()
    assert kv.num_free_slots == 1 and kv.match(two).num_tokens == 8


def test_a_prompt_of_one_salt_is_refused_with_another():
    """It has the keys of its own salt: it would hit what that tenant cached."""
    kv = cache()
    slot = kv.admit("a", kv.match([1] * 9, salt=b"a"))
    kv.commit(kv.plan([slot], [9]), [1] * 9)
    kv.release("a")
    prompt = kv.match([1] * 9, salt=b"a").prompt
    for salt in (b"b", b"", b"aa"):
        with pytest.raises(ValueError, match="salt: expected that of the prompt"):
            kv.match(prompt, salt=salt)
    plain = kv.match([1] * 9).prompt
    with pytest.raises(ValueError, match="salt: expected that of the prompt"):
        kv.match(plain, salt=b"a")
    assert kv.match(prompt).num_tokens == kv.match(prompt, salt=b"a").num_tokens == 8
    assert kv.match(plain).num_tokens == kv.match(plain, salt=b"").num_tokens == 0


def test_a_prompt_of_another_seed_is_refused():
    """What it leaves here, no prompt of this cache would find."""
    ours, theirs, same = cache(b"a"), cache(b"b"), cache(b"a")
    match = theirs.match([1] * 9, salt=b"a")
    for call in (
        lambda: ours.match(match.prompt),
        lambda: ours.admit("y", match),
        lambda: ours.pin(match, now=0.0, ttl=1.0),
        lambda: ours.unpin(match),
    ):
        with pytest.raises(ValueError, match="a prompt of this cache's hash_seed"):
            call()
    assert ours.num_free_slots == 1
    assert ours.admit("y", same.match([1] * 9)) == 0
