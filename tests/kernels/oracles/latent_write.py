"""Oracle of ``write_latent`` and of the quantized layouts: plain torch and Python, one row, one
channel, one byte at a time.

Bytes are found by search among the 256 e4m3 values and by logarithms of exact fractions, pages are
written as bytes at offsets spelled out here: nothing is shared with ``common.latent_pages`` or with
the kernels.

Source: DeepSeek-V4 report, attention; FlashMLA's tests/quant.py; the OCP 8-bit floating point
    specification for e4m3.
"""

import math
import struct
from fractions import Fraction

import torch

from .norm import normed


def roped(row, angles):
    """One row [dim] with its trailing pairs turned.

    Angles [rope_dim] as a row of ``cos_sin``, or None.
    """
    if angles is None:
        return row
    pairs = angles.shape[0] // 2
    first = row.shape[0] - 2 * pairs
    out = row.clone()
    for i in range(pairs):
        cos, sin = angles[i].to(row.dtype), angles[pairs + i].to(row.dtype)
        x, y = row[first + 2 * i], row[first + 2 * i + 1]
        out[first + 2 * i] = x * cos - y * sin
        out[first + 2 * i + 1] = y * cos + x * sin
    return out


def write_latent(x, positions=None, cos_sin=None, norm_weight=None, eps=1e-6):
    """The rows [num_rows, head_dim] that ``write_latent`` writes, before they are rounded to what
    the page holds.

    Args:
        x, positions, cos_sin, norm_weight, eps: as in ``quire.kernels.write_latent``.
    """
    rows = []
    for i in range(x.shape[0]):
        angles = None
        if positions is not None and cos_sin is not None:
            position = positions[i * len(positions) // len(x)]
            angles = cos_sin[position] if position >= 0 else None
        rows.append(roped(normed(x[i].double(), norm_weight, eps), angles))
    return torch.stack(rows) if rows else x.double()


def e4m3_value(code):
    """The number that an e4m3 byte stands for: sign, 4 bits of exponent (bias 7), 3 bits of
    mantissa; 127 and 255 are NaN."""
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


E4M3 = [e4m3_value(code) for code in range(127)]


def e4m3_code(value):
    """The byte of the e4m3 value nearest to ``value``.

    Of two equally near the even byte; what is too large becomes 448.
    """
    sign = 128 if math.copysign(1.0, value) < 0 else 0
    if math.isnan(value):
        return sign | 127
    size = min(abs(value), 448.0)
    return sign | min(range(127), key=lambda code: (abs(E4M3[code] - size), code & 1))


def scale_exponent(values):
    """The least e with max(|values|, 1e-4) <= 448 * 2^e, NaN left out.

    120 where a value is infinite.
    """
    # 1e-4 as an fp32 constant, which every implementation compares with.
    (least,) = struct.unpack("f", struct.pack("f", 1e-4))
    largest = max([least, *(abs(v) for v in values if not math.isnan(v))])
    if math.isinf(largest):
        return 120
    exponent = -60
    while Fraction(largest) > 448 * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def quantize(values):
    """(e4m3 bytes, exponent) of the values of one group, which are bf16 numbers."""
    exponent = scale_exponent(values)
    return [e4m3_code(value * 2.0**-exponent) for value in values], exponent


def latent_bytes(row):
    """(576 bytes of the row, 8 bytes of its scales) for a row [512] of any floating dtype."""
    values = row.to(torch.bfloat16).tolist()
    e4m3_bytes, scales = bytearray(), bytearray()
    for first in range(0, 448, 64):
        group, exponent = quantize(values[first : first + 64])
        e4m3_bytes += bytes(group)
        scales.append(exponent + 127)
    for value in values[448:]:
        # A bf16 number is the upper half of its fp32 bits.
        e4m3_bytes += struct.pack("<f", value)[2:]
    return bytes(e4m3_bytes), bytes(scales) + b"\0"


def latent_values(row, scales):
    """The 512 numbers that a reader of a quantized latent row sees."""
    nope = [e4m3_value(code) * 2.0 ** (scales[i // 64] - 127) for i, code in enumerate(row[:448])]
    rope = [struct.unpack("<f", b"\0\0" + row[i : i + 2])[0] for i in range(448, 576, 2)]
    return nope + rope


def write_latent_bytes(data, num_rows, slot, row):
    """Write a row [512] to a slot of quantized pages [num_pages, >= num_rows * 584] uint8 that
    store ``num_rows`` rows each."""
    page, i = divmod(slot, num_rows)
    body, scales = latent_bytes(row)
    data[page, i * 576 : (i + 1) * 576] = torch.tensor(list(body), dtype=torch.uint8)
    first = num_rows * 576 + i * 8
    data[page, first : first + 8] = torch.tensor(list(scales), dtype=torch.uint8)


def write_index_bytes(data, num_rows, slot, row):
    """Write an index key [index_dim] to a slot of quantized pages [num_pages, >= num_rows *
    (index_dim + 4)] uint8."""
    page, i = divmod(slot, num_rows)
    dim = row.shape[0]
    e4m3_bytes, exponent = quantize(row.to(torch.bfloat16).tolist())
    data[page, i * dim : (i + 1) * dim] = torch.tensor(e4m3_bytes, dtype=torch.uint8)
    first = num_rows * dim + i * 4
    scale = struct.pack("<f", 2.0**exponent)
    data[page, first : first + 4] = torch.tensor(list(scale), dtype=torch.uint8)
