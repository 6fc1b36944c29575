"""Crashes: at each byte that a disk could have stopped at, and of processes that are killed. What was kept before is there after, whole; of what was under way, all or nothing."""

from __future__ import annotations

import os
import random
import struct
import types

import pytest

from quire.kvcore.tier import pagefile
from tests.kvcore.tier.disk_model import (
    Traffic,
    check_order,
    files,
    lay_out,
    open_store,
    wrong_in,
)
from tests.kvcore.tier.test_disk import run_python

STEPS = int(os.environ.get("QUIRE_DISK_CRASH_STEPS", "6"))
SEED = int(os.environ.get("QUIRE_DISK_CRASH_SEED", "0"))
LOG, TABLES, PAGES = "records.sqlite-wal", "records.sqlite", "pages"


class Disk:
    """What a disk has after a crash: all that was flushed, and any part of what was written since, in any order.

    Attributes:
        handle: of the page file that is meant. flushed: its bytes.
        pending: (offset, bytes) of writes since, which may be there or not, or a part of each.
    """

    def __init__(self, monkeypatch):
        self.flushed, self.pending, self.handle = bytearray(), [], None
        system = types.SimpleNamespace(**vars(os))

        def pwritev(handle, views, start):
            if handle == self.handle:
                self.pending.append((start, b"".join(map(bytes, views))))
            return os.pwritev(handle, views, start)

        def fdatasync(handle):
            os.fdatasync(handle)
            if handle == self.handle:
                self.flushed, self.pending = self.with_writes(self.pending), []

        system.pwritev, system.fdatasync = pwritev, fdatasync
        monkeypatch.setattr(pagefile, "os", system)

    def with_writes(self, writes):
        data = bytearray(self.flushed)
        for start, part in writes:
            data.extend(bytes(max(0, start + len(part) - len(data))))
            data[start : start + len(part)] = part
        return data

    def after_crash(self, dice):
        """The page file with a random part of what was not flushed, some writes torn."""
        some = []
        for start, part in self.pending:
            fate = dice.choice(["none", "all", "head", "tail", "sectors"])
            cut = dice.randrange(len(part) + 1)
            if fate in ("all", "head"):
                some.append((start, part if fate == "all" else part[:cut]))
            elif fate == "tail":
                some.append((start + cut, part[cut:]))
            elif fate == "sectors":
                some += [
                    (start + i, part[i : i + 512])
                    for i in range(0, len(part), 512)
                    if dice.random() < 0.5
                ]
        dice.shuffle(some)
        return bytes(self.with_writes(some))


def cuts(before: bytes, after: bytes) -> list[int]:
    """Where writing `after` over `before` may have stopped: at borders of what SQLite writes in one go, and inside."""
    changed = [i for i in range(len(after)) if i >= len(before) or after[i] != before[i]]
    if not changed:
        return []
    first, last = changed[0], changed[-1] + 1
    frame = 24 + struct.unpack(">I", after[8:12])[0]
    borders = {first, last, 0, 4, 24, 32}
    for start in range(32, len(after) + 1, frame):
        borders |= {start, start + 8, start + 16, start + 24, start + 24 + 512, start + frame - 1}
    near = {b + d for b in borders for d in (-1, 0, 1)}
    return sorted(b for b in near if first <= b <= last)


def torn(before: bytes, after: bytes, cut: int) -> bytes:
    return after[:cut] + before[cut:]


class Crashes:
    """Opens a store as it may be after a crash, and compares."""

    def __init__(self, folder):
        self.folder, self.tried = folder, 0

    def check(self, image, *outcomes):
        """It has the records of one of `outcomes`, with their contents; returns of which."""
        self.tried += 1
        lay_out(self.folder, image)
        with open_store(self.folder, direct=False, workers=1) as store:
            found = list(store.records())
            check_order(found)
            assert wrong_in(store, found) == []
            at = [i for i, kept in enumerate(outcomes) if set(found) == set(kept)]
            assert at, (len(found), [len(kept) for kept in outcomes])
            assert store.num_dropped == 0
        return at[0]


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_crash_at_any_byte(folder, monkeypatch, checkpoints):
    """Random traffic; for each call, and between the calls, the disk as a crash may leave it: the page file with any part of what was not flushed; the log up to any byte; the tables, where the log is merged into them, with any part of that."""
    dice, disk = random.Random(SEED + checkpoints), Disk(monkeypatch)
    crashes, ends = Crashes(f"{folder}-crashed"), [0, 0]
    with open_store(folder) as store:
        disk.handle = store._pages.file._handle
        if checkpoints:
            store._records._db.execute("PRAGMA wal_autocheckpoint = 3")
        states = []  # (files, kept) as calls begin and end

        def tell(what, _):
            states.append((files(folder), list(traffic.kept.values()), disk.pending[:]))
            if what != "done":
                for _ in range(3):  # pages written, and no record of them yet
                    image = states[-1][0] | {PAGES: disk.after_crash(dice)}
                    crashes.check(image, states[-1][1])

        traffic = Traffic(store, SEED + checkpoints, tell=tell)
        for _ in range(STEPS):
            states.clear()
            traffic.step()
            if not states:
                continue
            (before, old, _), (after, new, _) = states
            log, tables = (before.get(LOG, b""), after[LOG]), (before[TABLES], after[TABLES])
            points = cuts(*log)
            for cut in [*points, *(dice.randrange(points[0], points[-1]) for _ in range(3))]:
                image = before | {LOG: torn(*log, cut), PAGES: disk.after_crash(dice)}
                ends[crashes.check(image, old, new)] += 1
            for _ in range(3):  # its sectors in any order
                data = bytearray(log[1])
                for start in range(points[0] // 512 * 512, len(data), 512):
                    if dice.random() < 0.2:
                        data[start : start + 512] = log[0][start : start + 512].ljust(512, b"\0")
                crashes.check(
                    before | {LOG: bytes(data)} | {PAGES: disk.after_crash(dice)}, old, new
                )
            image = after | {PAGES: disk.after_crash(dice)}
            assert crashes.check(image | {TABLES: tables[0]}, new) == 0  # the call has returned
            if tables[0] != tables[1]:
                for _ in range(6):  # merged in part
                    data = bytearray(tables[0].ljust(len(tables[1]), b"\0"))
                    for start in range(0, len(data), 4096):
                        if dice.random() < 0.5:
                            end = start + dice.choice([4096, 4096, dice.randrange(4096)])
                            data[start:end] = tables[1][start:end]
                    crashes.check(image | {TABLES: bytes(data)}, new)
    print(f"{crashes.tried} crashes, of which in commits {ends}")
    assert (
        ends[0] > 10 * STEPS and ends[1] > STEPS // 2
    )  # most bytes of a commit are before its end


def test_writes_after_a_removal_meet_no_record(folder, monkeypatch):
    """The pages of what was removed are written anew at once, and a crash finds any part of that."""
    dice, disk = random.Random(0), Disk(monkeypatch)
    crashes = Crashes(f"{folder}-crashed")
    with open_store(folder, num_pages=12) as store:  # so few that each page is soon taken again
        disk.handle = store._pages.file._handle
        traffic = Traffic(store, 3)
        for _ in range(60):
            traffic.step()
            free = traffic.free()[:3]
            store.write(free, [dice.randbytes(96) for _ in free]).result(30)
            image = files(folder) | {PAGES: disk.after_crash(dice)}
            crashes.check(image, traffic.kept.values())


def test_killed_processes(tmp_path):
    """A process is killed at random moments, again and again on the same folder. All that was acknowledged is there; of the last call, all or nothing."""
    text = run_python(
        """
        import os, pickle, random, signal, time
        from tests.kvcore.tier.disk_model import Traffic, check_order, open_store, wrong_in
        folder, dice, kept, outcomes = sys.argv[1], random.Random(int(sys.argv[2])), [], [0, 0, 0]
        for life in range(int(sys.argv[3])):
            out, into = os.pipe()
            child = os.fork()
            if not child:
                os.close(out)
                def tell(what, records):
                    data = pickle.dumps((what, records))
                    os.write(into, len(data).to_bytes(4, "little") + data)
                with open_store(folder) as store:
                    traffic = Traffic(store, life, kept, tell)
                    while True: traffic.step()
            os.close(into)
            time.sleep(dice.uniform(0.01, 0.12))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            data = open(out, "rb").read()
            before = after = set(kept)
            while data:
                size = int.from_bytes(data[:4], "little")
                what, records = pickle.loads(data[4 : 4 + size])
                data = data[4 + size :]
                if what == "done": before = after
                else: after = before | set(records) if what == "added" else before - set(records)
            with open_store(folder) as store:
                kept = list(store.records())
                check_order(kept)
                assert store.num_dropped == 0
                assert set(kept) in (before, after), (len(kept), len(before), len(after))
                assert wrong_in(store, kept) == []
            outcomes[(before != after) * (1 + (set(kept) == after))] += 1
        print(*outcomes)
        """,
        str(tmp_path / "store"),  # of a disk, whose flushes are where it is killed mostly
        str(SEED),
        os.environ.get("QUIRE_DISK_KILLS", "20"),
    )
    print(text)
    _, without, with_it = map(int, text.split())
    assert without + with_it > 0, "no process was killed within a call"
