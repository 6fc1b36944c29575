"""Look-ups in both places."""

import pytest

from tests.kvcore.tier.setup import DENSE, LONGER, PAGE, PROMPT, Setup


def test_what_comes_from_where():
    s = Setup()
    s.behind(PROMPT)
    match = s.tiers.match(LONGER)
    pages = 12 + s.e.kv.layout.pages_per_point
    assert match.num_bytes == pages * PAGE and match.seconds == pytest.approx(pages * PAGE / 1e9)
    assert (match.num_saved_tokens, match.dense_tokens, match.limited_by) == (96, 96, "prompt-end")
    assert match.explain() == (
        "96 of 101 tokens, 0 of them on the device, 0.0586 MiB to load (0.0614 ms): "
        "every segment before the last token was found"
    )
    s.load(LONGER)
    assert s.tiers.match(LONGER).explain() == (
        "96 of 101 tokens, 96 of them on the device: every segment before the last token was found"
    )


def test_what_is_nowhere():
    s = Setup()
    s.behind(PROMPT)
    said = s.tiers.match([7, *PROMPT]).explain()
    assert said.endswith(": nothing of this prompt is in the cache or the host")
    match = s.tiers.match([*PROMPT[:50], *range(300, 350)])
    assert (match.num_saved_tokens, match.dense_tokens, match.num_bytes) == (0, 48, 0)
    assert match.explain().endswith(": dense blocks reach 48, but no resume point does")
    dense = Setup(DENSE)
    dense.behind(PROMPT)
    said = dense.tiers.match([*PROMPT[:50], *range(50)]).explain()
    assert said.endswith(
        ": behind them the chain in cache and host ends, or differs from the prompt"
    )


def test_what_is_computed_sooner_than_loaded():
    s = Setup()
    s.behind(PROMPT)
    s.tiers.prefill_tokens_per_second = 1e12
    match = s.tiers.match(LONGER)
    assert match.num_bytes == 0 and match.limited_by == "slower"
    assert "longer than computing" in match.explain()
    assert s.tiers.load(match) is None
    slow = Setup(prefill=1e9, rate=1.0)
    slow.serve(PROMPT)
    assert not slow.store(), "nor is it kept"


def test_what_is_queued_on_the_link_counts():
    s = Setup(rate=1e6, prefill=100.0)
    s.behind([1, *PROMPT], [2, *PROMPT])
    alone = s.tiers.match([1, *PROMPT, 1])
    job = s.tiers.load(s.tiers.match([2, *PROMPT, 1]))
    later = s.tiers.match([1, *PROMPT, 1])
    assert later.seconds == pytest.approx(alone.seconds + job.num_bytes / 1e6)
    s.end(job)
    assert s.tiers.match([1, *PROMPT, 1]).seconds == alone.seconds


def test_a_load_is_found_by_those_who_want_the_same():
    s = Setup()
    s.behind(PROMPT)
    assert s.tiers.match(LONGER).pending is None
    job = s.tiers.load(s.tiers.match(LONGER))
    assert s.tiers.match([*PROMPT, 2]).pending is job
    assert s.tiers.match([2, *PROMPT]).pending is None
    s.end(job)
    assert s.tiers.match([*PROMPT, 2]).pending is None
