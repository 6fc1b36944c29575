"""What a rollback, a rejection or a cache without caching must not leave behind."""

from __future__ import annotations

import pytest

from quire.kvcore import GroupSpec
from tests.kvcore.engine import Engine, groups

STATE = GroupSpec("state", "state", 4, 4096)
DRAFT = GroupSpec("draft", "dense", 4, 4096, lookahead=1)


def engine(*specs, **options) -> Engine:
    base = {"num_pages": 80, "max_requests": 3, "max_model_len": 128, "max_draft_tokens": 3}
    return Engine(groups(*specs), **(base | options))


@pytest.mark.parametrize("specs", [(DRAFT, STATE), (DRAFT, (2, 6), STATE)], ids=["dense", "window"])
@pytest.mark.parametrize("prompt", [[1, 2, 3], [5] * 8 + [1, 2, 3]], ids=["first", "third"])
@pytest.mark.parametrize("end", ["release", "preempt", "goes-on"])
def test_a_snapshot_of_tokens_taken_back_is_no_resume_point(specs, prompt, end):
    """The state at a boundary whose key waits for the next token was copied; then its last token was taken back."""
    e = engine(*specs, retention="dense")
    e.admit("a", prompt)
    e.finish_prompt("a", chunk=4)
    e.decode("a", [4])  # ends at the boundary: a snapshot of the state
    boundary = len(prompt) + 1
    assert boundary % 4 == 0 and e.computed("a") == boundary
    e.kv.rollback(e.slots["a"], 1)
    e.tokens["a"][-1:] = [9, 9]
    e.step({"a": 2}, {"a": 2})  # past the boundary: no snapshot of the new tokens there
    e.check()
    if end == "goes-on":
        e.decode("a", [1])
    elif end == "preempt":
        tokens = list(e.tokens["a"])
        e.release("a")
        e.admit("a", [*tokens, 1])
    else:
        e.release("a")
    longer = [*prompt, 9, 9, 9]
    # The third: the last boundary that the prompt reached had its snapshot, until that of the one taken back.
    assert e.kv.match(longer).num_tokens in (0, boundary - 4)
    e.admit("b", longer)
    e.finish_prompt("b", chunk=64)  # the stand-in engine checks the state that it starts from
    e.check()
