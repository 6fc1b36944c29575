"""GGUF files: their tokenizer; `test_layouts` has their logits, `tests.test_fuzz` their header."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.models.chat import find_chat
from quire.models.loading.gguf import GGUF_FILE, GGUFFile, unpack
from quire.models.tokenizer import FileTokenizer

gguf_files = pytest.importorskip("tests.support.models.gguf_files", exc_type=ImportError)
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    gguf_files.write(path, gguf_files.make("llama"), "Q8_0")
    return path


def test_the_directory_is_written_once_and_has_the_tokenizer(file, tmp_path):
    folder = unpack(file, tmp_path)
    at = folder.stat().st_mtime_ns
    assert unpack(file, tmp_path) == folder and folder.stat().st_mtime_ns == at
    assert (folder / GGUF_FILE).resolve() == file
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    assert tokenizer.encode("abcd ab") == theirs("abcd ab").input_ids
    assert find_chat(folder).render([{"role": "user", "content": "Hi"}]) == "Hi"


@pytest.mark.parametrize("key", ["general.architecture", "llama.attention.head_count"])
def test_a_key_that_is_not_there_is_named_with_the_file(file, tmp_path, key):
    path = tmp_path / "x.gguf"
    path.write_bytes(file.read_bytes().replace(key.encode(), key.upper().encode()))
    with pytest.raises(ValueError) as caught, GGUFFile(path) as opened:
        opened.get_tensor("model.layers.1.self_attn.q_proj.weight")
    assert str(caught.value) == f"path: expected metadata {key!r}, got none, in {str(path)!r}"
