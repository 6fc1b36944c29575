"""The end of an engine with tiers: what the disk has then, and whose its folder is."""

import gc
import threading

import pytest

from quire.kvcore.tier import disk as disk_module
from quire.models.engine import parts
from tests.models.engine.test_tier_loads import disk_engine
from tests.models.engine.test_tiering import GIB_OF_A_PAGE, LONG, PARAMS, end, finish


def fill(engine, num_prompts):
    """Has so many prompts of 100 tokens in the pool, without one before the last step."""
    prompts = [[3 + user, *LONG[1:]] for user in range(num_prompts)]
    for tokens in prompts:
        engine.add_request(tokens, PARAMS)
    finish(engine)
    return prompts


def found(engine, prompts):
    """Tokens of prompts that there are somewhere."""
    return [engine.tiers.tiers.match([*tokens, 1]).num_tokens for tokens in prompts]


@pytest.mark.parametrize("host_pages", [None, 12, 40, 200])
def test_close_has_the_disk_hold_all_that_was_cached(host_pages, tmp_path):
    """Also where host memory is smaller than the pool, through which all of it passes."""
    settings = {"num_pages": 120, "host_cache_gib": host_pages and host_pages * GIB_OF_A_PAGE}
    engine = disk_engine(tmp_path, **settings)
    prompts = fill(engine, 9)
    assert found(engine, prompts) == [96] * 9
    engine.close()
    engine = disk_engine(tmp_path, **settings)
    assert found(engine, prompts) == [96] * 9
    end(engine)


def test_a_write_that_fails_once_is_made_again_at_the_end(tmp_path, monkeypatch):
    engine = disk_engine(tmp_path, num_pages=120)
    prompts, write, calls = fill(engine, 3), disk_module.DiskStore.write, []

    def flaky(this, *args):
        calls.append(args)
        if len(calls) <= 3:
            raise OSError("write")
        return write(this, *args)

    monkeypatch.setattr(disk_module.DiskStore, "write", flaky)
    engine.close()
    engine = disk_engine(tmp_path, num_pages=120)
    assert found(engine, prompts) == [96] * 3
    end(engine)


def test_close_frees_the_folder_whatever_fails(tmp_path, monkeypatch):
    """And then nothing goes on as if nothing had been."""
    num_threads = threading.active_count()
    engine = disk_engine(tmp_path)
    fill(engine, 1)
    engine.add_request(LONG, PARAMS)
    monkeypatch.setattr(engine.tiers.tiers, "stores", None)
    with pytest.raises(TypeError):
        engine.close()
    assert threading.active_count() == num_threads
    disk_engine(tmp_path).close()
    engine.close()
    for call in (engine.step, lambda: engine.hint(LONG, "prefetch")):
        with pytest.raises(RuntimeError, match=r"^expected an engine that is open"):
            call()


def test_an_engine_that_is_not_made_leaves_the_folder_free(tmp_path, monkeypatch):
    """While its error is still there; and so does one that nobody has any more."""
    num_threads = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(parts, "Sampler", None)  # which is made after the store is open
        with pytest.raises(TypeError) as error:
            disk_engine(tmp_path)
        assert threading.active_count() == num_threads
    engine = disk_engine(tmp_path)
    fill(engine, 1)
    assert error.value and threading.active_count() > num_threads
    del engine
    gc.collect()
    assert threading.active_count() == num_threads
    disk_engine(tmp_path).close()
