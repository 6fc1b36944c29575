"""Configurations: what the keys of config.json mean, and how layers are dealt into cache groups."""

import json
from dataclasses import fields, replace
from operator import attrgetter

import pytest
import torch

from quire.bench.common.hf_checkpoint import to_hf
from quire.models.config.hf import from_hf
from quire.models.config.model import FULL, SLIDING, RopeConfig
from quire.models.config.named import CONFIGS, get_config, named_configs
from quire.models.deepseek_v4.config import DeepseekV4Keys
from quire.models.families.gemma3 import Gemma3Keys
from quire.models.families.gemma4 import Gemma4Keys
from quire.models.families.gpt_oss import GptOssKeys
from quire.models.families.llama import LlamaKeys
from quire.models.layers.kv_cache import cache_groups, num_tensors

ABSENT = object()


def read(config, name="x"):
    return from_hf(json.loads(json.dumps(config)), name=name)


def changed(config, change):
    return {key: value for key, value in (config | change).items() if value is not ABSENT}


@pytest.mark.parametrize("name", named_configs())
def test_config_json_round_trip(name):
    assert read(to_hf(get_config(name)), name) == get_config(name)


RATIOS = [0, 0, *[4, 128] * 20, 4, 0]
YARN = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# Keys of released files, as they are written there. Some leave most of them out.
RELEASED = {
    "gemma-3-4b": {
        "model_type": "gemma3", "eos_token_id": [1, 106], "vision_config": {"hidden_size": 1152},
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
    },
    "llama-3.1-8b": changed(
        to_hf(get_config("llama-3.1-8b")),
        {"rope_parameters": ABSENT, "rope_theta": 500000.0, "rope_scaling": LLAMA3},
    ),
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32,
        "eos_token_id": 200002, "bos_token_id": 199998, "rope_theta": 150000,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "truncate": False,
            "original_max_position_embeddings": 4096, "rope_type": "yarn",
        },
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4", "vocab_size": 129280, "hidden_size": 4096,
        "num_hidden_layers": 43, "num_nextn_predict_layers": 1, "num_attention_heads": 64,
        "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
        "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "compress_ratios": RATIOS,
        "compress_rope_theta": 160000, "rope_theta": 10000, "rope_scaling": YARN,
        "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
        "num_hash_layers": 3, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True, "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "max_position_embeddings": 1048576,
        "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128], "activation_scheme": "dynamic",
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_released_files(name):
    expected = get_config(name)
    if name == "gemma-3-4b":
        expected = replace(expected, eos_token_ids=(1, 106))
    assert read(RELEASED[name], name) == expected


# Keys that change no logits of inference: training, outputs, bookkeeping.
HARMLESS = {
    "_name_or_path", "architectures", "attention_dropout", "chunk_size_feed_forward", "dtype",
    "id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "return_dict", "router_aux_loss_coef", "router_jitter_noise",
    "transformers_version", "use_cache",
}  # fmt: skip
# A file of DeepSeek-V4 must say its layers.
V4_LAYERS = {"layer_types": [*get_config("deepseek-v4-flash").layer_types]}


@pytest.mark.parametrize(
    ("model_type", "keys", "said"),
    [
        ("llama", LlamaKeys, {}),
        ("gpt_oss", GptOssKeys, {}),
        ("gemma3_text", Gemma3Keys, {}),
        ("gemma4_text", Gemma4Keys, {}),
        ("deepseek_v4", DeepseekV4Keys, V4_LAYERS | {"num_nextn_predict_layers": 1}),
    ],
)
def test_keys_that_are_left_out_or_not_read(model_type, keys, said):
    """Absent keys mean what transformers takes them for; of its keys, those not read are harmless."""
    theirs = pytest.importorskip("transformers").AutoConfig.for_model(model_type, **said).to_dict()
    assert read(theirs) == read({"model_type": model_type} | said)
    assert set(theirs) - {field.name for field in fields(keys)} <= HARMLESS


OLDER = {
    "layer_types": ABSENT, "rope_parameters": ABSENT, "sliding_window_pattern": 3,
    "rope_theta": 5e5, "rope_local_base_freq": 2e4,
}  # fmt: skip
DRAFTERS = {"compress_ratios": [*RATIOS, 0, 0], "layer_types": ABSENT}
# By what is read: the configuration, the keys that change in its file, and what they mean.
MEANINGS = {
    "Gemma-3, older keys": (
        "gemma3-tiny", OLDER | {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"layer_types": get_config("gemma3-tiny").layer_types, "sliding.rope": RopeConfig("default", 2e4),
         "full.rope": RopeConfig("linear", 5e5, factor=4.0)},  # sliding layers are never scaled
    ),
    "Gemma-3, older keys without scaling": (
        "gemma3-tiny", OLDER | {"rope_scaling": None}, {"full.rope": RopeConfig("default", 5e5)},
    ),
    "Gemma-4, the last layer is full whatever the list says": (
        "gemma4-tiny", {"layer_types": [SLIDING] * 6}, {"layer_types": (SLIDING,) * 5 + (FULL,)},
    ),
    "Gemma-4, global KV heads need k_eq_v": (
        "gemma4-tiny", {"attention_k_eq_v": False}, {"full.num_kv_heads": 2},
    ),
    "Gemma-4, per-layer configuration": (
        "gemma4-tiny",
        {"global_head_dim": ABSENT, "num_global_key_value_heads": ABSENT,
         "per_layer_config": {i: {"head_dim": 32, "num_key_value_heads": 1} for i in ("2", "05")}},
        {"full": get_config("gemma4-tiny").full},
    ),
    "Gemma-4, per-layer embeddings": (
        "gemma4-tiny", {"hidden_size_per_layer_input": ABSENT}, {"per_layer_input_size": 256},
    ),
    "Gemma-4, unified": (
        "gemma4-tiny",
        {"model_type": "gemma4_unified_text", "hidden_size_per_layer_input": ABSENT, "sliding_window": ABSENT},
        {"family": "gemma4", "per_layer_input_size": 0, "sliding.sliding_window": 1024},
    ),
    "Llama, no RoPE": (
        "llama-3.1-8b", {"rope_parameters": ABSENT}, {"full.rope": RopeConfig("default", 1e4)},
    ),
    "Llama, base of RoPE": (
        "llama-3.1-8b", {"rope_parameters": ABSENT, "rope_theta": 5e5, "rope_scaling": None},
        {"full.rope": RopeConfig("default", 5e5)},
    ),
    "DeepSeek-V4, flat RoPE is that of compressed layers": (
        "deepseek-v4-tiny", {"rope_parameters": YARN | {"rope_theta": 123}},
        {"rope": RopeConfig("default", 1e4),
         "compress_rope": RopeConfig("yarn", 1.6e5, 16, 1.0, 65536, attention_factor=1)},
    ),
    "DeepSeek-V4, three drafter layers": (
        "deepseek-v4-flash", DRAFTERS | {"num_nextn_predict_layers": 3}, {"num_mtp_layers": 3, "num_layers": 43},
    ),
    "DeepSeek-V4, drafter layers that are not counted": (
        "deepseek-v4-flash", DRAFTERS | {"num_nextn_predict_layers": ABSENT}, {"num_mtp_layers": 3, "num_layers": 43},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", MEANINGS)
def test_meanings(what):
    name, change, expected = MEANINGS[what]
    config = read(changed(to_hf(get_config(name)), change))
    assert {key: attrgetter(key)(config) for key in expected} == expected


# (page bytes, block of sliding and full groups, layers a group, sliding groups, bytes of a page id,
# layers whose keys and values others share), bf16, base block 16
GROUPS = {
    "gemma-3-1b": (16384, 16, 16, 4, 6, 65536, set()),
    "gemma-3-4b": (65536, 16, 16, 5, 6, 327680, set()),
    "gemma-3-12b": (131072, 16, 16, 8, 5, 1048576, set()),
    "gemma-3-27b": (131072, 16, 16, 10, 6, 1310720, set()),
    "gemma-4-31b": (262144, 16, 32, 10, 5, 2621440, set()),
    "gemma-4-26b-a4b": (131072, 16, 32, 5, 5, 655360, set()),
    "gemma-4-e4b": (65536, 32, 16, 4, 5, 262144, {22, 23}),
    "gemma-4-e2b": (32768, 32, 16, 3, 4, 98304, {13, 14}),
    "gpt-oss-20b": (32768, 16, 16, 12, 1, 393216, set()),
}


@pytest.mark.parametrize("name", GROUPS)
def test_cache_groups_of_real_models(name):
    page_bytes, sliding_block, full_block, layers, num_sliding, id_bytes, donors = GROUPS[name]
    config = CONFIGS[name]
    groups, placement = cache_groups(config, torch.bfloat16)
    assert [(g.kind, g.block_size, g.page_bytes) for g in groups] == [
        ("dense", full_block, page_bytes),
        *[("window", sliding_block, page_bytes)] * num_sliding,
    ]
    assert num_tensors(placement) == layers and layers * page_bytes == id_bytes
    owners = placement[: config.num_kv_owners]
    assert len(set(owners)) == len(owners)  # no two layers share a slot of a group
    assert config.kv_donors == donors
    kinds = {}
    for layer, place in enumerate(placement):
        donor = config.kv_donor(layer)
        assert place == placement[donor]
        assert donor == layer if layer < config.num_kv_owners else donor in donors
        assert kinds.setdefault(place.group, config.layer_types[layer]) == config.layer_types[layer]
