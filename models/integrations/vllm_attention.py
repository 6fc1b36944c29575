"""The attention kernels as a backend of vLLM 0.33; extra ``vllm``.

Where quire is installed beside vLLM, its entry point registers the backend::

    vllm serve MODEL --attention-backend CUSTOM

A layer's pages are views of vLLM's tensor [num_blocks, num_kv_heads, block_size, 2 * head_size], in
any memory order. All rows of a step are written first, for vLLM lets a request hit blocks that
another one computes in the same step. CUDA graphs hold what lies between attention calls.
"""

# ruff: noqa: E402  the version is checked before modules that others may not have

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import require

require("vllm", "0.33")

from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from quire.kernels import attention_for, write_kv

E4M3 = ("fp8", "fp8_e4m3")


def register() -> None:
    """Make `QuireBackend` the backend CUSTOM; the entry point ``vllm.general_plugins`` calls it."""
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{QuireBackend.__name__}")


class QuireBackend(AttentionBackend):
    """The properties that vLLM reads before it chooses a backend; it refuses the rest by name."""

    supported_dtypes: ClassVar[Any] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[Any] = ["auto", "float16", "bfloat16", *E4M3]
    forward_includes_kv_cache_update = False  # vLLM calls `QuireAttention.do_kv_cache_update`

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[QuireAttention]:
        return QuireAttention

    @staticmethod
    def get_builder_cls() -> type[QuireBuilder]:
        return QuireBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tiles of keys have 16 or more."""
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in (16, 32, 64, 128, 256, 512)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    supports_sliding_window = supports_sink

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: the decodes of a batch are counted on the host."""
        return False


@dataclass(frozen=True)
class QuireMetadata:
    """A step of one KV cache group.

    Attributes:
        num_tokens: rows that are no padding.
        tables: (block_table, seq_lens, cu_seqlens_q) of `paged_attention`.
        sizes: max_seqlen_q, max_seq_len and num_decodes of `paged_attention`.
    """

    num_tokens: int
    tables: tuple[Tensor, Tensor, Tensor]
    sizes: dict[str, int]


class QuireBuilder(AttentionMetadataBuilder[QuireMetadata]):
    """Makes the metadata of a step from vLLM's; sequences with one new token come first."""

    reorder_batch_threshold = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)  # abstract there

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> QuireMetadata:
        """Metadata of a step; NotImplementedError for attention that is not causal, and R-SWA."""
        given = common_attn_metadata
        if given.causal is not True or given.rswa_prefix_lens is not None:
            raise NotImplementedError(
                f"QuireBackend: supported is causal attention, got causal={given.causal} and "
                f"rswa_prefix_lens={given.rswa_prefix_lens}"
            )
        n = given.num_reqs
        longer = (given.query_start_loc_cpu[: n + 1].diff() > 1).nonzero()
        sizes = {
            "max_seqlen_q": given.max_query_len,
            "max_seq_len": given.max_seq_len,
            "num_decodes": int(longer[0]) if len(longer) else n,
        }
        cu_seqlens_q = given.query_start_loc[: n + 1]
        tables = given.block_table_tensor[:n], given.seq_lens[:n], cu_seqlens_q
        return QuireMetadata(given.num_actual_tokens, tables, sizes)


class QuireAttention(AttentionImpl[QuireMetadata]):
    """Attention of one layer; arguments are those that vLLM's `Attention` gives.

    Raises:
        NotImplementedError: one of them asks for what is not served.
    """

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int,
        alibi_slopes: Any = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None, **others: Any,
    ) -> None:  # fmt: skip
        if alibi_slopes is not None:
            others["alibi_slopes"] = alibi_slopes
        if attn_type != "decoder":
            others["attn_type"] = attn_type
        if kv_cache_dtype not in QuireBackend.supported_kv_cache_dtypes:
            others["kv_cache_dtype"] = kv_cache_dtype
        if others:
            raise NotImplementedError(f"QuireBackend: supported are decoders, got {others}")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale, self.sliding_window = float(scale), sliding_window
        self.softcap = logits_soft_cap or None  # vLLM says 0 for none
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the rows of a step.

        Args:
            key, value: [num_tokens or more, num_kv_heads, head_size].
            kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size].
            slot_mapping: [num_tokens] int64, -1 for padding.
        """
        n, (pages, scales) = len(slot_mapping), self._pages(layer, kv_cache)
        write_kv(key[:n], value[:n], *pages, slot_mapping, **scales)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: QuireMetadata | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of a step; NotImplementedError if its output is to be quantized.

        Args:
            layer, key, value, kv_cache: as for `do_kv_cache_update`.
            query, output: [num_tokens or more, num_heads, head_size]; other rows stay.
            attn_metadata: None while vLLM measures memory.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("QuireBackend: supported is output that is not quantized")
        if attn_metadata is None:
            return output.zero_()
        n, (pages, rest) = attn_metadata.num_tokens, self._pages(layer, kv_cache)
        if self.kv_sharing_target_layer_name is None:  # else all rows are in pages
            rest |= {"k": key[:n], "v": value[:n]}
        sinks = None if self.sinks is None else self.sinks.float()
        attention_for(self.sliding_window)(
            query[:n], *pages, *attn_metadata.tables, **attn_metadata.sizes, **rest,
            softmax_scale=self.scale, softcap=self.softcap, sinks=sinks, out=output[:n],
        )  # fmt: skip
        return output

    def _pages(self, layer: Any, kv_cache: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Pages of K and V, and their scales if they are e4m3."""
        scales = {}
        if self.kv_cache_dtype in E4M3:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            scales = {"k_scale": layer._k_scale, "v_scale": layer._v_scale}
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1), scales
