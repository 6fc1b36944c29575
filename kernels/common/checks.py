"""Argument checks of the public functions, and the choice of an implementation.

A check raises ValueError, if nothing else is said, with a message such as ``block_table: expected
int32 [4, *], got int64 [4, 9]``. Values are checked in CPU tensors only: no check waits for a
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

IMPLS = ("triton", "torch")
MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEAD_DIMS = (16, 32, 64, 128, 256, 512)
E4M3 = torch.float8_e4m3fn
# Sequences have fewer tokens: two positions, or a position and a window, add up to 32 bits.
MAX_TOKENS = 2**30
# Rows of a tile, at most. The kernels address those of a tile of new rows with 32 bits.
MAX_TILE = 128

# Arguments that have passed their checks (`accept`); emptied when it is full.
_passed: set[tuple[Any, ...]] = set()
MAX_PASSED = 4096
HOST_TYPES = (int, float, bool, str)

R = TypeVar("R")
_of_step: ContextVar[dict[Any, Any] | None] = ContextVar("of_step", default=None)


def accept(
    impl: str | None, check: Callable[..., None], *args: Any, values: Iterable[Any] | None = None
) -> str:
    """Check the arguments of a call with ``check(*args)``, and choose its implementation by the
    first of them, a tensor.

    The check is not made again where it has passed for equal host values, and tensors of the same
    shapes, strides, dtypes and devices: it must look at nothing else. Other objects have these as
    an attribute ``signature``.

    Args:
        values: what the check looks at; None = ``args``.
    """
    values = args if values is None else [*values]
    key: list[Any] = [check]
    for value in values:
        if isinstance(value, torch.Tensor):
            key += value.shape, value.stride(), value.dtype, value.device
        elif value is None or value.__class__ in HOST_TYPES:
            key += value.__class__, value
        else:
            key.append(getattr(value, "signature", value))
    signature = tuple(key)
    try:
        is_known = signature in _passed
    except TypeError:  # a value that cannot be hashed, which the check refuses
        signature, is_known = (), False
    if not is_known:
        check(*args)
        if len(_passed) >= MAX_PASSED:
            _passed.clear()
        _passed.add(signature)
    return implementation(impl, values[0])


def expect_impl(impl: str | None, device_type: str) -> None:
    """Require one of ``IMPLS`` or None that runs on a device ("cpu" or "cuda").

    NotImplementedError for Triton on a CPU, unless its interpreter is on.
    """
    if impl is not None and impl not in IMPLS:
        raise ValueError(f"impl: expected 'triton', 'torch' or None, got {impl!r}")
    if impl == "triton" and device_type == "cpu":
        import triton

        if not triton.knobs.runtime.interpret:
            raise NotImplementedError(
                "impl: 'triton' is supported on GPUs (and by Triton's interpreter, "
                "TRITON_INTERPRET=1), got a CPU"
            )


def implementation(impl: str | None, tensor: torch.Tensor) -> str:
    """Choose the implementation of a call by its first tensor; "torch" for anything else, which the
    checks then refuse."""
    if not isinstance(tensor, torch.Tensor):
        expect_impl(impl, "")
        return "torch"
    if impl is not None:
        expect_impl(impl, "cpu" if tensor.is_cpu else "cuda")
        return impl
    return "triton" if tensor.is_cuda else "torch"


def expect_tensor(
    name: str,
    tensor: Any,
    shape: Sequence[int | str | None],
    dtypes: torch.dtype | Sequence[torch.dtype],
    *,
    device: torch.device | None = None,
    any_stride: bool = False,
    optional: bool = False,
) -> None:
    """Require a tensor, or None if optional; shape: None or a name stands for any size."""
    if optional and tensor is None:
        return
    accepted = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
    right = isinstance(tensor, torch.Tensor) and tensor.dtype in accepted
    right = right and len(shape) == tensor.dim()
    if right and tensor.shape != shape:
        for want, size in zip(shape, tensor.shape, strict=True):
            right = right and (not isinstance(want, int) or want == size)
    if not right:
        sizes = ", ".join("*" if n is None else str(n) for n in shape)
        came = _described(tensor) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{name}: expected {_names(accepted)} [{sizes}], got {came}")
    # A dimension of size 0 or 1 is never stepped over, so its stride says nothing.
    if shape and not any_stride and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}: expected stride 1 in the last dimension, got {tensor.stride()}")
    if device is not None:
        expect_device(name, tensor, device)


def expect_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {tensor.device}")


def expect_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Require a host integer in [low, high]; high None: no upper bound."""
    if type(value) is not int or value < low or (high is not None and value > high):
        bound = f">= {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name}: expected an int {bound}, got {value!r}")


def expect_positive(name: str, value: Any, *, least: int = -30, most: int = 30) -> None:
    """Require a host number in [2**least, 2**most], whose products are normal fp32 numbers."""
    if not _is_finite(value) or value <= 0:
        raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
    if not 2.0**least <= value <= 2.0**most:
        raise ValueError(f"{name}: expected a number in [2**{least}, 2**{most}], got {value!r}")


def expect_number(name: str, value: Any) -> None:
    if not _is_finite(value):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -float("inf") < value < float("inf")


def expect_softmax_scale(softmax_scale: Any) -> None:
    """Require a factor of q . k in [2**-30, 2**16], or None."""
    if softmax_scale is not None:
        # Larger ones take ordinary logits to where fp32 has no digits left for their differences.
        expect_positive("softmax_scale", softmax_scale, most=16)


def expect_apart(name: str, tensor: torch.Tensor) -> None:
    """Require a tensor to write to, no two elements in one place (expanded tensors have some)."""
    if tensor.is_contiguous():
        return
    end = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if stride < end:
                raise ValueError(
                    f"{name}: expected elements that share no memory, got {list(tensor.shape)} "
                    f"with strides {tensor.stride()}"
                )
            end += stride * (size - 1)


def expect_output(
    name: str, tensor: Any, shape: Sequence[int], dtypes: Any, device: torch.device
) -> None:
    """Require None, or a tensor to write to (`expect_apart`)."""
    if tensor is not None:
        expect_tensor(name, tensor, shape, dtypes, device=device)
        expect_apart(name, tensor)


def expect_ids(name: str, ids: torch.Tensor, count: int, what: str = "ids") -> None:
    """Require values in [0, count)."""
    if ids.numel():
        low, high = map(int, ids.aminmax())
        if low < 0 or high >= count:
            bad = low if low < 0 else high
            raise ValueError(f"{name}: expected {what} in [0, {count}), got {bad}")


def read_batch(
    seq_lens: torch.Tensor, cu_seqlens_q: torch.Tensor, num_tokens: int
) -> tuple[list[int], list[int]]:
    """Read lengths and prefix sums, and require that they divide all tokens among the sequences.

    A sequence has its new tokens at least, or length 0 if it is padding.
    """
    lengths, bounds = seq_lens.tolist(), cu_seqlens_q.tolist()
    if bounds[0] != 0 or bounds[-1] != num_tokens or bounds != sorted(bounds):
        raise ValueError(
            f"cu_seqlens_q: expected prefix sums from 0 to {num_tokens}, the number of tokens, "
            f"got {bounds}"
        )
    for s, (length, start, stop) in enumerate(zip(lengths, bounds, bounds[1:], strict=False)):
        if not 0 <= length < MAX_TOKENS:
            raise ValueError(f"seq_lens: expected values in [0, {MAX_TOKENS - 1}], got {length}")
        if 0 < length < stop - start:
            raise ValueError(
                f"seq_lens: expected at least the {stop - start} new tokens of sequence {s}, or 0 "
                f"for padding, got {length}"
            )
    return lengths, bounds


def expect_ring(
    width: int, block_size: int, window: int, lengths: list[int], bounds: list[int], new_rows: bool
) -> None:
    """Require a table of ``width`` blocks to hold the rows that a step with a window reads.

    new_rows: the step's own rows are not in the pages.
    """
    for length, start, stop in zip(lengths, bounds, bounds[1:], strict=False):
        own = stop - start
        if not own or not length:
            continue
        rows = min(length - own, window - 1) + (0 if new_rows else own)
        if rows > width * block_size:
            raise ValueError(
                f"block_table: expected at least {-(-rows // block_size)} blocks of {block_size} "
                f"rows, for a window of {window}, got {width}"
            )


def check_outputs(
    num_heads: int,
    num_tokens: int,
    device: torch.device,
    sinks: Any,
    lse: Any,
    workspace: Any = None,
    sinks_name: str = "sinks",
) -> None:
    fp32 = torch.float32
    expect_tensor(sinks_name, sinks, (num_heads,), fp32, device=device, optional=True)
    expect_output("lse", lse, (num_heads, num_tokens), fp32, device)
    expect_tensor("workspace", workspace, (None,), fp32, device=device, optional=True)


def expect_batch(seq_lens: Any, cu_seqlens_q: Any, max_seqlen_q: Any, device: torch.device) -> int:
    """Require lengths, prefix sums and the longest sequence of a ragged batch; returns its size."""
    expect_tensor("seq_lens", seq_lens, (None,), torch.int32, device=device)
    num_seqs = seq_lens.shape[0]
    expect_tensor("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), torch.int32, device=device)
    expect_int("max_seqlen_q", max_seqlen_q, 0)
    return num_seqs


def expect_longest(num_tokens: int, num_seqs: int, max_seqlen_q: int) -> None:
    if num_seqs * max_seqlen_q < num_tokens:
        raise ValueError(
            f"max_seqlen_q: expected the longest of {num_seqs} sequences with {num_tokens} tokens,"
            f" got {max_seqlen_q}"
        )


def expect_decodes(
    num_tokens: int, num_seqs: int, max_seqlen_q: int, max_seq_len: Any, num_decodes: Any
) -> None:
    if max_seq_len is not None:
        expect_int("max_seq_len", max_seq_len, 0)
    num_decodes = decodes_of(num_decodes, num_seqs, max_seqlen_q)
    expect_int("num_decodes", num_decodes, 0, num_seqs)
    if num_decodes == num_seqs:  # no prefill kernel is launched for longer sequences
        expect_longest(num_tokens, num_seqs, max_seqlen_q)


def decodes_of(num_decodes: int | None, num_seqs: int, max_seqlen_q: int) -> int:
    """The given ``num_decodes``, or the default: all sequences if none has two new tokens."""
    if num_decodes is None:
        return num_seqs if max_seqlen_q <= 1 else 0
    return num_decodes


def check_batch(call: Any, name: str, table: torch.Tensor, head_dim_v: int) -> None:
    """Check the ragged batch, the page table ``name`` and the results of a call of attention."""
    q, device = call.q, call.q.device
    num_tokens, num_heads = q.shape[:2]
    num_seqs = expect_batch(call.seq_lens, call.cu_seqlens_q, call.max_seqlen_q, device)
    expect_decodes(num_tokens, num_seqs, call.max_seqlen_q, call.max_seq_len, call.num_decodes)
    expect_tensor(name, table, (num_seqs, None), torch.int32, device=device)
    check_outputs(num_heads, num_tokens, device, call.sinks, call.lse, call.workspace)
    expect_softmax_scale(call.softmax_scale)
    expect_output("out", call.out, (num_tokens, num_heads, head_dim_v), q.dtype, device)


def complete(call: Any, check: Callable[[Any], None], impl: str | None) -> str:
    """Check the arguments of a call of attention and fill in defaults; returns the name of the
    implementation."""
    values = vars(call)
    if type(call.max_seq_len) is int and call.max_seq_len >= 0:
        # The bound differs from step to step, and says nothing of the tensors.
        values = values | {"max_seq_len": None}
    chosen = accept(impl, check, call, values=values.values())
    call.num_decodes = decodes_of(call.num_decodes, call.num_seqs, call.max_seqlen_q)
    if call.softmax_scale is None:
        call.softmax_scale = call.q.shape[2] ** -0.5
    if call.sliding_window is not None:
        call.sliding_window = min(call.sliding_window, MAX_TOKENS)
    return chosen


def expect_head_dim(name: str, head_dim: int) -> None:
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"{name}: head_dim {head_dim} is not one of {list(HEAD_DIMS)}")


def check_pages(
    k_pages: torch.Tensor, v_pages: torch.Tensor, dtype: torch.dtype, device: torch.device
) -> None:
    """Require K and V pages ``[num_pages, block_size, num_kv_heads, head_dim]`` of equal shape,
    both of ``dtype`` or both e4m3."""
    axes = "num_pages", "block_size", "num_kv_heads", "head_dim"
    expect_tensor("k_pages", k_pages, axes, (dtype, E4M3), device=device)
    expect_tensor("v_pages", v_pages, tuple(k_pages.shape), k_pages.dtype, device=device)
    for axis, what in enumerate(axes[:3]):
        if not k_pages.shape[axis]:
            raise ValueError(f"k_pages: {what}: expected an int >= 1, got 0")
    expect_short_pages("k_pages", k_pages)
    expect_short_pages("v_pages", v_pages)


def expect_short_pages(name: str, pages: torch.Tensor) -> None:
    """Require pages [num_pages, block_size, ...] whose rows 32 bits can address within a page."""
    if pages.shape[1] * max(1, pages.stride(1)) >= 2**31:
        raise ValueError(f"{name}: expected pages of < 2**31 elements, got {pages.stride()}")


def scale_kind(scale: float | torch.Tensor | None) -> str:
    """Kind of a scale argument: "none", "number", "tensor" (of one number) or "rows"."""
    if scale is None:
        return "none"
    if isinstance(scale, torch.Tensor):
        return "tensor" if scale.dim() <= 1 else "rows"
    return "number"


def check_scales(
    k_scale: float | torch.Tensor | None,
    v_scale: float | torch.Tensor | None,
    k_pages: torch.Tensor,
) -> None:
    rows = tuple(k_pages.shape[:3])
    expected = f"a number, float32 [] or float32 {list(rows)} with float8_e4m3fn pages"
    if k_pages.dtype != E4M3:
        expected = f"None with pages of {_names((k_pages.dtype,))}"
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k_pages.dtype != E4M3:
            right = scale is None
        elif isinstance(scale, torch.Tensor):
            right = scale.dtype == torch.float32 and tuple(scale.shape) in ((), (1,), rows)
        else:
            right = isinstance(scale, (int, float)) and not isinstance(scale, bool)
        if not right:
            raise ValueError(f"{name}: expected {expected}, got {_described(scale)}")
        if isinstance(scale, torch.Tensor):
            expect_device(name, scale, k_pages.device)
            if scale.dim() == 3:
                expect_short_pages(name, scale)
        elif scale is not None:
            expect_positive(name, scale)
    if scale_kind(k_scale) != scale_kind(v_scale):
        raise ValueError(
            f"v_scale: expected the kind of k_scale, {_described(k_scale)}, got "
            f"{_described(v_scale)}"
        )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{_names((value.dtype,))} {list(value.shape)}"
    return repr(value)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return "|".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def is_readable(tensor: torch.Tensor) -> bool:
    """True for tensors whose values are checked."""
    return tensor.is_cpu


def expect_values(name: str, tensor: torch.Tensor, low: float, high: float) -> None:
    """Require values in [low, high] where they are checked."""
    if is_readable(tensor) and tensor.numel():
        least, most = map(torch.Tensor.item, tensor.aminmax())
        if not (low <= least and most <= high):  # NaN is refused too
            bad = most if low <= least else least
            raise ValueError(f"{name}: expected values in [{low}, {high}], got {bad}")


@contextmanager
def one_step() -> Iterator[None]:
    """Within it, the lengths, block tables and slots that operators are given do not change."""
    token = _of_step.set({})
    try:
        yield
    finally:
        _of_step.reset(token)


def once_a_step(read: Callable[..., R], *args: Any) -> R:
    """``read(*args)``, which reads and checks values of tensors on the host. Within `one_step` it
    is called once for the same tensors and equal other arguments."""
    results = _of_step.get()
    if results is None:
        return read(*args)
    key: list[Any] = [read]
    for arg in args:
        key.append(id(arg) if isinstance(arg, torch.Tensor) else arg)
    signature = tuple(key)
    if signature not in results:
        results[signature] = args, read(*args)  # args are kept, so that no id is given again
    return results[signature][1]
