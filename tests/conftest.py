"""Where there is no GPU, Triton kernels run in its interpreter; tests marked ``gpu`` are skipped with a reason."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, so it has to be set before any test module is.
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    create_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot_bf16(self, a, b, *more):
        """The interpreter keeps bf16 as bit patterns and multiplies those as integers: widen them first, which is exact."""
        if a.dtype.scalar == interpreter.tl.bfloat16:
            a = self.cast_impl(a, interpreter.tl.float32)
        if b.dtype.scalar == interpreter.tl.bfloat16:
            b = self.cast_impl(b, interpreter.tl.float32)
        return create_dot(self, a, b, *more)

    interpreter.InterpreterBuilder.create_dot = create_dot_bf16

    cast_impl = interpreter.InterpreterBuilder.cast_impl
    FP32, BF16 = interpreter.tl.float32, interpreter.tl.bfloat16

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

    interpreter.InterpreterBuilder.cast_impl = cast_as_devices_do


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
