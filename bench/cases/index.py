"""Problems of the indexer.

``topk_indices`` are right if their number is, and none comes twice. No entry left out may score
higher than one taken by more than the errors of both scores.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels import index_topk, index_topk_workspace_numel

from ..common.bounds import Bounded, bounding
from .latent import make_pages, shuffled_table, slots
from .problem import Problem, batch_arguments, checked_rows, num_copies, random_generator
from .shapes import Case
from .work import case_bytes


def make_index(
    case: Case, device: torch.device, dtype: torch.dtype, copies: int | None, seed: int
) -> Problem:
    """Random tensors for "index"; arguments as in `bench.cases.make.make_problem`."""
    shape, generator = case.shape, random_generator(device, seed)
    width = -(-shape.entries(case.context) // shape.rows)
    table = shuffled_table(case.batch, width, generator, device)
    weights = torch.randn(case.num_tokens, shape.num_heads, generator=generator, device=device)
    sizes = {"topk": shape.topk, "compress_ratio": shape.ratio, "max_seq_len": case.context}
    numel = index_topk_workspace_numel(num_tokens=case.num_tokens, **sizes)
    shared = {
        **batch_arguments(case, device),
        "weights": weights * (shape.num_heads * shape.head_dim) ** -0.5,
        "block_table": table,
        "workspace": torch.empty(numel, device=device),
        **sizes,
    }
    size = (case.num_tokens, shape.num_heads, shape.head_dim)
    each = []
    for _ in range(num_copies(device, case_bytes(case), copies)):
        q = torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)
        each.append({"q": q, "pages": make_pages(table, shape, shape.rows, dtype, generator)})
    results = {
        "out": torch.empty(case.num_tokens, shape.topk, dtype=torch.int32, device=device),
        "lens": torch.empty(case.num_tokens, dtype=torch.int32, device=device),
    }
    return Problem(case, index_topk, shared, each, results)


@dataclass(frozen=True)
class ExpectedTopk:
    """The scores that ``index_topk`` selects by.

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


def expect_topk(problem: Problem) -> ExpectedTopk:
    """The float64 scores of a sample of tokens of the first copy."""
    case, shape, tensors = problem.case, problem.case.shape, problem.each[0]
    tokens, scores = [], []
    for seq, row in ((seq, row) for seq, rows in checked_rows(case).items() for row in rows):
        token = seq * case.q_lens[0] + row
        visible = (case.context - case.q_lens[0] + row + 1) // shape.ratio
        entry = torch.arange(visible, device=tensors["q"].device)
        keys = tensors["pages"].read(slots(problem.shared["block_table"][seq], shape.rows, entry))
        with bounding():
            products = torch.relu(keys.double() @ tensors["q"][token].double().T)
            scores.append(products @ problem.shared["weights"][token].double())
        tokens.append(token)
    return ExpectedTopk(tokens, scores, shape.topk)
