"""write_latent, both implementations, against the oracle: the numbers, the bytes, and what must stay
untouched."""

import dataclasses

import pytest
import torch

from quire.bench.common.bounds import Bounded, bounded
from quire.kernels import LatentPages, page_bytes, write_latent
from tests.kernels.oracles import latent_write as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing
from tests.support.kernels.quantised import assert_quantised
from tests.support.oracles import once

POISON = 0xAB
BF16, FP16, U8 = torch.bfloat16, torch.float16, torch.uint8


@dataclasses.dataclass(frozen=True)
class Case:
    """One call; ``pages``: dtype of the pages, torch.uint8 for the quantised ones, None for none."""

    num_rows: int = 5
    head_dim: int = 32
    rope_dim: int = 8
    dtype: torch.dtype = torch.float32
    pages: torch.dtype | None = torch.float32
    block_size: int = 4
    norm: bool = True
    rope: bool = True
    out: bool = True
    weight: torch.dtype = torch.float32


FP8 = Case(4, 512, 64, BF16, U8)
CASES = {
    "fp32": Case(),
    "no-rows": Case(num_rows=0),
    "one-row": Case(num_rows=1, block_size=1),
    "more-rows-than-a-program": Case(num_rows=131, head_dim=16, rope_dim=2, block_size=7),
    "all-of-it-roped": Case(head_dim=16, rope_dim=16),
    "bf16": Case(dtype=BF16, pages=BF16, weight=BF16),
    "fp16": Case(dtype=FP16, pages=FP16),
    "fp32-rows-to-bf16-pages": Case(pages=BF16),
    "real-bf16": Case(6, 512, 64, BF16, BF16, block_size=64),
    "real-bf16-pages-of-2": Case(6, 512, 64, BF16, BF16, block_size=2),
    "no-norm": Case(norm=False),
    "no-rope": Case(rope=False),
    "no-out": Case(out=False),
    "only-write": Case(norm=False, rope=False, out=False),
    "no-pages": Case(pages=None),
    "no-pages-bf16": Case(pages=None, dtype=BF16),
    "fp8": FP8,
    "fp8-p64": dataclasses.replace(FP8, block_size=64),
    "fp8-p2": dataclasses.replace(FP8, block_size=2, weight=BF16),
    "fp8-fp32-rows": dataclasses.replace(FP8, dtype=torch.float32),
    "fp8-no-out": dataclasses.replace(FP8, out=False),
}


def make_pages(case, num_pages):
    """Pages that are part of wider ones, and all the memory they are a view of, poisoned."""
    if case.pages is None:
        return None, torch.zeros(0)
    if case.pages == U8:
        width = page_bytes(case.block_size)
        pool = torch.full((num_pages, width + 32), POISON, dtype=U8, device=DEVICE)
        return LatentPages(pool[:, 16 : width + 16], case.block_size), pool
    shape = (num_pages, case.block_size + 1, case.head_dim + 16)
    pool = torch.full(shape, NAN, dtype=case.pages, device=DEVICE)
    rows = pool[:, 1:, 16:]
    return LatentPages(rows, case.block_size, case.head_dim, case.rope_dim), pool


def make_call(case, num_pages=4, max_position=50):
    """Keyword arguments of ``write_latent``, without the pages; every third row has no slot."""
    generator, normal = drawing(3)
    n, dim = case.num_rows, case.head_dim
    fused = normal(n, dim + 16).to(case.dtype)  # rows of a wider projection, as a model has them
    angle = normal(max_position, case.rope_dim // 2) * 100
    slots = torch.randperm(num_pages * case.block_size, generator=generator)
    slots = slots.roll(-int(slots.argmin()))[:n]  # slot 0 for the first row
    slots[1::3] = -1
    positions = torch.randint(max_position, (n,), generator=generator)
    return {
        "x": fused[:, 16:],
        "slot_mapping": None if case.pages is None else slots.to(DEVICE),
        "positions": positions.to(DEVICE) if case.rope else None,
        "cos_sin": torch.cat([angle.cos(), angle.sin()], 1) if case.rope else None,
        "norm_weight": (1 + normal(dim)).to(case.weight) if case.norm else None,
        "eps": 1e-2,
    }


def assert_rows(name, rows, call, case):
    """Rows that were read back, against the oracle."""
    live = torch.ones(case.num_rows, dtype=torch.bool, device=DEVICE)
    if name == "pages":
        live = call["slot_mapping"] >= 0
    if not live.any():
        return
    names = ("x", "positions", "cos_sin", "norm_weight", "eps")
    exact = once(reference.write_latent, **{n: call[n] for n in names})
    exact = (exact if isinstance(exact, Bounded) else bounded(exact))[live]
    rows = rows[live]
    if case.pages != U8:
        dtype = case.dtype if case.pages in (None, torch.float32) else case.pages
        return assert_within_budget(name, rows.to(dtype), exact)
    assert_within_budget(f"{name} rope", rows[:, 448:].bfloat16(), exact[:, 448:])
    assert_quantised(name, rows[:, :448], exact[:, :448], 64)


@pytest.mark.parametrize("name", CASES)
def test_write_latent(impl, name):
    case = CASES[name]
    num_pages = 40 if case.block_size < 10 else 4
    call = make_call(case, num_pages)
    pages, pool = make_pages(case, num_pages)
    before = pool.clone()
    out = None
    if case.out:
        out = torch.full((case.num_rows, case.head_dim + 3), NAN, dtype=case.dtype, device=DEVICE)
        out = out[:, : case.head_dim]
    assert write_latent(pages=pages, **call, out=out, impl=impl) is out
    if out is not None:
        assert_rows("out", out.float(), call, case)
    if pages is None:
        return
    slots = call["slot_mapping"]
    written = pages.read(slots)
    assert_rows("pages", written, call, case)
    if out is not None:
        assert out[slots >= 0].equal(written[slots >= 0].to(case.dtype))
    # Putting back what the slots held leaves no trace: nothing else was written.
    page, row = slots[slots >= 0] // case.block_size, slots[slots >= 0] % case.block_size
    held, _ = make_pages(case, num_pages)
    for view in ("values", "rope", "scales") if pages.fp8 else ("data",):
        if view == "scales":
            assert not getattr(pages, view)[page, row, 7].any()  # the padding byte
        getattr(pages, view)[page, row] = getattr(held, view)[page, row]
    torch.testing.assert_close(pool, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("block_size, dtype", [(64, BF16), (2, torch.float32)])
def test_quantised_bytes(impl, block_size, dtype):
    """Without norm and RoPE every byte of the pool is the oracle's."""
    case = dataclasses.replace(FP8, num_rows=6, block_size=block_size, norm=False, rope=False)
    call = make_call(dataclasses.replace(case, dtype=dtype))
    powers = torch.randint(-40, 60, (6, 8, 1), generator=torch.Generator().manual_seed(5))
    x = call["x"].float().unflatten(1, (8, 64)) * torch.exp2(powers).to(DEVICE)
    call["x"] = x = x.flatten(1).to(dtype)
    x[0, :64] = 0
    x[0, 64:66] = torch.tensor([NAN, 3.0])
    x[0, 128:131] = torch.tensor([torch.inf, -torch.inf, NAN])
    x[0, 192] = -0.0
    x[2, 100] = NAN
    pages, pool = make_pages(case, 4)
    expected = pool.clone()
    out = torch.full_like(x, NAN)
    write_latent(pages=pages, **call, out=out, impl=impl)
    for row, slot in zip(x, call["slot_mapping"].tolist(), strict=True):
        if slot >= 0:
            reference.write_latent_bytes(expected[:, 16:], block_size, slot, row)
    # NaN may have any sign.
    assert ((pool == expected) | ((pool & 127 == 127) & (expected & 127 == 127))).all()
    for got, row in zip(out, x, strict=True):
        want = torch.tensor(reference.latent_values(*reference.latent_bytes(row)), device=DEVICE)
        torch.testing.assert_close(got.float(), want, rtol=0, atol=0, equal_nan=True)


# Heads of a token: (tokens, heads, head_dim, rope_dim, norm).
HEADS = {
    "one-row-each": (5, 1, 512, 64, True),
    "wide": (3, 9, 512, 64, True),
    "narrow": (3, 12, 128, 64, False),
    "all-roped": (3, 8, 64, 64, False),
    "narrowest": (3, 64, 16, 2, False),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_tokens(impl, name, in_place):
    """Positions by token, rows by head; the second token has no position."""
    tokens, heads, dim, rope_dim, norm = HEADS[name]
    case = Case(tokens * heads, dim, rope_dim, BF16, None, norm=norm)
    call = make_call(case)
    call["positions"] = torch.tensor([7, -1, 49, 0, 3][:tokens], device=DEVICE)
    oracle = call | {"x": call["x"].clone()}
    wide = torch.full((case.num_rows, dim + 16), NAN, dtype=case.dtype, device=DEVICE)
    out = call["x"] if in_place else wide[:, :dim]
    write_latent(pages=None, **call, out=out, impl=impl)
    assert_rows("out", out.float(), oracle, case)
    assert wide[:, dim:].isnan().all()


def test_rows_of_angles_and_of_x_that_are_not_read(impl):
    """Positions near a million name their rows alone; a row without a slot is not read, and NaN
    rows do not reach their neighbours."""
    case = Case(num_rows=6)
    call = make_call(case)
    angle = torch.arange(1, 7, device=DEVICE)[:, None] * torch.arange(1, 5, device=DEVICE)
    call["cos_sin"] = torch.full((1 << 20, 8), NAN, device=DEVICE)
    call["positions"] = (1 << 20) - torch.arange(1, 7, device=DEVICE)
    call["cos_sin"][call["positions"]] = torch.cat([angle.cos(), angle.sin()], 1)
    expected, _ = make_pages(case, 4)
    out = torch.full((6, 32), NAN, device=DEVICE)
    write_latent(pages=expected, **call, out=out, impl=impl)
    assert_rows("out", out, call, case)
    dead = call["slot_mapping"] < 0
    call["x"] = call["x"].masked_fill(dead[:, None], NAN)
    call["positions"] = call["positions"].masked_fill(dead, 2**40)
    pages, _ = make_pages(case, 4)
    write_latent(pages=pages, **call, impl=impl)
    torch.testing.assert_close(pages.data, expected.data, rtol=0, atol=0, equal_nan=True)


def test_addresses_beyond_32_bits(impl):
    """A page 2^32 bytes behind the first one (memory that is never touched costs nothing)."""
    stride = 1 << 30
    pool = torch.empty(4 * stride + page_bytes(2), dtype=U8, device=DEVICE)
    far = LatentPages(pool.as_strided((5, page_bytes(2)), (stride, 1)), 2)
    x, slots = torch.randn(2, 512, device=DEVICE).bfloat16(), torch.tensor([9, 0], device=DEVICE)
    write_latent(x, far, slots, impl=impl)
    assert far.read(slots).equal(far.seen(x))
