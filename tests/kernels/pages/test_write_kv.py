"""write_kv, both implementations, against the oracle on the host, into pages as they are and of e4m3."""

import pytest
import torch

from quire.kernels import write_kv
from tests.kernels.oracles import write_kv as reference
from tests.support.helpers import DEVICE, NAN, AttentionCase, make_pages

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
NAN_E4M3 = 0x7F
WRITES = {
    "no-rows": (0, AttentionCase("", [], [])),
    "one-row": (1, AttentionCase("", [], [], block_size=1)),
    "odd-heads": (11, AttentionCase("", [], [], num_kv_heads=5, block_size=7)),
    "many-heads": (5, AttentionCase("", [], [], num_kv_heads=20, head_dim=512)),
    "many-heads-bf16": (5, AttentionCase("", [], [], num_kv_heads=20, head_dim=512, dtype=BF16)),
    "interleaved-bf16": (40, AttentionCase("", [], [], layout="interleaved", dtype=BF16)),
    "head-major-fp16": (9, AttentionCase("", [], [], layout="hnd", dtype=FP16, head_dim=64)),
    "not-ordinary": (9, AttentionCase("", [], [], num_kv_heads=1)),
}


def make_rows(name):
    """Keys, values and slots: rows of one fused projection, as a model has them."""
    num_rows, case = WRITES[name]
    heads = case.num_kv_heads
    fused = torch.randn(num_rows, 2 * heads, case.head_dim).to(DEVICE, case.dtype)
    fused *= torch.logspace(-4, 3, num_rows, device=DEVICE).to(case.dtype)[:, None, None]
    # Halfway between two codes below the smallest normal one: an error of half a step, and rounding.
    fused[..., 1] = fused.abs().amax(-1) * 2.0**-16
    slots = torch.randperm(4 * max(case.block_size, 2))[:num_rows].to(DEVICE)
    if name == "not-ordinary":  # a NaN is not lost, and nothing else becomes one
        fused[0] = 0.0
        fused[1] = 1e-44
        fused[2] = 3e-38
        fused[3, :, 5] = torch.inf
        fused[4, :, 2] = -torch.inf
        fused[5, :, 7] = NAN
        fused[6, :, 3] = 3e38
        fused[7] = -0.0
    else:
        slots[1::3] = -1
    return case, fused[:, :heads], fused[:, heads:], slots


def blank(case, num_pages):
    """K and V pages of e4m3 and their row scales, NaN everywhere; strides of the case's layout."""
    pages = []
    for like in make_pages(case, num_pages):
        code = torch.empty_strided(like.shape, like.stride(), dtype=torch.uint8, device=DEVICE)
        pages.append(code.fill_(NAN_E4M3).view(E4M3))
    scales = torch.full((2, num_pages, case.num_kv_heads, case.block_size), NAN, device=DEVICE)
    return pages, list(scales.transpose(2, 3).unbind(0))


def assert_same(tensors, expected):
    for got, want in zip(tensors, expected, strict=True):
        torch.testing.assert_close(got.cpu().float(), want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("scaled", [False, True], ids=["as-they-are", "scaled"])
def test_rows(impl, name, scaled):
    """Each row with scales of its own in e4m3 pages."""
    case, k, v, slots = make_rows(name)
    pages, scales = blank(case, 8) if scaled else (make_pages(case, 8), ())
    expected = [x.cpu().clone() for x in (*pages, *scales)]
    reference.write_kv(k.cpu(), v.cpu(), *expected[:2], slots.cpu(), *expected[2:])
    given = dict(zip(("k_scale", "v_scale"), scales, strict=False))
    write_kv(k, v, *pages, slots, **given, impl=impl)
    assert_same((*pages, *scales), expected)


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
