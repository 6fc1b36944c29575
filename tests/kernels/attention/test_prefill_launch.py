"""How prefill may be launched: whole tiles of new rows by tensor descriptors, and programs that take query tiles in turns."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.attention import split_kv
from quire.kernels.attention import triton_impl as paged
from quire.kernels.attention.call import AttentionCall, check_attention
from quire.kernels.attention.configs import Config
from quire.kernels.common import launching
from quire.kernels.common.arch import named
from tests.kernels.attention.test_attention import attend
from tests.support.helpers import (
    DEVICE,
    NAN,
    AttentionCase,
    assert_within_budget,
    attention_reference,
    make_batch,
)

BF16, FP16 = torch.bfloat16, torch.float16
PLAIN = Config(32, 16, 4, 2)
TMA = dataclasses.replace(PLAIN, new_kv_tma=True)
TURNS = dataclasses.replace(PLAIN, programs_per_sm=2)
BOTH = Config(32, 16, 4, 2, new_kv_tma=True, programs_per_sm=1)
ONE = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "dtype": BF16}
CASES = {
    "chunks-tma": (TMA, AttentionCase("", [46, 0, 37], [36, 0, 37], **ONE)),
    "chunks-turns": (TURNS, AttentionCase("", [60, 0, 37], [50, 0, 37], **ONE)),
    "parts": (dataclasses.replace(BOTH, value_parts=2), AttentionCase("", [40], [40], **ONE)),
    "window-fp16": (BOTH, AttentionCase("", [70, 30], [60, 30], sliding_window=37, sinks=True, **ONE | {"dtype": FP16})),
    "group-3-softcap": (BOTH, AttentionCase("", [40], [40], softcap=5.0, **ONE | {"num_heads": 3})),
    "padding": (BOTH, AttentionCase("", [9, 40], [12, 40], **ONE)),
    "mixed": (BOTH, AttentionCase("", [40, 50], [1, 45], num_decodes=1, **ONE)),
    "pages-only": (BOTH, AttentionCase("", [50], [45], in_step=False, **ONE)),
}  # fmt: skip


@pytest.fixture
def launched(monkeypatch):
    """A function that makes attention launch prefill with a tile shape; decode as ever."""
    select = paged.select_config

    def use(config):
        def chosen(head_dim, dtype_bytes, phase, *args, **kwargs):
            if phase == "prefill":
                return config
            return select(head_dim, dtype_bytes, phase, *args, **kwargs)

        monkeypatch.setattr(paged, "select_config", chosen)

    return use


def prefill(batch, arch="sm_90"):
    """The arguments of the prefill launch of a batch, and its programs."""
    call = check_attention(AttentionCall(**batch))
    launch = paged.prepare(call, named(arch), launching.INTERPRETER_SMS)[-1]
    return launch.values, launch.grid[0]


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_the_same_to_the_bit(name, launched):
    config, case = CASES[name]
    batch = make_batch(case)
    launched(dataclasses.replace(config, new_kv_tma=False, programs_per_sm=0))
    plain, items = attend(batch, "triton"), prefill(batch)[1]
    launched(config)
    arguments, programs = prefill(batch)
    described = config.new_kv_tma and case.in_step
    assert [isinstance(arguments[name], TensorDescriptor) for name in ("k_tiles", "v_tiles")] == [described] * 2  # fmt: skip
    assert programs == (min(items, config.programs_per_sm * launching.INTERPRETER_SMS) or items)
    assert attend(batch, "triton").equal(plain)
    exact, _ = attention_reference(batch)
    assert_within_budget("out", plain, exact)


@pytest.mark.parametrize(
    "window, block_size, wraps",
    [(None, 4, "never"), (37, 16, "once"), (37, 48, "once"), (6, 4, "often"), (16, 4, "once")],
)
def test_how_often_a_tile_goes_round_the_table(window, block_size, wraps, launched):
    """A ring holds the window and the page in which it ends; a tile has 16 keys."""
    launched(PLAIN)
    case = AttentionCase("", [223, 90], [10, 9], sliding_window=window, ring=window is not None, block_size=block_size, **ONE)  # fmt: skip
    batch = make_batch(case)
    assert prefill(batch)[0]["WRAP"] == wraps
    exact, _ = attention_reference(batch)
    assert_within_budget("out", attend(batch, "triton"), exact)


@pytest.mark.parametrize("case", [CASES["window-fp16"][1], CASES["group-3-softcap"][1], CASES["padding"][1]])  # fmt: skip
def test_divided_scores(case, launched, monkeypatch):
    """As below Hopper, where 8 warps share 64 rows."""
    monkeypatch.setattr(paged, "arch_and_sms", lambda _: (named("sm_80"), 2))
    launched(Config(64, 16, 8, 2))
    batch = make_batch(case)
    assert prefill(batch, "sm_80")[0]["DIVIDE"] and not prefill(batch, "sm_90")[0]["DIVIDE"]
    exact, _ = attention_reference(batch)
    assert_within_budget("out", attend(batch, "triton"), exact)


@pytest.mark.parametrize("layout", ["fused", "head-major"])
def test_described_rows_may_lie_in_a_wider_tensor(layout, launched):
    batch = make_batch(AttentionCase("", [36, 20], [36, 20], head_dim=32, dtype=BF16))
    launched(PLAIN)
    plain = attend(batch, "triton")
    for name in "k", "v":
        rows = batch[name]
        if layout == "fused":
            wide = torch.full((len(rows), 5, 32), NAN, dtype=BF16, device=DEVICE)
            wide[:, 1:3] = rows
            batch[name] = wide[:, 1:3]
        else:
            batch[name] = rows.transpose(0, 1).contiguous().transpose(0, 1)
    launched(TMA)
    assert prefill(batch)[0]["k_tiles"] is not None
    assert attend(batch, "triton").equal(plain)


def test_no_row_of_another_sequence_is_copied_into_a_result(launched):
    """Where a sequence ends within a tile, the tensor does not."""
    batch = make_batch(AttentionCase("", [40, 40], [40, 40], **ONE))
    launched(TMA)
    whole = attend(batch, "triton")
    for name in "k", "v":
        batch[name][40:] = NAN
    assert attend(batch, "triton")[:40].equal(whole[:40])


@pytest.mark.parametrize("odd", ["address", "stride", "no-rows"])
def test_rows_that_no_descriptor_describes_are_copied_by_pointers(odd, launched):
    batch = make_batch(AttentionCase("", [40], [40], **ONE))
    launched(TMA)
    plain = attend(batch, "triton")
    assert prefill(batch)[0]["k_tiles"] is not None
    if odd == "no-rows":
        for name in "q", "k", "v":
            batch[name] = batch[name][:0]
        batch["cu_seqlens_q"] = batch["cu_seqlens_q"] * 0
        plain = plain[:0]
    else:
        width, start = (33, 0) if odd == "stride" else (32, 1)
        memory = torch.full((40 * 33 + 1,), NAN, dtype=BF16, device=DEVICE)
        rows = memory[start:][: 40 * width].view(40, 1, width)[..., :32]
        batch["v"] = rows.copy_(batch["v"])
    arguments, _ = prefill(batch)
    assert arguments["k_tiles"] is None and arguments["v_tiles"] is None
    for _ in range(2):
        assert attend(batch, "triton").equal(plain)


def test_a_table_that_masks_all_has_no_whole_tiles(launched):
    batch = make_batch(AttentionCase("", [40], [40], **ONE))
    launched(dataclasses.replace(TMA, mask_all=True))
    assert prefill(batch)[0]["k_tiles"] is None


@triton.jit
def _turns_kernel(items, turns, num_turns):
    for turn in range(num_turns):
        at = turns + turn * tl.num_programs(0) + tl.program_id(0)
        item = split_kv.item_of_turn(turn)
        tl.store(items + item, tl.load(items + item) + 1)
        tl.store(at, item)


@pytest.mark.parametrize(("programs", "turns"), [(1, 3), (2, 1), (3, 4), (5, 2)])
def test_every_item_has_one_turn_and_programs_the_same_work(programs, turns):
    taken, found = (
        torch.zeros(programs * turns, dtype=torch.int32, device=DEVICE) for _ in range(2)
    )
    _turns_kernel[(programs,)](taken, found, turns)
    assert taken.eq(1).all()
    # Items shrink by one from each to the next: over two turns every program has the same sum.
    sums = found.view(turns, programs)[: turns // 2 * 2].sum(0)
    assert (sums == sums[0]).all()
