"""KV-cache events for NVIDIA Dynamo's `RadixTree`, and the hashes to look prompts up there.

The tree knows of each worker which blocks it holds. A block has a name, which the worker chooses
(here the last 8 bytes of its segment key), and a hash of what is in it, by which prompts are looked
up: XXH3 of the token ids of the block, followed by hashes of its images, seeded by the adapter's
name and the salt. It does not cover what is before the block: the path does. Its block is a segment
of kvcore: `KVCache.alignment` tokens.

    tree, events = RadixTree(), DynamoEvents(kv, log)  # log = EventLog(identities=True)
    for payload in events.take():
        tree.apply_event(worker_id, payload)
    hashes = block_hashes(tokens, kv.alignment, salt=salt, extra_keys=extra_keys)
    scores = tree.find_matches(hashes).scores  # {(worker_id, dp_rank): blocks}

The tree answers with the longest path that a worker holds. With dense groups alone this is
`Match.dense_tokens` of that worker's `match`, and so the hit, but for the last token, which is
always computed. Of a model with windows or states a hit ends at a resume point, which no tree knows:

* all dense segments in the tree (``resumable=False``): the answer is `Match.dense_tokens`, which
  may be far more than the hit;
* those that lead to a resume point (``resumable=True``, the default): the answer is at least the
  hit, at most `Match.dense_tokens`, and the hit itself unless the prompt leaves what is cached
  between two resume points, where the tree answers how far it agrees. (`KVCache(replay_tokens=)`
  may save more than the hit.)

An image is its identifier to the tree, not its place: prompts of the same tokens that differ only in
where an image begins or ends are one to it. With a drafter (`GroupSpec.lookahead`) a segment key
covers tokens behind the segment, and the tree's hash does not: it may answer one block more.

Source: Dynamo 1.6 `lib/kv-router` (`protocols.rs`, `indexer/radix_tree.rs`, `zmq_wire/`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from quire.kvcore import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, KVCache
from quire.kvcore.identities import Identity

from .event_fields import by_lora, mm_infos, short_hash, text_of

try:
    # `dynamo.llm` has it too, and loads a web server's event loop with it.
    from dynamo._core import compute_block_hash_for_seq
except ImportError as error:
    raise ImportError(
        "dynamo_events needs the package ai-dynamo-runtime: pip install 'quire[dynamo]'"
    ) from error

SERVED = "1.6"
if not (found := version("ai-dynamo-runtime")).startswith(f"{SERVED}."):
    raise ImportError(f"dynamo_events: expected ai-dynamo-runtime {SERVED}, got {found}")


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    salt: bytes = b"",
    extra_keys: Sequence[tuple[int, int | None, bytes]] = (),
) -> list[int]:
    """Hashes of the whole blocks of a prompt, for `RadixTree.find_matches`.

    Args:
        token_ids, salt, extra_keys: as for `KVCache.match`.
        block_size: `KVCache.alignment` of the workers.
    """
    ids, identity = tuple(int(token) for token in token_ids), Identity(salt, tuple(extra_keys))
    starts = range(0, len(ids) - block_size + 1, block_size)
    over = tuple(identity.over(at, at + block_size).ranges for at in starts)
    names, ids = (b"",) * len(over), ids[: len(over) * block_size]
    return _hashes(
        BlockStored("dense", (), (), names, None, 0, ids, block_size, None, "GPU", salt, over)
    )


def _hashes(event: BlockStored) -> list[int]:
    """Dynamo's hash of each block."""
    hashes: list[int] = []
    for name, part in by_lora(event):
        hashes += compute_block_hash_for_seq(
            list(part.token_ids),
            part.block_size,
            mm_infos(part),
            lora_name=name,
            cache_namespace=text_of(part.salt) or None,
        )
    return hashes


class DynamoEvents:
    """Turns the events of one cache into what `RadixTree.apply_event` takes. Belongs to the thread
    that calls the cache.

    Args:
        kv: the cache.
        log: its events, taken by nobody else.
        resumable: leave out segments behind the last resume point (see above).
        dp_rank: of the engine, if it has several.

    Raises:
        ValueError: the log names no identities, without which the tree would take prompts of
            other adapters and tenants for hits; or no group is dense, so that nobody is told which
            segments make a path.
    """

    def __init__(
        self, kv: KVCache, log: EventLog, *, resumable: bool = True, dp_rank: int = 0
    ) -> None:
        if not log.identities:
            raise ValueError("log: expected an EventLog with identities, got one without")
        kinds = [group.kind for group in kv.layout.groups]
        if "dense" not in kinds:
            raise ValueError(f"kv: expected a cache with a dense group, got kinds {kinds}")
        self._kv, self._log, self._rank = kv, log, dp_rank
        self._next_event = self._next_id = 0
        self._points = _ResumablePaths(
            {i for i, kind in enumerate(kinds) if resumable and kind != "dense"}
        )

    def take(self) -> list[bytes]:
        """Payloads of the events since the last call, to be applied in this order.

        If the log dropped some, the cache announces all that it holds.
        """
        first, events = self._log.take()
        if first != self._next_event:
            self._kv.announce()
            first, events = self._log.take()
        self._next_event = first + len(events)
        payloads = []
        for data in (data for event in events for data in self._points.read(event)):
            event_id, self._next_id = self._next_id, self._next_id + 1
            whole = {"event_id": event_id, "data": data, "dp_rank": self._rank}
            payloads.append(json.dumps(whole).encode())
        return payloads


class _ResumablePaths:
    """The dense segments that lead to a resume point, as Dynamo's events.

    Args:
        others: the groups that must hold a resume point; none: all dense segments count.

    Attributes:
        blocks: of each dense segment its parent's key and its hash.
        holders: of each resume point the groups that hold it.
        uses: of each segment the resume points at or behind it that all groups hold.
    """

    def __init__(self, others: set[int]) -> None:
        self._others = others
        self.blocks: dict[bytes, tuple[bytes | None, int]] = {}
        self.holders: dict[bytes, set[int]] = {}
        self.uses: Counter[bytes] = Counter()

    def read(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> Iterator[Any]:
        """Dynamo's events that follow from one of kvcore."""
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear(), self.holders.clear(), self.uses.clear()
            yield "cleared"
        elif event.kind == "dense" and not self._others:
            yield (
                _removed(event)
                if isinstance(event, BlockRemoved)
                else _stored(event.parent, zip(event.block_hashes, _hashes(event), strict=True))
            )
        elif event.kind == "dense" and isinstance(event, BlockStored):
            parents = (event.parent, *event.block_hashes)
            for key, parent, value in zip(
                event.block_hashes, parents, _hashes(event), strict=False
            ):
                self.blocks[key] = parent, value
        elif event.kind == "dense":
            for key in event.block_hashes:
                del self.blocks[key]
        elif self._others:
            yield from self._point(event)

    def _point(self, event: BlockStored | BlockRemoved) -> Iterator[Any]:
        """A resume point was stored or removed in some groups."""
        key, path = event.block_hashes[-1], []
        holders = self.holders.setdefault(key, set())
        was_whole = holders == self._others
        if isinstance(event, BlockStored):
            holders.update(event.groups)
        else:
            holders.difference_update(event.groups)
        if (holders == self._others) == was_whole:
            return
        change, at = -1 if was_whole else 1, key
        while at is not None:
            self.uses[at] += change
            if self.uses[at] == (0 if was_whole else 1):
                path.append(at)
            at = self.blocks[at][0]
        if not holders:
            del self.holders[key]
        if path and was_whole:
            yield {"removed": {"block_hashes": [short_hash(at) for at in path]}}
        elif path:
            path.reverse()
            yield _stored(self.blocks[path[0]][0], ((at, self.blocks[at][1]) for at in path))


def _removed(event: BlockRemoved) -> Any:
    return {"removed": {"block_hashes": [short_hash(key) for key in event.block_hashes]}}


def _stored(parent: bytes | None, blocks: Any) -> Any:
    return {
        "stored": {
            "parent_hash": None if parent is None else short_hash(parent),
            "blocks": [
                {"block_hash": short_hash(key), "tokens_hash": value} for key, value in blocks
            ],
        }
    }
