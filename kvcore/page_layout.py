"""What must be the same for the bytes of a page to be of use to somebody else: another process, a
folder's next user, another engine.

Keys say which tokens a page holds, and not in which layout. A layout is settings by name: model,
weights, dtype, order of bytes in a page, block sizes, hash seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

Layout = Mapping[str, str | int | bytes]
OURS = ("format", "page_bytes")  # names that a layout gets here


class LayoutMismatch(ValueError):
    """What is kept has another layout.

    Args:
        where: it is kept.
        kept, asked: both, as of `layout_texts`.
        remedy: in brackets behind the message.

    Attributes:
        names: of the settings that differ.
    """

    def __init__(
        self, where: str, kept: Mapping[str, str], asked: Mapping[str, str], remedy: str
    ) -> None:
        both = sorted({*kept, *asked})
        self.names = tuple(name for name in both if kept.get(name) != asked.get(name))
        super().__init__(
            "layout: expected that of "
            + f"{where}: "
            + ", ".join(f"{n} {kept.get(n, 'not set')}" for n in self.names)
            + "; got "
            + ", ".join(f"{n} {asked.get(n, 'not set')}" for n in self.names)
            + f" ({remedy})"
        )


def layout_texts(layout: Layout, page_bytes: int) -> dict[str, str]:
    """A layout as texts, of values that are bytes only a digest.

    Args:
        layout: settings.
        page_bytes: of a page.

    Raises:
        ValueError: a value is of another type, or a name is one of `OURS`.
    """
    texts = {"page_bytes": str(page_bytes)}
    for name, setting in layout.items():
        if not isinstance(setting, (str, int, bytes)) or name in OURS:
            raise ValueError(
                "layout: expected str, int or bytes by names other than page_bytes and format, "
                f"got {name!r}: {type(setting).__name__}"
            )
        texts[name] = _text(setting)
    return texts


def layout_digest(texts: Mapping[str, str]) -> bytes:
    """16 bytes that tell layouts apart."""
    parts = [text.encode() for name in sorted(texts) for text in (name, texts[name])]
    data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(data, digest_size=16).digest()


def _text(setting: str | int | bytes) -> str:
    if isinstance(setting, bytes):
        return "BLAKE2b " + hashlib.blake2b(setting, digest_size=16).hexdigest()
    return str(setting)
