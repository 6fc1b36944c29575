"""Mutated files of each format that is read: a value, or one error of one line that says where, in bounded time and memory."""

import json
import os
import random
import resource
import shutil
import signal
import struct
import time
from contextlib import contextmanager

import pytest

from quire.bench.common.hf_checkpoint import save_checkpoint
from quire.bench.common.traces import LOADERS
from quire.models.chat import ChatTemplate
from quire.models.config.hf import load_config
from quire.models.config.named import get_config
from quire.models.engine.engine import EngineConfig
from quire.models.engine.request import SamplingParams
from quire.models.llm import LLM, default_params
from quire.models.loading.checkpoint import INDEX_FILE
from quire.models.loading.gguf import GGUFFile
from quire.models.loading.locate import locate_checkpoint
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import load_model
from quire.models.tokenizer import find_tokenizer
from tests.bench.test_replay import bailian, call, mooncake, session, write
from tests.support.models.toy import ToyModel

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
gguf_files = pytest.importorskip("tests.support.models.gguf_files", exc_type=ImportError)

SECONDS, MEBIBYTES = 5, 2048
JSON_VALUES = [
    "null", "true", "-1", "0", "1e999", "-1e-400", "NaN", "-Infinity", "9" * 401, "9" * 5000,
    "[]", "{}", "[[]]", "[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900, '{"a":' * 900 + "0" + "}" * 900, '"\\ud800"', '"../../x"', '"/dev/zero"',
    '""', '"' + "x" * 1_000_000 + '"', '0, "twice": 1, "twice": 2', "[null]", "[1e9, {}]",
]  # fmt: skip
BYTES = [b"\0" * 8, b"\xff" * 8, struct.pack("<Q", 2**63), b'"', b"{", b"]", b"\xed\xa0\x80"]


def places(value):
    """(container, key) of every value in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def with_another_value(data, rng):
    """JSON lines with one value replaced by one of `JSON_VALUES`, or its key by the empty one."""
    lines = [json.loads(line) for line in data.decode().splitlines()]
    container, key = rng.choice(list(places(lines)))
    container[key] = "@"
    text = "\n".join(map(json.dumps, lines))
    return text.replace('"@"', rng.choice(JSON_VALUES)).encode()


def with_other_bytes(data, rng, most):
    """Bytes that are changed, left out, doubled or cut off, in the first ``most``."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(min(most, len(changed)) or 1)
        stop = at + rng.choice([1, 8, rng.randrange(200)])
        new = rng.choice([rng.randbytes(1), b"", bytes(changed[at:stop]) * 2, *BYTES])
        changed[at:stop] = new
    return bytes(changed if rng.random() < 0.8 else changed[: rng.randrange(len(data))])


@contextmanager
def bounded():
    """Fail after `SECONDS`, or for more than `MEBIBYTES` of memory besides what was used before."""

    def hangs(*_):
        raise AssertionError("hangs")

    handler = signal.signal(signal.SIGALRM, hangs)
    begin, used = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(12 * SECONDS)  # other processes may need the cores too
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    assert time.process_time() - begin < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < MEBIBYTES * 1024


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint with every file that is read of one."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    path = tmp_path_factory.mktemp("fuzz")
    save_checkpoint(random_model(get_config("llama-tiny")), path)
    names = {name: "model.safetensors" for name in ("model.norm.weight", "lm_head.weight")}
    files = {
        "generation_config.json": {
            "eos_token_id": [1, 5], "do_sample": True, "temperature": 0.5, "top_k": -1, "top_p": 0.9,
            "repetition_penalty": 1.1,
        },
        INDEX_FILE: {"metadata": {"total_size": 5}, "weight_map": names},
        "tokenizer_config.json": {
            "chat_template": [{"name": "default", "template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}],
            "bos_token": {"content": "<s>"},
        },
    }  # fmt: skip
    words = {word: i for i, word in enumerate(["<unk>", "a", "b", "ab", "Ġ"])}
    tokenizer = Tokenizer(models.BPE(words, [("a", "b")], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace("x", "a")
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    files["tokenizer.json"] = json.loads(tokenizer.to_str())
    files["config.json"] = json.loads((path / "config.json").read_text())
    for name, value in files.items():
        (path / name).write_text(json.dumps(value))
    gguf_files.write(path / "x.gguf", gguf_files.make("llama"), "Q8_0")
    agent = {"t": 1, "type": "subagent", "requests": [call(2.5, 64, [1])]}
    write(path / "mooncake.jsonl", *[mooncake()] * 3)
    write(path / "bailian.jsonl", *[bailian(1, -1)] * 3)
    write(path / "weka.jsonl", *[session("a", call(0, 128, [1, 2]), agent)] * 3)
    return path


@pytest.fixture(scope="module")
def llm():
    return LLM(ToyModel(), engine=EngineConfig(num_pages=60))


def read_tokenizer(path, llm):
    llm.tokenizer = llm.engine.tokenizer = find_tokenizer(llm.model.config, path)
    llm.generate(["ab xa <s>"], SamplingParams(4, stop="zz"), progress=False)


def read_gguf(path, llm):
    with GGUFFile(path / "x.gguf") as opened:
        opened.config()
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            opened.get_tensor(name)


def read_template(path, llm):
    ChatTemplate.of_directory(path).render([{"role": "user", "content": "a"}])


def trace(name):
    return lambda path, llm: [r.tokens(0)[:9] for r in LOADERS[name](path / f"{name}.jsonl", None)]


# file: (reader, bytes from the start that are changed)
FORMATS = {
    "config.json": (lambda path, llm: load_config(path), 10**6),
    "generation_config.json": (lambda path, llm: (load_config(path), default_params(path)), 10**6),
    INDEX_FILE: (lambda path, llm: load_model(path), 10**6),
    "tokenizer.json": (read_tokenizer, 10**6),
    "tokenizer_config.json": (read_template, 10**6),
    "model.safetensors": (lambda path, llm: load_model(path), 3000),
    "x.gguf": (read_gguf, 8000),
    **{f"{name}.jsonl": (trace(name), 10**6) for name in LOADERS},
}


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file(name, count, directory, llm):
    read, most = FORMATS[name]
    file, rng, refused, wrong = directory / name, random.Random(7), 0, []
    data = file.read_bytes()
    try:
        for i in range(count):
            by_value = ".json" in name and i % 2
            file.write_bytes(
                with_another_value(data, rng) if by_value else with_other_bytes(data, rng, most)
            )
            try:
                with bounded():
                    read(directory, llm)
            except (ValueError, NotImplementedError) as error:
                refused += 1
                text = str(error)
                # A prompt that the tokenizer cannot take is no error of the file.
                names = file.name in text or str(directory) in text or text.startswith("prompts: ")
                if len(text) > 6000 or "\n" in text or not names:
                    wrong.append(f"{i}: {len(text)} characters: {text[:200]!r}")
            except Exception as error:
                wrong.append(f"{i}: {error!r:.200}")
    finally:
        file.write_bytes(data)
    assert not wrong, "\n".join(wrong)
    assert refused > count / 4


def sparse(file):
    """A file of 1 TiB that takes no room, with a valid beginning."""
    data = file.read_bytes()[:64] if file.suffix == ".gguf" else b""
    file.write_bytes(data)
    os.truncate(file, 2**40)


KINDS = {
    "pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "directory": lambda file: (file.unlink(), file.mkdir()),
    "link to itself": lambda file: (file.unlink(), file.symlink_to(file)),
    "link to a device": lambda file: (file.unlink(), file.symlink_to("/dev/zero")),
    "1 TiB": sparse,
    "keys twice": lambda file: file.write_text(
        "{" + ", ".join(f'"{i}": 0' for i in [*range(200_000), 7]) + "}"
    ),
}
OPTIONAL = ("generation_config.json", "tokenizer_config.json", INDEX_FILE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_another_kind(name, kind, directory, llm, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    KINDS[kind](copy / name)
    with bounded():
        try:
            load_config(locate_checkpoint(copy / name if name == "x.gguf" else copy))
            FORMATS[name][0](copy, llm)
        except (ValueError, NotImplementedError) as error:
            assert len(str(error)) < 6000
        else:  # as if it were not there
            assert name in OPTIONAL
