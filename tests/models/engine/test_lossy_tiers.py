"""A host tier whose pages are in e4m3 (`EngineConfig.tier_dtype`): how far pages are off, once and again, and which outputs say so."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from quire.models.config.named import get_config
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.loading.random_weights import random_model
from tests.models.engine.test_engine import DEVICE, Recorder, prompt
from tests.models.engine.test_tiering import TieredPool, cached, end, leave, tiered
from tests.support.models.few import few
from tests.support.models.toy import ToyModel

FAMILIES = ("gemma3-tiny", "gemma4-tiny", "gpt-oss-tiny", "llama-tiny")
DTYPES = (torch.float32, torch.bfloat16)
TOKENS = prompt(130)


def recorder(name, dtype=torch.float32, **settings):
    model = random_model(few(name), device=DEVICE, dtype=dtype)
    settings = {"num_pages": 200, "host_cache_gib": 0.01, "tier_dtype": "fp8"} | settings
    return Recorder(model, **settings)


def rows_of(pages, form):
    """Of each page tensor, [rows, row_dim] in float64 of all pages, up to the last whole row."""
    found = []
    for tensor in pages:
        whole = tensor.shape[1] // form.row_bytes * form.row_bytes
        rows = tensor[:, :whole].contiguous().view(form.dtype)
        found.append(rows.reshape(-1, form.row_dim).double())
    return found


def bound(exact, dtype):
    """Of ``common.e4m3`` for rows with scales of their own, and half a step of the dtype."""
    scale = (exact.abs().amax(1, keepdim=True) / 448).clamp(min=2.0**-126)
    near = torch.maximum(exact.abs() * 2**-4, scale * 2**-10) + exact.abs() * 2**-22
    info = torch.finfo(dtype)
    return near + (exact.abs() + near) * info.eps / 2 + info.tiny * info.eps / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_pages_come_back_within_the_bound(name, dtype):
    """Around host memory, and again with what was rounded once: no further off. Hits say that they are lossy."""
    run = recorder(name, dtype)
    run.add(TOKENS, max_tokens=2)
    run.run()
    form = run.engine.pool.e4m3_rows
    depth, points, before, ids = cached(run.engine, TOKENS)
    before = rows_of(before, form)
    found = []
    for i in range(3):
        host = run.engine.tiers.tiers.host.index
        host.evict(host.num_evictable)  # so what was rounded is stored again
        leave(run.engine)
        run.add(prompt(60, seed=9), max_tokens=1)  # others get the pages that these had
        run.run()
        again = run.add([*TOKENS, *prompt(20, seed=i)], max_tokens=2)
        output = run.run()[again]
        assert output.num_cached_tokens == output.lossy_tokens == 128
        assert all(share.lossy for share in output.loads) and output.loads
        assert "(128 rest on rows that were kept in a lossy form)" in output.explain()
        *there, after, loaded = cached(run.engine, TOKENS)
        assert there == [depth, points] and not np.array_equal(loaded, ids)
        found.append(rows_of(after, form))
    for exact, first, second, third in zip(before, *found, strict=True):
        assert not first.equal(exact), "they were kept as they are"
        assert ((first - exact).abs() <= bound(exact, dtype)).all()
        if dtype == torch.float32:  # a scale may move by an ulp, once
            assert ((second - first).abs() <= first.abs() * 2**-22).all() and third.equal(second)
        else:
            assert second.equal(first) and third.equal(first)
    assert run.engine.kv.stats()["lossy_tokens"] >= 3 * 128
    end(run.engine)


def test_who_comes_first_is_exact():
    """Logits of requests without a hit, or with one on what never left, are those without tiers, bit for bit."""
    plain = recorder("gemma3-tiny", host_cache_gib=None, tier_dtype="auto")
    lossy = recorder("gemma3-tiny")
    for tokens in (TOKENS, [*TOKENS, 5, 6]):
        logits = []
        for run in (plain, lossy):
            request = run.add(tokens, max_tokens=3)
            output = run.run()[request]
            assert output.lossy_tokens == 0 and "lossy" not in output.explain()
            logits.append(torch.stack(run.logits[request]))
        assert logits[0].equal(logits[1])
    assert lossy.engine.kv.stats()["lossy_tokens"] == 0


def test_a_request_that_was_preempted_tells_of_its_longest_lossy_hit(monkeypatch):
    """It is admitted again behind what was loaded meanwhile."""
    run = recorder("llama-tiny")
    run.add(TOKENS, max_tokens=2)
    run.run()
    leave(run.engine)
    monkeypatch.setattr(run.engine.tiers, "_load", lambda *args: None)
    request = run.add(TOKENS, max_tokens=6)
    run.engine.step()
    monkeypatch.undo()
    scheduler = run.engine.scheduler
    [running] = scheduler.running
    assert running.lossy_tokens == 0
    scheduler.take_back({running})
    run.engine.kv.evict(run.engine.kv.num_evictable_pages)
    output = run.run()[request]
    assert output.num_cached_tokens == 0 and output.lossy_tokens == 128


def test_bytes():
    """A half and a quarter, and what scales take."""
    for dtype, share in ((torch.float32, 4), (torch.bfloat16, 2)):
        spaces = []
        for kept in ("auto", "fp8"):
            run = recorder("llama-tiny", dtype, tier_dtype=kept)
            run.add(TOKENS, max_tokens=2)
            run.run()
            leave(run.engine)
            spaces.append(run.engine.tiers.space())
            moved = run.engine.tiers.copier.num_bytes["to_host"]
            assert moved == spaces[-1][0] == spaces[-1][1]
        (whole, _), (held, _) = spaces
        dim = run.engine.pool.e4m3_rows.row_dim
        assert held * share * dim == whole * (dim + 4)


def test_which_rows():
    """A head's, or equal shares of heads of other sizes; none of e4m3 pages."""
    for name, dims in (("gemma3-tiny", 32), ("gemma4-tiny", 16)):
        config = get_config(name)
        heads = {config.attention(layer).head_dim for layer in range(config.num_layers)}
        engine = Engine(random_model(config, device=DEVICE), EngineConfig(num_pages=50))
        assert engine.pool.e4m3_rows.row_dim == dims and min(heads) == dims


REFUSED = [
    ("deepseek-v4-tiny", {}, "got DeepseekV4 with kv_cache_dtype='auto'"),
    ("gemma3-tiny", {"kv_cache_dtype": "fp8"}, "got Gemma with kv_cache_dtype='fp8'"),
    ("llama-tiny", {"kv_cache_dtype": "fp8_per_tensor"}, "with kv_cache_dtype='fp8_per_tensor'"),
]


@pytest.mark.parametrize("name, settings, message", REFUSED, ids=[row[2][4:] for row in REFUSED])
def test_rows_that_are_refused(name, settings, message):
    with pytest.raises(NotImplementedError, match=f"^tier_dtype: 'fp8' is supported with .*{message}"):  # fmt: skip
        recorder(name, **settings)


def test_head_sizes_that_are_refused():
    config = few("llama-tiny")
    config = replace(config, full=replace(config.full, head_dim=24))
    engine = Engine(random_model(config, device=DEVICE), EngineConfig(num_pages=50))
    assert engine.pool.e4m3_rows is None


def test_pools_that_are_refused():
    assert not hasattr(TieredPool, "e4m3_rows")
    config = EngineConfig(num_pages=40, host_cache_gib=2**-12, tier_dtype="fp8")
    with pytest.raises(NotImplementedError, match=r"^tier_dtype: 'fp8' is supported with"):
        Engine(tiered(ToyModel()), config)


def test_settings_that_are_refused():
    with pytest.raises(ValueError, match=r"^tier_dtype: expected 'auto' or 'fp8', got 'e4m3'"):
        EngineConfig(host_cache_gib=1, tier_dtype="e4m3")
    with pytest.raises(ValueError, match=r"^tier_dtype: expected 'auto' without host_cache_gib"):
        EngineConfig(tier_dtype="fp8")
