"""The package: its public names, and what it can do without Triton or a GPU."""

import os
import pkgutil

import quire.kernels
from tests.support.forked import forked, printed


def test_no_module_has_the_name_of_an_operator():
    """Importing ``quire.kernels.NAME`` as a module would put it where the function of that name is."""
    modules = {module.name for module in pkgutil.iter_modules(quire.kernels.__path__)}
    assert {"attention", "common", "layers", "pages"} <= modules
    assert not modules & set(quire.kernels.__all__)


def test_triton_on_a_cpu_is_refused_unless_interpreted():
    code = "import torch; from quire.kernels import merge_partials; merge_partials(torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 1), impl='triton')"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = forked(code, env=environment)
    assert "NotImplementedError: impl: 'triton' is supported on GPUs" in done.stderr


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
