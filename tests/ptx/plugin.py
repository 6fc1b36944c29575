"""``pytest -p tests.ptx.plugin --ptx sm_80 tests/kernels``: tests run what the compiler makes.

Loaded before ``tests/conftest.py``, which then leaves Triton's interpreter off.
"""

from __future__ import annotations

import time

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ptx")
    group.addoption("--ptx", default="sm_80", help="architecture to compile for: sm_80, sm_90")
    group.addoption("--ptx-orders", type=int, default=1, help="random orders of CTAs a launch")
    group.addoption("--ptx-seconds", type=float, default=300, help="skip a test that takes longer")
    group.addoption("--ptx-part", help="K/N: the K-th of N parts of the tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part = config.getoption("--ptx-part")
    if part:
        k, n = map(int, part.split("/"))
        items[:] = items[k - 1 :: n]


@pytest.fixture(scope="session", autouse=True)
def ptx_device(request: pytest.FixtureRequest):
    """The emulated device of the session."""
    from quire.kernels.common import arch, checks, launching

    from . import device

    name = request.config.getoption("--ptx")
    with pytest.MonkeyPatch.context() as patch, device.emulated(name) as made:
        # CPU tensors are those of the device; without this, Triton on them is refused.
        patch.setattr(launching, "INTERPRETER_ARCH", arch.named(name))
        expect = checks.expect_impl
        patch.setattr(checks, "expect_impl", lambda impl, device_type: expect(impl, "cuda"))
        made.orders = request.config.getoption("--ptx-orders")
        request.config.ptx_device = made
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    from .parse import Unsupported

    device = item.config.ptx_device
    device.deadline = time.perf_counter() + item.config.getoption("--ptx-seconds")
    try:
        return (yield)
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, Unsupported):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            pytest.skip(f"the emulator lacks: {cause}")
        raise
