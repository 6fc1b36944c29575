"""Configuration of DeepSeek-V4 models: Flash, Pro, and tiny ones for tests and CPU runs.

Layers differ in what they see besides a window of raw tokens: nothing (``SLIDING``), those that the
indexer selects of the entries that compress 4 tokens each (``CSA``), or all entries that compress
128 tokens each (``HCA``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from ..config import fields
from ..config.fields import check_fields
from ..config.model import BYTE_VOCAB, SLIDING, divided_width, expect_ranks, expect_tokens

CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
HASH_MOE, MOE = "hash_moe", "moe"
MODEL_TYPE = "deepseek_v4"
LayerTypes = tuple[
    Literal["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"], ...
]
MlpLayerTypes = tuple[Literal["hash_moe", "moe"], ...]
NumDrafters = fields.ints(0, 16)
NumStages = fields.ints(1, 16)
NumStreams = fields.ints(1, 64)
NumIterations = fields.ints(1, 1000)
Ratio = fields.ints(2, 2**16)


@dataclass(frozen=True)
class YarnConfig:
    """YaRN scaling of the RoPE of compressed layers.

    Cosines and sines are not scaled (no ``mscale``).

    Attributes:
        factor: by which slow frequencies are divided.
        original_max_position_embeddings: tokens that the frequencies were trained for.
        beta_fast, beta_slow: turns within these tokens, above which a frequency stays and below
            which it is divided.
    """

    factor: fields.Factor
    original_max_position_embeddings: fields.NumTokens
    beta_fast: fields.Positive = 32.0
    beta_slow: fields.Positive = 1.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.beta_slow >= self.beta_fast:
            raise ValueError(
                f"beta_slow: expected less than beta_fast={self.beta_fast}, got {self.beta_slow}"
            )


@dataclass(frozen=True)
class DSparkConfig:
    """The drafter of DeepSeek-V4-Flash-0731 and V4-Pro-0813 (`models.deepseek_v4.dspark`).

    Attributes:
        num_stages: its layers, stored as ``mtp.0``, ``mtp.1`` and so on.
        block_size: tokens that are drafted at once.
        noise_token_id: in the place of tokens that are not known yet.
        markov_rank: of the term that a draft adds to the logits of the next one.
        target_layer_ids: layers of the trunk whose output the drafter reads.
    """

    num_stages: NumStages
    block_size: fields.NumTokens
    noise_token_id: fields.TokenId
    markov_rank: fields.Width
    target_layer_ids: tuple[fields.NumShared, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids: expected at least one layer, got none")


@dataclass(frozen=True)
class DeepseekV4Config:
    """A DeepSeek-V4 text model.

    Attributes:
        layer_types: one of ``SLIDING``, ``CSA`` and ``HCA`` for every layer.
        mlp_layer_types: ``HASH_MOE`` or ``MOE`` for each.
        num_mtp_layers: drafter layers stored after the trunk.
        head_dim, rope_dim: channels of a head, and how many of them, the last, are rotated. There
            is one KV head.
        sliding_window: raw tokens that a query sees, itself included.
        csa_ratio, hca_ratio: tokens of one compressed entry.
        index_topk: entries that a CSA query sees at most.
        o_groups, o_lora_rank: groups of heads in the output projection and channels that each is
            brought down to.
        hc_mult: residual streams.
        hc_sinkhorn_iters: of their mixing matrix; see `models.deepseek_v4.model`.
        swiglu_limit: clamp of gate (above) and up (both sides).
        routed_scaling_factor: of the routed experts' weights.
        rope_theta, compress_rope_theta: RoPE base of sliding layers, and of all others, which yarn
            scales.
        dspark: the drafter of models that have no MTP layers, or None.

    Raises:
        ValueError: fields that contradict each other.

    Source: transformers ``configuration_deepseek_v4``.
    """

    family: ClassVar[str] = MODEL_TYPE
    name: str
    vocab_size: fields.VocabSize
    hidden_size: fields.Width
    layer_types: LayerTypes
    mlp_layer_types: MlpLayerTypes
    num_mtp_layers: NumDrafters
    num_heads: fields.NumHeads
    head_dim: fields.Width
    rope_dim: fields.HeadSize
    q_lora_rank: fields.Width
    o_groups: fields.NumHeads
    o_lora_rank: fields.Width
    sliding_window: fields.NumTokens
    csa_ratio: Ratio
    hca_ratio: Ratio
    index_num_heads: fields.NumHeads
    index_head_dim: fields.Width
    index_topk: fields.NumTokens
    num_experts: fields.NumExperts
    num_experts_per_tok: fields.NumExperts
    moe_intermediate_size: fields.Width
    routed_scaling_factor: fields.Positive
    swiglu_limit: fields.Positive
    yarn: YarnConfig | None
    max_position_embeddings: fields.NumTokens
    hc_mult: NumStreams = 4
    hc_sinkhorn_iters: NumIterations = 20
    hc_eps: fields.Epsilon = 1e-6
    rms_norm_eps: fields.Epsilon = 1e-6
    rope_theta: fields.Theta = 1e4
    compress_rope_theta: fields.Theta = 1.6e5
    eos_token_ids: tuple[fields.TokenId, ...] = (1,)
    bos_token_id: fields.TokenId | None = 0
    dspark: DSparkConfig | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        expect_tokens(self)
        if not self.layer_types or len(self.mlp_layer_types) != self.num_layers:
            raise ValueError(
                "mlp_layer_types: expected one for each of layer_types, got "
                f"{len(self.mlp_layer_types)} for {self.num_layers}"
            )
        if self.num_heads % self.o_groups:
            raise ValueError(
                f"o_groups: expected a divisor of num_heads={self.num_heads}, got {self.o_groups}"
            )
        narrowest = min(self.head_dim, self.index_head_dim)
        if self.rope_dim > narrowest:
            raise ValueError(
                f"rope_dim: expected at most {narrowest}, the narrower of head_dim and "
                f"index_head_dim, got {self.rope_dim}"
            )
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok: expected 1..{self.num_experts}, got "
                f"{self.num_experts_per_tok}"
            )
        if self.dspark is not None:
            self._check_dspark(self.dspark)

    def _check_dspark(self, dspark: DSparkConfig) -> None:
        if self.num_mtp_layers:
            raise ValueError(f"num_mtp_layers: expected 0 beside DSpark, got {self.num_mtp_layers}")
        if max(dspark.target_layer_ids) >= self.num_layers:
            raise ValueError(
                f"target_layer_ids: expected layers 0..{self.num_layers - 1}, got "
                f"{list(dspark.target_layer_ids)}"
            )
        if dspark.noise_token_id >= self.vocab_size:
            raise ValueError(
                f"noise_token_id: expected 0..{self.vocab_size - 1}, got {dspark.noise_token_id}"
            )

    def shard(self, size: int, unit: int = 1) -> DeepseekV4Config:
        """As `quire.models.config.model.ModelConfig.shard`."""
        if size == 1:
            return self
        heads = f"num_heads={self.num_heads} and o_groups={self.o_groups} are divided"
        expect_ranks(self.name, size, lambda n: self.o_groups % n == 0, heads)
        return replace(
            self,
            num_heads=self.num_heads // size,
            o_groups=self.o_groups // size,
            moe_intermediate_size=divided_width(self.moe_intermediate_size, size, unit),
        )

    @property
    def num_layers(self) -> int:
        """Layers of the trunk."""
        return len(self.layer_types)

    @property
    def activation_size(self) -> int:
        """As `quire.models.config.model.ModelConfig.activation_size`."""
        queries = 8 * self.num_heads * self.head_dim
        width = self.hidden_size + self.moe_intermediate_size
        experts = self.hidden_size + self.num_experts_per_tok * width
        return 6 * self.hidden_size * self.hc_mult + max(queries, experts)

    @property
    def all_layer_types(self) -> tuple[str, ...]:
        """Layer types of the trunk, then of the drafter layers, which slide."""
        return self.layer_types + (SLIDING,) * self.num_drafter_layers

    @property
    def num_drafter_layers(self) -> int:
        """MTP layers, or stages of DSpark."""
        return self.num_mtp_layers if self.dspark is None else self.dspark.num_stages

    def compress_ratio(self, layer: int) -> int | None:
        """Tokens of an entry of a layer (drafter layers follow the trunk's); None = it slides."""
        return {SLIDING: None, CSA: self.csa_ratio, HCA: self.hca_ratio}[
            self.all_layer_types[layer]
        ]


def layer_types_of(compress_ratios: Sequence[int]) -> tuple[str, ...]:
    """Layer types of a released ``compress_ratios`` list: 0 slides, 4 is CSA, 128 is HCA.

    Raises:
        NotImplementedError: other ratios.
    """
    known = {0: SLIDING, 4: CSA, 128: HCA}
    if unknown := sorted(set(compress_ratios) - set(known)):
        raise NotImplementedError(f"compress_ratios: supported are {sorted(known)}, got {unknown}")
    return tuple(known[ratio] for ratio in compress_ratios)


def _released(name: str, ratios: Sequence[int], **fields: Any) -> DeepseekV4Config:
    """A released model; ratios: of the trunk's layers."""
    return DeepseekV4Config(
        name=name, vocab_size=129280, layer_types=layer_types_of(ratios),
        mlp_layer_types=(HASH_MOE,) * 3 + (MOE,) * (len(ratios) - 3), num_mtp_layers=1,
        head_dim=512, rope_dim=64, o_lora_rank=1024, sliding_window=128, csa_ratio=4, hca_ratio=128,
        index_num_heads=64, index_head_dim=128, num_experts_per_tok=6, swiglu_limit=10.0,
        yarn=YarnConfig(16.0, 65536), max_position_embeddings=1048576, **fields,
    )  # fmt: skip


# fmt: off
_FLASH = _released(
    "deepseek-v4-flash", [0, 0, *[4, 128] * 20, 4], hidden_size=4096, num_heads=64,
    q_lora_rank=1024, o_groups=8, index_topk=512, num_experts=256, moe_intermediate_size=2048,
    routed_scaling_factor=1.5,
)
_PRO = _released(
    "deepseek-v4-pro", [128, 128, *[4, 128] * 29, 4], hidden_size=7168, num_heads=128,
    q_lora_rank=1536, o_groups=16, index_topk=1024, num_experts=384, moe_intermediate_size=3072,
    routed_scaling_factor=2.5,
)
# Small enough for every rule to matter: the clamp fires, top-k selects, both compressed kinds come
# twice. With fewer than 8 index heads, exact zeros tie often enough to make the selection depend on
# the order of operations.
_TINY = DeepseekV4Config(
    name="deepseek-v4-tiny", vocab_size=BYTE_VOCAB, hidden_size=64,
    layer_types=(SLIDING, SLIDING, CSA, HCA, CSA, HCA),
    mlp_layer_types=(HASH_MOE,) * 2 + (MOE,) * 4, num_mtp_layers=1, num_heads=4, head_dim=32,
    rope_dim=8, q_lora_rank=24, o_groups=2, o_lora_rank=16, sliding_window=16, csa_ratio=4,
    hca_ratio=8, index_num_heads=16, index_head_dim=16, index_topk=4, num_experts=8,
    num_experts_per_tok=2, moe_intermediate_size=48, routed_scaling_factor=1.5, swiglu_limit=1.0,
    yarn=YarnConfig(16.0, 64), max_position_embeddings=4096,
)
# Few layers, with the head sizes that the quantized cache layout is for.
_SMALL = replace(
    _TINY, name="deepseek-v4-small", head_dim=512, rope_dim=64, num_heads=2, o_groups=1,
    index_head_dim=128, index_num_heads=8, layer_types=(SLIDING, CSA, HCA),
    mlp_layer_types=(MOE,) * 3,
)
# fmt: on
CONFIGS = {config.name: config for config in (_FLASH, _PRO, _TINY, _SMALL)}
