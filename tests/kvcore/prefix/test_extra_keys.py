"""Extra keys: images and adapters part prompts from where they begin, and only from there."""

from __future__ import annotations

import random

import pytest

from quire.kvcore import GroupSpec
from quire.kvcore.prefix.extra_keys import Mark
from quire.kvcore.prefix.keys import Prompt
from tests.support.kvcore.engine import Engine, groups

A = 8


def engine(**options) -> Engine:
    base = {"num_pages": 400, "max_requests": 4, "max_model_len": 400, "debug": False}
    return Engine(groups((A, None)), **(base | options))


def run(e: Engine, prompt, extra_keys=None, answer=()) -> int:
    """A whole request; returns its hit."""
    match = e.kv.match(prompt, extra_keys=extra_keys)
    slot = e.kv.admit("a", match)
    tokens = [*prompt, *answer]
    done = match.num_tokens
    e.kv.commit(e.kv.plan([slot], [len(tokens) - done]), tokens[done:])
    e.kv.release("a")
    return match.num_tokens


PROMPT = list(range(100))


@pytest.mark.parametrize(
    ("start", "shared"), [(0, 0), (7, 0), (8, 8), (45, 40), (48, 48), (99, 96)]
)
def test_what_is_before_an_image_is_shared(start, shared):
    e = engine()
    run(e, PROMPT)
    assert e.kv.match(PROMPT, extra_keys=[(start, start + 1, b"cat")]).num_tokens == shared
    run(e, PROMPT, [(start, start + 1, b"cat")])
    assert e.kv.match(PROMPT, extra_keys=[(start, start + 1, b"cat")]).num_tokens == 96
    assert e.kv.match(PROMPT, extra_keys=[(start, start + 1, b"dog")]).num_tokens == shared
    assert e.kv.match(PROMPT).num_tokens == 96


def test_where_an_image_begins_and_ends_counts():
    e = engine()
    run(e, PROMPT, [(41, 60, b"cat"), (60, 63, b"dog")])
    for other in (
        [(42, 60, b"cat"), (60, 63, b"dog")], [(41, 61, b"cat"), (61, 63, b"dog")],
        [(41, 63, b"cat"), (60, 63, b"dog")], [(41, 60, b"dog"), (60, 63, b"cat")],
    ):  # fmt: skip
        assert e.kv.match(PROMPT, extra_keys=other).num_tokens in (40, 56)
    same = [(60, 63, b"dog"), (41, 60, b"cat")]  # in any order
    assert e.kv.match(PROMPT, extra_keys=same).num_tokens == 96


def test_a_growing_chat_under_an_adapter_hits():
    """Turn by turn with the adapter from token 20 on: each turn's answer is found, and so is a shorter range as far as it goes."""
    e = engine()
    chat = PROMPT[:50]
    for turn in range(4):
        answer = [1000 + turn] * 21
        hit = run(e, chat, [(20, None, b"lora")], answer)
        assert (
            hit == ((len(chat) - 1) // A * A if not turn else (len(chat) - 10) // A * A) or not turn
        )
        chat = [*chat, *answer, *range(9)]
    assert e.kv.match(chat).num_tokens == 16
    assert e.kv.match(chat, extra_keys=[(20, 45, b"lora")]).num_tokens == 40


def test_an_image_at_the_end_of_a_prompt_marks_the_first_answer():
    """The prompt ends with the image: the answer's first key knows that it ended there."""
    e = engine()
    prompt, answer = PROMPT[:45], [7] * 30
    run(e, prompt, [(42, 45, b"cat")], answer)
    again = [*prompt, *answer, 1]
    assert e.kv.match(again, extra_keys=[(42, 45, b"cat")]).num_tokens == 72
    assert e.kv.match(again, extra_keys=[(42, 46, b"cat")]).num_tokens == 40
    assert e.kv.match(again, extra_keys=[(42, None, b"cat")]).num_tokens == 40
    assert e.kv.match(again).num_tokens == 40


def test_a_drafter_that_looks_ahead_sees_the_image_earlier():
    e = Engine(
        groups((A, None), GroupSpec("d", "dense", A, 4096, lookahead=2)),
        num_pages=400, max_requests=4, max_model_len=400, debug=False,
    )  # fmt: skip
    run(e, PROMPT)
    # Rows at 46 and 47 depend on tokens 48 and 49.
    hits = {
        s: e.kv.match(PROMPT, extra_keys=[(s, None, b"cat")]).num_tokens for s in (47, 48, 49, 50)
    }
    assert hits == {47: 40, 48: 40, 49: 40, 50: 48}


def segments_that_differ(one: Prompt, other: Prompt) -> set[int]:
    a, b = ([p.keys[i : i + 32] for i in range(0, len(p.keys), 32)] for p in (one, other))
    return {i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y}


@pytest.mark.parametrize("lookahead", [0, 3])
def test_keys_are_equal_exactly_as_far_as_tokens_and_their_places_in_ranges_are(lookahead):
    """Against prompts compared token by token: the id, and the place in each range that covers it."""
    rng = random.Random(0)
    differing = 0
    for _ in range(400):
        n = rng.randint(1, 60)
        tokens = rng.choices((0, 1), k=n)

        def ranges(n=n):
            starts = rng.sample(range(n), k=min(n, rng.choice((0, 1, 2))))
            return [(s, rng.choice((None, rng.randint(s + 1, n))), rng.choice((b"x", b"y"))) for s in starts]  # fmt: skip

        pair = [ranges(), ranges()]
        if rng.random() < 0.5:
            pair[1] = pair[0][:1]
        prompts = [Prompt(tokens, 4, lookahead, b"", b"", extra_keys=r) for r in pair]
        meanings = [
            [sorted((k, p - a) for a, b, k in r if a <= p and (b is None or p < b)) for p in range(n)] for r in pair
        ]  # fmt: skip
        apart = next((p for p in range(n) if meanings[0][p] != meanings[1][p]), n + lookahead)
        first = max(0, apart - lookahead) // 4
        expected = set(range(first, prompts[0].num_segments))
        assert segments_that_differ(*prompts) == expected
        differing += bool(expected)
    assert differing > 50


def test_marks_of_several_keys_never_pack_alike():
    marks = [
        Mark(1, False, 1, b"ab"),
        Mark(1, False, 1, b"a"),
        Mark(1, True, 1, b"ab"),
        Mark(2, False, 2, b""),
    ]
    packed = [m.packed() for m in marks]
    assert len(set(packed)) == len(marks)
    assert all(not a.startswith(b) for a in packed for b in packed if a != b)


@pytest.mark.parametrize(
    ("extra_keys", "message"),
    [
        (5, r"extra_keys: expected \(start, stop, key\) each, got 5"),
        ([(1, 2)], r"extra_keys: expected \(start, stop, key\) each"),
        ([(-1, 2, b"")], r"extra_keys: start: expected an int >= 0, got -1"),
        ([(100, None, b"")], r"extra_keys: start: expected an int <= 99, got 100"),
        ([(5, 5, b"")], r"extra_keys: stop: expected an int >= 6, got 5"),
        ([(5, 101, b"")], r"extra_keys: stop: expected an int <= 100, got 101"),
        ([(5, 9, b"a"), (5, None, b"a")], r"extra_keys: expected each key once at one start, got several b'a' at 5"),
        ([(5, 6, "cat")], r"extra_keys: key: expected bytes, got str"),
    ],
)  # fmt: skip
def test_wrong_extra_keys_are_named(extra_keys, message):
    with pytest.raises(ValueError, match=message):
        engine().kv.match(PROMPT, extra_keys=extra_keys)


def test_a_prompt_keeps_its_extra_keys():
    e = engine()
    keys = [(5, None, b"lora")]
    prompt = e.kv.match(PROMPT, extra_keys=keys).prompt
    run(e, PROMPT, keys)
    assert e.kv.match(prompt).num_tokens == e.kv.match(prompt, extra_keys=keys).num_tokens == 96
    with pytest.raises(ValueError, match="extra_keys: expected those of the prompt"):
        e.kv.match(prompt, extra_keys=[])
