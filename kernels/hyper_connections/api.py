"""``collapse_streams`` and ``expand_streams``: check once, choose the implementation by name.

Next: `call`, the checks; then `triton_impl` and `expansion`, or `torch_impl` on a CPU.
"""

from __future__ import annotations

import torch

from ..common.impls import implementation
from .call import check_collapse, check_expand


def collapse_streams(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    eps: float = 1e-6,
    iterations: int = 20,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """What a sub-block reads of the residual streams, and the weights with which it writes back.

    With n streams and m = fn norm(streams), one RMS norm without weight over all streams of a
    token::

        pre  = sigmoid(scale[0] m[:n] + base[:n]) + eps
        post = 2 sigmoid(scale[1] m[n:2n] + base[n:2n])
        comb = Sinkhorn of the softmax over k of scale[2] m[2n:] + base[2n:], as [n (j), n (k)]
        out  = sum over i of pre[i] streams[i], rounded, then RMS norm with ``norm_weight``

    The arithmetic is fp32. Of a ``fn`` with n rows only ``out`` is made: the row that the head reads
    after the last layer.

    Args:
        streams: [num_tokens, n, hidden_size] bf16, fp16 or fp32, last stride 1.
        fn: [n or (2 + n) * n, n * hidden_size] fp32.
        base: [rows of fn] fp32.
        scale: [3] fp32, [1] where fn has n rows.
        norm_weight: [hidden_size] bf16, fp16 or fp32, weight of an RMS norm of the result; None =
            no norm.
        norm_eps: added to the mean squares of both norms, in 2**-100 .. 2**30.
        eps: added to pre, to the softmax and to the sums that Sinkhorn divides by, in the same
            range.
        iterations: normalizations of columns (over j), >= 1, with one of rows (over k) between each
            two.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        (out [num_tokens, hidden_size] in the dtype of streams, post [num_tokens, n] fp32, comb
        [num_tokens, n, n] fp32). post and comb are None where fn has n rows.

    Raises:
        ValueError: a shape, dtype, stride, device or host value is not as above.
        NotImplementedError: Triton with more than 8 streams or 16384 channels.

    Source: DeepSeek-V4 report 2.2 (manifold-constrained hyper-connections).
    """
    chosen = implementation(impl, streams)
    check_collapse(streams, fn, base, scale, norm_weight, norm_eps, eps, iterations)
    if chosen == "triton":
        from . import triton_impl as module
    else:
        from . import torch_impl as module
    return module.collapse(
        streams,
        fn,
        base,
        scale,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        eps=eps,
        iterations=iterations,
    )


def expand_streams(
    streams: torch.Tensor,
    y: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Streams after a sub-block: stream k is post[k] z + sum over j of comb[j, k] streams[j].

    z is y; with ``rows`` it is y + the sum over a token's rows, in their order, of weight * row, as
    ``combine_experts`` gives it with y as its addend, which the kernel does not round. post and comb
    are rounded to the dtype of the streams first; the arithmetic of the kernel is fp32.

    Args:
        streams: [num_tokens, n, hidden_size] bf16, fp16 or fp32, last stride 1.
        y: [num_tokens, hidden_size] in the same dtype, the sub-block's result; with rows what the
            shared expert gives.
        post, comb: [num_tokens, n] and [num_tokens, n, n] fp32, of ``collapse_streams``.
        rows: [num_tokens * k, hidden_size] in the same dtype, contiguous, what ``expert_mlp`` gives;
            None = y is all.
        weights: [num_tokens, k] fp32, contiguous, of ``route_tokens``; with rows.
        impl: "triton" (default for CUDA tensors), "torch" (default for CPU tensors).

    Returns:
        [num_tokens, n, hidden_size], new memory.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above.
        NotImplementedError: Triton with more than 8 streams or 16384 channels.

    Source: DeepSeek-V4 report 2.2 (manifold-constrained hyper-connections).
    """
    chosen = implementation(impl, streams)
    check_expand(streams, y, post, comb, rows, weights)
    if chosen == "triton":
        from . import expansion as module
    else:
        from . import torch_impl as module
    return module.expand(streams, y, post, comb, rows=rows, weights=weights)
