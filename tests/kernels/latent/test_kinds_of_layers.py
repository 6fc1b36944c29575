"""The three kinds of DeepSeek-V4's layers: a window alone, all entries beside it, entries that a list names."""

import os

import pytest
import torch

from quire.kernels import flash_mla_with_kvcache
from tests.kernels.latent import test_flash_mla
from tests.kernels.latent.test_compressed import BF16, FP8, attend
from tests.support.forked import printed
from tests.support.helpers import DEVICE, NAN, assert_within_budget
from tests.support.kernels.compressed_cases import Case, exactly, make_batch


def of_kind(batch, kind):
    """The call of a batch with lists as one of another kind of layer."""
    entries = dict.fromkeys(("compressed_pages", "compressed_table", "compress_ratio"))
    lists = dict.fromkeys(("topk_indices", "topk_lens"))
    return batch | {"csa": {}, "hca": lists, "window": entries | lists}[kind]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 48, 64])
@pytest.mark.parametrize("options", [{}, FP8], ids=["plain", "fp8"])
def test_pages_of_any_number_of_rows(options, rows):
    """Decode and prefill; a table of the window has pages of other sizes."""
    case = Case("", [141, 23, 70], [1, 1, 6], ratio=2, topk=9, entry_rows=rows, num_decodes=2, **options)  # fmt: skip
    batch = make_batch(case)
    exact, exact_lse = exactly(batch)
    lse = torch.full(exact_lse.shape, NAN, device=DEVICE)
    assert_within_budget("out", attend(batch, "triton", lse=lse).cpu(), exact)
    assert_within_budget("lse", lse.cpu(), exact_lse)


@pytest.mark.slow
def test_listed_fp8_pages_of_one_row_compile():
    """Not visible in the interpreter: Triton's passes made an address of another type than its pointer."""
    code = (
        "from quire.bench.static.compiling import measure\n"
        "for arch in ('sm_80', 'sm_90'):\n"
        "    print(measure('compressed-prefill-csa-h16-fp8-p1', arch, 0)['spill_bytes'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    assert printed(code, env=environment).split() == ["0", "0"]


@pytest.mark.parametrize("block_size", [1, 3, 48])
def test_lists_of_physical_rows_in_pages_of_any_number_of_rows(block_size):
    arguments, lists = test_flash_mla.make_call(fp8=False)
    generator = torch.Generator().manual_seed(2)
    _, rows, length = lists[1]
    named_rows = {x for x in rows.flatten().tolist() if 0 <= x < 80}
    num_blocks = -(-80 // block_size)
    cache, pages = test_flash_mla.bf16_cache(num_blocks, block_size, named_rows, generator)
    lists[1] = (pages, rows, length)
    exact, _ = test_flash_mla.exactly(arguments, lists)
    out, _ = flash_mla_with_kvcache(**arguments | {"extra_k_cache": cache}, impl="triton")
    assert_within_budget("out", out.flatten(0, 1).cpu(), exact)


@pytest.mark.parametrize("num_decodes", [0, 2])
def test_a_list_of_all_entries_is_no_list(num_decodes):
    """Bit for bit: -1 and entries of the future may follow them, and what a length leaves out may be anything."""
    case = Case("", [90, 63], [1, 2], ratio=4, entry_rows=2, num_heads=64, dtype=BF16, num_decodes=num_decodes)  # fmt: skip
    batch = make_batch(case)
    visible = torch.tensor([90 // 4, 62 // 4, 63 // 4], device=DEVICE, dtype=torch.int32)
    order = torch.arange(30, dtype=torch.int32, device=DEVICE).expand(3, 30)
    beyond = order - visible[:, None]
    expected = attend(batch, "triton")
    for tail in (-1, 10**6, -(2**31)):
        listed = torch.where(beyond < 0, order, tail)
        lists = {"topk_indices": listed, "topk_lens": None}
        # Keys that count nothing do not change sums, nor the tiles that the others are in.
        assert attend(batch | lists, "triton").equal(expected)
    garbage = torch.where(beyond < 0, order, 0)
    assert attend(batch | {"topk_indices": garbage, "topk_lens": visible}, "triton").equal(expected)
    none = {"topk_indices": garbage, "topk_lens": torch.zeros_like(visible)}
    window = attend(of_kind(batch, "window"), "triton")
    assert attend(batch | none, "triton").equal(window) and not window.equal(expected)


@pytest.mark.parametrize("options", [{}, FP8], ids=["plain", "fp8"])
def test_no_entry_yet_is_a_window_alone(options):
    """Bit for bit, beside sequences that have entries, and against the oracle."""
    case = Case("", [7, 61, 5], [1, 1, 5], ratio=8, num_decodes=2, **options)
    batch = make_batch(case)
    expected = attend(batch, "triton")
    window = attend(of_kind(batch, "window"), "triton")
    same = [out.equal(other) for out, other in zip(window, expected, strict=True)]
    assert same == [True, False] + [True] * 5
    for kind in ("hca", "window"):
        call = of_kind(batch, kind)
        assert_within_budget(kind, attend(call, "triton").cpu(), exactly(call)[0])
