"""An engine that schedules ahead, and a device that does its work later, in order: no row may be wrong when it is read.

The host plans steps, tells them on and publishes them in any order that the cache allows. The device has a queue: a
step takes along what a launch does (its arrays, and a copy of the tables), and runs when `Host.run` says, against memory
that all groups share. A row's content is a hash of its table, its position and all tokens before and at it, computed here
from token lists. Nothing of kvcore is asked what is right.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from quire.kvcore import (
    GroupSpec,
    KVCache,
    OutOfPages,
    StepPlan,
    linear_table,
    paged_rows,
)

STATE_ROWS, STATE_READS = 64, 4


def tag_of(table: int) -> int:
    return int.from_bytes(blake2b(b"table %d" % table, digest_size=7).digest(), "little")


@dataclass(eq=False)
class Sequence:
    rid: int
    slot: int
    salt: bytes
    tokens: list[int]
    prompt: int
    first: int  # before it nothing is computed or cached: where a replay starts
    exact: int  # from here on windows are exact
    done: int  # tokens computed, as the engine counts them
    waiting: bool = False  # in a step that has not advanced
    reserved: int = 0  # tokens up to which pages are, past `done`
    hashes: list[int] = field(default_factory=list)  # of the first tokens, the salt with them

    def rows(self, end: int) -> list[int]:
        """Contents of its rows before position `end`, but for the tag of a table."""
        for token in self.tokens[len(self.hashes) : end]:
            before = self.hashes[-1] if self.hashes else len(self.salt)
            data = b"%d %d" % (before, token)
            self.hashes.append(int.from_bytes(blake2b(data, digest_size=7).digest(), "little"))
        return self.hashes[:end]

    def cut(self, n: int) -> None:
        del self.tokens[n:], self.hashes[n:]


@dataclass(eq=False)
class Work:
    """What a launch takes along."""

    plan: StepPlan
    full: list[int]  # tokens of each request, those included that are only reserved
    after: np.ndarray | None  # copies of states after the step, once it has advanced
    tables: list[np.ndarray]  # [n, width] of each table, as of the launch
    sequences: list[Sequence]
    rows: list[list[int]]  # [n] contents of positions up to the end of the step
    starts: list[int]
    ends: list[int]
    stays: list[int] = field(default_factory=list)  # ends, once it has advanced, of what stays


class Host:
    """Random traffic through one cache.

    Args:
        seed: of everything.
        specs, options: of the cache.
        writes_first: attention reads all rows from pages, after the step has written its own.
        keeps_tables: the device appends to tables of its own what `reserve` returns, or slots say.
    """

    def __init__(
        self, seed, specs: list[GroupSpec], *, writes_first=False, keeps_tables=False, **options
    ) -> None:
        self.rng, self.writes_first, self.keeps_tables = (
            random.Random(seed),
            writes_first,
            keeps_tables,
        )
        self.kv = kv = KVCache(specs, **options)
        self.specs = kv.layout.groups
        self.tags = [tag_of(t) for t in range(len(self.specs))]
        self.memory = np.zeros(
            (kv.num_pages, max(STATE_ROWS, *(g.block_size for g in specs))), dtype=np.int64
        )
        self.running: dict[int, Sequence] = {}
        self.open: list[Work] = []  # planned, not published
        self.queue: deque[Work] = deque()
        self.texts: list[tuple[bytes, list[int]]] = [(b"", [])]
        self.counts: Counter[str] = Counter()
        self.own: dict[int, list[dict[int, int]]] = {}  # tables that the device keeps, by request
        self.next_id = 0

    # Requests.

    def admit(self) -> None:
        rng, kv = self.rng, self.kv
        if not kv.num_free_slots:
            return
        salt, known = rng.choice(
            [*self.texts[-8:], *((s.salt, s.tokens) for s in self.running.values())]
        )
        tokens = known[: rng.choice((0, rng.randint(0, len(known)), len(known)))]
        tokens = tokens + rng.choices((0, 1), k=rng.choice((1, 3, 20, 60)))
        tokens = tokens[: kv.max_model_len - 8]
        match = kv.match(tokens, salt=salt)
        rid, self.next_id = self.next_id, self.next_id + 1
        slot = kv.admit(rid, match)
        s = Sequence(
            rid,
            slot,
            salt,
            tokens,
            len(tokens),
            match.replay_from or 0,
            match.replay_to or 0,
            match.num_saved_tokens,
        )
        self.running[rid] = s
        self.counts["hits"] += match.num_tokens > 0
        if self.keeps_tables:
            self.own[rid] = [self._started(t, s) for t in range(len(self.specs))]

    def _started(self, t: int, s: Sequence) -> dict[int, int]:
        """Entries of a worker's own table as a request comes: block -> page."""
        spec, row = self.specs[t], self.kv.table(t)[s.slot]
        known = s.done if spec.kind == "window" else max(s.done, s.exact)
        stop = -(-known // spec.block_size)
        first = max(0, stop - len(row)) if spec.kind == "window" else 0
        return {b: int(row[b % len(row)]) for b in range(first, stop)}

    def cut_tables(self, s: Sequence) -> None:
        """What was reserved past the tokens of a request is not its any more."""
        for t, own in enumerate(self.own.get(s.rid, ())):
            spec = self.specs[t]
            known = s.done if spec.kind == "window" else max(s.done, s.exact)
            for block in [b for b in own if b >= -(-known // spec.block_size)]:
                del own[block]

    def release(self, s: Sequence) -> None:
        """End a request; what is in flight of it does not matter any more."""
        self.kv.release(s.rid)
        del self.running[s.rid]
        self.own.pop(s.rid, None)
        self.texts.append((s.salt, s.tokens[: s.done]))

    # Steps.

    def want(self, s: Sequence) -> int:
        """How many tokens a request computes next; 0 for none."""
        room = self.kv.max_model_len - s.done
        left = len(s.tokens) - s.done
        if left > 1:
            n = min(left, self.rng.choice((1, 5, 16, 40, 999)))
        elif room > 1:
            n = (
                1
                if self.rng.random() < 0.8
                else min(room, 1 + self.rng.randint(0, self.kv.max_draft_tokens))
            )
            s.tokens += self.rng.choices((0, 1), k=max(0, n - left))
        else:
            return 0
        n = int(self.kv.cut([s.slot], [n])[0])
        return n

    def drop(self, s: Sequence) -> None:
        """A request leaves the step before that is launched, or as it is called off."""
        self.kv.advance([s.slot], [s.done])
        s.reserved, s.waiting = s.done, False
        self.cut_tables(s)

    def build(self) -> Work | None:
        """A step with some requests, some of them preempted or dropped on the way; planned and launched."""
        rng, kv = self.rng, self.kv
        chosen: dict[int, int] = {}
        order, skipped = list(self.running.values()), rng.choice((0, 0, 0.3))
        for s in rng.sample(order, len(order)) if skipped else order:
            if s.rid not in self.running or s.waiting or rng.random() < skipped:
                continue
            n = self.want(s)
            ahead = rng.choice((0, 0, kv.max_draft_tokens))
            while n:
                free, held = kv.num_free_pages, kv.num_evictable_pages
                evicted = kv.stats()["evicted_segments"] + kv.stats()["evicted_resume_points"]
                until = min(s.done + n + ahead, kv.max_model_len)
                part = kv.reserve(s.slot, until)
                if not isinstance(part, OutOfPages):
                    chosen[s.rid] = n
                    s.reserved = until
                    if self.keeps_tables and kv.reads == "pages":
                        self._append(s, part)
                    self.counts["added"] += 1
                    break
                assert part.needed > part.free + part.evictable == free + held
                assert sum(part.per_group.values()) == part.needed
                assert (
                    evicted == kv.stats()["evicted_segments"] + kv.stats()["evicted_resume_points"]
                )
                self.counts["out of pages"] += 1
                victims = [v for v in self.running.values() if not v.waiting and v is not s]
                if not victims:
                    s.cut(max(s.prompt, s.done))
                    break
                victim = rng.choice(victims)
                if chosen.pop(victim.rid, None):
                    self.counts["dropped"] += 1
                self.release(victim)
                self.counts["preempted"] += 1
            if rng.random() < 0.1:
                self.admit()
            if rng.random() < 0.03 and chosen:
                s = self.running[rng.choice(list(chosen))]
                del chosen[s.rid]
                if rng.random() < 0.5:  # else what is reserved stays for a later step
                    self.drop(s)
                s.cut(max(s.prompt, s.done))
            if rng.random() < 0.05:
                kv.evict(3)
        if not chosen:
            return None
        return self.launch([self.running[r] for r in chosen], list(chosen.values()))

    def launch(self, sequences: list[Sequence], counts: list[int]) -> Work:
        kv, slots = self.kv, [s.slot for s in sequences]
        starts = [s.done for s in sequences]
        ends = [start + n for start, n in zip(starts, counts, strict=True)]
        reserved = [s.reserved for s in sequences]
        plan, full = kv.arrays(slots, starts, ends), kv.arrays(slots, starts, reserved)
        assert plan.slots.tolist() == slots
        if self.keeps_tables:
            if kv.reads == "step":
                self._append_of(full, sequences)
            tables = [[dict(self.own[s.rid][t]) for s in sequences] for t in range(len(self.specs))]
        elif self.writes_first:
            tables = [
                None if g.kind == "state" else self.during(full, t)
                for t, g in enumerate(self.specs)
            ]
        else:
            tables = [
                kv.table(t)[plan.slots].copy() for t in range(len(self.specs))
            ]
        rows = [s.rows(end) for s, end in zip(sequences, ends, strict=True)]
        work = Work(plan, reserved, None, tables, sequences, rows, starts, ends)
        self.queue.append(work)
        self.open.append(work)
        for s in sequences:
            s.waiting = True
        return work

    def during(self, plan: StepPlan, t: int) -> np.ndarray:
        """Linear tables of a step that writes before it reads; the same as compressed rows."""
        linear, rows = (f(self.kv, t, plan) for f in (linear_table, paged_rows))
        for i, length in enumerate(plan.seq_lens.tolist()):
            first, size = int(rows.first_tokens[i]), self.specs[t].block_size
            pages = rows.indices[rows.indptr[i] : rows.indptr[i + 1]]
            assert (linear[i, first // size :][: len(pages)] == pages).all() and not linear[
                i, : first // size
            ].any()
            assert first + (len(pages) - 1) * size + rows.last_page_len[i] == length
        return linear

    def _append(self, s: Sequence, new: list[list[int]]) -> None:
        """New pages of each table, in the order of its blocks."""
        for own, pages in zip(self.own[s.rid], new, strict=True):
            first = max(own, default=-1) + 1
            own.update(zip(range(first, first + len(pages)), pages, strict=True))

    def _append_of(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        """Blocks that start in a step and have a page: of windows some have none."""
        for t, spec in enumerate(self.specs):
            for i, s in enumerate(sequences):
                rows = slice(*plan.cu_seqlens_q[i : i + 2].tolist())
                positions, slots = plan.positions[rows], plan.slot_mapping[t, rows]
                at = (positions % spec.block_size == 0) & (slots >= 0)
                blocks = (x[at] // spec.block_size for x in (positions, slots))
                self.own[s.rid][t].update(zip(*(x.tolist() for x in blocks), strict=True))

    def advance(self, work: Work, ends: list[int] | None = None) -> None:
        """Its rows count as computed, those of drafts up to `ends`."""
        work.stays = work.ends if ends is None else ends
        work.after = self.kv.advance([s.slot for s in work.sequences], work.stays)
        for s, end in zip(work.sequences, work.stays, strict=True):
            s.done, s.waiting = end, False
            s.reserved = end
            self.cut_tables(s)

    def commit(self, work: Work) -> None:
        """Its tokens are known; of drafts some are rejected, if it has not advanced."""
        if work.after is None:
            ends = None
            if self.kv.max_draft_tokens and self.rng.random() < 0.7:
                each = zip(work.sequences, work.starts, work.ends, work.full, strict=True)
                ends = [
                    b if b <= s.prompt
                    else self.rng.randint(max(a + 1, most - self.kv.max_draft_tokens), b)
                    for s, a, b, most in each
                ]  # fmt: skip
                self.counts["rejected"] += sum(a < b for a, b in zip(ends, work.ends, strict=True))
            self.advance(work, ends)
            for s in work.sequences:
                s.cut(max(s.prompt, s.done))
        here = [i for i, s in enumerate(work.sequences) if s.rid in self.running]
        some = [(work.sequences[i], work.starts[i], work.stays[i]) for i in here]
        ids = [t for s, a, b in some for t in s.tokens[a:b]]
        if some:
            self.kv.publish([s.slot for s, _, _ in some], [b for _, _, b in some], ids)
        self.open.remove(work)
        self.counts["committed"] += 1

    # The device.

    def run(self, n: int) -> None:
        """Do the work of the first `n` steps of the queue. A step runs once what is before it did, and knows its copies when it
        has advanced."""
        while n and self.queue and self.queue[0].after is not None:
            self._run(self.queue.popleft())
            n -= 1

    def _run(self, work: Work) -> None:
        memory, plan = self.memory, work.plan
        memory[plan.copies[:, 1]] = memory[plan.copies[:, 0]]
        if not self.writes_first:
            self._check(work, wrote=False)
        written = set()
        for i, (a, b) in enumerate(
            zip(plan.cu_seqlens_q[:-1].tolist(), plan.cu_seqlens_q[1:].tolist(), strict=True)
        ):
            for t, (spec, tag) in enumerate(zip(self.specs, self.tags, strict=True)):
                rows, start, end = work.rows[i], work.starts[i], work.ends[i]
                if spec.kind == "state":
                    page = int(plan.state_pages[t, i])
                    for p in range(start, end):
                        memory[page, p % STATE_ROWS] = rows[p] ^ tag
                    assert ("page", page) not in written
                    written.add(("page", page))
                    continue
                for p, slot in zip(
                    range(start, end), plan.slot_mapping[t, a:b].tolist(), strict=True
                ):
                    if slot >= 0:
                        page, row = divmod(slot, spec.block_size)
                        self.counts["wrong"] += not page or (page, row) in written
                        written.add((page, row))
                        memory[page, row] = self._exact(work.sequences[i], spec, p, rows[p] ^ tag)
        self._check(work, wrote=True)  # the writes of the others may come before these reads
        after = work.after
        memory[after[:, 1]] = memory[after[:, 0]]

    def _exact(self, s: Sequence, spec: GroupSpec, p: int, row: int) -> int:
        """What the model writes: the first rows of a replay see windows with nothing before them."""
        return (
            -1 if spec.kind == "window" and s.first <= p <= s.exact - spec.sliding_window else row
        )

    def _check(self, work: Work, wrote: bool) -> None:
        """Every row that each query sees is there, before (unless all is read from pages) or after the step wrote its own."""
        for i, s in enumerate(work.sequences):
            start, end, expected = work.starts[i], work.ends[i], np.array(work.rows[i])
            for t, (spec, tag) in enumerate(zip(self.specs, self.tags, strict=True)):
                if spec.kind == "state":
                    last = end if wrote else start
                    positions = np.arange(max(0, last - STATE_READS), last)
                    where = work.plan.state_pages[t, i], positions % STATE_ROWS
                else:
                    first = 0
                    if spec.kind == "window":
                        if start < s.exact:  # what these see is not exact, and nobody else sees it
                            continue
                        first = max(0, s.first, start - spec.sliding_window + 1)
                    positions = np.arange(first, end if self.writes_first else start)
                    blocks, within = np.divmod(positions, spec.block_size)
                    where = self._pages(work.tables[t][i], blocks), within
                self.counts["rows"] += len(positions)
                self.counts["wrong"] += int((self.memory[where] != expected[positions] ^ tag).sum())

    def _pages(self, table, blocks: np.ndarray) -> np.ndarray:
        if isinstance(table, dict):
            return np.array([table.get(b, 0) for b in blocks.tolist()], dtype=np.int64)
        return table[blocks] if self.writes_first else table[blocks % len(table)]

    # Traffic.

    def go(self, steps: int, ahead: int) -> Counter:
        """So many turns, with at most `ahead` steps that are planned and not committed beside the newest."""
        rng = self.rng
        for _ in range(steps):
            if rng.random() < 0.4:
                self.admit()
            idle = [s for s in self.running.values() if not s.waiting]
            if idle and rng.random() < 0.12:
                self.release(rng.choice(idle))
            if rng.random() < 0.85:
                self.build()
            while self.open:
                waiting = [x for x in self.open if x.after is None]
                if waiting and (rng.random() < 0.6):
                    x = rng.choice(waiting)
                    if ahead and rng.random() < 0.8:
                        self.advance(x)
                    elif self._is_next(x):
                        self.commit(x)
                elif len(self.open) > ahead or rng.random() < 0.5:
                    self.commit(rng.choice([x for x in self.open if self._is_next(x)]))
                else:
                    break
            self.run(rng.randint(0, 3))
            if rng.random() < 0.2:
                self.kv.check_invariants()
        while self.open:
            self.commit(next(x for x in self.open if self._is_next(x)))
        self.run(len(self.queue))
        for s in list(self.running.values()):
            self.release(s)
        self.kv.clear()
        self.kv.check_invariants()
        assert self.kv.num_free_pages == self.kv.num_pages - 1
        return self.counts

    def _is_next(self, x: Work) -> bool:
        """Whether no earlier step of its requests waits for its tokens."""
        mine = {s.rid for s in x.sequences if s.rid in self.running}
        for other in self.open:
            if other is x:
                return True
            if mine & {s.rid for s in other.sequences}:
                return False
        return True
