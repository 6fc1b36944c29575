"""Kernels that an engine compiles: all at its start, and few."""

import collections
import json
import os
from pathlib import Path

import pytest

from tests.support.forked import printed

ROOT = Path(__file__).resolve().parents[3]

# Registers of a thread are those of `bench.static` for sm_90, at the sizes of the released models.
V4 = {
    # Prefill and decode of each kind of layer (a window alone, all entries beside it, a list of them),
    # and decode whose keys no batch of that size splits.
    "latent_kernel": 7,
    "merge_splits_kernel": 1,
    # Entries of CSA (8 tokens of 512 channels), of HCA (128 tokens), index keys (128 channels): a loop
    # over 8 tokens, 128 registers.
    "_compress_kernel": 1,
    # Raw rows to pages (96 registers, if quantized); heads of queries and of the indexer (42).
    "_write_latent_kernel": 2,
    "index_scores_kernel": 1,
    "index_select_kernel": 1,
    # Rows that one expert has: up to 16, and more, of plain and of packed weights.
    "_gate_up_kernel": 2,
    "_down_kernel": 2,
    "_order_kernel": 1,
    "_route_kernel": 1,
    "_products_kernel": 1,
    "_collapse_kernel": 1,
    "_expand_kernel": 1,
    "_copy_overlap_kernel": 1,
    "_gated_product_kernel": 1,
    "_residual_norm_kernel": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "experts"),
    [("gemma4-tiny", []), ("gpt-oss-tiny", []), ("deepseek-v4-tiny", []), ("deepseek-v4-tiny", ["fp4"])],
)  # fmt: skip
def test_nothing_is_compiled_after_the_start(name, experts):
    """Requests of all lengths, batches of all sizes, prompts beside decodes, and drafts: all of it ran once before, as padding.

    A model has 25 kernels at most. DeepSeek-V4 has those of ``V4``: its kinds of layers share each but ``latent_kernel``, and three
    others are compiled twice, as one for all would be worse at one of its uses.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    code = "import json, sys; from tests.support.models.variants import session; print(json.dumps(session(sys.argv[1], 60, *sys.argv[2:])))"
    found = json.loads(printed(code, name, *experts, cwd=ROOT, env=environment))
    assert not found["later"], found["later"]
    counts = collections.Counter(found["start"])
    assert counts.pop("sample_kernel") == 2
    assert 4 <= counts.total() <= 25, counts
    if name == "deepseek-v4-tiny":
        assert counts == V4
