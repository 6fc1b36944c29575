"""GGUF files: their header, tokenizer and slices; `test_layouts` has their logits."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch

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


def test_a_slice_is_a_part_of_the_tensor(file):
    with GGUFFile(file) as opened:
        name = "model.layers.1.self_attn.q_proj.weight"
        part = opened.get_slice(name)
        assert part.get_shape() == [128, 64]
        assert torch.equal(part[32:64], opened.get_tensor(name)[32:64])


def test_changed_bytes_of_the_header_are_refused_or_change_a_value(file, tmp_path):
    """Also lengths of 2**63: nothing is allocated by what a header claims."""
    data, rng = file.read_bytes(), random.Random(0)
    for i in range(400):
        changed = bytearray(data[: rng.randrange(20_000)] if i % 4 == 0 else data)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(min(8_000, len(changed) or 1))
            changed[at : at + 8] = rng.choice(
                [rng.randbytes(1), struct.pack("<Q", 2**63), b"\xff" * 8]
            )
        (tmp_path / "x.gguf").write_bytes(changed)
        try:
            with GGUFFile(tmp_path / "x.gguf") as opened:
                opened.config()
        except (ValueError, NotImplementedError) as error:
            assert "x.gguf" in str(error)
