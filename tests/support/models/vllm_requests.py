"""vLLM's Scheduler with `quire.models.integrations.vllm_scheduler`, beside its own.

Random requests go through a simulated device. With asynchronous scheduling a step runs after the
next one was scheduled. Answers are known from token lists (`vllm_device.Text`).

Runs where vLLM is: python vllm_requests.py CHECKOUT; an error if anything is not as it should be.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import from_checkout  # noqa: F401
import torch
import vllm.config as options
import vllm.v1.kv_cache_interface as kinds
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_device import DRAFTS, LONGEST, VOCAB, Text, Worker

from quire.models.integrations.vllm_scheduler import CacheManager, QuireScheduler

DENSE, HYBRID = [(16, None)], [(16, None), (16, 64), (16, 64), (16, 100)]
PLAIN = {
    "groups": HYBRID, "is_async": False, "drafts": False, "policy": "fcfs", "retention": 0,
    "caching": True,
}  # fmt: skip
REQUESTS, SIZES = 110, (130, 400)  # pages of the pool
CASES = {
    "dense": {"groups": DENSE},
    "hybrid": {},
    "hybrid, every boundary": {"retention": None},
    "hybrid, intervals": {"retention": 192},
    "hybrid, async": {"is_async": True},
    "hybrid, drafts": {"drafts": True},
    "hybrid, async, drafts": {"is_async": True, "drafts": True},
    "hybrid, priorities": {"policy": "priority"},
    "block sizes 16 and 32": {"groups": [(32, None), (16, 40)]},
    "no caching, async, drafts": {"is_async": True, "drafts": True, "caching": False},
    "dense, async, drafts": {"groups": DENSE, "is_async": True, "drafts": True},
}
SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}


def chats(num_requests, groups):
    """Requests as (id, prompt, max_tokens, the one before, priority, tokens at abort, arrival)."""
    rng = random.Random(1)
    systems = [[rng.randrange(VOCAB) for _ in range(n)] for n in (40, 70, 130)]
    made, step = [], 0
    while len(made) < num_requests:
        step += rng.choice((0, 0, 0, 1, 3, 8))
        burst = rng.choice((1, 1, 1, 4))
        start = rng.choice([*systems, []])
        user = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 120))]
        for _ in range(burst):
            same = rng.random() < 0.4
            own = user if same else [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 90))]
            prompt, before = start + own, None
            for _ in range(rng.choice((1, 1, 2, 3))):
                most = rng.randrange(1, 60)
                if len(prompt) + most + 1 >= LONGEST - 8 or len(made) == num_requests:
                    break
                stop = rng.randrange(most) if rng.random() < 0.06 else None
                made.append((f"r{len(made)}", prompt, most, before, rng.randrange(3), stop, step))
                before = made[-1][0]
                answered = prompt + answer(prompt, most, groups)
                prompt = answered + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
    return made


def answer(prompt, most, groups):
    """The answer of `most` tokens."""
    text = Text(prompt)
    for _ in range(most):
        text.extend([text.next(len(text.tokens) - 1, groups)])
    return text.tokens[len(prompt) :]


def configuration(where, num_pages, case=PLAIN):
    is_async = case["is_async"]
    model = options.ModelConfig(
        model=str(where), skip_tokenizer_init=True, max_model_len=LONGEST, dtype="float16"
    )
    scheduler = options.SchedulerConfig(
        max_num_seqs=24, max_num_batched_tokens=192, max_model_len=LONGEST, policy=case["policy"],
        enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=is_async,
    )  # fmt: skip
    cache = options.CacheConfig(
        block_size=16, enable_prefix_caching=True, prefix_cache_retention_interval=case["retention"]
    )
    spec = None
    if case["drafts"]:
        # Which method proposes them is not the scheduler's business.
        lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        spec = options.SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS, **lookup)
    config = options.VllmConfig(
        model_config=model, scheduler_config=scheduler, cache_config=cache,
        device_config=options.DeviceConfig(device="cpu"), speculative_config=spec,
    )  # fmt: skip
    config.scheduler_config.async_scheduling = is_async
    config.scheduler_config.max_num_scheduled_tokens = None
    config.cache_config.num_gpu_blocks = num_pages
    config.cache_config.enable_prefix_caching = case["caching"]
    return config


def specs_of(groups):
    """The cache groups of (block size, window or None)."""
    return [
        kinds.FullAttentionSpec(**SHAPE | {"block_size": size})
        if window is None
        else kinds.SlidingWindowSpec(sliding_window=window, **SHAPE | {"block_size": size})
        for size, window in groups
    ]


def scheduler_of(cls, config, specs):
    groups = [kinds.KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
    cache = config.cache_config
    interval = cache.prefix_cache_retention_interval
    kv_config = kinds.KVCacheConfig(
        cache.num_gpu_blocks, [], groups, prefix_cache_retention_interval=interval
    )
    sizes = [spec.block_size for spec in specs] or [16]
    more = {"hash_block_size": min(sizes), "log_stats": True}
    return cls(config, kv_config, StructuredOutputManager(config), max(sizes), **more)


def request_of(name, tokens, most=20, size=16, **more):
    params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0)
    hasher = get_request_block_hasher(size, sha256)
    return Request(name, [*tokens], params, None, block_hasher=hasher, **more)


def serve(scheduler, worker, requests, is_async, check):
    """All requests through a scheduler; returns answers and counts."""
    ready, later = {}, {}
    for made in requests:
        (later.setdefault(made[3], []) if made[3] else ready.setdefault(made[6], [])).append(made)
    answers, aborts, flying, counts, step = {}, {}, [], Counter(), 0

    def arrive(rid, prompt, most, _, priority, stop, *__):
        answers[rid] = []
        if stop is not None:
            aborts[rid] = stop
        more = {"priority": priority, "arrival_time": float(rid[1:])}
        scheduler.add_request(request_of(rid, prompt, most, scheduler.hash_block_size, **more))

    def over(rid):
        ready.setdefault(step + 1, []).extend(later.pop(rid, []))

    def finish():
        so, work = flying.pop(0)
        out, drafts = worker.run(work, is_async)
        for outputs in scheduler.update_from_output(so, out).values():
            for o in outputs.outputs:
                answers[o.request_id] += o.new_token_ids
                if o.finish_reason is not None:
                    over(o.request_id)
        if worker.num_drafts and not is_async:
            scheduler.update_draft_token_ids(drafts)

    while any(ready.values()) or later or flying or scheduler.has_unfinished_requests():
        for made in ready.pop(step, []):
            arrive(*made)
        for rid, n in list(aborts.items()):
            if rid not in scheduler.requests:
                del aborts[rid]
            elif len(answers[rid]) >= n:
                scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)
                counts["aborted"] += 1
                del aborts[rid]
                over(rid)
        so = scheduler.schedule()
        step += 1
        counts["preempted"] += len(so.preempted_req_ids or ())
        num_tokens = so.total_num_scheduled_tokens
        drafted = sum(map(len, so.scheduled_spec_decode_tokens.values()))
        counts["computed"] += num_tokens - drafted
        if num_tokens or so.finished_req_ids or so.preempted_req_ids:
            flying.append((so, worker.take(so)))
        if flying and (len(flying) > (1 if is_async else 0) or not num_tokens):
            finish()
        if step % 16 == 0:
            check()
        assert step < 200_000, "the scheduler stands still"
    check()
    return answers, counts


def run(where, name, num_pages):
    """{who: counts} of both schedulers on the requests of a case."""
    case = PLAIN | CASES[name]
    groups, is_async = case["groups"], case["is_async"]
    requests, both = chats(REQUESTS, groups), {}
    theirs = AsyncScheduler if is_async else Scheduler
    for who, cls in (("vllm", theirs), ("quire", QuireScheduler)):
        scheduler = scheduler_of(cls, configuration(where, num_pages, case), specs_of(groups))
        assert isinstance(scheduler, AsyncScheduler) == is_async
        worker = Worker(groups, num_pages, case["drafts"], 5)
        cache = scheduler.kv_cache_manager.cache if who == "quire" else None
        check = cache.check_invariants if cache else lambda: None
        answers, counts = serve(scheduler, worker, requests, is_async, check)
        both[who] = counts
        if who == "vllm":
            continue
        for rid, prompt, most, _, _, stop, _ in requests:
            truth, got = answer(prompt, most, groups), answers[rid]
            assert got == (truth if stop is None else truth[: len(got)]), rid
        assert worker.wrong == 0 and worker.checked > 100_000 and counts["aborted"] > 0
        assert not case["drafts"] or min(worker.accepted, worker.rejected) > 500
        # Pages are free or cached at the end, and free once that is forgotten.
        assert cache.stats()["pages_in_use"] == len(cache.sequences.ids) == 0
        assert scheduler.get_kv_cache_usage() == 0 and scheduler.reset_prefix_cache()
        assert cache.num_free_pages == num_pages - 1
    return both


def check_answers(where):
    """Answers and rows are right; no more tokens are computed than with vLLM's manager."""
    total = Counter()
    for name in CASES:
        for num_pages in SIZES:
            print(name, num_pages, file=sys.stderr)
            both = run(where, name, num_pages)
            ours, theirs = both["quire"]["computed"], both["vllm"]["computed"]
            assert ours < 1.04 * theirs  # a preemption more or less is a few percent
            total += {"quire": ours, "vllm": theirs}
            preempted = both["quire"]["preempted"] + both["vllm"]["preempted"]
            assert preempted or num_pages > min(SIZES)
    assert total["quire"] < 0.98 * total["vllm"]


def check_refusals(where):
    full, window = specs_of([(16, None), (16, 32)])
    mamba = kinds.MambaSpec(block_size=16, shapes=((2,),), dtypes=(torch.float16,))
    chunked = kinds.ChunkedLocalAttentionSpec(attention_chunk_size=32, **SHAPE)
    events = options.KVEventsConfig(enable_kv_cache_events=True)
    scheduler_of(
        QuireScheduler, configuration(where, 100), [full, window, kinds.MLAAttentionSpec(**SHAPE)]
    )
    for specs, changes, words in (
        ([chunked], {}, "cache group 0: ChunkedLocalAttentionSpec"),
        ([kinds.CrossAttentionSpec(**SHAPE)], {}, "cache group 0: CrossAttentionSpec"),
        ([full, mamba], {}, "cache group 1: MambaSpec"),
        ([], {}, "models without cache groups"),
        ([full], {"kv_transfer_config": object()}, "KV connectors (kv_transfer_config)"),
        ([full], {"kv_events_config": events}, "KV events (enable_kv_cache_events)"),
        ([full], {"decode_context_parallel_size": 2}, "decode context parallelism"),
        ([full], {"pipeline_parallel_size": 2}, "pipeline parallelism"),
    ):
        config = configuration(where, 100)
        for field, value in changes.items():
            owner = config.parallel_config if field.endswith("parallel_size") else config
            setattr(owner, field, value)
        try:
            scheduler_of(QuireScheduler, config, specs)
        except NotImplementedError as error:
            served = "decoders with full and sliding-window attention"
            assert str(error) == f"QuireScheduler: supported are {served}, got {words}"
        else:
            raise AssertionError(words)


def check_preempted(where):
    """Tokens of a request that is preempted in its step are not found; computed, they are."""
    case = PLAIN | {"is_async": True}
    scheduler = scheduler_of(QuireScheduler, configuration(where, 300, case), specs_of(HYBRID))
    manager = scheduler.kv_cache_manager
    first, second = (request_of(name, [9] * 300) for name in "cd")
    for chunk, found in ((200, 96), (100, 192)):
        manager.new_step_starts()
        first.status, first.num_computed_tokens = RequestStatus.WAITING, 0
        manager.allocate_slots(first, 96)
        first.status, first.num_computed_tokens = RequestStatus.RUNNING, 96
        manager.new_step_starts()
        manager.allocate_slots(first, chunk)
        if chunk == 200:
            manager.free(first)
        else:
            manager.get_computed_blocks(second)
        assert manager._match(second, 299).dense_tokens == found


def compute(manager, request, between=lambda: None):
    """(hit, whether it got pages) of a request, then cached; `between` follows its look-up."""
    found, hit, _ = manager.get_computed_blocks(request)
    between()
    given = manager.allocate_slots(request, request.num_tokens - hit, hit, found)
    manager.take_boundary_state_offloads()
    manager.free(request)
    return hit, given is not None


def check_late(where):
    """A request whose look-up is out of date at its admission waits for another look-up."""
    for change, first, second in (
        ("nothing", (96, True), (96, True)),
        ("forgotten", (96, False), (0, True)),
        ("published", (0, False), (96, True)),
    ):
        scheduler = scheduler_of(QuireScheduler, configuration(where, 100), specs_of(DENSE))
        manager = scheduler.kv_cache_manager
        before, other, request = (request_of(name, [5] * 100) for name in "abc")
        if change != "published":
            compute(manager, before)
        between = {
            "nothing": lambda: None,
            "forgotten": manager.reset_prefix_cache,
            "published": lambda manager=manager, other=other: compute(manager, other),
        }[change]
        assert compute(manager, request, between) == first, change
        assert compute(manager, request) == second, change
        manager.cache.check_invariants()


def check_drafter(where):
    """A hit leaves a drafter the block whose last row depends on the next token."""
    for drops, hits in ((False, [0, 96, 80]), (True, [0, 80, 64])):
        scheduler = scheduler_of(QuireScheduler, configuration(where, 100), specs_of(DENSE))
        scheduler.kv_cache_manager.use_eagle = drops
        manager = CacheManager(scheduler)
        prompts = (request_of(f"e{end}", [5] * end) for end in (100, 97, 81))
        assert [compute(manager, prompt)[0] for prompt in prompts] == hits


def main():
    init_none_hash(sha256)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB + 2,
        "max_position_embeddings": LONGEST,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as where:
        Path(where, "config.json").write_text(json.dumps(config))
        checks = check_refusals, check_preempted, check_late, check_drafter, check_answers
        for check in checks:
            check(where)


if __name__ == "__main__":
    main()
