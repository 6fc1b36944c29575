"""The checks of one call of ``sample_tokens``."""

from __future__ import annotations

from typing import Any

import torch

from ..common.checks import MODEL_DTYPES, expect_apart, expect_int, expect_tensor

# Of each row: how it is drawn.
OF_ROWS = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "u": torch.float64,
}


def check_sample(
    logits: Any, temperature: Any, top_k: Any, top_p: Any, min_p: Any, u: Any, probs: Any
) -> None:
    """Check the arguments of ``sample_tokens``, which says what they are and what is raised."""
    expect_tensor("logits", logits, (None, None), MODEL_DTYPES)
    num_rows, vocab_size = logits.shape
    device = logits.device
    expect_int("logits: vocab_size", vocab_size, 1, 2**31 - 1)
    given = dict(zip(OF_ROWS, (temperature, top_k, top_p, min_p, u), strict=True))
    greedy = all(value is None for value in given.values())
    for name, value in given.items():
        if value is None and not greedy:
            raise ValueError(f"{name}: expected all of {', '.join(OF_ROWS)} or none, got None")
        if not greedy:
            expect_tensor(name, value, (num_rows,), OF_ROWS[name], device=device)
    if probs is not None:
        if greedy:
            raise ValueError("probs: expected None without a temperature, got a tensor")
        expect_tensor("probs", probs, tuple(logits.shape), torch.float32, device=device)
        expect_apart("probs", probs)
