"""write_kv, both implementations, against the oracle on the host, into pages as they are and of e4m3."""

import pytest
import torch

from quire.kernels import write_kv
from tests.kernels.attention.test_fp8 import strided_like
from tests.kernels.oracles import write_kv as reference
from tests.support.helpers import DEVICE, NAN, AttentionCase, drawing, make_pages

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# Arguments of `make`.
WRITES = {
    "no-rows": dict(num_rows=0),
    "one-row": dict(num_rows=1, block_size=1),
    "odd-heads": dict(num_rows=11, num_kv_heads=5, block_size=7),
    "many-heads": dict(num_kv_heads=20, head_dim=512),
    "many-heads-bf16": dict(num_kv_heads=20, head_dim=512, dtype=BF16),
    "interleaved-bf16": dict(num_rows=40, layout="interleaved", dtype=BF16),
    "head-major-fp16": dict(num_rows=9, layout="hnd", dtype=FP16, head_dim=64),
    "not-ordinary": dict(num_rows=9, num_kv_heads=1, ordinary=False),
}


def make(num_rows=5, scale=None, ordinary=True, **shape):
    """Arguments of a call: rows of one fused projection, as a model has them, and poisoned pages.

    scale: of e4m3 pages; "rows": one for each row; None: pages in the dtype of the rows.
    ordinary: False for infinities, NaN and extreme rows; else every third row has no slot.
    shape: fields of ``AttentionCase``.
    """
    case, (generator, normal) = AttentionCase("", [], [], **shape), drawing(4)
    heads = case.num_kv_heads
    fused = normal(num_rows, 2 * heads, case.head_dim).to(case.dtype)
    fused *= torch.logspace(-4, 3, num_rows, device=DEVICE).to(case.dtype)[:, None, None]
    # Halfway between two codes below the smallest normal one: an error of half a step, and rounding.
    fused[..., 1] = fused.abs().amax(-1) * 2.0**-16
    slots = torch.randperm(4 * max(case.block_size, 2), generator=generator)[:num_rows].to(DEVICE)
    if ordinary:
        slots[1::3] = -1
    else:  # a NaN is not lost, and nothing else becomes one
        fused[:3] = torch.tensor([0.0, 1e-44, 3e-38])[:, None, None]
        fused[3, :, 5], fused[4, :, 2], fused[5, :, 7] = torch.inf, -torch.inf, NAN
        fused[6, :, 3], fused[7] = 3e38, -0.0
    pages, scales = make_pages(case, 8), [scale, scale]
    if scale is not None:
        pages = [strided_like(x, E4M3) for x in pages]
    if scale == "rows":
        scales = torch.full((2, 8, heads, case.block_size), NAN, device=DEVICE).transpose(2, 3)
    return {
        "k": fused[:, :heads], "v": fused[:, heads:], "k_pages": pages[0], "v_pages": pages[1],
        "slot_mapping": slots, "k_scale": scales[0], "v_scale": scales[1],
    }  # fmt: skip


def check(function, call, impl):
    """Require the oracle's pages and scales, bit by bit."""
    names = ("k_pages", "v_pages", "k_scale", "v_scale")
    host = {
        name: x.detach().cpu().clone() if isinstance(x, torch.Tensor) else x
        for name, x in call.items()
    }
    reference.write_kv(**host)
    function(**call, impl=impl)
    for name in names:
        if isinstance(host[name], torch.Tensor):
            got, want = call[name].cpu().float(), host[name].float()
            assert not got.requires_grad
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("scale", [None, "rows"], ids=["as-they-are", "scaled"])
def test_rows(impl, name, scale):
    """Each row with scales of its own in e4m3 pages."""
    check(write_kv, make(**WRITES[name], scale=scale), impl)


def around_codes():
    """Codes, the middles of neighbours, a step of fp32 to either side, and what lies beyond: [n, 1, 16]."""
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    codes = torch.cat([-codes.flip(0), codes])
    middle, inf = (codes[1:] + codes[:-1]) / 2, torch.tensor(torch.inf)
    beyond = torch.tensor([-0.0, 464.0, 465.0, -1e30, torch.inf, -torch.inf])
    x = torch.cat([middle, middle.nextafter(inf), middle.nextafter(-inf), codes, beyond])
    return torch.cat([x, x.new_zeros(-len(x) % 16)]).view(-1, 1, 16)


@pytest.mark.parametrize("scale", [1.0, 0.37, torch.tensor(3.3), torch.tensor([2.0**-9])])
def test_one_scale_rounds_as_torch_does(impl, scale):
    """The quotient; `common.test_e4m3` rounds every number."""
    x = around_codes() * scale
    want = (x / scale).clamp(-448, 448).to(E4M3).view(torch.uint8)
    x, scale = x.to(DEVICE), scale.to(DEVICE) if isinstance(scale, torch.Tensor) else scale
    pages = [torch.zeros(len(x), 1, 1, 16, dtype=E4M3, device=DEVICE) for _ in range(2)]
    slots = torch.arange(len(x), device=DEVICE)
    write_kv(x, -2 * x, *pages, slots, k_scale=scale, v_scale=2 * scale, impl=impl)
    k, v = (page.view(torch.uint8).view(x.shape).cpu() for page in pages)
    assert k.equal(want) and v.equal(want ^ 0x80)
    assert not pages[0].float().isnan().any()
