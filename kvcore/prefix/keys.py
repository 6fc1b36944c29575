"""Segment keys: one chained SHA-256 key for each aligned segment of a prompt.

``key_i = H(key_{i-1} || token ids of segment i)``: equal keys mean equal prefixes. ``key_{-1}`` is
made of a seed and the caller's salt, each after its length, so that none can imitate another.
Eleven tokens, alignment 4:

    tokens        0  1  2  3 | 4  5  6  7 | 8  9 10
    segments           0     |      1     |  open: no key before token 11
    keys          k0 = H(root, 0..3)       k1 = H(k0, 4..7)
    lookahead 1:  k0 = H(root, 0..4)       k1 = H(k0, 5..8)

With a lookahead of 1 the rows at token 3 depend on token 4 (a drafter's do), so the key covers it.
"""

from __future__ import annotations

import struct
from hashlib import sha256
from typing import Any

from ..arguments import as_bytes, as_token_ids, refusal
from ..arrays import Int32
from .extra_keys import Mark, by_segment, marked_key, parse_extra_keys

KEY_BYTES = 32


def root_key(seed: bytes, salt: bytes) -> bytes:
    """Key before the first segment."""
    return sha256(struct.pack("<QQ", len(seed), len(salt)) + seed + salt).digest()


class Prompt:
    """A tokenised prompt with its segment keys, hashed once. It never changes.

    Attributes:
        alignment, lookahead, seed: values of the cache that made it.
        root: key before the first segment, of the seed and the salt.
        num_segments, keys: segments whose key is known, and 32 bytes for each.
        last_key: the last key (or root) with the marks after it, from which the next one is made.
        marks: starts and ends of its extra keys.
        is_keyed: its keys are the caller's own (`of_keys`).
        tokens, salt: [num_tokens] int32, and bytes; None unless the cache has events or debug.
    """

    __slots__ = (
        "alignment", "is_keyed", "keys", "last_key", "lookahead", "marks", "num_segments",
        "num_tokens", "root", "salt", "seed", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        token_ids: Any,
        alignment: int,
        lookahead: int,
        seed: bytes,
        salt: bytes,
        keep_tokens: bool = False,
        extra_keys: Any = None,
    ) -> None:
        self.seed, self.root = seed, root_key(seed, as_bytes("salt", salt))
        self.is_keyed = False
        tokens = as_token_ids("token_ids", token_ids)
        if not tokens.size:
            raise refusal("token_ids", "at least one token", "none")
        self.alignment, self.lookahead, self.num_tokens = alignment, lookahead, len(tokens)
        self.num_segments = max(0, len(tokens) - lookahead) // alignment
        self.marks: tuple[Mark, ...] = ()
        marks: dict[int, bytes] = {}
        if extra_keys is not None:
            self.marks = parse_extra_keys(extra_keys, len(tokens))
            marks = by_segment(self.marks, alignment, lookahead)
        keys: list[bytes] = []
        parts: list[bytes] = []  # bytes of each segment
        key = self.root
        if self.num_segments:
            first = alignment + lookahead
            rest = tokens[first : self.num_segments * alignment + lookahead]
            parts = [tokens[:first].tobytes(), *rest.view(f"V{4 * alignment}").tolist()]
        # The last marks may be of the next segment: the prompt ends within it.
        for segment, packed in (*marks.items(), (self.num_segments, b"")):
            for part in parts[len(keys) : segment]:
                key = sha256(key + part).digest()
                keys.append(key)
            if packed:
                key = marked_key(key, packed)
        self.keys = b"".join(keys)
        self.last_key = key
        self.tokens: Int32 | None = tokens.copy() if keep_tokens else None
        self.salt: bytes | None = salt if keep_tokens else None

    @classmethod
    def of_keys(
        cls, keys: bytes, num_tokens: int, alignment: int, lookahead: int, seed: bytes
    ) -> Prompt:
        """A prompt of `num_tokens` tokens with the caller's keys, 32 bytes a segment."""
        if not isinstance(keys, bytes) or len(keys) % KEY_BYTES:
            raise refusal("keys", f"{KEY_BYTES} bytes a segment", f"{keys!r:.80}")
        prompt = cls.__new__(cls)
        prompt.alignment, prompt.lookahead, prompt.seed = alignment, lookahead, seed
        prompt.keys, prompt.num_tokens, prompt.is_keyed = keys, num_tokens, True
        prompt.num_segments = len(keys) // KEY_BYTES
        if prompt.num_segments * alignment > num_tokens:
            expected = f"at most {num_tokens // alignment} for {num_tokens} tokens"
            raise refusal("keys", expected, prompt.num_segments)
        prompt.root = prompt.last_key = b""
        prompt.marks, prompt.tokens, prompt.salt = (), None, None
        return prompt
