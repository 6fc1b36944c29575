"""norm_rope, both implementations, against the oracle."""

import dataclasses

import pytest
import torch

from quire.kernels import norm_rope
from tests.kernels.oracles import rope as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget
from tests.support.oracles import once

EPS = 1e-2  # large enough to be seen
BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """One call.

    num_heads: of the queries.
    norm: of queries and keys.
    padding: channels that lie between two tokens in memory.
    weight_dtype: of the norms' weights; None = that of the rows.
    """

    num_tokens: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    has_v: bool = True
    norm: bool = False
    norm_v: bool = False
    offset: float = 0.0
    padding: int = 0


CASES = {
    "llama": Case(),
    "llama-bf16": Case(dtype=BF16, padding=8),
    "gpt-oss": Case(num_heads=8, num_kv_heads=1, head_dim=64, dtype=BF16),
    "gemma-3": Case(norm=True, offset=1.0, padding=3),
    "gemma-3-bf16": Case(norm=True, offset=1.0, dtype=BF16, head_dim=32),
    "gemma-4": Case(norm=True, norm_v=True),
    "gemma-4-bf16": Case(norm=True, norm_v=True, dtype=BF16, padding=1),
    "gemma-4-fp16": Case(norm=True, norm_v=True, dtype=torch.float16),
    "keys-are-values": Case(norm=True, norm_v=True, has_v=False, dtype=BF16),
    "keys-are-values-as-they-are": Case(has_v=False),
    "only-values-normed": Case(norm_v=True, offset=1.0),
    "queries-alone": Case(num_kv_heads=0, has_v=False, norm=True, dtype=BF16),
    "fp32-weights": Case(norm=True, norm_v=True, dtype=BF16, weight_dtype=torch.float32),
    "odd-heads": Case(num_heads=7, num_kv_heads=3, norm=True, norm_v=True),
    "several-programs": Case(2, 12, 3, 512, norm=True, norm_v=True),
    "one-head": Case(num_tokens=1, num_heads=1, num_kv_heads=1, norm=True),
}


def make(case, seed=0):
    """Arguments of a call; channels between the tokens are poison."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    heads = case.num_heads + case.num_kv_heads * (1 + case.has_v)
    width = heads * case.head_dim
    wide = torch.full((case.num_tokens, width + case.padding), NAN)
    wide[:, :width] = 2 * normal(case.num_tokens, width)
    qkv = wide.to(DEVICE, case.dtype)[:, :width].view(case.num_tokens, heads, case.head_dim)
    angles = 20 * normal(case.num_tokens, case.head_dim // 2)

    def weight(there):
        weight = 1 - case.offset + 0.3 * normal(case.head_dim)
        return weight.to(DEVICE, case.weight_dtype or case.dtype) if there else None

    return {
        "qkv": qkv,
        "cos": (1.5 * angles.cos()).to(DEVICE),  # an amplitude, as yarn has one
        "sin": (1.5 * angles.sin()).to(DEVICE),
        "num_kv_heads": case.num_kv_heads,
        "has_v": case.has_v,
        "q_weight": weight(case.norm),
        "k_weight": weight(case.norm and case.num_kv_heads > 0),
        "norm_v": case.norm_v,
        "eps": EPS,
        "offset": case.offset,
    }


@pytest.mark.parametrize("name", CASES)
def test_norm_rope(impl, name):
    arguments = make(CASES[name])
    before = arguments["qkv"].clone()
    exact = once(reference.norm_rope, **arguments)
    out = norm_rope(**arguments, impl=impl)
    assert arguments["qkv"].equal(before)
    assert out.dtype == before.dtype and out.is_contiguous()
    assert_within_budget("out", out, exact)
    none = {name: arguments[name][:0] for name in ("qkv", "cos", "sin")}
    assert norm_rope(**arguments | none, impl=impl).shape == (0, *out.shape[1:])


def test_a_head_size_of_torch_alone():
    arguments = make(Case(head_dim=24))
    exact = once(reference.norm_rope, **arguments)
    assert_within_budget("out", norm_rope(**arguments, impl="torch"), exact)


def test_a_head_without_frequencies_stays_where_it_is(impl):
    """Pairs of frequency 0 (proportional RoPE) keep their bits."""
    arguments = make(CASES["llama-bf16"])
    arguments["cos"][:, 3:], arguments["sin"][:, 3:] = 1.0, 0.0
    out = norm_rope(**arguments, impl=impl)
    still = [*range(3, 8), *range(11, 16)]
    assert out[..., still].equal(arguments["qkv"][:, :6][..., still])
    assert not out[..., :3].equal(arguments["qkv"][:, :6, :3])
