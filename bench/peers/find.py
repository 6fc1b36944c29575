"""The implementations that this machine has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from ..common.results import commit
from . import fa3, flashinfer, flashmla, vllm_triton
from .peer import BOTH_SHAPES, Peer
from .quire_calls import in_step_calls, quire_calls
from .sdpa import sdpa

LOADERS: dict[str, Callable[[Path | None], Peer]] = {
    "flashinfer": flashinfer.flashinfer_peer,
    "fa3": fa3.fa3_peer,
    "vllm-triton": vllm_triton.vllm_triton_peer,
    "flashmla": flashmla.flashmla_peer,
    "flashinfer-mla": flashinfer.flashinfer_mla_peer,
}
IN_STEP = "the step's own K/V beside the pages, as in the runner (V4: and inverse RoPE by 0)"


def find_peers(folder: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """Load the implementations that this machine has.

    Args:
        folder: files of packages that are not installed (`bench.peers.folder`), or None.

    Returns:
        The implementations, quire's first, and {name: reason} of those that are missing.
    """
    found = [
        Peer("quire", commit(), "all keys in pages", quire_calls, BOTH_SHAPES, ours=True),
        Peer("quire-in-step", commit(), IN_STEP, in_step_calls, BOTH_SHAPES, ours=True),
    ]
    missing = {}
    for name, load in LOADERS.items():
        try:
            found.append(load(folder))
        except Exception as error:  # packages fail to load in many ways, each a reason to report
            missing[name] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    found.append(Peer("sdpa", torch.__version__, "contiguous K/V", sdpa))
    return found, missing
