"""FlashMLA's calling convention against an oracle over its lists."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import LatentPages, flash_mla_with_kvcache
from quire.kernels.common.arch import named
from quire.kernels.common.latent_pages import page_bytes
from quire.kernels.latent import launch as latent_launch
from tests.kernels.oracles.compressed_attention import slots_attention
from tests.support.forked import printed
from tests.support.helpers import DEVICE, NAN, assert_within_budget

BF16 = torch.bfloat16


def fp8_cache(num_blocks, block_size, rows, generator):
    """FlashMLA's cache tensor, all bytes 255 but for the physical ``rows``; blocks lie 64 bytes into those of a larger pool."""
    stride = page_bytes(block_size) + 576
    pool = torch.full((num_blocks, stride), 255, dtype=torch.uint8)
    data = pool[:, 64:]
    for slot in rows:
        block, row = slot // block_size, slot % block_size
        quantized = torch.randint(0, 127, (448,), generator=generator, dtype=torch.uint8)
        data[block, row * 576 : row * 576 + 448] = quantized
        rope = torch.randn(64, generator=generator).bfloat16()
        data[block, row * 576 + 448 : row * 576 + 576] = rope.view(torch.uint8)
        scales = torch.randint(113, 121, (8,), generator=generator, dtype=torch.uint8)
        data[block, block_size * 576 + row * 8 :][:8] = scales
    pool = pool.to(DEVICE)
    cache = pool.as_strided((num_blocks, block_size, 1, 584), (stride, 584, 584, 1), 64)
    return cache, LatentPages(pool[:, 64:], block_size)


def bf16_cache(num_blocks, block_size, rows, generator):
    data = torch.full((num_blocks, block_size, 512), NAN, dtype=BF16)
    for slot in rows:
        data[slot // block_size, slot % block_size] = torch.randn(
            512, generator=generator
        ).bfloat16()
    data = data.to(DEVICE)
    return data.unsqueeze(2), LatentPages(data, block_size)


def make_call(fp8=True, num_heads=3, batch=2, seq_len_q=1, lens=True, extra=True, sink=True):
    """Arguments, and the same as lists for the oracle."""
    generator = torch.Generator().manual_seed(7)
    make = fp8_cache if fp8 else bf16_cache

    def slots(width, num_slots):
        """Physical rows in any order, -1 in the middle, and rows that do not exist past the length."""
        rows = (
            torch.rand(batch, seq_len_q, num_slots, generator=generator)
            .argsort(-1)[..., :width]
            .int()
        )
        rows[..., 1] = -1
        length = torch.randint(2, width, (batch,), generator=generator, dtype=torch.int32)
        if lens:
            past = torch.arange(width) >= length[:, None, None]
            rows = torch.where(past, 2**30, rows)
        named = {x for x in rows.flatten().tolist() if 0 <= x < num_slots}
        return rows.to(DEVICE), length.to(DEVICE) if lens else None, named

    rows, length, named = slots(9, 3 * 64)
    cache, pages = make(3, 64, named, generator)
    q = torch.randn(batch, seq_len_q, num_heads, 512, generator=generator).bfloat16().to(DEVICE)
    arguments = {
        "q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512, "is_fp8_kvcache": fp8,
        "indices": rows, "topk_length": length,
        "attn_sink": torch.randn(num_heads, generator=generator).to(DEVICE) if sink else None,
    }  # fmt: skip
    lists = [(pages, rows, length)]
    if extra:
        rows, length, named = slots(20, 27 * 3)
        cache, pages = make(27, 3, named, generator)
        arguments |= {
            "extra_k_cache": cache,
            "extra_indices_in_kvcache": rows,
            "extra_topk_length": length,
        }
        lists.append((pages, rows, length))
    return arguments, lists


def exactly(arguments, lists, softmax_scale=512**-0.5):
    """Output and lse of the oracle with bounds, on the host."""
    q, sinks = arguments["q"].cpu(), arguments["attn_sink"]
    lists = [
        (
            dataclasses.replace(pages, data=pages.data.cpu()),
            rows.cpu().flatten(0, 1),
            None if n is None else n.cpu().repeat_interleave(q.shape[1]),
        )
        for pages, rows, n in lists
    ]
    with bounding(weights=q.dtype):
        return slots_attention(
            q.flatten(0, 1), lists, softmax_scale=softmax_scale,
            sinks=None if sinks is None else sinks.cpu(),
        )  # fmt: skip


def assert_attends(results, exact):
    """Require the oracle's output and lse; of a query without keys FlashMLA has output 0, lse +inf."""
    (out, lse), (exact_out, exact_lse) = results, exact
    assert_within_budget("out", out.flatten(0, 1).cpu(), exact_out)
    lse, none = lse.transpose(0, 1).flatten(1).cpu(), exact_lse.isneginf()
    assert lse[none].isposinf().all()
    assert_within_budget("lse", torch.where(none, -torch.inf, lse), exact_lse)


@pytest.mark.parametrize("options", [
    {},
    {"num_heads": 16, "seq_len_q": 2, "batch": 1},
    {"num_heads": 64, "batch": 1},
    {"fp8": False, "lens": False},
    {"extra": False, "sink": False, "seq_len_q": 2},
], ids=str)  # fmt: skip
def test_against_float64(options, impl):
    arguments, lists = make_call(**options)
    batch, seq_len_q, num_heads = arguments["q"].shape[:3]
    if not options:  # a query without keys
        arguments["topk_length"][0], arguments["extra_indices_in_kvcache"][0] = 0, -1
    out, lse = flash_mla_with_kvcache(**arguments, impl=impl)
    assert out.shape == arguments["q"].shape and lse.shape == (batch, num_heads, seq_len_q)
    assert_attends((out, lse), exactly(arguments, lists))


@pytest.mark.parametrize("q_len", [1, 2])
def test_several_splits_of_a_larger_tensor(impl, q_len, monkeypatch):
    """Tokens of a sequence lie evenly, sequences do not; one of them has several splits without keys."""
    monkeypatch.setattr(latent_launch, "arch_and_sms", lambda tensor: (named("sm_90"), 8))
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 3, 4, 512, generator=generator).to(BF16)[:, :q_len]
    cache = torch.randn(2, 256, 1, 512, generator=generator).to(BF16)[:, 8:][:, :200]
    indices = torch.randint(0, 400, (2, 3, 300), generator=generator, dtype=torch.int32)[:, :q_len]
    indices[1] = -1
    lens = torch.tensor([299, 300], dtype=torch.int32)
    call = {
        "q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512, "is_fp8_kvcache": False,
        "indices": indices, "topk_length": lens, "attn_sink": None,
    }  # fmt: skip
    exact = exactly(call, [(LatentPages(cache[:, :, 0], 200), indices, lens)])
    call = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in call.items()}
    more = {
        "out": torch.full((2, q_len, 4, 512), NAN, dtype=BF16, device=DEVICE),
        "lse": torch.full((4, 2 * q_len), NAN, device=DEVICE),
        "workspace": torch.full((10**6,), NAN, device=DEVICE)[8:],
    }
    out, lse = flash_mla_with_kvcache(**call, **more, impl=impl)
    assert out is more["out"] and lse.data_ptr() == more["lse"].data_ptr()
    assert_attends((out, lse), exact)


# Prints the instructions that widen bytes of e4m3 in the machine code for lists of so many rows.
WIDENED = """
import sys, bench, torch
from quire.bench.static.compiling import compile_launch, cuobjdump
from quire.bench.static.launches import record
from quire.kernels import flash_mla_with_kvcache
from quire.kernels.common.arch import named

def empty(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")

def call():
    cache, q = empty(2, 16, 1, 584, dtype=torch.uint8), empty(4, 1, 16, 512, dtype=torch.bfloat16)
    width, extra = (int(n) for n in sys.argv[1:])
    more = dict(extra_k_cache=cache, extra_indices_in_kvcache=empty(4, 1, extra)) if extra else {}
    flash_mla_with_kvcache(
        q, cache, None, None, 512, is_fp8_kvcache=True, indices=empty(4, 1, width), impl="triton", **more
    )

arch = named("sm_90")
code = compile_launch(record(call, arch)[0], arch).asm["cubin"]
lines = [line for line in cuobjdump(code, "-sass").splitlines() if "UNPACK_B" in line]
print(*(line.split("UNPACK_B")[1].split(";")[0] for line in lines), sep=";")
"""


@pytest.mark.slow
@pytest.mark.parametrize("widths", [("1", "0"), ("5", "1")], ids=str)
def test_rows_behind_a_list_of_one_are_no_constants(widths):
    """ptxas (12.8 to 13.0) widens a zero that it knows, in the upper half of a register, to another
    number or NaN: where rows are masked, it may not see that in the code."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).resolve().parents[3]
    found = printed(WIDENED, *widths, cwd=root, env=environment).splitlines()[-1].split(";")
    operands = [each.split(",")[1].strip() for each in found]
    assert operands and [name for name in operands if not name.startswith("R")] == []
