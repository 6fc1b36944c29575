"""Packaging of quire. The top-level folders install as ``quire.kernels``, ``quire.kvcore`` and so on.

The package ``quire`` itself, which has the version and ``py.typed``, is in ``kvcore/quire``.
"""

import re
from pathlib import Path

from setuptools import setup

PACKAGES = sorted(
    ".".join(module.parent.parts)
    for top in ("kernels", "kvcore", "models", "bench")
    for module in Path(top).rglob("__init__.py")
    if module.parent != Path("kvcore/quire")
)

FOLDERS = {"quire": "kvcore/quire"} | {f"quire.{p}": p.replace(".", "/") for p in PACKAGES}
[VERSION] = re.findall(
    r'^__version__ = "(.+)"$', Path(FOLDERS["quire"], "__init__.py").read_text(encoding="utf-8"), re.MULTILINE
)  # fmt: skip

setup(
    name="quire",
    version=VERSION,
    description="Paged hybrid-attention kernels in Triton, a retention-aware KV-cache allocator, and a minimal runner",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=list(FOLDERS),
    package_dir=FOLDERS,
    package_data={"quire": ["py.typed"]},
    keywords=["attention", "DeepSeek-V4", "KV cache", "LLM inference", "Triton"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    install_requires=[
        "numpy>=1.26",
        "torch>=2.11",
        # Tests ran in the interpreters of 3.6.0, 3.7.1 and 3.9.0, not of 3.8.0 (docs/results.md).
        "triton>=3.6,<3.10; platform_system == 'Linux'",
        "safetensors>=0.5",
        "tqdm>=4.60",
    ],
    extras_require={
        "hf": [
            "transformers>=5.23,<6; python_version >= '3.11'",
            "transformers>=5.20,<6; python_version < '3.11'",
            "tokenizers>=0.22",
            "jinja2>=3.1",
        ],
        "gguf": ["gguf>=0.17"],
        "plot": ["matplotlib>=3.8"],
        "test": ["pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "ruff>=0.9", "mypy>=1.14"],
        "docs": ["mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1.0,<2"],
        "transformers": ["transformers>=5.23,<5.24"],
        "vllm": ["vllm>=0.33,<0.34"],
        "events": ["msgspec>=0.18", "pyzmq>=26", "xxhash>=3"],
        # Of Hugging Face; to load what `quire.models.integrations.hub_kernels` writes.
        "hub": ["kernels>=0.17.2"],
        # Wants other versions of torch and transformers than constraints.txt names.
        "sglang": ["sglang==0.5.23; python_version >= '3.11'"],
    },
    entry_points={
        "console_scripts": ["quire = quire.__main__:main"],
        "sglang.srt.plugins": ["quire = quire.models.integrations.sglang:register"],
        "vllm.general_plugins": ["quire = quire.models.integrations.vllm_attention:register"],
    },
)
