"""Latents on a device: the quantiser bit for bit at scale, CUDA graphs, no host synchronisation."""

import bisect

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import IndexPages, LatentPages, compress, page_bytes, write_latent
from tests.gpu.conftest import DRY_RUN, assert_neither_waits_nor_allocates, captured
from tests.support.helpers import DEVICE, NAN, assert_within_budget
from tests.support.kernels.quantised import assert_quantised

pytestmark = pytest.mark.gpu

NUM_ROWS = 4 if DRY_RUN else 4096
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


def normed_and_turned(rows, norm_weight, cos_sin):
    """Rows [n, dim] in float64 after norm and RoPE; cos_sin: [n, 64]. Call it inside of `bounding`."""
    rows = rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + 1e-6) * norm_weight.double()
    cos, sin = cos_sin.double().chunk(2, 1)
    even, odd = rows[:, -ROPE_DIM::2], rows[:, 1 - ROPE_DIM :: 2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], 2).flatten(1)
    return torch.cat([rows[:, :-ROPE_DIM], turned], 1)


def assert_read(got, exact):
    """Rows read from quantised pages are within half a step of what ``exact`` allows; as many as Python is fast enough for."""
    some = slice(None, None, max(1, len(got) // 256))
    got, exact = got[some].cpu(), exact[some].cpu()
    if got.shape[1] == DIM:
        assert_within_budget("rope", got[:, -ROPE_DIM:].bfloat16(), exact[:, -ROPE_DIM:])
        got, exact = got[:, :-ROPE_DIM], exact[:, :-ROPE_DIM]
    assert_quantised("values", got, exact, 64 if got.shape[1] > 128 else 128)


def test_rows_of_a_model():
    """Norm, RoPE and quantisation together: what is read back is ``out``, and within half a step of the rows in float64."""
    x = torch.randn(NUM_ROWS, DIM, device=DEVICE).bfloat16()
    positions = torch.arange(NUM_ROWS, device=DEVICE)
    options = {"positions": positions, "cos_sin": angles(NUM_ROWS)}
    options |= {"norm_weight": torch.rand(DIM, device=DEVICE)}
    out = torch.full_like(x, NAN)
    pages = latent_pages("fp8", NUM_ROWS)
    write_latent(x, pages, positions, **options, out=out)
    assert pages.read(positions, x.dtype).equal(out)
    with bounding():
        exact = normed_and_turned(x.double(), options["norm_weight"], options["cos_sin"])
    assert_read(out.float(), exact)


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


def exact_entries(call, state, tokens):
    """Entries that some tokens close, in float64 with bounds. state: the rings before the step, which have gates with their bias."""
    ratio, dim, cu = call["ratio"], len(call["norm_weight"]), call["cu_seqlens_q"].tolist()
    parts, starts = [], []
    for token in tokens.tolist():
        seq = bisect.bisect_right(cu, token) - 1
        position = int(call["seq_lens"][seq]) - (cu[seq + 1] - token)
        starts.append(position + 1 - ratio)
        rows = []
        for back in range(ratio * (1 + call["overlap"]))[::-1]:
            # Series a of the window before, series b of this one.
            part = slice(dim, None) if call["overlap"] and back < ratio else slice(dim)
            at = position - back
            if token - back >= cu[seq]:
                row = call["kv"], call["gate"], call["ape"]
                index = token - back, token - back, at % ratio
                rows.append(torch.stack([x[i, part].double() for x, i in zip(row, index, strict=True)]))  # fmt: skip
            else:
                kept = state[seq, at % state.shape[1], :, part].double()
                rows.append(torch.cat([kept, torch.zeros_like(kept[:1])]))
        parts.append(torch.stack(rows))
    values, gates, biases = torch.stack(parts).unbind(2)
    with bounding():
        pooled = (torch.softmax(gates + biases, 1) * values).sum(1)
        return normed_and_turned(pooled, call["norm_weight"], call["cos_sin"][starts])


SHAPES = [(4, False), (4, True), (128, False)]
SIZES = [(4, 1), (2, 6)] if DRY_RUN else [(256, 1), (8, 1024)]


@pytest.mark.parametrize("num_seqs, q_len", SIZES)
@pytest.mark.parametrize("ratio, index", SHAPES, ids=["csa", "index", "hca"])
def test_compress_at_real_shapes(ratio, index, num_seqs, q_len):
    """Kernel and torch: the rings bit for bit, the entries within half a step of e4m3 of those in float64."""
    call = compress_call(num_seqs, q_len, ratio, index)
    other = call | {"state": call["state"].clone()}
    pages = call["pages"]
    other["pages"] = type(pages)(pages.data.clone(), pages.storage_block_size)
    closing = (call["slot_mapping"] >= 0).nonzero()[:, 0]
    exact = exact_entries(call, call["state"].clone(), closing)
    compress(**call, impl="triton")
    compress(**other, impl="torch")
    assert call["state"].equal(other["state"])
    for each in (call, other):
        assert_read(each["pages"].read(call["slot_mapping"][closing]), exact)


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

    assert_neither_waits_nor_allocates(step)


@pytest.mark.parametrize("ratio, index", SHAPES, ids=["csa", "index", "hca"])
def test_a_captured_decode_serves_other_lengths(cuda, ratio, index):
    call = compress_call(16, 1, ratio, index)
    initial = call["state"].clone()
    graph = captured(lambda: compress(**call))
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
