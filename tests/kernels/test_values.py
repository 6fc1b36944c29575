"""Values of CPU tensors, which no kernel looks at on a device: one that there is not is refused by name, in both implementations."""

import pytest
import torch

from quire.kernels import (
    PoolPages,
    copy_overlap,
    expert_mlp,
    gather_pages,
    route_tokens,
    sample_tokens,
    scatter_pages,
    write_kv,
)
from tests.support.helpers import DEVICE, NAN

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="values on a device are not looked at")
F64, I32 = torch.float64, torch.int32


def int64(*values):
    return torch.tensor(values, dtype=torch.int64)


def fill(value, dtype=torch.float32):
    return torch.tensor([value, value], dtype=dtype)


def write():
    rows, pages = torch.ones(2, 1, 16), torch.zeros(3, 4, 1, 16)
    return {"k": rows, "v": rows, "k_pages": pages, "v_pages": pages.clone(), "slot_mapping": int64(-1, 11)}  # fmt: skip


def copy():
    pages = PoolPages([torch.zeros(7, 64, dtype=torch.uint8)])
    buffer = torch.zeros(6, 64, dtype=torch.uint8)
    return {"pages": pages, "buffer": buffer, "page_ids": int64(0, 6), "rows": int64(5, 0)}


def overlap():
    return {
        "kv": torch.zeros(5, 32), "gate": torch.zeros(5, 32), "ape": torch.zeros(2, 32), "state": torch.zeros(3, 4, 2, 32),
        "pages": torch.zeros(6, 2, 2, 16), "from_pages": int64(5, 99), "state_index": int64(2, -1),
        "state_rows": int64([0, 3], [99, 99]), "tokens": int64(4, 0, 99, 99), "to_pages": int64(1, 1, 0, 0),
    }  # fmt: skip


def experts():
    weights = torch.zeros(3, 2, 16, 16)
    return {"x": torch.zeros(2, 16), "ids": int64([0], [2]), "gate_up": weights, "down": weights[:, 0], "activation": "silu"}  # fmt: skip


def route():
    table = int64(*[[0, 1]] * 4)
    return {"logits": torch.zeros(2, 8), "top_k": 2, "table": table, "token_ids": int64(0, 3)}


def sample():
    rows = {"temperature": fill(1.0), "top_k": fill(0, I32), "top_p": fill(1.0), "min_p": fill(0.0), "u": fill(0.5, F64)}  # fmt: skip
    return {"logits": torch.zeros(2, 16)} | rows


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
    (copy_overlap, overlap, {"from_pages": int64(6, 0)}, r"from_pages: expected values in \[0, 5\], got 6"),
    (copy_overlap, overlap, {"from_pages": int64(-1, 0)}, r"from_pages: expected values in \[0, 5\], got -1"),
    (copy_overlap, overlap, {"state_index": int64(3, -1)}, r"state_index: expected values in \[0, 2\], got 3"),
    (copy_overlap, overlap, {"state_index": int64(-2, -1)}, r"state_index: expected values in \[0, 2\], got -2"),
    (copy_overlap, overlap, {"state_rows": int64([0, 4], [0, 0])}, r"state_rows: expected values in \[0, 3\], got 4"),
    (copy_overlap, overlap, {"tokens": int64(0, 5, 0, 0)}, r"tokens: expected values in \[0, 4\], got 5"),
    (copy_overlap, overlap, {"to_pages": int64(6, 6, 0, 0)}, r"to_pages: expected values in \[1, 5\], got 6"),
    (copy_overlap, overlap, {"to_pages": int64(-1, -1, 0, 0)}, r"to_pages: expected values in \[1, 5\], got -1"),
    (expert_mlp, experts, {"ids": int64([0], [3])}, r"ids: expected values in \[0, 2\], got 3"),
    (expert_mlp, experts, {"ids": int64([-1], [2])}, r"ids: expected values in \[0, 2\], got -1"),
    (route_tokens, route, {"token_ids": int64(0, 4)}, r"token_ids: expected values in \[0, 3\], got 4"),
    (route_tokens, route, {"token_ids": int64(-1, 0)}, r"token_ids: expected values in \[0, 3\], got -1"),
    (route_tokens, route, {"table": int64(*[[0, 8]] * 4)}, r"table: expected values in \[0, 7\], got 8"),
    (sample_tokens, sample, {"temperature": fill(-1.0)}, r"temperature: expected values in \[0.0, inf\], got -1.0"),
    (sample_tokens, sample, {"temperature": fill(NAN)}, r"temperature: expected values in \[0.0, inf\], got nan"),
    (sample_tokens, sample, {"top_k": fill(-1, I32)}, r"top_k: expected values in \[0, 2147483647\], got -1"),
    (sample_tokens, sample, {"top_p": fill(-0.5)}, r"top_p: expected values in \[0.0, inf\], got -0.5"),
    (sample_tokens, sample, {"min_p": fill(2.0)}, r"min_p: expected values in \[0.0, 1.0\], got 2.0"),
    (sample_tokens, sample, {"u": fill(-0.5, F64)}, r"u: expected values in \[0.0, 1.0\], got -0.5"),
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
