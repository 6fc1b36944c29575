import os
import shutil
import tempfile

import pytest


@pytest.fixture
def folder(tmp_path):
    """Of a store: in memory where there is such a place, as flushes of a disk take their time."""
    if not os.access("/dev/shm", os.W_OK):
        yield str(tmp_path / "store")
        return
    path = tempfile.mkdtemp(prefix="quire-test-", dir="/dev/shm")
    yield os.path.join(path, "store")
    shutil.rmtree(path)
