"""Kernels that an engine compiles: all at its start, and few."""

import collections
import json
import os
from pathlib import Path

import pytest

from tests.support.forked import printed

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "experts"),
    [("gemma4-tiny", []), ("gpt-oss-tiny", []), ("deepseek-v4-tiny", []), ("deepseek-v4-tiny", ["fp4"])],
)  # fmt: skip
def test_nothing_is_compiled_after_the_start(name, experts):
    """Requests of all lengths, batches of all sizes, prompts beside decodes, and drafts."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = "import json, sys; from tests.support.models.variants import session; print(json.dumps(session(sys.argv[1], 60, *sys.argv[2:])))"
    found = json.loads(printed(code, name, *experts, cwd=ROOT, env=environment))
    assert not found["later"], found["later"]
    counts = collections.Counter(found["start"])
    assert counts.pop("sample_kernel") == 2
    assert 4 <= counts.total() <= 33, counts
