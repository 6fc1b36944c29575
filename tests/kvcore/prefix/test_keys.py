"""Keys: tenants, images and adapters part prompts exactly from where they begin."""

from __future__ import annotations

import itertools
import os
import struct
import subprocess
import sys
from hashlib import sha256

import numpy as np
import pytest

from quire.kvcore import GroupSpec, KVCache
from quire.kvcore.events import split_keys
from quire.kvcore.prefix.extra_keys import Mark
from tests.kvcore.engine import groups

SEEDS = [b"", b"a", b"ab", b"abc", b"\0", b"\0\0", b"\0" * 8, b"\0" * 16]
A = 8
PROMPT = list(range(100))


def int32(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def cache(seed: bytes = b"", *, lookahead: int = 0, block_size: int = 4) -> KVCache:
    spec = GroupSpec("g", "dense", block_size, 1, lookahead=lookahead)
    return KVCache([spec], num_pages=9, max_requests=1, max_model_len=400, hash_seed=seed)


def keys(tokens, salt: bytes = b"", **options) -> list[bytes]:
    return split_keys(cache(**options).match(tokens, salt=salt).prompt.keys)


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


@pytest.mark.parametrize("lookahead", [1, 3])
def test_a_lookahead_moves_no_token_between_segments(lookahead):
    owner: dict[bytes, tuple] = {}
    for prompt in itertools.product([0, 1], repeat=8 + lookahead):
        for i, key in enumerate(keys(prompt, lookahead=lookahead)):
            prefix = prompt[: 4 * (i + 1) + lookahead]
            assert owner.setdefault(key, prefix) == prefix
    assert len(owner) == 2 ** (4 + lookahead) + 2 ** (8 + lookahead)
    assert keys([1], lookahead=1, block_size=1) == ()


def test_keys_are_the_published_formula_in_every_process():
    root = sha256(struct.pack("<QQ", 4, 6) + b"seed" + b"tenant").digest()
    one = sha256(root + int32(0, 1, 2, 3)).digest()
    two = sha256(one + int32(4, 5, 6, 7)).digest()
    code = (
        "from quire.kvcore import GroupSpec, KVCache\n"
        "kv = KVCache([GroupSpec('g', 'dense', 4, 1)], num_pages=9, max_requests=1,\n"
        "             max_model_len=99, hash_seed=b'seed')\n"
        "print(kv.match(list(range(8)), salt=b'tenant').prompt.keys.hex())\n"
    )
    for seed in ("0", "4294967295"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)  # fmt: skip
        assert found.stdout.strip() == (one + two).hex()


def wide(*specs) -> KVCache:
    specs = groups(*specs or ((A, None),))
    return KVCache(specs, num_pages=400, max_requests=4, max_model_len=400)


def run(kv: KVCache, prompt, extra_keys=None) -> None:
    match = kv.match(prompt, extra_keys=extra_keys)
    slot, done = kv.admit("a", match), match.num_tokens
    kv.commit(kv.plan([slot], [len(prompt) - done]), prompt[done:])
    kv.release("a")


@pytest.mark.parametrize(("start", "shared"), [(0, 0), (7, 0), (8, 8), (45, 40), (99, 96)])
def test_tokens_before_an_image_are_shared(start, shared):
    kv = wide()
    run(kv, PROMPT)
    cat, dog = ([(start, start + 1, name)] for name in (b"cat", b"dog"))
    assert kv.match(PROMPT, extra_keys=cat).num_tokens == shared
    run(kv, PROMPT, cat)
    assert kv.match(PROMPT, extra_keys=cat).num_tokens == 96
    assert kv.match(PROMPT, extra_keys=dog).num_tokens == shared
    assert kv.match(PROMPT).num_tokens == 96
    prompt = kv.match(PROMPT, extra_keys=cat).prompt  # which keeps its extra keys
    assert kv.match(prompt).num_tokens == kv.match(prompt, extra_keys=cat).num_tokens == 96


def test_an_image_at_the_end_of_a_prompt_marks_the_first_answer():
    kv = wide()
    prompt, answer = PROMPT[:45], [7] * 30
    slot = kv.admit("a", kv.match(prompt, extra_keys=[(42, 45, b"cat")]))
    kv.commit(kv.plan([slot], [75]), [*prompt, *answer])
    again = [*prompt, *answer, 1]
    assert kv.match(again, extra_keys=[(42, 45, b"cat")]).num_tokens == 72
    for other in ([(42, 46, b"cat")], [(42, None, b"cat")], []):
        assert kv.match(again, extra_keys=other).num_tokens == 40


def test_marks_of_several_keys_never_pack_alike():
    marks = [Mark(1, False, 1, b"ab"), Mark(1, False, 1, b"a"), Mark(1, True, 1, b"ab"), Mark(2, False, 2, b"")]  # fmt: skip
    packed = [m.packed() for m in marks]
    assert len(set(packed)) == len(marks)
    assert all(not a.startswith(b) for a in packed for b in packed if a != b)
