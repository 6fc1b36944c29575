"""Calls that look alike are checked and prepared once, and nothing of a call's tensors is kept."""

import dataclasses
import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import (
    LatentPages,
    compress,
    compressed_attention,
    flash_mla_with_kvcache,
    index_topk,
    merge_partials,
    mla_attention,
    page_bytes,
    paged_attention,
    sample_tokens,
    sliding_window_attention,
    write_kv,
    write_latent,
)
from quire.kernels.attention import merge, reference
from quire.kernels.attention import triton_impl as paged
from quire.kernels.attention.configs import Config
from quire.kernels.cache_write import reference as reference_write
from quire.kernels.common import launch_cache, launching
from quire.kernels.common.arch import named
from quire.kernels.compressed import reference as reference_compressed
from quire.kernels.compressed import triton_impl as compressed_triton
from quire.kernels.compressor import reference as reference_compress
from quire.kernels.compressor import triton_impl as compress_triton
from quire.kernels.indexer import plan as indexer_plan
from quire.kernels.indexer import triton_impl as indexer_triton
from quire.kernels.latent_write import triton_impl as latent_triton
from quire.kernels.mla import triton_impl as mla_triton
from tests.support.helpers import (
    AttentionCase,
    assert_within_budget,
    attention_reference,
    make_batch,
)
from tests.support.kernels import compressed_cases, indexer_cases
from tests.support.kernels.mla_cases import MlaCase, make_mla_batch, mla_reference

BF16 = torch.bfloat16
CASES = [
    AttentionCase("decode", [300, 33], [1, 1], num_heads=4, num_kv_heads=2, dtype=BF16),
    AttentionCase("prefill", [40, 33], [20, 33], num_heads=4, num_kv_heads=2, dtype=BF16),
    AttentionCase("mixed", [300, 33], [1, 20], num_decodes=1, sinks=True, dtype=BF16),
    AttentionCase("window", [90, 33], [1, 20], sliding_window=24, num_decodes=1, dtype=BF16),
]
# Planned as one that may be split: attention and merge.
SHORT = AttentionCase("short", [20, 5], [1, 1], num_heads=4, num_kv_heads=2, dtype=BF16)


@pytest.fixture(autouse=True)
def nothing_cached():
    launch_cache.clear()


def attend(batch, **more):
    function = sliding_window_attention if "sliding_window" in batch else paged_attention
    return function(**batch, impl="triton", **more)


def num_cached() -> int:
    return len(launch_cache._CACHE)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("given", [False, True])
def test_a_second_call_computes_with_its_own_tensors(case, given, monkeypatch):
    more = {}
    for seed in (1, 2):
        batch = make_batch(case, seed)
        if given:
            more = {
                "out": torch.empty_like(batch["q"]),
                # At an offset: KV splits lie where they lay in the first call's.
                "workspace": torch.empty(10**6)[8 * seed :][: 10**6 - 100],
            }
        exact, _ = attention_reference(batch)
        out = attend(batch, **more)
        assert_within_budget(f"call {seed}", out, exact)
        (cached,) = launch_cache._CACHE.values()
        assert cached.views.keys() <= {"k_tiles", "v_tiles"}
        if given:
            assert out is more["out"]
        monkeypatch.setattr(paged, "check_attention", None)  # the first call's check serves all


def test_results_of_two_calls_do_not_share_memory():
    batch = make_batch(SHORT)
    first, second = attend(batch), attend(batch)
    assert first.data_ptr() != second.data_ptr() and first.equal(second)


def test_one_tensor_for_two_arguments_is_not_taken_for_both_later():
    case = dataclasses.replace(CASES[1], block_size=16)
    batch = make_batch(case, 1)
    attend(dict(batch, v=batch["k"]))
    exact, _ = attention_reference(batch)
    assert_within_budget("out", attend(batch), exact)
    assert num_cached() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seqlen_q": True}, "max_seqlen_q: expected an int"),
        ({"max_seqlen_q": 0}, "max_seqlen_q: expected the longest"),
        ({"softmax_scale": -1.0}, "softmax_scale: expected a finite number"),
        ({"workspace": torch.empty(7)}, "workspace: expected float32"),
        ({"sinks": torch.zeros(4, dtype=BF16)}, "sinks: expected float32"),
        ({"q": torch.zeros(2, 4, 32, dtype=BF16)[..., ::2]}, "q: expected stride 1"),
        ({"seq_lens": torch.zeros(2)}, "seq_lens: expected int32"),
        (
            {"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)},
            r"cu_seqlens_q: expected int32 \[3\]",
        ),
        ({"num_decodes": [1]}, "num_decodes: expected an int"),
    ],
)
def test_what_was_right_once_excuses_nothing(change, message, monkeypatch):
    monkeypatch.setattr(launching, "launch", lambda *_: None)
    batch = make_batch(SHORT)
    attend(batch)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            attend(batch | change)
    assert num_cached() == 1
    attend(batch)


def test_another_table_of_tile_shapes_is_another_call(monkeypatch):
    batch = make_batch(CASES[1])
    attend(batch)
    launched = []
    monkeypatch.setattr(
        launching,
        "launch",
        lambda kernel, grid, arguments: launched.append(arguments["CONFIG"].BLOCK_N),
    )
    monkeypatch.setattr(paged, "select_config", lambda *a, **k: Config(16, 16, 4, 2))
    attend(batch)
    assert launched == [16]


def test_writes_are_cached_too():
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, 3, 2, 16, generator=generator)
        pages = torch.zeros(4, 8, 2, 2, 16)
        slots = torch.tensor([9, -1, 30 - seed])
        write_kv(k, v, pages[:, :, 0], pages[:, :, 1], slots, impl="triton")
        rows = pages.reshape(32, 2, 2, 16)
        assert rows[9, 0].equal(k[0]) and rows[30 - seed, 1].equal(v[2])
        assert (rows != 0).sum() == 4 * 32
    assert num_cached() == 1
    with pytest.raises(ValueError, match="slot_mapping: expected int64"):
        write_kv(k, v, pages[:, :, 0], pages[:, :, 1], slots.int(), impl="triton")


def test_quantised_writes_and_reads_are_cached():
    outs = []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        k, v = torch.randn(2, 5, 2, 32, generator=generator).to(BF16)
        pages = torch.zeros(4, 2, 8, 2, 32, dtype=torch.float8_e4m3fn)
        scales = torch.zeros(4, 2, 8, 2)
        views = [pages[:, 0], pages[:, 1]]
        more = {"k_scale": scales[:, 0], "v_scale": scales[:, 1]}
        write_kv(k, v, *views, torch.arange(8, 13), impl="triton", **more)
        expected, expected_scales = torch.zeros_like(pages), torch.zeros_like(scales)
        reference_write.write_kv(
            k, v, *expected.unbind(1), torch.arange(8, 13), *expected_scales.unbind(1)
        )
        assert pages.view(torch.uint8).equal(expected.view(torch.uint8))
        assert scales.equal(expected_scales)
        batch = {
            "q": torch.ones(1, 2, 32, dtype=BF16), "k_pages": views[0], "v_pages": views[1],
            "block_table": torch.tensor([[1]], dtype=torch.int32), "seq_lens": torch.tensor([5], dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32), "max_seqlen_q": 1, **more,
        }  # fmt: skip
        exact, _ = attention_reference(batch)
        outs.append(paged_attention(**batch, impl="triton"))
        assert_within_budget(f"call {seed}", outs[-1], exact)
    assert num_cached() == 2 and not outs[0].equal(outs[1])


@pytest.mark.parametrize("given", [False, True])
def test_merges_are_cached(given, monkeypatch):
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        parts = torch.randn(3, 5, 2, 32, generator=generator)
        lses = torch.randn(3, 2, 5, generator=generator)
        out = torch.empty(5, 2, 32, dtype=BF16) if given else None
        merged = merge_partials(parts, lses, out=out, impl="triton")
        assert merged.dtype == (BF16 if given else torch.float32) and (merged is out) == given
        with bounding():
            exact = reference.merge_partials(parts, lses, dtype=torch.float64)
        assert_within_budget(f"call {seed}", merged, exact)
        monkeypatch.setattr(merge, "check_merge", None)
    assert num_cached() == 1


def run_and_compare(attend, reference, batch, seed, given):
    """Call a wrapper, with out and a part of a workspace if they are `given`, and compare both results with the reference."""
    exact, exact_lse = reference(batch)
    lse = torch.empty_like(exact_lse, dtype=torch.float32)
    if given:
        workspace = torch.empty(10**6)[8 * seed :][: 10**6 - 100]
        batch = batch | {"out": torch.empty(exact.shape, dtype=BF16), "workspace": workspace}
    out = attend(**batch, lse=lse, impl="triton")
    assert_within_budget(f"call {seed}", out, exact)
    assert_within_budget(f"lse {seed}", lse, exact_lse)
    assert not given or out is batch["out"]


@pytest.mark.parametrize("given", [False, True])
def test_mla_calls_are_cached(given, monkeypatch):
    case = MlaCase("", [700, 33], [1, 20], num_decodes=1, num_heads=2, dtype=BF16)
    for seed in (1, 2):
        run_and_compare(mla_attention, mla_reference, make_mla_batch(case, seed), seed, given)
        monkeypatch.setattr(mla_triton, "MlaCall", None)
    assert num_cached() == 1


COMPRESSED = [
    compressed_cases.Case("hca", [700, 33], [1, 9], ratio=2, num_decodes=1, entry_rows=64, dtype=BF16),
    compressed_cases.Case("csa", [700, 360], [1, 1], ratio=350, topk=8, dtype=BF16),
    compressed_cases.Case("fp8", [600], [1], ratio=2, entry_rows=64, dtype=BF16, fp8=True, head_dim=512, rope_dim=64),
]  # fmt: skip


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("case", COMPRESSED, ids=lambda c: c.name)
def test_compressed_calls_are_cached(case, given, monkeypatch):
    for seed in (1, 2):
        batch = compressed_cases.make_batch(case, seed)
        run_and_compare(compressed_attention, compressed_cases.exactly, batch, seed, given)
        monkeypatch.setattr(compressed_triton, "CompressedCall", None)
    assert num_cached() == 1


# In blocks of 128, whose best are chosen from at a second level.
INDEXED = {
    "levels": indexer_cases.IndexCase("", [300, 40], [1, 1], compress_ratio=1, rows=64, topk=40),
    "fp8": indexer_cases.IndexCase("", [300, 51], [2, 1], fp8=True, dtype=BF16),
    "all are selected": indexer_cases.IndexCase("", [20, 32], [1, 1]),
}  # fmt: skip


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", INDEXED)
def test_index_calls_are_cached(name, given, monkeypatch):
    monkeypatch.setattr(indexer_plan, "BLOCK", 128)
    for seed in (1, 2):
        batch = indexer_cases.make_index_batch(INDEXED[name], seed)
        num_tokens = batch["q"].shape[0]
        expected, expected_lens = index_topk(**batch, impl="torch")
        more = {}
        if given:
            more = {
                "out": torch.empty(num_tokens, batch["topk"], dtype=torch.int32),
                "lens": torch.empty(num_tokens, dtype=torch.int32),
                "workspace": torch.empty(10**5)[8 * seed :][: 10**5 - 100],
            }
        out, lens = index_topk(**batch, **more, impl="triton")
        assert out.equal(expected) and lens.equal(expected_lens)
        assert not given or (out is more["out"] and lens is more["lens"])
        monkeypatch.setattr(indexer_triton, "IndexCall", None)
    assert num_cached() == 1


@pytest.mark.parametrize("fp8", [False, True])
def test_latent_writes_are_cached(fp8, monkeypatch):
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(3, 512, generator=generator).to(BF16)
        # At an offset: values, roped channels and scales lie where they lie in the pages of this call.
        data = torch.zeros(2, page_bytes(4) + 64, dtype=torch.uint8)[:, 32 * seed :][
            :, : page_bytes(4)
        ]
        if not fp8:
            data = torch.zeros(2, 4, 512, dtype=BF16)
        pages, expected = LatentPages(data, 4), LatentPages(torch.zeros_like(data), 4)
        slots = torch.tensor([5, -1, seed])
        out = torch.empty_like(x)
        assert write_latent(x, pages, slots, out=out, impl="triton") is out
        write_latent(x, expected, slots, out=torch.empty_like(x), impl="torch")
        everywhere = torch.arange(8)
        assert pages.read(everywhere).equal(expected.read(everywhere))
        assert out.float().equal(pages.seen(x))
        monkeypatch.setattr(latent_triton, "LatentCall", None)
    assert num_cached() == 1


@pytest.mark.parametrize("ring", [8, 7])
def test_compressions_are_cached(ring, monkeypatch):
    """In one launch, and in two where the ring is full; the second step reads the rows that the first one kept."""
    state = torch.zeros(3, ring, 2, 32)
    generator = torch.Generator().manual_seed(ring)
    rows, cos_sin = torch.randn(8, 2, 32, generator=generator).to(BF16), torch.rand(2, 20, 8, generator=generator)  # fmt: skip
    options = {"ratio": 4, "overlap": True, "norm_weight": torch.ones(16), "eps": 1e-6}
    for step in range(2):
        new, length = slice(4 * step, 4 * step + 4), 4 * step + 4
        pages = LatentPages(torch.zeros(3, 4, 16), 4, 16, 8)
        compress(
            rows[new, 0], rows[new, 1], torch.ones(4, 32), state, torch.tensor([1], dtype=torch.int32),
            torch.tensor([length], dtype=torch.int32), torch.tensor([0, 4], dtype=torch.int32), cos_sin=cos_sin[step],
            pages=pages, slot_mapping=torch.arange(4) + length, max_seqlen_q=4, impl="triton", **options,
        )  # fmt: skip
        with bounding():
            exact = reference_compress.compress(
                *rows[:length].unbind(1), torch.ones(4, 32), cos_sin=cos_sin[step], dtype=torch.float64, **options
            )  # fmt: skip
        written = pages.data.flatten(0, 1)
        assert_within_budget(f"entry {step}", written[length + 3], exact[step])
        assert (written != 0).any(-1).sum() == 1
        for position in range(max(0, length - ring), length):
            # A gate with its position's bias, which is 1.
            kept = rows[position].float() + torch.tensor([[0.0], [1.0]])
            assert state[1, position % ring].equal(kept)
        monkeypatch.setattr(compress_triton, "CompressCall", None)
    assert num_cached() == 1


@pytest.mark.parametrize("q_len", [1, 2])
@pytest.mark.parametrize("given", [False, True])
def test_flash_mla_calls_are_cached(q_len, given, monkeypatch):
    # Several KV splits.
    monkeypatch.setattr(compressed_triton, "arch_and_sms", lambda tensor: (named("sm_90"), 8))
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed)
        # Of a larger tensor: tokens of a sequence lie evenly, sequences do not.
        q = torch.randn(2, 3, 4, 512, generator=generator).to(BF16)[:, :q_len]
        cache = torch.randn(2, 256, 1, 512, generator=generator).to(BF16)[:, 8 * seed :][:, :200]
        call = {
            "q": q, "k_cache": cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512,
            "indices": torch.randint(0, 400, (2, q_len, 300), generator=generator, dtype=torch.int32),
            "topk_length": torch.tensor([300 - seed, 300], dtype=torch.int32),
        }  # fmt: skip
        call["indices"][1] = -1  # several KV splits without keys
        with bounding(weights=BF16):
            exact, exact_lse = reference_compressed.slots_attention(
                q.flatten(0, 1),
                [(LatentPages(cache[:, :, 0], 200), call["indices"].flatten(0, 1), call["topk_length"].repeat_interleave(q_len))],
                softmax_scale=512**-0.5, sinks=None, dtype=torch.float64,
            )  # fmt: skip
        more = {"out": torch.empty(2, q_len, 4, 512, dtype=BF16), "lse": torch.empty(4, 2 * q_len)}
        more = more | {"workspace": torch.empty(10**6)} if given else {}
        out, lse = flash_mla_with_kvcache(**call, **more, impl="triton")
        assert not given or (out is more["out"] and lse.data_ptr() == more["lse"].data_ptr())
        assert_within_budget(f"call {seed}", out.flatten(0, 1), exact)
        # A query without keys has lse -inf in the oracle, and FlashMLA's +inf.
        assert (lse[1] == torch.inf).all()
        assert_within_budget(f"lse {seed}", lse[0], exact_lse[:, :q_len])
    assert num_cached() == 1


def test_a_copy_of_an_argument_is_not_cached():
    """Of later calls the launches would see the tensor of the first one; nor is a part, which has another address."""
    q = torch.zeros(2, 3)
    for other in (q.clone(), q[1:]):
        with pytest.raises(AssertionError):
            launch_cache._view(other, q)
    assert launch_cache._view(q[:], q) is None


def test_a_stand_in_is_the_tensor_itself_or_a_view_of_it():
    """Another tensor may lie at its address by chance, once."""
    x = torch.zeros(2, 3, dtype=torch.int32)
    tensors = {"missing": None, "number": 3, "other": x[0], "x": x}
    assert launch_cache._source("missing", x, tensors, {}) == "x"
    assert launch_cache._source("missing", x.flatten(), tensors | {"other": None}, {}) == "x"


class Scaled(NamedTuple):
    data: Any
    factor: Any
    bias: Any


def test_tensors_within_named_tuples_are_those_of_each_call(monkeypatch):
    """The field ``data`` is the argument's tensor, any other the tensor of its own name."""
    launched = []
    monkeypatch.setattr(
        launching, "launch", lambda kernel, grid, arguments: launched.append(arguments)
    )

    def prepare(arguments):
        x, bias = arguments["x"], arguments["bias"]
        tuples = {"x": Scaled(x.view(torch.int32), 2.0, bias), "none": Scaled(1, 2, None)}
        return arguments, [launching.Launch(None, (1,), {**tuples, "bias": bias})]

    for step in range(3):
        x, bias = torch.full((3,), float(step)), torch.full((2,), float(step))
        launch_cache.run("tuples", {"x": x, "bias": bias}, prepare)
        found = launched[-1]
        assert type(found["x"]) is Scaled and found["none"] == Scaled(1, 2, None)
        assert found["x"].data.dtype == torch.int32 and found["x"].data.data_ptr() == x.data_ptr()
        assert found["x"].factor == 2.0 and found["x"].bias is bias and found["bias"] is bias
    assert num_cached() == 1
    (cached,) = launch_cache._CACHE.values()
    assert [value for _, value in cached.launches[0].tuples[0][2]] == [None, 2.0, None]


def test_pages_of_another_format_are_another_call():
    """Bytes of one shape hold as many rows as their owner says, and the scales lie behind these."""
    generator = torch.Generator().manual_seed(5)
    for rows in (4, 2, 4):
        pages = LatentPages(torch.zeros(2, page_bytes(4), dtype=torch.uint8), rows)
        pages.write(torch.arange(2 * rows), torch.randn(2 * rows, 512, generator=generator))
        call = {
            "q": torch.randn(1, 2, 512, generator=generator).to(BF16), "window_pages": pages,
            "window_table": torch.tensor([[1, 0]], dtype=torch.int32), "seq_lens": torch.tensor([3], dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32), "sliding_window": 8, "max_seqlen_q": 1,
            "compressed_pages": None,
        }  # fmt: skip
        exact, _ = compressed_cases.exactly(call)
        assert_within_budget("out", compressed_attention(**call, impl="triton"), exact)
    assert num_cached() == 2


def test_another_device_is_another_call():
    class Elsewhere(torch.Tensor):
        def get_device(self):
            return 1

    x = torch.zeros(2, 3)
    assert launch_cache.key("f", {"x": x}) == launch_cache.key("f", {"x": x + 1})
    assert launch_cache.key("f", {"x": x}) != launch_cache.key("f", {"x": x.as_subclass(Elsewhere)})


def test_what_are_no_pages_is_refused():
    batch = compressed_cases.make_batch(COMPRESSED[1])
    compressed_attention(**batch, impl="triton")
    bare = {"window_pages": batch["window_pages"].data}
    with pytest.raises(ValueError, match="window_pages: expected LatentPages, got Tensor"):
        compressed_attention(**batch | bare, impl="triton")


def test_calls_with_nothing_to_launch():
    """However many there were before: no driver is asked for a stream."""
    for _ in range(3):
        logits = torch.zeros(0, 7)
        assert sample_tokens(logits, impl="triton").shape == (0,)


def test_no_tensor_is_kept():
    batch = make_batch(SHORT)
    workspace = torch.empty(10**6)
    for _ in range(2):
        attend(batch, workspace=workspace)
    kept = [weakref.ref(t) for t in (*batch.values(), workspace) if isinstance(t, torch.Tensor)]
    del batch, workspace
    gc.collect()
    assert not any(ref() is not None for ref in kept)


def test_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(launch_cache, "LIMIT", 2)
    monkeypatch.setattr(launching, "launch", lambda *_: None)
    for q_len in (1, 2, 3, 4):
        attend(make_batch(AttentionCase("", [5], [q_len], dtype=BF16)))
        assert num_cached() <= 2


def one_further(tensor):
    """The same values and strides, one element further on in memory."""
    size = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    memory = tensor.new_zeros(tensor.storage_offset() + size + 1)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + 1).copy_(
        tensor
    )


@pytest.mark.parametrize(
    "name", ["pages", "kv", "window_pages", "compressed_pages", "compressed kv"]
)
def test_rows_at_16_bytes_are_told_from_others(name, monkeypatch):
    """Kernels are told what alignment they can count on; nothing cached of an aligned call serves one that is not."""
    of_mla = name in ("pages", "kv")
    launched = []
    original = launching.launch

    def launch(kernel, grid, arguments):
        values = launching.Launch(kernel, grid, arguments).values
        launched.append(values.get("ALIGNED"))
        original(kernel, grid, arguments)

    monkeypatch.setattr(launching, "launch", launch)
    for odd in (False, True, False):
        if of_mla:
            batch = make_mla_batch(MlaCase("a", [40], [2], dtype=BF16))
        else:
            batch = compressed_cases.make_batch(
                dataclasses.replace(COMPRESSED[0], seq_lens=[40], q_lens=[2], num_decodes=None)
            )
        if odd:
            value = batch[name.split()[-1]]
            pages = isinstance(value, LatentPages)
            moved = one_further(value.data if pages else value)
            batch[name.split()[-1]] = dataclasses.replace(value, data=moved) if pages else moved
        launched.clear()
        if of_mla:
            out, exact = mla_attention(**batch, impl="triton"), mla_reference(batch)[0]
        else:
            out = compressed_attention(**batch, impl="triton")
            exact = compressed_cases.exactly(batch)[0]
        assert_within_budget("out", out, exact)
        assert {a for a in launched if a is not None} == {not odd}


@pytest.mark.parametrize("name", ["k_cache", "extra_k_cache"])
def test_flash_mla_tells_rows_at_16_bytes_from_others(name, monkeypatch):
    launched = []

    def launch(kernel, grid, arguments):
        launched.append(launching.Launch(kernel, grid, arguments).values["ALIGNED"])

    monkeypatch.setattr(launching, "launch", launch)
    cache, rows = torch.zeros(2, 64, 1, 512, dtype=BF16), torch.zeros(1, 1, 4, dtype=torch.int32)
    call = {
        "q": torch.zeros(1, 1, 4, 512, dtype=BF16), "k_cache": cache, "block_table": None, "cache_seqlens": None, "head_dim_v": 512,
        "indices": rows, "extra_k_cache": cache, "extra_indices_in_kvcache": rows,
    }  # fmt: skip
    for moved in (cache, one_further(cache), cache):
        flash_mla_with_kvcache(**call | {name: moved}, impl="triton")
    assert launched == [True, False, True]


def test_rows_between_16_bytes_are_not_called_aligned():
    batch = make_mla_batch(MlaCase("tail", [40], [2], dtype=BF16, tail=1))
    assert not launch_cache.rows_at_16_bytes(batch["pages"]) and launch_cache.at_16_bytes(
        batch["pages"]
    )
    batch = make_mla_batch(MlaCase("tail", [40], [2], dtype=BF16, tail=8))
    assert launch_cache.rows_at_16_bytes(batch["pages"], batch["kv"], None)


def test_a_call_runs_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on the current device, whatever the tensors are on: that of the tensors is made the current one, for each such call."""
    current, seen = [0], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            current.append(self.index)

        def __exit__(self, *_):
            current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda **_: seen.append((grid, current[-1]))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", Device)
    launches = [launching.Launch(Kernel(), (n,), {}) for n in (1, 2)]
    for index in (1, 0, 1):
        x = torch.zeros(3)
        x.get_device = lambda index=index: index
        launch_cache.run("a device", {"x": x}, lambda arguments: (arguments, launches))
    assert seen == [((1,), 1), ((2,), 1), ((1,), 0), ((2,), 0), ((1,), 1), ((2,), 1)]
    assert current == [0]
    cpu = torch.zeros(3)
    launch_cache.run("a device", {"x": cpu}, lambda arguments: (arguments, launches))
    assert seen[-1] == ((2,), 0)


def test_a_cached_call_is_no_call_of_tensors_without_storage():
    pages, rows = torch.zeros(2, 4, 1, 16), torch.zeros(1, 1, 16)
    slots = torch.zeros(1, dtype=torch.int64)
    write_kv(rows, rows, pages, pages.clone(), slots, impl="triton")
    with pytest.raises(ValueError, match="k_pages: expected a tensor on cpu"):
        write_kv(rows, rows, pages.to("meta"), pages, slots, impl="triton")
