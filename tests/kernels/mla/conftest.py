"""Nothing is remembered from one test to the next: a test may replace what launches are made from."""

import pytest

from quire.kernels import recipes


@pytest.fixture(autouse=True)
def nothing_remembered():
    recipes.forget()
