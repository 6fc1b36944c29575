"""Configuration of DeepSeek-V4 models: Flash, Pro, tiny ones, and config.json files.

Layers differ in what they see besides a window of raw tokens: nothing (``SLIDING``), those that the
indexer selects of the entries that compress 4 tokens each (``CSA``), or all entries that compress
128 tokens each (``HCA``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as fields_of
from typing import Any, ClassVar, Literal

from ..config import fields
from ..config.fields import check_fields, checked, only, read_fields, shown
from ..config.keys import read_rope, token_ids, write_rope
from ..config.model import (
    BYTE_VOCAB,
    SLIDING,
    RopeConfig,
    divided_width,
    expect_ranks,
    expect_tokens,
)

CSA = "compressed_sparse_attention"
HCA = "heavily_compressed_attention"
HASH_MOE, MOE = "hash_moe", "moe"
MODEL_TYPE = "deepseek_v4"
LayerTypes = tuple[
    Literal["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"], ...
]
MlpLayerTypes = tuple[Literal["hash_moe", "moe"], ...]
Ratio = fields.ints(2, 2**16)
NumDrafters = fields.ints(0, 16)


@dataclass(frozen=True)
class DSparkConfig:
    """The drafter of DeepSeek-V4-Flash-0731 and V4-Pro-0813 (`models.deepseek_v4.drafters`).

    Attributes:
        num_stages: its layers, stored as ``mtp.0``, ``mtp.1`` and so on.
        block_size: tokens that are drafted at once.
        noise_token_id: in the place of tokens that are not known yet.
        markov_rank: of the term that a draft adds to the logits of the next one.
        target_layer_ids: layers of the trunk whose output the drafter reads.
    """

    num_stages: fields.ints(1, 16)
    block_size: fields.NumTokens
    noise_token_id: fields.TokenId
    markov_rank: fields.Width
    target_layer_ids: tuple[fields.NumShared, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.target_layer_ids:
            raise ValueError("target_layer_ids: expected at least one layer, got none")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that config.json has under these names; defaults are those of transformers 5.23.

    Attributes:
        head_dim: channels of a head; there is one KV head.
        o_groups, o_lora_rank: groups of heads in the output projection, and channels of each.
        sliding_window: raw tokens that a query sees, itself included.
        index_topk: entries that a CSA query sees at most.
        routed_scaling_factor: of the routed experts' weights.
        swiglu_limit: clamp of gate (above) and up (both sides).
        hc_mult: residual streams; hc_sinkhorn_iters: of their mixing matrix (see `.model`).
    """

    vocab_size: fields.VocabSize = 129280
    hidden_size: fields.Width = 4096
    head_dim: fields.Width = 512
    q_lora_rank: fields.Width = 1024
    o_groups: fields.NumHeads = 8
    o_lora_rank: fields.Width = 1024
    sliding_window: fields.NumTokens = 128
    index_head_dim: fields.Width = 128
    index_topk: fields.NumTokens = 512
    num_experts_per_tok: fields.NumExperts = 6
    moe_intermediate_size: fields.Width = 2048
    routed_scaling_factor: fields.Positive = 1.5
    swiglu_limit: fields.Positive = 10.0
    max_position_embeddings: fields.NumTokens = 1048576
    hc_mult: fields.ints(1, 64) = 4
    hc_sinkhorn_iters: fields.ints(1, 1000) = 20
    hc_eps: fields.Epsilon = 1e-6
    rms_norm_eps: fields.Epsilon = 1e-6
    bos_token_id: fields.TokenId | None = 0


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Config(Sizes):
    """A DeepSeek-V4 text model.

    Attributes:
        layer_types: one of ``SLIDING``, ``CSA`` and ``HCA`` for every layer.
        mlp_layer_types: ``HASH_MOE`` or ``MOE`` for each.
        num_mtp_layers: drafter layers stored after the trunk.
        rope_dim: channels of a head, the last, that are rotated.
        rope, compress_rope: RoPE of sliding layers, and of all others.
        csa_ratio, hca_ratio: tokens of one compressed entry.
        dspark: the drafter of models that have no MTP layers, or None.

    Raises:
        ValueError: fields that contradict each other.

    Source: transformers ``configuration_deepseek_v4``.
    """

    family: ClassVar[str] = MODEL_TYPE
    name: str
    layer_types: LayerTypes
    mlp_layer_types: MlpLayerTypes
    num_mtp_layers: NumDrafters = 1
    num_heads: fields.NumHeads = 64
    rope_dim: fields.HeadSize = 64
    rope: RopeConfig
    compress_rope: RopeConfig
    csa_ratio: Ratio = 4
    hca_ratio: Ratio = 128
    index_num_heads: fields.NumHeads = 64
    num_experts: fields.NumExperts = 256
    eos_token_ids: tuple[fields.TokenId, ...] = (1,)
    dspark: DSparkConfig | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        expect_tokens(self)
        narrowest = min(self.head_dim, self.index_head_dim)
        most: dict[str, tuple[int, int]] = {
            "rope_dim": (narrowest, self.rope_dim),
            "num_experts_per_tok": (self.num_experts, self.num_experts_per_tok),
        }
        if (dspark := self.dspark) is not None:
            most |= {
                "num_mtp_layers": (0, self.num_mtp_layers),  # DSpark is there instead
                "target_layer_ids": (self.num_layers - 1, max(dspark.target_layer_ids)),
                "noise_token_id": (self.vocab_size - 1, dspark.noise_token_id),
            }
        for name, (high, value) in most.items():
            if value > high:
                raise ValueError(f"{name}: expected at most {high}, got {value}")
        if not self.layer_types or len(self.mlp_layer_types) != self.num_layers:
            raise ValueError(
                "mlp_layer_types: expected one for each of layer_types, got "
                f"{len(self.mlp_layer_types)} for {self.num_layers}"
            )
        if self.num_heads % self.o_groups:
            raise ValueError(
                f"o_groups: expected a divisor of num_heads={self.num_heads}, got {self.o_groups}"
            )

    def shard(self, size: int, unit: int = 1) -> DeepseekV4Config:
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
        return len(self.layer_types)

    @property
    def activation_size(self) -> int:
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

    @property
    def replay_tokens(self) -> int:
        """As `quire.models.config.model.ModelConfig.replay_tokens`.

        Queries also see compressed entries, from any distance: a replay reads those from their
        pages, which are exact, and writes none. So the input of layer i is exact from replayed
        token i * (W - 1) on, its window rows too. A replay ends at a multiple of both ratios,
        where no compression window is open: the rings matter for the last `csa_ratio` tokens of
        CSA layers, which the next entry overlaps. Rows of a drafter layer depend on the trunk's
        output, or on the layer before at the token before.
        """
        reach = max(self.sliding_window - 1, self.csa_ratio)
        return self.num_layers * reach + self.num_drafter_layers * self.sliding_window

    def compress_ratio(self, layer: int) -> int | None:
        """Tokens of an entry of a layer (drafter layers follow the trunk's); None = it slides."""
        ratios = {SLIDING: None, CSA: self.csa_ratio, HCA: self.hca_ratio}
        return ratios[self.all_layer_types[layer]]


def layer_types_of(compress_ratios: Sequence[int]) -> tuple[str, ...]:
    """Layer types of a released ``compress_ratios``; NotImplementedError for other ratios."""
    known = {0: SLIDING, 4: CSA, 128: HCA}
    if unknown := sorted(set(compress_ratios) - set(known)):
        raise NotImplementedError(f"compress_ratios: supported are {sorted(known)}, got {unknown}")
    return tuple(known[ratio] for ratio in compress_ratios)


@dataclass(frozen=True)
class DeepseekV4Quantization:
    quant_method: only("fp8") = None
    weight_block_size: only(None, [128, 128]) = None


@dataclass(frozen=True)
class PartialKeys:
    """Key of a RoPE that says how many channels of a head are rotated."""

    partial_rotary_factor: fields.Share | None = None


@dataclass(frozen=True, kw_only=True)
class DeepseekV4Keys(Sizes):
    """Keys of config.json. Layer types have no default: transformers' fits no released model."""

    model_type: only(MODEL_TYPE)
    num_hidden_layers: fields.NumLayers = 43
    num_nextn_predict_layers: NumDrafters | None = None
    dspark_block_size: fields.NumTokens | None = None
    dspark_noise_token_id: fields.TokenId | None = None
    dspark_markov_rank: fields.Width | None = None
    dspark_target_layer_ids: tuple[fields.NumShared, ...] | None = None
    layer_types: LayerTypes | None = None
    compress_ratios: tuple[fields.ints(0, 2**16), ...] | None = None
    compress_rates: dict[str, Ratio] | None = None
    compress_rate_csa: only(None, 4) = None
    compress_rate_hca: only(None, 128) = None
    mlp_layer_types: MlpLayerTypes | None = None
    num_hash_layers: fields.NumShared = 3
    num_attention_heads: fields.NumHeads = 64
    num_key_value_heads: only(1) = 1
    qk_rope_head_dim: fields.HeadSize | None = None
    partial_rotary_factor: fields.Share | None = None
    index_n_heads: fields.NumHeads = 64
    n_routed_experts: fields.NumExperts = 256
    n_shared_experts: only(1) = 1
    eos_token_id: fields.TokenIds = 1
    rope_theta: fields.Theta = 1e4
    compress_rope_theta: fields.Theta = 1.6e5
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    quantization_config: DeepseekV4Quantization | None = None
    hidden_act: only("silu") = "silu"
    scoring_func: only("sqrtsoftplus") = "sqrtsoftplus"
    norm_topk_prob: only(True) = True
    attention_bias: only(False) = False
    mlp_bias: only(False) = False
    tie_word_embeddings: only(False) = False
    n_group: only(None, 1) = None
    topk_group: only(None, 1) = None


def from_hf(config: Mapping[str, Any], name: str | None = None) -> DeepseekV4Config:
    """Read a ``config.json`` of the released models or of transformers; raises as `hf.from_hf`.

    Source: transformers ``configuration_deepseek_v4``; the config.json of the released models.
    """
    keys = read_fields(DeepseekV4Keys, config)
    layer_types, num_mtp_layers = _layer_types(keys)
    num_layers = keys.num_hidden_layers
    hashed = (HASH_MOE,) * min(keys.num_hash_layers, num_layers) + (MOE,) * num_layers
    rates = keys.compress_rates or {}
    return DeepseekV4Config(
        name=name or MODEL_TYPE,
        layer_types=layer_types,
        mlp_layer_types=_first("mlp_layer_types", keys.mlp_layer_types or hashed, num_layers),
        num_mtp_layers=num_mtp_layers,
        dspark=_dspark(keys),
        num_heads=keys.num_attention_heads,
        csa_ratio=rates.get(CSA, 4),
        hca_ratio=rates.get(HCA, 128),
        index_num_heads=keys.index_n_heads,
        num_experts=keys.n_routed_experts,
        eos_token_ids=token_ids(keys.eos_token_id),
        **_rope(keys),
        **_sizes(keys),
    )


def _sizes(config: Sizes) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields_of(Sizes)}


def _layer_types(keys: DeepseekV4Keys) -> tuple[tuple[str, ...], int]:
    num_layers, num_mtp_layers = keys.num_hidden_layers, keys.num_nextn_predict_layers
    has_dspark = keys.dspark_block_size is not None  # then the counts are not of MTP layers
    if has_dspark:
        num_mtp_layers = 0
    if keys.layer_types is not None:
        return _first("layer_types", keys.layer_types, num_layers), num_mtp_layers or 0
    if keys.compress_ratios is None:
        raise ValueError("layer_types: expected layer_types or compress_ratios, got neither")
    ratios = _first("compress_ratios", keys.compress_ratios, num_layers)
    drafters = () if has_dspark else keys.compress_ratios[num_layers:]
    if any(drafters) or num_mtp_layers not in (None, len(drafters)):
        raise ValueError(
            f"compress_ratios: expected a 0 for each of num_nextn_predict_layers={num_mtp_layers} "
            f"after {num_layers} layers, got {shown(drafters)}"
        )
    return layer_types_of(ratios), len(drafters)


def _dspark(keys: DeepseekV4Keys) -> DSparkConfig | None:
    """DSpark's keys; loading counts its stages in the files."""
    if keys.dspark_block_size is None:
        return None
    names = ("noise_token_id", "markov_rank", "target_layer_ids")
    given = {name: getattr(keys, f"dspark_{name}") for name in names}
    if absent := [name for name, value in given.items() if value is None]:
        raise ValueError(f"dspark_{absent[0]}: expected a value beside dspark_block_size, got none")
    num_stages = len(keys.compress_ratios or ()) - keys.num_hidden_layers
    # Without that list, 3: those of each released one.
    return DSparkConfig(num_stages if num_stages > 0 else 3, keys.dspark_block_size, **given)


def _first(name: str, entries: tuple[Any, ...], num_layers: int) -> tuple[Any, ...]:
    """The entries of the trunk's layers; what follows is the drafters'."""
    if len(entries) < num_layers:
        raise ValueError(
            f"{name}: expected at least num_hidden_layers={num_layers} entries, got {len(entries)}"
        )
    return entries[:num_layers]


def _rope(keys: DeepseekV4Keys) -> dict[str, Any]:
    """The fields rope, compress_rope and rope_dim, from nested or flat parameters."""
    name = "rope_parameters" if keys.rope_parameters else "rope_scaling"
    given = getattr(keys, name) or {}
    # A flat rope_theta is the main one: only the nested form says what compressed layers use.
    of_main, of_compress, at = {}, given | {"rope_theta": None}, name
    if "main" in given:
        of_main = checked(dict, f"{name}.main", given["main"])
        at = f"{name}.compress"
        of_compress = checked(dict, at, given.get("compress", {}))
    partial = keys.partial_rotary_factor
    partial = partial or read_fields(PartialKeys, of_main, f"{name}.main").partial_rotary_factor
    size = int(keys.head_dim * (partial or 64 / 512))
    if keys.qk_rope_head_dim is None and (size < 2 or size % 2):
        raise ValueError(
            f"partial_rotary_factor: expected an even number of head_dim={keys.head_dim} channels, "
            f"got {partial} of them"
        )
    whole = {"partial_rotary_factor": None}
    main = read_rope(of_main | whole, keys.rope_theta, name=f"{name}.main")
    compress = read_rope(of_compress | whole, keys.compress_rope_theta, name=at)
    if main.rope_type != "default":
        raise NotImplementedError(
            f"{name}.main: supported is rope_type 'default', got {main.rope_type!r}"
        )
    if compress.rope_type == "yarn" and compress.attention_factor is None:
        compress = replace(compress, attention_factor=1.0)
    if compress.rope_type not in ("default", "yarn") or compress.amplitude != 1.0:
        raise NotImplementedError(
            f"{at}: supported are rope_type 'default', and 'yarn' with attention_factor 1.0, "
            f"got {compress.rope_type!r} with {compress.attention_factor}"
        )
    return {"rope_dim": keys.qk_rope_head_dim or size, "rope": main, "compress_rope": compress}


def to_hf(config: DeepseekV4Config) -> dict[str, Any]:
    partial = {"partial_rotary_factor": config.rope_dim / config.head_dim}
    dspark = {} if config.dspark is None else asdict(config.dspark)
    dspark.pop("num_stages", None)
    return _sizes(config) | {
        "num_hidden_layers": config.num_layers,
        "num_nextn_predict_layers": config.num_mtp_layers,
        "layer_types": list(config.layer_types),
        "mlp_layer_types": list(config.mlp_layer_types),
        "compress_rates": {CSA: config.csa_ratio, HCA: config.hca_ratio},
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": 1,
        "index_n_heads": config.index_num_heads,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": 1,
        "rope_theta": config.rope.rope_theta,
        "compress_rope_theta": config.compress_rope.rope_theta,
        "rope_parameters": {
            "main": write_rope(config.rope) | partial,
            "compress": write_rope(config.compress_rope) | partial,
        },
        "eos_token_id": list(config.eos_token_ids),
        "tie_word_embeddings": False,
        **partial,
        **{f"dspark_{key}": value for key, value in dspark.items()},
    }


_RELEASED = {
    "model_type": MODEL_TYPE,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}
_FLASH = from_hf(_RELEASED | {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]}, "deepseek-v4-flash")
# fmt: off
_PRO = from_hf(_RELEASED | {
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0], "num_hidden_layers": 61,
    "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
    "index_topk": 1024, "n_routed_experts": 384, "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}, "deepseek-v4-pro")
# Small enough for every rule to matter: the clamp fires, top-k selects, both compressed kinds come
# twice. With fewer than 8 index heads, exact zeros tie often enough to make the selection depend on
# the order of operations.
_TINY = replace(
    _FLASH, name="deepseek-v4-tiny", vocab_size=BYTE_VOCAB, hidden_size=64,
    layer_types=(SLIDING, SLIDING, CSA, HCA, CSA, HCA),
    mlp_layer_types=(HASH_MOE,) * 2 + (MOE,) * 4, num_heads=4, head_dim=32, rope_dim=8,
    q_lora_rank=24, o_groups=2, o_lora_rank=16, sliding_window=16, hca_ratio=8, index_num_heads=16,
    index_head_dim=16, index_topk=4, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48,
    swiglu_limit=1.0, max_position_embeddings=4096,
    compress_rope=replace(_FLASH.compress_rope, original_max_position_embeddings=64),
)
# Few layers, with the head sizes that the quantized cache layout is for.
_SMALL = replace(
    _TINY, name="deepseek-v4-small", head_dim=512, rope_dim=64, num_heads=2, o_groups=1,
    index_head_dim=128, index_num_heads=8, layer_types=(SLIDING, CSA, HCA),
    mlp_layer_types=(MOE,) * 3,
)
# fmt: on
CONFIGS = {config.name: config for config in (_FLASH, _PRO, _TINY, _SMALL)}
