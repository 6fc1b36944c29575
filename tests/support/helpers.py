"""Attention batches with poison wherever nothing may be read, and the error budget that results are held to.

The budget is derived, not tuned and not sampled: the oracle's arithmetic, in float64, carries a bound of the errors that a right program may
make on any machine and in any order of summation (`quire.bench.common.bounds`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

from quire.bench.common.bounds import UNIT, Bounded, allowed, bounding
from quire.kernels.attention.api import AttentionCall
from quire.kernels.common import launching
from tests.kernels.oracles import attention as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
# A page id that no pool has: an implementation that looks it up fails.
NO_PAGE = 2**30


def drawing(seed: int) -> tuple[torch.Generator, Callable[..., torch.Tensor]]:
    """A generator, and a function of a shape that draws normal numbers from it, on the device."""
    generator = torch.Generator().manual_seed(seed)
    return generator, lambda *shape: torch.randn(shape, generator=generator).to(DEVICE)


def wider(rows: torch.Tensor, before: int = 0, after: int = 8) -> torch.Tensor:
    """The same rows between channels of NaN, as parts of wider ones."""
    size = rows.shape[-1]
    shape = (*rows.shape[:-1], before + size + after)
    wide = torch.full(shape, NAN, dtype=rows.dtype, device=rows.device)[..., before : before + size]
    return wide.copy_(rows)


def needs_e4m3_conversions() -> None:
    """Skip a test of instructions that convert e4m3 on a device that has none, as sm_80."""
    arch, _ = launching.arch_and_sms(torch.empty(0, device=DEVICE))
    if not arch.widens_e4m3:
        pytest.skip(f"{arch.name} has no instructions that convert e4m3")


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One ragged batch; the fields are the arguments of the attention functions and what shapes them.

    context_only: the batch is one of the keys before the step.
    layout: "nhd" separate pools; "interleaved" K and V of a page side by side [.., block_size, 2, heads, dim]; "hnd" head-major pages.
    ring: the table is a ring of just enough pages; otherwise it is linear.
    """

    name: str
    seq_lens: Sequence[int]
    q_lens: Sequence[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    in_step: bool = True
    context_only: bool = False
    sliding_window: int | None = None
    ring: bool = False
    layout: str = "nhd"
    softcap: float | None = None
    softmax_scale: float | None = None
    sinks: bool = False
    num_decodes: int | None = None
    max_seq_len: int | None = None


def in_dtypes(cases: Sequence[Any], others: Sequence[torch.dtype]) -> list[Any]:
    """Cases of a table, each in its own dtype, under one name everywhere; on a device, which is fast
    enough, each in bf16 and in one of the others in turn as well.
    """
    if DEVICE == "cpu":
        return list(cases)
    found = []
    for i, case in enumerate(cases):
        for dtype in dict.fromkeys((case.dtype, torch.bfloat16, others[i % len(others)])):
            other = f"{case.name}-{str(dtype).removeprefix('torch.')}"
            name = case.name if dtype == case.dtype else other
            found.append(dataclasses.replace(case, name=name, dtype=dtype))
    return found


def make_pages(case: AttentionCase, num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V pages [num_pages, block_size, num_kv_heads, head_dim] in the case's layout, all NaN."""
    heads, dim = case.num_kv_heads, case.head_dim
    if case.layout == "interleaved":
        shape = (num_pages, case.block_size, 2, heads, dim)
        k_pages, v_pages = torch.full(shape, NAN, dtype=case.dtype, device=DEVICE).unbind(2)
    elif case.layout == "hnd":
        shape = (2, num_pages, heads, case.block_size, dim)
        pool = torch.full(shape, NAN, dtype=case.dtype, device=DEVICE)
        k_pages, v_pages = pool.transpose(2, 3).unbind(0)
    else:
        shape = (num_pages, case.block_size, heads, dim)
        k_pages = torch.full(shape, NAN, dtype=case.dtype, device=DEVICE)
        v_pages = k_pages.clone()
    return k_pages, v_pages


def make_batch(case: AttentionCase, seed: int = 42) -> dict[str, Any]:
    """Arguments of the attention function for a case; pages permuted, and NaN or NO_PAGE in all that no query sees."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=DEVICE, dtype=case.dtype)

    num_seqs, num_tokens = len(case.seq_lens), sum(case.q_lens)
    window, block_size = case.sliding_window, case.block_size
    if case.ring:
        assert window is not None
        own = 0 if case.in_step else max(case.q_lens)
        width = -(-(window - 1 + own) // block_size) + 1
    else:
        width = max([1, *(-(-n // block_size) for n in case.seq_lens)])
    num_pages = num_seqs * width + 3
    order = (torch.randperm(num_pages - 1, generator=generator) + 1).tolist()
    k_pages, v_pages = make_pages(case, num_pages)
    # One column more than used, so that rows are strided as those of a shared table are.
    table = torch.full((num_seqs, width + 1), NO_PAGE, dtype=torch.int32, device=DEVICE)[:, :width]
    k, v = normal(num_tokens, case.num_kv_heads, case.head_dim), None
    v = normal(num_tokens, case.num_kv_heads, case.head_dim)
    cu = [0, *accumulate(case.q_lens)]
    for s, (seq_len, q_len) in enumerate(zip(case.seq_lens, case.q_lens, strict=True)):
        context = seq_len - q_len
        if q_len == 0:
            continue
        lowest = 0 if window is None else max(0, context - window + 1)
        for j in range(lowest, context if case.in_step or case.context_only else seq_len):
            entry = j // block_size % width
            if table[s, entry] == NO_PAGE:
                table[s, entry] = order.pop()
            page = table[s, entry].item()
            k_pages[page, j % block_size] = normal(case.num_kv_heads, case.head_dim)
            v_pages[page, j % block_size] = normal(case.num_kv_heads, case.head_dim)
        # The new rows of a padding sequence, of length 0, are keys of no query.
        k[cu[s] : cu[s] + max(0, -context)] = NAN
        v[cu[s] : cu[s] + max(0, -context)] = NAN
    batch = {
        "q": normal(num_tokens, case.num_heads, case.head_dim),
        "k_pages": k_pages,
        "v_pages": v_pages,
        "block_table": table,
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32, device=DEVICE),
        "cu_seqlens_q": torch.tensor(cu, dtype=torch.int32, device=DEVICE),
        "max_seqlen_q": max(case.q_lens, default=0),
        "k": k if case.in_step else None,
        "v": v if case.in_step else None,
        "softcap": case.softcap,
        "softmax_scale": case.softmax_scale,
        "num_decodes": case.num_decodes,
        "max_seq_len": case.max_seq_len,
        "sinks": None,
    }
    if case.sinks:
        batch["sinks"] = torch.randn(case.num_heads, generator=generator).to(DEVICE)
    if window is not None:
        batch["sliding_window"] = window
    if case.context_only:
        batch["context_only"] = True
    return batch


def attention_reference(batch: dict[str, Any]) -> tuple[Bounded, Bounded]:
    """Output and lse of the oracle, with bounds for a program that rounds weights to the dtype of the queries."""
    num_tokens, num_heads = batch["q"].shape[:2]
    with bounding(weights=batch["q"].dtype):
        lse = torch.full((num_heads, num_tokens), NAN, dtype=torch.float64, device=DEVICE)
        return reference.attention(AttentionCall(**batch, lse=lse)), lse


def assert_within_budget(name: str, actual: torch.Tensor, exact: Bounded) -> None:
    """Require each element of ``actual`` within what is allowed of ``exact`` in its dtype, and infinities and NaN at the same places.

    Args:
        name: starts the message of a failure.
        actual: the result, in the dtype whose rounding counts.
        exact: the float64 result with its bounds.
    """
    assert actual.shape == exact.shape, f"{name}: {actual.shape} is not {exact.shape}"
    finite = torch.isfinite(exact)
    if not finite.all():
        same = torch.equal(actual[~finite].double(), exact[~finite])
        assert same, f"{name}: expected {exact[~finite]}, got {actual[~finite]}"
    budget = allowed(exact, actual.dtype)[finite]
    error = (actual.double() - exact)[finite].abs()
    # "not <=" rather than ">": NaN fails.
    wrong = ~(error <= budget)
    if wrong.any():
        worst = torch.where(wrong, error / budget, 0.0).nan_to_num(torch.inf).argmax()
        raise AssertionError(
            f"{name}: error {error[worst]:.3g}, budget {budget[worst]:.3g}, in {wrong.sum()} of {wrong.numel()} elements"
        )


def assert_attends(
    function: Callable[..., torch.Tensor],
    batch: dict[str, Any],
    exact: tuple[Bounded, Bounded],
    *impls: str,
) -> None:
    """Require the output and lse of attention within the budget of the oracle's.

    Args:
        function, batch: an attention function and its arguments.
        exact: output and lse of the oracle.
        impls: implementations; none given: both.
    """
    for impl in impls or ("triton", "torch"):
        lse = torch.full(exact[1].shape, NAN, device=DEVICE)
        out = function(**batch, impl=impl, lse=lse)
        assert out.dtype == batch["q"].dtype and not out.requires_grad
        for name, actual, want in (("out", out, exact[0]), ("lse", lse, exact[1])):
            assert_within_budget(f"{impl} {name}", actual.to(want.device), want)


def assert_equal_in_float64(name: str, actual: torch.Tensor, expected: Bounded) -> None:
    """Require two results of the same sums in float64 within what rounding in any order can make of both.

    Bounds of fp32 arithmetic are proportional to its unit, so those of float64 are as many times smaller as its unit is.

    Args:
        name: starts the message of a failure.
        actual: float64.
        expected: float64, with the bounds of a program in fp32.
    """
    finer = torch.finfo(torch.float64).eps / UNIT
    error = torch.where(actual == expected, 0.0, (actual - expected).abs())
    wrong = ~(error <= 2 * finer * expected.error)
    assert not wrong.any(), (
        f"{name}: errors {error[wrong]}, bounds {2 * finer * expected.error[wrong]}"
    )
