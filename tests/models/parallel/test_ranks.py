"""Processes on gloo that run one model: logits, tokens and pages are those of one rank; a rank that dies or drifts ends all."""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from quire.models.config.named import get_config
from quire.models.deepseek_v4.mtp_drafter import MTPDrafter
from quire.models.engine.config import EngineConfig
from quire.models.engine.engine import Engine
from quire.models.engine.graphs import Shape, capture_each
from quire.models.engine.memory import model_cache
from quire.models.engine.request import SamplingParams
from quire.models.engine.room import pages_of_request
from quire.models.engine.speculative import NGramDrafter
from quire.models.llm import LLM
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import build_model
from quire.models.parallel import launch
from quire.models.parallel.launch import Ranks, launched
from quire.models.parallel.lockstep import CLOSE, LockstepEngine, declared, expect_same
from quire.models.parallel.watch import RankError
from quire.models.transfer.memory import DictStore
from tests.support.models.few import few
from tests.support.models.ranks import (
    Processes,
    add_a_page_on,
    full_forward,
    on_ranks,
    sent_by_forward,
)
from tests.support.models.tolerance import tolerance

FAMILIES = ("llama-tiny", "gemma3-tiny", "gemma4-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "gpt-oss-tiny", "deepseek-v4-tiny")  # fmt: skip
# More of the same: 4 ranks, and how often each of so many is killed.
SIZE = int(os.environ.get("QUIRE_RANKS", "2"))
KILLS = int(os.environ.get("QUIRE_RANK_KILLS", "2"))
SEED = int(os.environ.get("QUIRE_RANK_SEED", "0"))
ROOT = Path(__file__).resolve().parents[3]
MAX_TOKENS = 20
PREFIX = torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(7)).tolist()


def config_of(name):
    config = few(name)
    if name == "deepseek-v4-tiny":
        return replace(config, num_mtp_layers=1, o_groups=4)  # so that 4 ranks can have them
    return config


def prompts():
    """Some share a prefix, one repeats itself, one comes again."""
    tails = torch.randint(3, 259, (4, 9), generator=torch.Generator().manual_seed(8)).tolist()
    return [*(PREFIX + tail for tail in tails), tails[0] * 8, PREFIX + tails[1]]


def run(engine, params):
    """Outputs by prompt; the last two come when the first have ended, with one that is drawn."""
    outputs, given = {}, prompts()
    for wave in (range(4), range(4, len(given))):
        for i in wave:
            engine.add_request(given[i], params, request_id=str(i))
        while engine.has_work:
            outputs |= {o.request_id: o for o in engine.step().finished}
        if len(outputs) == 4:
            drawn = replace(params, temperature=0.8, repetition_penalty=1.2, logprobs=2, seed=3)
            engine.add_request(given[0], drawn, request_id="drawn")
    # Where rounding decides, a draw may differ between one rank and several; not between ranks.
    assert len(outputs["drawn"].token_ids) == len(outputs["drawn"].logprobs) == params.max_tokens
    return [outputs[str(i)] for i in range(len(given))]


def assert_same_tokens(model, outputs, wanted, allowed):
    """Up to a tie: the first token that differs is one whose logits are as near as two right programs' may be."""
    for got, want in zip(outputs, wanted, strict=True):
        differ = [i for i, (a, b) in enumerate(zip(got.token_ids, want.token_ids)) if a != b]  # noqa: B905
        assert differ or got.token_ids == want.token_ids
        if differ:
            ids = [*want.prompt_token_ids, *want.token_ids[: differ[0]]]
            logits = model.full_forward(torch.tensor(ids))[-1]
            a, b = got.token_ids[differ[0]], want.token_ids[differ[0]]
            assert abs(logits[a] - logits[b]) <= 2 * allowed


@pytest.fixture(scope="module")
def processes():
    pool = Processes(SIZE)
    yield pool
    pool.llm.close()


CASES = [(name, split) for name in FAMILIES for split in (False, True)]
CASES.remove(("gemma4-e-tiny", False))
NIGHTLY = [pytest.param(*case, marks=pytest.mark.nightly) for case in CASES]


@pytest.mark.parametrize(("name", "split"), [("gemma4-e-tiny", False), *NIGHTLY])
def test_one_model_on_several_ranks(processes, name, split):
    """Logits up to the order of sums; tokens with hits, chunks, drafts and preemption, every plan and table compared."""
    config = config_of(name)
    one, ids = random_model(config, seed=5), torch.tensor(prompts()[0])
    allowed = tolerance(one)
    group = processes.llm.engine.group
    size, kinds = group.size, set(group.calls)
    draft = partial(MTPDrafter if name == "deepseek-v4-tiny" else _ngram, max_draft_tokens=2)
    group = SimpleNamespace(size=size, rank=0, split_context=split)
    part = build_model(config, device="meta", dtype=torch.float32, group=group)
    cache = model_cache(part, max_requests=4, max_draft_tokens=2, drafter_layers=True)
    longest = len(PREFIX) + 9 + MAX_TOKENS
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        # Not enough for the running ones.
        "num_pages": 1 + int(1.5 * pages_of_request(cache.groups, longest, 2)),
        "max_model_len": longest + 3,
        "context_parallel_size": size if split else 1,
        "decode_graphs": name in ("gemma4-tiny", "gemma4-e-tiny")
        or (name == "deepseek-v4-tiny" and SIZE > 2),
    }
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    with processes.engine(config, drafter=draft, **settings) as engine:
        logits = engine.everywhere(full_forward, ids)
        sent = engine.everywhere(sent_by_forward, 8)
        outputs = run(engine, params)
        totals, memory = engine.totals, engine.memory
        assert set(engine.group.calls) == kinds  # another thread reads them meanwhile
    # Of each token: the embedding, and two parts of a layer, or three; of E models inputs of all layers. Of each row: logits.
    layers = len(config.layer_types)
    sums = 1 + layers * (3 if name == "gemma4-moe-tiny" else 2)
    values = sums * config.hidden_size + layers * getattr(config, "per_layer_input_size", 0)
    assert sent == {"sum": 8 * 4 * values, "gather": 8 * 4 * -(-config.vocab_size // size)}
    assert (logits - one.full_forward(ids)).abs().max() <= allowed
    alone = Engine(one, EngineConfig(max_num_seqs=4, num_pages=2000, base_block_size=None))
    assert_same_tokens(one, outputs, run(alone, params), allowed)
    assert max(o.num_cached_tokens for o in outputs) >= 16
    assert (split or totals.num_preempted > 0) and totals.num_drafts > 0
    # A pool of so many bytes has room for so much more, as far as there are KV heads.
    heads = 1 if name == "deepseek-v4-tiny" else config.full.num_kv_heads
    share = 1 / size if split else max(1, heads // size) / heads
    assert memory.bytes_per_token == alone.memory.bytes_per_token * share


def _ngram(model, max_draft_tokens):
    return NGramDrafter(max_draft_tokens, min_ngram=1)


def test_a_hand_off_is_refused(processes):
    for name in ("export_prefix", "import_prefix"):
        with pytest.raises(ValueError, match="tensor_parallel_size: expected 1 for a hand-off"):
            getattr(processes.llm, name)(PREFIX, DictStore())


def test_a_process_has_one_model_at_a_time(processes):
    config = EngineConfig(num_pages=10, tensor_parallel_size=SIZE)
    with pytest.raises(ValueError, match="tensor_parallel_size: expected ranks without a model"):
        LLM("llama-tiny", engine=config)
    with pytest.raises(ValueError, match=f"tensor_parallel_size: expected {SIZE}, the ranks, got"):
        LLM("llama-tiny", engine=replace(config, tensor_parallel_size=4 if SIZE == 2 else 2))


@pytest.mark.nightly
def test_a_rank_that_is_killed(processes):
    """The last test of this file that has the processes."""
    llm, victim = processes.llm, processes.llm.engine.ranks.processes[-1]
    threading.Timer(0.5, victim.kill).start()
    begin = time.monotonic()
    with pytest.raises(RankError, match=f"^rank {SIZE - 1} died: its process has ended$"):
        while time.monotonic() - begin < 60:
            llm.generate([PREFIX[:9]], SamplingParams(max_tokens=40, ignore_eos=True), progress=False)  # fmt: skip
    with pytest.raises(RankError, match=f"rank {SIZE - 1} died"):
        llm.engine.step()
    llm.close()
    assert all(p.poll() is not None for p in llm.engine.ranks.processes)


class Quiet:
    """A watch that sees nothing."""

    is_busy = False

    def verdict(self, wait=0.0):
        return ""

    def fail(self, error):
        self.error = error


def in_threads(lead, check_steps=10**6, **settings):
    """``lead(engine)`` on rank 0 of two, which the other follows; what went wrong on either is raised."""
    config = few("gemma3-tiny")
    settings = EngineConfig(num_pages=400, max_num_seqs=4, tensor_parallel_size=2, **settings)

    def work(group):
        ranks = SimpleNamespace(group=group, watch=Quiet())
        engine = LockstepEngine(random_model(config, group=group), settings, ranks=ranks)
        engine.check_steps = check_steps
        if group.rank:
            engine.follow()
        else:
            lead(engine)
            group.say((CLOSE,))

    on_ranks(2, work)


def test_a_rank_that_drifts():
    """It knows a prefix that the other does not: found in the step that uses it, before the model runs."""

    def lead(engine):
        engine.add_request(PREFIX, SamplingParams(max_tokens=4))
        engine.step()
        engine.everywhere(add_a_page_on, 1)
        engine.step()  # no difference for this request
        engine.add_request([*range(3, 60), 7, 8], SamplingParams(max_tokens=4))
        engine.step()

    with pytest.raises(RankError, match=f"^{drifted(3)}$"):
        in_threads(lead)


def drifted(step):
    return f"step {step}: rank 1 planned other steps or pages than rank 0"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_no_step(rank):
    """Its requests are gone: it sends nothing, or another message comes than it waits for."""

    def lead(engine):
        engine.add_request(PREFIX, SamplingParams(max_tokens=4))
        engine.step()
        engine.everywhere(end_all_on, rank)
        engine.step()

    with pytest.raises(RankError, match=f"^{drifted(2)}$"):
        in_threads(lead)


def end_all_on(engine, rank):
    if engine.group.rank == rank:
        for request_id in engine.unfinished:
            Engine.abort(engine, request_id)


def test_tables_that_drift():
    """Plans are the same; what the tables say of pages that are full is not."""

    def lead(engine):
        engine.add_request(PREFIX, SamplingParams(max_tokens=4))
        engine.step()
        engine.everywhere(swap_pages_on, 1)
        engine.step()

    with pytest.raises(RankError, match=f"^{drifted(2)}$"):
        in_threads(lead, check_steps=2)


def swap_pages_on(engine, rank):
    if engine.group.rank == rank:
        row = engine.kv.tables.reshape(-1)
        used = row.nonzero()[0][:2]
        row[used] = row[used[::-1]]


def test_ranks_with_other_settings():
    """All of them say which, and who has what."""

    def work(group):
        with pytest.raises(ValueError, match=r"^seed: expected the same on all ranks, got 3 on rank 0 and None on rank 1$"):  # fmt: skip
            expect_same(group, {"device": "cpu", "seed": None if group.rank == 1 else 3})
        expect_same(group, {"device": "cpu", "seed": 3})
        return True

    assert on_ranks(3, work) == [True] * 3


def test_what_a_configuration_has_worked_out_is_no_setting():
    """An engine of before asked one rank's configuration, that of the others is new."""
    asked, new = (replace(get_config("gemma4-e-tiny")) for _ in range(2))
    assert asked.kv_donor(0) == 0 and vars(asked) != vars(new)
    assert declared(asked) == declared(new)


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_that_come_and_go_while_a_step_runs(is_async):
    """They do so at its end, on all ranks; the caller sees it at once."""

    def lead(engine):
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        first, second = (engine.add_request(PREFIX[:20], params, stream=True) for _ in range(2))
        forward, said = engine._forward, []

        def meanwhile(step):
            launched = forward(step)
            if not said:
                said.append(engine.abort(first))
                said.append(engine.add_request(PREFIX[:30], params, request_id=first, stream=True))
                assert engine.unfinished == {first, second}
                with pytest.raises(ValueError, match="expected a new id"):
                    engine.add_request([3], params, request_id=first)
                gone = engine.add_request([5, 6], params)
                said.append(engine.abort(gone))
                assert engine.unfinished == {first, second}
            return launched

        engine.step()
        engine._forward = meanwhile
        streamed, finished = {first: [], second: []}, {}
        while engine.has_work:
            report = engine.step()
            for delta in report.deltas:
                streamed[delta.request_id] += delta.token_ids
            finished |= {o.request_id: o for o in report.finished}
        assert said[0].finish_reason == said[2].finish_reason == "abort"
        assert (said[0].prompt_token_ids, said[2].token_ids) == (tuple(PREFIX[:20]), ())
        assert finished.keys() == {first, second}
        assert finished[first].prompt_token_ids == tuple(PREFIX[:30])
        # Of the aborted one nothing came after it was.
        assert tuple(streamed[first]) == finished[first].token_ids
        assert len(said[0].token_ids) == (0 if is_async else 1)
        assert engine.kv.num_free_slots == 4

    in_threads(lead, async_scheduling=is_async)


def test_shapes_that_one_rank_cannot_capture():
    """No rank replays them: the others would send sums of other sizes."""
    shapes = [Shape(1, 1), Shape(2, 1), Shape(4, 1)]

    def work(group):
        def add(shape):
            if group.rank == 1 and shape.num_seqs == 2:
                raise RuntimeError("no memory")

        return capture_each(shapes, add, "decode graphs", group)

    with pytest.warns(RuntimeWarning, match="2 x 1"):
        assert on_ranks(2, work) == [[Shape(1, 1), Shape(4, 1)]] * 2


def test_a_rank_that_dies_before_it_is_watched(monkeypatch):
    polls = iter([None, None, -9, -9])

    class Process:
        returncode = -9

        def poll(self):
            return next(polls)

        def kill(self):
            pass

        def wait(self, seconds=None):
            return -9

    def meet(ranks, *_):
        raise RuntimeError("Connection reset by peer")

    monkeypatch.setattr(Ranks, "_start", lambda ranks, *_: ranks.processes.append(Process()))
    monkeypatch.setattr(Ranks, "_meet", meet)
    monkeypatch.setattr(launch, "launched", lambda: (1, 0))
    with pytest.raises(
        RankError, match=r"^rank 1 ended at its start, with exit status -9: Connect"
    ):
        Ranks(2, "cpu", timeout=20, work={})


@pytest.mark.nightly
def test_two_launchers_as_of_two_machines():
    """The first prints what was generated; where options differ, both end and say which."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]  # fmt: skip
    program = ["-m", "quire.models.generate", "--model", "llama-tiny", "--device", "cpu"]
    for others, status in ((["--seed", "0"], 0), (["--context-parallel-size", "2"], 1)):
        nodes = [
            subprocess.Popen(
                [*torchrun, "--node-rank", str(node), *program, *options],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT.parent,
            )
            for node, options in enumerate((["--prompt", "Once", "--max-tokens", "8"], others))
        ]  # fmt: skip
        (first, one), (second, two) = (node.communicate(timeout=200) for node in nodes)
        assert [node.returncode for node in nodes] == [status] * 2, one + two
        assert bool(first.strip()) == (status == 0) and not second
        if status:
            assert "context_parallel_size: expected the same on all ranks, got 1 on rank 0 and 2" in one + two  # fmt: skip


def test_machines_that_announce_addresses_of_nobody_else(monkeypatch):
    def refused(backend, timeout):
        raise RuntimeError("Gloo connectFullMesh failed")

    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", refused)
    with pytest.raises(RankError, match=r"do not reach each other.* GLOO_SOCKET_IFNAME: Gloo conn"):
        launched()


def test_what_ranks_refuse():
    config = EngineConfig(num_pages=10, tensor_parallel_size=2)
    model = random_model(get_config("llama-tiny"))
    with pytest.raises(ValueError, match="tensor_parallel_size: expected 1 with a built model"):
        LLM(model, engine=config)
    with pytest.raises(
        ValueError, match="tensor_parallel_size: expected 1, the ranks of this model"
    ):
        Engine(model, config)
    with pytest.raises(ValueError, match=r"expected one of \[1, 2, 4\] for 'llama-tiny', whose num_heads=4, num_kv_heads=2 .*, got 3"):  # fmt: skip
        LLM("llama-tiny", engine=replace(config, tensor_parallel_size=3))
    with pytest.raises(ValueError, match=r"expected one of \[1, 2\] .* num_heads=4 and o_groups=2 are divided, got 4"):  # fmt: skip
        LLM("deepseek-v4-tiny", engine=replace(config, tensor_parallel_size=4))
    with pytest.raises(ValueError, match="host_cache_gib, disk_cache: expected none with tensor_"):
        LLM("llama-tiny", engine=replace(config, host_cache_gib=1.0))
    for field, value in (("tensor_parallel_size", 0), ("rank_timeout", 0), ("rank_timeout", "1")):
        with pytest.raises(ValueError, match=f"^{field}: expected"):
            EngineConfig(**{field: value})


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["launched", "started"])
def test_each_rank_is_killed_at_random_steps(how):
    """Who survives says who died, and ends."""
    command = [sys.executable, "-m", "tests.support.models.rank_kills", how, str(SIZE), str(KILLS)]
    done = subprocess.run([*command, str(SEED)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.count("killed") == SIZE
    print(done.stdout)
