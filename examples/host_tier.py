"""Host memory behind the allocator's pool: `Tiers` says what to copy and when, the engine copies.

    python examples/host_tier.py

Both memories are arrays here. An engine copies on streams beside the model, and calls `done` when a
copy has ended.
"""

import numpy as np

from quire.kvcore import GroupSpec, KVCache
from quire.kvcore.tier import Tiers

full = GroupSpec("full", "dense", 32, page_bytes=4096)
local = GroupSpec("local", "window", 16, page_bytes=4096, sliding_window=64)
kv = KVCache([full, local], num_pages=40, max_requests=4, max_model_len=1024)
rates = {"bytes_per_second": 50e9, "prefill_tokens_per_second": 20_000}
tiers = Tiers(kv, num_pages=200, **rates, watermark=30)
device_memory, host_memory = np.zeros((40, 4096), np.uint8), np.zeros((200, 4096), np.uint8)


def copy(job):
    if job.kind == "store":
        host_memory[job.targets] = device_memory[job.sources]
    else:
        device_memory[job.targets] = host_memory[job.sources]
    tiers.done(job)  # or done(job, failed=True)


def serve(name, prompt):
    match = tiers.match(prompt)
    if job := tiers.load(match):  # None: nothing to load, or no room for it
        copy(job)
    slot = kv.admit(name, kv.match(match.prompt))
    while (done := int(kv.num_computed[slot])) < len(prompt):
        kv.commit(kv.plan([slot], [len(prompt) - done]), prompt[done:])
    kv.release(name)
    for job in tiers.stores(max_bytes=1 << 20):  # between steps
        copy(job)
    return match


for user in range(6):
    serve(f"first {user}", [user, *range(300)])
match = serve("again", [0, *range(300), 7])
print(match.num_saved_tokens, "tokens from the host,", match.device.num_tokens, "on the device")
