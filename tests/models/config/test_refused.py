"""Wrong values, contradictions and unsupported features of the JSON files: an error names key and file."""

import json
from dataclasses import MISSING, fields, replace

import pytest
import torch

from quire.bench.common.hf_checkpoint import save_checkpoint, to_hf
from quire.models.chat import ChatTemplate
from quire.models.config.hf import from_hf, load_config
from quire.models.config.named import get_config
from quire.models.deepseek_v4.config import DeepseekV4Keys
from quire.models.families.gemma4 import Gemma4Keys
from quire.models.families.gpt_oss import GptOssKeys
from quire.models.loading.checkpoint import INDEX_FILE
from quire.models.loading.random_weights import random_model
from quire.models.loading.weights import build_model, load_model
from tests.models.config.test_configs import ABSENT, LLAMA3, RATIOS, RELEASED, YARN, changed, read

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
V4_FP8 = {key: FP8[key] for key in ("quant_method", "weight_block_size")}
FILES = {
    "deepseek-v4-tiny": (DeepseekV4Keys, V4_FP8),
    "gemma4-e-tiny": (Gemma4Keys, FP8),
    "gpt-oss-tiny": (GptOssKeys, FP8),
}


def whole_file(name):
    """config.json with every key of its family that has a value."""
    keys, quantization = FILES[name]
    defaults = {f.name: f.default for f in fields(keys) if f.default not in (None, MISSING)}
    more = {"eos_token_id": [1, 5], "bos_token_id": 2, "quantization_config": quantization}
    return defaults | to_hf(get_config(name)) | more


def paths(config, at=()):
    """Paths to the values of nested objects, inner ones included."""
    for key, value in config.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def mutated(config, path, value):
    """A copy, which shares what is not on the path."""
    return config | {path[0]: mutated(config[path[0]], path[1:], value) if path[1:] else value}


def num_weights(config):
    model = build_model(config, device="meta", dtype=torch.float32)
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_value_is_named_or_means_something(tmp_path, name):
    """An accepted file makes a model whose logits are finite, or a larger one that the checkpoint's tensors do not fit."""
    base = whole_file(name)
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


def quantized(method, **more):
    return {"quantization_config": {"quant_method": method, **more}}


INT4 = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
LOW = LLAMA3 | {"low_freq_factor": 4.0}
UNLIKE = {"per_layer_config": {"2": {"head_dim": 64}, "5": {"head_dim": 32}}}
# By file: the keys that change, and words of the error.
UNSUPPORTED = [
    ("llama-tiny", {"model_type": "mamba"}, r"model_type: supported are \[.*got 'mamba'"),
    ("llama-tiny", {"mlp_bias": True}, "mlp_bias: supported is False, got True"),
    ("llama-tiny", quantized("gptq"), r"n_config\.quant_method: supported is 'fp8' or .*, got 'gptq'"),
    ("llama-tiny", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type: .*got 'longrope'"),
    ("gemma3-tiny", {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "got 'dynamic'"),
    ("gemma3-tiny", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: .*got 50.0"),
    ("gemma4-tiny", {"attention_bias": True, "tie_word_embeddings": False},
        r"attention_bias.*tie_word_embeddings"),  # all in one message
    ("gemma4-tiny", quantized("compressed-tensors", config_groups=INT4),
        "group_0.weights.type: supported is 'float', got 'int'; .*num_bits: supported is 8, got 4"),
    ("gemma4-tiny", UNLIKE, "per_layer_config: supported are"),
    ("gemma4-tiny", {"model_type": "gemma4_assistant", "text_config": {}},
        "'gemma4_assistant': a drafter.*give it as drafter"),
    ("gemma4-e-tiny", {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}},
        "'gemma3n': .*AltUp"),
    ("gemma4-e-tiny", {"vocab_size_per_layer_input": 300},
        "vocab_size_per_layer_input: supported is vocab_size=259, got 300"),
    ("deepseek-v4-tiny", {"model_type": "deepseek_v41"},
        "'deepseek_v41': .*compress_ratios of 1 and 2, two-level top-k and Engram"),
    ("deepseek-v4-tiny", quantized("fp8", weight_block_size=[64, 64]),
        r"quantization_config.weight_block_size: supported is None or \[128, 128\], got \[64, 64\]"),
    ("deepseek-v4-flash", {"compress_ratios": [0] * 42 + [16, 0]}, r"compress_ratios: .* got \[16\]"),
    ("deepseek-v4-flash", {"rope_scaling": {"type": "longrope"}}, "rope.*'longrope'"),
    ("deepseek-v4-flash", {"rope_scaling": YARN | {"attention_factor": 1.277}}, "attention_factor"),
]  # fmt: skip
WRONG = [
    ("gemma3-tiny", {"num_key_value_heads": 3},
        "num_kv_heads: expected a divisor of num_heads=4, got 3"),
    ("gemma3-tiny", {"num_hidden_layers": 9},
        "layer_types: expected num_hidden_layers=9 entries, got 7"),
    ("gemma3-tiny", {"eos_token_id": 259},
        r"eos_token_ids: expected ids below vocab_size=259, got \(259,\)"),
    ("gemma4-e-tiny", {"num_kv_shared_layers": 9}, r"num_kv_shared_layers: expected 0\.\.8"),
    ("gemma4-e-tiny", {"num_kv_shared_layers": 7}, "an earlier layer of kind .*full_attention"),
    ("gemma4-moe-tiny", {"top_k_experts": 9}, r"top_k: expected 1\.\.num_experts=8, got 9"),
    ("gemma4-moe-tiny", {"num_experts": None}, r"enable_moe_block: expected \['num_experts'\]"),
    ("llama-tiny", {"rope_parameters": LOW}, "low_freq_factor: expected less than high_freq_factor"),
    ("llama-tiny", {"rope_parameters": changed(LLAMA3, {"low_freq_factor": ABSENT})},
        r"rope_parameters: expected \['low_freq_factor'\]"),
    ("deepseek-v4-tiny", {"mlp_layer_types": ["moe"]},
        "mlp_layer_types: expected at least num_hidden_layers=6 entries, got 1"),
    ("deepseek-v4-flash", {"compress_ratios": RATIOS[:42]}, "compress_ratios: expected at least"),
    ("deepseek-v4-flash", {"compress_ratios": [0] * 43 + [4]}, "num_nextn_predict_layers"),
    ("deepseek-v4-flash", {"compress_ratios": None}, "layer_types or compress_ratios, got neither"),
    ("deepseek-v4-flash", {"o_groups": 7}, "o_groups: expected a divisor of num_heads=64"),
    ("deepseek-v4-flash", {"num_experts_per_tok": 300}, "num_experts_per_tok: expected at most 256"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "name", "change", "message"),
    [(NotImplementedError, *row) for row in UNSUPPORTED] + [(ValueError, *row) for row in WRONG],
)
def test_unsupported_features_and_contradictions_are_named(error, name, change, message):
    with pytest.raises(error, match=message) as caught:
        read(changed(RELEASED.get(name) or to_hf(get_config(name)), change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda config: replace(config, rms_norm_eps=-1.0), "rms_norm_eps: expected"),
        (lambda config: replace(config, eos_token_ids=(259,)), "eos_token_ids: expected"),
        (lambda config: replace(config, final_logit_softcapping=0), "final_logit_soft.*: expected"),
        (lambda config: replace(config, hidden_size=True), "hidden_size: expected"),
        (lambda config: replace(config, hidden_size=None), "hidden_size: expected"),
        (
            lambda config: get_config("gemma-5"),
            "name: expected one of .*gemma-4-31b.*got 'gemma-5'",
        ),
    ],
)
def test_configurations_of_callers_are_checked_alike(call, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        call(get_config("gemma3-tiny"))


@pytest.fixture
def directory(tmp_path):
    save_checkpoint(random_model(get_config("llama-tiny")), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[" * 200_000, "expected JSON of less depth and size in .*, got RecursionError"),
        (b'{"a": 1, "b": 2, "a": 3}', "expected JSON in .*, got keys twice: 'a'"),
        (b"7", "expected a JSON object in .*, got 7"),
    ],
)
def test_files_that_are_no_json_objects(directory, data, reason):
    """`tests.test_fuzz` has such in each of the files."""
    file = directory / "config.json"
    file.write_bytes(data)
    with pytest.raises(ValueError, match=f"path: {reason}") as error:
        load_config(directory)
    assert str(file) in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("name", "key", "keys"),
    [
        ("config.json", "hidden_size", {"hidden_size": "64"}),
        ("config.json", "dtype", {"dtype": 5}),
        ("config.json", "weight_block_size", quantized("fp8", weight_block_size=[96])),
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


def test_rotary_tables_that_memory_does_not_hold(tmp_path, monkeypatch):
    """DeepSeek-V4 has them for all positions: the only memory that a config asks for and no tensor of the files does."""
    config = replace(get_config("deepseek-v4-tiny"), max_position_embeddings=2**31 - 1)
    save_checkpoint(random_model(replace(config, max_position_embeddings=64)), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    monkeypatch.setattr("quire.models.deepseek_v4.checkpoint.free_memory", lambda device: 2**36)
    with pytest.raises(ValueError, match="max_position_embeddings: expected rotary tables of at most the free"):  # fmt: skip
        load_model(tmp_path)
