"""Keys and values in e4m3 pages, end to end: logits are those of a model whose attention sees just the rows of earlier steps quantised."""

import pytest
import torch

from quire.kernels.common import e4m3
from quire.models.config.named import CONFIGS
from quire.models.engine.memory import model_cache
from quire.models.layers.attention import PagedAttend
from quire.models.layers.kv_cache import PageTensors, cache_groups
from quire.models.layers.unpaged_attention import UnpagedAttend
from tests.models.engine.test_engine import DEVICE, Recorder, build, prompt
from tests.support.models.tolerance import tolerance

E4M3 = torch.float8_e4m3fn
NAMES = ("gemma3-tiny", "gemma4-tiny", "gemma4-e-tiny", "llama-tiny", "gpt-oss-tiny")


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return build(request.param)


def as_e4m3(rows):
    quantized, scales = e4m3.quantize(rows)
    return e4m3.dequantize(quantized, scales)


def as_bf16(rows):
    return rows.to(torch.bfloat16).to(rows.dtype)


class SteppedAttend(UnpagedAttend):
    """Attention of a whole sequence where a query sees the rows of earlier steps rounded, and those of its own step as they are.

    rounded: of rows of keys or values; or a list of two such functions for each layer, one for the keys and one for the values.
    written: by layer, the rows that the engine wrote to its pages, which are what is rounded; None: this model's own. A row computed in another
    order is another one in its last digits, and where it lies on the edge of two quantized values it becomes the other one.
    bound: how far these may be from this model's own rows, which are the same but for the order of their sums.
    starts, lengths: [num_tokens], the first position and the tokens of the step that each token was computed in.
    """

    def __init__(self, config, starts, lengths, rounded, written=None, bound=0.0):
        super().__init__(config)
        self.starts, self.lengths, self.rounded = starts, lengths, rounded
        self.written, self.bound = written, bound

    def __call__(self, layer, q, k=None, v=None, *, sinks=None):
        shape, shared = self._config.attention(layer), k is None
        if shared:
            k, v = self._kept[self._config.kv_donor(layer)]
        elif layer in self._config.kv_donors:
            self._kept[layer] = k, v
        every = torch.arange(len(k), device=q.device)
        old = every[None, :] < self.starts[:, None]  # [queries, keys]
        if shared and shape.sliding_window is None:
            # Layers without keys of their own find the step's rows in the pages, where the step has several.
            old = old | (self.lengths[:, None] > 1)
        distance = every[:, None] - every[None, :]
        visible = distance >= 0
        if shape.sliding_window is not None:
            visible &= distance < shape.sliding_window
        group = shape.num_heads // shape.num_kv_heads

        def heads(rows):
            return rows.repeat_interleave(group, dim=1)

        round_k = round_v = self.rounded
        if isinstance(self.rounded, list):
            round_k, round_v = self.rounded[self._config.kv_donor(layer)]
        old_k, old_v = k, v
        if self.written is not None:
            old_k, old_v = (rows[: len(k)] for rows in self.written[self._config.kv_donor(layer)])
            assert max((old_k - k).abs().max(), (old_v - v).abs().max()) < self.bound
        kept, fresh = (torch.einsum("qhd,khd->hqk", q, heads(x)) for x in (round_k(old_k), k))
        scores = torch.where(old, kept, fresh) * self._config.softmax_scale
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(k)]
        out = torch.einsum("hqk,khd->qhd", weights * old, heads(round_v(old_v)))
        return out + torch.einsum("hqk,khd->qhd", weights * ~old, heads(v))


def stepped(model, sequence, lengths, rounded, written=None):
    """Logits of all tokens of a sequence that was computed in steps of these lengths; arguments as in `SteppedAttend`."""
    lengths = torch.tensor(lengths, device=DEVICE)
    ends = lengths.cumsum(0)
    starts = torch.repeat_interleave(ends - lengths, lengths)
    attend = SteppedAttend(
        model.config,
        starts,
        torch.repeat_interleave(lengths, lengths),
        rounded,
        written,
        tolerance(model),
    )
    ids = torch.tensor(sequence, device=DEVICE)
    return model.logits(model.run_layers(ids, torch.arange(len(ids), device=DEVICE), attend))


class Written(Recorder):
    """A recorder that keeps the rows of keys and values that a request's tokens were given, by request and layer."""

    def __init__(self, model, **settings):
        super().__init__(model, **settings)
        self.rows = {}
        forward, write = self.engine._forward, PagedAttend._write

        def recording(step):
            def keep(attend, layer, k, v):
                bounds, ends = attend._attn.cu_seqlens_q.tolist(), attend._attn.seq_lens.tolist()
                for i, request in enumerate(step.requests):
                    own = slice(bounds[i], bounds[i + 1])
                    layers = self.rows.setdefault(request.request_id, {})
                    blank = [x.new_full((512, *x.shape[1:]), torch.nan) for x in (k, v)]
                    for rows, new in zip(layers.setdefault(layer, blank), (k, v), strict=True):
                        rows[ends[i] - own.stop + own.start : ends[i]] = new[own]
                write(attend, layer, k, v)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PagedAttend, "_write", keep)
                return forward(step)

        self.engine._forward = recording

    def written(self, request_id, cold=None):
        """By layer, rows of keys and of values [positions, heads, head_dim]; those that a hit found are of the request ``cold``."""
        found = {}
        for layer, pair in self.rows[request_id].items():
            before = self.rows[cold or request_id][layer]
            found[layer] = [torch.where(x.isnan(), y, x) for x, y in zip(pair, before, strict=True)]
        return found


def run_alone(model, tokens, max_tokens, **settings):
    """A request alone in an engine with an fp8 cache: (engine's recorder, whole sequence but the last token, lengths of its steps)."""
    run = Written(model, **{"kv_cache_dtype": "fp8", "enable_caching": False, **settings})
    request_id = run.add(tokens, max_tokens)
    output = run.run()[request_id]
    lengths = [int(length) for report in run.reports for length in report.q_lens]
    return run, request_id, (tokens + list(output.token_ids))[:-1], lengths


def rounding(model, kv_cache_dtype):
    """The rounding of rows, and others that must not fit; sets the model's scales."""
    if kv_cache_dtype == "fp8":
        return as_e4m3, [lambda rows: rows]
    model.kv_scales = [(0.03 * 1.3**i, 0.05 * 1.2**i) for i in range(model.config.num_layers)]
    pairs = [tuple(map(by_scale, pair)) for pair in model.kv_scales]
    return pairs, [as_e4m3, [pair[::-1] for pair in pairs], pairs[::-1]]


def by_scale(scale):
    def rounded(rows):
        values = (rows.float() / torch.tensor(scale, device=DEVICE)).to(E4M3)
        return values.float().mul(scale).to(rows.dtype)

    return rounded


def check_rounded(model, kv_cache_dtype, length, cut, impl):
    """Logits of a cold run in chunks of ``cut`` tokens, and of its decode steps."""
    rounded, others = rounding(model, kv_cache_dtype)
    settings = dict(kv_cache_dtype=kv_cache_dtype, impl=impl, max_num_batched_tokens=cut)
    run, request_id, sequence, lengths = run_alone(model, prompt(length), 4, **settings)
    assert len(sequence) == sum(lengths) == length + 3 and max(lengths) == cut
    got = torch.stack(run.logits[request_id])
    expected = stepped(model, sequence, lengths, rounded, run.written(request_id))[length - 1 :]
    assert (got - expected).abs().max().item() < tolerance(model)
    for other in others:
        wrong = stepped(model, sequence, lengths, other)[length - 1 :]
        assert (got - wrong).abs().max().item() > 3 * tolerance(model)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_per_tensor"])
def test_logits_are_those_of_rows_rounded_in_earlier_steps(model, kv_cache_dtype):
    check_rounded(model, kv_cache_dtype, 100, 48, "torch")


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_per_tensor"])
def test_a_hit_of_other_cuts_differs_by_the_quantisation_alone(model, kv_cache_dtype):
    """A cold run in one step sees no quantised row until it decodes; a hit sees those that were cached."""
    rounded, _ = rounding(model, kv_cache_dtype)
    tokens = prompt(100)
    run = Written(model, kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=200)
    cold = run.add(tokens, 1)
    run.run()
    hit = run.add(tokens, 1)
    run.run()
    cached = run.outputs[hit].num_cached_tokens
    assert cached >= 64
    for request_id, cuts in ((cold, [100]), (hit, [cached, 100 - cached])):
        expected = stepped(model, tokens, cuts, rounded, run.written(request_id, cold))[-1]
        assert (run.logits[request_id][0] - expected).abs().max().item() < tolerance(model)


def test_pages_with_one_scale_a_tensor_are_half_of_bf16(model, monkeypatch):
    config = model.config
    groups = model_cache(model, kv_cache_dtype="fp8_per_tensor").groups
    assert 2 * groups[0].page_bytes == cache_groups(config, torch.bfloat16)[0][0].page_bytes
    monkeypatch.setattr(model, "kv_scales", [(1.0, 1.0)])
    with pytest.raises(ValueError, match=f"kv_scales: expected {config.num_layers} pairs, got 1"):
        model_cache(model, kv_cache_dtype="fp8_per_tensor")


def test_a_hit_is_bit_equal_where_chunks_fall_on_the_same_rows(model):
    """A prompt cut where the hit ends: the hit reads quantized values that the cold run wrote, or would have."""
    alignment = Recorder(model).engine.kv.alignment
    tokens = prompt(2 * alignment + 9)
    settings = dict(kv_cache_dtype="fp8", max_num_batched_tokens=2 * alignment, max_num_seqs=1)
    run = Recorder(model, **settings)
    cold, hit = run.add(tokens, 6), run.add(tokens, 6)
    run.run()
    assert run.outputs[cold].num_cached_tokens == 0
    assert run.outputs[hit].num_cached_tokens == 2 * alignment
    off = Recorder(model, enable_caching=False, **settings)
    uncached = off.add(tokens, 6)
    off.run()
    for one, two, three in zip(
        run.logits[cold], run.logits[hit], off.logits[uncached], strict=True
    ):
        assert torch.equal(one, two) and torch.equal(one, three)


def test_tokens_computed_once_more_take_cached_rows():
    model = build("gemma3-tiny")
    run = Recorder(model, replay=True, kv_cache_dtype="fp8")
    for slot in run.engine.pool.tensors:
        slot[0] = 0
    tokens = prompt(230)
    run.add(tokens, 1)
    run.run()
    index = run.engine.kv.index
    for cached in list(index.runs()):
        for point in list(cached.points.values()):
            index.drop_point(point)
    again = run.add(tokens, 1)
    run.run()
    assert run.engine.kv.stats()["replays"] == 1
    exact = model.full_forward(torch.tensor(tokens, device=DEVICE))[-1]
    bf16 = (stepped(model, tokens, [48] * 4 + [38], as_bf16)[-1] - exact).abs().max().item()
    assert (run.logits[again][0] - exact).abs().max().item() <= 2 * 32 * bf16


def test_quantized_values_and_scales_of_a_page_do_not_overlap():
    config = CONFIGS["gemma4-tiny"]
    groups, placement = cache_groups(config, E4M3)
    pool = PageTensors(config, groups, placement, num_pages=3, dtype=E4M3, device="cpu")
    for layer, cache in enumerate(pool.layers):
        shape = config.attention(layer)
        block_size = groups[cache.group].block_size
        assert cache.k_scale.shape == cache.v_scale.shape == (3, block_size, shape.num_kv_heads)
        assert cache.k_pages.shape == (3, block_size, shape.num_kv_heads, shape.head_dim)
        assert cache.k_scale.stride(1) == cache.v_scale.stride(1) == 1, "as a tile reads them"
        parts = [x.view(torch.uint8) for x in (cache.k_pages, cache.v_pages)]
        for page in range(3):
            for i, part in enumerate(parts):
                part[page] = 4 * page + i
            cache.k_scale[page], cache.v_scale[page] = 4.0 * page + 2, 4.0 * page + 3
        for page in range(3):
            for i, part in enumerate(parts):
                assert part[page].eq(4 * page + i).all()
            assert cache.k_scale[page].eq(4 * page + 2).all()
            assert cache.v_scale[page].eq(4 * page + 3).all()
