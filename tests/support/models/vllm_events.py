"""Reads a batch of events as vLLM's own subscribers do, by its `KVEventBatch`.

Runs where vLLM is: python vllm_events.py CHECKOUT OUT.json
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import bench  # noqa: F401  makes `quire` importable where it is not installed

del sys.path[0]

import msgspec  # noqa: E402
from vllm.distributed.kv_events import KVEventBatch  # noqa: E402

from quire.kvcore import EventLog, GroupSpec, KVCache  # noqa: E402
from quire.models.integrations.event_fields import lora_key  # noqa: E402
from quire.models.integrations.kv_events_zmq import encode_batch  # noqa: E402


def main():
    log = EventLog(identities=True)
    groups = [
        GroupSpec("full", "dense", 4, 1),
        GroupSpec("local", "window", 4, 1, sliding_window=6),
    ]
    kv = KVCache(groups, num_pages=40, max_requests=1, max_model_len=64, events=log)
    tokens, image = list(range(12)), b"c0ffee00" * 8
    keys = [(0, None, lora_key("sql")), (5, 7, image)]
    slot = kv.admit("r1", kv.match(tokens, salt=b"tenant", extra_keys=keys))
    kv.commit(kv.plan([slot], [12]), tokens)
    kv.release("r1")
    kv.clear()
    payload = encode_batch(
        log.take()[1], ts=1.0, data_parallel_rank=0, lora_ids={"sql": 3}, session_of={"r1": "s"}.get
    )
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    names = ("lora_id", "lora_name", "extra_keys", "session_id", "group_idx", "kv_cache_spec_kind")
    said = [
        [type(event).__name__, *(getattr(event, name, None) for name in names)]
        for event in batch.events
    ]
    Path(sys.argv[2]).write_text(json.dumps(said))


if __name__ == "__main__":
    main()
