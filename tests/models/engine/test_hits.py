"""Logits behind a hit, to the bit those of a cold run whose chunks fall on the same rows."""

import pytest
import torch

from quire.models.loading.random_weights import random_model
from tests.models.deepseek_v4.test_engine import V4Recorder
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.support.models.few import few

FP32, E4M3 = "auto", "fp8"
CASES = [
    *((name, FP32) for name in ("gemma3-tiny", "gemma4-small", "deepseek-v4-tiny")),
    # What a hit reads is quantized, as is what the cold run reads.
    *((name, E4M3) for name in ("gemma4-e-tiny", "llama-tiny", "gpt-oss-tiny", "deepseek-v4-small")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kv_cache_dtype"), CASES)
def test_hits_and_resumed_requests_are_bit_equal_to_cold_ones(name, kv_cache_dtype):
    model, record = random_model(few(name), device=DEVICE), Recorder
    if "deepseek" in name:
        record = V4Recorder
    alignment = record(model).engine.kv.alignment
    tokens = prompt(3 * alignment + 9, 4)

    def run(**settings):
        chunks = {"max_num_batched_tokens": alignment, "max_num_seqs": 1, "retention": "dense"}
        return record(model, kv_cache_dtype=kv_cache_dtype, **chunks, **settings)

    cold, warm, disturbed = run(enable_caching=False), run(), run()
    logits = []
    for recorder, hits in ((cold, [0]), (warm, [0, 3 * alignment])):
        ids = [recorder.add(tokens, 6) for _ in hits]
        recorder.run()
        assert [recorder.outputs[i].num_cached_tokens for i in ids] == hits
        logits += [torch.stack(recorder.logits[i]) for i in ids]
    preempted = disturbed.add(tokens, 6)
    disturbed.run(max_steps=3)
    disturbed.engine.scheduler._requeue(list(disturbed.engine.scheduler.running))
    disturbed.run()
    assert disturbed.reports[3].q_lens.tolist() == [9], "from the boundary before it"
    logits.append(torch.stack(disturbed.logits[preempted]))
    assert all(torch.equal(other, logits[0]) for other in logits[1:])
