"""Latents on a device: the quantiser bit for bit at scale, CUDA graphs, no host synchronisation; and the tests of a CPU once more."""

import pytest
import torch

from quire.kernels.mla import IndexPages, LatentPages, compress, page_bytes, write_latent
from tests.gpu.conftest import DRY_RUN
from tests.helpers import DEVICE, NAN

if not DRY_RUN:
    # The same tests as on a CPU, collected here a second time to run with the others of this folder.
    from tests.kernels.mla.test_compress import (  # noqa: F401
        test_a_gate_of_minus_infinity,
        test_an_entry_without_a_slot_is_not_made,
        test_any_cut_gives_the_same_bits,
        test_compress,
        test_more_sequences_than_a_program_looks_at_once,
        test_padding_rows,
        test_rejected_drafts_leave_no_trace,
    )
    from tests.kernels.mla.test_latent import (  # noqa: F401
        test_a_row_without_a_slot_is_not_read,
        test_addresses_beyond_32_bits,
        test_quantised_bytes,
        test_rounding_to_e4m3,
        test_the_last_position_of_a_million,
        test_write_latent,
    )

pytestmark = pytest.mark.gpu

NUM_ROWS = 8 if DRY_RUN else 4096
DIM, ROPE_DIM = 512, 64


def latent_pages(kind, num_rows, block_size=64):
    """Zeroed pages for a number of latents; kind: "fp8" or a dtype."""
    num_pages = -(-num_rows // block_size)
    if kind == "fp8":
        shape, dtype = (num_pages, page_bytes(block_size)), torch.uint8
    else:
        shape, dtype = (num_pages, block_size, DIM), kind
    return LatentPages(torch.zeros(shape, dtype=dtype, device=DEVICE), block_size)


def angles(num_positions):
    """A table of cosines and sines [num_positions, 64]."""
    inverse = 1e4 ** (-torch.arange(0, ROPE_DIM, 2, device=DEVICE) / ROPE_DIM)
    angle = torch.arange(num_positions, device=DEVICE)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], 1)


@pytest.mark.parametrize("block_size", [64, 2])
def test_quantised_bits_of_many_rows(block_size):
    """Any bf16 bits: the kernel and torch, on the device too, write the same bytes."""
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_ROWS, DIM)
    bits = torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)
    x = bits.view(torch.bfloat16)
    # Half of the rows are of one size, as latents are; those of any bits hold infinities and NaN.
    x[::2] = torch.randn(shape, generator=generator)[::2].bfloat16()
    x = x.to(DEVICE)
    slots = torch.randperm(NUM_ROWS, generator=generator).to(DEVICE)
    written, expected = (latent_pages("fp8", NUM_ROWS, block_size) for _ in range(2))
    write_latent(x, written, slots, impl="triton")
    expected.write(slots, x)
    got, want = written.values, expected.values
    nan = (want & 127 == 127) & (got & 127 == 127)
    assert torch.where(nan, want, got).equal(want)
    assert written.scales.equal(expected.scales)
    torch.testing.assert_close(written.rope, expected.rope, rtol=0, atol=0, equal_nan=True)


def test_rows_of_a_model():
    """Norm, RoPE and quantisation together: what is read back is ``out``, and within half a step of the plain rows."""
    x = torch.randn(NUM_ROWS, DIM, device=DEVICE).bfloat16()
    positions = torch.arange(NUM_ROWS, device=DEVICE)
    options = {"positions": positions, "cos_sin": angles(NUM_ROWS)}
    options |= {"norm_weight": torch.rand(DIM, device=DEVICE)}
    out, plain = torch.full_like(x, NAN), torch.full_like(x, NAN)
    pages = latent_pages("fp8", NUM_ROWS)
    write_latent(x, pages, positions, **options, out=out)
    assert pages.read(positions, x.dtype).equal(out)
    write_latent(x, None, None, **options, out=plain)
    scale = torch.exp2(pages.scales.float() - 127).view(-1, 8)[:NUM_ROWS, :7]
    step = 16 * scale.repeat_interleave(64, 1)  # half of 32, the step between 256 and 448
    assert ((out - plain).float().abs()[:, :448] <= step).all()
    torch.testing.assert_close(out[:, 448:], plain[:, 448:])


def compress_call(num_seqs, q_len, ratio, index=False):
    """Arguments of a step of sequences one token apart, with a ring that one launch suffices for; the first token of the first closes."""
    overlap, dim = ratio == 4, 128 if index else DIM
    channels, slots = dim * (1 + overlap), ratio * (1 + overlap)
    num_tokens = num_seqs * q_len
    context = torch.arange(num_seqs, dtype=torch.int32, device=DEVICE) + 3 * ratio - 1
    seq_lens = context + q_len
    position = (context[:, None] + torch.arange(q_len, device=DEVICE)).flatten()
    closes = (position + 1) % ratio == 0
    rows = -(-num_tokens // 64)
    if index:
        shape = (rows, page_bytes(64, dim + 4))
        pages = IndexPages(torch.zeros(shape, dtype=torch.uint8, device=DEVICE), 64)
    else:
        pages = latent_pages("fp8", num_tokens)
    kv, gate = torch.randn(num_tokens, 2, channels, device=DEVICE).bfloat16().unbind(1)
    tokens = torch.arange(num_tokens, device=DEVICE)
    return {
        "kv": kv,
        "gate": gate,
        "ape": torch.randn(ratio, channels, device=DEVICE),
        "state": torch.randn(num_seqs, slots + q_len, 2, channels, device=DEVICE),
        "state_index": torch.arange(num_seqs, dtype=torch.int32, device=DEVICE),
        "seq_lens": seq_lens,
        "cu_seqlens_q": torch.arange(0, num_tokens + 1, q_len, dtype=torch.int32, device=DEVICE),
        "ratio": ratio,
        "overlap": overlap,
        "norm_weight": torch.rand(dim, device=DEVICE),
        "cos_sin": angles(3 * ratio + num_seqs + q_len),
        "pages": pages,
        "slot_mapping": torch.where(closes, tokens, -1),
        "max_seqlen_q": q_len,
    }


SHAPES = [(4, False), (4, True), (128, False)]
SIZES = [(4, 1), (2, 6)] if DRY_RUN else [(256, 1), (8, 1024)]


@pytest.mark.parametrize("num_seqs, q_len", SIZES)
@pytest.mark.parametrize("ratio, index", SHAPES, ids=["csa", "index", "hca"])
def test_compress_at_real_shapes(ratio, index, num_seqs, q_len):
    """Kernel and torch: the rings bit for bit, the entries within a step of e4m3 of each other."""
    call = compress_call(num_seqs, q_len, ratio, index)
    other = call | {"state": call["state"].clone()}
    pages = call["pages"]
    other["pages"] = type(pages)(pages.data.clone(), pages.storage_block_size)
    compress(**call, impl="triton")
    compress(**other, impl="torch")
    assert call["state"].equal(other["state"])
    slots = call["slot_mapping"][call["slot_mapping"] >= 0]
    got, want = (each["pages"].read(slots) for each in (call, other))
    # A number at a midpoint may round either way: a step is at most 2^-3 of it.
    torch.testing.assert_close(got, want, rtol=2**-3, atol=2**-9 * want.abs().max().item())


@pytest.mark.parametrize("kind", ["fp8", torch.bfloat16], ids=["fp8", "bf16"])
def test_writes_neither_synchronise_nor_allocate(cuda, kind):
    x = torch.randn(100, DIM, device=cuda).bfloat16()
    positions = torch.arange(100, device=cuda)
    pages, out = latent_pages(kind, 100), torch.empty_like(x)
    options = {"positions": positions, "cos_sin": angles(100), "out": out}
    options |= {"norm_weight": torch.rand(DIM, device=cuda)}
    call = compress_call(16, 3, 4)

    def step():
        write_latent(x, pages, positions, **options)
        compress(**call)

    step()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("ratio, index", SHAPES, ids=["csa", "index", "hca"])
def test_a_captured_decode_serves_other_lengths(cuda, ratio, index):
    call = compress_call(16, 1, ratio, index)
    initial = call["state"].clone()
    compress(**call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compress(**call)
    for shift in (0, 1, ratio - 1):
        seq_lens = torch.arange(16, dtype=torch.int32, device=cuda) + 2 * ratio + 1 - shift
        seq_lens[3] = 0  # a padding row
        call["seq_lens"].copy_(seq_lens)
        closes = (seq_lens % ratio == 0) & (seq_lens > 0)
        call["slot_mapping"].copy_(torch.where(closes, torch.arange(16, device=cuda), -1))
        results = []
        for launch in (graph.replay, lambda: compress(**call)):
            call["state"].copy_(initial)
            call["pages"].data.zero_()
            launch()
            results.append((call["state"].clone(), call["pages"].data.clone()))
        (state, pages), (expected_state, expected_pages) = results
        assert state.equal(expected_state) and pages.equal(expected_pages)
