"""Results that a device must give bit for bit."""

import pytest
import torch

from quire.bench.common.bounds import UNIT
from quire.kernels import LatentPages, index_topk, page_bytes, write_latent
from quire.kernels.indexer.kernel import make_plan
from quire.models.layers.basic import linear_fp32
from tests.gpu.conftest import DRY_RUN
from tests.support.helpers import DEVICE, NAN
from tests.support.kernels.indexer_cases import IndexCase, make_index_batch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("block_size", [64, 2])
def test_quantized_latents_of_any_bits(block_size):
    """The kernel and torch, on the device too, write the same bytes."""
    num_rows = 4 if DRY_RUN else 4096
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**15), 2**15, (num_rows, 512), generator=generator).to(torch.int16)
    x = bits.view(torch.bfloat16)
    # Half of the rows are of one size, as latents are; those of any bits hold infinities and NaN.
    x[::2] = torch.randn(num_rows, 512, generator=generator)[::2].bfloat16()
    x = x.to(DEVICE)
    slots = torch.randperm(num_rows, generator=generator).to(DEVICE)
    shape = (-(-num_rows // block_size), page_bytes(block_size))
    written, expected = (
        LatentPages(torch.zeros(shape, dtype=torch.uint8, device=DEVICE), block_size)
        for _ in range(2)
    )
    write_latent(x, written, slots, impl="triton")
    expected.write(slots, x)
    got, want = written.values, expected.values
    nan = (want & 127 == 127) & (got & 127 == 127)
    assert torch.where(nan, want, got).equal(want)
    assert written.scales.equal(expected.scales)
    torch.testing.assert_close(written.rope, expected.rope, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_score_has_the_same_bits_in_decode_and_in_any_prefill_tile(fp8, cuda):
    """On a device only: sums of the interpreter's products depend on their shapes."""
    length = 2001
    sizes = {"topk": 64, "num_heads": 64, "index_dim": 128, "rows": 64, "dtype": torch.bfloat16}
    together = make_index_batch(IndexCase("", [length], [5], **sizes, fp8=fp8, values="normal"))
    divided = make_plan(5, topk=64, compress_ratio=4, max_seq_len=length)
    workspace = torch.full((5 * divided.query_numel,), NAN, device=DEVICE)
    selected = index_topk(**together, workspace=workspace)
    rows = workspace[: 5 * divided.row_numel].view(torch.int32).view(5, -1).clone()
    for token in range(5):
        alone = together | {name: together[name][token : token + 1] for name in ("q", "weights")}
        alone |= {"cu_seqlens_q": together["cu_seqlens_q"].clamp(max=1), "max_seqlen_q": 1}
        alone["seq_lens"] = together["seq_lens"] - 4 + token
        got = index_topk(**alone, workspace=workspace)
        visible = (length - 4 + token) // 4
        assert workspace[:visible].view(torch.int32).equal(rows[token, :visible])
        assert all(a[0].equal(b[token]) for a, b in zip(got, selected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_two_bytes_have_results_of_four(dtype):
    """``mm(out_dtype=)`` is off by the additions in fp32 alone: its products are exact in fp32."""
    rows, width = (3, 64) if DRY_RUN else (33, 4096)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator).to(dtype) for n in (rows, 64))
    got = linear_fp32(x.to(DEVICE), weight.to(DEVICE))
    assert got.dtype == torch.float32
    exact = x.double() @ weight.double().T
    bound = width * UNIT * (x.double().abs() @ weight.double().abs().T)
    assert bool(((got.cpu().double() - exact).abs() <= bound).all())
