"""``python -m pytest -p tests.ptx.plugin --ptx sm_80 tests/kernels``: run compiled kernels.

Loaded before ``tests/conftest.py``, which then leaves Triton's interpreter off.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ptx")
    group.addoption("--ptx", default="sm_80", choices=["sm_80", "sm_90"], help="architecture")
    group.addoption("--ptx-orders", type=int, default=1, help="random orders of CTAs a launch")
    no_fence = "ask for no fence.proxy.async between cp.async and wgmma"
    group.addoption("--ptx-unfenced-copies", action="store_true", help=no_fence)
    group.addoption("--ptx-part", default="1/1", help="K/N: the K-th of N parts of the tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    k, n = map(int, config.getoption("--ptx-part").split("/"))
    # Tests of the implementation in torch launch no kernel.
    kept = [item for item in items if "torch]" not in item.name][k - 1 :: n]
    config.hook.pytest_deselected(items=list(set(items) - set(kept)))
    items[:] = kept


@pytest.fixture(scope="session", autouse=True)
def ptx_device(request: pytest.FixtureRequest):
    """The emulated device of the session."""
    from quire.kernels.common import arch, checks, launching

    from . import device, memory

    name = request.config.getoption("--ptx")
    with pytest.MonkeyPatch.context() as patch, device.emulated(name) as made:
        # CPU tensors are those of the device; without this, Triton on them is refused.
        patch.setattr(launching, "INTERPRETER_ARCH", arch.named(name))
        expect = checks.expect_impl
        patch.setattr(checks, "expect_impl", lambda impl, device_type: expect(impl, "cuda"))
        unfenced = request.config.getoption("--ptx-unfenced-copies")
        patch.setattr(memory.Shared, "copies_need_fence", not unfenced)
        made.orders = request.config.getoption("--ptx-orders")
        request.config.ptx_device = made
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    from .parse import Unsupported

    try:
        return (yield)
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, Unsupported):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            pytest.skip(f"the emulator lacks: {cause}")
        raise
