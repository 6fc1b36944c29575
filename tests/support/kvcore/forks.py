"""Steps of a life that fork requests, look prompts up with extra keys, and take away what is cached."""

from __future__ import annotations

import copy

import numpy as np

from quire.kvcore import OutOfPages
from tests.support.kvcore.device import Text
from tests.support.kvcore.digest import digest
from tests.support.kvcore.promises import Promises

EXTRA_KEYS = (b"image 1", b"image 2", b"adapter")


class Forks:
    """A part of `shadow.Life`."""

    def new_extra_keys(self, base: Text | None, num_tokens: int) -> list:
        """Extra keys of a prompt of `num_tokens`: mostly those of the text that it starts like, now and then one more."""
        rng, found = self.rng, []
        if base is not None and rng.random() < 0.9:
            found = list(base.extra_keys)
        if rng.random() < 0.15:
            start = rng.randrange(num_tokens)
            stop = rng.choice((None, rng.randint(start + 1, num_tokens)))
            key = rng.choice(EXTRA_KEYS)
            found = [e for e in found if (e[0], e[2]) != (start, key)] + [(start, stop, key)]
        return found

    def fork(self) -> None:
        """A request goes on as two."""
        kv, rng = self.kv, self.rng
        if not self.requests or not kv.num_free_slots:
            return
        r, rid = rng.choice(self.requests), ("fork", next(self.names))
        before, stock = digest(kv), kv.num_free_pages + kv.num_evictable_pages
        made = self.try_call("fork", r.slot, rid)
        if made is None:
            return
        if isinstance(made, OutOfPages):
            assert made.needed > made.free + made.evictable == stock
            assert sum(made.per_group.values()) == made.needed
            assert digest(kv) == before, "a fork that did not fit left traces"
            return
        assert kv.slot_of(rid) == made.slot != r.slot
        # No more than the blocks that are open, or past the last segment with a key.
        open_tokens = kv.alignment + kv.layout.lookahead + kv.max_draft_tokens
        most = sum(
            1 if g.kind == "state" else -(-open_tokens // g.block_size) + 1
            for g in self.device.specs
        )
        assert len(made.copies) <= most or not kv.enable_caching
        self.device.wipe_free_pages()
        self.device.copy(made.copies)
        child = copy.copy(r)
        child.rid, child.slot, child.text = rid, made.slot, r.text.copy()
        self.requests.append(child)
        for request in (r, child):
            self.device.check(request)
        low = self.call("lowest_rollback", r.slot)
        assert low == self.call("lowest_rollback", child.slot)

    def abort(self) -> None:
        """A request is released and leaves nothing more behind than its commits did."""
        if not self.requests:
            return
        r = self.requests.pop(self.rng.randrange(len(self.requests)))
        text = Text(r.text.tokens[: r.computed] or [0], r.text.salt, r.text.extra_keys)
        before = self.match(text)
        self.call("release", r.rid, discard=True)
        assert self.match(text).num_tokens == before.num_tokens, "what was discarded is findable"
        self.remember(text)

    def evict_pages(self) -> None:
        """Certain pages are to be free: only those stay that running requests have."""
        kv, rng = self.kv, self.rng
        pages = rng.choices(range(1, kv.num_pages), k=rng.choice((0, 1, 1, 4, kv.num_pages)))
        texts = [self.new_text() for _ in range(4)]
        hits = [self.match(text) for text in texts]
        rows = np.unique(self.device.memory[pages])
        withhold = rng.random() < 0.3 and len(pages) < 5
        withheld, before = kv.pool.withheld.copy(), kv.num_free_pages
        stayed = self.try_call("evict_pages", self.lend(pages), withhold=withhold)
        if stayed is None:
            return
        used = np.unique([kv.tables[r.slot] for r in self.requests] or [[0]])
        # Of a segment that two requests computed the index has one page, and the table the other.
        used = set(used.tolist()).union(
            *(run.look().ravel().tolist() for run in kv.index.runs() if run.locks)
        )
        assert set(stayed.tolist()) <= set(pages) & used
        free = set(kv.pool.free_pages().tolist()) | kv.pool.withheld
        new = set(pages) - set(stayed.tolist()) - withheld if withhold else set()
        assert kv.pool.withheld == withheld | new
        assert kv.num_free_pages >= before - len(new)
        assert free >= set(pages) - set(stayed.tolist()) and not free & set(stayed.tolist())
        kinds = {g.kind for g in kv.layout.groups}
        between = "window" in kinds and "state" not in kinds
        for text, hit in zip(texts, hits, strict=True):
            mine = [
                text.rows(tag, g.lookahead)[: hit.num_tokens]
                for tag, g in zip(self.device.tags, self.device.specs, strict=True)
            ]
            if not between and not np.isin(np.concatenate(mine), rows).any():
                assert self.match(text).num_tokens == hit.num_tokens, "evicted too much"

    def restore_pages(self) -> None:
        """Some pages that were withheld may be handed out again."""
        withheld = sorted(self.kv.pool.withheld)
        some = self.rng.sample(withheld, self.rng.randint(0, len(withheld)))
        self.call("restore_pages", self.lend(some))
        assert self.kv.pool.withheld == set(withheld) - set(some)

    def reset(self) -> None:
        """Everything is forgotten; running requests are in the way until they are ended."""
        kv = self.kv
        if self.requests:
            before = digest(kv)
            self.fails("reset")
            assert digest(kv) == before
        ended = self.call("reset", end_requests=True)
        assert ended == [r.rid for r in self.requests]
        for r in self.requests:
            self.remember(Text(r.text.tokens, r.text.salt, r.text.extra_keys))
        self.requests.clear()
        assert kv.num_free_pages == kv.num_pages - 1 - len(kv.pool.withheld)
        self.promises = Promises(kv)
        for text in self.history[-8:]:
            assert self.match(text).dense_tokens == 0

    def remember(self, text: Text) -> None:
        """New prompts may start with `text`."""
        self.history.append(text)
        del self.history[:-64]
