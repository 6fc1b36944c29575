"""flash-attn's inference functions, computed by this project's kernels.

``install()`` puts them where ``import flash_attn`` finds them; names, arguments, defaults and
results are those of flash-attn 2.6 to 2.8. Refused by name: dropout, ALiBi, left padding, rotary
embedding, a given ``num_splits``, queries that see keys behind them, and gradients. Pages may have
any size, and fp32 and CPU tensors work too.

Source: flash-attn 2.8.3, ``flash_attn/flash_attn_interface.py``.
"""

from __future__ import annotations

import importlib.metadata
import math
import operator
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quire.kernels import attention_for, write_kv
from quire.kernels.attention.api import AttentionCall, check_attention
from quire.kernels.common.checks import MODEL_DTYPES, expect_ids, expect_tensor

STANDS_IN_FOR = "2.8.3"


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """Attention of a ragged batch over packed or paged keys, which hold the step's own.

    Args:
        q: [total_q, num_heads, head_dim] bf16, fp16 or fp32.
        k, v: [total_k, num_kv_heads, head_dim] packed, or with ``block_table`` [num_pages,
            block_size, num_kv_heads, head_dim].
        cu_seqlens_q, cu_seqlens_k: [num_seqs + 1] int32, prefix sums of new tokens and of keys.
        max_seqlen_q, max_seqlen_k: at least the longest of each.
        softmax_scale: factor of q . k; None = head_dim ** -0.5.
        causal: query i of sequence s sees the keys up to i + len_k - len_q. One new token sees all.
        window_size: (left, right), how many keys before and behind its own a query sees; -1 = all.
        softcap: logits become softcap * tanh(logit / softcap); 0 = no cap.
        return_attn_probs: also return the lse.
        block_table: [num_seqs, width] int32, page ids.
        dropout_p, alibi_slopes: not served; ``deterministic`` has no effect.

    Returns:
        out [total_q, num_heads, head_dim] in q's dtype. With ``return_attn_probs`` (out, lse, empty
        tensor). lse: [num_heads, total_q] fp32, natural log, +inf where a query sees no key.

    Raises:
        NotImplementedError: an argument asks for what is not served.
        ValueError: a shape, dtype, stride, device or host value is not as above.
    """
    _expect_off(dropout_p=dropout_p, alibi_slopes=alibi_slopes)
    q, k, v = _inference(q=q, k=k, v=v)
    longest_q, longest_k = operator.index(max_seqlen_q), operator.index(max_seqlen_k)
    expect_tensor("cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), torch.int32)
    new_k = new_v = None
    if block_table is None:
        expect_tensor("k", k, (None, None, q.shape[-1]), q.dtype, device=q.device)
        expect_tensor("v", v, tuple(k.shape), q.dtype, device=q.device)
        if cu_seqlens_k is cu_seqlens_q and k.shape[0] == q.shape[0]:
            new_k, new_v = k, v
            block_table = cu_seqlens_q[:-1, None]  # there is no context, so no entry is read
        else:  # read where they lie, as pages of one row
            if cu_seqlens_k.is_cpu:
                expect_ids("max_seqlen_k", cu_seqlens_k.diff(), longest_k + 1, "lengths")
            keys = torch.arange(max(1, longest_k), dtype=torch.int32, device=k.device)
            block_table = cu_seqlens_k[:-1, None] + keys
        k, v = k.unsqueeze(1), v.unsqueeze(1)
    call: dict[str, Any] = {
        "q": q, "k_pages": k, "v_pages": v, "block_table": block_table, "k": new_k, "v": new_v,
        "seq_lens": cu_seqlens_k.diff(), "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": longest_q,
        "max_seq_len": longest_k, "softmax_scale": softmax_scale, "softcap": softcap or None,
    }  # fmt: skip
    out, lse = _attend(call, _window(causal, window_size, longest_q), return_attn_probs)
    return out if lse is None else (out, lse, q.new_empty(0))


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of equally long queries over a cache, to which new rows are written first.

    Args:
        q: [num_seqs, seqlen_q, num_heads, head_dim] bf16, fp16 or fp32.
        k_cache, v_cache: [cache_rows, capacity, num_kv_heads, head_dim], a cache row for each
            sequence, or with ``block_table`` [num_pages, block_size, num_kv_heads, head_dim].
        k, v: [num_seqs, seqlen_new, num_kv_heads, head_dim] rows to write behind ``cache_seqlens``,
            in place, before attention; both or neither.
        cache_seqlens: int or [num_seqs] int32, keys in the cache before ``k``; None, without ``k``:
            the cache is full.
        cache_batch_idx: [num_seqs] int32, row of the cache of each sequence; None = 0, 1, 2, ...
        block_table: [num_seqs, width] int32, page ids.
        softmax_scale, causal, window_size, softcap: as ``flash_attn_varlen_func``.
        return_softmax_lse: also return the lse.
        rotary_cos, rotary_sin, cache_leftpad, alibi_slopes, num_splits: not served;
            ``rotary_interleaved`` has no effect.

    Returns:
        [num_seqs, seqlen_q, num_heads, head_dim] in q's dtype; with ``return_softmax_lse`` a tuple
        of it and the lse, [num_seqs, num_heads, seqlen_q], as ``flash_attn_varlen_func``.

    Raises:
        NotImplementedError, ValueError: as ``flash_attn_varlen_func``; nothing is written then.
    """
    _expect_off(
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes, num_splits=num_splits,
    )  # fmt: skip
    q, *_ = _inference(q=q, k_cache=k_cache, v_cache=v_cache)
    expect_tensor("q", q, (None,) * 4, MODEL_DTYPES)
    num_seqs, seqlen_q, num_heads, head_dim = q.shape
    expect_tensor("k_cache", k_cache, (None, None, None, head_dim), q.dtype, device=q.device)
    expect_tensor("v_cache", v_cache, tuple(k_cache.shape), q.dtype, device=q.device)
    if block_table is None:  # a row of the cache is a page that holds all of a sequence
        rows = cache_batch_idx
        if rows is None:
            rows = torch.arange(num_seqs, dtype=torch.int32, device=q.device)
        expect_tensor("cache_batch_idx", rows, (num_seqs,), torch.int32, device=q.device)
        block_table = rows[:, None]
    elif cache_batch_idx is not None:
        raise ValueError("cache_batch_idx: expected None with block_table, got a tensor")
    capacity = block_table.shape[1] * k_cache.shape[1]
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise ValueError(f"{missing}: expected rows of both k and v or of neither, got None")
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens: expected lengths with k, got None")
        cache_seqlens = capacity
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = torch.full((num_seqs,), cache_seqlens, dtype=torch.int32, device=q.device)
    expect_tensor("cache_seqlens", cache_seqlens, (num_seqs,), torch.int32, device=q.device)
    seq_lens = cache_seqlens
    if k is not None and v is not None:
        k, v = _inference(k=k, v=v)
        shape = (num_seqs, None, k_cache.shape[2], head_dim)
        expect_tensor("k", k, shape, q.dtype, device=q.device)
        expect_tensor("v", v, tuple(k.shape), q.dtype, device=q.device)
        seq_lens = cache_seqlens + k.shape[1]
    if seq_lens.is_cpu:
        expect_ids("cache_seqlens", seq_lens, capacity + 1, "lengths that the cache holds")
    window = _window(causal, window_size, seqlen_q)
    call: dict[str, Any] = {
        "q": q.flatten(0, 1), "k_pages": k_cache, "v_pages": v_cache, "block_table": block_table,
        "cu_seqlens_q": torch.arange(num_seqs + 1, dtype=torch.int32, device=q.device) * seqlen_q,
        "seq_lens": seq_lens, "max_seqlen_q": seqlen_q, "softmax_scale": softmax_scale,
        "softcap": softcap or None,
    }  # fmt: skip
    if k is not None and v is not None:
        # So that a refused call has written nothing.
        check_attention(AttentionCall(**call, sliding_window=window))
        position = cache_seqlens[:, None].long() + torch.arange(k.shape[1], device=q.device)
        page = block_table.long().gather(1, position // k_cache.shape[1])
        slots = page * k_cache.shape[1] + position % k_cache.shape[1]
        write_kv(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots.flatten())
    out, lse = _attend(call, window, return_softmax_lse)
    if lse is None:
        return out.view(q.shape)
    return out.view(q.shape), lse.view(num_heads, num_seqs, seqlen_q).transpose(0, 1)


def install() -> ModuleType:
    """Make ``import flash_attn`` find these functions, in this process.

    Returns:
        The module that stands in; its ``flash_attn_interface`` has the same two functions.

    Raises:
        NotImplementedError: flash-attn is installed in a version whose functions take other
            arguments.
        RuntimeError: flash-attn has been imported, so its functions may be in use.
    """
    present = sys.modules.get("flash_attn")
    if present is not None:
        if getattr(present, "stands_in", False):
            return present
        raise RuntimeError("flash_attn: expected install() before its first import, got it loaded")
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        version = STANDS_IN_FOR
    if not (2, 6) <= tuple(int(part) for part in version.split(".")[:2]) < (3, 0):
        raise NotImplementedError(f"flash-attn: expected 2.6 to 2.8, got {version}")
    modules: list[Any] = []
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        module: Any = ModuleType(name, f"{__name__} under another name.")
        module.__spec__ = ModuleSpec(name, None)
        module.__version__, module.stands_in = version, True
        module.flash_attn_varlen_func = flash_attn_varlen_func
        module.flash_attn_with_kvcache = flash_attn_with_kvcache
        sys.modules[name] = module
        modules.append(module)
    package, package.flash_attn_interface = modules[0], modules[1]
    package.__path__ = []  # so that other submodules are said to be missing
    return package


def _expect_off(**arguments: Any) -> None:
    """Require that what is not served is left at the value that turns it off."""
    for name, value in arguments.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            came = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise NotImplementedError(f"{name}: is not served, expected its default, got {came}")


def _inference(**tensors: Tensor) -> list[Tensor]:
    """The tensors with last stride 1; those that need a gradient are refused."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: gradients are not served, expected torch.no_grad() around the call"
            )
    return [t if t.stride(-1) == 1 else t.contiguous() for t in tensors.values()]


def _window(causal: bool, window_size: Sequence[int], longest_q: int) -> int | None:
    """Keys that a query sees, its own included; None = all before it."""
    left, right = window_size
    if not causal and right != 0 and longest_q > 1:
        raise NotImplementedError(
            "causal: expected True, or window_size[1] 0, for more than one new token, got False"
        )
    return left + 1 if left >= 0 else None


def _without_early_queries(call: dict[str, Any]) -> dict[str, Tensor]:
    """Each sequence as two: its queries before the first key, as padding, and the others."""
    start, stop = call["cu_seqlens_q"][:-1], call["cu_seqlens_q"][1:]
    first = torch.maximum(start, stop - call["seq_lens"])
    if first.equal(start):
        return {}
    seq_lens = torch.stack([torch.zeros_like(first), call["seq_lens"]], 1).flatten()
    return {
        "cu_seqlens_q": torch.cat([torch.stack([start, first], 1).flatten(), stop[-1:]]),
        "seq_lens": seq_lens,
        "block_table": call["block_table"].repeat_interleave(2, 0),
    }


def _attend(
    call: dict[str, Any], window: int | None, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Result and, if asked for, lse of a call of the kernels."""
    q, lse = call["q"], None
    if q.is_cpu:  # where the kernels refuse more queries than keys
        call |= _without_early_queries(call)
    if with_lse:
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    out = attention_for(window)(**call, lse=lse)
    return out, None if lse is None else lse.masked_fill_(lse == -math.inf, math.inf)
