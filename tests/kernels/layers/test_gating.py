"""gated_product, both implementations, against the oracle."""

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import gated_product
from tests.kernels.oracles import gating as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SILU, GELU = {"activation": "silu"}, {"activation": "gelu_tanh"}
GPT_OSS = {"activation": "silu", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0}

# num_rows, width, options, dtype, layout, standard deviation. Layout: "merged" halves of a
# product's rows; "interleaved" even and odd columns; "apart" two tensors, ``up`` transposed.
CASES = {
    "silu": (3, 40, SILU, FP32, "merged", 2.0),
    "silu-bf16": (3, 40, SILU, BF16, "merged", 2.0),
    "gelu": (3, 40, GELU, FP32, "merged", 2.0),
    "gelu-bf16": (3, 40, GELU, BF16, "merged", 2.0),
    "gelu-fp16": (3, 40, GELU, FP16, "merged", 2.0),
    "gpt-oss": (3, 24, GPT_OSS, FP32, "interleaved", 6.0),
    "gpt-oss-bf16": (3, 24, GPT_OSS, BF16, "interleaved", 6.0),
    "limit": (3, 24, SILU | {"limit": 1.5}, FP32, "merged", 2.0),
    "gelu-limit-offset": (3, 24, GELU | {"limit": 1.5, "up_offset": -0.25}, BF16, "merged", 2.0),
    "apart": (5, 7, GELU, FP32, "apart", 2.0),
    "tails-of-silu": (4, 64, SILU, FP32, "merged", 40.0),
    "tails-of-gelu": (4, 64, GELU, FP32, "merged", 40.0),
    "one": (1, 1, SILU, FP32, "merged", 2.0),
    "several-programs": (2, 1030, SILU, BF16, "merged", 2.0),
    "no-rows": (0, 8, SILU, FP32, "merged", 2.0),
}


@pytest.mark.parametrize("name", CASES)
def test_gated_product(impl, name):
    num_rows, width, options, dtype, layout, scale = CASES[name]
    merged = (drawing(0)[1](num_rows, 2 * width) * scale).to(dtype)
    gate, up = merged.chunk(2, dim=1)
    if layout == "interleaved":
        gate, up = merged[:, 0::2], merged[:, 1::2]
    if layout == "apart":
        up = up.T.contiguous().T
    before = merged.clone()
    with bounding():
        exact = reference.gated_product(gate, up, **options)
    out = gated_product(gate, up, **options, impl=impl)
    assert merged.equal(before) and out.dtype == dtype and out.is_contiguous()
    assert_within_budget("out", out, exact)


@pytest.mark.parametrize("options", [SILU, GELU, GPT_OSS], ids=["silu", "gelu", "gpt-oss"])
def test_numbers_that_overflow_an_exponential(impl, options):
    """Gates far below zero give zeros, those far above themselves; a NaN stays one."""
    gate = torch.tensor([-1e4, -90.0, 0.0, 1e4, NAN, 3.0], device=DEVICE)
    up = torch.tensor([3.0, 3.0, 3.0, 3.0, 3.0, NAN], device=DEVICE)
    out = gated_product(gate[None], up[None], **options, impl=impl)[0]
    assert out[:3].abs().max() < 1e-30 and out[2] == 0 and out[4:].isnan().all()
    assert out[3] == 3e4 or "limit" in options
