"""Launches: on which device, of which grids, and what kernels are told of addresses."""

import dataclasses

import pytest
import torch

from quire.kernels import (
    LatentPages,
    compressed_attention,
    flash_mla_with_kvcache,
    mla_attention,
    sample_tokens,
)
from quire.kernels.common import launching, strided
from tests.support.helpers import assert_within_budget
from tests.support.kernels import compressed_cases
from tests.support.kernels.mla_cases import MlaCase, make_mla_batch, mla_reference

BF16 = torch.bfloat16
PAGED = compressed_cases.Case("", [40], [2], ratio=2, entry_rows=64, dtype=BF16)


def test_calls_with_nothing_to_launch():
    logits = torch.zeros(0, 7)
    assert sample_tokens(logits, impl="triton").shape == (0,)


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
    """Kernels are told what alignment they can count on."""
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
            batch = compressed_cases.make_batch(PAGED)
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
    assert not strided.rows_at_16_bytes(batch["pages"]) and strided.at_16_bytes(batch["pages"])
    batch = make_mla_batch(MlaCase("tail", [40], [2], dtype=BF16, tail=8))
    assert strided.rows_at_16_bytes(batch["pages"], batch["kv"], None)


def test_a_call_runs_on_the_device_of_its_tensors(monkeypatch):
    """Triton launches on the current device, whatever the tensors are on: that of the tensors is made the current one, for each such call."""
    current, seen = ["first"], []

    class DeviceOf:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            current.append(self.tensor)

        def __exit__(self, *_):
            current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda **_: seen.append((grid, current[-1]))

    monkeypatch.setattr(torch.cuda, "device_of", DeviceOf)
    launches = [launching.Launch(Kernel(), (n,), {}) for n in (1, 0, 2)]
    tensor = torch.zeros(3)
    launching.run(launches, tensor)
    assert [(grid, device is tensor) for grid, device in seen] == [((1,), True), ((2,), True)]
    assert current == ["first"]
