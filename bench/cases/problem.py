"""The tensors of one case, shared by all implementations, and the check of a result.

Several copies of the tensors exceed the L2 cache; calls take turns over them. A sample of rows is
compared in float64, within derived budgets (`bench.common.bounds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..common.bounds import Bounded, allowed
from .shapes import Case

LOGIT_STD = 3.0  # a softmax over thousands of keys rests on few, so that a wrong value shows
L2_MULTIPLE, MAX_COPIES = 4, 32
CHECKED_SEQS, CHECKED_ROWS = 8, 12


@dataclass(frozen=True)
class Problem:
    """The arguments of an operator for one case.

    Attributes:
        operator: function of ``quire.kernels``.
        shared: arguments that all copies share, by name.
        each: the other arguments, a dictionary for each copy.
        results: name -> empty tensor of a result that the operator writes (``out``, ``lse``).
        in_step: further arguments of each copy: the step's own rows; None for the indexer.
    """

    case: Case
    operator: Callable[..., Any]
    shared: dict[str, Any]
    each: list[dict[str, Any]]
    results: dict[str, Tensor]
    in_step: list[dict[str, Any]] | None = None

    @property
    def copies(self) -> int:
        """Calls that read different tensors."""
        return len(self.each)


@dataclass(frozen=True)
class Expected:
    """The results of a sample of rows of a problem's first copy.

    Attributes:
        rows: [n] indices of tokens.
        exact: [n, num_heads, head_dim] float64.
        lse: [n, num_heads] float64.
        budget, lse_budget: largest error allowed of each element.
    """

    rows: Tensor
    exact: Tensor
    lse: Tensor
    budget: Tensor
    lse_budget: Tensor

    def wrong(self, out: Tensor, lse: Tensor | None = None) -> str | None:
        """Describe the first error of a result; None if it is right. All of it has to be finite.

        Args:
            out: [num_tokens, num_heads, head_dim].
            lse: [num_heads, num_tokens] natural log; None if the implementation has none.
        """
        parts = [("out", out, out[self.rows], self.exact, self.budget)]
        if lse is not None:
            parts.append(("lse", lse, lse[:, self.rows].T, self.lse, self.lse_budget))
        for name, whole, sample, exact, budget in parts:
            if not bool(torch.isfinite(whole).all()):
                return f"{name}: not finite"
            error = (sample.double() - exact).abs()
            if bool((error > budget).any()):
                worst = (error / budget).argmax()
                found, allowed_error = error.flatten()[worst], budget.flatten()[worst]
                return f"{name}: error {found:.3g}, budget {allowed_error:.3g}"
        return None


def budgeted(
    tokens: list[int], results: list[tuple[Bounded, Bounded]], dtype: torch.dtype
) -> Expected:
    """Expected rows with the budgets of a dtype.

    Args:
        tokens: [n] indices of tokens.
        results: parts of (out [m, num_heads, *], lse [m, num_heads]) of these, float64 with bounds.
        dtype: dtype of the result.
    """
    exact, lse = (torch.cat(part) for part in zip(*results, strict=True))
    rows, budgets = torch.tensor(tokens, device=exact.device), allowed(exact, dtype)
    return Expected(rows, exact.value, lse.value, budgets, allowed(lse, torch.float32))


def attend(
    logits: Tensor, values: Tensor, sinks: Tensor | None, hidden: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax in float64 of logits [n, keys] and its product with values [keys, dim]; and the lse.

    Args:
        sinks: [n] fp32 logits that join the denominator only.
        hidden: [n, keys] True where a key is not seen.
    """
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(logits, 1)
    if sinks is not None:
        logits = torch.cat([logits, sinks.double()[:, None]], 1)
    return torch.softmax(logits, 1)[:, : len(values)] @ values, lse


def random_generator(device: torch.device, seed: int) -> torch.Generator:
    """Random numbers of a device; "meta" has none."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def num_copies(device: torch.device, size: float, asked: int | None = None) -> int:
    """``asked`` copies, or those of ``size`` bytes that exceed the L2 cache; 1 on a CPU."""
    if asked is not None or device.type != "cuda":
        return asked or 1
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_COPIES, max(1, -int(-L2_MULTIPLE * l2 // size)))


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def batch_arguments(case: Case, device: torch.device) -> dict[str, Any]:
    """The arguments that all operators have: lengths of the batch."""
    return {
        "seq_lens": torch.full((case.batch,), case.context, dtype=torch.int32, device=device),
        "cu_seqlens_q": torch.tensor([0, *case.q_lens], device=device).cumsum(0).int(),
        "max_seqlen_q": max(case.q_lens),
        "max_seq_len": case.context,
    }


def checked_rows(case: Case) -> dict[int, list[int]]:
    """{sequence: new tokens of it} of the sample that is compared."""
    return {seq: spread(case.q_lens[seq], CHECKED_ROWS) for seq in spread(case.batch, CHECKED_SEQS)}


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of range(count), evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
