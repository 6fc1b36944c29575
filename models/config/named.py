"""Named configurations: real ones, tiny ones for tests, and a small one for CPU runs.

They are given as config.json files, without the keys that have their family's default. Families add
more (`Family.configs`).
"""

from __future__ import annotations

from typing import Any

from ..families.registry import families
from .hf import from_hf
from .model import BYTE_VOCAB, FULL, SLIDING, ModelConfig


def _shape(layers: int, hidden: int, mlp: int, heads: tuple[int, int, int]) -> dict[str, Any]:
    """Keys of all families; heads: (num_heads, num_kv_heads, head_dim), of sliding layers first."""
    return {
        "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": heads[2],
    }  # fmt: skip


def _full_every(period: int, layers: int) -> dict[str, Any]:
    return {"layer_types": [SLIDING if (i + 1) % period else FULL for i in range(layers)]}


def _window(tokens: int) -> dict[str, Any]:
    return {"sliding_window": tokens}


def _full_layers(num_kv_heads: int, head_dim: int) -> dict[str, Any]:
    """Gemma-4's full layers, where V is made from the K projection."""
    return {
        "attention_k_eq_v": True, "num_global_key_value_heads": num_kv_heads,
        "global_head_dim": head_dim,
    }  # fmt: skip


def _experts(count: int, top_k: int, width: int) -> dict[str, Any]:
    return {
        "enable_moe_block": True, "num_experts": count, "top_k_experts": top_k,
        "moe_intermediate_size": width,
    }  # fmt: skip


def _llama3(theta: float, factor: float, trained: int) -> dict[str, Any]:
    return {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": trained,
    }}  # fmt: skip


_GEMMA3 = {"model_type": "gemma3_text", "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
_GEMMA4 = {
    "model_type": "gemma4_text", "max_position_embeddings": 262144, "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}  # fmt: skip
_GEMMA4_E = _GEMMA4 | {"max_position_embeddings": 131072, "hidden_size_per_layer_input": 256}
_LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "eos_token_id": [128001, 128008, 128009], "bos_token_id": 128000,
}  # fmt: skip
_GPT_OSS = {"model_type": "gpt_oss", "eos_token_id": 200002, "bos_token_id": 199998}
_TINY = {
    "vocab_size": BYTE_VOCAB, "vocab_size_per_layer_input": BYTE_VOCAB,
    "max_position_embeddings": 4096, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
# fmt: off
_FILES: dict[str, dict[str, Any]] = {
    "gemma-3-1b": _GEMMA3 | _shape(26, 1152, 6912, (4, 1, 256)) | _window(512) | {
        "vocab_size": 262144, "max_position_embeddings": 32768, "rope_scaling": None},
    "gemma-3-4b": _GEMMA3 | _shape(34, 2560, 10240, (8, 4, 256)) | _window(1024),
    "gemma-3-12b": _GEMMA3 | _shape(48, 3840, 15360, (16, 8, 256)) | _window(1024),
    "gemma-3-27b": _GEMMA3 | _shape(62, 5376, 21504, (32, 16, 128)) | _window(1024) | {
        "query_pre_attn_scalar": 168},  # hidden_size / num_heads, not head_dim
    "gemma-4-31b":
        _GEMMA4 | _shape(60, 5376, 21504, (32, 16, 256)) | _full_layers(4, 512) | _window(1024),
    "gemma-4-26b-a4b": _GEMMA4 | _shape(30, 2816, 2112, (16, 8, 256)) | _full_layers(2, 512)
        | _window(1024) | _experts(128, 8, 704),
    "gemma-4-e4b":
        _GEMMA4_E | _shape(42, 2560, 10240, (8, 2, 256)) | {"num_kv_shared_layers": 18},
    "gemma-4-e2b": _GEMMA4_E | _shape(35, 1536, 6144, (8, 1, 256)) | _full_every(5, 35) | {
        "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    "llama-3.1-8b": _LLAMA | _shape(32, 4096, 14336, (32, 8, 128)) | _llama3(5e5, 8.0, 8192),
    "llama-3.2-1b": _LLAMA | _shape(16, 2048, 8192, (32, 8, 64)) | _llama3(5e5, 32.0, 8192) | {
        "tie_word_embeddings": True},
    "gpt-oss-20b": _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    # Every branch differs in the tiny ones: scale not from head_dim, odd layer tail, other KV heads
    # in full layers.
    "gemma3-tiny": _GEMMA3 | _TINY | _shape(7, 64, 96, (4, 2, 32)) | _full_every(3, 7)
        | _window(16) | {"query_pre_attn_scalar": 24},
    "gemma4-tiny": _GEMMA4 | _TINY | _shape(6, 64, 96, (4, 2, 16)) | _full_layers(1, 32)
        | _full_every(3, 6) | _window(16),
    # Two full layers own keys and values, and four sliding ones: the last of each kind are the ones
    # that are shared.
    "gemma4-e-tiny": _GEMMA4 | _TINY | _shape(9, 64, 96, (4, 1, 16)) | _full_every(3, 9)
        | _window(16) | {"global_head_dim": 32, "hidden_size_per_layer_input": 8,
                         "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
    "gemma4-moe-tiny": _GEMMA4 | _TINY | _shape(6, 64, 96, (4, 2, 16)) | _full_layers(1, 32)
        | _full_every(3, 6) | _window(16) | _experts(8, 2, 40),
    # Of 16 frequencies, some turn more than 4 times in 64 tokens, some less than once.
    "llama-tiny": _LLAMA | _TINY | _shape(4, 64, 96, (4, 2, 32)) | _llama3(1e4, 8.0, 64),
    "gpt-oss-tiny": _GPT_OSS | _TINY | _shape(4, 64, 40, (4, 2, 32)) | _window(16) | {
        "num_local_experts": 6, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0,
                            "original_max_position_embeddings": 256, "truncate": False}},
    # As in gemma-4-31b, a sliding layer's token has twice a full one's bytes: blocks of 16 and 32.
    "gemma4-small": _GEMMA4 | _TINY | _shape(6, 192, 512, (8, 4, 32)) | _full_layers(1, 64)
        | _full_every(3, 6) | _window(128) | {"max_position_embeddings": 32768},
}
# fmt: on
CONFIGS: dict[str, ModelConfig] = {name: from_hf(keys, name=name) for name, keys in _FILES.items()}


def named_configs() -> dict[str, Any]:
    """All named configurations: ``CONFIGS`` and `Family.configs`."""
    return CONFIGS | {config.name: config for family in families() for config in family.configs}


def get_config(name: str) -> Any:
    """The named configuration ``name``; raises ValueError listing the names for any other."""
    known = named_configs()
    if name not in known:
        raise ValueError(f"name: expected one of {sorted(known)}, got {name!r}")
    return known[name]
