"""Models by directory, file and name on the Hub; the Hub itself is replaced."""

from types import SimpleNamespace

import pytest

from quire.models.loading import locate
from quire.models.loading.locate import PATTERNS, locate_checkpoint

hub = pytest.importorskip("huggingface_hub")
REPOSITORIES = {
    "org/model": ["config.json", "model.safetensors", "pytorch_model.bin"],
    "org/one": ["README.md", "one.gguf"],
    "org/two": ["a.gguf", "b.gguf"],
}


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """Calls of a Hub that has a repository of each kind."""
    calls = []

    def model_info(api, name, timeout):
        if name == "org/down":
            raise OSError("no route")
        if name not in REPOSITORIES:
            raise hub.errors.RepositoryNotFoundError("404", response=SimpleNamespace(headers={}, request=None))  # fmt: skip
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=f) for f in REPOSITORIES[name]])

    def fetch(*what, local_files_only, **options):
        if local_files_only:
            raise hub.errors.LocalEntryNotFoundError("not cached")
        calls.append((*what, *options.values()))
        return str(tmp_path)

    monkeypatch.setattr(hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(hub, "snapshot_download", fetch)
    monkeypatch.setattr(hub, "hf_hub_download", fetch)
    monkeypatch.setattr(locate, "unpack", lambda file: file)
    return calls


@pytest.mark.parametrize("name, call", [
    ("org/model", ("org/model", list(PATTERNS))),
    ("org/one", ("org/one", "one.gguf")),
    ("org/two/b.gguf", ("org/two", "b.gguf")),
])  # fmt: skip
def test_only_what_is_needed_is_fetched(fetched, name, call, tmp_path):
    assert locate_checkpoint(name) == tmp_path
    assert fetched == [call]
    assert not any("bin" in pattern for pattern in PATTERNS)


OTHERWISE = r"(?s)Hugging Face directory.*\n.*llama-tiny"


@pytest.mark.parametrize("name, words, lines", [
    ("org/two", r"one of its .gguf files in the name .*\['a.gguf', 'b.gguf'\]", 1),
    ("org/none", "no such repository", 1),
    ("org/down", "not in the cache, and the Hub cannot be reached: OSError", 1),
    ("lama-tiny", OTHERWISE, 3),
    ("/no/such/model", OTHERWISE, 3),
    ("a b", OTHERWISE, 3),
    ("models/no-such", OTHERWISE, 3),
])  # fmt: skip
def test_few_lines_say_why_nothing_was_fetched(fetched, name, words, lines):
    with pytest.raises(ValueError, match=words) as error:
        locate_checkpoint(name)
    assert str(error.value).count("\n") == lines - 1 and not fetched
