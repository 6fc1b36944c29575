"""Pages of latents and index keys: which byte is what, exact quantisation, and what is refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels import IndexPages, LatentPages, page_bytes
from quire.kernels.common.latent_pages import dequantize_groups, quantize_groups
from tests.kernels.oracles import latent_write as reference
from tests.support.helpers import DEVICE, NAN
from tests.support.kernels.quantised import poisoned_pages


def spread_rows(num_rows, dim, seed=0):
    """Rows of bf16 numbers whose groups differ in size by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, dim // 16, 16, generator=generator)
    rows *= torch.exp2(torch.randint(-30, 20, (num_rows, dim // 16, 1), generator=generator))
    rows[0, 0] = 0
    return rows.flatten(1).to(DEVICE, torch.bfloat16)


def test_page_sizes():
    assert [page_bytes(64), page_bytes(2), page_bytes(64, 132)] == [37440, 1728, 8640]
    assert page_bytes(72) == 72 * 584  # already a multiple of 576


@pytest.mark.parametrize("num_rows, dim", [(64, 128), (2, 128), (3, 16)])
def test_index_bytes(num_rows, dim):
    pages, expected = (poisoned_pages(3, num_rows, dim, dtype=torch.uint8) for _ in range(2))
    rows = spread_rows(4, dim)
    slots = torch.tensor([2 * num_rows, 1, -1, num_rows + 1], device=DEVICE)
    pages.write(slots, rows)
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            reference.write_index_bytes(expected.data, num_rows, slot, row)
    assert pages.data._base.equal(expected.data._base)
    for got, row, slot in zip(pages.read(slots), rows, slots.tolist(), strict=True):
        quantized, exponent = reference.quantize(row.tolist())
        want = [reference.e4m3_value(q) * 2.0**exponent for q in quantized]
        assert got.tolist() == (want if slot >= 0 else [0.0] * dim)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_rows(dtype):
    pool = torch.full((3, 7, 40), NAN, dtype=dtype, device=DEVICE)
    rows = torch.randn(3, 16, device=DEVICE)
    slots = torch.tensor([4, -1, 14], device=DEVICE)
    for pages in (
        LatentPages(pool[:, 1:6, :16], 5, 16, 8),
        IndexPages(pool[:, 1:6, 16:32], 5, 16),
    ):
        pages.write(slots, rows)
        assert pages.read(slots, dtype)[[0, 2]].equal(rows[[0, 2]].to(dtype))
        assert not pages.read(slots)[1].any()
    assert pool.isfinite().sum() == 2 * 2 * 16
    assert pool[0, 5, :32].isfinite().all() and pool[2, 5, :32].isfinite().all()


BF16_BITS = st.integers(0, 0xFFFF)


@settings(max_examples=60, deadline=None)
@given(st.lists(BF16_BITS, min_size=16, max_size=16), st.integers(0, 0xFF))
def test_quantise_any_bits(bits, exponent):
    """Any bf16 numbers, infinities, NaN and subnormal ones too; half of them close to each other in size."""
    bits = bits[:8] + [b & 0x803F | (exponent << 7 & 0x7F80) for b in bits[8:]]
    row = torch.tensor(bits, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    quantized, exponents = quantize_groups(row[None], 16)
    want_quantized, want_exponent = reference.quantize(row.tolist())
    # The sign of a NaN is nobody's.
    nan = row.isnan()
    assert exponents.tolist() == [[want_exponent]]
    assert (quantized[0] & 127)[nan].eq(127).all()
    assert quantized[0][~nan].tolist() == torch.tensor(want_quantized)[~nan].tolist()


def test_quantise_at_the_edges_of_a_scale():
    """The largest value of a group at 448 * 2^k, one bf16 step above it and one below."""
    at = torch.tensor([448.0 * 2.0**k for k in range(-20, 100)]).to(torch.bfloat16)
    for step, extra in ((0, 0), (1, 1), (-1, 0)):
        largest = (at.view(torch.int16) + step).view(torch.bfloat16)
        _, exponents = quantize_groups(torch.stack([largest, -largest / 3], 1), 2)
        assert exponents[:, 0].tolist() == [k + extra for k in range(-20, 100)]
    _, exponents = quantize_groups(torch.tensor([[0.0], [1e-30], [1e-4]]), 1)
    assert exponents[:, 0].tolist() == [math.ceil(math.log2(1e-4 / 448))] * 3


def test_dequantise_is_exact():
    quantized = torch.arange(256, dtype=torch.uint8)
    for exponent in (-22, 0, 100):
        rows = dequantize_groups(quantized[None], torch.tensor([[exponent]]))[0]
        want = torch.tensor([reference.e4m3_value(c) * 2.0**exponent for c in range(256)])
        torch.testing.assert_close(rows, want, rtol=0, atol=0, equal_nan=True)
        assert rows.to(torch.bfloat16).float().nan_to_num(0).equal(want.nan_to_num(0))
