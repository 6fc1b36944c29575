"""Makes a checkout that is not installed importable as ``quire``: its packages are the folders of
its top level. Imports nothing of them.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def make_importable() -> None:
    """Loads the package ``quire`` of this checkout, unless one is installed."""
    if "quire" in sys.modules or importlib.util.find_spec("quire") is not None:
        return
    spec = importlib.util.spec_from_file_location(
        "quire", ROOT / "kvcore/quire/__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    package = sys.modules["quire"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
