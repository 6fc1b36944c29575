"""Folders of quire's packages, and its version. What else there is to say is in pyproject.toml.

The top-level folders install as ``quire.kernels``, ``quire.kvcore`` and so on. The package
``quire`` itself, which has the version and ``py.typed``, is in ``kvcore/quire``.
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
SOURCE = Path(FOLDERS["quire"], "__init__.py").read_text(encoding="utf-8")
[VERSION] = re.findall(r'^__version__ = "(.+)"$', SOURCE, re.MULTILINE)

setup(
    version=VERSION,
    packages=list(FOLDERS),
    package_dir=FOLDERS,
    package_data={"quire": ["py.typed"], "": ["*.pyi"]},
    include_package_data=False,
)
