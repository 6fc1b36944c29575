"""Steps of a life that look prompts up with extra keys, and take away what is cached."""

from __future__ import annotations

import numpy as np

from tests.support.kvcore.device import Text
from tests.support.kvcore.digest import digest
from tests.support.kvcore.promises import Promises

EXTRA_KEYS = (b"image 1", b"image 2", b"adapter")


class TakenAway:
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
        before = kv.num_free_pages
        stayed = self.try_call("evict_pages", self.lend(pages))
        if stayed is None:
            return
        used = np.unique([kv.tables[r.slot] for r in self.requests] or [[0]])
        # Of a segment that two requests computed the index has one page, and the table the other.
        used = set(used.tolist()).union(
            *(run.look().ravel().tolist() for run in kv.index.runs() if run.locks)
        )
        used |= self.job_pages()
        assert set(stayed.tolist()) <= set(pages) & used
        free = set(kv.pool.free_pages().tolist())
        assert kv.num_free_pages >= before
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

    def reset(self) -> None:
        """Everything is forgotten; running requests are in the way until they are ended."""
        kv = self.kv
        if self.copied:
            self.fails("reset", end_requests=True)
            self.end_jobs()
        if self.requests:
            before = digest(kv)
            self.fails("reset")
            assert digest(kv) == before
        ended = self.call("reset", end_requests=True)
        assert ended == [r.rid for r in self.requests]
        for r in self.requests:
            self.remember(Text(r.text.tokens, r.text.salt, r.text.extra_keys))
        self.requests.clear()
        assert kv.num_free_pages == kv.num_pages - 1
        self.promises = Promises(kv)
        for text in self.history[-8:]:
            assert self.match(text).dense_tokens == 0

    def remember(self, text: Text) -> None:
        """New prompts may start with `text`."""
        self.history.append(text)
        del self.history[:-64]
