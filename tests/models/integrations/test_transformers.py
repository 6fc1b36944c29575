"""transformers' ``generate`` over our pages and attention, beside eager attention over the same tokens.

Weights are random, pages NaN at first. A greedy token must be the one that eager attention finds
largest: no two logits are so close that rounding could choose.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import re
from pathlib import Path

import pytest
import torch

from tests.support.models.tolerance import tolerance

FOUND = importlib.util.find_spec("transformers") and importlib.metadata.version("transformers")
if not (FOUND or "").startswith(("5.23.", "5.24.")):
    reason = f"needs transformers 5.23 or 5.24, which the adapter is for, found {FOUND}"
    pytest.skip(reason, allow_module_level=True)

from transformers import AutoConfig  # noqa: E402

from quire.models.integrations.transformers import QuireCache, QuirePool  # noqa: E402
from tests.support.models import oracle  # noqa: E402

PAGE = Path(__file__).resolve().parents[3] / "docs" / "adopt.md"
SLIDING, FULL = "sliding_attention", "full_attention"
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 16},
    "gemma2": {"sliding_window": 16, "layer_types": [SLIDING, FULL]},
    "gemma3_text": {"sliding_window": 16, "layer_types": [SLIDING, SLIDING, FULL]},
    "gpt_oss": {"sliding_window": 24, "layer_types": [SLIDING, FULL]},
}
PROMPT, ANSWER, QUESTION, TURNS, DRAFTS = 44, 6, 20, 3, 4
# Tokens found in pages of 16: each turn of a chat finds all whole pages of the one before, another
# tenant nothing, a prompt that is sent again all but its last page, each row of a batch its own.
HITS = {
    "turn 0": [0], "turn 1": [48], "turn 2": [64], "cold": [0], "drafts": [80], "sampled": [80],
    "row 0": [32], "row 1": [80],
}  # fmt: skip


def make(family):
    extra = FAMILIES[family]
    config = dict(
        model_type=family, **extra, vocab_size=259, hidden_size=48, intermediate_size=64,
        num_attention_heads=4, num_hidden_layers=len(extra.get("layer_types", "12")),
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return oracle.make(config, 3)


class Recorded(QuireCache):
    """Writes down what it is asked to forget."""

    def crop(self, tokens_to_remove):
        self.cropped = [*getattr(self, "cropped", []), -tokens_to_remove]
        super().crop(tokens_to_remove)


def generate(model, pool, ids, mask=None, salt=b"", **options):
    """(token ids, their logits, cache) of one ``generate``, whose cache is closed."""
    cache = Recorded(pool, ids, mask, salt)
    options = {"max_new_tokens": ANSWER, "do_sample": False} | options
    options |= {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    cache.close()
    return out.sequences, torch.stack(out.logits, dim=1), cache


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_generate_beside_eager_attention(family):
    """Turns of a chat, another tenant, drafts, samples, and a batch that is padded on the left."""
    torch.manual_seed(0)
    model = make(family)
    pool = QuirePool(model, num_pages=80, max_model_len=160, max_draft_tokens=DRAFTS)
    for pages in pool.pages.tensors:
        pages.view(torch.float32).fill_(float("nan"))
    runs = {}
    ids = torch.randint(3, 259, (1, PROMPT))
    first = ids
    for turn in range(TURNS):
        prompt, runs[f"turn {turn}"] = ids, generate(model, pool, ids)
        ids = torch.cat([runs[f"turn {turn}"][0], torch.randint(3, 259, (1, QUESTION))], dim=1)
    runs["cold"] = generate(model, pool, prompt, salt=b"another tenant")
    # A rejected draft needs a token that came before: any one is matched.
    lookup = {"prompt_lookup_num_tokens": DRAFTS, "max_matching_ngram_size": 1}
    runs["drafts"] = generate(model, pool, prompt, **lookup)
    runs["sampled"] = generate(model, pool, prompt, do_sample=True, temperature=1.5, top_k=50)
    pads = prompt.shape[1] - PROMPT
    mask = torch.ones(2, prompt.shape[1], dtype=torch.long)
    mask[0, :pads] = 0
    both = torch.cat([torch.cat([prompt[:, :pads], first], dim=1), prompt])
    ids, logits, cache = generate(model, pool, both, mask, pad_token_id=0)
    hits = {name: [m.num_tokens for m in run[2].matches] for name, run in runs.items()}
    for row, cut in ((0, pads), (1, 0)):
        runs[f"row {row}"] = ids[row : row + 1, cut:], logits[row : row + 1], cache
        hits[f"row {row}"] = [cache.matches[row].num_tokens]
    assert hits == HITS

    pool.kv.check_invariants()
    assert pool.kv.num_free_slots == 16 and model.config._attn_implementation == "quire"
    pool.close()
    assert model.config._attn_implementation == "eager"  # what it was before
    model.full_forward = lambda ids: oracle.logits(model, ids)
    bound = tolerance(model)
    assert bound < 1e-3  # or it would allow anything
    for name, (ids, logits, _) in runs.items():
        eager = model(ids, use_cache=False).logits[:, -1 - logits.shape[1] : -1]
        assert (logits - eager).abs().max() <= bound, name
        if name != "sampled":
            best, second = eager.topk(2, dim=-1).values.unbind(-1)
            assert (best - second).min() > 2 * bound, name
            assert torch.equal(ids[:, -eager.shape[1] :], eager.argmax(-1)), name
    for same in ("turn 2", "drafts"):
        assert torch.equal(runs[same][0], runs["cold"][0])
    if family == "gemma3_text":  # some drafts are rejected, others accepted: 3 steps for 5 tokens
        assert runs["drafts"][2].cropped == [0, 0, 1]


@torch.no_grad()
def test_misuse_is_refused_by_name_and_harms_no_other_request():
    model = make("llama")
    pool = QuirePool(model, num_pages=6, max_model_len=64, max_requests=3)
    ids = torch.arange(10, 50)[None]
    greedy = {"max_new_tokens": 2, "do_sample": False}

    def run(given, known, **more):
        model.generate(given, past_key_values=QuireCache(pool, known), **greedy | more)

    config = AutoConfig.for_model("gemma3n_text", num_hidden_layers=2, num_kv_shared_layers=1)
    shared = type("Model", (), {"config": config})
    ended = QuireCache(pool, ids)
    ended.close()
    other = QuireCache(pool, ids[:, :20])
    model.generate(ids[:, :20], past_key_values=other, **greedy)
    calls = [
        (ValueError, "model: expected one without a QuirePool",
         lambda: QuirePool(model, num_pages=6, max_model_len=64)),
        (NotImplementedError, "model: supported are decoders .* got 'gemma3n_text'",
         lambda: QuirePool(shared, num_pages=6, max_model_len=64)),
        (NotImplementedError, "attention 'quire': .* got DynamicCache",
         lambda: model.generate(ids, **greedy)),
        (NotImplementedError, "attention 'quire': supported are input_ids, a 2D",
         lambda: model(ids, attention_mask=torch.zeros(1, 1, 40, 40), past_key_values=other)),
        (ValueError, "input_ids: expected those that the QuireCache was made with",
         lambda: run(ids + 1, ids)),
        (NotImplementedError, "QuireCache: supported are greedy search, sampling and drafts",
         lambda: run(ids[:, :20], ids[:, :20].expand(2, -1), num_beams=2)),
        (ValueError, "max_draft_tokens: .* QuirePool has 0",
         lambda: run(ids, ids, prompt_lookup_num_tokens=2)),
        (ValueError, "past_key_values: expected an open QuireCache of 2 rows",
         lambda: run(ids, ids, num_return_sequences=2, do_sample=True)),
        (ValueError, r"input_ids, attention_mask: expected \[batch <= 2 free requests",
         lambda: QuireCache(pool, ids.expand(3, -1))),
        (ValueError, "attention_mask: expected ones and, on the left, zeros",
         lambda: QuireCache(pool, ids, (ids < 40).long())),
        (ValueError, "past_key_values: expected an open QuireCache of 1 rows",
         lambda: model.generate(ids, past_key_values=ended, **greedy)),
        (MemoryError, "QuirePool: out of pages: the step needs 1 .* 0 are free",
         lambda: run(ids.flip(1), ids.flip(1), max_new_tokens=20)),
    ]  # fmt: skip
    for error, message, call in calls:
        with pytest.raises(error, match=f"^{message}"):
            call()
    assert model(torch.tensor([[5]]), past_key_values=other).logits.isfinite().all()


def test_the_page_prints_what_it_shows():
    fence = r'```python title="needs transformers"\n(.*?)^```$\n\n```text\n(.*?)^```$'
    blocks = re.findall(fence, PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert blocks
    for code, shown in blocks:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, PAGE, "exec"), {"__name__": "__main__"})
        assert out.getvalue() == shown
