"""Triton's interpreter, made to round and multiply bf16 as devices do."""

from __future__ import annotations

import torch
from triton.runtime import interpreter

FP32, BF16 = interpreter.tl.float32, interpreter.tl.bfloat16


def repair() -> None:
    """Replace what is wrong in the interpreter; import it with ``TRITON_INTERPRET=1`` only."""
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _widening_dot(builder.create_dot)
    builder.cast_impl = _rounding_cast(builder.cast_impl)


def _widening_dot(create_dot):
    def create_dot_bf16(self, a, b, *more):
        """The interpreter keeps bf16 as bit patterns and multiplies those as integers: widen them first, which is exact."""
        if a.dtype.scalar == BF16:
            a = self.cast_impl(a, FP32)
        if b.dtype.scalar == BF16:
            b = self.cast_impl(b, FP32)
        return create_dot(self, a, b, *more)

    return create_dot_bf16


def _rounding_cast(cast_impl):
    def cast_as_devices_do(self, src, dst_type):
        """The interpreter truncates fp32 to bf16 where devices round to the nearest, and mistakes subnormals."""
        casts = (src.dtype.scalar, dst_type.scalar)
        if casts == (FP32, BF16):
            data = torch.from_numpy(src.data).to(torch.bfloat16).view(torch.uint16).numpy()
        elif casts == (BF16, FP32):
            data = (src.data.astype("uint32") << 16).view("float32")
        else:
            return cast_impl(self, src, dst_type)
        return interpreter.TensorHandle(data, dst_type.scalar)

    return cast_as_devices_do
