"""Sampling against plain loops over one row at a time, and its promises: the same draws whatever else is in the batch."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quire.bench.common.bounds import bounded, bounding
from quire.kernels import sample_tokens
from quire.kvcore.device import Staging
from quire.models.engine.outputs import NO_TOKEN
from quire.models.engine.request import SamplingParams
from quire.models.engine.sampler import (
    Sampler,
    derived_seed,
    draw,
    draw_columns,
    penalize,
    uniform,
)
from quire.models.engine.speculative import NGramDrafter
from tests.models.engine.test_engine import DEVICE, Recorder, build, prompt
from tests.support.helpers import assert_within_budget

CPU = Staging("cpu")


def plain_probabilities(logits, p):
    """The rules one after another, in float64, with lists and loops."""
    logits = [x / p.temperature for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if p.top_k:
        order = order[: p.top_k]
    top = logits[order[0]]
    mass = {i: math.exp(logits[i] - top) for i in order}
    total, kept, before = sum(mass.values()), [], 0.0
    for i in order:
        if not kept or before < p.top_p or p.top_p == 1:
            kept.append(i)
        before += mass[i] / total
    kept = [i for i in kept if mass[i] >= p.min_p * mass[kept[0]]]
    total = sum(mass[i] for i in kept)
    return [mass[i] / total if i in kept else 0.0 for i in range(len(logits))]


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3125),
    SamplingParams(temperature=7.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=500),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.5, top_p=0.9, top_k=11),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=0.8125, top_k=20, top_p=0.8, min_p=0.05),
]


def probabilities(logits, params):
    """Probabilities that rows are drawn from."""
    [given] = draw_columns(params, [np.zeros(len(params))], CPU)
    probs = torch.empty_like(logits)
    sample_tokens(logits, **given, probs=probs)
    return probs


def test_filters_equal_plain_loops():
    logits = 3 * torch.randn(len(PARAMS), 97, generator=torch.Generator().manual_seed(0))
    got = probabilities(logits, PARAMS)
    for row, one, p in zip(got, logits, PARAMS, strict=True):
        expected = torch.tensor(plain_probabilities(one.tolist(), p), dtype=torch.float64)
        assert torch.equal(row > 0, expected > 0), p
        with bounding():  # weights of all tokens, then of those that stay
            mass = torch.softmax((one.double() - one.double().amax()) / p.temperature, 0)
            mass = mass.masked_fill(expected == 0, 0.0)
            mass = mass / mass.sum()
        exact = bounded(expected, mass.error)
        assert_within_budget(f"{p}", row, exact)
        # torch's vector and scalar code differ in the last bits, and which one a number meets depends on its place.
        alone = probabilities(one[None], [p])[0]
        assert torch.equal(alone > 0, expected > 0), p
        assert_within_budget(f"{p} alone", alone, exact)


@pytest.mark.parametrize("temperature", [1e-30, 1e-300, 1e30])
def test_extreme_temperatures_stay_finite(temperature):
    params = [SamplingParams(temperature=temperature)]
    got = probabilities(torch.tensor([[1e4, -1e4, 0.0]]), params)[0]
    logits = [0.0] * 3 if temperature > 1 else [0.0, -math.inf, -math.inf]
    with bounding():
        expected = torch.softmax(torch.tensor(logits, dtype=torch.float64), 0)
    assert_within_budget("probabilities", got, expected)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # the interpreter's numbers
def test_inversion_takes_the_first_id_whose_cumulative_mass_exceeds_u(impl):
    """u within rounding of a border apart."""
    mass = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    u = [0.0, 0.2499, 0.2501, 0.7499, 0.7501, 1 - 2**-32, 0.5]
    rows = torch.stack([mass * scale for scale in (1, 3, 1e-30, 1e30, 1, 3)] + [mass * torch.nan])
    ids = draw(rows, torch.tensor(u, dtype=torch.float64), impl)
    assert ids.tolist() == [1, 1, 3, 3, 4, 4, NO_TOKEN]


def test_draws_follow_the_distribution():
    """Pearson's chi-squared over 40,000 draws; for 30 degrees of freedom 99.99 % lie below 72."""
    n = 40_000
    logits = torch.randn(1, 31, generator=torch.Generator().manual_seed(1))
    mass = probabilities(logits, [SamplingParams(temperature=1.0)])
    for u in (uniform([5] * n, range(n)), uniform(range(n), [7] * n)):
        ids = draw(mass.expand(n, -1), torch.from_numpy(u))
        counts = torch.bincount(ids, minlength=31).double()
        expected = n * mass[0].double()
        assert ((counts - expected) ** 2 / expected).sum() < 72
    # Neighbours are independent: of seeds, of positions, and of purposes.
    base = uniform(range(n), [3] * n)
    for other in (
        uniform(range(1, n + 1), [3] * n),
        uniform(range(n), [4] * n),
        uniform(range(n), [3] * n, 1),
    ):
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / math.sqrt(n)
    assert base.min() >= 0 and base.max() < 1


def test_seeds_of_samples():
    assert derived_seed(7, 0) == 7
    assert len({derived_seed(seed, sample) for seed in range(20) for sample in range(20)}) == 400
    assert uniform([-1], [0]) == uniform([2**64 - 1], [0])


def test_penalty_equals_a_plain_loop():
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(2))
    seen = torch.rand(2, 50, generator=torch.Generator().manual_seed(3)) < 0.4
    penalty = torch.tensor([1.5, 0.5], dtype=torch.float64)
    got = penalize(logits, seen, penalty)
    for r in range(2):
        for i in range(50):
            x, f = logits[r, i].item(), penalty[r].item()
            expected = (x / f if x > 0 else x * f) if seen[r, i] else x
            assert got[r, i].item() == np.float32(expected)


@pytest.mark.parametrize("packed", [False, True])
def test_staging_keeps_shapes_dtypes_and_values(packed):
    arrays = [
        np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::2],
        np.array([], dtype=np.int32),
        np.array([[1.5]], dtype=np.float32),
        np.arange(4, dtype=np.int32),
        np.array([2.5, 3.5]),
    ]
    for array, tensor in zip(arrays, Staging("cpu", packed=packed).send(arrays), strict=True):
        assert np.array_equal(array, tensor.numpy()) and tensor.numpy().dtype == array.dtype


# In the engine.

MIXED = (
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.0, "top_k": 5, "seed": 2},
    {},
    {"temperature": 1.0, "top_p": 0.7, "seed": 1, "repetition_penalty": 1.3},
    {"repetition_penalty": 1.8, "logprobs": 2},
    {"temperature": 1.5, "min_p": 0.1, "seed": 3, "logprobs": 0},
)


class Reads(TorchDispatchMode):
    """Counts operators that wait for a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")
        self.count += func.name().removeprefix("aten::").split(".")[0] in waits
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("method", ["strict", "standard"])
@pytest.mark.skipif(DEVICE != "cpu", reason="on a device engines sample in Triton anyway")
def test_the_sampler_in_triton_draws_the_same_and_reads_nothing(method):
    """With penalties, drafts and log-probabilities."""

    def outputs(impl):
        settings = {
            "max_num_seqs": 6,
            "max_num_batched_tokens": 512,
            "rejection_sample_method": method,
        }
        run = Recorder(build("gemma3-tiny"), drafter=NGramDrafter(2, min_ngram=1), **settings)
        vocab_size = run.engine.model.config.vocab_size
        placeholders = run.engine.runner.builder.sampled
        sampler = Sampler(vocab_size, 6, "cpu", placeholders, rejection_sample_method=method, impl=impl)  # fmt: skip

        def sample(*args):
            with reads:
                return sampler(*args)

        reads, run.engine._sampler = Reads(), sample
        # Whatever is drawn has been there, so that the next one is guessed.
        ids = [run.add(list(range(3, 259)), 3, sampling=s) for s in MIXED]
        run.run()
        assert run.engine.totals.num_drafts > 0
        return [(run.outputs[i].token_ids, run.outputs[i].logprobs) for i in ids], reads.count

    plain, num_reads = outputs("torch")
    in_triton, none = outputs("triton")
    assert [ids for ids, _ in in_triton] == [ids for ids, _ in plain]
    assert [logprobs for _, logprobs in in_triton] == [logprobs for _, logprobs in plain]
    assert num_reads > 0 and none == 0


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # the interpreter's numbers
def test_rows_that_give_no_token_give_none_to_rejection_either(impl):
    none = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    sampler = Sampler(7, 1, DEVICE, none, rejection_sample_method="standard", impl=impl)
    params = SamplingParams(temperature=1.0, top_k=3)
    drafts = np.array([1, 2], dtype=np.int32)
    request = SimpleNamespace(
        params=params,
        seed=1,
        num_output=0,
        num_output_placeholders=0,
        drafts=drafts,
        draft_probs=None,
    )
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    first = sampler(logits, [request], [3], none)
    first.wait()
    assert all(0 <= token < 7 for token in first.ids)
    logits[1, 4] = math.nan
    sampled = sampler(logits, [request], [3], none)
    sampled.wait()
    assert sampled.device_ids.min() >= 0
    assert sampled.ids == [first.ids[0], NO_TOKEN, first.ids[2]]


def test_logprobs_are_the_models_own():
    run = Recorder(build("gemma3-tiny"))
    request_id = run.add(
        prompt(9), 6, sampling={"logprobs": 3, "temperature": 2.0, "seed": 4, "top_k": 40}
    )
    other = run.add(prompt(9), 6, sampling={"logprobs": 0})
    plain = run.add(prompt(9), 6)
    run.run()
    output = run.outputs[request_id]
    assert len(output.logprobs) == 6
    for entry, token, logits in zip(
        output.logprobs, output.token_ids, run.logits[request_id], strict=True
    ):
        with bounding():
            expected = logits.double() - torch.logsumexp(logits.double(), -1)
        best = logits.topk(3).indices
        assert [i for i, _ in entry.top] == best.tolist()
        found = torch.tensor([entry.logprob, *(x for _, x in entry.top)])
        assert_within_budget("logprobs", found, expected[torch.tensor([token, *best])])
    assert [entry.top for entry in run.outputs[other].logprobs] == [()] * 6
    assert run.outputs[plain].logprobs is None


def test_samples_share_the_pages_of_their_prompt():
    run = Recorder(build("gemma3-tiny"), max_num_batched_tokens=64)
    a = run.engine.kv.alignment
    tokens = prompt(3 * a + 5)
    outputs = {}
    run.engine.add_request(
        tokens, SamplingParams(6, temperature=1.0, seed=9, n=4, ignore_eos=True), request_id="r"
    )
    peak = 0
    while run.engine.has_work:
        report = run.engine.step()
        peak = max(peak, run.engine.kv.stats()["pages_in_use"])
        run.engine.kv.check_invariants()
        outputs |= {(o.request_id, o.sample): o for o in report.finished}
    assert sorted(outputs) == [("r", i) for i in range(4)]
    assert [outputs["r", i].num_cached_tokens for i in range(4)] == [0, 3 * a, 3 * a, 3 * a]
    # Nothing but the rest behind the last boundary was computed again, and the shared pages are there once.
    assert run.engine.totals.num_tokens == (3 * a + 5) + 3 * 5 + 4 * 5
    alone = Recorder(build("gemma3-tiny"), enable_caching=False, max_num_batched_tokens=64)
    alone.engine.add_request(
        tokens, SamplingParams(6, temperature=1.0, seed=9, n=4, ignore_eos=True)
    )
    apart = 0
    while alone.engine.has_work:
        for o in alone.engine.step().finished:
            assert o.token_ids == outputs["r", o.sample].token_ids
        apart = max(apart, alone.engine.kv.stats()["pages_in_use"])
    assert peak < 0.75 * apart
    assert len({o.token_ids for o in outputs.values()}) == 4
    one = run.add(tokens, 6, sampling={"temperature": 1.0, "seed": 9})
    run.run()
    assert run.outputs[one].token_ids == outputs["r", 0].token_ids


def test_seeds_of_their_own_differ_but_not_from_run_to_run():
    def outputs(seed):
        run = Recorder(build("gemma3-tiny"), seed=seed)
        ids = [run.add(prompt(9), 8, sampling={"temperature": 1.0}) for _ in range(3)]
        run.run()
        return [run.outputs[i].token_ids for i in ids]

    assert outputs(0) == outputs(0) != outputs(1)
    assert len(set(outputs(0))) == 3


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, r"temperature: expected a number in \[0, 1e30\], got -1"),
        ({"temperature": float("nan")}, "temperature: expected a number"),
        ({"top_k": -1}, r"top_k: expected an int >= 0 \(0 = all\), got -1"),
        ({"top_p": 0}, r"top_p: expected a number in \(0, 1\], got 0"),
        ({"min_p": 2}, r"min_p: expected a number in \[0, 1\], got 2"),
        (
            {"repetition_penalty": 0},
            r"repetition_penalty: expected a number in \[1e-30, 1e30\], got 0",
        ),
        ({"n": 0}, r"n: expected an int in 1\.\.16384, got 0"),
        ({"logprobs": 65}, r"logprobs: expected None or 0\.\.64, got 65"),
        ({"stop": ("a", "")}, "stop: expected strings that are not empty, got ''"),
        # Of another type: some of these would fail in the middle of a step, some would be rounded.
        ({"max_tokens": 0}, "max_tokens: expected an int >= 1, got 0"),
        ({"max_tokens": 2.5}, "max_tokens: expected an int >= 1, got 2.5"),
        ({"max_tokens": None}, "max_tokens: expected an int >= 1, got None"),
        ({"temperature": "1"}, r"temperature: expected a number in \[0, 1e30\], got '1'"),
        ({"top_k": 10**30}, "top_k: expected an int"),
        ({"top_k": 2.5}, "top_k: expected an int"),
        ({"seed": 1.5}, "seed: expected None or an int, got 1.5"),
        ({"n": 2.0}, r"n: expected an int in 1\.\.16384, got 2.0"),
        ({"logprobs": True}, r"logprobs: expected None or 0\.\.64, got True"),
        ({"logprobs": 2.0}, r"logprobs: expected None or 0\.\.64, got 2.0"),
        ({"stop": (5,)}, "stop: expected strings that are not empty, got 5"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids: expected ints, got 'a'"),
        ({"ignore_eos": "no"}, "ignore_eos: expected True or False, got 'no'"),
        ({"skip_special_tokens": 1}, "skip_special_tokens: expected True or False, got 1"),
        ({"stop": ("x" * 4000, "y" * 97)}, "stop: expected at most 4096 characters in all"),
        ({"stop": 7}, "stop: expected a sequence, got 7"),
        ({"stop_token_ids": range(10**9)}, "stop_token_ids: expected at most 1048576, got more"),
        ({"stop_token_ids": 2.5}, "stop_token_ids: expected a sequence, got 2.5"),
    ],
)
def test_bad_params(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_params_of_other_libraries_types():
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(1), stop=None, stop_token_ids=7
    )
    assert params.stop == () and params.stop_token_ids == (7,)
    assert SamplingParams(stop="a", stop_token_ids=[1, 2]).stop == ("a",)
    assert SamplingParams(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))
