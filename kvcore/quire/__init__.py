"""quire: paged attention kernels (`quire.kernels`), a KV-cache allocator (`quire.kvcore`), models
(`quire.models`), benches (`quire.bench`).

This file is installed as ``quire/__init__.py``; the other packages are folders of the repository's
top level. It imports nothing.
"""

__all__ = ["__version__"]

__version__ = "0.3.0"
