"""Configurations: the released models by their own keys and by transformers' keys, and what is refused."""

from dataclasses import fields, replace

import pytest

from quire.bench.common.hf_checkpoint import to_hf
from quire.models.config.model import RopeConfig
from quire.models.deepseek_v4.config import CONFIGS, from_hf

# The keys of the released Flash model that matter, and some that must not.
FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43, "num_nextn_predict_layers": 1,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32,
                     "beta_slow": 1},
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "num_hash_layers": 3,
    "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "swiglu_limit": 10.0,
    "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "max_position_embeddings": 1048576, "bos_token_id": 0, "eos_token_id": 1, "expert_dtype": "fp4",
    "attention_bias": False, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
                            "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip


def test_flat_rope_parameters_belong_to_compressed_layers():
    keys = to_hf(CONFIGS["deepseek-v4-tiny"])
    keys["rope_parameters"] = {
        "rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 32, "rope_theta": 123,
    }  # fmt: skip
    config = from_hf(keys)
    yarn = RopeConfig(
        "yarn", 1.6e5, factor=8, original_max_position_embeddings=32, attention_factor=1
    )
    assert (config.rope, config.compress_rope) == (RopeConfig("default", 1e4), yarn)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"model_type": "deepseek_v3"}, NotImplementedError, "model_type"),
        ({"scoring_func": "softmax"}, NotImplementedError, "scoring_func"),
        ({"n_shared_experts": 2}, NotImplementedError, "n_shared_experts"),
        ({"tie_word_embeddings": True}, NotImplementedError, "tie_word_embeddings"),
        ({"compress_ratios": [0] * 42 + [16, 0]}, NotImplementedError, "16"),
        ({"compress_ratios": [0] * 42}, ValueError, "compress_ratios"),
        ({"compress_ratios": [0] * 43 + [4]}, ValueError, "num_nextn_predict_layers"),
        ({"compress_ratios": None}, ValueError, "neither"),
        ({"rope_scaling": {"type": "longrope"}}, NotImplementedError, "rope"),
        (
            {"rope_scaling": FLASH["rope_scaling"] | {"attention_factor": 1.277}},
            NotImplementedError,
            "attention_factor",
        ),
        ({"o_groups": 7}, ValueError, "o_groups"),
        ({"qk_rope_head_dim": 63}, ValueError, "qk_rope_head_dim"),
        ({"num_experts_per_tok": 300}, ValueError, "num_experts_per_tok"),
    ],
)
def test_refusals_name_the_key(change, error, match):
    with pytest.raises(error, match=match):
        from_hf(FLASH | change)


def test_every_default_is_transformers(tmp_path):
    """A file that says only the schedule has the values of transformers' defaults, which are Flash's."""
    config = from_hf({"model_type": "deepseek_v4", "layer_types": list(CONFIGS["deepseek-v4-flash"].layer_types)})  # fmt: skip
    plain = RopeConfig("default", 1.6e5)
    expected = replace(CONFIGS["deepseek-v4-flash"], name="deepseek_v4", compress_rope=plain, num_mtp_layers=0)  # fmt: skip
    for field in fields(config):
        assert getattr(config, field.name) == getattr(expected, field.name), field.name


def test_three_drafter_layers():
    keys = FLASH | {"compress_ratios": [*FLASH["compress_ratios"], 0, 0], "num_nextn_predict_layers": 3}  # fmt: skip
    config = from_hf(keys)
    assert config.num_mtp_layers == 3 and config.num_layers == 43
    del keys["num_nextn_predict_layers"]
    assert from_hf(keys).num_mtp_layers == 3
