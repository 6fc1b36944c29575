"""A stand-in for FlashInfer on a CPU: its wrappers for attention over pages, as they are documented, in torch.

It computes in fp32, one sequence after the other, and refuses what is documented as wrong: tensors of other dtypes than those that were planned, empty
pages, queries of another number. Its signatures are a part of those of the package (`tests.models.layers.test_flashinfer_signatures`), so a call that
it takes is a call of the package.

Source: FlashInfer's ``decode.py`` and ``prefill.py``.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from quire.models.layers import flashinfer


class BatchPrefillWithPagedKVCacheWrapper:
    """Queries are the last keys of their sequence."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
        assert backend in ("auto", "fa2", "fa3")
        self.plans = 0

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale=None,
        window_left=-1,
        q_data_type="float16",
        kv_data_type=None,
    ):
        rows = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert num_qo_heads % num_kv_heads == 0 and page_size > 0
        assert all(each.dtype == torch.int32 and each.ndim == 1 for each in (qo_indptr, *rows))
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        counts = paged_kv_indptr.diff()
        assert bool((counts >= 1).all())
        assert bool(((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all())
        lengths = (counts - 1) * page_size + paged_kv_last_page_len
        assert bool((qo_indptr.diff() <= lengths).all()), "queries are among the keys"
        self._cu, self._lengths = qo_indptr.tolist(), lengths.tolist()
        self._pages = paged_kv_indices.clone().split(counts.tolist())
        self._heads = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._dtypes = q_data_type, kv_data_type
        self._causal, self._scale, self._window = causal, sm_scale, window_left
        self.plans += 1

    def run(self, q, paged_kv_cache, *args, k_scale=None, v_scale=None, out=None):
        assert not args
        num_heads, num_kv_heads, head_dim, page_size = self._heads
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (page_size, num_kv_heads, head_dim)
            assert (q.dtype, cache.dtype) == self._dtypes
        assert q.shape == (self._cu[-1], num_heads, head_dim), "not the queries that were planned"
        out = torch.empty_like(q) if out is None else out
        assert out.shape == q.shape and out.dtype == q.dtype
        starts, stops = self._cu[:-1], self._cu[1:]
        for pages, length, start, stop in zip(
            self._pages, self._lengths, starts, stops, strict=True
        ):
            keys, values = (
                torch.stack([cache[page].float() for page in pages.tolist()])
                .flatten(0, 1)[:length]
                .repeat_interleave(num_heads // num_kv_heads, dim=1)
                for cache in paged_kv_cache
            )
            scale = self._scale * (1.0 if k_scale is None else k_scale)
            scores = torch.einsum("qhd,khd->hqk", q[start:stop].float(), keys) * scale
            key = torch.arange(length)
            own_key = torch.arange(length - (stop - start), length)[:, None]  # of each query
            seen = key <= own_key if self._causal else key >= 0
            if self._window >= 0:
                seen = seen & (key >= own_key - self._window)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", weights, values)
            out[start:stop] = (attended * (1.0 if v_scale is None else v_scale)).to(out.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """One query a sequence, the last of its keys."""

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", *, use_tensor_cores=False, backend="auto"
    ):
        super().__init__(float_workspace_buffer, kv_layout, backend=backend)

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        window_left=-1,
        q_data_type="float16",
        kv_data_type=None,
        sm_scale=None,
    ):
        cu = torch.arange(len(indptr), dtype=torch.int32)
        heads = num_qo_heads, num_kv_heads, head_dim, page_size
        super().plan(
            cu,
            indptr,
            indices,
            last_page_len,
            *heads,
            sm_scale=sm_scale,
            window_left=window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )


WRAPPERS = (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)


def install(monkeypatch, *, head_dims=flashinfer.HEAD_DIMS) -> ModuleType:
    """Puts it in the place of the package, on CPUs and in fp32 too."""
    module = ModuleType("flashinfer")
    module.__version__ = "stand-in"
    for each in WRAPPERS:
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "DEVICES", ["cpu"])
    monkeypatch.setattr(flashinfer, "DTYPES", [torch.float32])
    monkeypatch.setattr(flashinfer, "HEAD_DIMS", list(head_dims))
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 2**10)
    return module
