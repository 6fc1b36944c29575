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
    seen, model = [], ToyModel()
    drafter = NGramDrafter(2, min_ngram=1)

    def noted(name, call):
        def wrapped(*args):
            seen.append((name, current[0]))
            return call(*args)

        return wrapped

    model.register_forward_pre_hook(lambda *_: seen.append(("forward", current[0])))
    drafter.propose = noted("draft", drafter.propose)

    class Builder(BatchBuilder):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            self.tables = self.tables.as_subclass(OnSecondDevice)

    monkeypatch.setattr(runner, "BatchBuilder", Builder)
    config = EngineConfig(
        num_pages=50, max_num_seqs=2, max_num_batched_tokens=64, decode_graphs=True
    )
    engine = captured_engine(
        model,
        config,
        lambda work: noted("replay", noted("capture", lambda w: w)(work)),
        drafter=drafter,
    )
    engine.add_request([5, 6, 7, 5, 6], SamplingParams(12, ignore_eos=True))
    engine.add_request([9], SamplingParams(12, ignore_eos=True))
    while engine.has_work:
        engine.step()
        assert current == [0]
    assert set(seen) == {(name, 1) for name in ("forward", "draft", "capture", "replay")}


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_on_the_host_is_page_locked_once_for_the_device_of_the_ids(dtype, runtime, current):
    """It is read in place until the model is gone; the call after a refusal tries again."""
    table = HostEmbedding(7, 5, WeightPlacement(torch.device("cpu"), dtype), scale=2.0)
    table.weight.data.copy_(torch.randn(7, 5))
    ids = torch.tensor([3, 0, 3, 6])
    expected = 2 * table.weight[ids]
    assert torch.equal(table(ids), expected) and not runtime.locked
    runtime.status = 2
    with pytest.raises(MemoryError, match="host memory that the driver pins, got CUDA error 2"):
        table(ids.as_subclass(OnSecondDevice))
    runtime.status = 0
    for _ in range(2):
        assert torch.equal(table(ids.as_subclass(OnSecondDevice)), expected)
        assert current == [0]
    assert runtime.locked == {table.weight.data_ptr(): (35 * dtype.itemsize, 0, 1)}
    del table
    gc.collect()
    assert not runtime.locked


def test_pages_of_the_host_tier_are_page_locked_as_long_as_they_live(runtime, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    pages = HostPages(3, 8192, torch.device("cuda"))
    assert [*runtime.locked] == [pages.rows.data_ptr()] and pages.rows.data_ptr() % 4096 == 0
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
    if made is None:
        with pytest.raises(NotImplementedError, match="decode_graphs: supported with"):
            sizes_to_capture(config, torch.device(device))
    else:
        sizes = sizes_to_capture(config, torch.device(device))
        assert sizes == ([1, 2, 4, 5] if made else [])
        many = replace(config, max_num_seqs=100)
        sizes = sizes_to_capture(many, torch.device(device))
        assert sizes == ([1, 2, 4, *range(8, 65, 8), 96, 100] if made else [])


class OnDevice(TorchDispatchMode):
    """Refuse tensors of the host and of its values: graphs copy from pinned memory alone."""

    def __enter__(self):
        self._patch = pytest.MonkeyPatch()
        for name in FROM_HOST:
            self._patch.setattr(torch, name, self._refuse)
        return super().__enter__()

    def __exit__(self, *error):
        self._patch.undo()
        return super().__exit__(*error)

    @staticmethod
    def _refuse(*args, **kwargs):
        raise AssertionError("a copy from the cpu")

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
        devices = {t.device.type for t in tensors}
        assert devices <= {"meta"}, (op, devices)
        return out


def capture_without_storage(model, monkeypatch, capability=(9, 0), **settings):
    """Launches of Triton in a captured decode step of a meta model that stands for a GPU."""
    launches = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.is_meta))
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(per_layer, "_device_view", lambda host, device: host)
    monkeypatch.setattr(per_layer, "page_lock", lambda host, owner: None)

    monkeypatch.setattr(launching, "launch", lambda kernel, *_, **more: launches.append(kernel))
    cache = model_cache(model, max_requests=4, **settings)
    kv = KVCache(cache.groups, num_pages=2, max_requests=4, max_model_len=256)
    pool, layout = cache.allocate(2), kv.layout
    builder = SimpleNamespace(
        num_groups=len(layout.groups),
        token_ids=lambda ids: ids,
        planner=None,
        gather=lambda slots, _: tuple(
            torch.empty(4, layout.columns(g)[1], dtype=torch.int32, device=META)
            for g in range(len(layout.groups))
        ),
    )

    def forward(input_ids, positions, attn):
        return model(input_ids, positions, attn, pool)

    def capture(work):
        with OnDevice():
            work()

    monkeypatch.setattr(graphs, "default_capture", lambda device: capture)
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
    log, ended = [], []

    class Stream:
        def __init__(self, device=None):
            self.name = f"stream {len(names)}"
            names.append(self.name)

        def wait_stream(self, other):
            log.append((self.name, "waits for", other.name))

        def record_event(self):
            log.append((self.name, "records"))
            number = len(log)
            return SimpleNamespace(
                query=lambda: number in ended,
                synchronize=lambda: log.append(("host waits for", number)),
            )

        def __enter__(self):
            current.append(self)

        def __exit__(self, *_):
            current.pop()

    names = []
    current = [Stream()]
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    for name in ("gather_pages", "scatter_pages"):
        done = lambda *_, name=name: log.append((current[-1].name, name))  # noqa: E731
        monkeypatch.setattr(host_tier, name, done)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *args, **options: x)
    pool = SimpleNamespace(device=torch.device("cuda"))
    copier = PageCopier(pool, SimpleNamespace(rows=None))
    assert log == [("stream 0", "gather_pages"), ("stream 0", "scatter_pages")]  # compiled
    for kind, stream, copy in (
        ("store", "stream 1", "gather_pages"),
        ("load", "stream 2", "scatter_pages"),
    ):
        log.clear()
        pages = np.array([1, 2], dtype=np.int32)
        copier.start(SimpleNamespace(kind=kind, sources=pages, targets=pages + 2, num_bytes=384))
        assert log == [(stream, "waits for", "stream 0"), (stream, copy), (stream, "records")]
        assert copier.poll() == [] and copier.has_jobs
        copier.wait()
        assert log[3:] == [("host waits for", 3)]
        ended.append(3)
        assert [c.job.kind for c in copier.poll()] == [kind]
        ended.clear()
