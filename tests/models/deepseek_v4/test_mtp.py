"""The drafter layer against a reference written from its description alone: fp64, one token and one
head at a time.

There is no other implementation to compare with: transformers ignores ``mtp.*``.
"""

import math
from dataclasses import replace

import pytest
import torch

from quire.kernels import sample_tokens
from quire.models.deepseek_v4.cache import CacheFormat, plan_cache
from quire.models.deepseek_v4.config import CONFIGS
from quire.models.deepseek_v4.drafters import MTPDrafter
from quire.models.engine import device_drafter
from quire.models.engine.engine import Engine, EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.layers.unpaged_attention import V4UnpagedAttend
from quire.models.loading.random_weights import random_model
from tests.models.deepseek_v4.test_engine import V4Recorder
from tests.models.engine.test_engine import prompt
from tests.support.models.few import few

NUM_TOKENS = 40  # more than two windows of 16


class Reference:
    """One drafter, its weights by name in fp64."""

    def __init__(self, model, index):
        self.config = model.config
        prefix = f"mtp.{index}."
        self.w = {
            name.removeprefix(prefix): weight.double()
            for name, weight in model.named_parameters()
            if name.startswith(prefix) or name in ("embed_tokens.weight", "lm_head.weight")
        }

    def norm(self, x, name=None):
        x = x / math.sqrt(float((x * x).mean()) + self.config.rms_norm_eps)
        return x if name is None else x * self.w[name]

    def turn(self, x, position):
        """Rotates the trailing channels in place, pair by pair."""
        x, dim = x.clone(), self.config.rope_dim
        first = len(x) - dim
        for pair in range(dim // 2):
            angle = position * self.config.rope.rope_theta ** (-2 * pair / dim)
            a, b = x[first + 2 * pair].item(), x[first + 2 * pair + 1].item()
            x[first + 2 * pair] = a * math.cos(angle) - b * math.sin(angle)
            x[first + 2 * pair + 1] = a * math.sin(angle) + b * math.cos(angle)
        return x

    def mixes(self, streams, name):
        flat = self.norm(streams.flatten())
        return self.w[name] @ flat

    def around(self, streams, name, norm, block):
        """One sub-block for all tokens: block gets and returns a list of rows."""
        n, eps = self.config.hc_mult, self.config.hc_eps
        scale, base = self.w[f"{name}.scale"], self.w[f"{name}.base"]
        inputs, weights = [], []
        for x in streams:
            m = self.mixes(x, f"{name}.fn")
            pre = torch.sigmoid(m[:n] * scale[0] + base[:n]) + eps
            post = 2 * torch.sigmoid(m[n : 2 * n] * scale[1] + base[n : 2 * n])
            comb = (m[2 * n :] * scale[2] + base[2 * n :]).view(n, n)
            comb = torch.stack([row.exp() / row.exp().sum() for row in comb]) + eps
            for i in range(2 * self.config.hc_sinkhorn_iters - 1):  # columns, rows, columns, ...
                for j in range(n):
                    if i % 2 == 0:
                        comb[:, j] = comb[:, j] / (comb[:, j].sum() + eps)
                    else:
                        comb[j] = comb[j] / (comb[j].sum() + eps)
            inputs.append(self.norm(sum(pre[s] * x[s] for s in range(n)), norm))
            weights.append((post, comb))
        out = []
        for x, y, (post, comb) in zip(streams, block(inputs), weights, strict=True):
            new = [post[k] * y + sum(comb[j, k] * x[j] for j in range(n)) for k in range(n)]
            out.append(torch.stack(new))
        return out

    def row(self, x, position):
        """The key and value of a token."""
        x = self.w["self_attn.kv_proj.weight"] @ x
        return self.turn(self.norm(x, "self_attn.kv_norm.weight"), position)

    def attention(self, inputs, start=0, context=None):
        """Rows from position ``start`` on; each sees its window, or the context and all rows."""
        c, w = self.config, self.w
        own, rows = [self.row(x, start + i) for i, x in enumerate(inputs)], []
        for i, x in enumerate(inputs):
            seen = own[max(0, i - c.sliding_window + 1) : i + 1]
            if context is not None:
                seen = context[max(0, start - c.sliding_window) : start] + own
            keys = torch.stack(seen)
            latent = self.norm(w["self_attn.q_a_proj.weight"] @ x, "self_attn.q_a_norm.weight")
            queries = (w["self_attn.q_b_proj.weight"] @ latent).view(c.num_heads, c.head_dim)
            heads = []
            for h, q in enumerate(queries):
                scores = (keys @ self.turn(self.norm(q), start + i) / math.sqrt(c.head_dim)).exp()
                weights = scores / (scores.sum() + w["self_attn.sinks"][h].exp())
                heads.append(self.turn(weights @ keys, -(start + i)))
            narrow = []
            per_group, rank = c.num_heads // c.o_groups, c.o_lora_rank
            for g in range(c.o_groups):
                group = torch.cat(heads[g * per_group : (g + 1) * per_group])
                narrow.append(w["self_attn.o_a_proj.weight"][g * rank : (g + 1) * rank] @ group)
            rows.append(w["self_attn.o_b_proj.weight"] @ torch.cat(narrow))
        return rows

    def expert(self, x, gate, up, down):
        limit = self.config.swiglu_limit
        g, u = (gate @ x).clamp(max=limit), (up @ x).clamp(-limit, limit)
        return down @ (g / (1 + torch.exp(-g)) * u)

    def moe(self, inputs):
        c, w = self.config, self.w
        width, rows = c.moe_intermediate_size, []
        for x in inputs:
            score = torch.log1p(torch.exp(w["mlp.gate.weight"] @ x)).sqrt()
            biased = score + w["mlp.gate.e_score_correction_bias"]
            best = sorted(range(c.num_experts), key=lambda e: -biased[e])[: c.num_experts_per_tok]
            total = sum(score[e] for e in best)
            shared = [w[f"mlp.shared_experts.{m}_proj.weight"] for m in ("gate", "up", "down")]
            y = self.expert(x, *shared)
            for e in best:
                gate_up = w["mlp.experts.gate_up_proj"][e]
                down = w["mlp.experts.down_proj"][e]
                routed = self.expert(x, gate_up[:width], gate_up[width:], down)
                y = y + c.routed_scaling_factor * score[e] / total * routed
            rows.append(y)
        return rows

    def layer(self, rows, **seen):
        rows = self.around(
            rows, "attn_hc", "input_layernorm.weight", lambda x: self.attention(x, **seen)
        )
        return self.around(rows, "ffn_hc", "post_attention_layernorm.weight", self.moe)

    def logits(self, rows):
        w, out = self.w, []
        for x in rows:
            m = self.mixes(x, "hc_head.hc_fn")
            pre = (
                torch.sigmoid(m * w["hc_head.hc_scale"] + w["hc_head.hc_base"]) + self.config.hc_eps
            )
            y = self.norm(sum(p * stream for p, stream in zip(pre, x, strict=True)), "norm.weight")
            out.append(w["lm_head.weight"] @ y)
        return torch.stack(out)

    def __call__(self, streams, next_ids):
        """streams: [num_tokens, hc_mult, hidden_size] fp64. Returns (streams, logits)."""
        w, rows = self.w, []
        for t, (x, token) in enumerate(zip(streams, next_ids.tolist(), strict=True)):
            e = w["embed_tokens.weight"][token] * (t > 0)
            e = w["e_proj.weight"] @ self.norm(e, "enorm.weight")
            h = [w["h_proj.weight"] @ self.norm(stream, "hnorm.weight") for stream in x]
            rows.append(torch.stack([row + e for row in h]))
        rows = self.layer(rows)
        return torch.stack(rows), self.logits(rows)


@pytest.fixture(scope="module")
def case():
    """A model with two drafters, the trunk's streams and the tokens one further on."""
    model = random_model(replace(CONFIGS["deepseek-v4-tiny"], num_mtp_layers=2), seed=3)
    ids = torch.randint(3, 259, (NUM_TOKENS + 2,), generator=torch.Generator().manual_seed(4))
    positions = torch.arange(NUM_TOKENS)
    attend = V4UnpagedAttend(model.config)
    streams = model.streams(ids[:NUM_TOKENS], positions, attend)
    return model, ids, positions, attend, streams


def difference(got, expected):
    return (got.double() - expected).abs().max().item()


def test_drafters_equal_the_reference(case):
    """The second one, of weights of its own, reads the streams of the first."""
    model, ids, positions, attend, streams = case
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


@pytest.fixture(scope="module")
def many():
    """Three drafter layers."""
    return random_model(replace(few("deepseek-v4-tiny"), num_mtp_layers=3), seed=6)


def plain_drafts(model, tokens, num_drafts, num_layers):
    """Logits [num_drafts, vocab_size] of greedy drafts behind ``tokens``, without a cache."""
    attend = V4UnpagedAttend(model.config)
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


@pytest.mark.parametrize(("num_layers", "num_drafts"), [(3, 5)])
def test_drafts_of_several_layers_in_the_engine(many, num_layers, num_drafts):
    """Engine drafts are those of an uncached run, in odd chunks, accepted and rejected."""
    seen = []

    class Watched(MTPDrafter):
        def _chain(self, requests, choose):
            logits = []
            drafts = super()._chain(requests, lambda x: choose(logits.append(x) or x)).clone()
            for row, request in enumerate(requests):
                seen.append((request.tokens.tolist(), torch.stack(logits, dim=1)[row]))
                known = plain.get(request.request_id, ())[request.num_output :][: len(seen) % 4]
                known = torch.tensor(known[:num_drafts])
                drafts[row, : len(known)] = known
            return drafts

    def run(drafter, **settings):
        engine = V4Recorder(many, drafter=drafter, max_num_batched_tokens=37, **settings)
        ids = [engine.add(prompt(n, n), 12) for n in (50, 1, 23)]
        engine.run()
        return engine, {i: engine.check(i).token_ids for i in ids}

    plain = {}
    _, plain = run(None)
    engine, drafted = run(Watched(many, num_drafts))
    assert drafted == plain
    assert 0 < engine.engine.totals.num_accepted < engine.engine.totals.num_drafts
    assert len(seen) > 12
    for tokens, logits in seen[::4]:
        assert difference(logits, plain_drafts(many, tokens, num_drafts, num_layers)) < 1e-4


def test_every_group_with_a_drafter_looks_ahead():
    """Also where the drafters' layers do not fit one group."""
    for num_layers in range(1, 9):
        config = replace(CONFIGS["deepseek-v4-tiny"], num_mtp_layers=num_layers)
        plan = plan_cache(config, CacheFormat(torch.float32))
        of = [plan.groups[place.window_group].lookahead for place in plan.layers]
        assert of[config.num_layers :] == [1] * num_layers
    assert of[0] == 0


CONFIG = EngineConfig(num_pages=500, max_num_seqs=4, max_num_batched_tokens=64, decode_graphs=True)


def two_layers():
    return random_model(replace(few("deepseek-v4-tiny"), num_mtp_layers=2), seed=6)


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")  # the interpreter's numbers
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_drafts_that_are_no_numbers_are_replaced_from_the_target(impl, monkeypatch):
    """None of them stays, and every request ends as ever."""
    model = two_layers()
    monkeypatch.setattr(
        device_drafter,
        "sample_tokens",
        lambda *args, **given: sample_tokens(*args, **given | {"impl": impl}),
    )
    logits_of = type(model).logits

    def logits(*args, of=None):
        got = logits_of(*args, of=of)
        return got if of is None else got.fill_(torch.nan)

    monkeypatch.setattr(type(model), "logits", logits)
    config = replace(CONFIG, decode_graphs=False, rejection_sample_method="standard")
    engine = Engine(model, config, drafter=MTPDrafter(model, 2))
    params = SamplingParams(6, temperature=1.5, ignore_eos=True)
    for n in (11, 12):
        engine.add_request(prompt(n, seed=n), replace(params, seed=n))
    outputs = []
    while engine.has_work:
        outputs += engine.step().finished
    assert [(o.finish_reason, len(o.token_ids)) for o in outputs] == [("length", 6)] * 2
    assert engine.totals.num_drafts > 0 and engine.totals.num_accepted == 0
