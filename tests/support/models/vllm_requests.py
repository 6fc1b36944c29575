"""vLLM's Scheduler with `quire.models.integrations.vllm_scheduler`, beside its own: random requests through a simulated device.

The device has one pool of pages for all groups and nothing else: a step writes the rows of its tokens where the tables say that workers
keep (`SchedulerOutput`: new pages appended, those of resumed requests replaced), then each query reads the rows that it sees, and the next
token is a hash of these. A row's content is a hash of the tokens up to it, made here from token lists; nothing of an allocator is asked what
is right. With asynchronous scheduling a step runs after the next one was scheduled.

Runs where vLLM is: python vllm_requests.py CHECKOUT REQUESTS SIZES OUT.json [CASE ...]; writes what was computed, checked and wrong.
"""

import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import bench  # noqa: F401  makes `quire` importable where it is not installed

del sys.path[0]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from quire.models.integrations.vllm_kv_manager import CacheManager  # noqa: E402
from quire.models.integrations.vllm_scheduler import QuireScheduler, group_specs  # noqa: E402

LONGEST, VOCAB, DRAFTS, NO_TOKEN = 512, 5000, 3, 5001
MASK = (1 << 64) - 1
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


def mixed(x):
    """splitmix64."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


class Text:
    """Tokens of a request and what their rows hold: a hash of all tokens before and at each; never 0."""

    def __init__(self, tokens):
        self.tokens, self.rows, self.sums = [], np.zeros(LONGEST + 64, np.uint64), [0]
        self.extend(tokens)

    def extend(self, tokens):
        for token in tokens:
            n = len(self.tokens)
            self.rows[n] = row = mixed((int(self.rows[n - 1]) if n else 1) * 31 + token) | 1
            self.sums.append((self.sums[-1] + row) & MASK)
            self.tokens.append(token)

    def cut(self, n):
        del self.tokens[n:], self.sums[n + 1 :]

    def next(self, position, groups):
        """What follows `position`, from the rows that its query should see."""
        total = 0
        for g, (_, window) in enumerate(groups):
            low = 0 if window is None else max(0, position - window + 1)
            total = mixed(total ^ (((self.sums[position + 1] - self.sums[low]) * tag(g)) & MASK))
        return total % VOCAB


def tag(group):
    return 2 * group + 3


class Worker:
    """Runs steps against one pool."""

    def __init__(self, groups, num_pages, drafts, seed):
        self.groups, self.seed, self.num_drafts = groups, seed, DRAFTS if drafts else 0
        self.memory = np.zeros((num_pages, max(size for size, _ in groups)), np.uint64)
        self.states = {}
        self.checked = self.wrong = self.accepted = self.rejected = 0

    def take(self, step):
        """What a launch takes along."""
        new = [
            (r.req_id, list(r.prefill_token_ids or r.prompt_token_ids), [*map(list, r.block_ids)], r.num_computed_tokens)
            for r in step.scheduled_new_reqs
        ]  # fmt: skip
        cached = step.scheduled_cached_reqs
        more = [
            (rid, rid in cached.resumed_req_ids, pages and [*map(list, pages)], computed, list(cached.all_token_ids.get(rid, ())))
            for rid, pages, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        ]  # fmt: skip
        drafts = {rid: list(ids) for rid, ids in step.scheduled_spec_decode_tokens.items()}
        return (
            new,
            more,
            dict(step.num_scheduled_tokens),
            drafts,
            [*step.finished_req_ids],
            [*(step.preempted_req_ids or ())],
        )

    def run(self, work, is_async):
        """Output of a step, and drafts for the next one."""
        new, more, counts, given, finished, preempted = work
        for rid in (*finished, *preempted):
            self.states.pop(rid, None)
        for rid, tokens, tables, computed in new:
            self.states[rid] = [Text(tokens), tables, computed, []]
        for rid, resumed, pages, computed, tokens in more:
            state = self.states[rid]
            if resumed:
                state[:] = [Text(tokens), pages, computed, []]
            elif pages:
                for table, added in zip(state[1], pages, strict=True):
                    table += added
            if not is_async:
                assert state[2] == computed
        writes, parts = {}, []
        for rid, n in counts.items():
            text, tables, start, own = self.states[rid]
            known = len(text.tokens) - start
            drafts = given.get(rid, [])
            if drafts and is_async and own:
                drafts = own[: len(drafts)] + [NO_TOKEN] * (len(drafts) - len(own))
            drafts = [NO_TOKEN if d < 0 else d for d in drafts]
            assert n <= known or len(drafts) == n - known, (n, known, drafts)
            drafts = drafts[: max(0, n - known)]
            text.extend(drafts)
            parts.append((rid, text, tables, start, start + n, drafts))
            for g, (size, _) in enumerate(self.groups):
                at = np.arange(start, start + n)
                blocks = at // size
                if blocks[-1] >= len(tables[g]):
                    self.wrong += n
                    continue
                pages = np.array(tables[g])[blocks]
                self.wrong += int(np.count_nonzero(pages == 0))
                rows = text.rows[start : start + n] * np.uint64(tag(g))
                for key, row in zip(
                    (pages * 4096 + at % size).tolist(), rows.tolist(), strict=True
                ):
                    self.wrong += writes.setdefault(key, row) != row
                self.memory[pages, at % size] = rows
        sampled, proposed = [], []
        for rid, text, tables, start, end, drafts in parts:
            reads = [self.read(text, tables[g], g, start, end) for g in range(len(self.groups))]
            out = []
            first = len(text.tokens) - len(drafts) - 1
            for i, position in enumerate(range(first, end)):
                out.append(self.sample(reads, position, start))
                if i >= len(drafts) or drafts[i] != out[-1]:
                    break
            self.accepted += max(0, len(out) - 1)
            self.rejected += len(drafts) - max(0, len(out) - 1)
            text.cut(first + 1)
            if end > first:
                text.extend(out)
                self.states[rid][2] = len(text.tokens) - 1
            else:
                out, self.states[rid][2] = [], end
            sampled.append(out)
            proposed.append(self.propose(rid, text) if out else [])
            self.states[rid][3] = proposed[-1]
        ids = list(counts)
        index = {rid: i for i, rid in enumerate(ids)}
        return ModelRunnerOutput(ids, index, sampled_token_ids=sampled), DraftTokenIds(
            [*ids], proposed
        )

    def read(self, text, table, g, start, end):
        """Rows that the queries of [start, end) see of a group, checked: (first, their contents)."""
        size, window = self.groups[g]
        low = 0 if window is None else max(0, start - window + 1)
        at = np.arange(low, end)
        blocks = at // size
        pages = np.array(table + [0] * (int(blocks[-1]) + 1 - len(table)))[blocks]
        rows = np.where(pages > 0, self.memory[pages, at % size], np.uint64(0))
        self.checked += len(at)
        self.wrong += int(np.count_nonzero(rows != text.rows[low:end] * np.uint64(tag(g))))
        return low, rows

    def sample(self, reads, position, start):
        total = 0
        for g, (low, rows) in enumerate(reads):
            window = self.groups[g][1]
            first = 0 if window is None else max(0, position - window + 1)
            total = mixed(total ^ int(rows[first - low : position + 1 - low].sum(dtype=np.uint64)))
        return total % VOCAB

    def propose(self, rid, text):
        """Guesses of a drafter that is right three times out of four."""
        n, drafts = len(text.tokens), []
        room = min(self.num_drafts, LONGEST - n)
        for _ in range(room):
            guess = text.next(len(text.tokens) - 1, self.groups)
            if mixed(len(text.tokens) * 7919 + self.seed) % 4 == 0:
                guess = (guess + 1) % VOCAB
            drafts.append(guess)
            text.extend([guess])
        text.cut(n)
        return drafts


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
    model = ModelConfig(
        model=str(where), skip_tokenizer_init=True, max_model_len=LONGEST, dtype="float16"
    )
    scheduler = SchedulerConfig(
        max_num_seqs=24, max_num_batched_tokens=192, max_model_len=LONGEST, enable_chunked_prefill=True, is_encoder_decoder=False,
        async_scheduling=is_async, policy=policy,
    )  # fmt: skip
    cache = CacheConfig(
        block_size=16, enable_prefix_caching=True, prefix_cache_retention_interval=retention
    )
    spec = None
    if drafts:
        # Asynchronous scheduling has them proposed on the device; which method does is not the scheduler's business.
        spec = SpeculativeConfig(
            method="ngram", num_speculative_tokens=DRAFTS, prompt_lookup_max=3, prompt_lookup_min=1
        )
    config = VllmConfig(
        model_config=model, scheduler_config=scheduler, cache_config=cache, device_config=DeviceConfig(device="cpu"),
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
            FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(sliding_window=window, **shape)
        )  # fmt: skip
        made.append(KVCacheGroupSpec([f"layer {i}"], spec))
    return KVCacheConfig(num_pages, [], made, prefix_cache_retention_interval=retention)


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
    step, preempted = 0, set()

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
    del preempted
    return answers, counts


def run(name, num_pages, num_requests, where, classes):
    case = {
        "is_async": False,
        "drafts": False,
        "policy": "fcfs",
        "retention": 0,
        "caching": True,
        **CASES[name],
    }
    groups, is_async, drafts = case["groups"], case["is_async"], case["drafts"]
    requests = chats(1, num_requests, groups)
    said = {"case": name, "pages": num_pages, "requests": len(requests)}
    for who, cls in classes(is_async).items():
        config = configuration(
            num_pages, is_async, drafts, case["policy"], case["retention"], where
        )
        config.cache_config.enable_prefix_caching = case["caching"]
        scheduler = scheduler_of(cls, config, cache_groups(groups, num_pages, case["retention"]))
        worker = Worker(groups, num_pages, drafts, 5)
        check = None
        if who == "quire":
            assert (isinstance(scheduler, AsyncScheduler)) == is_async
            check = scheduler.kv_cache_manager.cache.check_invariants
        started = time.perf_counter()
        answers, counts = serve(scheduler, worker, requests, groups, is_async, check)
        differ = 0
        for rid, prompt, most, _, _, stop, _ in requests:
            truth = answer(Text(prompt), most, groups)
            got = answers[rid]
            differ += got != (truth if stop is None else truth[: len(got)])
        counts |= {"differ": differ, "rows": worker.checked, "wrong": worker.wrong, "accepted": worker.accepted,
                   "rejected": worker.rejected, "seconds": time.perf_counter() - started}  # fmt: skip
        if check is not None:
            check()
            cache = scheduler.kv_cache_manager.cache
            counts["left"] = cache.stats()["pages_in_use"] + len(cache.sequences.ids)
            cache.clear()
            counts["left"] += num_pages - 1 - cache.num_free_pages
        said[who] = counts
    return said


def timings(where, sizes=(1, 16, 64, 256), steps=64):
    """Microseconds that `allocate_slots` takes for a request of a decode step, and to admit one with a hit; the two managers by turns.

    A decode step asks for a token of each running request; over `steps` steps blocks start and segments become findable. Their schedulers
    are not involved but for making the managers.
    """
    hasher = get_request_block_hasher(16, sha256)
    params = SamplingParams(max_tokens=LONGEST, ignore_eos=True, temperature=0.0)
    rng, said = random.Random(0), []
    for groups in ("dense", "hybrid"):
        config = configuration(16_384, False, False, "fcfs", 0, where)
        config.scheduler_config.max_num_seqs = max(sizes)
        for n in sizes:
            prompts = [
                [rng.randrange(VOCAB) for _ in range(rng.randrange(130, 200))] for _ in range(n)
            ]
            managers, admitted = {}, {}
            for who, cls in (("vllm", Scheduler), ("quire", QuireScheduler)):
                pages = cache_groups(CASES[groups]["groups"], 16_384, 0)
                manager = scheduler_of(cls, config, pages).kv_cache_manager
                for turn in range(2):  # the second time with a hit
                    requests = [
                        Request(f"{turn} {i}", list(p), params, None, block_hasher=hasher) for i, p in enumerate(prompts)
                    ]  # fmt: skip
                    manager.new_step_starts()
                    started = time.perf_counter()
                    for r in requests:
                        found, hit, _ = manager.get_computed_blocks(r)
                        assert manager.allocate_slots(r, r.num_tokens - hit, hit, found) is not None
                        r.status = RequestStatus.RUNNING
                    admitted[who] = (time.perf_counter() - started) / n * 1e6
                    for r in requests:
                        r.num_computed_tokens = r.num_tokens
                        r.append_output_token_ids(7)
                        if not turn:
                            manager.free(r)
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
                        r.num_computed_tokens += 1
                        r.append_output_token_ids(7)
            row = {"groups": groups, "requests": n}
            for who, (_, _, times) in managers.items():
                row[who] = {
                    "median us": sorted(times)[steps // 2] / n * 1e6, "mean us": sum(times) / steps / n * 1e6, "admit us": admitted[who],
                }  # fmt: skip
            said.append(row)
    return said


def refusals(where):
    """What each configuration that is not served is told when its scheduler is made; None if it is served."""
    said = {}

    def told(name, groups, change=lambda config: None, **more):
        config = configuration(100, False, False, "fcfs", 0, where, **more)
        change(config)
        pages = KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], g) for g in groups])
        try:
            said[name] = scheduler_of(QuireScheduler, config, pages) and None
        except NotImplementedError as error:
            said[name] = str(error)

    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float16}
    full = FullAttentionSpec(**shape)

    def context(config):
        config.parallel_config.decode_context_parallel_size = 2

    def stages(config):
        config.parallel_config.pipeline_parallel_size = 2

    def connector(config):
        config.kv_transfer_config = object()

    told("served", [full, SlidingWindowSpec(sliding_window=32, **shape), MLAAttentionSpec(**shape)])
    told("chunked", [ChunkedLocalAttentionSpec(attention_chunk_size=32, **shape)])
    told("cross", [CrossAttentionSpec(**shape)])
    told("mamba", [full, MambaSpec(block_size=16, shapes=((2,),), dtypes=(torch.float16,))])
    told("no groups", [])
    told("connector", [full], connector)
    told("events", [full], kv_events_config=KVEventsConfig(enable_kv_cache_events=True))
    told("DCP", [full], context)
    told("PP", [full], stages)
    return said


def failures(where):
    """A request that is aborted in each state frees all; one that the policy fails for ends alone; the cache can be reset."""
    groups, said = CASES["hybrid"]["groups"], {}
    config = configuration(300, True, False, "fcfs", 0, where)
    scheduler = scheduler_of(QuireScheduler, config, cache_groups(groups, 300, 0), True)
    cache, worker = scheduler.kv_cache_manager.cache, Worker(groups, 300, False, 0)
    hasher = get_request_block_hasher(16, sha256)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    for i, steps in enumerate((0, 1, 2, 3, 5, 8)):  # waiting, in flight, in a chunk, decoding
        for rid in (f"a{i}", f"b{i}"):
            prompt = [(i + 7 * j) % VOCAB for j in range(300)]
            scheduler.add_request(Request(rid, prompt, params, None, block_hasher=hasher))
        flying = []
        for _ in range(steps):
            so = scheduler.schedule()
            flying.append((so, worker.take(so)))
            if len(flying) > 1:
                so, work = flying.pop(0)
                scheduler.update_from_output(so, worker.run(work, True)[0])
        scheduler.finish_requests([f"a{i}", f"b{i}"], RequestStatus.FINISHED_ABORTED)
        for so, work in flying:
            scheduler.update_from_output(so, worker.run(work, True)[0])
        cache.check_invariants()
        said[f"aborted after {steps} steps"] = [
            len(cache.sequences.ids),
            cache.stats()["pages_in_use"],
        ]
    said["wrong"] = worker.wrong
    # A running request is given slots for its second chunk, and preempted in the same step: nobody computes that.
    manager, hits = scheduler.kv_cache_manager, []
    first, second = (Request(name, [9] * 300, params, None, block_hasher=hasher) for name in "cd")
    manager.new_step_starts()
    manager.allocate_slots(first, 96)
    first.status, first.num_computed_tokens = RequestStatus.RUNNING, 96
    for preempted in (True, False):
        manager.new_step_starts()
        manager.allocate_slots(first, 200 if preempted else 100)
        if preempted:
            manager.free(first)
            hits.append(manager._match(second, 299).dense_tokens)
            first.status, first.num_computed_tokens = RequestStatus.WAITING, 0
            manager.allocate_slots(first, 96)
            first.status, first.num_computed_tokens = RequestStatus.RUNNING, 96
        else:
            manager.get_computed_blocks(second)
            hits.append(manager._match(second, 299).dense_tokens)
    manager.free(first)
    said["findable"] = hits
    said["drafter"] = []
    for drops in (
        False,
        True,
    ):  # a drafter whose last row before a hit depends on the token after it
        kv_config = cache_groups(CASES["dense"]["groups"], 100, 0)
        other = scheduler_of(
            QuireScheduler, configuration(100, False, False, "fcfs", 0, where), kv_config
        )
        other.use_eagle_block_drop = drops
        manager = CacheManager(other, group_specs(kv_config))
        for end in (100, 97, 81):
            request = Request(f"e{end}", [5] * end, params, None, block_hasher=hasher)
            found, hit, _ = manager.get_computed_blocks(request)
            said["drafter"].append(hit)
            manager.allocate_slots(request, end - hit, hit, found)
            manager.free(request)
    said["usage"] = scheduler.get_kv_cache_usage()
    said["reset"] = [scheduler.reset_prefix_cache(), cache.num_free_pages]
    return said


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

    said = []
    for name in sys.argv[5:] or CASES:
        for pages in map(int, sys.argv[3].split(",")):
            row = run(name, pages, int(sys.argv[2]), where, classes)
            said.append(row)
            v, q = row["vllm"], row["quire"]
            print(
                name, pages, "computed", v["computed"], q["computed"], f"{q['computed'] / v['computed'] - 1:+.2%}", "preempted",
                v["preempted"], q["preempted"], "wrong", v["wrong"], q["wrong"], "differ", v["differ"], q["differ"], "rows", q["rows"],
                "left", q["left"], "acc", q["accepted"], q["rejected"], f"{v['seconds']:.1f} {q['seconds']:.1f} s", flush=True,
            )  # fmt: skip
    results = {
        "cases": said, "refusals": refusals(where), "failures": failures(where), "timings": timings(where),
    }  # fmt: skip
    Path(sys.argv[4]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
