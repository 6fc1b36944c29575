"""e4m3 read and written by the helpers that kernels share, value by value."""

from bisect import bisect_left

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.common.bits import rounded_to_e4m3, widen
from tests.kernels.oracles.latent_write import e4m3_value
from tests.support.helpers import DEVICE, needs_e4m3_conversions

CODES = torch.arange(256, dtype=torch.uint8)
NAN = CODES & 0x7F == 0x7F


# The two NaN are the 480 that would come next, as Triton's interpreter reads them.
VALUES = torch.tensor([e4m3_value(code) for code in range(256)], dtype=torch.float64)
VALUES[NAN] = torch.tensor([480.0, -480.0], dtype=torch.float64)


@triton.jit
def _widen_kernel(codes, out, SIZE: tl.constexpr, HARDWARE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, widen(tl.load(codes + at), out.dtype.element_ty, HARDWARE))


@triton.jit
def _round_kernel(x, values, codes, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    value, code = rounded_to_e4m3(tl.load(x + at).to(tl.float32))
    tl.store(values + at, value)
    tl.store(codes + at, code.to(tl.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hardware", [True, False])
def test_every_code_is_widened_exactly(hardware, dtype):
    """NaN stays NaN, but in the cast of Triton's interpreter; -0 stays -0."""
    if hardware:
        needs_e4m3_conversions()
    out = torch.empty(256, dtype=dtype, device=DEVICE)
    _widen_kernel[(1,)](CODES.to(DEVICE), out, 256, hardware)
    got = out.cpu().double()
    assert got[~NAN].equal(VALUES[~NAN])
    assert got[0x80].signbit() and not got[0].signbit()
    if hardware and triton.knobs.runtime.interpret:
        assert got[NAN].equal(VALUES[NAN])
    else:
        assert got[NAN].isnan().all()


def nearest(x):
    """Code of the e4m3 value nearest to a number, ties to the even code; beyond 448 that of 448."""
    finite = VALUES[:127].tolist()  # of ascending codes, 0 to 448
    size = min(abs(x), 448.0)
    above = bisect_left(finite, size)
    below = max(above - 1, 0)
    gap = (finite[above] - size) - (size - finite[below])
    return above if gap < 0 or (gap == 0 and above % 2 == 0) else below


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_two_bytes_is_rounded_to_the_nearest(dtype):
    """To even codes where two are as near; infinities to +-448, NaN to NaN."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).to(DEVICE)
    values = torch.empty(1 << 16, device=DEVICE)
    codes = torch.empty(1 << 16, dtype=torch.uint8, device=DEVICE)
    _round_kernel[(16,)](x, values, codes, 4096)
    x, values, codes = x.cpu().double(), values.cpu().double(), codes.cpu()
    nan = x.isnan()
    assert values[nan].isnan().all() and (codes[nan] & 0x7F == 0x7F).all()
    want = torch.tensor([nearest(number) for number in x[~nan].tolist()], dtype=torch.uint8)
    want |= x[~nan].signbit().to(torch.uint8) << 7
    assert codes[~nan].equal(want)
    assert values[~nan].equal(VALUES[want.long()])
