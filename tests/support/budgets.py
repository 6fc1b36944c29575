"""How long random runs are: some of each with ``make test``, all of it with ``make test-long``."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

LONG = bool(os.environ.get("QUIRE_LONG_TESTS"))


def budget(ordinary: int, *, long: int) -> Callable:
    """Marks a test that takes how much it tries as its argument ``budget``.

    Args:
        ordinary: that of ``make test``.
        long: that of ``make test-long``, which runs the tests that are marked so and no others.
    """
    number = size(ordinary, long=long)

    def mark(test):
        return pytest.mark.long(pytest.mark.parametrize("budget", [number])(test))

    return mark


def size(ordinary: int, *, long: int) -> int:
    """The number alone, for tests that are no functions; they are marked ``long`` by hand."""
    return long if LONG else ordinary
