"""Calls to a GPU, where there is none: devices, streams, and captured steps without the host."""

import ctypes
import gc
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.kernels.common import launching
from quire.kvcore import KVCache
from quire.kvcore.device import BatchBuilder
from quire.models.config.named import get_config
from quire.models.deepseek_v4.model import DeepseekV4
from quire.models.engine import graphs, host_tier, runner
from quire.models.engine.engine import EngineConfig
from quire.models.engine.graphs import DecodeGraphs, sizes_to_capture
from quire.models.engine.host_tier import HostPages, PageCopier
from quire.models.engine.memory import free_memory, model_cache
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from quire.models.layers import per_layer
from quire.models.layers.basic import WeightPlacement
from quire.models.layers.per_layer import HostEmbedding
from quire.models.loading.weights import build_model
from tests.models.conftest import TINY
from tests.support.models.captured import FROM_HOST, captured_engine
from tests.support.models.few import few
from tests.support.models.toy import ToyModel

META = torch.device("meta")
NAMES = (*TINY, "deepseek-v4-tiny")


class OnSecondDevice(torch.Tensor):
    """A tensor that says it is on ``cuda:1``; what is made of it does not."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True

    def get_device(self):
        return 1


@pytest.fixture
def current(monkeypatch):
    """[index of the current device], as torch.cuda keeps it where there are GPUs."""
    index = [0]

    def exchange(to):
        before, index[0] = index[0], index[0] if to < 0 else to
        return before

    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, exchange)
    return index


def test_a_step_runs_on_the_device_of_its_engine(current, monkeypatch):
    """Forward passes, drafts, captures and replays, whatever device is the current one."""
    seen, model, drafter = set(), ToyModel(), NGramDrafter(2, min_ngram=1)

    def noted(name, call):
        return lambda *args: (seen.add((name, current[0])), call(*args))[1]

    def on_second_device(*args, **more):
        builder = BatchBuilder(*args, **more)
        builder.tables = builder.tables.as_subclass(OnSecondDevice)
        return builder

    model.register_forward_pre_hook(noted("forward", lambda *_: None))
    drafter.propose = noted("draft", drafter.propose)
    monkeypatch.setattr(runner, "BatchBuilder", on_second_device)
    settings = {"num_pages": 50, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    engine = captured_engine(
        model,
        EngineConfig(decode_graphs=True, **settings),
        noted("capture", lambda work: noted("replay", work)),
        drafter=drafter,
    )
    for prompt in ([5, 6, 7, 5, 6], [9]):
        engine.add_request(prompt, SamplingParams(12, ignore_eos=True))
    while engine.has_work:
        engine.step()
        assert current == [0]
    assert seen == {(name, 1) for name in ("forward", "draft", "capture", "replay")}


@pytest.fixture
def runtime(current, monkeypatch):
    """CUDA's page locks: .locked is {address: (bytes, flags, device)}; calls return .status."""
    calls = SimpleNamespace(locked={}, status=0)

    def register(address, size, flags):
        assert address not in calls.locked
        if calls.status == 0:
            calls.locked[address] = (size, flags, current[0])
        return calls.status

    def as_tensor(array, device):
        about = array.__cuda_array_interface__
        [size], (address, read_only) = about["shape"], about["data"]
        assert calls.locked[address][0] == size and not read_only and about["typestr"] == "|u1"
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

    calls.cudaHostRegister, calls.cudaHostUnregister = register, calls.locked.pop
    monkeypatch.setattr(torch.cuda, "cudart", lambda: calls)
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    return calls


def test_a_table_on_the_host_is_page_locked_once_for_the_device_of_the_ids(runtime, current):
    """It is read in place until the model is gone; the call after a refusal tries again."""
    table = HostEmbedding(7, 5, WeightPlacement(torch.device("cpu"), torch.bfloat16), scale=2.0)
    table.weight.data.copy_(torch.randn(7, 5))
    ids = torch.tensor([3, 0, 3, 6])
    expected, there = 2 * table.weight[ids], ids.as_subclass(OnSecondDevice)
    assert torch.equal(table(ids), expected) and not runtime.locked
    runtime.status = 2
    with pytest.raises(MemoryError, match="host memory that the driver pins, got CUDA error 2"):
        table(there)
    runtime.status = 0
    for _ in range(2):
        assert torch.equal(table(there), expected) and current == [0]
    assert runtime.locked == {table.weight.data_ptr(): (70, 0, 1)}
    del table
    gc.collect()
    assert not runtime.locked


def test_pages_of_the_host_tier_are_page_locked_as_long_as_they_live(runtime, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    pages = HostPages(3, 8192, torch.device("cuda"))
    assert [*runtime.locked] == [pages.rows.data_ptr()] and pages.rows.data_ptr() % 4096 == 0
    # `Tensor.is_pinned` asks the driver for the address of the storage, not for that of the tensor.
    assert pages.rows.untyped_storage().data_ptr() == pages.rows.data_ptr()
    del pages
    assert not runtime.locked


def test_memory_that_torch_keeps_of_freed_tensors_is_free(monkeypatch):
    """The driver still counts the pages of a deleted engine as taken."""
    driver = {"free": 10, "total": 100}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: driver.update(free=90))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: tuple(driver.values()))
    assert free_memory(torch.device("cuda", 0)) == 90


@pytest.mark.parametrize(
    ("device", "wanted", "impl", "made"),
    [
        ("cuda", None, None, True), ("cuda", None, "torch", False), ("cuda", False, None, False),
        ("cuda", True, "triton", True), ("cuda", True, "torch", None), ("cpu", None, None, False),
        ("cpu", True, "torch", True),
    ],
)  # fmt: skip
def test_where_decode_goes_through_graphs(device, wanted, impl, made):
    """made: None = refused."""
    config = EngineConfig(decode_graphs=wanted, impl=impl, max_num_seqs=5)
    device = torch.device(device)
    if made is None:
        with pytest.raises(NotImplementedError, match="decode_graphs: supported with"):
            sizes_to_capture(config, device)
        return
    many = [1, 2, 4, *range(8, 65, 8), 96, 100]
    for most, sizes in ((5, [1, 2, 4, 5]), (100, many)):
        assert sizes_to_capture(replace(config, max_num_seqs=most), device) == sizes * made


class OnDevice(TorchDispatchMode):
    """Refuse tensors of the host: graphs copy from pinned memory alone."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        assert {t.device.type for t in tensors} <= {"meta"}, op
        return out


def refused(*args, **kwargs):
    raise AssertionError("a copy from the cpu")


def capture_without_storage(model, monkeypatch, **settings):
    """Launches of Triton in a captured decode step of a meta model that stands for a GPU."""
    launches = []
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    for owner, name, value in (
        (torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta)),
        (torch.Tensor, "data_ptr", lambda tensor: 0),
        (torch.cuda, "get_device_properties", lambda device: properties),
        (torch.cuda, "get_device_capability", lambda device: (9, 0)),
        (torch.cuda, "is_current_stream_capturing", lambda: True),
        (per_layer, "_device_view", lambda host, device: host),
        (per_layer, "page_lock", lambda host, owner: None),
        (launching, "launch", lambda kernel, *_, **more: launches.append(kernel)),
    ):
        monkeypatch.setattr(owner, name, value)
    cache = model_cache(model, max_requests=4, **settings)
    kv = KVCache(cache.groups, num_pages=2, max_requests=4, max_model_len=256)
    pool, widths = cache.allocate(2), [kv.layout.columns(g)[1] for g in range(len(cache.groups))]
    builder = SimpleNamespace(
        num_groups=len(widths),
        token_ids=lambda ids: ids,
        planner=None,
        gather=lambda slots, _: tuple(
            torch.empty(4, width, dtype=torch.int32, device=META) for width in widths
        ),
    )

    def capture(work):
        with monkeypatch.context() as patch, OnDevice():
            for name in FROM_HOST:
                patch.setattr(torch, name, refused)
            work()

    monkeypatch.setattr(graphs, "default_capture", lambda device: capture)
    forward = lambda ids, positions, attn: model(ids, positions, attn, pool)  # noqa: E731
    decode = DecodeGraphs(forward, builder, sizes=[4], max_seq_len=256, device=META)
    decode.add(decode.shapes[0])
    return launches


E4M3 = {"kv_cache_dtype": "fp8"}
CAPTURED = [(name, dtype, {}) for name in NAMES for dtype in (torch.float32, torch.bfloat16)]
CAPTURED += [(name, torch.bfloat16, E4M3) for name in ("gemma4-e-tiny", "gpt-oss-tiny")]


@pytest.mark.parametrize(("name", "dtype", "settings"), CAPTURED)
def test_a_captured_step_is_all_on_the_device(name, dtype, settings, monkeypatch):
    """The code that GPUs run: every kernel by Triton, table rows from page-locked memory."""
    model = build_model(few(name), device=META, dtype=dtype)
    launches = capture_without_storage(model, monkeypatch, **settings)
    assert len(launches) > len(model.layers)  # attention, and most of them write


@pytest.mark.parametrize("experts", ["fp8", "fp4"])
def test_a_captured_step_with_packed_experts(experts, monkeypatch):
    config = replace(get_config("deepseek-v4-small"), num_mtp_layers=0, moe_intermediate_size=64)
    model = DeepseekV4(config, device=META, dtype=torch.bfloat16, expert_format=experts)
    assert capture_without_storage(model, monkeypatch, **E4M3)


def test_on_a_gpu_copies_run_behind_the_model_and_are_awaited(monkeypatch):
    """A stream for each direction waits for the model's, then copies, then records."""
    log, ended, names = [], [], iter(("model", "store", "load"))

    class Stream:
        def __init__(self, device=None):
            self.name = next(names)

        def wait_stream(self, other):
            log.append((self.name, "waits for", other.name))

        def record_event(self):
            log.append((self.name, "records"))
            return SimpleNamespace(
                query=lambda: self.name in ended,
                synchronize=lambda: log.append(("host waits for", self.name)),
            )

        def __enter__(self):
            current.append(self)

        def __exit__(self, *_):
            current.pop()

    current = [Stream()]
    for owner, name, value in (
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "stream", lambda stream: stream),
        (torch.cuda, "current_stream", lambda device=None: current[-1]),
        (host_tier, "gather_pages", lambda *_: log.append((current[-1].name, "gathers"))),
        (host_tier, "scatter_pages", lambda *_: log.append((current[-1].name, "scatters"))),
        (torch.Tensor, "pin_memory", lambda x: x),
        (torch.Tensor, "to", lambda x, *args, **options: x),
    ):
        monkeypatch.setattr(owner, name, value)
    pool = SimpleNamespace(device=torch.device("cuda"))
    copier = PageCopier(pool, SimpleNamespace(rows=None))
    assert log == [("model", "gathers"), ("model", "scatters")]  # compiled
    pages = np.array([1, 2], dtype=np.int32)
    for kind, copy in (("store", "gathers"), ("load", "scatters")):
        log.clear()
        copier.start(SimpleNamespace(kind=kind, sources=pages, targets=pages + 2, num_bytes=384))
        assert log == [(kind, "waits for", "model"), (kind, copy), (kind, "records")]
        assert copier.poll() == [] and copier.has_jobs
        copier.wait()
        assert log[3:] == [("host waits for", kind)]
        ended.append(kind)
        assert [c.job.kind for c in copier.poll()] == [kind]
