"""Blocks of a page that need another package than the tests have: programs run them that have it."""

import contextlib
import io
import re
from pathlib import Path


def run(page, title):
    """Runs the Python blocks of that title one after another.

    Returns:
        [(what was printed, what stands below or None)].
    """
    block = re.compile(rf'```python title="{title}"\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?', re.M | re.S)  # fmt: skip
    names, found = {"__name__": "__main__"}, []
    for code, below in block.findall(Path(page).read_text(encoding="utf-8")):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, page, "exec"), names)
        found.append((out.getvalue(), below or None))
    return found
