"""Random requests with shared prefixes."""

import numpy as np

from quire.bench.replay.requests import Request


def random_requests(seed, n=60, *, every=1.0, lookups=0.1):
    """Prompts that share prefixes in a random tree; a part of them are look-ups."""
    rng = np.random.default_rng(seed)
    prompts, requests, fresh = [[]], [], iter(range(10**6))
    for i in range(n):
        base = prompts[rng.integers(len(prompts))]
        ids = base[: rng.integers(len(base) + 1)]
        ids = ids + [next(fresh) for _ in range(rng.integers(1, 12))]
        prompts.append(ids)
        size = len(ids) * 16 - int(rng.integers(16))
        output = 0 if rng.random() < lookups else int(rng.integers(1, 20))
        requests.append(Request(i * every, i, size, output, np.array(ids), 16))
    return requests
