"""Drafter layers, MTP and DSpark, against references written from their descriptions alone: in fp64.

There is no other implementation to compare with: transformers ignores ``mtp.*``.
"""

import math
from dataclasses import replace

import pytest
import torch

from quire.kernels import sample_tokens
from quire.models.deepseek_v4.config import CONFIGS, CSA, HCA, MOE, SLIDING, DSparkConfig
from quire.models.deepseek_v4.drafters import DSparkDrafter, MTPDrafter
from quire.models.engine import device_drafter
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.layers.unpaged_attention import V4UnpagedAttend
from quire.models.loading.random_weights import random_model
from tests.models.deepseek_v4.test_engine import V4Recorder
from tests.models.engine.test_engine import DEVICE, prompt
from tests.support.models.drafters import Watched
from tests.support.models.few import few

NUM_TOKENS = 40  # more than two windows of 16
TINY = CONFIGS["deepseek-v4-tiny"]
CONFIG = replace(
    TINY,
    layer_types=(SLIDING, CSA, HCA),
    mlp_layer_types=(MOE, MOE, MOE),
    num_mtp_layers=0,
    dspark=DSparkConfig(
        num_stages=3, block_size=5, noise_token_id=250, markov_rank=8, target_layer_ids=(0, 1, 2)
    ),
)


class Reference:
    """One drafter layer: its weights by name in fp64; rows are [num_tokens, hc_mult, hidden_size]."""

    def __init__(self, model, index):
        self.config = model.config
        prefix = f"mtp.{index}."
        self.w = {
            name.removeprefix(prefix): weight.double()
            for name, weight in model.named_parameters()
            if name.startswith(prefix) or name in ("embed_tokens.weight", "lm_head.weight")
        }

    def times(self, x, name):
        return x @ self.w[f"{name}.weight"].T

    def norm(self, x, name=None):
        x = x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return x if name is None else x * self.w[f"{name}.weight"]

    def turn(self, x, positions):
        """Rotates pairs of the trailing channels of [num_tokens, ..., channels]."""
        dim = self.config.rope_dim
        steps = self.config.rope.rope_theta ** (-torch.arange(0, dim, 2).double() / dim)
        angles = positions.double().view(-1, *[1] * (x.ndim - 1)) * steps
        pairs = torch.view_as_complex(x[..., -dim:].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
        return torch.cat([x[..., :-dim], turned.flatten(-2)], -1)

    def around(self, rows, name, norm, block):
        """One sub-block between the mixes of its residual streams."""
        n, eps = self.config.hc_mult, self.config.hc_eps
        scale = self.w[f"{name}.scale"].repeat_interleave(torch.tensor([n, n, n * n]))
        mixes = self.norm(rows.flatten(1)) @ self.w[f"{name}.fn"].T * scale + self.w[f"{name}.base"]
        pre, post, comb = mixes.split([n, n, n * n], -1)
        comb = comb.unflatten(-1, (n, n)).softmax(-1) + eps
        for i in range(2 * self.config.hc_sinkhorn_iters - 1):  # columns, rows, columns, ...
            comb = comb / (comb.sum(1 + i % 2, keepdim=True) + eps)
        pre, post = torch.sigmoid(pre) + eps, 2 * torch.sigmoid(post)
        out = block(self.norm((pre[..., None] * rows).sum(1), norm))
        return post[..., None] * out[:, None] + comb.mT @ rows

    def keys(self, x, positions):
        """The key and value of each token."""
        own = self.norm(self.times(x, "self_attn.kv_proj"), "self_attn.kv_norm")
        return self.turn(own, positions)

    def attention(self, x, start, context):
        """Tokens from position ``start`` on; each sees its window, or the context's and all of them."""
        c, positions = self.config, start + torch.arange(len(x))
        keys, age = self.keys(x, positions), positions[:, None] - positions
        hidden = (age < 0) | (age >= c.sliding_window)
        if context is not None:
            keys = torch.cat([context[max(0, start - c.sliding_window) : start], keys])
            hidden = torch.zeros(len(x), len(keys), dtype=torch.bool)
        latent = self.norm(self.times(x, "self_attn.q_a_proj"), "self_attn.q_a_norm")
        q = self.times(latent, "self_attn.q_b_proj").unflatten(1, (c.num_heads, c.head_dim))
        scores = self.turn(self.norm(q), positions) @ keys.T / math.sqrt(c.head_dim)
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        sinks = self.w["self_attn.sinks"].expand(len(x), -1)[..., None]
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        groups = self.turn(weights @ keys, -positions).reshape(len(x), c.o_groups, -1)
        narrow = self.w["self_attn.o_a_proj.weight"].unflatten(0, (c.o_groups, -1))
        return self.times(
            torch.einsum("tgi,gri->tgr", groups, narrow).flatten(1), "self_attn.o_b_proj"
        )

    def moe(self, x):
        c, w = self.config, self.w
        score = torch.log1p(torch.exp(self.times(x, "mlp.gate"))).sqrt()
        best = (score + w["mlp.gate.e_score_correction_bias"]).topk(c.num_experts_per_tok).indices
        chosen = torch.zeros_like(score).scatter(1, best, score.gather(1, best))
        weights = c.routed_scaling_factor * chosen / chosen.sum(1, keepdim=True)
        names = [f"mlp.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
        matrices = [(w[names[0]], w[names[1]], w[names[2]], torch.ones(len(x)))]
        for e, gate_up in enumerate(w["mlp.experts.gate_up_proj"]):
            matrices.append((*gate_up.chunk(2), w["mlp.experts.down_proj"][e], weights[:, e]))
        out = torch.zeros_like(x)
        for gate, up, down, weight in matrices:
            g, u = (x @ gate.T).clamp(max=c.swiglu_limit), x @ up.T
            u = u.clamp(-c.swiglu_limit, c.swiglu_limit)
            out += weight[:, None] * (g / (1 + torch.exp(-g)) * u @ down.T)
        return out

    def layer(self, rows, start=0, context=None):
        rows = self.around(rows, "attn_hc", "input_layernorm", lambda x: self.attention(x, start, context))  # fmt: skip
        return self.around(rows, "ffn_hc", "post_attention_layernorm", self.moe)

    def logits(self, rows):
        mixes = self.norm(rows.flatten(1)) @ self.w["hc_head.hc_fn"].T
        pre = torch.sigmoid(mixes * self.w["hc_head.hc_scale"] + self.w["hc_head.hc_base"])
        x = ((pre + self.config.hc_eps)[..., None] * rows).sum(1)
        return self.times(self.norm(x, "norm"), "lm_head")

    def __call__(self, streams, next_ids):
        """(streams, logits) of all tokens; the first has no embedding."""
        e = self.w["embed_tokens.weight"][next_ids]
        e[0] = 0
        e = self.times(self.norm(e, "enorm"), "e_proj")
        rows = self.layer(self.times(self.norm(streams, "hnorm"), "h_proj") + e[:, None])
        return rows, self.logits(rows)


class DSparkReference:
    """Logits and greedy drafts of one sequence."""

    def __init__(self, model):
        self.model, self.config = model, model.config
        self.stages = [Reference(model, i) for i in range(model.config.dspark.num_stages)]

    def taps(self, ids):
        """Means of the trunk's streams behind the target layers, for all tokens of ids."""
        model, means = self.model, []
        attend, positions = V4UnpagedAttend(self.config), torch.arange(len(ids))
        x = model.embed_tokens(ids)[:, None].expand(-1, self.config.hc_mult, -1)
        for layer in model.layers:
            x = layer(x, ids, positions, model.rope[layer.self_attn.kind], attend)
            means.append(x.double().mean(1))
        return torch.cat([means[i] for i in self.config.dspark.target_layer_ids], dim=1)

    def __call__(self, ids):
        """(logits [block_size, vocab_size], greedy drafts) behind ids, the last one the anchor."""
        dspark, start = self.config.dspark, len(ids) - 1
        first, last = self.stages[0], self.stages[-1]
        main = first.norm(first.times(self.taps(ids[:-1]), "main_proj"), "main_norm")
        block = torch.cat([ids[-1:], torch.full((dspark.block_size - 1,), dspark.noise_token_id)])
        rows = last.w["embed_tokens.weight"][block][:, None].expand(-1, self.config.hc_mult, -1)
        for stage in self.stages:
            rows = stage.layer(rows, start, stage.keys(main, torch.arange(start)))
        logits, drafts, before = last.logits(rows), [], ids[-1]
        for row in logits:
            term = last.w["markov_head.markov_w2.weight"] @ last.w["markov_head.markov_w1.weight"][before]  # fmt: skip
            before = (row + term).argmax()
            drafts.append(before.item())
        return logits, drafts


def difference(got, expected):
    return (got.double() - expected).abs().max().item()


def with_layers(config, num_layers, seed=6):
    return random_model(replace(config, num_mtp_layers=num_layers), seed=seed)


def test_drafters_equal_the_reference():
    """The second one, of weights of its own, reads the streams of the first."""
    model = with_layers(TINY, 2, seed=3)
    ids = torch.randint(3, 259, (NUM_TOKENS + 2,), generator=torch.Generator().manual_seed(4))
    positions, attend = torch.arange(NUM_TOKENS), V4UnpagedAttend(model.config)
    streams = model.streams(ids[:NUM_TOKENS], positions, attend)
    for index, following in enumerate((ids[1:-1], ids[2:])):
        got = model.draft_streams(index, streams, following, positions, attend)
        want, logits = Reference(model, index)(streams.double(), following)
        assert want.std() > 0.5 and logits.std() > 0.5
        assert difference(got, want) < 1e-4
        assert difference(model.logits(got, of=model.mtp[index]), logits) < 1e-4
        streams = got


def behind(streams):
    """Rows one further on, zeros before them: what the next layer reads at the same position."""
    return torch.cat([torch.zeros_like(streams[:1]), streams])


def plain_drafts(model, tokens, num_drafts):
    """Logits [num_drafts, vocab_size] of greedy drafts behind ``tokens``, without a cache."""
    attend, num_layers = V4UnpagedAttend(model.config), len(model.mtp)
    ids = torch.tensor(tokens)
    streams = [model.streams(ids[:-1], torch.arange(len(ids) - 1), attend)]
    positions = torch.arange(len(ids) - 1)
    rows = streams[0]
    layers = []  # each layer's rows of what is known
    for index in range(num_layers):
        rows = model.draft_streams(index, rows, ids[1:], positions, attend)
        layers.append(rows)
        rows = behind(rows)[:-1]
    logits, out = [model.logits(layers[0][-1:], of=model.mtp[0])[0]], layers[0][:0]
    trunk = [streams[0]] + [behind(rows)[:-1] for rows in layers[:-1]]  # what each layer reads
    while len(logits) < num_drafts:
        drafts = [int(row.argmax()) for row in logits]
        index, source = min(len(drafts), num_layers - 1), min(len(drafts) - 1, num_layers - 1)
        inputs = torch.cat([trunk[index], layers[source][-1:], out])
        following = torch.tensor([*tokens[1:], *drafts])
        rows = model.draft_streams(index, inputs, following, torch.arange(len(inputs)), attend)
        out = rows[len(tokens) - 1 :]
        logits.append(model.logits(out[-1:], of=model.mtp[index])[0])
    return torch.stack(logits)


def test_drafts_of_three_layers_in_the_engine():
    """Five drafts are those of an uncached run, in odd chunks, accepted and rejected."""
    model, plain, seen = with_layers(few("deepseek-v4-tiny"), 3), {}, []

    class Recording(MTPDrafter):
        def _chain(self, requests, choose):
            logits = []
            drafts = super()._chain(requests, lambda x: choose(logits.append(x) or x)).clone()
            for row, request in enumerate(requests):
                seen.append((request.tokens.tolist(), torch.stack(logits, dim=1)[row]))
                known = plain.get(request.request_id, ())[request.num_output :][: len(seen) % 4]
                known = torch.tensor(known[:5])
                drafts[row, : len(known)] = known
            return drafts

    def run(drafter):
        engine = V4Recorder(model, drafter=drafter, max_num_batched_tokens=37)
        ids = [engine.add(prompt(n, n), 12) for n in (50, 1, 23)]
        engine.run()
        return engine.engine.totals, {i: engine.check(i).token_ids for i in ids}

    plain = run(None)[1]
    totals, drafted = run(Recording(model, 5))
    assert drafted == plain
    assert 0 < totals.num_accepted < totals.num_drafts and len(seen) > 12
    for tokens, logits in seen[::4]:
        assert difference(logits, plain_drafts(model, tokens, 5)) < 1e-4


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # the interpreter's numbers
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_drafts_that_are_no_numbers_are_replaced_from_the_target(impl, monkeypatch):
    """None of them stays, and every request ends as ever."""
    model = with_layers(few("deepseek-v4-tiny"), 2)
    logits_of = type(model).logits

    def sample(*args, **given):
        return sample_tokens(*args, **given | {"impl": impl})

    def logits(*args, of=None):
        got = logits_of(*args, of=of)
        return got if of is None else got.fill_(torch.nan)

    monkeypatch.setattr(device_drafter, "sample_tokens", sample)
    monkeypatch.setattr(type(model), "logits", logits)
    config = EngineConfig(
        num_pages=500, max_num_seqs=4, max_num_batched_tokens=64, rejection_sample_method="standard"
    )
    engine = Engine(model, config, drafter=MTPDrafter(model, 2))
    for n in (11, 12):
        params = SamplingParams(6, temperature=1.5, ignore_eos=True, seed=n)
        engine.add_request(prompt(n, seed=n), params)
    outputs = []
    while engine.has_work:
        outputs += engine.step().finished
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [("length", 6)] * 2
    assert engine.totals.num_drafts > 0 and engine.totals.num_accepted == 0


def with_dspark(**changes):
    return replace(CONFIG, dspark=replace(CONFIG.dspark, **changes))


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG, seed=3, device=DEVICE)


class WatchedDSpark(Watched, DSparkDrafter):
    """Keeps the logits of each block, too."""

    def __init__(self, model, max_draft_tokens=5):
        super().__init__(model, max_draft_tokens)
        self.logits = []

    def _block_logits(self, *args):
        self.logits.append(super()._block_logits(*args))
        return self.logits[-1]


@pytest.mark.parametrize("length", [1, 4, 15, 16, 17, 41])
@pytest.mark.parametrize("chunk", [7, 64])
def test_drafts_of_dspark_equal_the_reference(model, length, chunk):
    """Around the first window of 16 tokens, whatever steps wrote the rows."""
    drafter = WatchedDSpark(model)
    run = V4Recorder(model, drafter=drafter, max_num_batched_tokens=chunk)
    run.add(prompt(length), 2)
    run.run()
    tokens, drafts = drafter.seen[0]
    expected, ids = DSparkReference(model)(torch.tensor(tokens))
    assert expected.std() > 0.5 and difference(drafter.logits[0][0], expected) < 1e-4
    assert drafts == ids
    # Drafts see a whole window besides themselves.
    windows = [g.sliding_window for g in run.engine.memory.groups if g.name.startswith("window")]
    assert windows[-1] == CONFIG.sliding_window + 1 == windows[0] + 1


def test_a_hit_and_a_preemption_bring_the_rows_along(model):
    """Drafts behind them are those of a cold request."""
    reference = DSparkReference(model)
    drafter = WatchedDSpark(model)
    run = V4Recorder(model, drafter=drafter)
    for expected in (0, 96):
        request_id = run.add(prompt(99), 3)
        run.run()
        assert run.outputs[request_id].num_cached_tokens == expected
    other = WatchedDSpark(model)
    small = V4Recorder(model, drafter=other, num_pages=56, max_model_len=120)
    ids = [small.add(prompt(50 + n, n), 30) for n in range(8)]
    small.run()
    assert sum(small.outputs[i].num_preemptions for i in ids) > 0
    for sequence, drafts in [*drafter.seen, *other.seen[-4:]]:
        assert drafts == reference(torch.tensor(sequence))[1][: len(drafts)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: DSparkDrafter(model, 6), "max_draft_tokens: expected at most the block of 5"),
        (lambda model: DSparkDrafter(model, 0), "max_draft_tokens: expected >= 1, got 0"),
        (lambda model: DSparkDrafter(with_layers(TINY, 1)), "model: expected one with DSpark"),
        (lambda model: MTPDrafter(with_layers(TINY, 1), 0), "max_draft_tokens: expected >= 1, got 0"),
        (lambda model: MTPDrafter(with_layers(TINY, 0)), "model: expected one with MTP layers"),
        (lambda model: MTPDrafter(model), "model: expected one with MTP layers"),
        (lambda model: with_dspark(target_layer_ids=(1, 3)), "target_layer_ids: expected at most 2, got 3"),
        (lambda model: with_dspark(noise_token_id=259), "noise_token_id: expected"),
    ],
)  # fmt: skip
def test_what_is_refused(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)
