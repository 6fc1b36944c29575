"""Whether work is under way that a CUDA graph is to hold.

Such work may not ask the device for a value. Layers that ask elsewhere, since the answer makes them
faster, look here; so warm-up runs do what the capture does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CAPTURABLE = ContextVar("capturable", default=False)


def must_be_capturable() -> bool:
    """Whether the host may not wait for the device now."""
    return _CAPTURABLE.get()


@contextmanager
def capturable() -> Iterator[None]:
    """Within it `must_be_capturable` is true, in this thread."""
    token = _CAPTURABLE.set(True)
    try:
        yield
    finally:
        _CAPTURABLE.reset(token)
