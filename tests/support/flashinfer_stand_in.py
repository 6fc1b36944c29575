"""A stand-in for FlashInfer on a CPU: its two wrappers for paged attention, its norms and gated products, as they are documented, in torch.

It computes in fp32, one sequence after the other, and refuses what is documented as wrong: tensors of other dtypes than those that were planned, empty
pages, queries of another number. With ``use_cuda_graph`` a run reads what the buffers hold then. Its signatures are a part of those of the package
(`tests.models.flashinfer.test_signatures`), so a call that it takes is a call of the package.

Source: FlashInfer's ``decode.py``, ``prefill.py``, ``norm.cuh`` and ``activation.cuh``.
"""

from __future__ import annotations

import math
import sys
from types import ModuleType

import torch
import torch.nn.functional as F

from quire.kernels.common import flashinfer as functions
from quire.models.flashinfer import support

INT_DTYPE = torch.int32


class Wrapper:
    """What both have in common."""

    def _begin(self, workspace, kv_layout, backend):
        assert (
            workspace.dtype == torch.uint8
            and kv_layout == "NHD"
            and backend in ("auto", "fa2", "fa3")
        )
        self._planned = None
        self._buffers = None  # of a wrapper in CUDA-graph mode
        self.plans = 0

    def _plan(self, cu, indptr, indices, last_page_len, heads, options):
        num_heads, num_kv_heads, _, page_size = heads
        assert num_heads % num_kv_heads == 0 and page_size > 0
        counts = indptr.diff()
        for each in (cu, indptr, indices, last_page_len):
            assert each.dtype == INT_DTYPE and each.ndim == 1
        assert len(cu) == len(indptr) == len(last_page_len) + 1 and indptr[0] == cu[0] == 0
        assert int(indptr[-1]) == len(indices) and bool((counts >= 1).all())
        assert bool(((last_page_len >= 1) & (last_page_len <= page_size)).all())
        lengths = (counts - 1) * page_size + last_page_len
        assert bool((cu.diff() <= lengths).all()), "queries are among the keys"
        rows = indptr, indices, last_page_len
        if self._buffers is None:
            self._rows = tuple(each.clone() for each in rows)
        else:
            assert len(last_page_len) == len(self._buffers[2]), "the batch size is fixed"
            assert len(indices) <= len(self._buffers[1]), "the buffer is too small"
            for buffer, each in zip(self._buffers, rows, strict=True):
                buffer[: len(each)].copy_(each)
            self._rows = self._buffers
        self._cu, self._planned = cu.clone(), (heads, options)
        self.plans += 1

    def compute(self, q, paged_kv_cache, out, k_scale, v_scale, causal):
        (num_heads, num_kv_heads, head_dim, page_size), options = self._planned
        k_cache, v_cache = paged_kv_cache
        assert k_cache.shape[1:] == v_cache.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert q.shape == (int(self._cu[-1]), num_heads, head_dim), (
            "not the queries that were planned"
        )
        assert (
            q.dtype == options["q_data_type"]
            and k_cache.dtype == v_cache.dtype == options["kv_data_type"]
        )
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype)
        assert out.shape == q.shape and out.dtype == q.dtype
        indptr, indices, last = (each.tolist() for each in self._rows)
        scale = options["sm_scale"] * (1.0 if k_scale is None else k_scale)
        window = options["window_left"]
        for s, (start, stop) in enumerate(
            zip(self._cu[:-1].tolist(), self._cu[1:].tolist(), strict=True)
        ):
            pages = torch.tensor(indices[indptr[s] : indptr[s + 1]])
            length = (len(pages) - 1) * page_size + last[s]

            def rows_of(cache, pages=pages, length=length):
                values = (
                    cache.view(torch.uint8)[pages].view(cache.dtype)
                    if cache.dtype.itemsize == 1
                    else cache[pages]
                )
                rows = values.flatten(0, 1)[:length].float()
                return rows.repeat_interleave(num_heads // num_kv_heads, dim=1)

            logits = torch.einsum("qhd,khd->hqk", q[start:stop].float(), rows_of(k_cache)) * scale
            key = torch.arange(length)
            last_key = (
                torch.arange(stop - start)[:, None] + length - (stop - start)
            )  # of each query
            seen = key <= last_key if causal else torch.ones_like(key <= last_key)
            if window >= 0:
                seen &= key >= last_key - window
            weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
            values = rows_of(v_cache)
            attended = torch.einsum(
                "hqk,khd->qhd", weights, values * (1.0 if v_scale is None else v_scale)
            )
            out[start:stop] = attended.to(out.dtype)
        return out


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """One query a sequence, which sees all keys of a window at their end."""

    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        self._begin(float_workspace_buffer, kv_layout, backend)
        if use_cuda_graph:
            self._buffers = (
                paged_kv_indptr_buffer,
                paged_kv_indices_buffer,
                paged_kv_last_page_len_buffer,
            )
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1

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
        cu = torch.arange(len(last_page_len) + 1, dtype=INT_DTYPE)
        options = {
            "window_left": window_left,
            "sm_scale": sm_scale,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        heads = num_qo_heads, num_kv_heads, head_dim, page_size
        self._plan(cu, indptr, indices, last_page_len, heads, options)

    def run(self, q, paged_kv_cache, *args, k_scale=None, v_scale=None, out=None):
        assert not args
        return self.compute(q, paged_kv_cache, out, k_scale, v_scale, causal=False)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Queries are the last keys of their sequence."""

    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        self._begin(float_workspace_buffer, kv_layout, backend)

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
        options = {
            "window_left": window_left,
            "sm_scale": sm_scale,
            "q_data_type": q_data_type,
            "kv_data_type": kv_data_type,
        }
        self._causal = causal
        heads = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, heads, options
        )

    def run(self, q, paged_kv_cache, *args, k_scale=None, v_scale=None, out=None):
        assert not args
        return self.compute(q, paged_kv_cache, out, k_scale, v_scale, causal=self._causal)


WRAPPERS = (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)


def expect_vectors(*tensors):
    """Rows that its kernels can load in vectors, of one dtype that they are compiled for."""
    for tensor in tensors:
        assert tensor.dtype == tensors[0].dtype in (torch.float16, torch.bfloat16)
        assert tensor.stride(-1) == 1 and tensor.numel()
        vector = 2 * math.gcd(8, tensor.shape[-1])
        assert not any(2 * step % vector for step in tensor.stride()[:-1])
        assert tensor.data_ptr() % vector == 0


def normed(x, weight, eps, bias):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (bias + weight.float())


def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None, bias=0.0):
    out = torch.empty_like(input) if out is None else out
    expect_vectors(input, weight, out)
    return out.copy_(normed(input.float(), weight, eps, bias))


def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None, bias=0.0):
    """The sum is normed before it is rounded."""
    expect_vectors(input, residual, weight)
    x = input.float() + residual.float()
    residual.copy_(x)
    input.copy_(normed(x, weight, eps, bias))


def gemma_rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    return rmsnorm(input, weight, eps, out, bias=1.0)


def gemma_fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    fused_add_rmsnorm(input, residual, weight, eps, bias=1.0)


def act_and_mul(input, out, activation):
    """It takes rows for contiguous."""
    assert input.is_contiguous() and out.is_contiguous()
    assert out.shape == (*input.shape[:-1], input.shape[-1] // 2)
    gate, up = input.float().chunk(2, dim=-1)
    expect_vectors(out, *input.chunk(2, dim=-1))
    return out.copy_(activation(gate) * up)


def silu_and_mul(input, out=None, enable_pdl=None):
    return act_and_mul(input, out, F.silu)


def gelu_tanh_and_mul(input, out=None, enable_pdl=None):
    return act_and_mul(input, out, lambda x: F.gelu(x, approximate="tanh"))


FUNCTIONS = (
    rmsnorm,
    gemma_rmsnorm,
    fused_add_rmsnorm,
    gemma_fused_add_rmsnorm,
    silu_and_mul,
    gelu_tanh_and_mul,
)


def install(monkeypatch, *, head_dims=support.HEAD_DIMS) -> ModuleType:
    """Puts it in the place of the package, on CPUs and in fp32 too."""
    module = ModuleType("flashinfer")
    module.__version__ = "stand-in"
    for each in (*WRAPPERS, *FUNCTIONS):
        setattr(module, each.__name__, each)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(functions, "DEVICES", ("cpu",))
    monkeypatch.setattr(support, "DEVICES", ("cpu",))
    monkeypatch.setattr(support, "DTYPES", (torch.float32,))
    monkeypatch.setattr(support, "HEAD_DIMS", head_dims)
    monkeypatch.setattr("quire.models.flashinfer.wrappers.WORKSPACE_BYTES", 2**10)
    return module
