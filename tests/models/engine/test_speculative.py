"""N-gram drafts: `test_rejection` and `test_engine_many` have what becomes of them."""

import numpy as np
import pytest

from quire.models.engine.speculative import NGramDrafter


def plain_lookup(tokens, max_ngram, min_ngram, k):
    """Try every length and place: the newest match with k tokens behind it, else the oldest."""
    for size in range(max_ngram, min_ngram - 1, -1):
        tail = tokens[len(tokens) - size :]
        ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tail]
        if len(tail) == size and ends:
            whole = [e for e in ends if e + k <= len(tokens)]
            start = whole[-1] if whole else ends[0]
            return tokens[start : start + k]
    return []


@pytest.mark.parametrize(
    ("max_ngram", "min_ngram", "k"), [(4, 2, 4), (1, 1, 3), (3, 3, 1), (5, 1, 8)]
)
def test_ngram_drafts_equal_a_search_of_every_place(max_ngram, min_ngram, k):
    rng = np.random.default_rng(0)
    drafter = NGramDrafter(k, max_ngram=max_ngram, min_ngram=min_ngram)
    hits = 0
    for _ in range(400):
        tokens = rng.integers(0, rng.integers(1, 6), rng.integers(1, 30)).astype(np.int32)
        got = drafter._continuation(tokens).tolist()
        assert got == plain_lookup(tokens.tolist(), max_ngram, min_ngram, k), tokens
        hits += bool(got)
    assert 50 < hits < 400
