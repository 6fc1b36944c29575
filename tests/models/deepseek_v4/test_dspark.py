"""DSpark against its description, written in fp64 with one row at a time.

There is no other implementation to compare with: transformers ignores ``mtp.*``.
"""

from dataclasses import replace

import pytest
import torch

from quire.models.deepseek_v4.config import CONFIGS, CSA, HCA, MOE, SLIDING, DSparkConfig
from quire.models.deepseek_v4.drafters import DSparkDrafter
from quire.models.layers.unpaged_attention import V4UnpagedAttend
from quire.models.loading.random_weights import random_model
from tests.models.deepseek_v4.test_engine import V4Recorder
from tests.models.deepseek_v4.test_mtp import Reference, difference
from tests.models.engine.test_engine import DEVICE, prompt
from tests.support.models.drafters import Watched

CONFIG = replace(
    CONFIGS["deepseek-v4-tiny"],
    layer_types=(SLIDING, CSA, HCA),
    mlp_layer_types=(MOE, MOE, MOE),
    num_mtp_layers=0,
    dspark=DSparkConfig(
        num_stages=3, block_size=5, noise_token_id=250, markov_rank=8, target_layer_ids=(0, 1, 2)
    ),
)


class DSparkReference:
    """Logits and greedy drafts of one sequence."""

    def __init__(self, model):
        self.model, self.config = model, model.config
        self.stages = [Reference(model, i) for i in range(model.config.dspark.num_stages)]

    def context_rows(self, ids):
        """By stage, rows of all tokens of ids."""
        model, means = self.model, []
        attend, positions = V4UnpagedAttend(self.config), torch.arange(len(ids))
        x = model.embed_tokens(ids)[:, None].expand(-1, self.config.hc_mult, -1)
        for layer in model.layers:
            x = layer(x, ids, positions, model.rope[layer.self_attn.kind], attend)
            means.append(x.double().mean(1))
        taps = [means[i] for i in self.config.dspark.target_layer_ids]
        first, rows = self.stages[0], [[] for _ in self.stages]
        for t, tap in enumerate(torch.cat(taps, dim=1)):
            main = first.norm(first.w["main_proj.weight"] @ tap, "main_norm.weight")
            for stage, out in zip(self.stages, rows, strict=True):
                out.append(stage.row(main, t))
        return rows

    def __call__(self, ids):
        """(logits [block_size, vocab_size], greedy drafts) behind ids, the last one the anchor."""
        dspark, last = self.config.dspark, self.stages[-1]
        context, start = self.context_rows(ids[:-1]), len(ids) - 1
        block = [ids[-1].item()] + [dspark.noise_token_id] * (dspark.block_size - 1)
        rows = [last.w["embed_tokens.weight"][t].expand(self.config.hc_mult, -1) for t in block]
        for stage, seen in zip(self.stages, context, strict=True):
            rows = stage.layer(rows, start=start, context=seen)
        w, logits = last.w, last.logits(rows)
        drafts, before = [], ids[-1]
        for row in logits:
            term = w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][before]
            before = (row + term).argmax()
            drafts.append(before.item())
        return logits, drafts


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
def test_drafts_equal_the_reference(model, length, chunk):
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
    small = V4Recorder(
        model, drafter=(other := WatchedDSpark(model)), num_pages=56, max_model_len=120
    )
    ids = [small.add(prompt(50 + n, n), 30) for n in range(8)]
    small.run()
    assert sum(small.outputs[i].num_preemptions for i in ids) > 0
    for sequence, drafts in [*drafter.seen, *other.seen[-8:]]:
        assert drafts == reference(torch.tensor(sequence))[1][: len(drafts)]


def test_what_is_refused(model):
    with pytest.raises(ValueError, match="max_draft_tokens: expected at most the block of 5"):
        DSparkDrafter(model, 6)
    with pytest.raises(ValueError, match="max_draft_tokens: expected >= 1, got 0"):
        DSparkDrafter(model, 0)
    plain = random_model(CONFIGS["deepseek-v4-tiny"])
    with pytest.raises(ValueError, match="model: expected one with DSpark"):
        DSparkDrafter(plain)
    with pytest.raises(ValueError, match="target_layer_ids: expected at most 2, got 3"):
        replace(CONFIG, dspark=replace(CONFIG.dspark, target_layer_ids=(1, 3)))
    with pytest.raises(ValueError, match="noise_token_id: expected"):
        replace(CONFIG, dspark=replace(CONFIG.dspark, noise_token_id=CONFIG.vocab_size))
