"""Triton's interpreter, made to compute as devices do, in half of its time."""

from __future__ import annotations

import dataclasses

import torch
from triton import language as tl
from triton.language import core  # noqa: F401  one of the two modules that `_patch_both` has
from triton.runtime import interpreter

FP32, BF16 = tl.float32, tl.bfloat16


def repair() -> None:
    """Replace what is wrong in the interpreter; import it with ``TRITON_INTERPRET=1`` only."""
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _widening_dot(builder.create_dot)
    builder.cast_impl = _rounding_cast(builder.cast_impl)
    interpreter._patch_lang_tensor = _index_of_one(interpreter._patch_lang_tensor)
    _patch_once_a_launch()
    # Else integer sums are computed again in int64, for an assertion that only ``debug`` makes.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


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


def _index_of_one(patch_tensor):
    def patch_tensor_and_index(tensor, scope):
        """Triton 3.6 takes ``int`` of an array of one element, which numpy 2.5 refuses."""
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    return patch_tensor_and_index


def _patch_once_a_launch() -> None:
    """Replace the functions of ``triton.language`` once a launch, not at each call in a kernel."""
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = False

    def patch_unless_patched(fn):
        nonlocal patched
        if patched:
            return None  # a call from a kernel has no use for the scope
        patched = True
        return patch_lang(_patch_both)

    def launch_once(self, *args, **kwargs):
        nonlocal patched
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched = False

    interpreter._patch_lang = patch_unless_patched
    interpreter.GridExecutor.__call__ = launch_once


def _patch_both() -> None:
    """Stand for a kernel: the interpreter patches ``tl`` and ``core``, which this module imports."""
