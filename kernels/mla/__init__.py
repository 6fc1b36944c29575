"""Latent attention: DeepSeek-V4 compressed attention with its cache, compressor and indexer, and DeepSeek-V2/V3 MLA.

Importing this package imports neither torch nor Triton: public names are loaded on first use. A latent row is key and value at once.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "IndexPages": "layout",
    "LatentPages": "layout",
    "compress": "compressor",
    "compressed_attention": "compressed",
    "compressed_attention_workspace_numel": "compressed",
    "flash_mla_with_kvcache": "flash_mla",
    "index_topk": "indexer",
    "index_topk_workspace_numel": "indexer",
    "mla_attention": "dense",
    "page_bytes": "layout",
    "write_latent": "latent",
}

__all__ = [
    "IndexPages",
    "LatentPages",
    "compress",
    "compressed_attention",
    "compressed_attention_workspace_numel",
    "flash_mla_with_kvcache",
    "index_topk",
    "index_topk_workspace_numel",
    "mla_attention",
    "page_bytes",
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
