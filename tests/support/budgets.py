"""What of the long tests runs with ``make test``: some of each random run, some cases of tests that
repeat one claim with many models. ``make test-long`` runs the rest.
"""

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


def ordinary(*cases: str) -> pytest.MarkDecorator:
    """Marks a test of which ``make test`` runs only some cases, or none.

    Args:
        cases: parts of the ids, with their brackets, of those that it runs.
    """
    return pytest.mark.ordinary(*cases)


def leave_out(items: list[pytest.Item], *, whole: bool) -> None:
    """Marks the cases that ``ordinary`` does not name ``long``, and skips them with ``make test``.

    Args:
        whole: whether all cases of each test are among the items.
    Raises:
        pytest.UsageError: a part that no case has; then fewer cases would run than are named.
    """
    unused: dict[tuple[str, str], bool] = {}
    for item in items:
        if (mark := item.get_closest_marker("ordinary")) is None:
            continue
        test, bracket, case = item.nodeid.partition("[")
        found = [part for part in mark.args if part in bracket + case]
        for part in mark.args:
            unused[test, part] = unused.get((test, part), True) and part not in found
        if not found:
            item.add_marker(pytest.mark.long)
            if not LONG:
                item.add_marker(pytest.mark.skip(reason="QUIRE_LONG_TESTS=1 runs it"))
    if whole and any(unused.values()):
        names = [f"{test}: {part!r}" for (test, part), is_so in unused.items() if is_so]
        raise pytest.UsageError(f"no case of the test has this in its id: {'; '.join(names)}")
