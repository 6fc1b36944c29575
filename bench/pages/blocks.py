"""Blocks of a page that are generated: their markers, and who makes which."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from . import allocator, memory, replay, support

ROOT = Path(__file__).resolve().parent.parent.parent
BLOCKS: dict[str, Callable[[], str]] = {
    "first-figures": allocator.first_figures,
    "allocator-costs": allocator.costs,
    "tier-costs": allocator.tier_costs,
    "replay-round-robin": replay.round_robin,
    "replay-conversation": replay.conversation,
    "replay-conversation-parts": replay.conversation_parts,
    "replay-prefix-sweep": replay.prefix_sweep,
    "replay-pr43447": replay.pr43447,
    "v4-memory": memory.table,
    "static-summary": support.summary,
    "support-legend": support.legend,
    "support-attention": support.attention,
    "support-latent": support.latent,
}
BEGIN = re.compile(r"^<!-- begin generated: (\S+) -->$")
END = "<!-- end generated -->"
# A line that was meant as one of these; what is indented or quoted, as in an example, is none.
MARKER = re.compile(r"^<!--\s*(?:begin|end)\s+generated")


def parts(text: str) -> list[tuple[str | None, list[str]]]:
    """A page as runs of lines.

    Args:
        text: of the page.

    Returns:
        (name, lines) in order; name None: lines that stay, markers among them; else the lines
        between the markers of that block.

    Raises:
        ValueError: a marker that is none of the two, a block that is not known, not closed,
            or inside another.
    """
    found: list[tuple[str | None, list[str]]] = [(None, [])]
    for number, line in enumerate(text.splitlines(), 1):
        name = found[-1][0]
        begin = BEGIN.match(line)
        if MARKER.match(line) and not begin and line != END:
            raise ValueError(f"line {number}: expected a marker of a block, got {line!r}")
        if (begin and name) or (line == END and not name):
            raise ValueError(f"line {number}: expected blocks one after another, got {line!r}")
        if begin:
            if begin[1] not in BLOCKS:
                raise ValueError(f"line {number}: expected one of {list(BLOCKS)}, got {begin[1]!r}")
            found[-1][1].append(line)
            found.append((begin[1], []))
        elif line == END:
            found.append((None, [line]))
        else:
            found[-1][1].append(line)
    if found[-1][0]:
        raise ValueError(f"{found[-1][0]}: expected {END!r} after it, got the end of the page")
    return found


def marked(text: str) -> list[str]:
    """Names of the blocks of a page, in order."""
    return [name for name, _ in parts(text) if name]


def replaced(text: str) -> str:
    """The page with every block as the results say, ValueError as in `parts`."""
    lines: list[str] = []
    for name, kept in parts(text):
        lines += ["", *BLOCKS[name]().splitlines(), ""] if name else kept
    return "\n".join(lines) + "\n"


def pages(root: Path) -> list[Path]:
    """Markdown pages of a checkout that have generated blocks."""
    found = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("bench/results/*.md")]
    return [path for path in sorted(found) if marked(path.read_text(encoding="utf-8"))]
