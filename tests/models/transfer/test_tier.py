"""A store as the last tier of an engine: pages come back as they were written, or are known to be lost."""

import random
from contextlib import suppress

import numpy as np
import pytest

from quire.bench.handoff.stores import lacking, running
from quire.models.engine.config import EngineConfig
from quire.models.engine.engine import Engine
from quire.models.transfer.files import FileStore
from quire.models.transfer.memory import DictStore
from quire.models.transfer.store import StoreFailed, StoreKey, StoreTimeout, Ticket, TransferError
from quire.models.transfer.tier import HEADER_BYTES, LostPages, StoredPages
from tests.models.engine.test_engine_many import alone, run_all, workload
from tests.models.engine.test_tiering import GIB_OF_A_PAGE, PAGE_BYTES, end, recount, tiered
from tests.support.models.toy import VOCAB, ToyModel

SIZE = 1000
WAYS = ("raise", "fail", "damage", "lose")


class Flaky:
    """A store whose calls fail when ``fails(name)`` says how: the call, its ticket, or the object."""

    def __init__(self, store, fails):
        self.store, self.fails = store, fails

    def __getattr__(self, name):
        call = getattr(self.store, name)

        def flaky(first, *more):
            how = self.fails(name)
            if how is None:
                return call(first, *more)
            if how == "raise" or name not in ("put", "get"):
                raise StoreFailed(name)
            if how == "fail":
                return Ticket(first, done=True, error=StoreFailed(name))
            if how == "damage" and name == "put":
                more = [[*more[0][:-1], more[0][-1] ^ np.uint8(1)]]
            if how == "lose":
                self.store.remove([first])
            ticket = call(first, *more)
            self.store.poll([ticket], 10)
            if how == "lose":
                self.store.remove([first])
            elif name == "get":
                more[0][-1][3] ^= 1
            return ticket

        return flaky


def never(name):
    return None


@pytest.fixture(params=["dict", "files", "mooncake", "nixl"])
def store(request, tmp_path):
    if request.param == "dict":
        yield DictStore()
    elif request.param == "files":
        yield FileStore(tmp_path)
    else:
        if (why := lacking(request.param)) is not None:
            pytest.skip(why)
        with running(request.param, gib=1 / 16) as started:
            client = started.connect(timeout=10)
            yield client
            client.close()


def pages_of(store, **more):
    return StoredPages(store, page_bytes=SIZE, capacity=5 * (SIZE + HEADER_BYTES), layout={"model": b"x"}, **more)  # fmt: skip


def content(*seeds):
    return [np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8) for seed in seeds]


def read(pages, *numbers):
    """What came; None for what is lost."""
    buffers = [np.full(SIZE, 7, np.uint8) for _ in numbers]
    try:
        pages.read(np.array(numbers), buffers).result(30)
    except LostPages as error:
        lost = error.pages
        assert lost == tuple(sorted(lost)) and set(lost) <= set(numbers)
        for n, buffer in zip(numbers, buffers, strict=True):
            assert n not in lost or (buffer == 7).all()  # untouched
        return [None if n in lost else b for n, b in zip(numbers, buffers, strict=True)]
    return buffers


def assert_equal(found, wanted):
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_pages_come_back_and_leave_nothing(store):
    pages, other = pages_of(store), pages_of(store)
    assert (pages.num_pages, pages.stride) == (6, SIZE + HEADER_BYTES)
    pages.write(np.array([1, 5, 2]), content(1, 5, 2)).result(30)
    other.write([1], content(9)).result(30)
    assert_equal(read(pages, 2, 1, 5), content(2, 1, 5))
    assert_equal(read(other, 1), content(9))  # engines do not find each other's
    before = list(pages._keys.values())
    pages.write([5], content(6)).result(30)
    assert_equal(read(pages, 5, 1), content(6, 1))
    assert store.exists(before) == [SIZE + HEADER_BYTES, None, SIZE + HEADER_BYTES]
    kept = [*pages._keys.values()]
    pages.close()
    assert store.exists(kept) == [None] * 3
    assert_equal(read(other, 1), content(9))
    other.close()


def test_what_is_lost_or_damaged_is_named(store):
    pages = pages_of(store)
    pages.write([1, 2, 3, 4], content(1, 2, 3, 4)).result(30)
    store.remove([pages._keys[2]])
    pages._keys[3] = pages._keys[4]._replace(rank=3)  # under which nothing is
    assert [x is None for x in read(pages, 1, 2, 3, 4)] == [False, True, True, False]
    pages.close()


def test_an_object_is_not_taken_for_another():
    """One whose bytes are another page's has a checksum that is right."""
    store = DictStore()
    pages = pages_of(store)
    pages.write([1, 2], content(1, 2)).result(30)
    first, second = pages._keys[1], pages._keys[2]
    store.objects[first] = store.objects[second]
    assert read(pages, 1)[0] is None
    store.objects[second] = store.objects[second][:-1] + b"?"
    assert read(pages, 2)[0] is None
    pages.close()


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("kind", ["dict", "files"])
def test_faults_at_every_call(kind, how, tmp_path):
    """Of each call in turn: what is read is what was written last, or known to be lost."""
    failing = 0
    while True:
        calls = []

        def fails(name, failing=failing, calls=calls):
            calls.append(name)
            return how if len(calls) == failing + 1 else None

        inner = DictStore() if kind == "dict" else FileStore(tmp_path)
        pages = pages_of(Flaky(inner, fails))
        held = {}
        for numbers, seeds in (([1, 2, 3], [1, 2, 3]), ([2, 4], [12, 14]), ([3], [23])):
            try:
                pages.write(numbers, content(*seeds)).result(30)
            except TransferError:
                pass
            else:
                held |= dict(zip(numbers, content(*seeds), strict=True))
            if held:
                found = read(pages, *held)
                wrong = [n for n, x in zip(held, found, strict=True) if x is None]
                # One object is one page; of a call that raises all pages are lost that it was for.
                is_alone = how in ("damage", "lose") and calls[failing : failing + 1] != ["poll"]
                assert len(wrong) <= (1 if is_alone else len(held))
                for n, x in zip(held, found, strict=True):
                    assert x is None or np.array_equal(x, held[n])
        pages.close()
        left = len(inner.objects) if kind == "dict" else len([*tmp_path.rglob("quire-*")])
        # Of a call at the end that fails nothing can be removed.
        assert left == 0 or (calls[failing] == "remove" and failing == len(calls) - 1)
        inner.remove([k for k in getattr(inner, "objects", {})])
        for path in tmp_path.rglob("quire-*"):
            path.unlink()
        inner.close()
        failing += 1
        if failing >= len(calls):
            break
    assert failing > 12 and {"put", "get", "remove"} <= set(calls)


def test_a_store_that_never_answers():
    class Silent:
        def put(self, key, buffers):
            return Ticket(key)

        get = put

        def poll(self, tickets, seconds=0.0):
            return []

        def remove(self, keys):
            raise StoreTimeout("no answer")

    pages = pages_of(Silent(), timeout=0.05)
    with pytest.raises(StoreTimeout, match=r"expected an answer in 0\.05 s"):
        pages.write([1], content(1)).result(30)
    pages._keys[1] = StoreKey(b"0" * 32, "page", b"", 0)
    assert read(pages, 1) == [None]
    pages.close()


def test_room_for_no_page():
    with pytest.raises(ValueError, match=r"^disk_cache_gib: expected at least 1064 bytes"):
        StoredPages(DictStore(), page_bytes=SIZE, capacity=SIZE, layout={})


@pytest.mark.parametrize("where", ["store", "host and store"])
def test_outputs_of_an_engine_are_those_without_tiers(where):
    """Whatever its store loses, damages or refuses, on and off."""
    rng, dice = random.Random(11), random.Random(3)
    faults = []

    def fails(name):
        if dice.random() < (0.5 if name == "get" else 0.1):
            faults.append(name)
            return dice.choice(WAYS)
        return None

    store = DictStore()
    settings = {"host_cache_gib": 12 * GIB_OF_A_PAGE} if "host" in where else {}
    model = tiered(ToyModel())
    config = EngineConfig(
        max_num_seqs=6,
        max_num_batched_tokens=64,
        num_pages=30,
        disk_cache=Flaky(store, fails),
        disk_cache_gib=300 * (PAGE_BYTES + HEADER_BYTES) / 2**30,
        **settings,
    )
    engine = Engine(model, config)
    work = list(workload(rng, 24, VOCAB, engine.max_model_len))
    work += [([*tokens, 5, 6], params, None) for tokens, params, _ in work]

    def distrust(step):
        engine.pool.poison(engine.kv.pool.free_pages())
        if step % 8 == 0:
            recount(engine)

    outputs = run_all(engine, work, rng, distrust, in_flight=9)
    for (tokens, params, _), output in zip(work, outputs, strict=True):
        expected = alone(model, tokens, params)[: engine.max_model_len - len(tokens)]
        if output.finish_reason == "abort":
            expected = expected[: len(output.token_ids)]
        assert output.token_ids == expected
    stats = engine.kv.stats()
    assert stats["tier_stored_pages/disk"] > 10 and stats["tier_loaded_pages/disk"] > 0, stats
    assert stats["tier_load_failures/disk"] > 0 and len(faults) > 10
    dice.random = lambda: 1.0  # no more faults
    end(engine)
    with suppress(ValueError):
        store.close()
    assert not store.objects


def test_settings():
    for wrong in (3, object(), Ticket):
        with pytest.raises(ValueError, match=r"^disk_cache: expected a path, a store or None, got"):
            EngineConfig(disk_cache=wrong)
    assert EngineConfig(disk_cache=DictStore()).has_tiers
