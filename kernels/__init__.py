"""Paged attention for full, sliding-window and latent layers, and what layers have around it:
public names, loaded on first use.

Importing this package imports neither torch nor Triton. Each operator is a folder with the same files: ``api`` (public functions: check
once, choose the implementation by name, never fall back to another), ``triton_impl``, ``torch_impl`` (for CPU tensors), ``reference``
(the oracle), ``call`` (the checked arguments) and, where there is a choice, ``configs`` (tile shapes). ``common`` holds what several share.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "IndexPages": "common.latent_pages",
    "LatentPages": "common.latent_pages",
    "PoolPages": "page_copy.call",
    "attention_for": "attention.api",
    "collapse_streams": "hyper_connections.api",
    "combine_experts": "routing.api",
    "compress": "compressor.api",
    "compressed_attention": "latent.api",
    "compressed_attention_workspace_numel": "latent.api",
    "copy_overlap": "overlap_copy.api",
    "expand_streams": "hyper_connections.api",
    "expert_mlp": "experts.api",
    "flash_mla_with_kvcache": "latent.flash_mla",
    "gated_product": "gating.api",
    "gather_pages": "page_copy.api",
    "index_topk": "indexer.api",
    "index_topk_workspace_numel": "indexer.api",
    "merge_partials": "attention.api",
    "mla_attention": "latent.api",
    "norm_rope": "rotary.api",
    "page_bytes": "common.latent_pages",
    "paged_attention": "attention.api",
    "residual_norm": "norms.api",
    "route_tokens": "routing.api",
    "sample_tokens": "sampling.api",
    "scatter_pages": "page_copy.api",
    "sliding_window_attention": "attention.api",
    "workspace_numel": "attention.api",
    "write_kv": "cache_write.api",
    "write_latent": "latent_write.api",
}

__all__ = [
    "IndexPages",
    "LatentPages",
    "PoolPages",
    "attention_for",
    "collapse_streams",
    "combine_experts",
    "compress",
    "compressed_attention",
    "compressed_attention_workspace_numel",
    "copy_overlap",
    "expand_streams",
    "expert_mlp",
    "flash_mla_with_kvcache",
    "gated_product",
    "gather_pages",
    "index_topk",
    "index_topk_workspace_numel",
    "merge_partials",
    "mla_attention",
    "norm_rope",
    "page_bytes",
    "paged_attention",
    "residual_norm",
    "route_tokens",
    "sample_tokens",
    "scatter_pages",
    "sliding_window_attention",
    "workspace_numel",
    "write_kv",
    "write_latent",
]


def __getattr__(name: str) -> Any:
    """Load the module that defines a public name when the name is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted([*globals(), *_HOME])
