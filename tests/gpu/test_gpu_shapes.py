"""Named shapes at real sizes against float64, and runs repeated: a race shows as another result. The
case tables of tests/kernels run on a device as well (`bench.gpu.parts`)."""

import dataclasses

import pytest
import torch

from quire.bench.cases.expected import expect
from quire.bench.cases.problem import make_problem
from quire.bench.cases.shapes import SHAPES, TINY_SHAPES, Case, tiny_cases
from quire.bench.peers.quire_calls import quire_calls
from tests.gpu.conftest import DRY_RUN
from tests.support.helpers import DEVICE, NAN

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
REPEATS = 1 if DRY_RUN else 20


def named_cases():
    """Every named shape in every phase, with lengths that fill no page and no tile; some in other dtypes."""
    if DRY_RUN:
        chosen = {"tiny/local": "decode", "tiny/local/fp8": "mixed"}
        tiny = [Case(TINY_SHAPES[name], phase, 2, 20) for name, phase in chosen.items()]
        tiny += [c for c in tiny_cases() if c.shape.op != "attention" and c.phase == "decode"]
        return [(case, BF16) for case in tiny]
    cases = []
    for shape in SHAPES.values():
        if shape.op == "attention":
            cases.append(Case(shape, "decode", 5, 9001))
            cases.append(Case(shape, "prefill", 1, 9001))
            cases.append(Case(dataclasses.replace(shape, rows=16), "mixed", 5, 4999))
            continue
        plain = dataclasses.replace(shape, name=f"{shape.name}/plain", fp8=False)
        # Each once and in one order, which a set has not: pytest-xdist compares its processes' lists.
        for each in dict.fromkeys((shape, plain if shape.fp8 else shape, shape.shard(8) or shape)):
            cases += [Case(each, "decode", 5, 9001), Case(each, "prefill", 1, 1301)]
    gemma = [
        dataclasses.replace(SHAPES[f"gemma-4-31b/{name}"], rows=16) for name in ("global", "local")
    ]
    others = [Case(shape, phase, 2, 2999) for shape in gemma for phase in ("decode", "mixed")]
    return [(case, BF16) for case in cases] + [(case, d) for case in others for d in (FP16, FP32)]


def poisoned_problem(case, dtype):
    """A problem whose K/V pages are NaN wherever no query may look."""
    problem = make_problem(case, torch.device(DEVICE), dtype, copies=1)
    if case.shape.op != "attention":
        return problem
    tensors, block_size = problem.each[0], case.shape.rows
    seen = torch.zeros(len(tensors["k_pages"]), block_size, dtype=torch.bool, device=DEVICE)
    for seq, new in enumerate(case.new):
        lowest = case.shape.lowest(new.start)
        position = torch.arange(lowest, case.context, device=DEVICE)
        page = problem.shared["block_table"][seq, position // block_size].long()
        seen[page, position % block_size] = True
    for name in ("k", "v"):
        pages = tensors[f"{name}_pages"]  # [num_pages, block_size, heads, dim]
        if case.shape.fp8:
            pages.view(torch.uint8)[~seen] = 0x7F  # a NaN
            tensors[f"{name}_scale"][~seen] = NAN
        else:
            pages[~seen] = NAN
        assert pages[0].float().isnan().all()
    return problem


@pytest.mark.parametrize("in_step", [False, True], ids=["pages", "in-step"])
@pytest.mark.parametrize(
    ("case", "dtype"), named_cases(), ids=lambda x: getattr(x, "name", str(x)).replace(" ", "-")
)
def test_named_shapes(case, dtype, in_step):
    problem = poisoned_problem(case, dtype)
    if in_step and problem.in_step is None:
        pytest.skip("takes no rows of the step")
    [call] = quire_calls(problem, in_step=in_step, impl="triton")
    first = [result.clone() for result in call()]
    assert expect(problem).wrong(*first) is None
    for _ in range(REPEATS):
        assert all(again.equal(result) for again, result in zip(call(), first, strict=True))
