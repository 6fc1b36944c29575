"""What a dense Gemma-3 or Gemma-4 text model is, and named configurations: real ones, and tiny ones for tests and CPU runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

SLIDING = "sliding_attention"
FULL = "full_attention"
FAMILIES = ("gemma3", "gemma4")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer.

    kind: "default"; "linear", which divides every frequency by ``factor``; "proportional", which rotates only the first
    ``partial_rotary_factor`` of the frequencies of the whole head and leaves the others at zero.
    base: float, the RoPE theta.

    Source: transformers ``modeling_rope_utils``.
    """

    kind: str
    base: float
    factor: float = 1.0
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("default", "linear", "proportional"):
            raise NotImplementedError(
                f"rope_type: supported are 'default', 'linear' and 'proportional', got {self.kind!r}"
            )
        if self.kind != "proportional" and self.partial_rotary_factor != 1.0:
            raise NotImplementedError(
                f"partial_rotary_factor: supported with rope_type 'proportional', got "
                f"{self.partial_rotary_factor} with {self.kind!r}"
            )


@dataclass(frozen=True)
class AttentionConfig:
    """Attention shapes shared by all layers of one kind.

    num_heads, num_kv_heads, head_dim: query heads, KV heads, channels of a head.
    sliding_window: tokens that a query sees including itself; None = all earlier tokens.
    k_eq_v: True where V is made from the K projection (Gemma-4 ``attention_k_eq_v``).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    sliding_window: int | None = None
    k_eq_v: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads={self.num_heads}, got {self.num_kv_heads}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number >= 2, got {self.head_dim}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window: expected >= 1, got {self.sliding_window}")


@dataclass(frozen=True)
class ModelConfig:
    """A dense Gemma-3 or Gemma-4 text model.

    family: "gemma3" or "gemma4"; decides the norm form, the V norm, the layer scalar and the softmax scale.
    layer_types: one of ``SLIDING`` and ``FULL`` for every layer.
    sliding, full: attention shapes of the two kinds of layers.
    query_pre_attn_scalar: Gemma-3 only, the softmax scale is its inverse square root.
    final_logit_softcapping: cap c of ``c * tanh(logits / c)``; None = no cap.
    max_position_embeddings: longest sequence in tokens.

    Source: transformers ``configuration_gemma3``, ``configuration_gemma4``.
    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]
    sliding: AttentionConfig
    full: AttentionConfig
    max_position_embeddings: int
    query_pre_attn_scalar: float | None = None
    final_logit_softcapping: float | None = None
    rms_norm_eps: float = 1e-6
    eos_token_ids: tuple[int, ...] = (1,)
    bos_token_id: int | None = 2

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family: expected one of {FAMILIES}, got {self.family!r}")
        unknown = sorted(set(self.layer_types) - {SLIDING, FULL})
        if unknown or not self.layer_types:
            raise ValueError(
                f"layer_types: expected a non-empty list of {SLIDING!r} and {FULL!r}, got {unknown or []}"
            )
        if (self.query_pre_attn_scalar is not None) != (self.family == "gemma3"):
            raise ValueError(
                f"query_pre_attn_scalar: expected a number for gemma3 and None for gemma4, "
                f"got {self.query_pre_attn_scalar} for {self.family}"
            )
        if self.sliding.sliding_window is None or self.full.sliding_window is not None:
            raise ValueError("sliding_window: expected a number in `sliding` and None in `full`")

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_types)

    @property
    def softmax_scale(self) -> float:
        """Factor of q.k before the softmax: 1 in Gemma-4, where the q and k norms carry the scale."""
        return 1.0 if self.query_pre_attn_scalar is None else self.query_pre_attn_scalar**-0.5

    @property
    def norm_offset(self) -> float:
        """What is added to a stored norm weight: Gemma-3 stores w - 1, Gemma-4 stores w."""
        return 1.0 if self.family == "gemma3" else 0.0

    @property
    def has_v_norm(self) -> bool:
        """Whether V goes through an RMSNorm without weight (Gemma-4)."""
        return self.family == "gemma4"

    @property
    def has_layer_scalar(self) -> bool:
        """Whether the output of a layer is multiplied by a stored scalar (Gemma-4)."""
        return self.family == "gemma4"

    def attention(self, layer: int) -> AttentionConfig:
        """Attention shapes of layer ``layer``."""
        return self.sliding if self.layer_types[layer] == SLIDING else self.full


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
    """heads: (num_heads, num_kv_heads, head_dim), the same in both kinds of layers."""
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
) -> ModelConfig:
    """sliding, full: (num_kv_heads, head_dim) of the two kinds of layers."""
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
        full=AttentionConfig(num_heads, *full, rope=proportional, k_eq_v=True),
        max_position_embeddings=max_positions,
        final_logit_softcapping=30.0,
    )


BYTE_VOCAB = 259  # pad, eos, bos, then the 256 bytes: the vocabulary of the configurations that need no tokenizer file

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
    # Every branch differs in the tiny ones: scale not from head_dim, odd layer tail, other KV heads in full layers.
    _gemma3(
        "gemma3-tiny",
        layers=_pattern(7, 3),
        hidden=64,
        mlp=96,
        heads=(4, 2, 32),
        scalar=24,
        window=16,
        max_positions=4096,
        vocab=BYTE_VOCAB,
    ),
    _gemma4(
        "gemma4-tiny",
        layers=_pattern(6, 3),
        hidden=64,
        mlp=96,
        num_heads=4,
        sliding=(2, 16),
        full=(1, 32),
        window=16,
        max_positions=4096,
        vocab=BYTE_VOCAB,
    ),
    # As in gemma-4-31b, a token costs a sliding layer twice the bytes of a full layer: blocks of 16 and 32 tokens.
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


def get_config(name: str) -> ModelConfig:
    """The named configuration ``name``; raises ValueError listing the names for any other."""
    if name not in CONFIGS:
        raise ValueError(f"name: expected one of {sorted(CONFIGS)}, got {name!r}")
    return CONFIGS[name]
