"""The implementations that this machine has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ..common.results import commit, one_line
from .fa3 import fa3_peer
from .flashinfer import flashinfer_mla_peer, flashinfer_peer
from .flashmla import flashmla_peer
from .peer import ALL_OPS, Peer
from .quire_calls import quire_calls
from .sdpa import sdpa
from .vllm_triton import vllm_triton_peer

LOADERS: dict[str, Callable[[Path | None], Peer]] = {
    "flashinfer": flashinfer_peer,
    "fa3": fa3_peer,
    "vllm-triton": vllm_triton_peer,
    "flashmla": flashmla_peer,
    "flashinfer-mla": flashinfer_mla_peer,
}
IN_STEP = "the step's own K/V beside the pages, as in the runner (V4: and inverse RoPE by 0)"


def find_peers(folder: Path | None) -> tuple[list[Peer], dict[str, str]]:
    """Load the implementations that this machine has.

    Args:
        folder: unpacked wheels of packages that are not installed, or None.

    Returns:
        The implementations, quire's first, and {name: reason} of those that are missing.
    """
    in_step = partial(quire_calls, in_step=True)
    found = [
        Peer("quire", commit(), "all keys in pages", quire_calls, ALL_OPS, ours=True),
        Peer("quire-in-step", commit(), IN_STEP, in_step, ALL_OPS[:-1], ours=True),
    ]
    missing = {}
    for name, load in LOADERS.items():
        if torch.version.hip is not None and name != "vllm-triton":
            missing[name] = f"expected NVIDIA GPUs, got a torch for ROCm {torch.version.hip}"
            continue
        try:
            found.append(load(folder))
        except Exception as error:  # packages fail to load in many ways, each a reason to report
            missing[name] = one_line(error)
    found.append(Peer("sdpa", torch.__version__, "contiguous K/V", sdpa))
    return found, missing
