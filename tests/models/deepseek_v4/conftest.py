"""Tiny checkpoints of DeepSeek-V4, and what transformers says about them."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.models import v4_oracle
from tests.support.shared import once_a_run


@pytest.fixture(scope="session")
def v4_oracles(tmp_path_factory) -> dict[str, v4_oracle.Oracle]:
    """By name (`v4_oracle.ask_transformers`); transformers is asked once a run."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers, the oracle of this test, is not installed")
    root = once_a_run(tmp_path_factory, "v4_oracle", v4_oracle.ask_transformers)
    return v4_oracle.answers(root)
