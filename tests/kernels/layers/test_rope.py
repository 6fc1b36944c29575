"""norm_rope, both implementations, against the oracle."""

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import norm_rope
from tests.kernels.oracles import rope as reference
from tests.support.helpers import assert_within_budget, drawing, wider

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Arguments of `make`.
CASES = {
    "llama": dict(),
    "llama-bf16": dict(dtype=BF16, padding=8),
    "gpt-oss": dict(num_heads=8, num_kv_heads=1, head_dim=64, dtype=BF16),
    "gemma-3": dict(norm=True, offset=1.0, padding=3),
    "gemma-3-bf16": dict(norm=True, offset=1.0, dtype=BF16, head_dim=32),
    "gemma-4": dict(norm=True, norm_v=True),
    "gemma-4-bf16": dict(norm=True, norm_v=True, dtype=BF16, padding=1),
    "gemma-4-fp16": dict(norm=True, norm_v=True, dtype=FP16),
    "keys-are-values": dict(norm=True, norm_v=True, has_v=False, dtype=BF16),
    "keys-are-values-as-they-are": dict(has_v=False),
    "only-values-normed": dict(norm_v=True, offset=1.0),
    "queries-alone": dict(num_kv_heads=0, has_v=False, norm=True, dtype=BF16),
    "fp32-weights": dict(norm=True, norm_v=True, dtype=BF16, weight_dtype=FP32),
    "odd-heads": dict(num_heads=7, num_kv_heads=3, norm=True, norm_v=True),
    "several-programs": dict(
        num_tokens=2, num_heads=12, num_kv_heads=3, head_dim=512, norm=True, norm_v=True
    ),
    "one-head": dict(num_tokens=1, num_heads=1, num_kv_heads=1, norm=True),
    "no-tokens": dict(num_tokens=0),
}


def make(
    num_tokens=3, num_heads=4, num_kv_heads=2, head_dim=16, dtype=FP32, weight_dtype=None,
    has_v=True, norm=False, norm_v=False, offset=0.0, padding=0,
):  # fmt: skip
    """Arguments of a call; norm: of queries and keys; padding: channels between two tokens."""
    _, normal = drawing(0)
    heads = num_heads + num_kv_heads * (1 + has_v)
    rows = wider(2 * normal(num_tokens, heads * head_dim).to(dtype), after=padding)
    angles = 20 * normal(num_tokens, head_dim // 2)

    def weight(there):
        values = 1 - offset + 0.3 * normal(head_dim)
        return values.to(weight_dtype or dtype) if there else None

    return {
        "qkv": rows.unflatten(1, (heads, head_dim)),
        "cos": 1.5 * angles.cos(),  # an amplitude, as yarn has one
        "sin": 1.5 * angles.sin(),
        "num_kv_heads": num_kv_heads, "has_v": has_v, "q_weight": weight(norm),
        "k_weight": weight(norm and num_kv_heads > 0), "norm_v": norm_v, "eps": 1e-2, "offset": offset,
    }  # fmt: skip


def assert_right(call, impl):
    qkv, before = call["qkv"], call["qkv"].clone()
    out = norm_rope(**call, impl=impl)
    assert qkv.equal(before) and out.dtype == qkv.dtype and out.is_contiguous()
    assert len(out) == len(qkv)
    if len(qkv):
        with bounding():
            exact = reference.norm_rope(**call)
        assert_within_budget("out", out, exact)


@pytest.mark.parametrize("name", CASES)
def test_norm_rope(impl, name):
    assert_right(make(**CASES[name]), impl)


def test_a_head_size_of_torch_alone():
    assert_right(make(head_dim=24), "torch")


def test_a_head_without_frequencies_stays_where_it_is(impl):
    """Pairs of frequency 0 (proportional RoPE) keep their bits."""
    call = make(**CASES["llama-bf16"])
    call["cos"][:, 3:], call["sin"][:, 3:] = 1.0, 0.0
    out, still = norm_rope(**call, impl=impl), [*range(3, 8), *range(11, 16)]
    assert out[..., still].equal(call["qkv"][:, :6][..., still])
    assert not out[..., :3].equal(call["qkv"][:, :6, :3])
