"""What the tests replace in Triton's interpreter for speed gives the same bits."""

import os

import pytest
import torch

from quire.kernels import write_kv
from tests.kernels.attention.test_attention import attend
from tests.support.helpers import DEVICE, NAN, AttentionCase, make_batch, make_pages

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on a device"
)

BF16 = torch.bfloat16
ATTENTION = [
    AttentionCase("decode", [1, 60], [1, 2], num_decodes=2, sinks=True),
    AttentionCase("split", [700], [1], num_heads=2, num_kv_heads=1),
    AttentionCase("ring-bf16", [45, 90], [1, 1], sliding_window=20, ring=True, dtype=BF16),
    AttentionCase("prefill-softcap", [40, 9], [25, 9], softcap=4.0, num_heads=6),
]


def _bytes(*tensors):
    return [t.contiguous().view(torch.uint8) for t in tensors]


def _assert_the_same_bits(compute):
    from tests.support import quick_interpreter

    with quick_interpreter.as_shipped():
        shipped = compute()
    for got, want in zip(_bytes(*compute()), _bytes(*shipped), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_attention(case):
    batch = make_batch(case)

    def compute():
        rows, heads = batch["q"].shape[:2]
        lse = torch.full((heads, rows), NAN, device=DEVICE)
        return attend(batch, "triton", lse=lse), lse

    _assert_the_same_bits(compute)


def test_quantized_writes():
    case = AttentionCase("", [], [])
    k, v = torch.randn(2, 9, case.num_kv_heads, case.head_dim).to(DEVICE).unbind()
    slots = torch.randperm(64)[:9].to(DEVICE)

    def compute():
        pages = [p.nan_to_num().to(torch.float8_e4m3fn) for p in make_pages(case, 4)]
        scales = [torch.zeros(*p.shape[:3], device=DEVICE) for p in pages]
        write_kv(k, v, *pages, slots, impl="triton", k_scale=scales[0], v_scale=scales[1])
        return *pages, *scales

    _assert_the_same_bits(compute)


def test_as_shipped_takes_back_what_was_replaced():
    from triton.runtime import interpreter

    from tests.support import quick_interpreter

    names = ("_patch_lang", "_patch_builtin", "_get_np_dtype")
    quick = [getattr(interpreter, name) for name in names]
    assert {f.__module__ for f in quick} == {quick_interpreter.__name__}
    with quick_interpreter.as_shipped():
        shipped = [getattr(interpreter, name) for name in names]
        assert {f.__module__ for f in shipped} == {interpreter.__name__}
        assert interpreter.interpreter_builder.options.sanitize_overflow
    assert [getattr(interpreter, name) for name in names] == quick
    assert not interpreter.interpreter_builder.options.sanitize_overflow
