"""transformers models that generate over `quire.models.integrations.transformers`, beside what eager attention says of the same tokens.

A program of its own, because transformers looks for a package named ``kernels`` and must not find this repository's: start it in another
directory.

Usage: python adopted.py OUT, a directory; writes FAMILY.pt of each family, refusals.json and page.json.
"""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import oracle
import torch
from tolerance import tolerance
from transformers import AutoConfig

from quire.models.integrations.transformers import QuireCache, QuirePool

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
PROMPT, ANSWER, QUESTION, TURNS = 44, 6, 20, 3
DRAFTS = 4


def make(family):
    extra = FAMILIES[family]
    config = dict(
        model_type=family, **extra, vocab_size=259, hidden_size=48, intermediate_size=64, num_attention_heads=4,
        num_hidden_layers=len(extra.get("layer_types", "12")), num_key_value_heads=2, head_dim=16,
        num_local_experts=4, num_experts_per_tok=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return oracle.make(config, 3)


class Recorded(QuireCache):
    """Writes down what it is asked to forget."""

    def crop(self, tokens_to_remove):
        self.cropped = [*getattr(self, "cropped", []), -tokens_to_remove]
        super().crop(tokens_to_remove)


def generate(model, pool, ids, mask=None, salt=b"", **options):
    """Runs one ``generate`` and ends its cache."""
    cache = Recorded(pool, ids, mask, salt)
    options = {"max_new_tokens": ANSWER, "do_sample": False} | options
    out = model.generate(
        ids, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options
    )  # fmt: skip
    hits, cropped = [m.num_tokens for m in cache.matches], getattr(cache, "cropped", [])
    cache.close()
    logits = torch.stack(out.logits, dim=1)
    return {"ids": out.sequences, "logits": logits, "hits": hits, "cropped": cropped}


def a_family(family):
    torch.manual_seed(0)
    model = make(family)
    pool = QuirePool(model, num_pages=80, max_model_len=160, max_draft_tokens=DRAFTS)
    for pages in pool.pages.tensors:
        pages.view(torch.float32).fill_(float("nan"))
    runs = {}
    ids = torch.randint(3, 259, (1, PROMPT))
    for turn in range(TURNS):
        prompt, runs[f"turn {turn}"] = ids, generate(model, pool, ids)
        ids = torch.cat([runs[f"turn {turn}"]["ids"], torch.randint(3, 259, (1, QUESTION))], dim=1)
    runs["cold"] = generate(model, pool, prompt, salt=b"another tenant")
    # A rejected draft needs a token that came before: any one is matched.
    runs["drafts"] = generate(
        model, pool, prompt, prompt_lookup_num_tokens=DRAFTS, max_matching_ngram_size=1
    )
    runs["sampled"] = generate(model, pool, prompt, do_sample=True, temperature=1.5, top_k=50)
    first = runs["turn 0"]["ids"][:, :PROMPT]
    pads = prompt.shape[1] - PROMPT
    mask = torch.ones(2, prompt.shape[1], dtype=torch.long)
    mask[0, :pads] = 0
    both = torch.cat([torch.cat([prompt[:, :pads], first], dim=1), prompt])
    batch = generate(model, pool, both, mask, pad_token_id=0)
    for row, cut in ((0, pads), (1, 0)):
        one = {name: batch[name][row : row + 1] for name in ("ids", "logits", "hits")}
        runs[f"row {row}"] = one | {"ids": one["ids"][:, cut:]}
    pool.kv.check_invariants()
    free, implementation = pool.kv.num_free_slots, model.config._attn_implementation
    pool.close()
    for run in runs.values():
        whole = model(run["ids"], use_cache=False).logits
        run["eager"] = whole[:, -1 - run["logits"].shape[1] : -1]
    model.full_forward = lambda ids: oracle.logits(model, ids)
    result = {"bound": tolerance(model), "runs": runs, "free": free}
    names = implementation, model.config._attn_implementation
    return result | {"names": names, "prompt": prompt.shape[1]}


def refusals():
    """The error of each misuse: {name: message}."""
    model, said = make("llama"), {}
    pool = QuirePool(model, num_pages=6, max_model_len=64, max_requests=2)
    ids = torch.arange(10, 50)[None]

    def refused(name, call, *args, **kwargs):
        try:
            call(*args, **kwargs)
            said[name] = None
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    greedy = {"max_new_tokens": 2, "do_sample": False}
    refused("a second pool", QuirePool, model, num_pages=6, max_model_len=64)
    refused("no cache", model.generate, ids, **greedy)

    def run(given, known, **more):
        model.generate(given, past_key_values=QuireCache(pool, known), **greedy | more)

    refused("another prompt", run, ids + 1, ids)
    refused("beams", run, ids[:, :20], ids[:, :20].expand(2, -1), num_beams=2)
    refused("drafts without room", run, ids, ids, prompt_lookup_num_tokens=2)
    refused("several answers", run, ids, ids, num_return_sequences=2, do_sample=True)
    refused("too many rows", QuireCache, pool, ids.expand(3, -1))
    refused("padding on the right", QuireCache, pool, ids, (ids < 40).long())
    ended = QuireCache(pool, ids)
    ended.close()
    refused("an ended cache", model.generate, ids, past_key_values=ended, **greedy)
    other = QuireCache(pool, ids[:, :20])
    model.generate(ids[:, :20], past_key_values=other, **greedy)
    refused("out of pages", run, ids.flip(1), ids.flip(1), max_new_tokens=20)
    went_on = model(torch.tensor([[5]]), past_key_values=other).logits
    said["the other goes on"] = bool(went_on.isfinite().all())
    mask = torch.zeros(1, 1, 40, 40)
    refused("a 4D mask", model, ids, attention_mask=mask, past_key_values=QuireCache(pool, ids))
    config = AutoConfig.for_model("gemma3n_text", num_hidden_layers=2, num_kv_shared_layers=1)
    shared = type("Model", (), {"config": config})
    refused("shared keys", QuirePool, shared, num_pages=6, max_model_len=64)
    return said


def blocks_of(page):
    """[(what a block of the page printed, what stands below it or None)]."""
    block = re.compile(
        r'```python title="needs transformers"\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?', re.M | re.S
    )
    names, found = {"__name__": "__main__"}, []
    for code, below in block.findall(page.read_text(encoding="utf-8")):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, page, "exec"), names)
        found.append((out.getvalue(), below or None))
    return found


def main():
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    root = Path(sys.argv[1])
    for family in FAMILIES:
        torch.save(a_family(family), root / f"{family}.pt")
    (root / "page.json").write_text(json.dumps(blocks_of(PAGE)))
    (root / "refusals.json").write_text(json.dumps(refusals()))


if __name__ == "__main__":
    main()
