"""Arguments that the wrappers refuse, and the wording."""

import os
import subprocess
import sys

import pytest
import torch

from quire.kernels import merge_partials, paged_attention, sliding_window_attention
from tests.support.forked import forked, printed
from tests.support.helpers import DEVICE, AttentionCase, make_batch


def replaced(**changes):
    return make_batch(AttentionCase("", [20, 9], [1, 5])) | changes


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


# One row for each form of a message; `test_edges` has all arguments.
REFUSED = [
    ({"q": zeros(6, 4)}, r"q: expected bfloat16\|float16\|float32 \[\*, \*, \*\], got float32 \[6, 4\]"),
    ({"k_pages": zeros(3, 2, 64)}, r"k_pages: expected float32\|float8_e4m3fn \[num_pages, block_size, num_kv_heads, head_dim\], got float32 \[3, 2, 64\]"),
    ({"q": [1.0]}, r"q: expected .*, got list"),
    ({"q": zeros(6, 3, 16)}, "q: num_heads: expected a multiple of num_kv_heads 2, got 3"),
    ({"q": zeros(6, 4, 32)}, "k_pages: expected head_dim 32, got 16"),
    ({"q": zeros(6, 16, 4).transpose(1, 2)}, r"q: expected stride 1 in the last dimension, got \(64, 1, 4\)"),
    ({"v": None}, "v: expected new rows of both k and v or of neither, got None"),
    ({"max_seqlen_q": 5.0}, "max_seqlen_q: expected an int >= 0, got 5.0"),
    ({"max_seqlen_q": 1}, "max_seqlen_q: expected the longest of 2 sequences with 6 tokens, got 1"),
    ({"max_seqlen_q": 2, "num_decodes": 2}, "max_seqlen_q: expected the longest of 2 sequences with 6 tokens, got 2"),
    ({"num_decodes": 3}, r"num_decodes: expected an int in \[0, 2\], got 3"),
    ({"softmax_scale": 0.0}, "softmax_scale: expected a finite number > 0, got 0.0"),
    ({"softcap": float("inf")}, "softcap: expected a finite number > 0, got inf"),
    ({"impl": "cuda"}, "impl: expected 'triton', 'torch' or None, got 'cuda'"),
]  # fmt: skip


@pytest.mark.parametrize("changes, message", REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_attention_refuses(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        paged_attention(**replaced(**changes))


OF_VALUES = [
    ("block_table", [[9999, 1], [0, 0]], r"block_table: expected ids in \[0, \d+\), got 9999"),
    ("block_table", [[-3, 1], [0, 0]], r"block_table: expected ids in \[0, \d+\), got -3"),
    *(
        ("cu_seqlens_q", sums, rf"cu_seqlens_q: expected prefix sums from 0 to 6, the number of tokens, got \[{', '.join(map(str, sums))}\]")
        for sums in ([0, 4, 3], [0, 1, 7], [0, 1, 5], [1, 2, 6])
    ),
    ("seq_lens", [1, 2**30], r"seq_lens: expected values in \[0, 1073741823\], got 1073741824"),
    ("seq_lens", [-4, 9], r"seq_lens: expected values in \[0, 1073741823\], got -4"),
    ("seq_lens", [20, 2], "seq_lens: expected at least the 5 new tokens of sequence 1, or 0 for padding, got 2"),
]  # fmt: skip


@pytest.mark.skipif(DEVICE != "cpu", reason="values on a device are not looked at")
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("name, values, message", OF_VALUES)
def test_values_are_refused(name, values, message, impl):
    """Without the check -3 would be a page counted from the end."""
    wrong = torch.tensor(values, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=f"^{message}$"):
        paged_attention(**replaced(**{name: wrong}), impl=impl)


@pytest.mark.skipif(DEVICE != "cpu", reason="values on a device are not looked at")
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_table_too_short_for_the_window_is_refused(impl):
    """A ring of one page of 16 rows would give the window of 40 the newest rows twice."""
    short = replaced(sliding_window=40)
    short["block_table"] = short["block_table"][:, :1]
    message = "block_table: expected at least 2 blocks of 16 rows, for a window of 40, got 1"
    with pytest.raises(ValueError, match=f"^{message}$"):
        sliding_window_attention(**short, impl=impl)


def test_triton_on_a_cpu_is_refused_unless_interpreted():
    code = "import torch; from quire.kernels import merge_partials; merge_partials(torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1), impl='triton')"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = forked(code, env=environment)
    assert "NotImplementedError: impl: 'triton' is supported on GPUs" in done.stderr


@pytest.mark.parametrize("max_seqlen_q, num_decodes", [(3, 2), (1, 1), (0, 0), (99, 2)])
def test_lengths_that_the_host_cannot_refute(max_seqlen_q, num_decodes):
    """Only where no prefill kernel would be launched must the sequences be able to hold all rows."""
    paged_attention(**replaced(max_seqlen_q=max_seqlen_q, num_decodes=num_decodes, impl="torch"))


def test_unsupported_head_dim_names_the_supported():
    pages = zeros(9, 16, 2, 24)
    message = r"k_pages: head_dim 24 is not one of \[16, 32, 64, 128, 256, 512\]"
    arguments = replaced(q=zeros(6, 4, 24), k_pages=pages, v_pages=pages, k=None, v=None)
    assert paged_attention(**arguments, impl="torch").shape == (6, 4, 24)
    with pytest.raises(NotImplementedError, match=message):
        paged_attention(**arguments, impl="triton")
    with pytest.raises(NotImplementedError, match="partial_out: head_dim 24"):
        merge_partials(zeros(2, 3, 4, 24), zeros(2, 4, 3))


def test_the_torch_implementations_need_no_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from quire.kernels import merge_partials, mla_attention\n"
        "assert merge_partials(torch.ones(1, 1, 1, 16), torch.zeros(1, 1, 1)).eq(1).all()\n"
        "one = torch.ones(1, dtype=torch.int32)\n"
        "out = mla_attention(torch.ones(1, 2, 48), torch.ones(2, 16, 48), one[:, None], one,\n"
        "    torch.tensor([0, 1], dtype=torch.int32), max_seqlen_q=1, softmax_scale=1.0, head_dim_v=32)\n"
        "assert out.eq(1).all()"
    )
    printed(code)


def test_importing_the_package_costs_neither_torch_nor_triton():
    code = "import sys, quire.kernels; dir(quire.kernels); assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
