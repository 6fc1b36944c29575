"""Dynamo's own tree and indexer, fed with events of caches in random traffic, answer as `match` does."""

from __future__ import annotations

import importlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

core = pytest.importorskip("dynamo._core", reason="needs the extra dynamo (ai-dynamo-runtime 1.6)")
pytest.importorskip("xxhash", reason="needs the extra dynamo")

from quire.kvcore import EventLog, KVCache  # noqa: E402
from quire.models.integrations import dynamo_events  # noqa: E402
from quire.models.integrations.dynamo_events import DynamoEvents, block_hashes  # noqa: E402
from quire.models.integrations.event_fields import image_hash, lora_key  # noqa: E402
from tests.support.kvcore.engine import groups  # noqa: E402
from tests.support.kvcore.routed import DENSE, HYBRID, IMAGE, Ask, Router  # noqa: E402
from tests.support.models import page_blocks  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
WORKERS = 3


class Fed:
    """A tree that is told what the workers of a router hold."""

    def __init__(self, mix, *, resumable: bool = True, seed: int = 0, **options) -> None:
        self.router = Router(mix, workers=WORKERS, num_pages=90, seed=seed, **options)
        self.tree, self.alignment = core.RadixTree(), self.router.workers[0].alignment
        self.events = [
            DynamoEvents(kv, log, resumable=resumable, dp_rank=w)
            for w, (kv, log) in enumerate(zip(self.router.workers, self.router.logs, strict=True))
        ]

    def some(self) -> list[Ask]:
        """Prompts that were asked."""
        asked = self.router.asked
        return [asked[i] for i in self.router.rng.integers(len(asked), size=4)] if asked else []

    def feed(self) -> None:
        for w, events in enumerate(self.events):
            for payload in events.take():
                self.tree.apply_event(10 + w, payload)

    def answers(self, ask: Ask):
        """Of each worker the tokens that the tree says, and its match."""
        hashes = block_hashes(ask.tokens, self.alignment, **ask.keys)
        scores = self.tree.find_matches(hashes).scores
        for w, kv in enumerate(self.router.workers):
            told = scores.get((10 + w, w), 0) * self.alignment
            yield told, kv.match(ask.tokens, **ask.keys)


@pytest.mark.parametrize("resumable", [False, True], ids=["all", "resumable"])
@pytest.mark.parametrize("mix", DENSE, ids=str)
def test_with_dense_groups_the_tree_answers_what_match_does(mix, resumable):
    fed, seen = Fed(mix, resumable=resumable), Counter()
    for _ in range(150):
        fed.router.turn()
        fed.feed()
        for ask in fed.some():
            last = (len(ask.tokens) - 1) // fed.alignment * fed.alignment
            for told, match in fed.answers(ask):
                assert told == match.dense_tokens and min(told, last) == match.num_tokens
                hit = match.num_tokens > 0
                seen.update(
                    hits=hit, lora=hit and ask.lora is not None, salt=hit and ask.salt != b""
                )
                seen.update(images=hit and bool(ask.images), partly=0 < told < last)
    assert min(seen.values()) > 20 and len(seen) == 5, seen
    assert sum(kv.index.num_evicted_segments for kv in fed.router.workers) > 50


@pytest.mark.parametrize("mix", HYBRID, ids=str)
def test_of_a_hybrid_model_the_tree_knows_the_dense_segments(mix):
    fed, longer = Fed(mix, resumable=False), 0
    for _ in range(150):
        fed.router.turn()
        fed.feed()
        for ask in fed.some():
            for told, match in fed.answers(ask):
                assert told == match.dense_tokens
                longer += told > match.num_tokens
    assert longer > 20


def reachable(kv: KVCache, asked: list[Ask], ask: Ask) -> int:
    """How far a prompt agrees with one that was asked, up to a boundary at which that one resumes: by `match` alone."""
    a, best = kv.alignment, 0
    keys = kv.match(ask.tokens, **ask.keys).prompt.keys
    for other in asked:
        mine = kv.match(other.tokens, **other.keys).prompt.keys
        same = 0
        while mine[same : same + 32] == keys[same : same + 32] != b"":
            same += 32
        same = same // 32 * a
        # The longest boundary at which the other one resumes.
        longest = kv.match(other.followed([1]).tokens, **other.keys).num_tokens
        best = max(best, min(same, longest))
    return best


@pytest.mark.parametrize("mix", HYBRID, ids=str)
def test_of_what_leads_to_resume_points_the_tree_answers_no_less_than_the_hit(mix):
    fed, seen = Fed(mix), Counter()
    for turn in range(150):
        fed.router.turn()
        fed.feed()
        asked = fed.router.asked
        for ask in fed.some():
            for (told, match), kv in zip(fed.answers(ask), fed.router.workers, strict=True):
                last = (len(ask.tokens) - 1) // fed.alignment * fed.alignment
                assert match.num_tokens <= told <= match.dense_tokens
                if turn % 25 == 0:
                    assert told == reachable(kv, asked, ask)
                seen.update(less=told < match.dense_tokens, hits=match.num_tokens > 0)
                seen.update(same=min(told, last) == match.num_tokens > 0)
    assert min(seen.values()) > 5, seen


def test_the_hashes_are_those_that_a_frontend_computes():
    """Of whole prompts, by Dynamo's function with its own arguments."""
    tokens = [*range(6), *[IMAGE] * 5, *range(9)]
    digest = "0123456789abcdef" + "5" * 48
    images = [(6, 11, b"cat"), (12, 14, digest.encode())]
    infos = [
        {"mm_objects": [{"mm_hash": h, "offsets": []} for h in found]} if found else None
        for found in ([], [image_hash("cat")], [image_hash("cat")], [0x0123456789ABCDEF], [])
    ]
    expected = core.compute_block_hash_for_seq(
        tokens, 4, infos, lora_name="sql", cache_namespace="tenant"
    )
    keys = [(0, None, lora_key("sql")), *images]
    assert block_hashes(tokens, 4, salt=b"tenant", extra_keys=keys) == expected
    assert block_hashes(tokens, 4) == core.compute_block_hash_for_seq(tokens, 4)
    assert block_hashes(tokens[:3], 4, extra_keys=keys) == []


def test_an_adapter_that_starts_later_parts_only_what_follows():
    """Which a frontend cannot ask for: its adapter is of the whole prompt."""
    tokens, keys = list(range(12)), [(6, None, lora_key("sql"))]
    plain = core.compute_block_hash_for_seq(tokens, 4)
    named = core.compute_block_hash_for_seq(tokens, 4, lora_name="sql")
    assert block_hashes(tokens, 4, extra_keys=keys) == [plain[0], *named[1:]]
    log = EventLog(identities=True)
    kv = KVCache(groups((4, None)), num_pages=20, max_requests=1, max_model_len=64, events=log)
    tree, events = core.RadixTree(), DynamoEvents(kv, log)
    kv.admit("a", kv.match(tokens, extra_keys=keys))
    kv.commit(kv.plan([0], [12]), tokens)
    for payload in events.take():
        tree.apply_event(1, payload)
    assert tree.find_matches([plain[0], *named[1:]]).scores == {(1, 0): 3}
    assert tree.find_matches(plain).scores == {(1, 0): 1}


@pytest.mark.parametrize("mix", [DENSE[0], HYBRID[0]], ids=str)
def test_a_log_that_lost_events_is_made_up_for(mix):
    fed = Fed(mix)
    lost = 0
    for log in fed.router.logs:
        log._capacity = 12
    for turn in range(120):
        fed.router.turn()
        if turn % 12 == 11:
            lost = sum(log.num_dropped for log in fed.router.logs)
            fed.feed()
            for ask in fed.router.asked:
                for told, match in fed.answers(ask):
                    assert match.num_tokens <= told <= match.dense_tokens
    assert lost > 5


def test_what_cannot_be_told_is_refused():
    options = {"num_pages": 20, "max_requests": 1, "max_model_len": 64}
    log = EventLog()
    with pytest.raises(ValueError, match="log: expected an EventLog with identities"):
        DynamoEvents(KVCache(groups((4, None)), events=log, **options), log)
    log = EventLog(identities=True)
    with pytest.raises(ValueError, match="kv: expected a cache with a dense group"):
        DynamoEvents(KVCache(groups((4, 8)), events=log, **options), log)


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.7.0")
    with pytest.raises(ImportError, match=r"expected ai-dynamo-runtime 1\.6, got 1\.7\.0"):
        importlib.reload(dynamo_events)
    monkeypatch.undo()
    importlib.reload(dynamo_events)


def test_the_page_prints_what_it_shows():
    pytest.importorskip("dynamo.llm", reason="needs ai-dynamo-runtime with what it depends on")
    (block,) = page_blocks.run(ROOT / "docs" / "adopt-allocator.md", "needs Dynamo")
    assert block[0] == block[1]


# The other path: vLLM's events over ZMQ, which Dynamo's publisher relays and its indexer reads.


class Indexer:
    """``python -m dynamo.indexer`` on loopback."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        for _ in range(300):
            try:
                self.ask("/health")
                return
            except urllib.error.URLError:
                assert self.process.poll() is None, "the indexer ended"
                time.sleep(0.05)

    def ask(self, path: str, body: dict | None = None):
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            text = reply.read()
            return json.loads(text) if text else None


@pytest.fixture
def indexer():
    pytest.importorskip("dynamo.llm", reason="needs ai-dynamo-runtime with what it depends on")
    made = Indexer()
    yield made
    made.process.terminate()
    made.process.wait()


@pytest.mark.parametrize("mix", [DENSE[2], HYBRID[1]], ids=str)
def test_the_events_over_zmq_give_the_same_answers(mix, indexer):
    kv_events_zmq = pytest.importorskip("quire.models.integrations.kv_events_zmq")
    router = Router(mix, workers=2, num_pages=90, seed=3)
    a = router.workers[0].alignment
    publishers = [
        kv_events_zmq.Publisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", int_hashes=True)
        for _ in router.workers
    ]
    try:
        for turn in range(90):
            router.turn()
            if turn == 30:  # what was sent before comes by a replay, as soon as more is sent
                for w, publisher in enumerate(publishers):
                    worker = {"instance_id": w, "endpoint": publisher.endpoint}
                    worker |= {"replay_endpoint": publisher.replay_endpoint}
                    indexer.ask("/register", worker | {"model_name": "m", "block_size": a})
                time.sleep(0.5)
            for publisher, log in zip(publishers, router.logs, strict=True):
                publisher.publish(log, ts=0.0)
        for _ in range(100):  # until all has arrived
            wrong, hits = [], 0
            for ask in router.asked:
                hashes = [h - (h >> 63 << 64) for h in block_hashes(ask.tokens, a, **ask.keys)]
                query = {"model_name": "m", "block_hashes": hashes}
                scores = indexer.ask("/query_by_hash", query)["scores"]
                for w, kv in enumerate(router.workers):
                    told = scores.get(str(w), {}).get("0", 0)
                    expected = kv.match(ask.tokens, **ask.keys).dense_tokens
                    wrong += [(w, told, expected)] if told != expected else []
                    hits += expected > 0
            if not wrong:
                break
            time.sleep(0.1)
        assert not wrong and hits > 20
    finally:
        for publisher in publishers:
            publisher.close()
