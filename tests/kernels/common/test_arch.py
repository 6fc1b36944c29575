"""Architectures by name, and that of a device, of NVIDIA and under ROCm."""

from types import SimpleNamespace

import pytest
import torch

from quire.kernels.common import launching
from quire.kernels.common.arch import named


@pytest.mark.parametrize(
    ("name", "tiles", "kib"),
    [
        ("sm_75", "small", 99), ("sm_80", "medium", 163), ("sm_86", "small", 99), ("sm_87", "medium", 163), ("sm_89", "small", 99),
        ("sm_90", "hopper", 227), ("sm_100", "blackwell", 227), ("sm_103", "blackwell", 227), ("sm_110", "blackwell", 227),
        ("sm_120", "small", 99), ("sm_121", "small", 99), ("gfx942", "cdna3", 64), ("gfx950", "cdna4", 160),
    ],
)  # fmt: skip
def test_names(name, tiles, kib):
    arch = named(name)
    nvidia = name.startswith("sm_")
    assert (arch.name, arch.tiles, arch.shared_memory) == (name, tiles, kib << 10)
    assert arch.maker == ("nvidia" if nvidia else "amd")
    assert arch.lanes == (32 if nvidia else 64)
    assert arch.target == (("cuda", int(name[3:]), 32) if nvidia else ("hip", name, arch.lanes))
    assert arch.register_limit(80) == ({"maxnreg": 80} if nvidia else {})
    assert arch.widens_e4m3 == (name in ("sm_89", "sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121", "gfx950"))  # fmt: skip
    assert arch.fp32_products == ("tf32x3" if nvidia else "ieee")


def test_what_rocm_adds_to_a_name_is_left_out():
    assert named("gfx942:sramecc+:xnack-") == named("gfx942")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("90", ValueError, "arch: expected a name as sm_90 or gfx942, got '90'"),
        ("sm_9", ValueError, "arch: expected a name as sm_90 or gfx942, got 'sm_9'"),
        ("gfx90a", NotImplementedError, "arch: of AMD, gfx942 and gfx950 are supported, got gfx90a"),
        ("gfx12000", NotImplementedError, "arch: of AMD, .*, got gfx12000"),
        ("gfx110", NotImplementedError, "arch: of AMD, .*, got gfx110"),
        ("gfx1100", NotImplementedError, "arch: of AMD, .*, got gfx1100"),
        ("gfx1201", NotImplementedError, "arch: of AMD, .*, got gfx1201"),
        ("gfx1030:xnack-", NotImplementedError, "arch: of AMD, .*, got gfx1030"),
    ],
)  # fmt: skip
def test_other_names_are_refused(name, error, message):
    with pytest.raises(error, match=message):
        named(name)


def test_a_device_under_rocm_goes_by_its_name(monkeypatch):
    """Its capability is that of no NVIDIA GPU, even where it looks so: gfx942 says 9.4."""
    properties = SimpleNamespace(major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert launching.arch_of(0) == named("gfx942")
    monkeypatch.setattr(torch.version, "hip", None)
    properties.minor = 0
    assert launching.arch_of(0) == named("sm_90")
