"""``mla_attention`` on a device: V3's sizes and lengths, CUDA graphs, repeated runs."""

from functools import partial

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import mla_attention, workspace_numel
from tests.gpu.conftest import DRY_RUN, assert_neither_waits_nor_allocates, captured
from tests.support.helpers import DEVICE, NAN, assert_within_budget

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
WIDTH = 32 if DRY_RUN else 576
LATENT = 16 if DRY_RUN else 512
SCALE = 192**-0.5


def make_call(seq_lens, q_lens, num_heads, in_step, block_size=64):
    """Arguments of ``mla_attention`` over random pages, NaN behind the last key of each sequence and in page 0."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=DEVICE).to(BF16)

    num_seqs, num_tokens = len(seq_lens), sum(q_lens)
    width = -(-max(seq_lens) // block_size)
    pages = normal(num_seqs * width + 1, block_size, WIDTH)
    table = torch.randperm(num_seqs * width, generator=generator, device=DEVICE) + 1
    table = table.view(num_seqs, width).int()
    pages[0] = NAN
    for s, (seq_len, q_len) in enumerate(zip(seq_lens, q_lens, strict=True)):
        slots = torch.arange(
            seq_len - q_len if in_step else seq_len, width * block_size, device=DEVICE
        )
        pages[table[s, slots // block_size].long(), slots % block_size] = NAN
    return {
        "q": normal(num_tokens, num_heads, WIDTH),
        "pages": pages,
        "block_table": table,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        "cu_seqlens_q": torch.tensor([0, *q_lens], device=DEVICE).cumsum(0).int(),
        "kv": normal(num_tokens, WIDTH) if in_step else None,
        "softmax_scale": SCALE,
        "head_dim_v": LATENT,
        "max_seqlen_q": max(q_lens),
    }


def in_double(call):
    """The result in float64 on the device, sequence by sequence; with bounds inside of `bounding`."""
    out = torch.zeros(*call["q"].shape[:2], LATENT, dtype=torch.float64, device=DEVICE)
    bounds, block_size = call["cu_seqlens_q"].tolist(), call["pages"].shape[1]
    for s, seq_len in enumerate(call["seq_lens"].tolist()):
        first, last = bounds[s], bounds[s + 1]
        slots = torch.arange(seq_len, device=DEVICE)
        keys = call["pages"][call["block_table"][s, slots // block_size].long(), slots % block_size]
        if call["kv"] is not None:
            keys = torch.cat([keys[: seq_len - last + first], call["kv"][first:last]])
        logits = call["q"][first:last].double() @ keys.double().T * SCALE
        position = torch.arange(seq_len - last + first, seq_len, device=DEVICE)
        logits = logits.masked_fill(slots > position[:, None, None], -torch.inf)
        out[first:last] = torch.softmax(logits, -1) @ keys[:, :LATENT].double()
    return out


@pytest.mark.parametrize("in_step", [False, True], ids=["pages", "in-step"])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("num_heads", [4] if DRY_RUN else [8, 16, 32, 40, 64, 128])
def test_v3_sizes(num_heads, phase, in_step):
    seq_lens = (20, 3) if DRY_RUN else (9001, 64, 65, 4097, 300)
    q_lens = (1,) * len(seq_lens) if phase == "decode" else [min(n, 60) for n in seq_lens]
    call = make_call(seq_lens, q_lens, num_heads, in_step)
    with bounding(weights=BF16):
        exact = in_double(call)
    out = mla_attention(**call, impl="triton")
    assert_within_budget("out", out, exact)
    for _ in range(1 if DRY_RUN else 20):
        assert mla_attention(**call, impl="triton").equal(out)


def test_calls_neither_synchronise_nor_allocate(cuda):
    num_sms = torch.cuda.get_device_properties(cuda).multi_processor_count
    for num_heads, q_lens in ((16, (1,) * 4), (128, (1,) * 4), (16, (33, 1, 1, 1))):
        call = make_call((9001, 64, 65, 4097), q_lens, num_heads, True)
        numel = workspace_numel(
            num_decodes=4, max_seqlen_q=1, num_heads=num_heads, num_kv_heads=1, head_dim=LATENT, num_sms=num_sms
        )  # fmt: skip
        memory = {
            "out": torch.empty(sum(q_lens), num_heads, LATENT, dtype=BF16, device=DEVICE),
            "workspace": torch.empty(numel, device=DEVICE),
        }
        assert_neither_waits_nor_allocates(partial(mla_attention, **call, **memory))


def test_a_captured_decode_serves_other_lengths(cuda):
    call = make_call((4096,) * 4, (1,) * 4, 16, False)
    out = torch.full((4, 16, LATENT), NAN, dtype=BF16, device=DEVICE)
    graph = captured(lambda: mla_attention(**call, out=out))
    for seq_lens in ([4096] * 4, [1, 63, 64, 65], [0, 4096, 300, 2000]):
        call["seq_lens"].copy_(torch.tensor(seq_lens, dtype=torch.int32))
        out.fill_(NAN)
        graph.replay()
        assert out.equal(mla_attention(**call)), seq_lens
        assert not out[call["seq_lens"] == 0].any()
