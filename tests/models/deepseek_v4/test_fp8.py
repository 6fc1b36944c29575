"""DeepSeek-V4 with a quantised cache (``kv_cache_dtype="fp8"``): what is rounded is what the layout says, and nothing else.

The oracle is the dense model, which equals transformers, over the rows that the engine rounded; each of them must be a rounding of its own.
"""

import pytest
import torch

from quire.models.config.named import get_config
from quire.models.deepseek_v4 import attention
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from tests.models.deepseek_v4.test_engine import V4Recorder
from tests.models.engine.test_engine import prompt
from tests.support.models.tolerance import tolerance


@pytest.fixture(scope="module")
def oracle(v4_oracles):
    return v4_oracles["wide"]


@pytest.fixture(scope="module")
def model(oracle):
    return load_model(oracle.path)


def rounding(rows):
    """The largest distance of a right quantisation from its rows, channel by channel: [num_rows, width].

    A block of channels (64 of a latent's first 448, a whole index key) has the least power of two as its scale that brings its largest value
    within 448, so a scale of at most 2 max / 448. A value of 2^-6 scales or more keeps 4 bits and is off by at most 2^-4 of itself; a
    smaller one by half a step of 2^-9 scales. The rotated channels are bf16: 2^-8 of themselves.
    """
    num_blocked, block = (448, 64) if rows.shape[1] == 512 else (rows.shape[1],) * 2
    blocks = rows[:, :num_blocked].unflatten(1, (-1, block)).abs()
    scale = blocks.amax(-1, keepdim=True).clamp(min=1e-4) * 2 / 448
    error = torch.maximum(blocks * 2**-4, scale * 2**-10).flatten(1)
    return torch.cat([error, torch.zeros_like(rows[:, num_blocked:])], dim=1) + rows.abs() * 2**-8


class Seen(V4Recorder):
    """An engine for one request at a time, and the quantised rows that its attention saw.

    rows: by (layer, "raw", "compressed" or "index_keys"), [positions or entries, width]; a request that starts from a hit overwrites those after it.
    """

    def __init__(self, model, monkeypatch, **settings):
        super().__init__(model, kv_cache_dtype="fp8", max_num_batched_tokens=37, **settings)
        self.model, self.rows, names = model, {}, {}
        for layer, cache in enumerate(self.engine.pool.layers):
            names[id(cache.window)] = layer, "raw"
            for kind in ("compressed", "index_keys"):
                if getattr(cache, kind) is not None:
                    names[id(getattr(cache, kind).pages)] = layer, kind
        write_latent, compress = attention.write_latent, attention.compress

        def keep(pages, places, rows):
            blank = torch.full((256, rows.shape[1]), torch.nan)
            self.rows.setdefault(names[id(pages)], blank)[places] = rows

        def writing(kv, pages, *args, positions, **options):
            out = write_latent(kv, pages, *args, positions=positions, **options)
            if pages is not None:  # heads of queries go to none
                keep(pages, positions, out)
            return out

        def compressing(*args, pages, slot_mapping, ratio, **options):
            compress(*args, pages=pages, slot_mapping=slot_mapping, ratio=ratio, **options)
            positions = int(args[5]) - len(slot_mapping) + torch.arange(len(slot_mapping))
            closed = ((positions + 1) % ratio == 0) & (slot_mapping >= 0)
            keep(pages, positions[closed] // ratio, pages.read(slot_mapping[closed]))

        monkeypatch.setattr(attention, "write_latent", writing)
        monkeypatch.setattr(attention, "compress", compressing)

    def forced_logits(self, tokens, length):
        """Logits of the known tokens after ``length`` of them, the prompt."""
        request_id = self.add(tokens[:length], max_tokens=len(tokens) - length)
        self.forced[request_id] = tokens
        self.run()
        return torch.stack(self.logits[request_id]), self.outputs[request_id].num_cached_tokens

    def dense_logits(self, input_ids):
        """Logits of the dense model where it sees the engine's rows. They must be roundings of its own."""
        kinds = iter([(layer, kind) for layer, cache in enumerate(self.engine.pool.layers)
                      for kind in ("raw", "compressed", "index_keys") if kind == "raw" or getattr(cache, kind) is not None])  # fmt: skip

        def stored(rows):
            kind = next(kinds)
            if not len(rows):
                return rows
            seen = self.rows[kind][: len(rows)]
            assert ((seen - rows).abs() <= rounding(rows) + tolerance(self.model)).all(), kind
            return seen

        logits = self.model.full_forward(input_ids, stored=stored)
        assert next(kinds, None) is None
        return logits


@pytest.mark.parametrize("cold", [1, 38, 107])
def test_logits_are_those_of_the_dense_model_over_the_rounded_rows(
    model, oracle, monkeypatch, cold
):
    """Prompts in odd chunks, cold and then from a hit, and forced tokens one by one. The dense model equals transformers.

    The rows that it sees are the engine's: a sum in another order may round to another e4m3 value, and all after it would differ. The hit
    ends where cached segments do: later ones would be computed anew, and then replaced by the cached ones.
    """
    ids, run = oracle.input_ids, Seen(model, monkeypatch)
    for length, end in ((cold, cold + 9), (140, 150)):
        got, cached = run.forced_logits(ids[:end].tolist(), length)
        assert (cached > 0) == (cold > 1 and length == 140)
        assert (got - run.dense_logits(ids[: end - 1])[length - 1 :]).abs().max() < tolerance(model)
        # So much that it could not be anything else, and so little that the model is still the same.
        error = (got - oracle.logits[length - 1 : end - 1]).pow(2).mean().sqrt()
        assert 10 * tolerance(model) < error < 0.25 * oracle.logits.std()


def test_a_hit_and_a_resumed_request_are_bit_equal_to_cold_ones(model):
    """Only if chunks fall on the same rows."""
    tokens = prompt(57, 4)

    def run(**settings):
        settings = {
            "max_num_batched_tokens": 16,
            "max_num_seqs": 1,
            "retention": "dense",
        } | settings
        return V4Recorder(model, kv_cache_dtype="fp8", **settings)

    cold = run(enable_caching=False)
    first = cold.add(tokens, 6)
    cold.run()
    warm = run()
    again = [warm.add(tokens, 6), warm.add(tokens, 6)]
    warm.run()
    assert [warm.outputs[i].num_cached_tokens for i in again] == [0, 48]
    disturbed = run()
    preempted = disturbed.add(tokens, 6)
    disturbed.run(max_steps=3)
    [request] = disturbed.engine.scheduler.running
    disturbed.engine.scheduler._preempt(request)
    disturbed.run()
    assert disturbed.reports[3].q_lens.tolist() == [9], "from the boundary at 48"
    expected = torch.stack(cold.logits[first])
    for other, request_id in [(warm, again[0]), (warm, again[1]), (disturbed, preempted)]:
        assert torch.equal(torch.stack(other.logits[request_id]), expected)


def test_other_head_sizes_and_fp16_are_refused():
    model = random_model(get_config("deepseek-v4-small"), dtype=torch.float16)
    with pytest.raises(
        NotImplementedError, match="'fp8' is supported with models in bfloat16 and float32"
    ):
        Engine(model, EngineConfig(kv_cache_dtype="fp8"))
    with pytest.raises(
        NotImplementedError, match=r"'fp8' is supported with \(head_dim, rope_dim\) = \(512, 64\)"
    ):
        Engine(random_model(get_config("deepseek-v4-tiny")), EngineConfig(kv_cache_dtype="fp8"))
