"""Hand-offs during which somebody is killed: `kill -9` at a random moment, and what must hold then.

python -m tests.support.models.handoff_kills nixl 5     the store of seed 5
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time

from quire.bench.handoff.stores import RunningStore, running
from quire.models.transfer.store import TransferError
from tests.support.models.handoff import End, text

WHOLE = 96
IN_TIME = 40.0  # seconds until everybody knows; the time-outs below are shorter


def prompt(seed: int) -> list[int]:
    """One that its window's resume point ends."""
    return text(seed, WHOLE + 1)


def killed(work, rng: random.Random) -> bytes:
    """What ``work(write)``, in a process of its own, wrote until it was killed, a while after some byte."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reader)
            work(lambda data: os.write(writer, data))
        finally:
            os._exit(1)  # before it was killed
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as said:
        first = b"".join(said.read(1) for _ in range(rng.randint(1, 4)))
        time.sleep(rng.random() * 0.03)
        os.kill(process, signal.SIGKILL)
        rest = said.readall()
    assert os.waitpid(process, 0)[1] == signal.SIGKILL, "it ended by itself"
    return first + rest


def sender_killed(store: RunningStore, rng: random.Random) -> int:
    """Of what a killed sender sent, a receiver finds a prompt whole or not at all; returns the whole ones."""
    first = rng.randrange(10**6)

    def send(write) -> None:
        end, client = End(num_pages=2000), store.connect()
        write(b"r")
        for seed in itertools.count(first):
            end.serve(prompt(seed))
            end.sent(prompt(seed), client)
            write(b".")

    said = killed(send, rng)
    client, receiver, sender = store.connect(), End(num_pages=2000), End(num_pages=2000)
    sent, whole = len(said) - 1, 0
    for n in range(sent + 2):
        found = receiver.received(prompt(first + n), client).num_tokens
        assert found in ((WHOLE,) if n < sent else (0, WHOLE))
        assert receiver.serve(prompt(first + n)) == found
        whole += found == WHOLE
    last = prompt(first + sent)
    sender.serve(last)
    assert sender.sent(last, client).num_tokens == WHOLE  # what the killed one left is no harm
    assert End().received(last, client).num_tokens == WHOLE
    client.close()
    return whole


def receiver_killed(store: RunningStore, rng: random.Random) -> int:
    """What a killed receiver was getting, the next one gets; returns what the killed one had got."""
    first = rng.randrange(10**6)
    client, sender = store.connect(), End(num_pages=2000)
    seeds = range(first, first + 3)
    for seed in seeds:
        sender.serve(prompt(seed))
        sender.sent(prompt(seed), client)

    def receive(write) -> None:
        own = store.connect()
        write(b"r")
        while True:
            end = End(num_pages=2000)
            for seed in seeds:
                end.received(prompt(seed), own)
                write(b".")

    said = killed(receive, rng)
    end = End(num_pages=2000)
    for seed in seeds:
        assert end.received(prompt(seed), client).num_tokens == WHOLE
        assert end.serve(prompt(seed)) == WHOLE
    client.close()
    return len(said) - 1


def store_killed(kind: str, rng: random.Random) -> list[str]:
    """Both ends get a named error in time, and go on alone; returns the names."""
    errors = []
    with running(kind, gib=1 / 32) as store:
        options = {"timeout": 5.0, "buffer_bytes": 2**20}
        clients = [store.connect(**options) for _ in range(2)]
        sender, receiver = End(num_pages=2000), End(num_pages=2000)
        first = rng.randrange(10**6)

        def send() -> None:
            for seed in itertools.count(first):
                sender.serve(prompt(seed))
                try:
                    sender.sent(prompt(seed), clients[0], timeout=10.0)
                except TransferError as error:
                    errors.append(type(error).__name__)
                    return

        thread = threading.Thread(target=send)
        killer = threading.Timer(0.02 + rng.random() * 0.2, store.process.kill)
        thread.start()
        killer.start()
        for seed in itertools.count(first):
            try:
                found = receiver.received(
                    prompt(seed), clients[1], wait=0.5, timeout=10.0
                ).num_tokens
            except TransferError as error:
                errors.append(type(error).__name__)
                found = 0
            assert found in (0, WHOLE)
            assert receiver.serve(prompt(seed)) == found
            if store.process.poll() is not None and errors:
                break
        start = time.monotonic()
        thread.join(IN_TIME)
        assert not thread.is_alive() and time.monotonic() - start < IN_TIME
        sender.expect_closed()
        receiver.expect_closed()
        assert sender.serve([*prompt(first), 5]) == WHOLE  # goes on
    return errors


if __name__ == "__main__":
    found = store_killed(sys.argv[1], random.Random(int(sys.argv[2])))
    print("errors:", *sorted(set(found)), flush=True)
    os._exit(0)  # a client of a master that is gone takes long to end
