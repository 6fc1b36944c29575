"""`kill -9` of the sender, the receiver and the store at random moments: a prefix is there whole or not at all, and nothing hangs.

`QUIRE_HANDOFF_KILLS=50` for many of each, `QUIRE_HANDOFF_SEED` for others.
"""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench.handoff.stores import lacking, running
from tests.support.models.handoff_kills import receiver_killed, sender_killed

ROOT = Path(__file__).resolve().parents[3]
KILLS = os.environ.get("QUIRE_HANDOFF_KILLS")
SEED = int(os.environ.get("QUIRE_HANDOFF_SEED", "0"))


@pytest.mark.parametrize("who", [sender_killed, receiver_killed])
def test_an_end_that_is_killed_leaves_whole_prefixes(who):
    rng, done = random.Random(SEED), []
    with running("files") as store:
        for _ in range(int(KILLS or 4)):
            done.append(who(store, rng))
    assert len(set(done)) > 1, "always killed at the same place"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mooncake", "nixl"])
def test_a_store_that_is_killed_is_a_named_error_at_both_ends(kind):
    if (why := lacking(kind)) is not None:
        pytest.skip(why)
    for n in range(int(KILLS or 1)):
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.models.handoff_kills", kind, str(SEED + n)],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
            env={**os.environ, "GLOG_minloglevel": "3", "NIXL_LOG_LEVEL": "FATAL"},
        )  # fmt: skip
        own = [line for line in done.stderr.splitlines() if not re.match(r"[IWE]\d{4} ", line)]
        assert done.returncode == 0, (n, "\n".join(own[-40:]))
        [line] = [line for line in done.stdout.splitlines() if line.startswith("errors:")]
        assert set(line.split()[1:]) <= {"StoreFailed", "StoreTimeout", "MissingObject"} and line.split()[1:], line  # fmt: skip
