"""Random traffic over a disk store, and what must be there after each step: a dict of records, whose contents follow from their keys."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np

from quire.kvcore.tier.disk import DiskStore
from quire.kvcore.tier.records import Record

PAGE_BYTES = 96  # of each 512 on the disk
LAYOUT = {"model": "m", "hash_seed": b"s"}


def open_store(folder, num_pages=40, **options):
    options = {"page_bytes": PAGE_BYTES, "layout": LAYOUT, "workers": 2} | options
    return DiskStore(folder, capacity=(num_pages - 1) * 512, **options)


def content(record: Record, index: int, page_bytes: int = PAGE_BYTES) -> bytes:
    seed = hashlib.sha256(record.kind.encode() + record.key + bytes([index])).digest()
    return (seed * (page_bytes // 32 + 1))[:page_bytes]


def contents(record: Record) -> dict[int, bytes]:
    return {page: content(record, i) for i, page in enumerate(record.pages) if page}


def wrong_in(store, records) -> list[Record]:
    """Those of `records` whose pages read otherwise than they were written."""
    wrong = []
    for record in records:
        expected = contents(record)
        buffers = np.zeros((len(expected), PAGE_BYTES), np.uint8)
        store.read(list(expected), buffers).result(30)
        if [row.tobytes() for row in buffers] != list(expected.values()):
            wrong.append(record)
    return wrong


def check_order(records) -> None:
    """Each segment after its parent, each resume point after its segment."""
    depths = {b"": 0}
    for record in records:
        if record.kind == "segment":
            assert depths[record.parent] + 1 == record.depth
            assert record.key not in depths
            depths[record.key] = record.depth
        else:
            assert depths[record.key] == record.depth


def ids(records):
    return {(r.kind, r.key) for r in records}


class Traffic:
    """Batches of records that come and go.

    Attributes:
        kept: records by kind and key, those that a store must have.
        tell: called with what begins and what is done, for who looks on.
    """

    def __init__(self, store, seed, kept=(), tell=lambda *_: None):
        self.store, self.dice, self.tell = store, random.Random(seed), tell
        self.kept = {(r.kind, r.key): r for r in kept}

    def free(self):
        used = {page for record in self.kept.values() for page in record.pages}
        free = [page for page in range(1, self.store.num_pages) if page not in used]
        self.dice.shuffle(free)
        return free

    def batch(self):
        """New records, parents first, and their pages."""
        free, new = self.free(), {}
        for _ in range(self.dice.randint(1, 5)):
            segments = [r for r in [*self.kept.values(), *new.values()] if r.kind == "segment"]
            on = self.dice.choice([None, *segments])
            if on is not None and self.dice.random() < 0.4:
                if ("point", on.key) in self.kept.keys() | new.keys():
                    continue
                kind, key, parent, depth = "point", on.key, on.parent, on.depth
            else:
                kind, key = "segment", self.dice.randbytes(32)
                parent, depth = (b"", 1) if on is None else (on.key, on.depth + 1)
            count = min(self.dice.randint(0, 4), len(free))
            pages = [free.pop() for _ in range(count)] + [0] * (kind == "point")
            self.dice.shuffle(pages)
            new[kind, key] = Record(kind, key, parent, depth, tuple(pages))
        return list(new.values())

    def add(self, records):
        pages = {page: data for r in records for page, data in contents(r).items()}
        order = list(pages)
        self.dice.shuffle(order)
        cut = self.dice.randint(0, len(order))
        jobs = [
            self.store.write(part, [pages[page] for page in part])
            for part in (order[:cut], order[cut:])
        ]
        for job in jobs:
            job.result(30)
        self.tell("added", records)
        self.store.added(records)
        self.kept.update({(r.kind, r.key): r for r in records})
        self.tell("done", records)

    def lost_with(self, record):
        """`record` and what needs it, children first."""
        if record.kind == "point":
            return [record]
        lost = [
            record,
            *(r for r in self.kept.values() if r.kind == "point" and r.key == record.key),
        ]
        for other in self.kept.values():
            if other.kind == "segment" and other.parent == record.key:
                lost += self.lost_with(other)
        return sorted(lost, key=lambda r: (r.depth, r.kind == "point"), reverse=True)

    def remove(self, records):
        self.tell("removed", records)
        self.store.removed(records)
        for r in records:
            del self.kept[r.kind, r.key]
        self.tell("done", records)

    def step(self):
        if self.kept and (self.dice.random() < 0.35 or len(self.free()) < 6):
            self.remove(self.lost_with(self.dice.choice(list(self.kept.values()))))
        elif batch := self.batch():
            self.add(batch)

    def check(self, store=None):
        store = store or self.store
        found = list(store.records())
        check_order(found)
        assert {(r.kind, r.key): r for r in found} == self.kept
        assert wrong_in(store, found) == []


def files(folder):
    """Contents of a store as they are now, by name."""
    names = [name for name in sorted(os.listdir(folder)) if not name.endswith(("lock", "-shm"))]
    return {name: open(os.path.join(folder, name), "rb").read() for name in names}


def lay_out(folder, image):
    """A folder with these contents and no others."""
    os.makedirs(folder, exist_ok=True)
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    for name, data in image.items():
        with open(os.path.join(folder, name), "wb") as file:
            file.write(data)
