"""Prefixes from one cache to another: a hit with the right rows, and whole or nothing whatever stops."""

import itertools
import threading
import time

import pytest

from quire.kvcore import BlockStored, EventLog
from quire.kvcore.page_layout import LayoutMismatch
from quire.models.transfer.memory import DictStore
from quire.models.transfer.run import Forgotten, NoRoom
from quire.models.transfer.store import DamagedObject, MissingObject, StoreTimeout
from tests.support.models.handoff import GROUPS, End, text


@pytest.fixture
def store():
    store = DictStore(timeout=5)
    yield store
    store.close()


@pytest.mark.parametrize("length", [101, 13])  # and one that is shorter than windows
@pytest.mark.parametrize("name", GROUPS)
def test_what_one_computed_the_other_finds(name, length, store):
    """Every row that the receiver reads then is checked."""
    sender, receiver = End(name), End(name)
    prompt = text(1, length)
    assert sender.serve(prompt) == 0
    sent = sender.sent(prompt, store)
    usable = (length - 1) // sender.kv.alignment * sender.kv.alignment
    assert sent.num_tokens == sender.kv.match(prompt).num_tokens == usable
    came = receiver.received(prompt, store)
    assert came.num_tokens == sent.num_tokens == receiver.kv.match(prompt).num_tokens
    assert came.num_bytes == {k: n for k, n in sent.num_bytes.items() if k != "layout"}
    assert receiver.serve(prompt) == sent.num_tokens
    assert receiver.serve([*prompt, *text(2, 40)]) >= sent.num_tokens


def test_only_what_the_other_end_lacks_goes(store):
    sender, receiver = End(), End()
    first, more = text(1, 61), text(2, 40)
    sender.serve(first)
    receiver.serve(first[:33])  # has 32 tokens
    assert sender.sent(first, store).num_segments == 15
    came = receiver.received(first, store)
    assert (came.num_segments, came.num_points, came.num_tokens) == (15 - 8, 1, 60)
    again = sender.sent(first, store)
    assert (again.num_known, again.num_bytes) == (16, {})  # the store has all, the manifest too
    sender.serve([*first, *more])
    sent = sender.sent([*first, *more], store)
    assert (sent.num_segments, sent.num_points, sent.num_known) == (10, 1, 15)
    came = receiver.received([*first, *more], store)
    assert (came.num_segments, came.num_points, came.num_tokens) == (10, 1, 100)
    assert receiver.received([*first, *more], store).num_bytes == {}
    assert receiver.serve([*first, *more]) == 100


def test_segments_that_the_receiver_is_known_to_have_are_not_sent(store):
    sender, receiver, other = End(), End(), End()
    prompt = text(1, 61)
    sender.serve(prompt)
    receiver.serve(prompt[:33])
    assert sender.sent(prompt, store, skip_tokens=32).num_segments == 7
    with pytest.raises(MissingObject, match=r"expected quire-.*segment.* and 7 more"):
        other.received(prompt, store)
    assert other.kv.index.num_segments == 0
    assert receiver.received(prompt, store).num_tokens == 60
    with pytest.raises(ValueError, match="skip_tokens: expected a multiple of 4, got 30"):
        sender.sent(prompt, store, skip_tokens=30)


def test_the_longest_prefix_is_found_and_tenants_do_not_meet(store):
    sender, receiver = End(), End()
    prompt = text(1, 101)
    for n in (41, 61):
        sender.serve(prompt[:n], salt=b"a")
        sender.sent(prompt[:n], store, salt=b"a")
    assert receiver.received(prompt, store).num_tokens == 0
    assert receiver.received(prompt, store, salt=b"b").num_tokens == 0
    assert receiver.received(prompt, store, salt=b"a", num_tokens=40).num_tokens == 40
    assert receiver.received(prompt, store, salt=b"a").num_tokens == 60
    assert receiver.serve(prompt, salt=b"a") == 60 and receiver.serve(prompt) == 0
    with pytest.raises(
        ValueError, match=r"num_tokens: expected a multiple of 4 in 1..100, got 104"
    ):
        receiver.received(prompt, store, num_tokens=104)


def test_a_receiver_waits_for_its_sender(store):
    sender, receiver = End(), End()
    prompt = text(1, 61)
    sender.serve(prompt[:41])
    sender.sent(prompt[:41], store)  # an earlier turn
    sender.serve(prompt)
    later = threading.Timer(0.1, sender.sent, (prompt, store))
    later.start()
    came = receiver.received(prompt, store, wait=20)
    later.join()
    assert came.num_tokens == 60 and 0.05 < came.seconds["wait"] < 20
    other = End()
    assert other.received([*prompt[:50], *text(2, 30)], store, wait=0.05).num_tokens == 40


def test_what_came_can_leave_the_store(store):
    sender, receiver = End(), End()
    prompt = text(1, 61)
    sender.serve(prompt)
    sender.sent(prompt, store)
    assert receiver.received(prompt, store, remove=True).num_tokens == 60
    assert store.objects == {}


@pytest.mark.parametrize(
    "sender, receiver, names",
    [
        ({"layout": {"dtype": "fp8", "model": b"m"}}, {"layout": {"dtype": "bf16", "model": b"m"}}, ("dtype",)),
        ({"layout": {"model": b"m"}}, {"layout": {"model": b"n", "dtype": "x"}}, ("dtype", "model")),
        ({"name": "dense"}, {"name": "window"}, ("groups",)),
        ({"name": "dense"}, {"name": "state"}, ("groups",)),
        ({"hash_seed": b"a", "layout": {"seed": b"a"}}, {"hash_seed": b"b", "layout": {"seed": b"b"}}, ("seed",)),
    ],
)  # fmt: skip
def test_another_layout_is_refused_and_named(sender, receiver, names, store):
    there, sender, receiver = receiver, End(**sender), End(**receiver)
    prompt = text(1, 61)
    sender.serve(prompt)
    sender.sent(prompt, store)
    with pytest.raises(
        LayoutMismatch, match="layout: expected that of the sender, in DictStore: "
    ) as error:
        receiver.received(prompt, store)
    assert error.value.names == names and all(name in str(error.value) for name in names)
    with pytest.raises(LayoutMismatch):
        receiver.received(prompt, store, num_tokens=4)  # which may be no boundary here
    assert receiver.kv.index.num_segments == 0
    receiver.serve(prompt)  # goes on, and its own manifest is beside the other
    receiver.sent(prompt, store)
    assert End(**there).received(prompt, store).num_tokens == receiver.kv.match(prompt).num_tokens


@pytest.mark.parametrize("kind", ["segment", "point", "manifest"])
@pytest.mark.parametrize("where", ["first byte", "last byte", "checksum", "shorter", "another's"])
def test_damage_is_named_and_put_right_by_the_next_sender(kind, where, store):
    sender, receiver = End(), End()
    prompt, other = text(1, 61), text(2, 61)
    for tokens in (prompt, other):
        sender.serve(tokens)
        sender.sent(tokens, store)
    head = sender.kv.match(prompt).prompt.keys[-32:]
    mine = [k for k in store.objects if k.kind == kind]
    key = next(k for k in mine if k.segment == head)
    data = bytearray(store.objects[key])
    if where == "another's":
        data = store.objects[next(k for k in mine if k.segment != head)]
    elif where == "shorter":
        del data[-1]
    else:
        data[{"first byte": 0, "last byte": -1, "checksum": 9}[where]] ^= 1
    store.objects[key] = bytes(data)
    with pytest.raises(DamagedObject, match=f"{key.text}: expected ") as error:
        receiver.received(prompt, store)
    assert error.value.key == key and receiver.kv.index.num_segments == 0
    sender.sent(prompt, store)
    assert receiver.received(prompt, store).num_tokens == 60
    assert receiver.serve(prompt) == 60


def test_a_pool_without_room_keeps_what_it_has(store):
    sender, receiver = End(), End(num_pages=14)
    prompt = text(1, 61)
    sender.serve(prompt)
    sender.sent(prompt, store)
    receiver.serve(text(2, 20))
    with pytest.raises(NoRoom, match=r"needs 18 .*'full'.* are free and 9 evictable") as error:
        receiver.received(prompt, store)
    assert error.value.out_of_pages.per_group == {"full": 15, "local": 3}
    assert receiver.kv.match(text(2, 20)).num_tokens == 16


class Slow:
    """A store whose calls are preceded by something else."""

    def __init__(self, store, before):
        self._store, self._before = store, before

    def __getattr__(self, name):
        def call(*args):
            self._before(name, *args)
            return getattr(self._store, name)(*args)

        return call


def test_a_cache_that_is_cleared_meanwhile_sends_and_takes_nothing(store):
    """Rows that turned out wrong are not handed off; others are."""
    sender, receiver = End(), End()
    prompt = text(1, 61)
    wrong = {}

    def drop(name, *args):
        if name == "put" and args[0].kind == "point":
            wrong["now"]()

    for wrong["now"] in (sender.kv.clear, lambda: sender.kv.evict_pages(sender.kv.index.pages_between(*sender.kv.index.find(sender.kv.match(prompt).prompt.keys, 15)[:1], 3, 4)[0])):  # fmt: skip
        sender.serve(prompt)
        with pytest.raises(Forgotten, match="send: expected a cache that stays"):
            sender.sent(prompt, Slow(store, drop))
        assert (
            store.objects == {}
        )  # nor what was put before, for the next sender would pass it over
        sender.kv.clear()
    other = text(5, 20)
    sender.serve(other)
    page = int(sender.kv.index.find(sender.kv.match(other).prompt.keys, 1)[0].pages[0, 0])
    sender.serve(prompt)
    wrong["now"] = lambda: sender.kv.evict_pages([page])
    assert sender.sent(prompt, Slow(store, drop)).num_tokens == 60

    def clear(name, *args):
        if name == "get" and args[0].kind == "point":
            receiver.kv.clear()
            with pytest.raises(ValueError, match="reset: expected no open hand-offs, got 1"):
                receiver.kv.reset()

    with pytest.raises(Forgotten, match="receive: expected a cache that stays"):
        receiver.received(prompt, Slow(store, clear))
    assert receiver.kv.num_free_pages == receiver.kv.num_pages - 1


def test_a_request_may_compute_it_meanwhile(store):
    """Its pages stay, and those that came are free again."""
    sender, receiver = End(), End()
    prompt = text(1, 61)
    sender.serve(prompt)
    sender.sent(prompt, store)

    def serve(name, *args):
        if name == "get" and args[0].kind == "point":
            receiver.serve(prompt[:45])

    assert receiver.received(prompt, Slow(store, serve)).num_tokens == 60
    assert receiver.serve(prompt) == 60


class Stops(Exception):
    pass


def test_pages_that_go_are_neither_evicted_nor_written(store):
    """Though the sender evicts all that it can, and computes others in a pool that holds little more."""
    sender, receiver = End(num_pages=36), End()
    prompt = text(1, 61)
    sender.serve(prompt)
    puts = []

    def press(name, *args):
        if name == "put" and args[0].kind == "segment":
            puts.append(name)
            sender.kv.evict(sender.kv.num_evictable_pages)
            sender.serve(text(10 + len(puts), 30))

    assert sender.sent(prompt, Slow(store, press)).num_tokens == 60 and len(puts) == 15
    assert receiver.received(prompt, store).num_tokens == 60
    assert receiver.serve(prompt) == 60


@pytest.mark.parametrize("name", ["window", "dense"])
@pytest.mark.parametrize("after", [False, True])
def test_a_hand_off_that_stops_at_any_call_is_whole_or_nothing(name, after, store):
    """The sender's n-th call of the store, or the receiver's, is its last; before it has an effect, or after."""
    prompt, ends = text(1, 61), []

    def stop_at(n):
        calls = itertools.count()

        def before(name, *args):
            if next(calls) == n:
                if after:
                    tickets = getattr(store, name)(*args)
                    while name in ("put", "get") and not store.poll([tickets], 5):
                        pass
                raise Stops(name)

        return Slow(store, before)

    sender = End(name)
    sender.serve(prompt)
    for n in itertools.count():
        store.objects.clear()
        try:
            sender.sent(prompt, stop_at(n))
            break
        except Stops as stop:
            ends.append(str(stop))
        receiver = End(name)
        found = receiver.received(prompt, store).num_tokens
        assert found in (0, 60) and receiver.serve(prompt) == found
        assert sender.sent(prompt, store).num_tokens == 60  # what is there is no harm
        assert End(name).received(prompt, store).num_tokens == 60
    assert {"exists", "put", "poll"} == set(ends) and len(ends) > 10
    ends.clear()
    for n in itertools.count():
        receiver = End(name)
        try:
            receiver.received(prompt, stop_at(n))
            break
        except Stops as stop:
            ends.append(str(stop))
        assert receiver.kv.index.num_segments == 0
        assert receiver.kv.num_free_pages == receiver.kv.num_pages - 1
        assert receiver.received(prompt, store).num_tokens == 60
        assert receiver.serve(prompt) == 60
    assert {"exists", "get", "poll"} == set(ends) and len(ends) > 10


@pytest.mark.parametrize("verb", ["exists", "put", "get"])
def test_a_store_that_hangs_is_a_named_error_in_time(verb):
    store = DictStore(timeout=0.2)
    let, prompt = threading.Event(), text(1, 61)
    sender, receiver = End(), End()
    sender.serve(prompt)
    if verb != "put":
        sender.sent(prompt, store)
    setattr(store, f"_{verb}", lambda *args: let.wait())
    start = time.monotonic()
    with pytest.raises(StoreTimeout, match=r"expected an answer of DictStore in 0\.2 s, got none"):
        (sender.sent if verb == "put" else receiver.received)(prompt, store)
    assert time.monotonic() - start < 5 and receiver.kv.index.num_segments == 0
    let.set()
    store.close()


def test_a_hand_off_has_a_time_out_of_its_own(store):
    sender = End()
    prompt = text(1, 61)
    sender.serve(prompt)
    store._put = lambda *args: time.sleep(0.5)
    with pytest.raises(StoreTimeout, match=r"send: expected to end in 0.1 s, it did not"):
        sender.sent(prompt, store, timeout=0.1)


def test_events_tell_what_came(store):
    """The receiver's tokens are known, as it hashed the prompt."""
    log = EventLog()
    sender, receiver = End(), End(events=log)
    prompt = text(1, 61)
    sender.serve(prompt)
    sender.sent(prompt, store)
    receiver.received(prompt, store)
    stored = [event for event in log.take()[1] if isinstance(event, BlockStored)]
    assert [t for e in stored if e.kind == "dense" for t in e.token_ids] == prompt[:60]
    receiver.kv.announce()


def test_a_cache_that_keeps_nothing_is_refused():
    with pytest.raises(ValueError, match="kv: expected a cache with enable_caching"):
        End(enable_caching=False)
