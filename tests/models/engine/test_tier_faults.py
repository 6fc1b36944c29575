"""Each copy, read and write of an engine's tiers fails in turn; what a new process has of a disk and of a snapshot; hints in between."""

from concurrent.futures import Future

import pytest
import torch

from quire.kvcore import snapshot
from quire.kvcore.tier import disk as disk_module
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.loading.random_weights import random_model
from quire.models.tiers import ways
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.models.engine.test_engine_many import alone
from tests.models.engine.test_tiering import (
    GIB_OF_A_PAGE,
    PARAMS,
    end,
    finish,
    leave,
    recount,
    tiered,
)
from tests.support.models.few import few
from tests.support.models.toy import ToyModel

CALLS = ((ways.PageWays, "copy"), (disk_module.DiskStore, "read"), (disk_module.DiskStore, "write"))
PROMPTS = [[3 + (n + 7 * user) % 50 for n in range(70 + 5 * user)] for user in range(4)]
FAILURES = ("before", "half", "later")


class FaultAt:
    """One call fails, counted from 0: before it does anything; after half of it; or, of a disk, later, in its future, which of a read names
    every second page as damaged."""

    def __init__(self, monkeypatch, number=None, how="before"):
        self.calls, self.number, self.how = [], number, how
        for owner, name in CALLS:
            monkeypatch.setattr(owner, name, self._faulty(name, getattr(owner, name)))

    def _faulty(self, name, work):
        def call(this, *args):
            self.calls.append(name if name != "copy" else args[0])
            if len(self.calls) - 1 != self.number:
                return work(this, *args)
            if self.how == "half" and name == "copy":
                direction, pages, buffer, rows, *tensor = args
                n = len(pages) // 2
                work(this, direction, pages[:n], buffer, rows[:n], *tensor)
            elif self.how == "half":
                pages, buffers = args
                n = len(pages) // 2
                work(this, pages[:n], buffers[:n]).result() if n else None
            if self.how == "later" and name != "copy":
                failed, error = Future(), OSError(name)
                if name == "read":
                    pages, buffers = args
                    error.pages, good = pages[::2], slice(1, None, 2)
                    work(this, pages[good], buffers[good]).result()
                failed.set_exception(error)
                return failed
            raise torch.OutOfMemoryError(name)

        return call


def life(model, folder, is_async):
    """Four users take turns in a pool that is too small for three of them, over host memory that is too small for all; then everybody
    comes back to a new engine. Each output is checked."""
    settings = {
        "max_num_seqs": 2, "max_num_batched_tokens": 64, "num_pages": 20, "host_cache_gib": 22 * GIB_OF_A_PAGE,
        "disk_cache": folder, "disk_cache_gib": 200 * GIB_OF_A_PAGE, "async_scheduling": is_async,
    }  # fmt: skip
    for _ in range(2):
        engine = Engine(model, EngineConfig(**settings))
        # Everything is worth a load, whatever the clock says of this machine.
        for tier in engine.tiers.tiers.tiers:
            tier.rate.measured = lambda *_: None
        engine.tiers.tiers.computed = lambda *_: None
        engine.tiers.tiers._planner.prefill.value = 1e-5
        for turn in range(2):
            for tokens in PROMPTS:
                tokens = [*tokens, *[turn] * turn]
                request_id = engine.add_request(tokens, PARAMS)
                output = finish(engine)[request_id]
                assert output.token_ids == alone(model, tokens, PARAMS)
                engine.pool.poison(engine.kv.pool.free_pages())
        engine.tiers.settle()
        recount(engine)
        engine.close()
    return engine


@pytest.mark.parametrize("budget", [24])
@pytest.mark.parametrize("how", FAILURES)
def test_each_call_fails_in_turn(how, budget, tmp_path, monkeypatch):
    """Some of them in an ordinary run. Outputs are those without tiers, and all pages are accounted for."""
    model = tiered(ToyModel())
    with monkeypatch.context() as patch:
        seen = FaultAt(patch)
        life(model, tmp_path / "whole", is_async=False)
    assert {*seen.calls} == {"to_host", "to_device", "read", "write"} and len(seen.calls) > 40
    numbers, reached = range(7 * FAILURES.index(how), len(seen.calls), budget), []
    for number in numbers:
        with monkeypatch.context() as patch:
            fault = FaultAt(patch, number, how)
            life(model, tmp_path / str(number), is_async=bool(number % 2))
        reached += fault.calls[number : number + 1]  # how many there are is a matter of threads
    assert len(reached) > len(numbers) / 2


@pytest.mark.parametrize("name", ["gemma3-tiny", "llama-tiny", "deepseek-v4-tiny"])
def test_a_disk_and_a_snapshot_survive_a_restart(name, tmp_path):
    """One prompt is on the disk alone, one in the pool alone, when the pages that a snapshot names are saved with it."""
    model = random_model(few(name), device=DEVICE)
    kept = {"num_pages": 200, "disk_cache": tmp_path / "cache", "disk_cache_gib": 0.01}
    first, second = prompt(130), prompt(130, seed=5)
    run = Recorder(model, **kept)
    run.add(first, max_tokens=2)
    run.run()
    leave(run.engine, "device")
    run.add(second, max_tokens=2)
    run.run()
    run.engine.tiers.settle()
    kv = run.engine.kv
    data, ids = snapshot.dumps(kv), torch.from_numpy(snapshot.page_ids(kv).astype("int64"))
    pages = [tensor[ids].clone() for tensor in run.engine.pool.tensors]
    stored = run.engine.kv.stats()["tier_segments/disk"]
    run.engine.tiers._disk.close()  # as a process that is killed
    again = Recorder(model, **kept)
    snapshot.loads(again.engine.kv, data)
    for tensor, rows in zip(again.engine.pool.tensors, pages, strict=True):
        tensor[ids] = rows
    assert again.engine.kv.stats()["tier_segments/disk"] == stored > 0
    least = 128 // kv.alignment * kv.alignment
    for tokens, places in ((second, []), (first, ["disk"])):
        request = again.add([*tokens, 7], max_tokens=3)
        again.run()
        output = again.check(request)
        assert output.num_cached_tokens >= least
        assert [share.place for share in output.loads] == places
    end(again.engine)
