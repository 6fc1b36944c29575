"""Which cases run with ``make test``, and which with ``make test-long`` alone."""

from types import SimpleNamespace

import pytest

from tests.support import budgets

CASES = ["a", "ab", "b-a", "c"]


class Item:
    def __init__(self, case, parts):
        self.nodeid = f"tests/test_x.py::test_x[{case}]"
        self.parts, self.marks = parts, []

    def get_closest_marker(self, name):
        return (
            SimpleNamespace(args=self.parts)
            if name == "ordinary" and self.parts is not None
            else None
        )

    def add_marker(self, mark):
        self.marks.append(mark.name)


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize(
    ("parts", "ordinary"),
    [(("[a",), ["a", "ab"]), (("a]", "c"), ["a", "b-a", "c"]), ((), []), (None, CASES)],
)
def test_cases_that_are_not_named_are_long(monkeypatch, parts, ordinary, is_long):
    monkeypatch.setattr(budgets, "LONG", is_long)
    items = [Item(case, parts) for case in CASES]
    budgets.leave_out(items, whole=True)
    left_out = ["long"] if is_long else ["long", "skip"]
    assert [item.marks for item in items] == [[] if c in ordinary else left_out for c in CASES]


def test_a_part_that_no_case_has_is_named():
    items = [Item(case, ["c]", "d"]) for case in CASES]
    with pytest.raises(pytest.UsageError, match=r"test_x: 'd'$"):
        budgets.leave_out(items, whole=True)
    budgets.leave_out(items, whole=False)  # somebody asked for some cases of the test
