"""CUDA graphs, no host synchronisation, and no allocation where memory is given, for batches of the
case tables of tests/kernels."""

import pytest
import torch

from quire import kernels
from quire.kernels import PoolPages, gather_pages, paged_attention, scatter_pages
from tests.gpu.conftest import (
    DRY_RUN,
    assert_neither_waits_nor_allocates,
    captured,
    without_waiting,
)
from tests.kernels.attention import test_merge as merge_cases
from tests.kernels.compressor import test_compressor as compressor_cases
from tests.kernels.latent_write import test_latent_write as latent_cases
from tests.kernels.layers import test_sampling as sampling_cases
from tests.kernels.pages import test_write_kv as write_cases
from tests.support.helpers import (
    DEVICE,
    NAN,
    AttentionCase,
    assert_within_budget,
    attention_reference,
    make_batch,
)
from tests.support.kernels import compressed_cases, indexer_cases, mla_cases

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
LONGEST = 40 if DRY_RUN else 900
DECODE, MIXED = (1, 1, 1, 1), (1, 1, 9, 0)


def seq_lens(q_lens):
    return [max(n, q) for n, q in zip((LONGEST, 33, LONGEST // 2, 17), q_lens, strict=True)]


def attention(q_lens, **options):
    sizes = {"num_heads": 8, "head_dim": 64, "dtype": BF16, "in_step": False}
    return make_batch(AttentionCase("", seq_lens(q_lens), q_lens, **sizes, **options))


def latent(q_lens, **options):
    sizes = {"num_heads": 16, "head_dim": 64, "rope_dim": 16, "dtype": BF16}
    options |= {"in_step": False, "ring": False}
    case = compressed_cases.Case("", seq_lens(q_lens), q_lens, **sizes, **options)
    return compressed_cases.make_batch(case)


def mla(q_lens):
    sizes = {"num_heads": 16, "head_dim_v": 64, "in_step": False, "dtype": BF16}
    return mla_cases.make_mla_batch(mla_cases.MlaCase("", seq_lens(q_lens), q_lens, **sizes))


def index(q_lens):
    case = indexer_cases.IndexCase("", seq_lens(q_lens), q_lens, dtype=BF16)
    return indexer_cases.make_index_batch(case)


def pooling(q_lens, **options):
    run = compressor_cases.Run(compressor_cases.Case([q_lens], start=LONGEST, slack=12, **options))
    call = run.arguments([LONGEST] * 4, q_lens)
    return call | {"slot_mapping": torch.arange(len(call["kv"]), device=DEVICE)}


def sampling(q_lens):
    logits = sampling_cases.make_logits(4, 300 if DRY_RUN else 128_256)
    call = sampling_cases.make_call(logits, sampling_cases.FILTERS[-4:], [0.37] * 4)
    return call | {"probs": torch.zeros_like(logits)}


# name -> (operator, arguments for the new tokens of four sequences)
CALLS = {
    "attention": (paged_attention, attention),
    "window": (kernels.sliding_window_attention, lambda q: attention(q, sliding_window=24)),
    "mla": (kernels.mla_attention, mla),
    "sliding": (kernels.compressed_attention, latent),
    "csa": (kernels.compressed_attention, lambda q: latent(q, ratio=4, topk=6)),
    "hca": (kernels.compressed_attention, lambda q: latent(q, ratio=8)),
    "index": (kernels.index_topk, index),
    "compress-csa": (kernels.compress, lambda q: pooling(q, dtype=BF16)),
    "compress-index": (kernels.compress, lambda q: pooling(q, **compressor_cases.INDEX_FP8)),
    "compress-hca": (kernels.compress, lambda q: pooling(q, **compressor_cases.HCA)),
    "write-latent": (kernels.write_latent, lambda q: latent_cases.make(**latent_cases.FP8)),
    "write-kv": (
        kernels.write_kv,
        lambda q: write_cases.make(40, num_kv_heads=4, head_dim=128, dtype=BF16),
    ),
    "merge": (kernels.merge_partials, lambda q: merge_cases.make(3, 40, 4, 128)),
    "sample": (kernels.sample_tokens, sampling),
}


TABLES = (
    ("block_table", "k_pages"),
    ("block_table", "pages"),
    ("window_table", "window_pages"),
    ("compressed_table", "compressed_pages"),
)


def data_of(call):
    """Every tensor of a call."""
    values = (getattr(value, "data", value) for value in call.values())
    return [value for value in values if isinstance(value, torch.Tensor)]


def make(name, q_lens):
    """An operator and a call of it over finite memory, results and workspace given."""
    function, arguments = CALLS[name]
    call = arguments(q_lens)
    for tensor in data_of(call):
        if tensor.is_floating_point():
            tensor.nan_to_num_()
    for table, pages in TABLES:
        if call.get(table) is not None and pages in call:
            pool = getattr(call[pages], "data", call[pages])
            call[table].remainder_(len(pool))
    if "q" in call:
        call["workspace"] = torch.zeros(1 << (18 if DRY_RUN else 24), device=DEVICE)
        shape = (*call["q"].shape[:2], call.get("head_dim_v") or call["q"].shape[2])
        call["out"] = torch.zeros(shape, dtype=call["q"].dtype, device=DEVICE)
    if name == "index":
        call["out"] = torch.zeros(len(call["q"]), call["topk"], dtype=torch.int32, device=DEVICE)
        call["lens"] = call["out"][:, 0].contiguous()
    return function, call


@pytest.mark.parametrize("q_lens", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("sample", "write-kv", "merge")])
def test_calls_neither_synchronise_nor_allocate(name, q_lens):
    function, call = make(name, q_lens)
    assert_neither_waits_nor_allocates(lambda: function(**call, impl="triton"))


@pytest.mark.parametrize("name", CALLS)
def test_a_captured_decode_serves_other_values(name):
    """Replayed for other lengths, tables and numbers, a graph gives what a new call gives."""
    function, call = make(name, DECODE)
    graph = captured(lambda: function(**call, impl="triton"))
    for lengths in ([LONGEST] * 4, [1, 3, 4, 33], [0, LONGEST, 16, 17]):
        if "seq_lens" in call:
            call["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        for table in ("block_table", "window_table", "compressed_table"):
            if call.get(table) is not None:
                call[table].copy_(call[table].flip(0))
        if name == "sample":
            call["logits"].neg_()
        initial = [tensor.clone() for tensor in data_of(call)]
        found = []
        for step in (graph.replay, lambda: function(**call, impl="triton")):
            for tensor, before in zip(data_of(call), initial, strict=True):
                tensor.copy_(before)
            step()
            found.append([tensor.clone() for tensor in data_of(call)])
        for replayed, expected in zip(*found, strict=True):
            torch.testing.assert_close(replayed, expected, rtol=0, atol=0, equal_nan=True)


def test_two_streams_do_not_disturb_each_other(cuda):
    """Two calls with memory of their own at the same time, many times over."""
    calls = [make(name, MIXED) for name in ("attention", "window")]
    expected = [function(**call).clone() for function, call in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(20):
        for (function, call), stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                function(**call)
        torch.cuda.synchronize()
        for (_, call), want in zip(calls, expected, strict=True):
            assert call["out"].equal(want)


@pytest.mark.parametrize("q_lens", [DECODE, MIXED], ids=["decode", "mixed"])
def test_a_workspace_between_16_bytes(q_lens):
    """Calls compute with their own tensors, wherever these begin."""
    case = AttentionCase("again", [20, 5, 33, 17], q_lens, dtype=BF16)
    for seed, offset in enumerate((0, 1, 0)):
        batch = make_batch(case, seed)
        workspace = torch.full((10**5,), NAN, device=DEVICE)[offset:]
        exact, _ = attention_reference(batch)
        out = paged_attention(**batch, impl="triton", workspace=workspace)
        assert_within_budget(f"call {seed}", out, exact)


@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_pages_come_back_from_pinned_memory(cuda, impl):
    """By a kernel and by copy engines, without waiting."""
    generator = torch.Generator().manual_seed(4)
    made = torch.randint(256, (3, 64, 9 * 576), generator=generator, dtype=torch.uint8)
    pages = PoolPages(list(made.to(cuda).unbind()))
    host = torch.zeros(40, pages.num_bytes, dtype=torch.uint8).pin_memory()
    page_ids, rows = (torch.randperm(n, generator=generator)[:32] for n in (64, 40))
    ids = [i.to(cuda) if impl == "triton" else i for i in (page_ids, rows)]
    torch.cuda.synchronize()
    with without_waiting():
        gather_pages(pages, ids[0], host, ids[1], impl=impl)
    torch.cuda.synchronize()
    assert host[rows].equal(made[:, page_ids].transpose(0, 1).flatten(1))
    for tensor in pages.tensors:
        tensor.zero_()
    scatter_pages(pages, ids[0], host, ids[1], impl=impl)
    back = torch.stack(pages.tensors).cpu()
    assert back[:, page_ids].equal(made[:, page_ids])
    assert back.sum(dtype=torch.int64) == made[:, page_ids].sum(dtype=torch.int64)


def test_memory_that_the_device_cannot_reach(cuda):
    pages = PoolPages([torch.zeros(4, 64, dtype=torch.uint8, device=cuda)])
    ids = torch.zeros(1, dtype=torch.int64, device=cuda)
    with pytest.raises(ValueError, match=r"^buffer: expected a tensor on cuda:0 or in pinned host"):
        gather_pages(pages, ids, torch.zeros(2, 64, dtype=torch.uint8), ids)
