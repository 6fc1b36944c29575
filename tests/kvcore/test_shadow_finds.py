"""What random traffic found, in a few lines each."""

from __future__ import annotations

from quire.kvcore import GroupSpec, KVCache, linear_table, paged_rows
from quire.kvcore.events import split_keys, tail_hashes


def test_tables_of_a_replay_that_has_not_begun_are_empty():
    groups = [GroupSpec("d", "dense", 4, 64), GroupSpec("w", "window", 4, 64, 5)]
    kv = KVCache(
        groups, num_pages=99, max_requests=2, max_model_len=99, replay_tokens=4, retention="latest"
    )
    prompt = list(range(50))
    slot = kv.admit(0, kv.match(prompt))
    kv.commit(kv.plan([slot], [50]), prompt)
    kv.release(0)
    match = kv.match([*prompt[:30], *[7] * 9])
    assert match.replay_to == 28  # dense blocks reach it, no resume point does
    slot = kv.admit(1, match)
    start = int(kv.num_computed[slot])
    assert linear_table(kv, 1, [slot]).tolist() == [[0] * (start // 4)]
    rows = paged_rows(kv, 1, [slot])
    assert rows.indptr.tolist() == [0, 0] and rows.last_page_len.tolist() == [0]


def test_hashes_of_a_tail_are_keys_of_no_segment():
    kv = KVCache(
        [GroupSpec("w", "window", 1, 64, 3)], num_pages=99, max_requests=2, max_model_len=99
    )
    keys = split_keys(kv.match([5, 5, 5, 5, 1, 9]).prompt.keys)
    assert tail_hashes(keys[3], 2)[1] == keys[3]
    assert tail_hashes(keys[3], 2)[0] != keys[4]  # the next token is 1, as is the block's distance
