"""Snapshots whose check is right and whose contents are not: each is refused by field, or makes a cache that is whole and works."""

from __future__ import annotations

import copy
import json
import os
import stat
import struct
from collections.abc import Iterator
from hashlib import sha256

import numpy as np
import pytest

from quire.kvcore import LRU, EventLog, KVCache, StepPlan, snapshot
from tests.kvcore.test_events import MIXES
from tests.kvcore.test_snapshot import MIX, engine, used
from tests.support.budgets import budget
from tests.support.kvcore.engine import groups

LENGTH = 400
KEY = b"only the engine knows"


def cache(mix, **options) -> KVCache:
    base = {"num_pages": 300, "max_requests": 4, "max_model_len": LENGTH, "hash_seed": b"my seed"}
    return KVCache(groups(*mix), **(base | {"events": EventLog()} | options))


def opened(data: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Header and arrays of a snapshot."""
    length = int.from_bytes(data[12:16], "little")
    header, at, arrays = json.loads(data[16 : 16 + length]), 16 + length, {}
    for name, (dtype, shape) in header["arrays"].items():
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(data, dtype, count, at).reshape(shape).copy()
        at += count * arrays[name].itemsize
    return header, arrays


def signed(header: object, arrays: dict[str, np.ndarray], *, more: bytes = b"") -> bytes:
    """A snapshot with a right check. The header's own list of arrays is left as it is."""
    text = json.dumps(header).encode()
    data = struct.pack("<8sII", b"quire-kv", 1, len(text)) + text
    data += b"".join(a.tobytes() for a in arrays.values()) + more
    return data + sha256(data).digest()


def described(header: dict, arrays: dict[str, np.ndarray]) -> bytes:
    """As `signed`, with the list that fits the arrays."""
    listed = {name: [a.dtype.name, list(a.shape)] for name, a in arrays.items()}
    return signed({**header, "arrays": listed}, arrays)


@pytest.fixture(scope="module", params=range(len(MIXES)), ids=lambda i: str(MIXES[i]))
def saved(request) -> tuple[tuple, bytes, list[list[int]]]:
    mix = MIXES[request.param]
    e = engine(mix, events=EventLog())
    history = used(e)
    return mix, snapshot.dumps(e.kv), [t for t in history if t]


def serve(kv: KVCache, history: list[list[int]]) -> None:
    """Requests that hit what was restored, and the end of everything."""
    for i, tokens in enumerate(history[:8]):
        prompt = [*tokens, 1, 2][: LENGTH - 10]
        slot = kv.admit(i, kv.match(prompt))
        start = int(kv.num_computed[slot])
        while start < len(prompt):
            [n] = kv.cut([slot], [min(32, len(prompt) - start)]).tolist()
            plan = kv.plan([slot], [n])
            assert isinstance(plan, StepPlan)
            kv.commit(plan, prompt[start : start + n])
            start += n
        kv.check_invariants()
        kv.release(i)
    kv.check_invariants()
    kv.evict(kv.num_evictable_pages // 2)
    kv.check_invariants()
    kv.clear()
    kv.check_invariants()
    assert kv.num_free_pages == kv.num_pages - 1


def state(kv: KVCache) -> tuple:
    """What a failed restore may not change."""
    log = kv._announcer and kv._announcer.log
    return (
        kv.pool.free_pages().tolist(), kv.pool.counts.tolist(), kv.stats(), kv.index.tick, list(kv.index.runs()),
        kv.index.policy.pop(), len(kv.index._useless), log and log.next_number,
        kv._announcer and len(kv._announcer.tokens),
    )  # fmt: skip


class Judge:
    """Loads snapshots into an empty cache, which stays in use for as long as they are refused."""

    def __init__(self, mix: tuple, history: list[list[int]]) -> None:
        self.mix, self.history = mix, history
        self._empty()

    def _empty(self) -> None:
        self.kv = cache(self.mix)
        self.before = state(self.kv)

    def __call__(self, data: bytes) -> str | None:
        """The message of a snapshot that is refused; None for one that makes a whole cache."""
        try:
            snapshot.loads(self.kv, data)
        except ValueError as error:
            assert str(error).startswith("snapshot: ")
            assert state(self.kv) == self.before
            self.kv.check_invariants()
            return str(error)
        self.kv.check_invariants()
        serve(self.kv, self.history)
        self._empty()
        return None


@pytest.fixture
def judge(saved) -> Iterator[Judge]:
    """After the test, the cache that refused the last snapshots has to work."""
    mix, _, history = saved
    judge = Judge(mix, history)
    yield judge
    serve(judge.kv, history[:2])


def test_a_good_one_is_taken(saved, judge):
    _, data, _ = saved
    assert described(*opened(data)) == data
    assert judge(data) is None


JUNK = (None, True, False, -1, 1.5, float("nan"), "1", "x", [], [1], {}, {"a": 1}, 2**63, 10**30)


def test_every_field_of_the_header_with_junk(saved, judge):
    _, data, _ = saved
    header, arrays = opened(data)
    for name in header:
        for value in JUNK:
            if value == header[name]:
                continue
            message = judge(signed({**header, name: value}, arrays))
            assert message is not None and name in message, (name, value, message)
        message = judge(signed({k: v for k, v in header.items() if k != name}, arrays))
        assert message is not None and name in message
    for value in (*JUNK, "[" * 100_000):
        assert judge(signed(value, arrays))
    deep = b"[" * 100_000
    data = struct.pack("<8sII", b"quire-kv", 1, len(deep)) + deep
    assert "header" in judge(data + sha256(data).digest())


def test_a_tick_and_times_of_use(saved, judge):
    _, data, _ = saved
    header, arrays = opened(data)
    assert "tick" in judge(signed({**header, "tick": "7"}, arrays))
    assert "last use" in judge(signed({**header, "tick": 0}, arrays))
    assert judge(signed({**header, "tick": 2**40}, arrays)) is None


def test_every_description_of_an_array(saved, judge):
    _, data, _ = saved
    header, arrays = opened(data)
    for name, (dtype, shape) in header["arrays"].items():
        for wrong in (
            *JUNK, ["object", shape], ["float64", shape], [">i8", shape], ["nonsense", shape], ["O", shape], [None, shape],
            [dtype, None], [dtype, 3], [dtype, []], [dtype, [*shape, 1]], [dtype, [-1, *shape[1:]]],
            [dtype, [10**30, *shape[1:]]], [dtype, [2**62, *shape[1:]]], [dtype, ["3", *shape[1:]]],
            [dtype, [True, *shape[1:]]], [dtype, [float(shape[0]), *shape[1:]]], [dtype, [shape[0] + 1, *shape[1:]]],
            [dtype, shape, 1], [dtype, *shape],
        ):  # fmt: skip
            changed = copy.deepcopy(header)
            changed["arrays"][name] = wrong
            if wrong == [dtype, shape]:
                continue
            message = judge(signed(changed, arrays))
            assert message is not None, (name, wrong)
        rest = {k: v for k, v in arrays.items() if k != name}
        assert judge(described(header, rest))
        again = {**rest, name: arrays[name]}
        if list(again) != list(arrays):
            assert "arrays" in judge(described(header, again))
        assert "arrays" in judge(described(header, {**arrays, "more": arrays[name]}))
        for dtype in ("float64", "int16", "uint64"):
            other = {**arrays, name: arrays[name].astype(dtype)}
            assert name in judge(described(header, other))
    assert "bytes before the check" in judge(signed(header, arrays, more=b"\0"))


def test_every_array_with_a_row_less_or_more(saved, judge):
    _, data, _ = saved
    header, arrays = opened(data)
    for name, array in arrays.items():
        if not array.size:
            continue
        for changed in (array[:-1], array[1:], np.concatenate([array, array[:1]]), array[:0]):
            assert judge(described(header, {**arrays, name: changed}))


def test_two_runs_with_one_key_are_refused(saved, judge):
    """The second would replace the first among its parent's children, and its pages would never be free again."""
    _, data, _ = saved
    header, arrays = opened(data)
    tops = np.flatnonzero(arrays["runs"][:, 0] == -1)
    first = np.concatenate([[0], np.cumsum(arrays["runs"][:, 1])])
    keys = arrays["keys"].reshape(-1, 32)
    assert len(tops) > 1, "salts have roots of their own"
    keys[first[tops[1]]] = keys[first[tops[0]]]
    assert "distinct keys" in judge(described(header, arrays))


@pytest.mark.slow
@budget(50, long=150)
def test_random_values(saved, judge, budget):
    _, data, _ = saved
    header, good = opened(data)
    rng = np.random.default_rng(0)
    taken = refused = 0
    for _ in range(budget):
        arrays = {name: array.copy() for name, array in good.items()}
        for _ in range(rng.integers(1, 4)):
            name = str(rng.choice([n for n, a in arrays.items() if a.size]))
            flat = arrays[name].reshape(-1)
            info = np.iinfo(flat.dtype)
            values = [0, 1, 2, 299, 300, -1, info.min, info.max, int(rng.choice(flat))]
            value = int(rng.choice(np.array(values, dtype=object)))
            flat[rng.integers(len(flat))] = min(max(value, info.min), info.max)
            if rng.integers(4) == 0 and arrays[name].ndim == 2:
                rng.shuffle(arrays[name])
        if judge(described(header, arrays)) is None:
            taken += 1
        else:
            refused += 1
    assert taken and refused > budget // 8


def test_a_resume_point_without_a_page_that_it_needs(saved, judge):
    _, data, _ = saved
    header, arrays = opened(data)
    pages = arrays["point_pages"]
    rows, columns = np.nonzero(pages)
    for row, column in [*zip(rows.tolist(), columns.tolist(), strict=True)][:20]:
        changed = pages.copy()
        changed[row, column] = 0
        message = judge(described(header, {**arrays, "point_pages": changed}))
        assert message is not None and "point_pages: expected 1.." in message


def test_a_policy_that_raises_leaves_an_empty_cache():
    class Raising(LRU):
        left = 10**9

        def add(self, entry):
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("of the policy")
            super().add(entry)

    for mix in (MIX, ((8, None),)):
        e = engine(mix, events=EventLog())
        history = [t for t in used(e) if t]
        data = snapshot.dumps(e.kv)
        for left in (0, 1, 3):
            policy = Raising()
            kv = cache(mix, policy=policy)
            before = state(kv)
            policy.left = left
            with pytest.raises(RuntimeError, match="of the policy"):
                snapshot.loads(kv, data)
            policy.left = 10**9
            assert state(kv) == before
            snapshot.loads(kv, data)
            kv.check_invariants()
            serve(kv, history)


def test_a_key_is_asked_for(tmp_path):
    e = engine(MIX)
    history = [t for t in used(e) if t]
    data = snapshot.dumps(e.kv, key=KEY)
    options = {"events": None}
    for key in (None, b"another"):
        with pytest.raises(ValueError, match="damaged or truncated, or was saved with another key"):
            snapshot.loads(cache(MIX, **options), data, key=key)
    with pytest.raises(ValueError, match="HMAC-SHA-256 with this key"):
        snapshot.loads(cache(MIX, **options), snapshot.dumps(e.kv), key=KEY)
    # Whoever does not know the key cannot change a page.
    header, arrays = opened(data)
    with pytest.raises(ValueError, match="HMAC-SHA-256 with this key") as caught:
        snapshot.loads(cache(MIX, **options), described(header, arrays), key=KEY)
    assert data[-32:].hex() not in str(caught.value)
    for key in (b"", "text", 5):
        with pytest.raises(ValueError, match="key: expected bytes"):
            snapshot.dumps(e.kv, key=key)
        with pytest.raises(ValueError, match="key: expected bytes"):
            snapshot.loads(cache(MIX, **options), data, key=key)
    snapshot.save(e.kv, tmp_path / "index", key=KEY)
    assert (tmp_path / "index").read_bytes() == data
    kv = cache(MIX, **options)
    snapshot.restore(kv, tmp_path / "index", key=KEY)
    assert kv.match([*history[-1], 1]).num_tokens == e.kv.match([*history[-1], 1]).num_tokens
    serve(kv, history)


@pytest.mark.parametrize("kind", ["fifo", "link", "broken link", "folder", "device"])
def test_only_files_are_replaced_and_read(kind, tmp_path):
    e, path, other = engine(MIX), tmp_path / "index", tmp_path / "elsewhere"
    used(e)
    other.write_bytes(b"other")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("needs the right to make a device")
    else:
        path.symlink_to(other if kind == "link" else tmp_path / "nowhere")
    before, names = os.lstat(path), sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=r"path: expected a regular file, got .*index., mode"):
        snapshot.save(e.kv, path)
    after = os.lstat(path)
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert sorted(os.listdir(tmp_path)) == names and other.read_bytes() == b"other"
    if "link" not in kind:
        with pytest.raises(ValueError, match="path: expected a regular file"):
            snapshot.restore(cache(MIX), path)
