"""Nothing is remembered from one test to the next: a test may replace what launches are made from."""

import pytest

from quire.kernels.common import launch_cache


@pytest.fixture(autouse=True)
def nothing_remembered():
    launch_cache.clear()
