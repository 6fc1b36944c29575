"""The arithmetic instructions of PTX over numpy arrays with one element a thread.

`TABLE` says of each instruction what it does; types are those of its suffix. fp32 and 16-bit floats
are rounded once, to nearest even. Approximate functions are exact to fp32, then moved by up to the
error that PTX allows, as a fixed function of the operand's bits: no result may rest on a device
being better than it is documented to be.

Source: PTX ISA 8.8, sections 9.7.1 to 9.7.9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .parse import WIDTHS, Instruction

DTYPES = {
    "f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype("?"),
}  # fmt: skip
for _name, _size in WIDTHS.items():
    DTYPES.setdefault(_name, np.dtype(f"{'i' if _name[0] == 's' else 'u'}{_size}"))
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
FLOATS = ("f32", "f64", *HALVES)
WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


def to_f32_odd(x):
    """float64 as fp32, inexact ones rounded to odd: a later rounding to 16 bits is then right."""
    near = x.astype("f4")
    inexact = (near != x) & np.isfinite(x) & np.isfinite(near)
    bits = np.asarray(near).view("u4")
    bits = np.where(inexact & (np.abs(near) > np.abs(x)), bits - np.uint32(1), bits)
    return np.where(inexact, bits | np.uint32(1), bits).view("f4")


def add_odd(a, b):
    """The float64 sum, an inexact one rounded to odd: a later rounding to fp32 is then right."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)
    inexact = (error != 0) & np.isfinite(error)
    if not inexact.any():
        return total
    bits = np.asarray(total).view("i8")
    away = np.signbit(error) != np.signbit(total)  # the sum lies beyond the exact one
    odd = np.where(away, bits - 1, bits) | 1
    return np.where(inexact, odd, bits).view("f8")


def to_bf16(x):
    """fp32 as bits of bf16; NaN becomes 0x7FFF."""
    bits = np.asarray(x).view("u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype("u2"))


def from_bf16(bits):
    return (bits.astype("u4") << np.uint32(16)).view("f4")


def to_f16(x):
    return np.where(np.isnan(x), np.uint16(0x7FFF), np.asarray(x).astype("f2").view("u2"))


def from_f16(bits):
    return bits.view("f2").astype("f4")


def to_tf32(bits):
    """fp32 bits rounded to 10 bits of mantissa, ties away from zero."""
    finite = np.isfinite(bits.view("f4"))
    return np.where(finite, (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000), bits)


def flush(x):
    """Subnormal fp32 as zeros of their sign (.ftz)."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def from_e4m3(bytes_):
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    return values[bytes_]


def to_e4m3(x):
    """fp32 as bytes of e4m3, saturated to 448; NaN becomes 0x7F."""
    clipped = torch.from_numpy(np.atleast_1d(np.clip(x, -448, 448)))
    bits = clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(np.shape(x))
    return np.where(np.isnan(x), np.uint8(0x7F), bits)


def approximate(function: Callable, ulps: int, exact: Callable | None = None) -> Callable:
    """fp32 results within ``ulps`` of the exact ones; those where ``exact`` holds, and those of 0,
    infinity and NaN, are the exact ones."""

    def run(*values):
        wide = function(*(v.astype("f8") for v in values))
        near = np.asarray(wide).astype("f4")
        keep = (near == 0) | ~np.isfinite(near)
        for v in values:
            keep = keep | (v == 0)
        if exact is not None:
            keep = keep | exact(*values)
        mixed = sum(np.asarray(v).view("u4") for v in values) * np.uint32(2654435761)
        move = (mixed >> np.uint32(16)) % np.uint32(2 * ulps + 1)
        moved = (near.view("i4") + move.astype("i4") - np.int32(ulps)).view("f4")
        allowed = np.abs(moved - wide) <= ulps * np.spacing(np.abs(near)).astype("f8")
        return np.where(allowed & ~keep, moved, near)

    return run


def power_of_two(a):
    return np.asarray(a).view("u4") & np.uint32(0x7FFFFF) == 0


def mul_hi(a, b):
    bits = a.dtype.itemsize * 8
    if bits == 64:
        product = np.vectorize(lambda x, y: int(x) * int(y) >> 64, otypes=[object])(a, b)
        return np.asarray(product).astype(a.dtype)
    wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
    return ((a.astype(wide) * b.astype(wide)) >> wide.type(bits)).astype(a.dtype)


def mul_wide(a, b):
    wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
    return a.astype(wide) * b.astype(wide)


def divide(a, b):
    """Integer quotient, rounded to zero; all bits set for a divisor of 0."""
    zero = b == 0
    safe = np.where(zero, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient * safe != a) & ((a < 0) != (safe < 0)))
    return np.where(zero, ~a.dtype.type(0), quotient.astype(a.dtype))


def shift_left(a, n):
    bits = a.dtype.itemsize * 8
    return np.where(n < bits, a << np.minimum(n, bits - 1).astype(a.dtype), a.dtype.type(0))


def shift_right(a, n):
    bits = a.dtype.itemsize * 8
    shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n < bits, shifted, a.dtype.type(0))


def extract_field(a, start, length):
    """bfe: ``length`` bits from ``start``; signed: extended by the field's upper bit."""
    bits = a.dtype.itemsize * 8
    start, length = (start & np.uint32(255)).astype("i8"), (length & np.uint32(255)).astype("i8")
    raw = a.view(f"u{a.dtype.itemsize}").astype("u8")
    kept = np.clip(bits - start, 0, np.minimum(length, bits))
    low = (np.uint64(1) << np.minimum(kept, 63).astype("u8")) - np.uint64(1)
    mask = np.where(kept >= 64, ~np.uint64(0), low)
    field = np.where(start < bits, raw >> np.minimum(start, 63).astype("u8"), np.uint64(0)) & mask
    if a.dtype.kind == "i":
        sign = raw >> np.clip(start + length - 1, 0, bits - 1).astype("u8") & np.uint64(1)
        field = np.where((length > 0) & (sign == 1), field | ~mask, field)
    return field.astype(a.dtype)


def permute(a, b, selector):
    """prmt: four bytes of {b, a}; bit 3 of a selector repeats the byte's sign."""
    pair = a.astype("u8") | (b.astype("u8") << np.uint64(32))
    result = np.uint32(0)
    for i in range(4):
        choice = selector >> np.uint32(4 * i) & np.uint32(15)
        shift = (choice & np.uint32(7)).astype("u8") * np.uint64(8)
        byte = (pair >> shift & np.uint64(255)).astype("u4")
        sign = (byte >> np.uint32(7)) * np.uint32(255)
        result = result | np.where(choice & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return result


def fused(a, b, c):
    """a b + c of float64 that hold 24 bits or fewer, such that rounding it to fp32 rounds once.

    Only a sum half way between two fp32 numbers, or a subnormal one, has to be rounded to odd.
    """
    product = a * b
    total = np.asarray(product + c)
    half_way = total.view("i8") & 0x1FFFFFFF == 0x10000000
    tiny = np.abs(total) < 2.0**-126
    return add_odd(product, c) if half_way.any() or tiny.any() else total


# Instruction: (modifiers that it may have, types of its sources, what it computes).
# T is the type of the instruction, W the one twice as wide; modifiers that are part of the name
# choose the row. "rn" and "ftz" hold for floats: computed exactly in float64, then rounded once.
TABLE: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "add": ("rn ftz", "T T", lambda a, b: a + b),
    "sub": ("rn ftz", "T T", lambda a, b: a - b),
    "mul": ("rn ftz", "T T", lambda a, b: a * b),
    "fma": ("rn ftz", "T T T", fused),
    "mul.lo": ("", "T T", lambda a, b: a * b),
    "mul.hi": ("", "T T", mul_hi),
    "mul.wide": ("", "T T", mul_wide),
    "mad.lo": ("", "T T T", lambda a, b, c: a * b + c),
    "mad.wide": ("", "T T W", lambda a, b, c: mul_wide(a, b) + c),
    "div": ("", "T T", divide),
    "rem": ("", "T T", lambda a, b: a - divide(a, b) * b),
    "min": ("ftz", "T T", np.fmin),
    "max": ("ftz", "T T", np.fmax),
    "min.NaN": ("ftz", "T T", np.minimum),
    "max.NaN": ("ftz", "T T", np.maximum),
    "min.relu": ("", "T T", lambda a, b: np.minimum(a, b).clip(0)),
    "max.relu": ("", "T T", lambda a, b: np.maximum(a, b).clip(0)),
    "neg": ("ftz", "T", lambda a: -a),
    "abs": ("ftz", "T", np.abs),
    "and": ("", "T T", lambda a, b: a & b),
    "or": ("", "T T", lambda a, b: a | b),
    "xor": ("", "T T", lambda a, b: a ^ b),
    "not": ("", "T", lambda a: ~a),
    "shl": ("", "T u32", shift_left),
    "shr": ("", "T u32", shift_right),
    "selp": ("", "T T pred", lambda a, b, p: np.where(p, a, b)),
    "bfe": ("", "T u32 u32", extract_field),
    "prmt": ("", "T T u32", permute),
    "popc": ("", "T", lambda a: np.bitwise_count(a).astype("u4")),
    # Largest errors: PTX ISA tables of div, rcp, sqrt, rsqrt, ex2, lg2, sin, cos and tanh.
    "div.rn": ("ftz", "T T", lambda a, b: a / b),
    "rcp.rn": ("ftz", "T", lambda a: 1 / a),
    "sqrt.rn": ("ftz", "T", np.sqrt),
    # The reciprocal of a power of two is exact on every device, so division by one is.
    "div.full": ("ftz", "T T", approximate(np.divide, 2, lambda a, b: power_of_two(b))),
    "div.approx": ("ftz", "T T", approximate(np.divide, 2, lambda a, b: power_of_two(b))),
    "rcp.approx": ("ftz", "T", approximate(np.reciprocal, 1)),
    "sqrt.approx": ("ftz", "T", approximate(np.sqrt, 1)),
    "rsqrt.approx": ("ftz", "T", approximate(lambda a: 1 / np.sqrt(a), 1)),
    "ex2.approx": ("ftz", "T", approximate(np.exp2, 2)),
    "lg2.approx": ("ftz", "T", approximate(np.log2, 1, power_of_two)),
    "tanh.approx": ("", "T", approximate(np.tanh, 1 << 12)),
    "sin.approx": ("ftz", "T", approximate(np.sin, 4)),
    "cos.approx": ("ftz", "T", approximate(np.cos, 4)),
}
_EXACT_IN_F64 = {"add", "sub", "mul", "fma", "neg", "abs", "min", "max", "min.NaN", "max.NaN"}
_COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_INTEGRAL = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}


def arithmetic(op: Instruction) -> tuple[list[str], Callable] | None:
    """(types of the sources, function) of an instruction; None if it is unknown."""
    if op.name in ("setp", "cvt"):
        return _comparison(op) if op.name == "setp" else _conversion(op)
    names = [".".join(op.parts[:n]) for n in (3, 2, 1) if n < len(op.parts)]
    key = next((name for name in names if name in TABLE), None)
    if key is None:
        return None
    modifiers, sources, function = TABLE[key]
    kind, given = op.kind, set(op.parts[key.count(".") + 1 : -1])
    if not given <= set(modifiers.split()):
        return None
    if kind in HALVES and key != "selp":
        if key not in _EXACT_IN_F64:
            return None
        function = _in_halves(function, kind)
    elif key == "fma":
        if kind != "f32":
            return None
        function = _in_f64(function)
    if "ftz" in given:
        function = _flushing(function)
    types = {"T": kind, "W": WIDER.get(kind, "?")}
    return [types.get(source, source) for source in sources.split()], function


def _in_f64(function):
    return lambda *values: np.asarray(function(*(v.astype("f8") for v in values))).astype("f4")


def _flushing(function):
    return lambda *values: flush(function(*(flush(v) for v in values)))


def _in_halves(function, kind):
    widen, narrow = (from_bf16, to_bf16) if kind[0] == "b" else (from_f16, to_f16)

    def one(*values):
        wide = (widen(v.view("u2")).astype("f8") for v in values)
        return narrow(to_f32_odd(np.asarray(function(*wide))))

    return (lambda *values: paired(one, *values)) if kind.endswith("x2") else one


def paired(one, *values):
    """A function of 16 bits on both halves of words."""
    low, high = (one(*((v >> np.uint32(s)).astype("u2") for v in values)) for s in (0, 16))
    return join(high, low, 16)


def join(high, low, bits):
    """Two values of 8 or 16 bits as one twice as wide."""
    wide = np.dtype(f"u{bits // 4}")
    return high.astype(wide) << wide.type(bits) | low.astype(wide)


def _comparison(op):
    test, kind = op.parts[1], op.kind
    if len(op.operands) != 3 or len(op.parts) not in (3, 4) or kind.endswith("x2"):
        return None
    widen = from_bf16 if kind == "bf16" else flush if "ftz" in op.parts else np.asarray
    if kind not in FLOATS:
        return [kind, kind], _COMPARISONS[test]
    compare = {"num": lambda a, b: True, "nan": lambda a, b: False}.get(test)
    compare = compare or _COMPARISONS[test.removesuffix("u")]
    unordered = test[-1] == "u" or test == "nan"  # what a NaN gives

    def run(a, b):
        a, b = widen(a), widen(b)
        return np.where(np.isnan(a) | np.isnan(b), unordered, compare(a, b))

    return [kind, kind], run


def _conversion(op):
    """cvt, from the last part of the opcode to the part before it."""
    *given, to, of = op.parts[1:]
    if (to, of) in (("bf16x2", "f32"), ("f16x2", "f32")) and given == ["rn"]:
        narrow = to_bf16 if to[0] == "b" else to_f16
        return ["f32", "f32"], lambda a, b: join(narrow(a), narrow(b), 16)
    if (to, of) == ("f16x2", "e4m3x2"):

        def split(a):
            return [to_f16(from_e4m3(a >> np.uint16(s) & np.uint16(255))) for s in (8, 0)]

        return ["b16"], lambda a: join(*split(a), 16)
    if (to, of) == ("e4m3x2", "f32") and "satfinite" in given:
        return ["f32", "f32"], lambda a, b: join(to_e4m3(a), to_e4m3(b), 8)
    if to == "tf32" and given == ["rna"]:
        return ["b32"], to_tf32
    if set(given) - {"rn", "ftz", *_INTEGRAL}:
        return None
    rounding = next((_INTEGRAL[m] for m in given if m in _INTEGRAL), np.asarray)
    widen = from_bf16 if of == "bf16" else flush if "ftz" in given and of == "f32" else np.asarray
    if to == "bf16":
        return [of], lambda a: to_bf16(np.asarray(to_f32_odd(widen(a).astype("f8"))))
    if of in FLOATS and to not in FLOATS:
        return [of], lambda a: _saturated(rounding(widen(a)), DTYPES[to])
    return [of], lambda a: rounding(widen(a)).astype(DTYPES[to])


def _saturated(x, dtype):
    """Integral floats as integers, clamped; NaN is 0."""
    info = np.iinfo(dtype)
    x = np.where(np.isnan(x), 0, x.astype("f8"))
    high, low = x >= float(info.max), x <= float(info.min)
    inside = np.where(high | low, 0, x).astype(dtype)
    return np.where(high, dtype.type(info.max), np.where(low, dtype.type(info.min), inside))
