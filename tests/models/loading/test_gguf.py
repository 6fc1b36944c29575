"""GGUF files: their tokenizer, and what is refused; `test_layouts` has their logits, `tests.test_fuzz` their header."""

import numpy as np
import pytest

from quire.models.chat import find_chat
from quire.models.loading.gguf import GGUF_FILE, GGUFFile, unpack
from quire.models.tokenizer import FileTokenizer

gguf_files = pytest.importorskip("tests.support.models.gguf_files", exc_type=ImportError)
gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
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


def other_architecture(writer):
    writer.arch = "qwen2"
    writer.add_architecture()


def other_type(writer):
    kind = gguf.GGMLQuantizationType.IQ4_NL
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, 18), np.uint8), raw_dtype=kind)


@pytest.mark.parametrize(("edit", "message"), [
    (other_architecture, r"general\.architecture: supported are \['gemma3', 'llama'\], got 'qwen2'"),
    (other_type, r"type: supported are .*, got 'IQ4_NL' of tensor 'blk\.0\.ffn_up\.weight'"),
    (lambda writer: writer.add_uint16("split.count", 2), r"split\.count: supported is 1 file, got 2"),
    (lambda writer: None, r"expected metadata 'llama\.rope\.dimension_count'"),
    (lambda writer: writer.add_rope_dimension_count(32), r"expected a tensor 'token_embd\.weight'"),
])  # fmt: skip
def test_what_is_refused(edit, message, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises((ValueError, NotImplementedError), match=message) as error:
        unpack(tmp_path / "tiny.gguf", tmp_path / "cache")
    assert "\n" not in str(error.value) and str(error.value).count("tiny.gguf") == 1
