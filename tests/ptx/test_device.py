"""Refusals of the emulated device, and the tests that its pytest plugin leaves out."""

from __future__ import annotations

from collections import namedtuple
from unittest.mock import Mock

import pytest
import triton

from . import plugin
from .device import emulated

Item = namedtuple("Item", "name")


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_90a", "sm_100", "gfx942", "80", ""])
def test_other_architectures_are_refused(arch):
    with (
        pytest.raises(ValueError, match=f"arch: expected sm_80 or sm_90, got {arch}$"),
        emulated(arch),
    ):
        pass


@pytest.mark.parametrize(
    "wrap", [lambda kernel: kernel, triton.autotune([], []), triton.heuristics({})]
)
def test_a_kernel_of_the_interpreter_is_refused(wrap, monkeypatch):
    def kernel(out):
        pass

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreted = wrap(triton.jit(kernel))
    with (
        emulated("sm_80"),
        pytest.raises(RuntimeError, match="kernel: defined with TRITON_INTERPRET=1"),
    ):
        interpreted[1,](None)


@pytest.mark.parametrize(("part", "kept"), [("1/1", "a[triton] b c d"), ("2/2", "b d")])
def test_tests_of_the_implementation_in_torch_are_left_out(part, kept):
    names = ["a[torch]", "a[triton]", "b", "b[4-torch]", "c", "d"]
    items = [Item(name) for name in names]
    config = Mock(getoption={"--ptx-part": part}.get)
    plugin.pytest_collection_modifyitems(config, items)
    assert " ".join(item.name for item in items) == kept
