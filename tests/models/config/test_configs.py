"""Configurations: reading config.json with its traps, and dealing layers into cache groups."""

import json
import math
from dataclasses import replace

import pytest
import torch

from quire.bench.common.hf_checkpoint import to_hf
from quire.models.config.hf import from_hf
from quire.models.config.model import FULL, SLIDING, AttentionConfig, RopeConfig
from quire.models.config.named import CONFIGS, get_config, named_configs
from quire.models.layers.kv_cache import cache_groups, num_tensors


def read(config: dict, name: str = "x"):
    return from_hf(json.loads(json.dumps(config)), name=name)


@pytest.mark.parametrize("name", named_configs())
def test_config_json_round_trip(name):
    assert read(to_hf(get_config(name)), name) == get_config(name)


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match=r"name: expected one of .*gemma-4-31b.*got 'gemma-5'"):
        get_config("gemma-5")


def test_sparse_multimodal_gemma3():
    """The repository's 4B file leaves most keys out, and says rope_scaling instead of rope_parameters."""
    config = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    assert read(config, "gemma-3-4b") == replace(CONFIGS["gemma-3-4b"], eos_token_ids=(1, 106))


def test_older_keys_of_gemma3():
    config = to_hf(CONFIGS["gemma3-tiny"])
    del config["layer_types"], config["rope_parameters"]
    config |= {"sliding_window_pattern": 3, "rope_theta": 5e5, "rope_local_base_freq": 2e4}
    got = read(config | {"rope_scaling": {"type": "linear", "factor": 4.0}})
    assert got.layer_types == CONFIGS["gemma3-tiny"].layer_types
    assert got.full.rope == RopeConfig("linear", 5e5, factor=4.0)
    assert got.sliding.rope == RopeConfig("default", 2e4)  # never scaled
    assert read(config | {"rope_scaling": None}).full.rope == RopeConfig("default", 5e5)


def test_defaults_of_gemma4():
    got = read({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0})
    assert got.vocab_size == 262144 and got.hidden_size == 2304 and got.num_layers == 30
    assert got.final_logit_softcapping is None
    assert got.sliding == AttentionConfig(8, 4, 256, RopeConfig("default", 1e4), sliding_window=512)
    proportional = RopeConfig("proportional", 1e6, partial_rotary_factor=0.25)
    assert got.full == AttentionConfig(8, 4, 512, proportional)
    assert got.layer_types == ((SLIDING,) * 5 + (FULL,)) * 5


def test_gemma4_last_layer_is_full_whatever_the_list_says():
    config = to_hf(CONFIGS["gemma4-tiny"]) | {"layer_types": [SLIDING] * 6}
    assert read(config).layer_types == (SLIDING,) * 5 + (FULL,)


def test_gemma4_global_kv_heads_need_k_eq_v():
    config = to_hf(CONFIGS["gemma4-tiny"]) | {"attention_k_eq_v": False}
    assert read(config).full.num_kv_heads == config["num_key_value_heads"]


def test_gemma4_per_layer_config():
    config = to_hf(CONFIGS["gemma4-tiny"])
    del config["global_head_dim"], config["num_global_key_value_heads"]
    config["per_layer_config"] = {
        str(i): {"head_dim": 32, "num_key_value_heads": 1} for i in (2, 5)
    }
    assert read(config, "gemma4-tiny") == CONFIGS["gemma4-tiny"]
    config["per_layer_config"]["2"]["head_dim"] = 64
    with pytest.raises(NotImplementedError, match="per_layer_config: supported are"):
        read(config)


# fmt: off
UNSUPPORTED = [
    ("gemma4-e-tiny", {"vocab_size_per_layer_input": 300},
     "vocab_size_per_layer_input: supported is vocab_size=259, got 300"),
    ("llama-tiny", {"hidden_act": "relu"}, "hidden_act: supported is 'silu', got 'relu'"),
    ("gemma3-tiny", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: .*got 50.0"),
    ("gemma4-tiny", {"attention_bias": True, "tie_word_embeddings": False},
     r"attention_bias.*tie_word_embeddings"),  # all in one message
    ("deepseek-v4-tiny", {"num_key_value_heads": True},
     "num_key_value_heads: supported is 1, got True"),
    ("deepseek-v4-tiny",
     {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
     r"quantization_config.weight_block_size: supported is None or \[128, 128\], got \[64, 64\]"),
    ("llama-tiny", {"quantization_config": {"quant_method": "gptq"}},
        r"quantization_config\.quant_method: supported is 'fp8' or .*, got 'gptq'"),
    ("gemma3-tiny", {"quantization_config": {"quant_method": "awq"}}, "quant_method.*got 'awq'"),
    ("gpt-oss-tiny", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        "quant_method.*got 'bitsandbytes'"),
    ("gemma4-tiny", {"quantization_config": {"quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}},
        "group_0.weights.type: supported is 'float', got 'int'; .*num_bits: supported is 8, got 4"),
    ("llama-tiny", {"model_type": "mamba"}, r"model_type: supported are \[.*got 'mamba'"),
    ("llama-tiny", {"model_type": "siglip_vision_model"}, "got 'siglip_vision_model'"),
    ("gemma3-tiny", {"use_bidirectional_attention": True},
        "use_bidirectional_attention: .*got True"),
    ("llama-tiny", {"quantization_config": {"quant_method": "modelopt"}}, "got 'modelopt'"),
    ("gemma4-e-tiny", {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}},
        "'gemma3n': .*AltUp"),
    ("gemma4-e-tiny", {"model_type": "gemma3n_text"}, "'gemma3n_text': .*AltUp"),
    ("gemma4-tiny", {"model_type": "gemma4_assistant", "text_config": {}},
        "'gemma4_assistant': a drafter.*give it as drafter"),
    ("gemma4-tiny", {"model_type": "gemma4_unified_assistant"}, "a drafter"),
    ("deepseek-v4-tiny", {"model_type": "deepseek_v41"},
        "'deepseek_v41': .*compress_ratios of 1 and 2, two-level top-k and Engram"),
    ("deepseek-v4-tiny", {"model_type": "deepseek_v41_text"}, "of DeepSeek-V4.1"),
    ("llama-tiny", {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}},
        "rope_type: .*got 'longrope'"),
    ("gemma3-tiny", {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}},
        "got 'dynamic'"),
    ("llama-tiny", {"mlp_bias": True}, "mlp_bias: supported is False, got True"),
    ("gemma3-tiny", {"tie_word_embeddings": False},
        "tie_word_embeddings: supported is True, got False"),
]
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
    ("llama-tiny",
     {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4,
                          "original_max_position_embeddings": 64, "low_freq_factor": 4.0,
                          "high_freq_factor": 4.0}},
     "low_freq_factor: expected less than high_freq_factor"),
    ("deepseek-v4-tiny", {"mlp_layer_types": ["moe"]},
     "mlp_layer_types: expected at least num_hidden_layers=6 entries, got 1"),
]
# fmt: on


@pytest.mark.parametrize(
    ("error", "name", "change", "message"),
    [(NotImplementedError, *row) for row in UNSUPPORTED] + [(ValueError, *row) for row in WRONG],
)
def test_unsupported_features_wrong_values_and_contradictions_are_named(
    error, name, change, message
):
    with pytest.raises(error, match=message) as caught:
        read(to_hf(get_config(name)) | change)
    assert "\n" not in str(caught.value)


def test_absent_keys_of_gemma4_mean_what_transformers_takes_them_for():
    """A width of 256 for per-layer embeddings, where a file does not say 0; the unified models have none."""
    config = to_hf(CONFIGS["gemma4-tiny"])
    del config["hidden_size_per_layer_input"]
    assert read(config).per_layer_input_size == 256
    unified = {k: v for k, v in config.items() if k != "sliding_window"}
    got = read(
        {
            "model_type": "gemma4_unified",
            "text_config": unified | {"model_type": "gemma4_unified_text"},
        }
    )
    assert got.family == "gemma4" and got.per_layer_input_size == 0
    assert got.sliding.sliding_window == 1024


def test_rope_of_llama():
    config = to_hf(CONFIGS["llama-3.1-8b"])
    rope = config.pop("rope_parameters")
    older = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}  # as in the released file
    assert read(config | older, "llama-3.1-8b") == CONFIGS["llama-3.1-8b"]
    assert read(config).full.rope == RopeConfig("default", 1e4)
    assert read(config | {"rope_theta": 5e5, "rope_scaling": None}).full.rope == RopeConfig(
        "default", 5e5
    )
    del rope["low_freq_factor"]
    with pytest.raises(ValueError, match=r"rope_parameters: expected \['low_freq_factor'\]"):
        read(config | {"rope_scaling": rope})


def test_released_gpt_oss_file():
    """The keys of the 20b file that differ from transformers' defaults, and rope_scaling as it is written there."""
    config = {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32,
        "eos_token_id": 200002, "bos_token_id": 199998, "rope_theta": 150000,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False,
                         "original_max_position_embeddings": 4096, "rope_type": "yarn"},
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    assert read(config, "gpt-oss-20b") == CONFIGS["gpt-oss-20b"]


@pytest.mark.parametrize(("rope", "amplitude"), [
    ({}, 1.0 + 0.1 * math.log(8)),
    ({"attention_factor": 1.25}, 1.25),
    ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ({"mscale": 0.707, "mscale_all_dim": 1.0}, (0.0707 * math.log(8) + 1) / (0.1 * math.log(8) + 1)),
])  # fmt: skip
def test_amplitude_of_yarn(rope, amplitude):
    rope |= {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    got = read(to_hf(CONFIGS["llama-tiny"]) | {"rope_parameters": rope}).full.rope
    assert got.amplitude == pytest.approx(amplitude) and (got.beta_slow, got.beta_fast) == (1, 32)


@pytest.mark.parametrize("name", ["gemma-4-e2b", "gemma-4-e4b", "gemma4-e-tiny"])
def test_shared_layers_have_the_last_owner_of_their_kind(name):
    config = CONFIGS[name]
    donors = {"gemma-4-e2b": {13, 14}, "gemma-4-e4b": {22, 23}, "gemma4-e-tiny": {4, 5}}[name]
    assert config.kv_donors == donors
    for layer in range(config.num_layers):
        donor = config.kv_donor(layer)
        assert config.layer_types[donor] == config.layer_types[layer]
        assert donor == layer if layer < config.num_kv_owners else donor in donors


# (page bytes, block of sliding and full groups, layers a group, sliding groups, bytes of a page id), bf16, base block 16
GROUPS = {
    "gemma-3-1b": (16384, 16, 16, 4, 6, 65536),
    "gemma-3-4b": (65536, 16, 16, 5, 6, 327680),
    "gemma-3-12b": (131072, 16, 16, 8, 5, 1048576),
    "gemma-3-27b": (131072, 16, 16, 10, 6, 1310720),
    "gemma-4-31b": (262144, 16, 32, 10, 5, 2621440),
    "gemma-4-26b-a4b": (131072, 16, 32, 5, 5, 655360),
    "gemma-4-e4b": (65536, 32, 16, 4, 5, 262144),
    "gemma-4-e2b": (32768, 32, 16, 3, 4, 98304),
    "gpt-oss-20b": (32768, 16, 16, 12, 1, 393216),
}


@pytest.mark.parametrize("name", GROUPS)
def test_cache_groups_of_real_models(name):
    page_bytes, sliding_block, full_block, layers, num_sliding, id_bytes = GROUPS[name]
    groups, placement = cache_groups(CONFIGS[name], torch.bfloat16)
    assert [g.kind for g in groups] == ["dense"] + ["window"] * num_sliding
    assert {g.block_size for g in groups if g.kind == "window"} == {sliding_block}
    assert groups[0].block_size == full_block
    assert {g.page_bytes for g in groups} == {page_bytes}
    assert num_tensors(placement) == layers and layers * page_bytes == id_bytes
    owners = placement[: CONFIGS[name].num_kv_owners]
    assert len(set(owners)) == len(owners)  # no two layers share a slot of a group
    for layer, place in enumerate(placement):
        assert place == placement[CONFIGS[name].kv_donor(layer)]
    kinds = {place.group: set() for place in placement}
    for layer, place in enumerate(placement):
        kinds[place.group].add(CONFIGS[name].layer_types[layer])
    assert all(len(kind) == 1 for kind in kinds.values())
