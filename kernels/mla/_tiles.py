"""Triton helpers that several kernels of this family share.

Source: OCP 8-bit floating point specification for e4m3.
"""

import triton
import triton.language as tl

# Sequences whose lengths a program looks at together.
CHUNK = tl.constexpr(128)


@triton.jit
def widen_e4m3(codes, dtype: tl.constexpr, HARDWARE: tl.constexpr):
    """e4m3fn bytes as numbers of ``dtype`` (bf16, fp16 or fp32), exactly.

    HARDWARE: convert by the instruction that sm_89 and later have. Without it the bits are moved into an fp16 whose exponent has a bias of
    15 instead of 7, subnormals included, so a factor of 2^8 is missing. (The two NaN codes become 480; no key has them.)
    """
    if HARDWARE:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = codes.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        values = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return values.to(dtype)


@triton.jit
def find_sequence(token, cu_seqlens_q, num_seqs):
    """The sequence of a token: how many sequences end at it or before; ``num_seqs`` for a token behind the last."""
    found = tl.zeros([], tl.int32)
    for start in range(0, num_seqs, CHUNK):
        seq = start + tl.arange(0, CHUNK)
        end = tl.load(cu_seqlens_q + 1 + seq, mask=seq < num_seqs, other=2147483647)
        found += tl.sum((end <= token).to(tl.int32), 0)
    return found
