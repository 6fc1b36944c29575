"""Makes `quire` that of the checkout which a program's first argument names, whatever is installed."""

import importlib.util
import sys
from pathlib import Path

root = Path(sys.argv[1]).resolve()
spec = importlib.util.spec_from_file_location(
    "quire", root / "kvcore/quire/__init__.py", submodule_search_locations=[str(root)]
)
sys.modules["quire"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["quire"])
