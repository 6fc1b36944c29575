"""Pictures are refused before the work starts, where they cannot be drawn."""

from __future__ import annotations

from pathlib import Path


def require_matplotlib(path: str | Path) -> None:
    """Called before the work starts: raises ImportError naming the extra when matplotlib is
    missing, ValueError for a file of a format that it cannot write.
    """
    try:
        import matplotlib  # noqa: F401
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ImportError("--plot needs matplotlib (pip install 'quire[plot]')") from error
    formats, suffix = FigureCanvasBase.get_supported_filetypes(), Path(path).suffix
    if suffix and suffix[1:].lower() not in formats:
        raise ValueError(f"plot: expected one of {sorted(formats)}, got {suffix!r}")
