"""vLLM's Scheduler with `quire.models.integrations.vllm_scheduler`, beside its own: random requests through a simulated device.

With asynchronous scheduling a step runs after the next one was scheduled. Answers are known from token lists (`vllm_device.Text`).

Runs where vLLM is: python vllm_requests.py CHECKOUT REQUESTS SIZES OUT.json [CASE ...]; writes what was computed, checked and wrong.
"""

import json
import random
import sys
import time
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

HYBRID = [(16, None), (16, 64), (16, 64), (16, 100)]
CASES = {
    "dense": {"groups": [(16, None)]},
    "hybrid": {"groups": HYBRID},
    "hybrid, every boundary": {"groups": HYBRID, "retention": None},
    "hybrid, intervals": {"groups": HYBRID, "retention": 192},
    "hybrid, async": {"groups": HYBRID, "is_async": True},
    "hybrid, drafts": {"groups": HYBRID, "drafts": True},
    "hybrid, async, drafts": {"groups": HYBRID, "is_async": True, "drafts": True},
    "hybrid, priorities": {"groups": HYBRID, "policy": "priority"},
    "block sizes 16 and 32": {"groups": [(32, None), (16, 40)]},
    "no caching, async, drafts": {
        "groups": HYBRID,
        "is_async": True,
        "drafts": True,
        "caching": False,
    },
    "dense, async, drafts": {"groups": [(16, None)], "is_async": True, "drafts": True},
}


def chats(seed, num_requests, groups):
    """Requests as (id, prompt, max_tokens, the one that it waits for, priority, tokens after which it is aborted, step of arrival)."""
    rng = random.Random(seed)
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
                text = Text(prompt)
                answer(text, most, groups)
                prompt = text.tokens + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
    return made


def answer(text, most, groups):
    """Appends the answer of `most` tokens; returns it."""
    n = len(text.tokens)
    for _ in range(most):
        text.extend([text.next(len(text.tokens) - 1, groups)])
    return text.tokens[n:]


def configuration(num_pages, is_async, drafts, policy, retention, where, **more):
    model = options.ModelConfig(model=str(where), skip_tokenizer_init=True, max_model_len=LONGEST, dtype="float16")  # fmt: skip
    scheduler = options.SchedulerConfig(
        max_num_seqs=24, max_num_batched_tokens=192, max_model_len=LONGEST, enable_chunked_prefill=True, is_encoder_decoder=False,
        async_scheduling=is_async, policy=policy,
    )  # fmt: skip
    cache = options.CacheConfig(block_size=16, enable_prefix_caching=True, prefix_cache_retention_interval=retention)  # fmt: skip
    spec = None
    if drafts:
        # Asynchronous scheduling has them proposed on the device; which method does is not the scheduler's business.
        lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        spec = options.SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS, **lookup)
    config = options.VllmConfig(
        model_config=model, scheduler_config=scheduler, cache_config=cache, device_config=options.DeviceConfig(device="cpu"),
        speculative_config=spec, **more,
    )  # fmt: skip
    config.scheduler_config.async_scheduling = is_async
    config.scheduler_config.max_num_scheduled_tokens = None
    config.cache_config.num_gpu_blocks = num_pages
    return config


def cache_groups(groups, num_pages, retention):
    made = []
    for i, (size, window) in enumerate(groups):
        shape = {"block_size": size, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}
        spec = (
            kinds.FullAttentionSpec(**shape) if window is None else kinds.SlidingWindowSpec(sliding_window=window, **shape)
        )  # fmt: skip
        made.append(kinds.KVCacheGroupSpec([f"layer {i}"], spec))
    return kinds.KVCacheConfig(num_pages, [], made, prefix_cache_retention_interval=retention)


def scheduler_of(cls, config, kv_config, log_stats=False):
    sizes = [g.kv_cache_spec.block_size for g in kv_config.kv_cache_groups] or [16]
    return cls(
        config, kv_config, StructuredOutputManager(config), max(sizes), hash_block_size=min(sizes), log_stats=log_stats
    )  # fmt: skip


def serve(scheduler, worker, requests, groups, is_async, check=None):
    """All requests through a scheduler; returns answers and counts."""
    hasher = get_request_block_hasher(scheduler.hash_block_size, sha256)
    ready, later = {}, {}
    for made in requests:
        (later.setdefault(made[3], []) if made[3] else ready.setdefault(made[6], [])).append(made)
    answers, aborts, flying = {}, {}, []
    counts = {"computed": 0, "drafts": 0, "preempted": 0, "steps": 0, "aborted": 0}
    step = 0

    def arrive(made):
        rid, prompt, most, _, priority, stop, _ = made
        params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0)
        request = Request(
            rid, list(prompt), params, None, priority=priority, arrival_time=float(rid[1:]), block_hasher=hasher
        )  # fmt: skip
        answers[rid] = []
        if stop is not None:
            aborts[rid] = stop
        scheduler.add_request(request)

    def over(rid):
        for made in later.pop(rid, []):
            ready.setdefault(step + 1, []).append(made)

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

    while ready or later or flying or scheduler.has_unfinished_requests():
        for made in ready.pop(step, []):
            arrive(made)
        for rid, n in list(aborts.items()):
            if len(answers[rid]) >= n and rid in scheduler.requests:
                scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)
                counts["aborted"] += 1
                del aborts[rid]
                over(rid)
            elif rid not in scheduler.requests:
                del aborts[rid]
        so = scheduler.schedule()
        step += 1
        counts["preempted"] += len(so.preempted_req_ids or ())
        if so.total_num_scheduled_tokens:
            counts["steps"] += 1
            drafted = sum(map(len, so.scheduled_spec_decode_tokens.values()))
            counts["computed"] += so.total_num_scheduled_tokens - drafted
            counts["drafts"] += drafted
            flying.append((so, worker.take(so)))
        elif so.finished_req_ids or so.preempted_req_ids:
            flying.append((so, worker.take(so)))
        if flying and (len(flying) > (1 if is_async else 0) or not so.total_num_scheduled_tokens):
            finish()
        if check is not None and step % 16 == 0:
            check()
        assert step < 200_000, "the scheduler stands still"
    return answers, counts


def run(name, num_pages, num_requests, where, classes):
    case = {"is_async": False, "drafts": False, "policy": "fcfs", "retention": 0, "caching": True} | CASES[name]  # fmt: skip
    groups, is_async, drafts = case["groups"], case["is_async"], case["drafts"]
    requests = chats(1, num_requests, groups)
    said = {"case": name, "pages": num_pages, "requests": len(requests)}
    for who, cls in classes(is_async).items():
        config = configuration(num_pages, is_async, drafts, case["policy"], case["retention"], where)  # fmt: skip
        config.cache_config.enable_prefix_caching = case["caching"]
        scheduler = scheduler_of(cls, config, cache_groups(groups, num_pages, case["retention"]))
        worker = Worker(groups, num_pages, drafts, 5)
        check = None
        if who == "quire":
            assert (isinstance(scheduler, AsyncScheduler)) == is_async
            check = scheduler.kv_cache_manager.cache.check_invariants
        answers, counts = serve(scheduler, worker, requests, groups, is_async, check)
        differ = 0
        for rid, prompt, most, _, _, stop, _ in requests:
            truth = answer(Text(prompt), most, groups)
            got = answers[rid]
            differ += got != (truth if stop is None else truth[: len(got)])
        counts |= {"differ": differ, "rows": worker.checked, "wrong": worker.wrong, "accepted": worker.accepted,
                   "rejected": worker.rejected}  # fmt: skip
        if check is not None:
            check()
            cache = scheduler.kv_cache_manager.cache
            counts["left"] = cache.stats()["pages_in_use"] + len(cache.sequences.ids)
            counts["left"] += scheduler.get_kv_cache_usage() + (not scheduler.reset_prefix_cache())
            counts["left"] += num_pages - 1 - cache.num_free_pages
        said[who] = counts
    return said


def timings(where, sizes=(1, 16, 64, 256), steps=64):
    """Median microseconds that the slots of a request take in a decode step, of the two managers by turns.

    Over `steps` steps blocks start and segments become findable. Their schedulers only make the managers.
    """
    hasher = get_request_block_hasher(16, sha256)
    params = SamplingParams(max_tokens=LONGEST, ignore_eos=True, temperature=0.0)
    rng, said = random.Random(0), []
    for groups in ("dense", "hybrid"):
        config = configuration(16_384, False, False, "fcfs", 0, where)
        config.scheduler_config.max_num_seqs = max(sizes)
        for n in sizes:
            prompts = [[rng.randrange(VOCAB) for _ in range(rng.randrange(130, 200))] for _ in range(n)]  # fmt: skip
            managers = {}
            for who, cls in (("vllm", Scheduler), ("quire", QuireScheduler)):
                pages = cache_groups(CASES[groups]["groups"], 16_384, 0)
                manager = scheduler_of(cls, config, pages).kv_cache_manager
                requests = [Request(str(i), list(p), params, None, block_hasher=hasher) for i, p in enumerate(prompts)]  # fmt: skip
                for r in requests:
                    assert manager.allocate_slots(r, r.num_tokens) is not None
                    r.status = RequestStatus.RUNNING
                    sampled(r, r.num_tokens)
                managers[who] = manager, requests, []
            for _ in range(steps):
                for manager, requests, times in managers.values():
                    started = time.perf_counter()
                    manager.new_step_starts()
                    for r in requests:
                        manager.allocate_slots(r, 1)
                    manager.take_boundary_state_offloads()
                    times.append(time.perf_counter() - started)
                    for r in requests:
                        sampled(r, 1)
            medians = {who: sorted(times)[steps // 2] / n * 1e6 for who, (*_, times) in managers.items()}  # fmt: skip
            said.append({"groups": groups, "requests": n} | medians)
    return said


def sampled(request, num_computed):
    request.num_computed_tokens += num_computed
    request.append_output_token_ids(7)


def refusals(where):
    """The error of each configuration when its scheduler is made; None if it is served."""
    said = {}

    def told(name, groups, change=lambda config: None, **more):
        config = configuration(100, False, False, "fcfs", 0, where, **more)
        change(config)
        pages = kinds.KVCacheConfig(100, [], [kinds.KVCacheGroupSpec(["layer"], g) for g in groups])
        try:
            said[name] = scheduler_of(QuireScheduler, config, pages) and None
        except NotImplementedError as error:
            said[name] = str(error)

    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}
    full = kinds.FullAttentionSpec(**shape)

    def parallel(name):
        return lambda config: setattr(config.parallel_config, name, 2)

    def connector(config):
        config.kv_transfer_config = object()

    told(
        "served",
        [
            full,
            kinds.SlidingWindowSpec(sliding_window=32, **shape),
            kinds.MLAAttentionSpec(**shape),
        ],
    )
    told("chunked", [kinds.ChunkedLocalAttentionSpec(attention_chunk_size=32, **shape)])
    told("cross", [kinds.CrossAttentionSpec(**shape)])
    told("mamba", [full, kinds.MambaSpec(block_size=16, shapes=((2,),), dtypes=(torch.float16,))])
    told("no groups", [])
    told("connector", [full], connector)
    told("events", [full], kv_events_config=options.KVEventsConfig(enable_kv_cache_events=True))
    told("DCP", [full], parallel("decode_context_parallel_size"))
    told("PP", [full], parallel("pipeline_parallel_size"))
    return said


def plain_request(name, tokens):
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    return Request(name, tokens, params, None, block_hasher=get_request_block_hasher(16, sha256))


def findable(where):
    """Dense tokens that others find of a chunk whose request was preempted in its step, and of one that was not."""
    config = configuration(300, True, False, "fcfs", 0, where)
    groups = cache_groups(CASES["hybrid"]["groups"], 300, 0)
    manager, hits = scheduler_of(QuireScheduler, config, groups).kv_cache_manager, []
    first, second = (plain_request(name, [9] * 300) for name in "cd")
    for chunk in (200, 100):
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
        hits.append(manager._match(second, 299).dense_tokens)
    return hits


def drafter_hits(where):
    """Hits of three prompts of equal tokens, without and with a drafter whose last row before a hit depends on the token after it."""
    hits = []
    for drops in (False, True):
        kv_config = cache_groups(CASES["dense"]["groups"], 100, 0)
        config = configuration(100, False, False, "fcfs", 0, where)
        scheduler = scheduler_of(QuireScheduler, config, kv_config)
        scheduler.use_eagle_block_drop = drops
        manager = CacheManager(scheduler)
        for end in (100, 97, 81):
            request = plain_request(f"e{end}", [5] * end)
            found, hit, _ = manager.get_computed_blocks(request)
            hits.append(hit)
            manager.allocate_slots(request, end - hit, hit, found)
            manager.free(request)
    return hits


def main():
    init_none_hash(sha256)
    where = Path(sys.argv[4]).resolve().parent / "model"
    where.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB + 2, "max_position_embeddings": LONGEST,
    }  # fmt: skip
    (where / "config.json").write_text(json.dumps(config))

    def classes(is_async):
        return {"vllm": AsyncScheduler if is_async else Scheduler, "quire": QuireScheduler}

    names, sizes = sys.argv[5:] or CASES, [*map(int, sys.argv[3].split(","))]
    cases = [
        run(name, pages, int(sys.argv[2]), where, classes) for name in names for pages in sizes
    ]
    results = {
        "cases": cases, "refusals": refusals(where), "findable": findable(where),
        "drafter": drafter_hits(where), "timings": timings(where),
    }  # fmt: skip
    Path(sys.argv[4]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
