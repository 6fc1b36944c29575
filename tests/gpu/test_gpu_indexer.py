"""The indexer on a device: real sizes entry by entry, scores to the bit between decode and prefill, CUDA graphs."""

from functools import partial

import pytest
import torch

from quire.kernels import IndexPages, index_topk, index_topk_workspace_numel
from quire.kernels.indexer.plan import plan
from tests.gpu.conftest import DRY_RUN, assert_neither_waits_nor_allocates, captured
from tests.support.helpers import DEVICE, NAN

pytestmark = pytest.mark.gpu

HEADS, DIM, ROWS = (4, 16, 64) if DRY_RUN else (64, 128, 64)
TOPK = 8 if DRY_RUN else 512
LONG = 200 if DRY_RUN else 130_001


def make_call(seq_lens, q_lens, *, fp8=False, integers=True, seed=0):
    """Arguments of ``index_topk`` over pages full of keys; integers make every score exact, and many of them equal."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(*shape):
        if integers:
            return torch.randint(-2, 3, shape, generator=generator, device=DEVICE).float()
        return torch.randn(shape, generator=generator, device=DEVICE)

    num_seqs, num_tokens = len(seq_lens), sum(q_lens)
    width = -(-max(seq_lens) // (4 * ROWS))
    num_pages = num_seqs * width + 1
    order = torch.randperm(num_pages - 1, generator=generator, device=DEVICE) + 1
    if fp8:
        data = torch.zeros(num_pages, ROWS * (DIM + 4), dtype=torch.uint8, device=DEVICE)
        pages = IndexPages(data, ROWS, DIM)
        pages.values.copy_(draw(num_pages, ROWS, DIM).to(torch.float8_e4m3fn).view(torch.uint8))
        pages.scales.fill_(0.5)
    else:
        pages = IndexPages(draw(num_pages, ROWS, DIM).bfloat16(), ROWS, DIM)
    cu = torch.tensor([0, *q_lens], device=DEVICE).cumsum(0).int()
    return {
        "q": draw(num_tokens, HEADS, DIM).bfloat16(),
        "weights": draw(num_tokens, HEADS),
        "pages": pages,
        "block_table": order.view(num_seqs, width).int(),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        "cu_seqlens_q": cu,
        "topk": TOPK,
        "max_seqlen_q": max(q_lens),
        "max_seq_len": max(seq_lens),
    }


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "q_lens", [(1, 1, 1), (5, 2, 0), (1, 1, 9)], ids=["decode", "prefill", "mixed"]
)
def test_real_sizes_entry_by_entry(q_lens, fp8):
    call = make_call((LONG, LONG // 7, 4 * TOPK + 9), q_lens, fp8=fp8)
    want = index_topk(**call, impl="torch")
    for _ in range(1 if DRY_RUN else 20):
        got = index_topk(**call, impl="triton")
        assert all(have.equal(expected) for have, expected in zip(got, want, strict=True))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_score_has_the_same_bits_in_decode_and_in_any_prefill_tile(fp8, cuda):
    """On a device only: the interpreter multiplies matrices with NumPy, whose sums depend on their shapes."""
    together = make_call((20_001,), (5,), fp8=fp8, integers=False)
    divided = plan(num_tokens=5, topk=TOPK, compress_ratio=4, max_seq_len=20_001)
    workspace = torch.full((divided.workspace_numel,), NAN, device=DEVICE)
    selected = index_topk(**together, workspace=workspace)
    rows = workspace[: 5 * divided.row_numel].view(torch.int32).view(5, -1).clone()
    for token in range(5):
        alone = together | {name: together[name][token : token + 1] for name in ("q", "weights")}
        alone |= {"cu_seqlens_q": together["cu_seqlens_q"].clamp(max=1), "max_seqlen_q": 1}
        alone["seq_lens"] = together["seq_lens"] - 4 + token
        got = index_topk(**alone, workspace=workspace)
        visible = (20_001 - 4 + token) // 4
        row = workspace[: divided.row_numel].view(torch.int32)
        assert row[:visible].equal(rows[token, :visible])
        assert all(a[0].equal(b[token]) for a, b in zip(got, selected, strict=True))


def given(call):
    """The call's outputs and workspace, to be passed in."""
    num_tokens = len(call["q"])
    numel = index_topk_workspace_numel(
        num_tokens=num_tokens, topk=TOPK, max_seq_len=call["max_seq_len"]
    )
    return {
        "out": torch.zeros(num_tokens, TOPK, dtype=torch.int32, device=DEVICE),
        "lens": torch.zeros(num_tokens, dtype=torch.int32, device=DEVICE),
        "workspace": torch.empty(numel, device=DEVICE),
    }


def test_calls_neither_synchronise_nor_allocate(cuda):
    for q_lens in ((1, 1), (70, 1)):
        call = make_call((LONG, 9000), q_lens)
        memory = given(call)
        assert_neither_waits_nor_allocates(partial(index_topk, **call, **memory))


def test_a_captured_call_serves_other_lengths_and_tables(cuda):
    call = make_call((LONG,) * 4, (1,) * 4)
    memory = given(call)
    graph = captured(lambda: index_topk(**call, **memory))
    for seq_lens in ([LONG] * 4, [1, 3, 4, 2051], [0, LONG, 2052, 40_000]):
        call["seq_lens"].copy_(torch.tensor(seq_lens, dtype=torch.int32))
        call["block_table"].copy_(call["block_table"].flip(0))
        graph.replay()
        want = index_topk(**call, impl="torch")
        assert memory["out"].equal(want[0]) and memory["lens"].equal(want[1]), seq_lens
