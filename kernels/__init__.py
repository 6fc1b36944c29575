"""Paged attention for full, sliding-window and latent layers, and the operators around it.

Public names are loaded on first use: importing this package imports neither torch nor Triton. An
operator is a file, or a folder whose ``api`` has the public functions. For all of them:

- The last stride of a tensor is 1 where nothing else is said; other strides are free.
- Tensors to fill share no memory with other arguments, and have no gradient.
- ``impl`` is "triton" (default for CUDA tensors) or "torch" (default for CPU tensors). No operator
  falls back to the other.
- A shape, dtype, stride, device or host value that is not as stated raises ValueError, and so does
  an id, a length or another value in a CPU tensor. Values in device memory are not checked.
"""

from importlib import import_module
from typing import Any

# A new operator is one line (docs/extend.md).
_HOME = {
    "IndexPages": "common.latent_pages",
    "LatentPages": "common.latent_pages",
    "PoolPages": "pages",
    "attention_for": "attention.api",
    "collapse_streams": "hyper_connections",
    "combine_experts": "layers.routing",
    "compress": "compressor",
    "compressed_attention": "latent.api",
    "compressed_attention_workspace_numel": "latent.api",
    "copy_overlap": "overlap",
    "expand_streams": "hyper_connections",
    "expert_mlp": "layers.experts",
    "flash_mla_with_kvcache": "latent.flash_mla",
    "gated_product": "layers.gating",
    "gather_pages": "pages",
    "index_topk": "indexer.api",
    "index_topk_workspace_numel": "indexer.api",
    "merge_partials": "attention.api",
    "mla_attention": "latent.api",
    "norm_rope": "layers.rope",
    "page_bytes": "common.latent_pages",
    "paged_attention": "attention.api",
    "residual_norm": "layers.norm",
    "route_tokens": "layers.routing",
    "sample_tokens": "layers.sampling",
    "scatter_pages": "pages",
    "sliding_window_attention": "attention.api",
    "workspace_numel": "attention.api",
    "write_kv": "pages",
    "write_latent": "latent_write",
}

__all__ = [*_HOME]


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
