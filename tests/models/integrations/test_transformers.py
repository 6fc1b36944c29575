"""transformers' ``generate`` over our pages and attention: its logits beside those of eager attention over the same tokens.

Weights are random, pages NaN at first. A greedy token must be the one that eager attention finds largest: no two logits are so close that
rounding could choose.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import models
from tests.support.shared import once_a_run

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss")


@pytest.fixture(scope="session")
def said(tmp_path_factory) -> Path:
    """The report of `tests.support.models.adopted`, made once a run."""
    found = importlib.util.find_spec("transformers") and importlib.metadata.version("transformers")
    if not (found or "").startswith(("5.23.", "5.24.")):
        pytest.skip(f"needs transformers 5.23 or 5.24, which the adapter is for, found {found}")

    def generate(root):
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        command = [sys.executable, Path(models.__file__).with_name("adopted.py"), root]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]

    return once_a_run(tmp_path_factory, "adopted", generate)


@pytest.fixture(params=FAMILIES)
def family(request, said):
    return torch.load(said / f"{request.param}.pt")


def test_logits_and_greedy_tokens_are_those_of_eager_attention(family):
    bound = family["bound"]
    assert bound < 1e-3  # or it would allow anything
    for name, run in family["runs"].items():
        assert (run["logits"] - run["eager"]).abs().max() <= bound, name
        if name != "sampled":
            first, second = run["eager"].topk(2, dim=-1).values.unbind(-1)
            assert (first - second).min() > 2 * bound, name
            expected = run["eager"].argmax(-1)
            assert torch.equal(run["ids"][:, -expected.shape[1] :], expected), name


def test_hits_and_drafts_change_no_token(family):
    hit, cold = family["runs"]["turn 2"], family["runs"]["cold"]
    assert torch.equal(hit["ids"], cold["ids"])
    assert torch.equal(family["runs"]["drafts"]["ids"], cold["ids"])
    assert (hit["logits"] - cold["logits"]).abs().max() <= family["bound"]


def test_calls_find_what_earlier_ones_computed(family):
    """In pages of 16: each turn of a chat all whole pages of the one before, another tenant nothing, a prompt that is sent again all but
    its last page, each row of a batch its own."""
    hits = {name: run["hits"] for name, run in family["runs"].items()}
    assert hits == {
        "turn 0": [0], "turn 1": [48], "turn 2": [64], "cold": [0], "drafts": [80], "sampled": [80], "row 0": [32], "row 1": [80]
    }  # fmt: skip


def test_drafts_are_rejected_and_accepted(said):
    cropped = [torch.load(said / f"{f}.pt")["runs"]["drafts"]["cropped"] for f in FAMILIES]
    assert sum(max(counts) > 0 for counts in cropped) >= 4
    assert min(len(counts) for counts in cropped) < 5  # steps, for six tokens


def test_requests_end_and_the_model_gets_its_attention_back(family):
    assert family["free"] == 16
    assert family["names"] == ("quire", "eager")


def test_the_page_prints_what_it_shows(said):
    blocks = json.loads((said / "page.json").read_text())
    assert blocks
    for printed, shown in blocks:
        assert printed == shown


REFUSED = {
    "a second pool": "ValueError: model: expected one without a QuirePool",
    "no cache": "NotImplementedError: attention 'quire': .* got DynamicCache",
    "another prompt": "ValueError: input_ids: expected those that the QuireCache was made with",
    "beams": "NotImplementedError: QuireCache: supported are greedy search, sampling and drafts",
    "drafts without room": "ValueError: max_draft_tokens: .* QuirePool has 0",
    "several answers": "ValueError: past_key_values: expected an open QuireCache of 2 rows",
    "too many rows": r"ValueError: input_ids, attention_mask: expected \[batch <= 2 free requests",
    "padding on the right": "ValueError: attention_mask: expected ones and, on the left, zeros",
    "an ended cache": "ValueError: past_key_values: expected an open QuireCache of 1 rows",
    "out of pages": "MemoryError: QuirePool: out of pages: the step needs 1 .* 0 are free",
    "a 4D mask": "NotImplementedError: attention 'quire': supported are input_ids, a 2D",
    "shared keys": "NotImplementedError: model: supported are decoders .* got 'gemma3n_text'",
}


def test_misuse_is_refused_by_name_and_harms_no_other_request(said):
    messages = json.loads((said / "refusals.json").read_text())
    assert messages.pop("the other goes on") is True
    assert messages.keys() == REFUSED.keys()
    for what, message in messages.items():
        assert re.match(REFUSED[what], message or "no error"), (what, message)
