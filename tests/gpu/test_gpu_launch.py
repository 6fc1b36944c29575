"""What only a device shows: CUDA graphs, no host synchronisation, no allocation where memory is given."""

import pytest
import torch

from quire.bench.cases.make import make_problem
from quire.bench.cases.shapes import TINY_SHAPES, Case, Shape
from quire.bench.peers.quire_calls import quire_calls
from quire.kernels import merge_partials, paged_attention, sliding_window_attention, write_kv
from tests.gpu.conftest import assert_neither_waits_nor_allocates, captured
from tests.support.helpers import (
    DEVICE,
    NAN,
    AttentionCase,
    assert_within_budget,
    attention_reference,
    make_batch,
)

pytestmark = pytest.mark.gpu

SHAPE = Shape("test/full", 16, 4, 128, block_size=32)
WINDOW = Shape("test/window", 16, 4, 128, sliding_window=1024, block_size=32)
PHASES = ("decode", "prefill", "mixed")


def problem_of(shape, phase, copies=1):
    case = Case(shape, phase, 4, 4096)
    return make_problem(case, torch.device(DEVICE), torch.bfloat16, copies=copies)


@pytest.mark.parametrize("in_step", [False, True], ids=["pages", "in-step"])
@pytest.mark.parametrize("shape", [SHAPE, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("phase", PHASES)
def test_calls_neither_synchronise_nor_allocate(cuda, phase, shape, in_step):
    [call] = quire_calls(problem_of(shape, phase), in_step=in_step)
    # Launches of the prefill part need no workspace, and decode was given one.
    assert_neither_waits_nor_allocates(call)


def test_write_and_merge_do_not_synchronise(cuda):
    k, v = torch.randn(2, 40, 4, 128, device=cuda, dtype=torch.bfloat16).unbind(0)
    k_pages, v_pages = torch.zeros(2, 8, 16, 4, 128, device=cuda, dtype=torch.bfloat16).unbind(0)
    slots = torch.arange(40, device=cuda)
    parts = torch.randn(3, 40, 4, 128, device=cuda)
    part_lse = torch.randn(3, 4, 40, device=cuda)
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            write_kv(k, v, k_pages, v_pages, slots)
            merge_partials(parts, part_lse)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert k_pages.flatten(0, 1)[:40].equal(k) and v_pages.flatten(0, 1)[:40].equal(v)


@pytest.mark.parametrize("shape", [SHAPE, WINDOW], ids=["full", "window"])
def test_a_captured_decode_serves_other_lengths_and_tables(cuda, shape):
    problem = problem_of(shape, "decode")
    table = problem.shared["block_table"].clone()
    if shape.sliding_window is not None:
        # Pages behind the window do not exist at full length; shorter sequences see them.
        table = torch.randint_like(table, 1, len(problem.each[0]["k_pages"]))
    lengths = problem.shared["seq_lens"].clone()
    out = torch.full_like(problem.results["out"], NAN)
    lse = torch.full((shape.num_heads, 4), NAN, device=cuda)

    def call(out, lse):
        attend = paged_attention
        options = {"max_seqlen_q": 1, "max_seq_len": 4096, "out": out, "lse": lse}
        if shape.sliding_window is not None:
            attend, options["sliding_window"] = sliding_window_attention, shape.sliding_window
        tensors = [problem.each[0][name] for name in ("q", "k_pages", "v_pages")]
        return attend(*tensors, table, lengths, problem.shared["cu_seqlens_q"], **options)

    graph = captured(lambda: call(out, lse))
    for seq_lens in ([4096] * 4, [1, 16, 17, 33], [0, 4096, 300, 2000], [1025, 1024, 1023, 0]):
        lengths.copy_(torch.tensor(seq_lens, dtype=torch.int32))
        table.copy_(table.flip(0))
        out.fill_(NAN)
        graph.replay()
        expected, expected_lse = torch.empty_like(out), torch.empty_like(lse)
        call(expected, expected_lse)
        assert out.isfinite().all()
        assert out.equal(expected) and lse.equal(expected_lse), seq_lens
        empty = lengths == 0
        assert not out[empty].any() and (lse[:, empty] == -torch.inf).all()


def test_two_streams_do_not_disturb_each_other(cuda):
    """Two calls with memory of their own at the same time, many times over."""
    problems = [problem_of(SHAPE, "decode"), problem_of(WINDOW, "mixed")]
    calls = [quire_calls(problem, in_step=True)[0] for problem in problems]
    expected = [call()[0].clone() for call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(20):
        results = []
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(call()[0])
        torch.cuda.synchronize()
        for got, want in zip(results, expected, strict=True):
            assert got.equal(want)


@pytest.mark.parametrize(
    "seq_lens, q_lens", [([20, 5], [1, 1]), ([40, 33], [20, 17])], ids=["decode", "prefill"]
)
def test_calls_compute_with_their_own_tensors(seq_lens, q_lens):
    """Also where the workspace lies between 16 bytes."""
    case = AttentionCase("again", seq_lens, q_lens, num_heads=4, num_kv_heads=2, dtype=torch.bfloat16)  # fmt: skip
    for seed, offset in enumerate((0, 1, 0)):
        batch = make_batch(case, seed)
        workspace = torch.full((10**5,), NAN, device=DEVICE)[offset:][: 10**5 - 8]
        exact, _ = attention_reference(batch)
        out = paged_attention(**batch, impl="triton", workspace=workspace)
        assert_within_budget(f"call {seed}", out, exact)


@pytest.mark.parametrize("in_step", [False, True], ids=["pages", "in-step"])
def test_calls_share_their_output_and_differ_by_copy(in_step):
    """What the rotation of a benchmark relies on: each call reads its own copy, and fills one output."""
    case = Case(TINY_SHAPES["tiny/global"], "decode", 2, 20)
    problem = make_problem(case, torch.device(DEVICE), torch.float32, copies=2)
    first, second = quire_calls(problem, in_step=in_step)
    one = first()[0].clone()
    two = second()[0].clone()
    assert not one.equal(two) and first()[0].equal(one)
