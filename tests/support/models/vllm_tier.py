"""vLLM's `CPUOffloadingManager` with `ResumePointPolicy`, beside its own policies: a trace of conversations, a chat under pressure, and
random calls that are checked one by one.

Runs where vLLM is: python vllm_tier.py CHECKOUT TRACE LIMIT CHUNKS,... OUT.json; TRACE may not be there, LIMIT 0 is all of it.
"""

import json
import random
import sys
from collections import deque
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import bench  # noqa: F401  makes `quire` importable where it is not installed

del sys.path[0]

import page_blocks  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key  # noqa: E402
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager  # noqa: E402

from quire.bench.common.traces import BLOCK_TOKENS, read_trace  # noqa: E402

POLICIES = {
    "lru": None,
    "arc": None,
    "ResumePointPolicy": "quire.models.integrations.vllm_tier_policy",
}
PAGE = Path(sys.argv[1]) / "docs" / "adopt-vllm.md"
STEP = 16  # chunks of a scheduler step
RUNNING = 8
WINDOWS, TAIL = (
    5,
    2,
)  # groups as of Gemma 3: one of full attention, five with a window of 1024 tokens, in chunks of 512


class Tier:
    """The calls that vLLM's connector makes of a manager, for requests whose chunks are not on the GPU.

    Args:
        interval: vLLM's ``prefix_cache_retention_interval``: which window chunks are stored. None: all; else the last tail of a prompt,
            and those of boundaries so many tokens apart (0, its default: no others).
    """

    def __init__(self, policy, slots, interval=None, windows=WINDOWS):
        self.manager = CPUOffloadingManager(slots, policy, POLICIES[policy])
        self.interval, self.groups, self.number = interval, windows + 1, 0

    def request(self, ids, num_tokens):
        """Context, and tokens that are loaded; all other whole chunks are stored."""
        self.number += 1
        context = ReqContext(str(self.number))
        self.manager.on_new_request(context)
        keys = [
            [make_offload_key(i.to_bytes(8, "big"), group) for i in ids]
            for group in range(self.groups)
        ]
        for group in keys:
            for i, key in enumerate(group):
                context.set_offload_key_position(key, (i + 1) * BLOCK_TOKENS)
        most = (num_tokens - 1) // BLOCK_TOKENS
        hit = self.hit(keys, most, context)
        if hit:
            loaded = keys[0][:hit] + [key for g in keys[1:] for key in g[max(0, hit - TAIL) : hit]]
            self.manager.prepare_load(loaded, context)
            self.manager.complete_load(loaded, context)
        for start in range(hit, len(ids), STEP):
            chunks = range(start, min(start + STEP, len(ids)))
            new = [
                keys[group][i]
                for group in range(self.groups)
                for i in chunks
                if group == 0 or self.is_stored(i, most)
            ]
            store = self.manager.prepare_store(new, context)
            if store is not None:
                self.manager.complete_store(store.keys_to_store, context)
        return context, hit * BLOCK_TOKENS

    def is_stored(self, i, most):
        if self.interval is None or most - TAIL <= i < most:
            return True
        apart = self.interval // BLOCK_TOKENS
        return apart > 0 and i % apart >= apart - TAIL

    def hit(self, keys, most, context):
        found = 0
        while found < most and self.has(keys[0][found], context):
            found += 1
        while found and not all(
            self.has(key, context) for g in keys[1:] for key in g[max(0, found - TAIL) : found]
        ):
            found -= 1
        return found

    def has(self, key, context):
        return self.manager.lookup(key, context) is LookupResult.HIT


def replay(requests, policy, slots, interval):
    """Part of the prompts' tokens that was loaded."""
    tier, running, loaded = Tier(policy, slots, interval), deque(), 0
    for r in requests:
        whole = r.hash_ids[: r.input_length // BLOCK_TOKENS]
        context, tokens = tier.request(whole, r.input_length)
        loaded += tokens
        running.append(context)
        if len(running) > RUNNING:
            tier.manager.on_request_finished(running.popleft())
    return loaded / sum(r.input_length for r in requests)


def a_chat(policy):
    """Tokens that the third turn of a chat loads after as many chunks of others as the tier has; two turns before it teach what a tail is.

    The tier has room for all chunks of full attention and all tails, not for all window chunks.
    """
    tier = Tier(policy, 300)
    loads = []
    for turn in (1, 2, 3):
        context, loaded = tier.request(list(range(10 * turn)), 10 * turn * BLOCK_TOKENS + 1)
        loads.append(loaded)
        tier.manager.on_request_finished(context)
        if turn == 2:
            for other in range(5):
                ids = list(range(1000 * (other + 1), 1000 * (other + 1) + 10))
                context, _ = tier.request(ids, 10 * BLOCK_TOKENS + 1)
                tier.manager.on_request_finished(context)
    return loads


def random_calls(policy, seed, steps=400):
    """Random requests of a small tier: chunks never pass its size, pinned ones stay, and evictions are of what was there."""
    chance = random.Random(seed)
    slots, windows = chance.choice([7, 24, 60]), chance.choice([0, 1, 2])
    tier = Tier(policy, slots, windows=windows)
    manager, here, pinned, running, wrong = tier.manager, set(), [], [], 0
    for _ in range(steps):
        context = ReqContext(str(tier.number))
        tier.number += 1
        manager.on_new_request(context)
        ids = [100 * chance.randrange(3) + i for i in range(chance.randrange(1, 8))]
        keys = [make_offload_key(i.to_bytes(8, "big"), g) for g in range(windows + 1) for i in ids]
        if chance.random() < 0.9:
            for key in keys:
                position = (int.from_bytes(key[:8], "big") % 100 + 1) * BLOCK_TOKENS
                context.set_offload_key_position(key, position)
        ready = [k for k in keys if tier.has(k, context)]
        wrong += set(ready) != here & set(keys)
        if ready and chance.random() < 0.5:
            some = chance.sample(ready, chance.randrange(1, len(ready) + 1))
            manager.prepare_load(some, context)
            pinned.append((some, context))
        store = manager.prepare_store(keys, context)
        if store is not None:
            evicted = set(store.evicted_keys)
            held = {key for some, _ in pinned for key in some}
            wrong += not evicted <= here or bool(evicted & (held | set(keys)))
            here -= evicted
            done = chance.random() < 0.9
            manager.complete_store(store.keys_to_store, context, success=done)
            here |= set(store.keys_to_store) if done else set()
        wrong += len(here) > slots
        running.append(context)
        if len(pinned) > 1:
            manager.complete_load(*pinned.pop(chance.randrange(len(pinned))))
        if len(running) > 3:
            manager.on_request_finished(running.pop(chance.randrange(len(running))))
        if chance.random() < 0.01:
            for some, context in pinned:
                manager.complete_load(some, context)
            pinned, here = [], set()
            manager.reset_cache()
    return wrong


def main():
    trace, limit = Path(sys.argv[2]), int(sys.argv[3]) or None
    said = {"chat": {policy: a_chat(policy) for policy in POLICIES}, "trace": None}
    said["random"] = [random_calls("ResumePointPolicy", seed) for seed in range(20)]
    if trace.is_file():
        requests = read_trace(trace, limit=limit)
        said["trace"] = [
            {"interval": interval, "chunks": slots}
            | {p: replay(requests, p, slots, interval) for p in POLICIES}
            for interval in (None, 4096, 0)
            for slots in map(int, sys.argv[4].split(","))
        ]
    said["page"] = page_blocks.run(PAGE, "needs vLLM")
    Path(sys.argv[5]).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
