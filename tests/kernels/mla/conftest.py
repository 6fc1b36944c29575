"""The interpreter's casts between fp32 and bf16, made those of a device: it truncates where devices round to the nearest, and mistakes subnormals.

Quantised pages have to agree bit for bit.
"""

import torch

if not torch.cuda.is_available():
    from triton.runtime import interpreter

    cast_impl = interpreter.InterpreterBuilder.cast_impl
    FP32, BF16 = interpreter.tl.float32, interpreter.tl.bfloat16

    def cast_as_devices_do(self, src, dst_type):
        casts = (src.dtype.scalar, dst_type.scalar)
        if casts == (FP32, BF16):
            data = torch.from_numpy(src.data).to(torch.bfloat16).view(torch.uint16).numpy()
        elif casts == (BF16, FP32):
            data = (src.data.astype("uint32") << 16).view("float32")
        else:
            return cast_impl(self, src, dst_type)
        return interpreter.TensorHandle(data, dst_type.scalar)

    interpreter.InterpreterBuilder.cast_impl = cast_as_devices_do
