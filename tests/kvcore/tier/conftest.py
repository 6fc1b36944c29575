import os
import resource
import shutil
import tempfile

import pytest

MOST = 64 << 20


@pytest.fixture
def folder(tmp_path):
    """Of a store: in memory where there is such a place, as flushes of a disk take their time. No file grows past 64 MiB, whatever is wrong."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST, before[1]))
    path = None
    try:
        if os.access("/dev/shm", os.W_OK):
            path = tempfile.mkdtemp(prefix="quire-test-", dir="/dev/shm")
        yield os.path.join(path or tmp_path, "store")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        if path:
            shutil.rmtree(path)
