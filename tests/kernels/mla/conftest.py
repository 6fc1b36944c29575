"""In Triton's interpreter, fp32 becomes bf16 by truncation; devices round to the nearest, and quantised pages have to agree bit for bit."""

import torch

if not torch.cuda.is_available():
    from triton.runtime import interpreter

    cast_impl = interpreter.InterpreterBuilder.cast_impl

    def cast_to_nearest(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (interpreter.tl.float32, interpreter.tl.bfloat16):
            return cast_impl(self, src, dst_type)
        bits = torch.from_numpy(src.data).to(torch.bfloat16).view(torch.uint16).numpy()
        return interpreter.TensorHandle(bits, dst_type.scalar)

    interpreter.InterpreterBuilder.cast_impl = cast_to_nearest
