"""FlashInfer's adapter over a stand-in for its wrappers, which computes in fp32, a sequence at a time."""

import sys
from types import ModuleType

import pytest
import torch

from quire.bench.cases.problem import expect, make_problem
from quire.bench.cases.shapes import Case, Shape
from quire.bench.peers import flashinfer as adapter
from quire.bench.peers.peer import Unsupported


class PrefillWrapper:
    """Queries are the last keys of their sequence. Signatures are a part of FlashInfer's."""

    def __init__(self, workspace, kv_layout="NHD", *, backend="auto"):
        assert workspace.dtype == torch.uint8 and kv_layout == "NHD" and backend == "fa2"

    def plan(
        self, qo_indptr, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim,
        page_size, *, causal=False, sm_scale=None, window_left=-1, q_data_type="float16",
        kv_data_type=None,
    ):  # fmt: skip
        for each in (qo_indptr, indptr, indices, last_page_len):
            assert each.dtype == torch.int32 and each.ndim == 1
        counts = indptr.diff()
        assert causal and bool((counts >= 1).all()) and int(counts.sum()) == len(indices)
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        self.cu, self.lengths = qo_indptr.tolist(), (counts - 1) * page_size + last_page_len
        self.pages = indices.clone().split(counts.tolist())
        self.heads, self.page_size = (num_qo_heads, num_kv_heads, head_dim), page_size
        self.dtypes, self.scale, self.window = (q_data_type, kv_data_type), sm_scale, window_left

    def run(self, q, paged_kv_cache, *, out):
        num_heads, num_kv_heads, head_dim = self.heads
        assert q.shape == out.shape == (self.cu[-1], num_heads, head_dim)
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (self.page_size, num_kv_heads, head_dim)
            assert (q.dtype, cache.dtype) == self.dtypes
        for i, (pages, length) in enumerate(zip(self.pages, self.lengths.tolist(), strict=True)):
            rows = slice(self.cu[i], self.cu[i + 1])
            keys, values = (
                cache[pages.long()].float().flatten(0, 1)[:length]
                .repeat_interleave(num_heads // num_kv_heads, dim=1)
                for cache in paged_kv_cache
            )  # fmt: skip
            key = torch.arange(length)
            own_key = torch.arange(length - (rows.stop - rows.start), length)[:, None]
            seen = key <= own_key
            if self.window >= 0:
                seen = seen & (key >= own_key - self.window)
            scores = torch.einsum("qhd,khd->hqk", q[rows].float(), keys) * self.scale
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        return out


class DecodeWrapper(PrefillWrapper):
    """One query a sequence, the last of its keys."""

    def __init__(self, workspace, kv_layout="NHD", *, use_tensor_cores=False, backend="auto"):
        super().__init__(workspace, kv_layout, backend=backend)

    def plan(self, indptr, indices, last_page_len, *heads, **options):
        cu = torch.arange(len(indptr), dtype=torch.int32)
        super().plan(cu, indptr, indices, last_page_len, *heads, causal=True, **options)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    module = ModuleType("flashinfer")
    module.__version__ = "stand-in"
    module.BatchPrefillWithPagedKVCacheWrapper = PrefillWrapper
    module.BatchDecodeWithPagedKVCacheWrapper = DecodeWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(adapter, "WORKSPACE_BYTES", 2**10)


def problem_of(phase, window, **more):
    case = Case(Shape("", 4, 2, 16, window, **more), phase, 2, 40, 16)
    return make_problem(case, torch.device("cpu"), torch.bfloat16, copies=1)


@pytest.mark.parametrize("phase", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("window", [None, 24])
def test_the_adapter_gives_what_is_expected(phase, window):
    problem = problem_of(phase, window, softmax_scale=0.3)
    peer = adapter.flashinfer_peer(None)
    assert peer.version == "stand-in"
    [call] = peer.prepare(problem)
    [out] = call()
    assert expect(problem).wrong(out) is None


def test_what_it_cannot_do_is_refused():
    with pytest.raises(Unsupported, match="sinks"):
        adapter.flashinfer_peer(None).prepare(problem_of("decode", 24, sinks=True))
