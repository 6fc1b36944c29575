"""Configuration of a text model: the shapes of its layers, its cache and its weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from . import fields
from .fields import check_fields

SLIDING = "sliding_attention"
FULL = "full_attention"
LayerTypes = tuple[Literal["sliding_attention", "full_attention"], ...]
MAX_RANKS = 1024
# Types of rotary embeddings, and the keys that have no default there.
ROPE_TYPES = {
    "default": (),
    "linear": (),
    "proportional": (),
    "llama3": (
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}  # fmt: skip


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer, with the names of ``rope_parameters``.

    "linear" divides all frequencies by ``factor``; of "proportional" only the first
    ``partial_rotary_factor`` rotate; "llama3" and "yarn" divide low frequencies, keep high ones,
    and blend those between. Keys of other types have no effect.

    Attributes:
        original_max_position_embeddings: tokens that the unscaled model was trained on.
        low_freq_factor, high_freq_factor, beta_slow, beta_fast: ends of the blend.
        truncate: round the ends of yarn's blend to whole channel pairs.
        attention_factor, mscale, mscale_all_dim: see `amplitude`.

    Source: transformers ``modeling_rope_utils``.
    """

    rope_type: str = "default"
    rope_theta: fields.Theta = 1e4
    factor: fields.Factor | None = None
    partial_rotary_factor: fields.Share = 1.0
    original_max_position_embeddings: fields.NumTokens | None = None
    low_freq_factor: fields.Positive | None = None
    high_freq_factor: fields.Positive | None = None
    beta_slow: fields.Positive = 1.0
    beta_fast: fields.Positive = 32.0
    truncate: bool = True
    attention_factor: fields.Positive | None = None
    mscale: fields.NotNegative | None = None
    mscale_all_dim: fields.NotNegative | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        kind = self.rope_type
        if kind not in ROPE_TYPES:
            raise NotImplementedError(f"rope_type: supported are {[*ROPE_TYPES]}, got {kind!r}")
        if absent := [key for key in ROPE_TYPES[kind] if getattr(self, key) is None]:
            raise ValueError(f"rope_parameters: expected {absent} with rope_type {kind!r}")
        if kind != "proportional" and self.partial_rotary_factor != 1.0:
            raise NotImplementedError(
                f"partial_rotary_factor: supported with rope_type 'proportional', got "
                f"{self.partial_rotary_factor} with {kind!r}"
            )
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            least, most = getattr(self, low), getattr(self, high)
            if least is not None and most is not None and least >= most:
                raise ValueError(f"{low}: expected less than {high}={most}, got {least}")

    @cached_property
    def amplitude(self) -> float:
        """Factor of cosine and sine."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        log = math.log(max(1.0, self.factor))
        if self.mscale and self.mscale_all_dim:
            return (0.1 * self.mscale * log + 1.0) / (0.1 * self.mscale_all_dim * log + 1.0)
        return 0.1 * log + 1.0


def expect_tokens(config: Any) -> None:
    """Raise ValueError for a special token that is not in the vocabulary."""
    for name in ("eos_token_ids", "bos_token_id"):
        ids = getattr(config, name)
        if any(i >= config.vocab_size for i in (ids if isinstance(ids, tuple) else (ids or 0,))):
            raise ValueError(
                f"{name}: expected ids below vocab_size={config.vocab_size}, got {ids}"
            )


def expect_ranks(name: str, size: int, divides: Callable[[int], bool], heads: str) -> None:
    """Raise ValueError for a number of ranks that does not divide a model, naming those that do."""
    if not divides(size):
        sizes = [n for n in range(1, MAX_RANKS) if divides(n)]
        raise ValueError(
            f"tensor_parallel_size: expected one of {sizes} for {name!r}, whose {heads}, got {size}"
        )


def divided_width(width: int, size: int, unit: int) -> int:
    """Channels of each of ``size`` ranks, a multiple of ``unit``; zeros fill up the last one."""
    return unit * -(-width // (unit * size))


@dataclass(frozen=True)
class AttentionConfig:
    """Attention shapes shared by all layers of one kind.

    Attributes:
        sliding_window: tokens that a query sees including itself; None = all earlier tokens.
        k_eq_v: True where V is made from the K projection (Gemma-4 ``attention_k_eq_v``).
    """

    num_heads: fields.NumHeads
    num_kv_heads: fields.NumHeads
    head_dim: fields.HeadSize
    rope: RopeConfig
    sliding_window: fields.NumTokens | None = None
    k_eq_v: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads: expected a divisor of num_heads={self.num_heads}, got "
                f"{self.num_kv_heads}"
            )

    def divides(self, size: int) -> bool:
        """True if ``size`` ranks can share the heads; a KV head may be on several."""
        kv = self.num_kv_heads
        return self.num_heads % size == 0 and (kv % size == 0 or size % kv == 0)

    def shard(self, size: int) -> AttentionConfig:
        kv = max(1, self.num_kv_heads // size)
        return replace(self, num_heads=self.num_heads // size, num_kv_heads=kv)


@dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts of every layer; intermediate_size: width of one expert."""

    num_experts: fields.NumExperts
    top_k: fields.NumExperts
    intermediate_size: fields.Width

    def __post_init__(self) -> None:
        check_fields(self)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k: expected 1..num_experts={self.num_experts}, got {self.top_k}")


@dataclass(frozen=True)
class ModelConfig:
    """A text model.

    Attributes:
        family: name of a registered `quire.models.families.registry.Family`.
        intermediate_size: width of the dense MLP; 0 where there is none (gpt_oss).
        layer_types: one of ``SLIDING`` and ``FULL`` for every layer.
        sliding, full: attention shapes of the two kinds of layers.
        query_pre_attn_scalar: the softmax scale is its inverse square root; None = head_dim.
        final_logit_softcapping: cap c of ``c * tanh(logits / c)``; None = no cap.
        max_position_embeddings: longest sequence in tokens.
        moe: experts beside (gemma4) or instead of (gpt_oss) the MLP.
        per_layer_input_size: channels of each token's own row for every layer; 0 = none.
        num_kv_shared_layers: last layers, which read keys and values of earlier ones of their kind.
        double_wide_mlp: True where those have MLPs of twice the width.
        norm_offset: added to a stored norm weight: Gemma-3 stores w - 1.

    Source: transformers ``configuration_*`` of the families.
    """

    name: str
    family: str
    vocab_size: fields.VocabSize
    hidden_size: fields.Width
    intermediate_size: fields.WidthOrNone
    layer_types: LayerTypes
    sliding: AttentionConfig | None
    full: AttentionConfig
    max_position_embeddings: fields.NumTokens
    query_pre_attn_scalar: fields.Positive | None = None
    final_logit_softcapping: fields.Positive | None = None
    rms_norm_eps: fields.Epsilon = 1e-6
    eos_token_ids: tuple[fields.TokenId, ...] = (1,)
    bos_token_id: fields.TokenId | None = 2
    moe: MoEConfig | None = None
    per_layer_input_size: fields.WidthOrNone = 0
    num_kv_shared_layers: fields.NumShared = 0
    double_wide_mlp: bool = False
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    norm_offset: fields.NotNegative = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        expect_tokens(self)
        if not self.layer_types or set(self.layer_types) - {SLIDING, FULL}:
            raise ValueError(
                f"layer_types: expected {SLIDING!r} and {FULL!r}, got {list(self.layer_types)}"
            )
        if self.sliding is None and SLIDING in self.layer_types:
            raise ValueError("sliding: expected attention shapes of the sliding layers, got None")
        if self.full.sliding_window is not None or (
            self.sliding is not None and self.sliding.sliding_window is None
        ):
            raise ValueError("sliding_window: expected a number in `sliding` and None in `full`")
        if not 0 <= self.num_kv_shared_layers < self.num_layers:
            raise ValueError(
                f"num_kv_shared_layers: expected 0..{self.num_layers - 1}, got "
                f"{self.num_kv_shared_layers}"
            )
        owners = set(self.layer_types[: self.num_kv_owners])
        if missing := set(self.layer_types) - owners:
            raise ValueError(
                f"num_kv_shared_layers: expected an earlier layer of kind {sorted(missing)} to "
                "share"
            )

    def shard(self, size: int, unit: int = 1) -> ModelConfig:
        """Shapes of one rank's layers; vocabulary and router stay whole.

        unit: of channels at which MLPs and experts may be cut, such as those that share a scale.

        Raises:
            ValueError: a number of ranks that does not divide the heads.
        """
        if size == 1:
            return self
        shapes = self.shapes.values()
        heads = {f"num_heads={s.num_heads}, num_kv_heads={s.num_kv_heads}": None for s in shapes}
        expect_ranks(
            self.name,
            size,
            lambda n: all(shape.divides(n) for shape in shapes),
            f"{' and '.join(heads)} are divided, or a KV head is on several ranks",
        )
        moe = self.moe
        if moe is not None:
            width = divided_width(moe.intermediate_size, size, unit)
            moe = replace(moe, intermediate_size=width)
        return replace(
            self,
            full=self.full.shard(size),
            sliding=self.sliding and self.sliding.shard(size),
            intermediate_size=divided_width(self.intermediate_size, size, unit),
            moe=moe,
        )

    @cached_property
    def shapes(self) -> dict[str, AttentionConfig]:
        """Attention shapes by kind of layer."""
        full = {FULL: self.full}
        return full if self.sliding is None else {SLIDING: self.sliding, **full}

    @cached_property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @cached_property
    def num_kv_owners(self) -> int:
        """Number of layers, the first ones, with keys and values of their own."""
        return self.num_layers - self.num_kv_shared_layers

    @cached_property
    def softmax_scale(self) -> float:
        return (self.query_pre_attn_scalar or self.full.head_dim) ** -0.5

    @property
    def activation_size(self) -> int:
        """Upper estimate of the elements that a step holds of each token, in dtypes of two bytes.

        Five hidden states, and the widest of a layer's branches: MLP, attention, or experts.
        """
        hidden, width = self.hidden_size, self.per_layer_input_size * self.num_layers
        branches = [
            3 * max(map(self.mlp_size, range(self.num_layers))),
            max((3 * s.num_heads + 4 * s.num_kv_heads) * s.head_dim for s in self.shapes.values()),
        ]
        if self.moe is not None:
            # What each gives, what it multiplies its second matrix with, and their sum.
            branches.append(hidden + self.moe.top_k * (hidden + self.moe.intermediate_size))
        # The inputs of all layers are made first, and then stay.
        return 5 * hidden + max(7 * width, width + max(branches))

    def attention(self, layer: int) -> AttentionConfig:
        return self.shapes[self.layer_types[layer]]

    def kv_donor(self, layer: int) -> int:
        """The layer with the keys and values that ``layer`` reads: its own or a donor's."""
        return self._donor_of[layer]

    @cached_property
    def kv_donors(self) -> frozenset[int]:
        """Layers whose keys and values later layers share."""
        return frozenset(self._donor_of[self.num_kv_owners :])

    @property
    def replay_tokens(self) -> int | None:
        """Tokens to compute before a boundary until the windows of all layers are right there.

        Each sliding layer makes right all but its first W - 1 rows; None without such layers.
        """
        if self.sliding is None or self.sliding.sliding_window is None:
            return None
        num_sliding = self.layer_types[: self.num_kv_owners].count(SLIDING)
        return num_sliding * (self.sliding.sliding_window - 1) or None

    @cached_property
    def _donor_of(self) -> tuple[int, ...]:
        owners = range(self.num_kv_owners)
        last = {self.layer_types[i]: i for i in owners}
        return (*owners, *(last[kind] for kind in self.layer_types[self.num_kv_owners :]))

    def mlp_size(self, layer: int) -> int:
        wide = self.double_wide_mlp and layer >= self.num_kv_owners
        return self.intermediate_size * (2 if wide else 1)


# pad, eos, bos, then the 256 bytes: the vocabulary of configurations without a tokenizer file
BYTE_VOCAB = 259
