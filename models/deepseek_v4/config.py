"""What a DeepSeek-V4 model is, and named configurations: Flash, Pro, and a tiny one for tests and CPU runs.

Layers differ in what they see besides a window of raw tokens: nothing (``SLIDING``), the indexer's picks among entries that
compress 4 tokens each (``CSA``), or all entries that compress 128 tokens each (``HCA``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.models.configs import BYTE_VOCAB, SLIDING

CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
HASH_MOE, MOE = "hash_moe", "moe"
MODEL_TYPE = "deepseek_v4"


@dataclass(frozen=True)
class YarnConfig:
    """YaRN scaling of the RoPE of compressed layers; cosines and sines are not scaled (no ``mscale``).

    factor: by which slow frequencies are divided. original_max_position_embeddings: tokens that the frequencies were trained for.
    beta_fast, beta_slow: turns within these tokens, above which a frequency stays and below which it is divided.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class DeepseekV4Config:
    """A DeepSeek-V4 text model.

    layer_types: one of ``SLIDING``, ``CSA`` and ``HCA`` for every layer. mlp_layer_types: ``HASH_MOE`` or ``MOE`` for each.
    num_mtp_layers: drafter layers stored after the trunk.
    head_dim, rope_dim: channels of a head, and how many of them, the last, are rotated. There is one KV head.
    sliding_window: raw tokens that a query sees, itself included.
    csa_ratio, hca_ratio: tokens of one compressed entry.
    index_topk: entries that a CSA query sees at most.
    o_groups, o_lora_rank: groups of heads in the output projection and channels that each is brought down to.
    hc_mult: residual streams. hc_sinkhorn_iters: normalisations of their mixing matrix, the softmax counted as the first.
    swiglu_limit: clamp of gate (above) and up (both sides). routed_scaling_factor: of the routed experts' weights.
    rope_theta, compress_rope_theta: RoPE base of sliding layers, and of all others, which yarn scales.

    Raises: ValueError for fields that contradict each other.
    Source: transformers ``configuration_deepseek_v4``.
    """

    name: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    num_mtp_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    csa_ratio: int
    hca_ratio: int
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    yarn: YarnConfig | None
    max_position_embeddings: int
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    compress_rope_theta: float = 1.6e5
    eos_token_ids: tuple[int, ...] = (1,)
    bos_token_id: int | None = 0

    def __post_init__(self) -> None:
        for field, known in (("layer_types", (SLIDING, CSA, HCA)), ("mlp_layer_types", (HASH_MOE, MOE))):  # fmt: skip
            kinds = getattr(self, field)
            if not kinds or len(kinds) != self.num_layers or not set(kinds) <= set(known):
                raise ValueError(f"{field}: expected {self.num_layers or 'some'} of {known}, got {kinds}")  # fmt: skip
        if self.num_heads % self.o_groups:
            raise ValueError(f"o_groups: expected a divisor of num_heads={self.num_heads}, got {self.o_groups}")  # fmt: skip
        narrowest = min(self.head_dim, self.index_head_dim)
        if self.rope_dim < 2 or self.rope_dim % 2 or self.rope_dim > narrowest:
            raise ValueError(f"rope_dim: expected an even number in 2..{narrowest}, got {self.rope_dim}")  # fmt: skip
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise ValueError(f"num_experts_per_tok: expected 1..{self.num_experts}, got {self.num_experts_per_tok}")  # fmt: skip
        for field, low in (("csa_ratio", 2), ("hca_ratio", 2), ("sliding_window", 1), ("index_topk", 1),
                           ("hc_mult", 1), ("hc_sinkhorn_iters", 1), ("num_mtp_layers", 0)):  # fmt: skip
            if getattr(self, field) < low:
                raise ValueError(f"{field}: expected >= {low}, got {getattr(self, field)}")

    @property
    def num_layers(self) -> int:
        """Layers of the trunk."""
        return len(self.layer_types)

    @property
    def activation_size(self) -> int:
        """Elements that a step holds of each token at most, of the model's dtype; an estimate, as in `quire.models.model_config.ModelConfig`."""
        queries = 8 * self.num_heads * self.head_dim
        experts = self.num_experts_per_tok * (3 * self.hidden_size + 4 * self.moe_intermediate_size)
        return 6 * self.hidden_size * self.hc_mult + max(queries, experts)

    @property
    def all_layer_types(self) -> tuple[str, ...]:
        """Layer types of the trunk, then of the drafter layers, which slide."""
        return self.layer_types + (SLIDING,) * self.num_mtp_layers

    @property
    def softmax_scale(self) -> float:
        """Factor of q.k before the softmax."""
        return self.head_dim**-0.5

    def compress_ratio(self, layer: int) -> int | None:
        """Tokens of one compressed entry of layer ``layer`` (drafter layers follow the trunk's); None in sliding layers."""
        return {SLIDING: None, CSA: self.csa_ratio, HCA: self.hca_ratio}[self.all_layer_types[layer]]  # fmt: skip


def layer_types_of(compress_ratios: Sequence[int]) -> tuple[str, ...]:
    """Layer types of a released ``compress_ratios`` list: 0 slides, 4 is CSA, 128 is HCA.

    Raises: NotImplementedError for other ratios.
    """
    known = {0: SLIDING, 4: CSA, 128: HCA}
    if unknown := sorted(set(compress_ratios) - set(known)):
        raise NotImplementedError(f"compress_ratios: supported are {sorted(known)}, got {unknown}")
    return tuple(known[ratio] for ratio in compress_ratios)


def _released(name: str, ratios: Sequence[int], **fields: Any) -> DeepseekV4Config:
    """A released model; ratios: of the trunk's layers."""
    num_layers = len(ratios)
    return DeepseekV4Config(
        name=name,
        vocab_size=129280,
        layer_types=layer_types_of(ratios),
        mlp_layer_types=(HASH_MOE,) * 3 + (MOE,) * (num_layers - 3),
        num_mtp_layers=1,
        head_dim=512,
        rope_dim=64,
        o_lora_rank=1024,
        sliding_window=128,
        csa_ratio=4,
        hca_ratio=128,
        index_num_heads=64,
        index_head_dim=128,
        num_experts_per_tok=6,
        swiglu_limit=10.0,
        yarn=YarnConfig(16.0, 65536),
        max_position_embeddings=1048576,
        **fields,
    )


_CONFIGS = (
    _released(
        "deepseek-v4-flash",
        [0, 0, *[4, 128] * 20, 4],
        hidden_size=4096,
        num_heads=64,
        q_lora_rank=1024,
        o_groups=8,
        index_topk=512,
        num_experts=256,
        moe_intermediate_size=2048,
        routed_scaling_factor=1.5,
    ),
    _released(
        "deepseek-v4-pro",
        [128, 128, *[4, 128] * 29, 4],
        hidden_size=7168,
        num_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        index_topk=1024,
        num_experts=384,
        moe_intermediate_size=3072,
        routed_scaling_factor=2.5,
    ),
    # Small enough for every rule to matter: the clamp fires, top-k selects, both compressed kinds come twice. With fewer than
    # 8 index heads, exact zeros tie often enough to make the selection depend on the order of operations.
    DeepseekV4Config(
        name="deepseek-v4-tiny",
        vocab_size=BYTE_VOCAB,
        hidden_size=64,
        layer_types=(SLIDING, SLIDING, CSA, HCA, CSA, HCA),
        mlp_layer_types=(HASH_MOE,) * 2 + (MOE,) * 4,
        num_mtp_layers=1,
        num_heads=4,
        head_dim=32,
        rope_dim=8,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        sliding_window=16,
        csa_ratio=4,
        hca_ratio=8,
        index_num_heads=16,
        index_head_dim=16,
        index_topk=4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        routed_scaling_factor=1.5,
        swiglu_limit=1.0,
        yarn=YarnConfig(16.0, 64),
        max_position_embeddings=4096,
    ),
)
# Few layers, with the head sizes that the quantised cache layout is for.
_SMALL = replace(
    _CONFIGS[-1], name="deepseek-v4-small", head_dim=512, rope_dim=64, num_heads=2, o_groups=1,
    index_head_dim=128, index_num_heads=8, layer_types=(SLIDING, CSA, HCA), mlp_layer_types=(MOE,) * 3,
)  # fmt: skip
CONFIGS = {config.name: config for config in (*_CONFIGS, _SMALL)}
