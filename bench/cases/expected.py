"""The float64 result of a case, for a sample of its tokens, and what a right program may differ by
(`bench.common.bounds`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..common.bounds import Bounded, allowed, bounding
from .problem import Problem, slots, stored

CHECKED_SEQS, CHECKED_ROWS = 8, 12


@dataclass(frozen=True)
class Expected:
    """The results of a sample of tokens of a problem's first copy.

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


@dataclass(frozen=True)
class ExpectedTopk:
    """The scores that ``index_topk`` selects by.

    Indices are right if their number is, and none comes twice. No entry left out may score higher
    than one taken by more than the errors of both scores.

    Attributes:
        tokens: tokens that are checked.
        scores: float64 scores with bounds of all entries that each token sees.
        topk: most entries of a token.
    """

    tokens: list[int]
    scores: list[Bounded]
    topk: int

    def wrong(self, topk_indices: Tensor, lens: Tensor) -> str | None:
        """Describe the first error of a result; None if it is right.

        Args:
            topk_indices: [num_tokens, topk] int32 entries, then -1.
            lens: [num_tokens] int32 numbers of entries.
        """
        for token, scores in zip(self.tokens, self.scores, strict=True):
            count, row = min(self.topk, len(scores)), topk_indices[token].long()
            ids = row[:count]
            if int(lens[token]) != count or bool((row[count:] != -1).any()):
                return f"topk_indices: expected {count} of token {token}, got {int(lens[token])}"
            if not bool(((ids >= 0) & (ids < len(scores))).all()):
                return f"topk_indices: token {token} has one that it does not see"
            taken = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
            taken[ids] = True
            if int(taken.sum()) != count:
                return f"topk_indices: token {token} has one twice"
            if count < len(scores):
                least, most = scores.value - scores.error, scores.value + scores.error
                gap = float(least[~taken].max() - most[taken].min())
                if gap > 0:
                    excess = f"{gap:.3g} more than the budget allows"
                    return f"topk_indices: one left out scores {excess}"
        return None


def expect(problem: Problem) -> Expected | ExpectedTopk:
    """The expected result of a sample of tokens of the first copy."""
    case, dtype = problem.case, problem.results["out"].dtype
    sample = [
        (seq, row)
        for seq in _spread(case.batch, CHECKED_SEQS)
        for row in _spread(case.q_lens[seq], CHECKED_ROWS)
    ]
    tokens = [sum(case.q_lens[:seq]) + row for seq, row in sample]
    if case.shape.op == "index":
        scores = [index_scores(problem, *where) for where in sample]
        return ExpectedTopk(tokens, scores, case.shape.topk)
    results = [attention_row(problem, *where, weights=dtype) for where in sample]
    out, lse = (torch.stack(part) for part in zip(*results, strict=True))
    budgets = allowed(out, dtype), allowed(lse, torch.float32)
    return Expected(torch.tensor(tokens, device=out.device), out.value, lse.value, *budgets)


def attention_row(
    problem: Problem, seq: int, row: int, weights: torch.dtype
) -> tuple[Bounded, Bounded]:
    """Attention of new token ``row`` of a sequence: out [num_heads, head_dim_v], lse [num_heads].

    Args:
        weights: dtype of the weights of the softmax.

    Source: ``tests/kernels/oracles``, with which a test compares it.
    """
    sinks, token = problem.shared.get("sinks"), sum(problem.case.q_lens[:seq]) + row
    keys, values = visible(problem, seq, row)
    with bounding(weights=weights):
        q = problem.each[0]["q"][token].double().unflatten(0, (len(keys), -1))
        logits = q @ keys.double().mT * problem.case.shape.softmax_scale  # [kv_heads, group, n]
        lse = torch.logsumexp(logits, 2)
        if sinks is not None:
            logits = torch.cat([logits, sinks.double().view(*lse.shape, 1)], 2)
        out = torch.softmax(logits, 2)[:, :, : keys.shape[1]] @ values.double()
        return out.flatten(0, 1), lse.flatten()


def visible(problem: Problem, seq: int, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values [num_kv_heads, n, dim] that a new token sees in the first copy."""
    case, shape, position = problem.case, problem.case.shape, problem.case.new[seq][row]
    found = stored(problem, seq, 0, range(shape.lowest(position), position + 1))
    if shape.op == "attention":
        keys, values = found
        return keys.transpose(0, 1), values.transpose(0, 1)
    [rows] = found
    if shape.op in ("csa", "hca"):
        entry = torch.arange((position + 1) // shape.ratio, device=rows.device)
        if shape.op == "csa":
            entry = problem.each[0]["topk_indices"][seq * case.q_lens[0] + row].long()
            entry = entry[entry >= 0]
        where = slots(problem.shared["compressed_table"][seq], shape.rows, entry)
        rows = torch.cat([rows, problem.each[0]["compressed_pages"].read(where)])
    return rows[None], rows[None, :, : shape.head_dim_v]


def index_scores(problem: Problem, seq: int, row: int) -> Bounded:
    """Scores of all entries that new token ``row`` of a sequence sees."""
    case, shape, tensors = problem.case, problem.case.shape, problem.each[0]
    token, device = seq * case.q_lens[0] + row, tensors["q"].device
    entry = torch.arange((case.new[seq][row] + 1) // shape.ratio, device=device)
    keys = tensors["pages"].read(slots(problem.shared["block_table"][seq], shape.rows, entry))
    with bounding():
        products = torch.relu(keys.double() @ tensors["q"][token].double().T)
        return products @ problem.shared["weights"][token].double()


def _spread(count: int, most: int) -> list[int]:
    """At most ``most`` of range(count), evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})
