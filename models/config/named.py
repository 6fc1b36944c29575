"""Named configurations: real ones, tiny ones for tests, and a small one for CPU runs.

`models.config.model` explains the fields. Families add more (`Family.configs`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..families.registry import families
from .model import (
    BYTE_VOCAB,
    FULL,
    SLIDING,
    AttentionConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)


def _pattern(num_layers: int, period: int) -> tuple[str, ...]:
    """Every ``period``-th layer is full, the others slide."""
    return tuple(SLIDING if (i + 1) % period else FULL for i in range(num_layers))


def _gemma3(
    name: str, layers: tuple[str, ...], hidden: int, mlp: int, heads: tuple[int, int, int],
    scalar: float, window: int, rope_factor: float | None = 8.0, max_positions: int = 131072,
    vocab: int = 262208,
) -> ModelConfig:  # fmt: skip
    """A Gemma-3. heads: (num_heads, num_kv_heads, head_dim) of both kinds of layers."""
    sliding = AttentionConfig(*heads, rope=RopeConfig("default", 1e4), sliding_window=window)
    rope = RopeConfig("linear" if rope_factor else "default", 1e6, factor=rope_factor)
    full = replace(sliding, rope=rope, sliding_window=None)
    return ModelConfig(
        name, "gemma3", vocab, hidden, mlp, layers, sliding, full, max_positions,
        query_pre_attn_scalar=scalar, norm_offset=1.0,
    )  # fmt: skip


def _gemma4(
    name: str, layers: tuple[str, ...], hidden: int, mlp: int, num_heads: int,
    sliding: tuple[int, int], full: tuple[int, int], window: int, max_positions: int = 262144,
    vocab: int = 262144, k_eq_v: bool = True, **more: Any,
) -> ModelConfig:  # fmt: skip
    """A Gemma-4. sliding, full: (num_kv_heads, head_dim). more: fields of E and MoE models."""
    rope = RopeConfig("default", 1e4)
    proportional = RopeConfig("proportional", 1e6, partial_rotary_factor=0.25)
    return ModelConfig(
        name, "gemma4", vocab, hidden, mlp, layers,
        AttentionConfig(num_heads, *sliding, rope=rope, sliding_window=window),
        AttentionConfig(num_heads, *full, rope=proportional, k_eq_v=k_eq_v),
        max_positions, query_pre_attn_scalar=1.0, final_logit_softcapping=30.0, **more,
    )  # fmt: skip


def _llama(
    name: str, num_layers: int, hidden: int, mlp: int, heads: tuple[int, int, int],
    rope: RopeConfig, vocab: int = 128256, max_positions: int = 131072, tied: bool = False,
    eos: tuple[int, ...] = (128001, 128008, 128009), bos: int = 128000,
) -> ModelConfig:  # fmt: skip
    """A Llama. heads: (num_heads, num_kv_heads, head_dim)."""
    return ModelConfig(
        name, "llama", vocab, hidden, mlp, (FULL,) * num_layers, None,
        AttentionConfig(*heads, rope=rope), max_positions, rms_norm_eps=1e-5, eos_token_ids=eos,
        bos_token_id=bos, tie_word_embeddings=tied,
    )  # fmt: skip


def _gpt_oss(
    name: str, num_layers: int, hidden: int, heads: tuple[int, int, int], moe: MoEConfig,
    window: int, trained: int = 4096, vocab: int = 201088, max_positions: int = 131072,
    eos: tuple[int, ...] = (200002,), bos: int = 199998,
) -> ModelConfig:  # fmt: skip
    """A gpt-oss. heads: (num_heads, num_kv_heads, head_dim) of both kinds, which take turns."""
    rope = RopeConfig(
        "yarn", 150000.0, factor=32.0, original_max_position_embeddings=trained, truncate=False,
    )  # fmt: skip
    full = AttentionConfig(*heads, rope=rope)
    return ModelConfig(
        name, "gpt_oss", vocab, hidden, 0, _pattern(num_layers, 2),
        replace(full, sliding_window=window), full, max_positions, rms_norm_eps=1e-5,
        eos_token_ids=eos, bos_token_id=bos, moe=moe, attention_bias=True,
        tie_word_embeddings=False,
    )  # fmt: skip


def _llama3(theta: float, factor: float, trained: int) -> RopeConfig:
    return RopeConfig(
        "llama3", theta, factor=factor, original_max_position_embeddings=trained,
        low_freq_factor=1.0, high_freq_factor=4.0,
    )  # fmt: skip


_SHARES: dict[str, Any] = {"k_eq_v": False, "per_layer_input_size": 256, "max_positions": 131072}
_TINY: dict[str, Any] = {"vocab": BYTE_VOCAB, "max_positions": 4096}
_IDS: dict[str, Any] = {"eos": (1,), "bos": 2}
# fmt: off
_CONFIGS = (
    _gemma3("gemma-3-1b", _pattern(26, 6), 1152, 6912, (4, 1, 256), 256, 512,
            rope_factor=None, max_positions=32768, vocab=262144),
    _gemma3("gemma-3-4b", _pattern(34, 6), 2560, 10240, (8, 4, 256), 256, 1024),
    _gemma3("gemma-3-12b", _pattern(48, 6), 3840, 15360, (16, 8, 256), 256, 1024),
    # The scalar is hidden_size / num_heads, not head_dim.
    _gemma3("gemma-3-27b", _pattern(62, 6), 5376, 21504, (32, 16, 128), 168, 1024),
    _gemma4("gemma-4-31b", _pattern(60, 6), 5376, 21504, 32, (16, 256), (4, 512), 1024),
    _gemma4("gemma-4-26b-a4b", _pattern(30, 6), 2816, 2112, 16, (8, 256), (2, 512), 1024,
            moe=MoEConfig(128, top_k=8, intermediate_size=704)),
    _gemma4("gemma-4-e4b", _pattern(42, 6), 2560, 10240, 8, (2, 256), (2, 512), 512,
            num_kv_shared_layers=18, **_SHARES),
    _gemma4("gemma-4-e2b", _pattern(35, 5), 1536, 6144, 8, (1, 256), (1, 512), 512,
            num_kv_shared_layers=20, double_wide_mlp=True, **_SHARES),
    _llama("llama-3.1-8b", 32, 4096, 14336, (32, 8, 128), _llama3(5e5, 8.0, 8192)),
    _llama("llama-3.2-1b", 16, 2048, 8192, (32, 8, 64), _llama3(5e5, 32.0, 8192), tied=True),
    _gpt_oss("gpt-oss-20b", 24, 2880, (64, 8, 64), MoEConfig(32, 4, 2880), 128),
    _gpt_oss("gpt-oss-120b", 36, 2880, (64, 8, 64), MoEConfig(128, 4, 2880), 128),
    # Every branch differs in the tiny ones: scale not from head_dim, odd layer tail, other KV heads
    # in full layers.
    _gemma3("gemma3-tiny", _pattern(7, 3), 64, 96, (4, 2, 32), 24, 16, **_TINY),
    _gemma4("gemma4-tiny", _pattern(6, 3), 64, 96, 4, (2, 16), (1, 32), 16, **_TINY),
    # Two full layers own keys and values, and four sliding ones: the last of each kind are the ones
    # that are shared.
    _gemma4("gemma4-e-tiny", _pattern(9, 3), 64, 96, 4, (1, 16), (1, 32), 16, **_TINY,
            k_eq_v=False, per_layer_input_size=8, num_kv_shared_layers=3, double_wide_mlp=True),
    _gemma4("gemma4-moe-tiny", _pattern(6, 3), 64, 96, 4, (2, 16), (1, 32), 16, **_TINY,
            moe=MoEConfig(8, top_k=2, intermediate_size=40)),
    # Of 16 frequencies, some turn more than 4 times in 64 tokens, some less than once.
    _llama("llama-tiny", 4, 64, 96, (4, 2, 32), **_TINY, **_IDS,
           rope=_llama3(1e4, 8.0, 64)),
    _gpt_oss("gpt-oss-tiny", 4, 64, (4, 2, 32), MoEConfig(6, top_k=2, intermediate_size=40), 16,
             trained=256, **_TINY, **_IDS),
    # As in gemma-4-31b, a sliding layer's token has twice a full one's bytes: blocks of 16 and 32.
    _gemma4("gemma4-small", _pattern(6, 3), 192, 512, 8, (4, 32), (1, 64), 128,
            max_positions=32768, vocab=BYTE_VOCAB),
)
# fmt: on
CONFIGS = {config.name: config for config in _CONFIGS}


def named_configs() -> dict[str, Any]:
    """All named configurations: ``CONFIGS`` and `Family.configs`."""
    return CONFIGS | {config.name: config for family in families() for config in family.configs}


def get_config(name: str) -> Any:
    """The named configuration ``name``; raises ValueError listing the names for any other."""
    known = named_configs()
    if name not in known:
        raise ValueError(f"name: expected one of {sorted(known)}, got {name!r}")
    return known[name]
