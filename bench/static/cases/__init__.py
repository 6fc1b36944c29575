"""The calls that ``bench.static`` compiles."""

from __future__ import annotations

import functools

from ..case import StaticCase
from . import attention, latent, layers

# Compiled by default: each tile shape and set of arguments for the first, samples for the others.
DEFAULT_ARCH, SAMPLE_ARCHS = "sm_90", ("sm_80", "sm_100", "gfx942", "gfx950")


@functools.cache
def all_cases() -> dict[str, StaticCase]:
    """All cases of the modules of this package by name."""
    cases = [each for module in (attention, latent, layers) for each in module.cases()]
    found = {each.name: each for each in cases}
    if len(found) < len(cases):
        raise ValueError("name: expected one case of each name")
    return found
