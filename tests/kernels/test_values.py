"""Values of CPU tensors, which no kernel looks at on a device: one that there is not is refused by name, in both implementations."""

import pytest
import torch

from quire.kernels import (
    PoolPages,
    gather_pages,
    scatter_pages,
    write_kv,
)
from tests.support.helpers import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="values on a device are not looked at")


def int64(*values):
    return torch.tensor(values, dtype=torch.int64)


def write():
    rows, pages = torch.ones(2, 1, 16), torch.zeros(3, 4, 1, 16)
    return {"k": rows, "v": rows, "k_pages": pages, "v_pages": pages.clone(), "slot_mapping": int64(-1, 11)}  # fmt: skip


def copy():
    pages = PoolPages([torch.zeros(7, 64, dtype=torch.uint8)])
    buffer = torch.zeros(6, 64, dtype=torch.uint8)
    return {"pages": pages, "buffer": buffer, "page_ids": int64(0, 6), "rows": int64(5, 0)}


TABLE = [
    (write_kv, write, {"slot_mapping": int64(-1, 12)}, r"slot_mapping: expected ids in \[0, 12\), got 12"),
    *(
        (function, copy, changes, message)
        for function in (gather_pages, scatter_pages)
        for changes, message in (
            ({"page_ids": int64(0, 7)}, r"page_ids: expected ids in \[0, 7\), got 7"),
            ({"page_ids": int64(-1, 0)}, r"page_ids: expected ids in \[0, 7\), got -1"),
            ({"rows": int64(6, 0)}, r"rows: expected ids in \[0, 6\), got 6"),
            ({"rows": int64(0, -1)}, r"rows: expected ids in \[0, 6\), got -1"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize(
    ("function", "arguments", "changes", "message"),
    TABLE,
    ids=[f"{function.__name__}-{message}"[:60] for function, _, _, message in TABLE],
)
def test_values_are_refused(function, arguments, changes, message, impl):
    function(**arguments(), impl=impl)  # what the changes change is right
    with pytest.raises(ValueError, match=f"^{message}$"):
        function(**arguments() | changes, impl=impl)
