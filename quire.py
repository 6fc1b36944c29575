"""The package ``quire`` of a checkout: Python finds it when it runs in this folder, so nothing has
to be installed.

Its packages are the folders beside this file. An installed ``quire`` has ``kvcore/quire`` instead.
"""

from pathlib import Path

__all__ = ["__version__"]

_ROOT = Path(__file__).resolve().parent
__path__ = [str(_ROOT / "kvcore")]

from quire.quire import __version__  # noqa: E402

__path__ = [str(_ROOT)]
