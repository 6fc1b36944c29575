"""Named configurations: real ones, tiny ones for tests, and a small one for CPU runs.

What their fields mean: `models.config.model`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..deepseek_v4.config import CONFIGS as V4_CONFIGS
from .model import (
    BYTE_VOCAB,
    FAMILIES,
    FULL,
    SLIDING,
    AttentionConfig,
    ModelConfig,
    MoEConfig,
    RopeConfig,
)

__all__ = [
    "BYTE_VOCAB",
    "CONFIGS",
    "FAMILIES",
    "FULL",
    "SLIDING",
    "AttentionConfig",
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "get_config",
    "named_configs",
]


def _pattern(num_layers: int, period: int) -> tuple[str, ...]:
    """Every ``period``-th layer is full, the others slide."""
    return tuple(SLIDING if (i + 1) % period else FULL for i in range(num_layers))


def _gemma3(
    name: str,
    *,
    layers: tuple[str, ...],
    hidden: int,
    mlp: int,
    heads: tuple[int, int, int],
    scalar: float,
    window: int,
    rope_factor: float = 8.0,
    max_positions: int = 131072,
    vocab: int = 262208,
) -> ModelConfig:
    """A Gemma-3. heads: (num_heads, num_kv_heads, head_dim) of both kinds of layers."""
    sliding = AttentionConfig(*heads, rope=RopeConfig("default", 1e4), sliding_window=window)
    kind = "default" if rope_factor == 1.0 else "linear"
    full = replace(sliding, rope=RopeConfig(kind, 1e6, factor=rope_factor), sliding_window=None)
    return ModelConfig(
        name=name,
        family="gemma3",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        layer_types=layers,
        sliding=sliding,
        full=full,
        max_position_embeddings=max_positions,
        query_pre_attn_scalar=scalar,
    )


def _gemma4(
    name: str,
    *,
    layers: tuple[str, ...],
    hidden: int,
    mlp: int,
    num_heads: int,
    sliding: tuple[int, int],
    full: tuple[int, int],
    window: int,
    max_positions: int = 262144,
    vocab: int = 262144,
    k_eq_v: bool = True,
    **more: Any,
) -> ModelConfig:
    """A Gemma-4. sliding, full: (num_kv_heads, head_dim). more: fields of E and MoE models."""
    proportional = RopeConfig("proportional", 1e6, partial_rotary_factor=0.25)
    return ModelConfig(
        name=name,
        family="gemma4",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        layer_types=layers,
        sliding=AttentionConfig(
            num_heads, *sliding, rope=RopeConfig("default", 1e4), sliding_window=window
        ),
        full=AttentionConfig(num_heads, *full, rope=proportional, k_eq_v=k_eq_v),
        max_position_embeddings=max_positions,
        final_logit_softcapping=30.0,
        **more,
    )


def _llama(
    name: str,
    *,
    num_layers: int,
    hidden: int,
    mlp: int,
    heads: tuple[int, int, int],
    rope: RopeConfig,
    vocab: int = 128256,
    max_positions: int = 131072,
    tied: bool = False,
    eos: tuple[int, ...] = (128001, 128008, 128009),
    bos: int = 128000,
) -> ModelConfig:
    """A Llama. heads: (num_heads, num_kv_heads, head_dim)."""
    return ModelConfig(
        name=name,
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        layer_types=(FULL,) * num_layers,
        sliding=None,
        full=AttentionConfig(*heads, rope=rope),
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        eos_token_ids=eos,
        bos_token_id=bos,
        tie_word_embeddings=tied,
    )


def _gpt_oss(
    name: str,
    *,
    num_layers: int,
    hidden: int,
    heads: tuple[int, int, int],
    moe: MoEConfig,
    window: int,
    original_max_positions: int = 4096,
    vocab: int = 201088,
    max_positions: int = 131072,
    eos: tuple[int, ...] = (200002,),
    bos: int | None = 199998,
) -> ModelConfig:
    """A gpt-oss. heads: (num_heads, num_kv_heads, head_dim) of both kinds, which take turns."""
    rope = RopeConfig(
        "yarn",
        150000.0,
        factor=32.0,
        original_max_positions=original_max_positions,
        low=1.0,
        high=32.0,
        truncate=False,
        amplitude=1.0 + 0.1 * math.log(32.0),
    )
    full = AttentionConfig(*heads, rope=rope)
    return ModelConfig(
        name=name,
        family="gpt_oss",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=0,
        layer_types=_pattern(num_layers, 2),
        sliding=replace(full, sliding_window=window),
        full=full,
        max_position_embeddings=max_positions,
        rms_norm_eps=1e-5,
        eos_token_ids=eos,
        bos_token_id=bos,
        moe=moe,
        attention_bias=True,
        tie_word_embeddings=False,
    )


_TINY: dict[str, Any] = {"hidden": 64, "vocab": BYTE_VOCAB, "max_positions": 4096}
_TINY_GEMMA4: dict[str, Any] = _TINY | {"mlp": 96, "num_heads": 4, "full": (1, 32), "window": 16}

_CONFIGS = (
    _gemma3(
        "gemma-3-1b",
        layers=_pattern(26, 6),
        hidden=1152,
        mlp=6912,
        heads=(4, 1, 256),
        scalar=256,
        window=512,
        rope_factor=1.0,
        max_positions=32768,
        vocab=262144,
    ),
    _gemma3(
        "gemma-3-4b",
        layers=_pattern(34, 6),
        hidden=2560,
        mlp=10240,
        heads=(8, 4, 256),
        scalar=256,
        window=1024,
    ),
    _gemma3(
        "gemma-3-12b",
        layers=_pattern(48, 6),
        hidden=3840,
        mlp=15360,
        heads=(16, 8, 256),
        scalar=256,
        window=1024,
    ),
    _gemma3(
        "gemma-3-27b",
        layers=_pattern(62, 6),
        hidden=5376,
        mlp=21504,
        heads=(32, 16, 128),
        scalar=168,  # hidden_size / num_heads, not head_dim
        window=1024,
    ),
    _gemma4(
        "gemma-4-31b",
        layers=_pattern(60, 6),
        hidden=5376,
        mlp=21504,
        num_heads=32,
        sliding=(16, 256),
        full=(4, 512),
        window=1024,
    ),
    _gemma4(
        "gemma-4-26b-a4b",
        layers=_pattern(30, 6),
        hidden=2816,
        mlp=2112,
        num_heads=16,
        sliding=(8, 256),
        full=(2, 512),
        window=1024,
        moe=MoEConfig(num_experts=128, top_k=8, intermediate_size=704),
    ),
    _gemma4(
        "gemma-4-e4b",
        layers=_pattern(42, 6),
        hidden=2560,
        mlp=10240,
        num_heads=8,
        sliding=(2, 256),
        full=(2, 512),
        window=512,
        max_positions=131072,
        k_eq_v=False,
        per_layer_input_size=256,
        num_kv_shared_layers=18,
    ),
    _gemma4(
        "gemma-4-e2b",
        layers=_pattern(35, 5),
        hidden=1536,
        mlp=6144,
        num_heads=8,
        sliding=(1, 256),
        full=(1, 512),
        window=512,
        max_positions=131072,
        k_eq_v=False,
        per_layer_input_size=256,
        num_kv_shared_layers=20,
        double_wide_mlp=True,
    ),
    _llama(
        "llama-3.1-8b",
        num_layers=32,
        hidden=4096,
        mlp=14336,
        heads=(32, 8, 128),
        rope=RopeConfig("llama3", 5e5, factor=8.0, original_max_positions=8192),
    ),
    _llama(
        "llama-3.2-1b",
        num_layers=16,
        hidden=2048,
        mlp=8192,
        heads=(32, 8, 64),
        rope=RopeConfig("llama3", 5e5, factor=32.0, original_max_positions=8192),
        tied=True,
    ),
    _gpt_oss(
        "gpt-oss-20b",
        num_layers=24,
        hidden=2880,
        heads=(64, 8, 64),
        moe=MoEConfig(num_experts=32, top_k=4, intermediate_size=2880),
        window=128,
    ),
    _gpt_oss(
        "gpt-oss-120b",
        num_layers=36,
        hidden=2880,
        heads=(64, 8, 64),
        moe=MoEConfig(num_experts=128, top_k=4, intermediate_size=2880),
        window=128,
    ),
    # Every branch differs in the tiny ones: scale not from head_dim, odd layer tail, other KV heads
    # in full layers.
    _gemma3(
        "gemma3-tiny",
        layers=_pattern(7, 3),
        mlp=96,
        heads=(4, 2, 32),
        scalar=24,
        window=16,
        **_TINY,
    ),
    _gemma4(
        "gemma4-tiny",
        layers=_pattern(6, 3),
        sliding=(2, 16),
        **_TINY_GEMMA4,
    ),
    # Two full layers own keys and values, and four sliding ones: the last of each kind are the ones
    # that are shared.
    _gemma4(
        "gemma4-e-tiny",
        layers=_pattern(9, 3),
        sliding=(1, 16),
        **_TINY_GEMMA4,
        k_eq_v=False,
        per_layer_input_size=8,
        num_kv_shared_layers=3,
        double_wide_mlp=True,
    ),
    _gemma4(
        "gemma4-moe-tiny",
        layers=_pattern(6, 3),
        sliding=(2, 16),
        **_TINY_GEMMA4,
        moe=MoEConfig(num_experts=8, top_k=2, intermediate_size=40),
    ),
    _llama(
        "llama-tiny",
        num_layers=4,
        mlp=96,
        heads=(4, 2, 32),
        # Of 16 frequencies, some turn more than 4 times in 64 tokens, some less than once.
        rope=RopeConfig("llama3", 1e4, factor=8.0, original_max_positions=64),
        eos=(1,),
        bos=2,
        **_TINY,
    ),
    _gpt_oss(
        "gpt-oss-tiny",
        num_layers=4,
        heads=(4, 2, 32),
        moe=MoEConfig(num_experts=6, top_k=2, intermediate_size=40),
        window=16,
        original_max_positions=256,
        eos=(1,),
        bos=2,
        **_TINY,
    ),
    # As in gemma-4-31b, a sliding layer's token has twice a full one's bytes: blocks of 16 and 32.
    _gemma4(
        "gemma4-small",
        layers=_pattern(6, 3),
        hidden=192,
        mlp=512,
        num_heads=8,
        sliding=(4, 32),
        full=(1, 64),
        window=128,
        max_positions=32768,
        vocab=BYTE_VOCAB,
    ),
)
CONFIGS = {config.name: config for config in _CONFIGS}


def named_configs() -> dict[str, Any]:
    """All named configurations: ``CONFIGS``, and those of DeepSeek-V4, of a class of their own."""
    return CONFIGS | V4_CONFIGS


def get_config(name: str) -> Any:
    """The named configuration ``name``; raises ValueError listing the names for any other."""
    known = named_configs()
    if name not in known:
        raise ValueError(f"name: expected one of {sorted(known)}, got {name!r}")
    return known[name]
