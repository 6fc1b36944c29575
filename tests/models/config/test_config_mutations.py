"""Every key that is read of a config.json, and every kind of wrong value: a model that can be built and run, or an error that names the key."""

import json
from dataclasses import fields, replace

import pytest
import torch

from quire.bench.common.hf_checkpoint import save_checkpoint, to_hf
from quire.models.chat import ChatTemplate
from quire.models.config.hf import from_hf, load_config, read_generation_config
from quire.models.config.named import get_config
from quire.models.deepseek_v4.config import DeepseekV4Keys
from quire.models.families.gemma3 import Gemma3Keys
from quire.models.families.gemma4 import Gemma4Keys
from quire.models.families.gpt_oss import GptOssKeys
from quire.models.families.llama import LlamaKeys
from quire.models.loading.checkpoint import INDEX_FILE
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import build_model, load_model

DEEP = json.loads("[" * 500 + "]" * 500)
VALUES = {
    "null": None, "true": True, "text": "x", "-1": -1, "0": 0, "1.5": 1.5, "NaN": float("nan"), "inf": float("inf"),
    "1e12": 10**12, "1e7": 10**7, "1e-320": 1e-320, "huge": 10**4000, "[]": [], "[null]": [None], "{}": {}, "[[[]]]": [[[]]],
    "deep": DEEP, "{x}": {"x": DEEP},
}  # fmt: skip
FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}},
}
TOKENS = {"eos_token_id": [1, 5], "bos_token_id": 2}
FILES = {}  # config.json that says every key of its family
for file in ("deepseek-v4-tiny", "gemma4-e-tiny", "gpt-oss-tiny"):
    fp8 = {key: FP8[key] for key in FP8 if key != "config_groups" or "v4" not in file}
    FILES[file] = to_hf(get_config(file)) | TOKENS | {"quantization_config": fp8}


def paths(config, at=()):
    """Paths to the values of nested objects, inner ones included."""
    for key, value in config.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def mutated(config, path, value):
    """A copy, which shares what is not on the path."""
    return config | {path[0]: mutated(config[path[0]], path[1:], value) if path[1:] else value}


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_value_is_named_or_means_something(tmp_path, name):
    """An accepted file makes a model whose logits are finite, or a larger one that the checkpoint's tensors do not fit."""
    base = FILES[name]
    save_checkpoint(random_model(from_hf(base)), tmp_path)
    limit = 4 * num_weights(from_hf(base))
    accepted, refused = {}, 0
    for path in paths(base):
        for kind, value in VALUES.items():
            try:
                config = from_hf(mutated(base, path, value))
            except (ValueError, NotImplementedError) as error:
                assert type(error) in (ValueError, NotImplementedError)
                message = str(error)
                assert len(message) < 1000 and path[-1] in message, (path, kind, message)
                refused += 1
            else:
                accepted.setdefault(config, (path, value))
    assert refused > 5 * len(list(paths(base)))
    ids = torch.arange(3, 43)
    for config, what in accepted.items():
        if num_weights(config) < limit:
            # Tables of as many positions as the prompt has: those of 10**7 take seconds.
            short = replace(config, max_position_embeddings=len(ids))
            assert random_model(short).full_forward(ids % config.vocab_size).isfinite().all(), what
            continue
        (tmp_path / "config.json").write_text(json.dumps(mutated(base, *what)))
        with pytest.raises(ValueError, match=r"do not fit its config\.json: .*misshaped"):
            load_model(tmp_path)


def num_weights(config):
    model = build_model(config, device="meta", dtype=torch.float32)
    return sum(weight.numel() for weight in model.parameters())


# Keys that change no logits of inference: training, outputs, bookkeeping.
HARMLESS = {
    "_name_or_path", "architectures", "attention_dropout", "chunk_size_feed_forward", "dtype",
    "id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "transformers_version", "use_cache",
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "keys"),
    [
        ("llama", LlamaKeys),
        ("gpt_oss", GptOssKeys),
        ("gemma3_text", Gemma3Keys),
        ("gemma4_text", Gemma4Keys),
        ("deepseek_v4", DeepseekV4Keys),
    ],
)
def test_keys_that_are_not_read_are_harmless(model_type, keys):
    """Of those that transformers has; all others are read, and held against what is supported."""
    known = pytest.importorskip("transformers").AutoConfig.for_model(model_type).to_dict()
    assert set(known) - {field.name for field in fields(keys)} <= HARMLESS


JSON_FILES = {
    "config.json": load_config,
    "generation_config.json": read_generation_config,
    "tokenizer_config.json": ChatTemplate.of_directory,
    INDEX_FILE: load_model,
}


@pytest.fixture
def directory(tmp_path):
    save_checkpoint(random_model(get_config("llama-tiny")), tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 200_000, "expected JSON of less depth and size in .*, got RecursionError"),
        (b'{"a": ' * 200_000, "expected JSON of less depth and size in .*, got RecursionError"),
        (b'{"a": 1, "b": 2, "a": 3}', "expected JSON in .*, got keys twice: 'a'"),
        (b'{"a": "\xff"}', "expected JSON in .*, got 'utf-8' codec"),
        (b"7", "expected a JSON object in .*, got 7"),
        (b'{"a": ' + b"9" * 5000 + b"}", "expected JSON in "),
        (b"", "expected JSON in "),
    ],
)
def test_files_that_are_no_json_objects(directory, name, data, reason):
    (directory / name).write_bytes(data)
    with pytest.raises(ValueError, match=f"path: {reason}") as error:
        JSON_FILES[name](directory)
    assert str(directory / name) in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("name", "key", "keys"),
    [
        ("config.json", "hidden_size", {"hidden_size": "64"}),
        ("config.json", "dtype", {"dtype": 5}),
        ("config.json", "weight_block_size", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [96]}}),
        ("generation_config.json", "eos_token_id", {"eos_token_id": [1, -1]}),
        ("generation_config.json", "eos_token_id", {"eos_token_id": 259}),
        ("generation_config.json", "do_sample", {"do_sample": "yes"}),
        ("generation_config.json", "temperature", {"temperature": float("nan")}),
        ("tokenizer_config.json", "chat_template", {"chat_template": 5}),
        ("tokenizer_config.json", "chat_template[0].template", {"chat_template": [{"name": "default"}]}),
        ("tokenizer_config.json", "bos_token", {"chat_template": "x", "bos_token": {"content": 5}}),
        (INDEX_FILE, "weight_map", {"weight_map": ["x"]}),
    ],
)  # fmt: skip
def test_errors_name_key_and_file(directory, name, key, keys):
    file = directory / name
    before = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(before | keys))
    with pytest.raises((ValueError, NotImplementedError)) as error:
        load_model(directory)
        ChatTemplate.of_directory(directory)
    assert str(error.value).startswith(key) or f".{key}" in str(error.value).split(":")[0]
    assert str(error.value).endswith(f", in {str(file)!r}")


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": -1.0},
        {"eos_token_ids": (259,)},
        {"final_logit_softcapping": 0},
        {"hidden_size": True},
        {"hidden_size": None},
    ],
)
def test_configurations_of_callers_are_checked_alike(change):
    with pytest.raises(ValueError, match=f"^{next(iter(change))}: expected"):
        replace(get_config("gemma3-tiny"), **change)


def test_rotary_tables_that_memory_does_not_hold(tmp_path, monkeypatch):
    """DeepSeek-V4 has them for all positions: the only memory that a config asks for and no tensor of the files does."""
    config = replace(get_config("deepseek-v4-tiny"), max_position_embeddings=2**31 - 1)
    save_checkpoint(random_model(replace(config, max_position_embeddings=64)), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    monkeypatch.setattr("quire.models.deepseek_v4.checkpoint.free_memory", lambda device: 2**36)
    with pytest.raises(
        ValueError, match="max_position_embeddings: expected rotary tables of at most the free"
    ):
        load_model(tmp_path)
