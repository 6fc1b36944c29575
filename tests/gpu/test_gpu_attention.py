"""Attention on the device: named shapes at real sizes, and runs repeated. The case tables of tests/kernels run there as well (`bench.gpu.parts`)."""

import dataclasses

import pytest
import torch

from quire.bench.cases.attention import lowest_visible
from quire.bench.cases.make import expect, make_problem
from quire.bench.cases.shapes import SHAPES, TINY_SHAPES, Case
from quire.bench.peers.quire_calls import quire_calls
from quire.kernels import write_kv
from quire.kernels.common import e4m3
from tests.gpu.conftest import DRY_RUN
from tests.kernels.attention.test_fp8 import CASES, blank, midpoints
from tests.support.helpers import DEVICE, NAN

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REPEATS = 1 if DRY_RUN else 30


def named_cases():
    """Every named shape in every phase, lengths that fill no page and no tile."""
    if DRY_RUN:
        chosen = {"tiny/local": "decode", "tiny/local/fp8": "mixed"}
        return [Case(TINY_SHAPES[name], phase, 2, 20) for name, phase in chosen.items()]
    cases = []
    for shape in SHAPES.values():
        cases.append(Case(shape, "decode", 5, 9001))
        cases.append(Case(shape, "prefill", 1, 9001))
        cases.append(Case(dataclasses.replace(shape, block_size=16), "mixed", 5, 4999))
    return cases


def poisoned_problem(case, dtype):
    """A problem whose pages are NaN wherever no query may look."""
    problem = make_problem(case, torch.device(DEVICE), dtype, copies=1)
    tensors, block_size = problem.each[0], case.shape.block_size
    seen = torch.zeros(len(tensors["k_pages"]), block_size, dtype=torch.bool, device=DEVICE)
    for seq in range(case.batch):
        position = torch.arange(lowest_visible(case, seq), case.context, device=DEVICE)
        page = problem.shared["block_table"][seq, position // block_size].long()
        seen[page, position % block_size] = True
    for name in ("k", "v"):
        pages = tensors[f"{name}_pages"]  # [num_pages, block_size, heads, dim]
        if case.shape.fp8:
            pages.view(torch.uint8)[~seen] = 0x7F  # a NaN
            tensors[f"{name}_scale"][~seen] = NAN
            assert tensors[f"{name}_scale"][0].isnan().all()
        else:
            pages[~seen] = NAN
        assert pages[0].float().isnan().all()
    return problem


@pytest.mark.parametrize("in_step", [False, True], ids=["pages", "in-step"])
@pytest.mark.parametrize("case", named_cases(), ids=lambda case: case.name.replace(" ", "-"))
def test_named_shapes(case, in_step):
    problem = poisoned_problem(case, BF16)
    [call] = quire_calls(problem, in_step=in_step, impl="triton")
    out, lse = call()
    assert expect(problem).wrong(out, lse) is None
    # The same work again, with the caches in another state: a race shows as another result.
    first, first_lse = out.clone(), lse.clone()
    for _ in range(REPEATS):
        out, lse = call()
        assert out.equal(first) and lse.equal(first_lse)


@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_named_shapes_in_other_dtypes(dtype):
    names = ["tiny/global"] if DRY_RUN else ["gemma-4-31b/global", "gemma-4-31b/local"]
    for name in names:
        shape = (SHAPES | TINY_SHAPES)[name]
        for phase in ("decode", "mixed"):
            tokens = 20 if DRY_RUN else 2999
            case = Case(dataclasses.replace(shape, block_size=16), phase, 2, tokens)
            problem = poisoned_problem(case, dtype)
            [call] = quire_calls(problem, in_step=True, impl="triton")
            assert expect(problem).wrong(*call()) is None, (name, phase)


@pytest.mark.parametrize("scale", [None, 1.0, 0.37])
def test_fp8_codes_are_those_of_the_cast_on_a_host(scale):
    """Bit for bit: the device's division and rounding against torch's on a CPU, ties and subnormals among the values."""
    x = midpoints().view(-1, 1, 16) * (1.0 if scale is None else scale)
    if scale is None:
        more = torch.randn(20 if DRY_RUN else 500, 1, 16, device=DEVICE)
        x = torch.cat([x[x.isfinite().all(-1).squeeze(1)], more])
    if DRY_RUN:
        x = x[::8]
    codes, scales = e4m3.quantize(x.cpu(), scale)
    case = dataclasses.replace(CASES[0], num_kv_heads=1, block_size=16)
    pages, row_scales = blank(case, -(-len(x) // 16))
    given = dict(zip(("k_scale", "v_scale"), row_scales if scale is None else (scale,) * 2, strict=True))  # fmt: skip
    write_kv(x, x, *pages, torch.arange(len(x), device=DEVICE), **given, impl="triton")
    for page, row_scale in zip(pages, row_scales, strict=True):
        written = page.view(torch.uint8).flatten(0, 1)[: len(x)]
        assert written.cpu().equal(codes.view(torch.uint8))
        if scale is None:
            assert row_scale.flatten(0, 1)[: len(x)].cpu().equal(scales)
