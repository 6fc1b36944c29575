"""Look-up of prompts: `Match`, and the reason why it is not longer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..arguments import as_bytes, as_int, refusal
from ..spec import GroupSpec, Layout
from .extra_keys import parse_extra_keys
from .index import PrefixIndex
from .keys import Prompt, root_key
from .replays import replay_range
from .tree import Run

Reason = Literal[
    "caching-disabled",
    "prompt-too-short",
    "prompt-end",
    "max-tokens",
    "not-cached",
    "diverged",
    "resume-point",
]

EXPLANATIONS: dict[Reason, str] = {
    "caching-disabled": "caching is disabled",
    "prompt-too-short": "the prompt has no whole segment before its last token",
    "prompt-end": "every segment before the last token was found",
    "max-tokens": "no longer hit was asked for",
    "not-cached": "nothing of this prompt is cached",
    "diverged": "behind them the cached chain ends, or differs from the prompt",
    "resume-point": "dense blocks reach {dense}, but no resume point does",
}


@dataclass(frozen=True)
class Match:
    """Result of a look-up.

    Attributes:
        num_tokens: length of the hit without a replay, a multiple of the alignment.
        dense_tokens: tokens whose dense blocks are cached: an upper bound of the hit.
        limited_by: why the hit is not longer (see `explain`).
        prompt: the hashed prompt, to look up again.
        groups: groups of the cache.
        replay_from, replay_to: tokens that an admitted request computes again, to restore the
            windows at `replay_to`. All dense blocks before `replay_to` are cached. None where a
            replay saves nothing, or the cache has no `replay_tokens`.
        max_tokens: the longest hit that was asked for.
    """

    num_tokens: int
    dense_tokens: int
    limited_by: Reason
    prompt: Prompt
    groups: tuple[GroupSpec, ...] = field(repr=False)
    replay_from: int | None = None
    replay_to: int | None = None
    max_tokens: int | None = None

    @property
    def num_saved_tokens(self) -> int:
        """Tokens that an admitted request does not compute."""
        return self.num_tokens if self.replay_from is None else self.replay_from

    @property
    def per_group(self) -> dict[str, int]:
        """Tokens that each group could serve."""
        dense, hit = self.dense_tokens, self.num_tokens
        return {g.name: dense if g.kind == "dense" else hit for g in self.groups}

    def explain(self) -> str:
        """One sentence: hit length and what limited it."""
        why = EXPLANATIONS[self.limited_by].format(dense=self.dense_tokens)
        text = f"{self.num_tokens} of {self.prompt.num_tokens} tokens: {why}"
        if self.replay_from is not None:
            text += f"; replayed from {self.replay_from}"
        return text


def find_limit(enabled: bool, usable: int, most: int, dense: int, hit: int) -> Reason:
    """Find why a hit of `hit` segments is not longer; all in segments (see `Lookup.find`)."""
    if not enabled:
        return "caching-disabled"
    if usable == 0:
        return "prompt-too-short"
    if hit == usable:
        return "prompt-end"
    if hit == most < dense:
        return "max-tokens"
    if dense > hit:
        return "resume-point"
    return "diverged" if dense else "not-cached"


class Lookup:
    """Look up prompts in one cache; the arguments are those of `KVCache`. Keeps the last result."""

    def __init__(
        self,
        index: PrefixIndex,
        layout: Layout,
        hash_seed: bytes,
        enable_caching: bool,
        replay_tokens: int | None,
        max_model_len: int,
        keeps_tokens: bool,
    ) -> None:
        self._index, self._layout, self._seed = index, layout, hash_seed
        self._alignment, self._lookahead = layout.alignment, layout.lookahead
        self._enabled, self._replay_tokens = enable_caching, replay_tokens
        self._max_model_len, self._keeps_tokens = max_model_len, keeps_tokens
        # What `find` found last, at this state of the index.
        self._found: tuple[Match, Run] | None = None
        self._found_at = 0

    def to_prompt(self, token_ids: Any, salt: bytes | None, extra_keys: Any = None) -> Prompt:
        """Hash the arguments of `KVCache.match`; a `Prompt` is returned as it is."""
        if not isinstance(token_ids, Prompt):
            a, k = self._alignment, self._lookahead
            salt = b"" if salt is None else salt
            return Prompt(token_ids, a, k, self._seed, salt, self._keeps_tokens, extra_keys)
        prompt = token_ids
        if salt is not None and root_key(prompt.seed, as_bytes("salt", salt)) != prompt.root:
            raise refusal("salt", "that of the prompt", "another")
        marks = prompt.marks
        if extra_keys is not None:
            marks = parse_extra_keys(extra_keys, prompt.num_tokens)
        if marks != prompt.marks:
            raise refusal("extra_keys", "those of the prompt", repr(extra_keys))
        return prompt

    def find_again(self, match: Match) -> tuple[Match, Run]:
        """Look up an earlier match again; ValueError if it is none of this cache."""
        if not isinstance(match, Match):
            raise refusal("match", "what `match` returned", repr(match))
        found = self._found
        if found is not None and match is found[0] and self._index.changes == self._found_at:
            return found
        return self.find(match.prompt, match.max_tokens)

    def find(self, prompt: Prompt, max_tokens: int | None = None) -> tuple[Match, Run]:
        """The cached prefix of `prompt`, and the run in which it ends."""
        self._check(prompt)
        a = self._alignment
        limit = prompt.num_segments if self._enabled else 0
        run, dense = self._index.find(prompt.keys, limit)
        usable = min((prompt.num_tokens - 1) // a, prompt.num_segments)
        most = usable
        if max_tokens is not None:
            max_tokens = as_int("max_tokens", max_tokens, 0)
            most = min(usable, max_tokens // a)
        hit = self._index.resumable(run, dense, most)
        reason = find_limit(self._enabled, usable, most, dense, hit)
        groups = self._layout.groups
        match = Match(hit * a, dense * a, reason, prompt, groups, None, None, max_tokens)
        if self._replay_tokens is not None and self._layout.hybrid:
            found = replay_range(min(dense, most) * a, hit * a, self._replay_tokens, a)
            if found is not None:
                match = replace(match, replay_from=found[0], replay_to=found[1])
        self._found, self._found_at = (match, run), self._index.changes
        return match, run

    def _check(self, prompt: Prompt) -> None:
        mine = self._alignment, self._lookahead
        if (prompt.alignment, prompt.lookahead) != mine:
            raise ValueError(
                f"token_ids: expected a prompt of this cache's segments (alignment {mine[0]}, "
                f"lookahead {mine[1]}), got one of another's "
                f"({prompt.alignment}, {prompt.lookahead})"
            )
        if prompt.seed != self._seed:
            raise refusal("token_ids", "a prompt of this cache's hash_seed", "one of another's")
        if self._keeps_tokens and prompt.tokens is None:
            raise refusal("token_ids", "a prompt made by a cache with events or debug", "another")
        if prompt.num_tokens > self._max_model_len:
            expected = f"at most max_model_len = {self._max_model_len} tokens"
            raise refusal("token_ids", expected, prompt.num_tokens)
