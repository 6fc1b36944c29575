"""Ranks that run one model: logits, tokens and messages are those of one rank; what cannot be is refused. Ranks are threads here, but for the last tests."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from quire.models.config.named import get_config
from quire.models.deepseek_v4.config import DSparkConfig
from quire.models.deepseek_v4.drafters import DSparkDrafter, MTPDrafter
from quire.models.engine.config import EngineConfig
from quire.models.engine.engine import Engine
from quire.models.engine.graphs import DecodeGraphs, GraphShape
from quire.models.engine.memory import model_cache, pages_of_request
from quire.models.engine.request import SamplingParams
from quire.models.engine.speculative import NGramDrafter
from quire.models.llm import LLM
from quire.models.loading.random_weights import random_model
from quire.models.parallel import launch
from quire.models.parallel.heartbeat import RankError
from tests.models.engine.test_prompt_logprobs import check
from tests.support.models.few import few
from tests.support.models.ranks import on_ranks, run_on_ranks
from tests.support.models.tolerance import tolerance
from tests.support.models.toy import finish

FAMILIES = ("llama-tiny", "gemma3-tiny", "gemma4-tiny", "gemma4-e-tiny", "gemma4-moe-tiny", "gpt-oss-tiny", "deepseek-v4-tiny", "dspark")  # fmt: skip
ROOT = Path(__file__).resolve().parents[3]
MAX_TOKENS = 12
PREFIX = torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(7)).tolist()
PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)


def config_of(name):
    if name == "dspark":
        stages = DSparkConfig(3, 5, 250, 8, (0, 1, 2))
        return replace(few("deepseek-v4-tiny"), dspark=stages)
    config = few(name)
    return replace(config, num_mtp_layers=1) if name == "deepseek-v4-tiny" else config


def prompts():
    """Some share a prefix, one repeats itself, one comes again."""
    tails = torch.randint(3, 259, (4, 9), generator=torch.Generator().manual_seed(8)).tolist()
    return [*(PREFIX + tail for tail in tails), tails[0] * 8, PREFIX + tails[1]]


def run(engine, params=PARAMS):
    """Outputs by prompt; the last two come when the first have ended, with one that is drawn."""
    outputs, given = {}, prompts()
    for wave in (range(4), range(4, len(given))):
        for i in wave:
            engine.add_request(given[i], params, request_id=str(i))
        outputs |= {o.request_id: o for o in finish(engine)}
        if len(outputs) == 4:
            drawn = replace(params, temperature=0.8, repetition_penalty=1.2, logprobs=2, seed=3)
            engine.add_request(given[0], drawn, request_id="drawn")
    # Where rounding decides, a draw may differ between one rank and several.
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


def ngram(model, max_draft_tokens):
    return NGramDrafter(max_draft_tokens, min_ngram=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_model_on_several_ranks(name):
    """Logits up to the order of sums; tokens with hits, chunks, drafts and preemption; bytes of messages."""
    config, size = config_of(name), 2
    one, ids = random_model(config, seed=5), torch.tensor(prompts()[0])
    allowed = tolerance(one)

    def forward(group):
        part = random_model(config, seed=5, group=group)
        logits = part.full_forward(ids)
        group.sent.clear()
        part.full_forward(ids[:8])
        return logits, dict(group.sent), model_cache(part, max_requests=4, max_draft_tokens=2, drafter_layers=True)  # fmt: skip

    logits, sent, cache = on_ranks(size, forward)[0]
    assert (logits - one.full_forward(ids)).abs().max() <= allowed
    # Of each token: the embedding, and two parts of a layer, or three; of E models inputs of all layers. Of each row: logits.
    layers = len(config.layer_types)
    sums = 1 + layers * (3 if name == "gemma4-moe-tiny" else 2)
    values = sums * config.hidden_size + layers * getattr(config, "per_layer_input_size", 0)
    assert sent == {"sum": 8 * 4 * values, "gather": 8 * 4 * -(-config.vocab_size // size)}

    longest = len(PREFIX) + 9 + MAX_TOKENS
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        # Not enough for the running ones.
        "num_pages": 1 + int(1.5 * pages_of_request(cache.groups, longest, 2)),
        "max_model_len": longest + 3,
        "decode_graphs": name in ("gemma4-tiny", "gemma4-e-tiny"),
    }

    def work(engine):
        outputs = run(engine)
        engine.kv.check_invariants()
        # Replayed graphs make no calls, and the heartbeat wants to see progress in each step.
        assert engine.model.group.calls["step"] >= engine.totals.num_steps
        return outputs, engine.totals, engine.memory

    drafter = {"deepseek-v4-tiny": MTPDrafter, "dspark": DSparkDrafter}.get(name, ngram)
    draft = partial(drafter, max_draft_tokens=2)
    outputs, totals, memory = run_on_ranks(size, config, work, drafter=draft, **settings)
    alone = Engine(one, EngineConfig(max_num_seqs=4, num_pages=2000))
    assert_same_tokens(one, outputs, run(alone), allowed)
    assert max(o.num_cached_tokens for o in outputs) >= 16
    assert totals.num_preempted > 0 and totals.num_drafts > 0
    # A rank holds its share of the KV heads, at least one.
    heads = 1 if drafter is not ngram else config.full.num_kv_heads
    assert memory.bytes_per_token == alone.memory.bytes_per_token * max(1, heads // size) / heads


@pytest.mark.parametrize(
    ("name", "size", "settings"),
    [
        ("llama-tiny", 2, {"async_scheduling": True}),
        ("gpt-oss-tiny", 2, {"async_scheduling": True, "decode_graphs": True}),
        ("gemma3-tiny", 2, {"kv_cache_dtype": "fp8", "enable_caching": False}),
        ("deepseek-v4-tiny", 2, {"rejection_sample_method": "standard", "drafts": 3}),
        ("deepseek-v4-tiny", 2, {"decode_graphs": True, "drafts": 3}),
        ("gemma4-tiny", 4, {}),  # more than KV heads
    ],
    ids=["async", "async-graphs", "fp8", "drawn-drafts", "drafts-graphs", "more-than-kv-heads"],
)
def test_settings_of_one_rank_serve_several(name, size, settings):
    config, settings = config_of(name), {"max_num_seqs": 4, "num_pages": 600, **settings}
    drafts = settings.pop("drafts", 0)
    drafter = partial(MTPDrafter, max_draft_tokens=drafts) if drafts else None
    one = random_model(config, seed=5)
    alone = Engine(one, EngineConfig(**settings), drafter=drafter and drafter(one))
    outputs = run_on_ranks(size, config, run, drafter=drafter, **settings)
    assert_same_tokens(one, outputs, run(alone), tolerance(one))


@pytest.mark.parametrize("name", ["llama-tiny", "gemma4-e-tiny"])
def test_prompt_logprobs(name):
    """Beside requests whose tokens the other rank gets a step ahead."""
    config = config_of(name)

    def work(engine):
        scored = replace(PARAMS, prompt_logprobs=3)
        for i, ids in enumerate(prompts()):
            engine.add_request(ids, scored if i % 2 else PARAMS, request_id=str(i))
        return finish(engine)

    settings = {"max_num_seqs": 3, "max_num_batched_tokens": 30, "async_scheduling": True}
    outputs = run_on_ranks(2, config, work, num_pages=600, **settings)
    one = random_model(config, seed=5)
    wanted = work(Engine(one, EngineConfig(num_pages=600, **settings)))
    assert_same_tokens(one, *(sorted(o, key=lambda x: x.request_id) for o in (outputs, wanted)), tolerance(one))  # fmt: skip
    for output in outputs:
        if int(output.request_id) % 2:
            check(one, output)


class FailsFor(NGramDrafter):
    """A drafter that one request makes fail; only rank 0 has requests."""

    def propose(self, requests):
        if any(request.request_id == "bad" for request in requests):
            raise ValueError("this one")
        return super().propose(requests)


def test_a_request_that_fails_alone():
    def work(engine):
        outputs = {}
        for ids in (("good", "bad"), ("later",)):
            for request_id in ids:
                engine.add_request(PREFIX, PARAMS, request_id=request_id)
            outputs |= {o.request_id: o for o in finish(engine)}
        return outputs

    outputs = run_on_ranks(2, few("llama-tiny"), work, drafter=lambda m: FailsFor(2), num_pages=100)
    assert "this one" in str(outputs["bad"].error)
    assert outputs["good"].token_ids == outputs["later"].token_ids
    assert len(outputs["good"].token_ids) == MAX_TOKENS


def test_a_step_that_fails_ends_all():
    """The other ranks may be anywhere in it."""

    def work(engine):
        engine.add_request(PREFIX, PARAMS)
        engine.step()
        engine.runner.forward = None  # what cannot be called
        with pytest.raises(TypeError):
            engine.step()
        with pytest.raises(RankError, match=r"^rank 0 failed: TypeError: 'NoneType'"):
            engine.step()

    with pytest.raises(threading.BrokenBarrierError):  # of rank 1
        run_on_ranks(2, few("llama-tiny"), work, num_pages=100)


def test_shapes_that_one_rank_cannot_capture():
    """No rank replays them: the others would send sums of other sizes."""

    def work(group):
        graphs = DecodeGraphs(
            None, None, sizes=[1, 2, 4], max_seq_len=9, device=torch.device("cpu"), group=group
        )

        def add(shape):
            if group.rank == 1 and shape.num_seqs == 2:
                raise RuntimeError("no memory")

        graphs.add = add
        graphs.capture()
        return graphs.shapes

    with pytest.warns(RuntimeWarning, match="2 x 1"):
        assert on_ranks(2, work) == [[GraphShape(1, 1), GraphShape(4, 1)]] * 2


@pytest.mark.parametrize(
    ("model", "settings", "error", "message"),
    [
        (None, {}, ValueError, "tensor_parallel_size: expected 1 with a built model"),
        ("llama-tiny", {"tensor_parallel_size": 3}, ValueError,
         r"expected one of \[1, 2, 4\] for 'llama-tiny', whose num_heads=4, num_kv_heads=2 .*, got 3"),
        ("deepseek-v4-tiny", {"tensor_parallel_size": 4}, ValueError,
         r"expected one of \[1, 2\] .* num_heads=4 and o_groups=2 are divided, got 4"),
        ("llama-tiny", {"host_cache_gib": 1.0}, NotImplementedError, "host_cache_gib: supported with"),
        ("llama-tiny", {}, ValueError, "expected arguments that can be sent to another process"),
    ],
)  # fmt: skip
def test_what_ranks_refuse(model, settings, error, message):
    config = replace(EngineConfig(num_pages=10, tensor_parallel_size=2), **settings)
    built = random_model(get_config("llama-tiny")) if model is None else model
    options = {} if model is None or settings else {"drafter": lambda model: None}
    with pytest.raises(error, match=message):
        LLM(built, engine=config, **options)
    if model is None:
        with pytest.raises(ValueError, match="tensor_parallel_size: expected 1, the ranks of this"):
            Engine(built, config)


# Processes.


def test_versions_and_files_that_differ(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
    first = launch.versions_and_files(tmp_path)
    launch.expect_equal([first] * 3)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(600_000)
        file.write(bytes(20_000))
    for other in (launch.versions_and_files(tmp_path), launch.versions_and_files(None)):
        with pytest.raises(ValueError, match=r"rank 2 has model\.safetensors .*, rank 0 \[1048576"):
            launch.expect_equal([first, first, other])


@pytest.mark.parametrize(
    "reason", ["expected one with MTP layers", "rank 1 has torch .*, rank 0 9"]
)
def test_an_engine_that_cannot_be_made_leaves_no_process(reason, monkeypatch):
    started, popen = [], subprocess.Popen
    if "torch" in reason:
        found = launch.versions_and_files(None) | {"torch": "9"}
        monkeypatch.setattr(launch, "versions_and_files", lambda directory: found)
    monkeypatch.setattr(
        launch.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    config = EngineConfig(num_pages=100, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=reason):
        LLM("llama-tiny", engine=config, drafter=MTPDrafter)
    assert [process.poll() is not None for process in started] == [True]
    assert not dist.is_initialized()


@pytest.fixture(scope="module")
def llm():
    made = LLM("llama-tiny", engine=EngineConfig(num_pages=100, tensor_parallel_size=2))
    yield made
    made.close()
    # It ends by itself, or is killed where leaving Python takes more than SECONDS_TO_END.
    processes = made.engine._ranks.ranks.processes.values()
    assert all(process.poll() in (0, -signal.SIGKILL) for process in processes)


def test_processes_give_the_tokens_of_one_rank(llm):
    alone = LLM("llama-tiny", engine=EngineConfig(num_pages=100))
    drawn = replace(PARAMS, temperature=0.8, seed=5)
    for params in (PARAMS, drawn):
        outputs, wanted = (one.generate(prompts(), params, progress=False) for one in (llm, alone))
        assert_same_tokens(alone.model, outputs, wanted, tolerance(alone.model))


def test_nothing_listens_on_all_interfaces(llm):
    """As /proc/net has it: state 0A is LISTEN; 0100007F is 127.0.0.1."""
    pids = [os.getpid(), *(p.pid for p in llm.engine._ranks.ranks.processes.values())]
    sockets = set()
    for fd in (fd for pid in pids for fd in Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(OSError):  # closed meanwhile
            sockets.add(os.readlink(fd))
    files = [Path(f"/proc/net/{family}").read_text() for family in ("tcp", "tcp6")]
    rows = [row.split() for text in files for row in text.splitlines()]
    listening = {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}
    assert listening and {address.split(":")[0] for address in listening} == {"0100007F"}


def test_a_process_has_one_model_at_a_time(llm):
    config = EngineConfig(num_pages=10, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="tensor_parallel_size: expected ranks without a model"):
        LLM("llama-tiny", engine=config)
    with pytest.raises(ValueError, match="tensor_parallel_size: expected 2, the ranks, got"):
        LLM("llama-tiny", engine=replace(config, tensor_parallel_size=4))


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_a_call_and_no_more(llm):
    wanted = llm.generate(prompts(), PARAMS, progress=False)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.generate(prompts(), PARAMS, progress=False)
    again = llm.generate(prompts(), PARAMS, progress=False)
    assert [o.token_ids for o in again] == [o.token_ids for o in wanted]


@pytest.mark.nightly
def test_two_launchers_as_of_two_machines():
    """The first prints what was generated; options are those of the first."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port)]  # fmt: skip
    program = ["-m", "quire.models.generate", "--model", "llama-tiny", "--device", "cpu"]
    nodes = [
        subprocess.Popen(
            [*torchrun, "--node-rank", str(node), *program, *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT.parent,
        )
        for node, options in enumerate((["--prompt", "Once", "--max-tokens", "8"], ["--max-num-seqs", "2"]))
    ]  # fmt: skip
    (first, one), (second, two) = (node.communicate(timeout=200) for node in nodes)
    assert [node.returncode for node in nodes] == [0, 0], one + two
    assert first.strip() and not second
