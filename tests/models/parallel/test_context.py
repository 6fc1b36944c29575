"""A context that ranks share, beside a run of the whole model without a cache. The ranks are threads here: pages that nobody owns are NaN on each of them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quire.models.config.named import get_config
from quire.models.deepseek_v4.cache_plan import CacheFormat, plan_cache
from quire.models.engine.memory import model_cache
from quire.models.engine.room import longest_request, pages_of_request
from quire.models.layers.kv_cache import cache_groups
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import build_model
from quire.models.parallel.context import SplitContext
from quire.models.parallel.shard import shard_config
from tests.models.deepseek_v4.test_engine import Knowing, V4Recorder
from tests.models.engine.test_engine import Recorder, prompt
from tests.models.engine.test_replays import LENGTH, without_points
from tests.support.budgets import ordinary
from tests.support.models.few import few
from tests.support.models.ranks import on_ranks
from tests.support.models.tolerance import tolerance

V4 = "deepseek-v4-tiny"
FAMILIES = ["llama-tiny", "gemma3-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "gpt-oss-tiny", V4]


class Rank:
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [2, 3])
def test_each_row_is_one_rank_s(size):
    contexts = [SplitContext(Rank(rank, size)) for rank in range(size)]
    pages, rows = 3, 4
    slots = torch.tensor([-1, *range(pages * rows * size)])
    held = torch.stack([context.slots(slots, rows) for context in contexts])
    assert (held[:, 0] == -1).all()
    assert ((held[:, 1:] >= 0).sum(0) == 1).all()
    for rank, mine in enumerate(held):
        assert mine[mine >= 0].tolist() == list(range(pages * rows))
        for slot, own in zip(slots.tolist(), mine.tolist(), strict=True):
            if own >= 0:
                block, row = divmod(slot, rows * size)
                assert (row % size, own) == (rank, block * rows + row // size)
    for n in range(-2, 30):
        seen = [int(context.count(torch.tensor(n))) for context in contexts]
        assert seen == [len(range(rank, n, size)) for rank in range(size)]
    for ratio, position in ((1, 17), (4, 30), (4, 31), (4, 32), (8, 3)):
        entries = (position + 1) // ratio
        for rank, context in enumerate(contexts):
            shifted = (position + context.shift(ratio) + 1) // (ratio * size)
            assert shifted == len(range(rank, entries, size))


@pytest.mark.parametrize("values", ["random", "equal", "nan"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_best_entries_of_all_ranks_are_exact(size, values):
    topk, num_entries = 8, [0, 3, 8, 9, 40, 41]
    generator = torch.Generator().manual_seed(size)
    scores = torch.randint(-2, 3, (len(num_entries), 41), generator=generator).float()
    if values == "equal":
        scores.zero_()
    if values == "nan":
        scores[5, [3, 30]] = torch.nan
    ranked = torch.where(scores.isnan(), torch.inf, scores).tolist()
    expected = [
        sorted(sorted(range(n), key=lambda w: (-row[w], w))[:topk])
        for n, row in zip(num_entries, ranked, strict=True)
    ]

    def work(group):
        own = torch.full((len(num_entries), topk), -1, dtype=torch.int32)
        told = torch.full((len(num_entries), topk), -torch.inf)
        for t, n in enumerate(num_entries):
            mine = range(group.rank, n, group.size)
            best = sorted(sorted(mine, key=lambda w: (-ranked[t][w], w))[:topk])
            own[t, : len(best)] = torch.tensor(best, dtype=torch.int32) // group.size
            told[t, : len(best)] = scores[t, best]
        entries, lens = SplitContext(group).topk(own, told, topk)
        return [
            [w * group.size + group.rank for w in row[:n]]
            for row, n in zip(entries.tolist(), lens.tolist(), strict=True)
        ]

    found = on_ranks(size, work, split_context=True)
    assert [sorted(w for row in rows for w in row) for rows in zip(*found, strict=True)] == expected


def run_split(size, config, work):
    """What ``work(model)`` gives on rank 0: a recorder and ids of requests, each checked against the whole model without a cache."""
    whole = random_model(config)
    ranks = on_ranks(
        size, lambda group: work(random_model(config, group=group)), split_context=True
    )
    run, ids = ranks[0]
    assert run.engine.model.config != config
    for request_id in ids:
        output = run.outputs[request_id]
        sequence = torch.tensor(output.prompt_token_ids + output.token_ids)
        expected = whole.full_forward(sequence[:-1])[len(output.prompt_token_ids) - 1 :]
        got = torch.stack(run.logits[request_id])[: len(expected)]
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < tolerance(whole)
        for other, _ in ranks[1:]:
            assert other.outputs[request_id].token_ids == output.token_ids
    return run, [run.outputs[i] for i in ids]


def recorder(model, **settings):
    kind = V4Recorder if model.config.name == V4 else Recorder
    return kind(model, **sizes(model), **settings)


def sizes(model):
    size = 1 if model.group is None else model.group.size
    return {"tensor_parallel_size": size, "context_parallel_size": size}


def requests(model):
    """Chunks, decodes beside them, a hit, and a pool too small for all of them."""
    run = recorder(model, num_pages=60)
    first = run.add(prompt(70, 1), max_tokens=9)
    run.run()
    more = [run.add(prompt(70, 1) + prompt(20, 3), 5), run.add(prompt(31, 2), 12)]
    run.run()
    return run, [first, *more]


@ordinary("deepseek-v4-tiny", "gemma4-e-tiny", "gpt-oss-tiny")
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_whole_model(name):
    run, outputs = run_split(2, few(name), requests)
    assert [output.num_cached_tokens for output in outputs] == [0, 64, 0]
    assert any(r.num_decodes and r.num_prefills for r in run.reports)


def test_more_ranks_than_kv_heads():
    run_split(4, get_config("gemma4-tiny"), requests)


@ordinary("gemma3-tiny")
@pytest.mark.parametrize("name", FAMILIES)
def test_preemption(name):
    """Of several long requests in a pool that is too small, some start over from what is cached."""
    config, size = few(name), 2
    group = SimpleNamespace(rank=0, size=size, split_context=True)
    part = build_model(config, device="meta", dtype=torch.float32, group=group)
    groups = model_cache(part, max_requests=4).groups
    # All prompts have room, what is generated has not.
    prompts, longest = [20, 21, 22], 40
    num_pages = 1 + sum(pages_of_request(groups, n) for n in prompts)
    assert num_pages <= 3 * pages_of_request(groups, longest)

    def work(model):
        run = recorder(model, num_pages=num_pages)
        ids = [run.add(prompt(n, n), max_tokens=longest - n) for n in prompts]
        run.run()
        return run, ids

    run, _ = run_split(size, config, work)
    assert run.engine.totals.num_preempted > 0


@ordinary()
def test_drafts_of_deepseek_v4():
    config = replace(few(V4), num_mtp_layers=get_config(V4).num_mtp_layers)
    plain = requests(random_model(config))[0].outputs

    def work(model):
        drafter = Knowing(model, 3)
        drafter.outputs = {i: output.token_ids for i, output in plain.items()}
        run = recorder(model, drafter=drafter)
        ids = [run.add(output.prompt_token_ids, len(output.token_ids)) for output in plain.values()]
        run.run()
        return run, ids

    run, outputs = run_split(2, config, work)
    assert 0 < run.engine.totals.num_accepted < run.engine.totals.num_drafts
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain.values()]


def test_rows_that_are_computed_once_more():
    """Full attention takes them from the pages of all ranks."""

    def work(model):
        run = without_points(model, **sizes(model))
        again = run.add(prompt(LENGTH))
        run.run()
        return run, [again]

    run, _ = run_split(2, get_config("gemma3-tiny"), work)
    assert run.engine.kv.stats()["replays"] == 1


def test_quantized_pages():
    """The same as one rank that has them all: rows are quantized alike, wherever they are."""
    config = few("gemma3-tiny")

    def work(model):
        run = recorder(model, kv_cache_dtype="fp8", enable_caching=False)
        ids = [run.add(prompt(70, 1), max_tokens=9), run.add(prompt(31, 2), max_tokens=12)]
        run.run()
        return run, ids

    whole = random_model(config)
    alone, ids = work(whole)
    ranks = on_ranks(2, lambda group: work(random_model(config, group=group)), split_context=True)
    for run, _ in ranks:
        for i in ids:
            got, expected = torch.stack(run.logits[i]), torch.stack(alone.logits[i])
            assert (got - expected).abs().max() < tolerance(whole)


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gemma-4-31b", "gpt-oss-120b", "deepseek-v4-flash"]
)
@pytest.mark.parametrize("size", [2, 8])
def test_a_context_takes_its_share_of_the_dense_bytes(name, size):
    config = get_config(name)

    def token_bytes(config, context_size):
        if name.startswith("deepseek"):
            groups = plan_cache(
                config, CacheFormat(torch.bfloat16), context_size=context_size
            ).groups
        else:
            groups, _ = cache_groups(config, torch.bfloat16, context_size=context_size)
        [dense] = [group for group in groups if group.kind == "dense"][:1]
        return dense.page_bytes / dense.block_size

    sharded = shard_config(config, size, split_context=True)
    assert token_bytes(sharded, size) * size <= token_bytes(config, 1) / 0.9


POOL_BYTES = 8 * 2**30


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "gemma-3-27b", "gemma-4-31b", "gpt-oss-120b", "deepseek-v4-flash"]
)
@pytest.mark.parametrize("size", [2, 8])
def test_a_pool_holds_so_many_times_the_context(name, size):
    """The longest request for which the allocator has pages, windows and all, in pools of the same bytes."""
    config = get_config(name)

    def longest(group):
        model = build_model(config, device="meta", dtype=torch.bfloat16, group=group)
        cache = model_cache(model, max_requests=1)
        return longest_request(cache.groups, POOL_BYTES // cache.page_bytes, 2**40, 0)

    group = SimpleNamespace(rank=0, size=size, split_context=True)
    assert longest(group) >= 0.9 * size * longest(None)
