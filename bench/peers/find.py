"""The implementations that this machine has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ..common.results import commit, one_line
from . import fa3, flashinfer, flashmla, vllm_triton
from .peer import BOTH_SHAPES, Peer
from .quire_calls import quire_calls
from .sdpa import sdpa

LOADERS: dict[str, Callable[[Path | None], Peer]] = {
    "flashinfer": flashinfer.flashinfer_peer,
    "fa3": fa3.fa3_peer,
    "vllm-triton": vllm_triton.vllm_triton_peer,
    "flashmla": flashmla.flashmla_peer,
    "flashinfer-mla": flashinfer.flashinfer_mla_peer,
}
NVIDIA_ONLY = ("flashinfer", "fa3", "flashmla", "flashinfer-mla")
IN_STEP = "the step's own K/V beside the pages, as in the runner (V4: and inverse RoPE by 0)"


def find_peers(folder: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """Load the implementations that this machine has.

    Args:
        folder: files of packages that are not installed (`bench.peers.folder`), or None.

    Returns:
        The implementations, quire's first, and {name: reason} of those that are missing.
    """
    in_step = partial(quire_calls, in_step=True)
    found = [
        Peer("quire", commit(), "all keys in pages", quire_calls, BOTH_SHAPES, ours=True),
        Peer("quire-in-step", commit(), IN_STEP, in_step, BOTH_SHAPES, ours=True),
    ]
    missing = {}
    for name, load in LOADERS.items():
        if name in NVIDIA_ONLY and torch.version.hip is not None:
            missing[name] = f"expected NVIDIA GPUs, got a torch for ROCm {torch.version.hip}"
            continue
        try:
            found.append(load(folder))
        except Exception as error:  # packages fail to load in many ways, each a reason to report
            missing[name] = one_line(error)
    found.append(Peer("sdpa", torch.__version__, "contiguous K/V", sdpa))
    return found, missing
