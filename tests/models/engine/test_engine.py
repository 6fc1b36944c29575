"""The engine on the real allocator: its logits are those of each sequence without a cache."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from quire.models.config.model import FULL, SLIDING
from quire.models.config.named import get_config
from quire.models.engine import engine as runner
from quire.models.engine import report
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import Sampled
from quire.models.engine.speculative import NGramDrafter
from quire.models.loading.random_weights import random_model
from tests.support.models.tolerance import tolerance

# With a GPU, all of this runs on the Triton kernels.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Recorder:
    """Runs an engine, keeps the logits of every sampled token, and distrusts the pool: after each
    step the allocator recounts its pages, and free pages become NaN.
    """

    def __init__(self, model, *, drafter=None, tokenizer=None, **settings):
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 48, "num_pages": 600} | settings
        # Replayed graphs do not call the model's hooks, and the device does not see forced tokens.
        settings.setdefault("decode_graphs", False)
        settings.setdefault("async_scheduling", False)
        config = EngineConfig(**settings)
        self.engine = Engine(model, config, drafter=drafter, tokenizer=tokenizer)
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.outputs, self.reports = {}, []
        self.forced: dict[str, list[int]] = {}  # tokens to "sample" instead
        self._poison(torch.arange(self.engine.kv.num_pages))
        forward, tokens_of = self.engine._forward, self.engine._tokens
        sampled_from = {}

        def recording(step):
            last = []
            hook = model.register_forward_hook(
                lambda module, args, out: last.append(out[0] if isinstance(out, tuple) else out)
            )
            forward(step)
            hook.remove()
            sampled_from[step] = last[0]

        def forcing(step):
            new = tokens_of(step)
            rows = iter(sampled_from.pop(step))
            drafts = dict(zip(step.requests, step.num_drafts, strict=True))
            for tokens in new:
                request, here = tokens.request, tokens.request.request_id
                own = [next(rows) for _ in range(1 + drafts[request])]
                self.logits.setdefault(here, []).extend(own[: len(tokens.ids)])
                if here in self.forced:
                    tokens.ids[0] = self.forced[here][request.num_tokens]
            return new

        self.engine._forward, self.engine._tokens = recording, forcing

    def _poison(self, pages):
        for slot in self.engine.pool.tensors:
            slot.view(self.engine.model.dtype).index_fill_(0, pages.to(DEVICE), float("nan"))

    def run(self, max_steps=100_000):
        for _ in range(max_steps):
            report = self.engine.step()
            if report is None:
                break
            self.reports.append(report)
            self.outputs |= {output.request_id: output for output in report.finished}
            self.engine.kv.check_invariants()
            self._poison(torch.from_numpy(self.engine.kv.pool.free_pages().astype("int64")))
        return self.outputs

    def add(self, prompt, max_tokens=8, *, sampling=None, **options):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **(sampling or {}))
        return self.engine.add_request(prompt, params, **options)

    def check(self, request_id):
        """All logits of a finished request against a run of its whole sequence without a cache."""
        output = self.outputs[request_id]
        sequence = torch.tensor(output.prompt_token_ids + output.token_ids, device=DEVICE)
        first = len(output.prompt_token_ids) - 1
        expected = self.engine.model.full_forward(sequence[:-1])[first:]
        # Accepted drafts may go past the end.
        got = torch.stack(self.logits[request_id])[: len(expected)]
        assert got.shape == expected.shape
        assert (got - expected).abs().max().item() < tolerance(self.engine.model)
        return output


def prompt(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 259, (length,), generator=generator).tolist()


def build(name):
    return random_model(get_config(name), device=DEVICE)


def test_reports_tell_the_lengths_of_each_sequence():
    run = Recorder(build("gemma3-tiny"), max_num_batched_tokens=40)
    run.add(prompt(30), max_tokens=2), run.add(prompt(50), max_tokens=1)
    run.run()
    lengths = [(r.q_lens.tolist(), r.seq_lens.tolist()) for r in run.reports]
    assert lengths == [([10, 30], [10, 30]), ([1, 39], [31, 49]), ([1], [50])]
    output = run.outputs["0"]
    assert output.ttft > 0 and len(output.itl) == 1 and min(output.itl) > 0


def test_each_part_of_a_step_gets_its_own_time(monkeypatch):
    """On a clock that moves within the parts alone, each part has its own time."""
    now = 0.0
    monkeypatch.setattr(report, "perf_counter", lambda: now)
    monkeypatch.setattr(report, "thread_time", lambda: 2 * now)
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: now))

    class Event:
        """An event of a GPU's stream, on the same clock."""

        def __init__(self):
            self.at = now

        def query(self):
            return True

        def elapsed_time(self, end):
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(report, "_recorded_event", Event)
    drafter = NGramDrafter(2, min_ngram=1)
    # A replayed graph builds no batch, and calls no model.
    config = EngineConfig(num_pages=50, decode_graphs=False)
    engine = Engine(build("gemma3-tiny"), config, drafter=drafter)

    def slow(obj, name, seconds):
        call = getattr(obj, name)

        def work(*args, **kwargs):
            nonlocal now
            now += seconds
            return call(*args, **kwargs)

        monkeypatch.setattr(obj, name, work)

    for i, name in enumerate(("match", "admit", "plan", "commit", "release")):
        slow(engine.kv, name, 2**i)
    for obj, name, seconds in (
        (engine.scheduler, "_choose", 100), (drafter, "propose", 200),
        (engine.runner.builder, "build", 400), (engine.runner, "forward", 800),
        (engine, "_sampler", 1600), (Sampled, "wait", 6400), (engine.scheduler, "deliver", 3200),
    ):  # fmt: skip
        slow(obj, name, seconds)
    engine.add_request(prompt(20), SamplingParams(max_tokens=2))
    steps = [engine.step(), engine.step()]
    assert not engine.has_work and report.PARTS == (
        "schedule", "allocator", "draft", "tensors", "model", "sample", "wait", "deliver"
    )  # fmt: skip
    assert steps[0].wall.tolist() == [100, 1 + 2 + 4 + 8, 0, 400, 800, 1600, 6400, 3200]
    assert steps[1].wall.tolist() == [100, 4 + 8 + 16, 200, 400, 800, 1600, 6400, 3200]
    # All but what the device may do meanwhile: tensors, the model and sampling.
    assert [step.idle for step in steps] == [0, 6400 + 3200 + 100 + 4 + 8 + 200]
    for step in steps:
        assert (step.cpu == 2 * step.wall).all() and step.total == step.wall.sum()
        assert report.outside_model(step.cpu) == pytest.approx(1 - 8800 / step.total)
    engine.add_request(prompt(20))
    assert engine.totals.hashing == 2 and engine.totals.total == sum(s.total for s in steps)


def test_a_step_that_ran_ahead_has_the_time_of_its_own_launch(monkeypatch):
    """Not that of the call that delivers it, which launches the next step."""
    now = 0.0
    monkeypatch.setattr(report, "perf_counter", lambda: now)
    monkeypatch.setattr(report, "thread_time", lambda: 2 * now)
    config = EngineConfig(num_pages=50, decode_graphs=False, async_scheduling=True)
    engine = Engine(build("gemma3-tiny"), config)
    forward, wait = engine.runner.forward, Sampled.wait

    def slow_forward(input_ids, *args, **kwargs):
        nonlocal now
        now += len(input_ids)
        return forward(input_ids, *args, **kwargs)

    def slow_wait(sampled):
        nonlocal now
        now += 1000
        return wait(sampled)

    monkeypatch.setattr(engine.runner, "forward", slow_forward)
    monkeypatch.setattr(Sampled, "wait", slow_wait)
    engine.add_request(prompt(20), SamplingParams(max_tokens=2))
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert [s.q_lens.tolist() for s in steps] == [[], [20], [1]]
    launches, waits = ([s.wall[part] for s in steps] for part in (report.MODEL, report.WAIT))
    assert launches == [0, 20, 1] and waits == [0, 1000, 1000]
    assert all((s.cpu == 2 * s.wall).all() for s in steps)
    assert engine.totals.total == sum(s.total for s in steps) == 2021


def test_triton_kernels_drive_the_engine():
    """Chunks, decodes and a prefix hit; few tokens, for the interpreter of Triton."""
    config = replace(get_config("gemma4-tiny"), layer_types=(SLIDING, FULL))
    run = Recorder(random_model(config, device=DEVICE), impl="triton", max_num_batched_tokens=24)
    ids = [run.add(prompt(19), max_tokens=2), run.add(prompt(10, seed=1), max_tokens=3)]
    run.run()
    ids.append(run.add(prompt(19), max_tokens=2))
    run.run()
    assert [run.check(i).num_cached_tokens for i in ids] == [0, 0, 16]
