"""write_latent, both implementations, against the oracle: the numbers, the bytes, and what must stay
untouched."""

import dataclasses

import pytest
import torch

from quire.bench.common.bounds import Bounded, bounded, bounding
from quire.kernels import LatentPages, page_bytes, write_latent
from tests.kernels.oracles import latent_write as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing, wider
from tests.support.kernels.quantised import assert_quantised, poisoned_pages

BF16, FP16, FP32, U8 = torch.bfloat16, torch.float16, torch.float32, torch.uint8
FP8 = dict(num_rows=4, head_dim=512, rope_dim=64, dtype=BF16, pages=U8)
REAL = FP8 | dict(num_rows=6, pages=BF16)
# Arguments of `make`; out: rows are returned as well.
CASES = {
    "fp32": dict(),
    "no-rows": dict(num_rows=0),
    "one-row": dict(num_rows=1, block_size=1),
    "more-rows-than-a-program": dict(num_rows=131, head_dim=16, rope_dim=2, block_size=7),
    "all-of-it-roped": dict(head_dim=16, rope_dim=16),
    "bf16": dict(dtype=BF16, pages=BF16, weight=BF16),
    "fp16": dict(dtype=FP16, pages=FP16),
    "fp32-rows-to-bf16-pages": dict(pages=BF16),
    "real-bf16": REAL | dict(block_size=64),
    "real-bf16-pages-of-2": REAL | dict(block_size=2),
    "the-last-of-a-million": dict(longest=1 << 20),
    "no-norm": dict(norm=False),
    "no-rope": dict(rope=False),
    "no-out": dict(out=False),
    "only-write": dict(norm=False, rope=False, out=False),
    "no-pages": dict(pages=None),
    "no-pages-bf16": dict(pages=None, dtype=BF16),
    "fp8": FP8,
    "fp8-p64": FP8 | dict(block_size=64),
    "fp8-p2": FP8 | dict(block_size=2, weight=BF16),
    "fp8-fp32-rows": FP8 | dict(dtype=FP32),
    "fp8-no-out": FP8 | dict(out=False),
}


def make(
    num_rows=5, head_dim=32, rope_dim=8, dtype=FP32, pages=FP32, block_size=4, norm=True,
    rope=True, weight=FP32, longest=50,
):  # fmt: skip
    """Arguments of a call; every third row has no slot; angles of other positions are NaN.

    pages: dtype of the pages, torch.uint8 for the quantised ones, None for none.
    """
    generator, normal = drawing(3)
    if pages is not None:
        num_pages = 40 if block_size < 10 else 4
        pages = poisoned_pages(num_pages, block_size, head_dim, rope_dim, pages)
    positions = torch.randint(50, (num_rows,), generator=generator).to(DEVICE) + longest - 50
    angle = normal(num_rows, rope_dim // 2) * 100
    cos_sin = torch.full((longest, rope_dim), NAN, device=DEVICE)
    cos_sin[positions] = torch.cat([angle.cos(), angle.sin()], 1)
    slots = None
    if pages is not None:
        slots = torch.randperm(len(pages.data) * block_size, generator=generator)
        slots = slots.roll(-int(slots.argmin()))[:num_rows]  # slot 0 for the first row
        slots[1::3] = -1
        slots = slots.to(DEVICE)
    return {
        "x": wider(normal(num_rows, head_dim).to(dtype)), "pages": pages, "slot_mapping": slots,
        "positions": positions if rope else None,
        "cos_sin": cos_sin if rope else None,
        "norm_weight": (1 + normal(head_dim)).to(weight) if norm else None, "eps": 1e-2,
    }  # fmt: skip


def assert_rows(name, rows, call):
    """Rows that were read back, against the oracle; those of pages where there is a slot."""
    names, pages = ("x", "positions", "cos_sin", "norm_weight", "eps"), call["pages"]
    given = {n: x.detach() if isinstance(x := call[n], torch.Tensor) else x for n in names}
    if name == "pages":
        live = call["slot_mapping"] >= 0
        given |= {n: given[n][live] for n in ("x", "positions") if given[n] is not None}
        rows = rows[live]
    with bounding():
        exact = reference.write_latent(**given)
    exact = exact if isinstance(exact, Bounded) else bounded(exact)
    if pages is None or not pages.fp8:
        dtype = call["x"].dtype if pages is None or pages.data.dtype == FP32 else pages.data.dtype
        return assert_within_budget(name, rows.to(dtype), exact)
    assert_within_budget(f"{name} rope", rows[:, 448:].bfloat16(), exact[:, 448:])
    assert_quantised(name, rows[:, :448], exact[:, :448], 64)


def check(function, call, impl):
    """Require the oracle's rows in ``out`` and the pages, and all other memory as it was."""
    x, pages, slots, out = (call[name] for name in ("x", "pages", "slot_mapping", "out"))
    if pages is not None:  # gaps between pages and rows too: of a view, `_base` is all the memory
        memory = pages.data._base
        before = memory.clone()
    assert function(**call, impl=impl) is out
    if out is not None:
        assert not out.requires_grad
        assert_rows("out", out.float(), call)
    if pages is None:
        return
    written = pages.read(slots)
    assert not written.requires_grad
    assert_rows("pages", written, call)
    if out is not None:
        assert out[slots >= 0].equal(written[slots >= 0].to(x.dtype))
    slots = slots[slots >= 0]
    page, row = slots // pages.storage_block_size, slots % pages.storage_block_size
    if pages.fp8:
        assert not pages.scales[page, row, 7].any()  # the padding byte
    # With these rows as they were, no trace is left.
    where = pages.data.shape, pages.data.stride(), pages.data.storage_offset()
    blank = dataclasses.replace(pages, data=before.as_strided(*where))
    for view in ("values", "rope", "scales") if pages.fp8 else ("data",):
        getattr(pages, view)[page, row] = getattr(blank, view)[page, row]
    torch.testing.assert_close(memory, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_write_latent(impl, name):
    case = {"out": True} | CASES[name]
    wanted = case.pop("out")
    call = make(**case)
    out = wider(torch.full_like(call["x"], NAN), after=3) if wanted else None
    if not wanted and call["positions"] is not None:  # a row without a slot is not read
        dead = call["slot_mapping"] < 0
        call["x"][dead], call["positions"][dead] = NAN, 2**40
    check(write_latent, call | {"out": out}, impl)


@pytest.mark.parametrize("block_size, dtype", [(64, BF16), (2, FP32)])
def test_quantised_bytes(impl, block_size, dtype):
    """Without norm and RoPE every byte of the pool is the oracle's."""
    case = dict(num_rows=6, block_size=block_size, norm=False, rope=False)
    call = make(**FP8 | case | dict(dtype=dtype))
    powers = torch.randint(-40, 60, (6, 8, 1), generator=torch.Generator().manual_seed(5))
    x = call["x"].float().unflatten(1, (8, 64)) * torch.exp2(powers).to(DEVICE)
    call["x"] = x = x.flatten(1).to(dtype)
    x[0, :64] = 0
    x[0, 64:66] = torch.tensor([NAN, 3.0])
    x[0, 128:131] = torch.tensor([torch.inf, -torch.inf, NAN])
    x[0, 192] = -0.0
    x[2, 100] = NAN
    pool = call["pages"].data._base
    expected = pool.clone()
    out = torch.full_like(x, NAN)
    write_latent(**call, out=out, impl=impl)
    for row, slot in zip(x, call["slot_mapping"].tolist(), strict=True):
        if slot >= 0:
            reference.write_latent_bytes(expected[:, 32:], block_size, slot, row)
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
    call = make(tokens * heads, dim, rope_dim, BF16, None, norm=norm)
    call["positions"] = call["positions"][:tokens]
    call["positions"][1] = -1
    given = call | {"x": call["x"].clone()}
    out = given["x"] if in_place else wider(torch.full_like(given["x"], NAN))
    write_latent(**given, out=out, impl=impl)
    assert_rows("out", out.float(), call)
    assert in_place or out._base[:, dim:].isnan().all()


def test_addresses_beyond_32_bits(impl):
    """A page 2^32 bytes behind the first one (memory that is never touched costs nothing)."""
    stride = 1 << 30
    pool = torch.empty(4 * stride + page_bytes(2), dtype=U8, device=DEVICE)
    far = LatentPages(pool.as_strided((5, page_bytes(2)), (stride, 1)), 2)
    x, slots = torch.randn(2, 512, device=DEVICE).bfloat16(), torch.tensor([9, 0], device=DEVICE)
    write_latent(x, far, slots, impl=impl)
    assert far.read(slots).equal(far.seen(x))
