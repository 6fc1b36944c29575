"""transformers' ``generate`` over our pages and attention: its logits beside those of eager attention over the same tokens.

Weights are random, pages NaN at first. A greedy token must be the one that eager attention finds largest: no two logits are so close that
rounding could choose.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support import models
from tests.support.shared import once_a_run

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss")
SUPPORTED = "5.23."


def transformers_version():
    if importlib.util.find_spec("transformers") is None:
        return None
    return importlib.metadata.version("transformers")


@pytest.fixture(scope="session")
def said(tmp_path_factory) -> Path:
    """The report of `tests.support.models.adopted`, made once a run."""
    version = transformers_version()
    if version is None or not version.startswith(SUPPORTED):
        pytest.skip(f"needs transformers {SUPPORTED}*, which the adapter is for, found {version}")
    return once_a_run(tmp_path_factory, "adopted", _generate)


def _generate(root: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = Path(models.__file__).with_name("adopted.py")
    command = [sys.executable, str(program), str(root)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(params=FAMILIES)
def family(request, said):
    return torch.load(said / f"{request.param}.pt")


def test_logits_are_those_of_eager_attention(family):
    for name, run in family["runs"].items():
        off = (run["logits"] - run["eager"]).abs().max().item()
        assert off <= family["bound"], name
    assert family["bound"] < 1e-3  # or it would allow anything


def test_greedy_tokens_are_those_of_eager_attention(family):
    for name, run in family["runs"].items():
        if name == "sampled":
            continue
        first, second = run["eager"].topk(2, dim=-1).values.unbind(-1)
        assert (first - second).min() > 2 * family["bound"], name
        expected = run["eager"].argmax(-1)
        assert torch.equal(run["ids"][:, -expected.shape[1] :], expected), name


def test_a_hit_is_what_a_cold_run_computes(family):
    hit, cold = family["runs"]["turn 2"], family["runs"]["cold"]
    assert hit["hits"] != cold["hits"] == [0]
    assert torch.equal(hit["ids"], cold["ids"])
    assert (hit["logits"] - cold["logits"]).abs().max() <= family["bound"]


def test_calls_find_what_earlier_ones_computed(family):
    """In pages of 16: each turn of a chat all whole pages of the one before, another tenant nothing, a prompt that is sent again all but
    its last page, each row of a batch its own."""
    hits = {name: run["hits"] for name, run in family["runs"].items()}
    assert hits == {
        "turn 0": [0], "turn 1": [48], "turn 2": [64], "cold": [0], "drafts": [80], "sampled": [80], "row 0": [32], "row 1": [80]
    }  # fmt: skip


def test_drafts_change_no_token(family):
    assert torch.equal(family["runs"]["drafts"]["ids"], family["runs"]["cold"]["ids"])


def test_drafts_are_rejected_and_accepted(said):
    cropped = [torch.load(said / f"{f}.pt")["runs"]["drafts"]["cropped"] for f in FAMILIES]
    assert sum(max(counts) > 0 for counts in cropped) >= 4
    assert min(len(counts) for counts in cropped) == 2  # steps, for six tokens


def test_requests_end_and_the_model_gets_its_attention_back(family):
    assert family["free"] == 16
    assert family["names"] == ("quire", "eager")


def test_the_page_prints_what_it_shows(said):
    blocks = json.loads((said / "page.json").read_text())
    assert len(blocks) == 2
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


@pytest.mark.parametrize("what", REFUSED)
def test_misuse_is_refused_by_name(what, said):
    message = json.loads((said / "refusals.json").read_text())[what]
    assert message is not None
    assert re.match(REFUSED[what], message), message


def test_a_request_without_pages_ends_alone(said):
    assert json.loads((said / "refusals.json").read_text())["the other goes on"] is True


@pytest.mark.parametrize("version", ["5.22.0", "5.230.0", "6.0.0"])
def test_other_versions_are_refused(version, monkeypatch):
    other = ModuleType("transformers")
    other.__version__ = version
    other.AttentionInterface = other.AttentionMaskInterface = other.Cache = object
    monkeypatch.setitem(sys.modules, "transformers", other)
    with pytest.raises(ImportError, match=f"transformers: expected 5.23, got {version}"):
        importlib.import_module("quire.models.integrations.transformers")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install 'quire\[transformers\]'"):
        importlib.import_module("quire.models.integrations.transformers")
