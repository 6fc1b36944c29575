"""Problems of the operators that make what latent attention reads: ``topk_indices``, entries, rows.

``topk_indices`` are right if no entry that was left out scores higher than one that was taken, by
more than the errors of two scores, and if there are as many as there should be, each once. Written
rows are read back from the pages, and compared with those of ``impl="torch"``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.kernels import (
    IndexPages,
    LatentPages,
    compress,
    index_topk,
    index_topk_workspace_numel,
    write_latent,
)

from ..common.bounds import Bounded, bounding
from .latent import make_pages, positions, shuffled_table, slots
from .problem import Problem, checked_rows, lengths, num_copies
from .shapes import Case, LatentShape
from .work import case_bytes

ROPE_THETA = 1e4


def make_index(case: Case, device: torch.device, copies: int | None, seed: int) -> Problem:
    """Random tensors for "index"; arguments as in `bench.cases.make.make_problem`."""
    shape = case.shape
    assert isinstance(shape, LatentShape)
    generator = torch.Generator(device).manual_seed(seed)
    seq_lens, cu_seqlens_q = lengths(case, device)
    table = shuffled_table(case.batch, -(-shape.entries(case.context) // shape.rows), generator)
    weights = torch.randn(case.num_tokens, shape.num_heads, generator=generator, device=device)
    sizes = {"topk": shape.topk, "compress_ratio": shape.ratio, "max_seq_len": case.context}
    numel = index_topk_workspace_numel(num_tokens=case.num_tokens, **sizes)
    shared = {
        "weights": weights * (shape.num_heads * shape.head_dim) ** -0.5,
        "block_table": table,
        "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": case.q_lens[0],
        "workspace": torch.empty(numel, device=device),
        **sizes,
    }
    size = (case.num_tokens, shape.num_heads, shape.head_dim)
    each = []
    for _ in range(num_copies(device, case_bytes(case), copies)):
        q = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        each.append({"q": q, "pages": make_pages(table, shape, shape.rows, generator)})
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
                gap = (least[~taken].max() - most[taken].min()).item()
                if gap > 0:
                    return (
                        f"topk_indices: one left out scores {gap:.3g} more than the budget allows"
                    )
        return None


def expect_topk(problem: Problem) -> ExpectedTopk:
    """The float64 scores of a sample of tokens of the first copy."""
    case, shape, tensors = problem.case, problem.case.shape, problem.each[0]
    tokens, scores = [], []
    for seq, row, token in checked_rows(case):
        visible = (case.context - case.q_lens[0] + row + 1) // shape.ratio
        entry = torch.arange(visible, device=tensors["q"].device)
        table = problem.shared["block_table"][seq]
        keys = tensors["pages"].read(slots(table, shape.rows, entry))
        tokens.append(token)
        with bounding():
            products = torch.relu(keys.double() @ tensors["q"][token].double().T)
            scores.append(products @ problem.shared["weights"][token].double())
    return ExpectedTopk(tokens, scores, shape.topk)


def make_rows(case: Case, device: torch.device, copies: int | None, seed: int) -> Problem:
    """Random tensors for "write" or "compress"; arguments as in `bench.cases.make.make_problem`.

    The state holds the step's rows already, so that a call changes nothing that the next one reads.
    """
    shape = case.shape
    assert isinstance(shape, LatentShape)
    generator = torch.Generator(device).manual_seed(seed)
    copies = num_copies(device, case_bytes(case), copies)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    q_len, position = case.q_lens[0], positions(case, device)
    if shape.op == "write":
        rows, index = shape.window_rows, torch.arange(q_len, device=device).repeat(case.batch)
        width = -(-q_len // rows)
    else:
        rows, index, width = (
            shape.rows,
            position // shape.ratio,
            -(-shape.entries(case.context) // shape.rows),
        )
        index = torch.where((position + 1) % shape.ratio == 0, index, -1)
    table = shuffled_table(case.batch, width, generator)
    parts = index.view(case.batch, q_len)
    shared: dict[str, Any] = {
        "slot_mapping": torch.cat(
            [slots(table[seq], rows, parts[seq]) for seq in range(case.batch)]
        ),
        "cos_sin": rope_table(case.context, shape.rope_dim, device),
        "norm_weight": 1 + 0.3 * normal(shape.head_dim),
    }
    each: list[dict[str, Any]] = [
        {"pages": make_pages(table, shape, rows, generator)} for _ in range(copies)
    ]
    if shape.op == "write":
        for tensors in each:
            tensors["x"] = normal(case.num_tokens, shape.head_dim).bfloat16()
        results = {"out": torch.empty_like(each[0]["x"])}
        return Problem(case, write_latent, shared | {"positions": position}, each, results)
    seq_lens, cu_seqlens_q = lengths(case, device)
    channels, ring = shape.head_dim * (1 + shape.overlap), shape.ratio * (1 + shape.overlap)
    shared |= {
        "ape": normal(shape.ratio, channels),
        "state_index": torch.arange(case.batch, dtype=torch.int32, device=device),
        "seq_lens": seq_lens,
        "cu_seqlens_q": cu_seqlens_q,
        "ratio": shape.ratio,
        "overlap": shape.overlap,
        "max_seqlen_q": q_len,
    }
    kept = torch.arange(q_len - min(ring, q_len), q_len, device=device)
    for tensors in each:
        kv, gate = normal(case.num_tokens, channels), normal(case.num_tokens, channels)
        state = normal(case.batch, ring, 2, channels)
        for seq in range(case.batch):
            token = seq * q_len + kept
            place = position[token] % ring
            state[seq, place, 0] = kv[token]
            state[seq, place, 1] = gate[token] + shared["ape"][position[token] % shape.ratio]
        tensors |= {"kv": kv, "gate": gate, "state": state}
    return Problem(case, compress, shared, each, {})


def rope_table(num_positions: int, rope_dim: int, device: torch.device) -> Tensor:
    """[num_positions, rope_dim] fp32: cosines, then sines."""
    frequency = ROPE_THETA ** -(torch.arange(0, rope_dim, 2, device=device) / rope_dim)
    angle = torch.arange(num_positions, device=device)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], 1)


@dataclass(frozen=True)
class ExpectedRows:
    """The rows that a call writes, as ``impl="torch"`` writes them.

    Attributes:
        pages: pages that the call writes.
        slots: [n] physical rows.
        rows: [n, head_dim] fp32 rows read back.
        out: [num_tokens, head_dim] result of "write"; None for "compress".
    """

    pages: LatentPages | IndexPages
    slots: Tensor
    rows: Tensor
    out: Tensor | None

    def wrong(self, out: Tensor | None = None) -> str | None:
        """Describe an error of the pages or of ``out``; None if right.

        A step of the stored format is allowed: 2^-7 of a bf16 value; 2^-3 of an e4m3 value, at
        least 2^-9 of its scale, which is at most twice the largest value / 448.
        """
        found = [("pages", self.pages.read(self.slots), self.rows, self.pages.fp8)]
        if out is not None:
            found.append(("out", out, self.out, False))
        for name, actual, expected, e4m3 in found:
            expected = expected.double()
            budget = expected.abs() * (2.0**-3 if e4m3 else 2.0**-7)
            least = 2.0**-8 / 448 if e4m3 else 1e-5
            budget += expected.abs().amax(1, keepdim=True) * least
            share = ((actual.double() - expected).abs() / budget).max().item()
            if not share <= 1:
                return f"{name}: error {share:.3g} of the budget"
        return None


def expect_rows(problem: Problem) -> ExpectedRows:
    """The rows of the first copy's call; fills these rows of its pages with garbage."""
    slot_mapping, pages = problem.shared["slot_mapping"], problem.each[0]["pages"]
    written = slot_mapping[slot_mapping >= 0]
    reference = replace(pages, data=pages.data.clone())
    results = {name: torch.empty_like(empty) for name, empty in problem.results.items()}
    arguments = problem.shared | problem.each[0] | results | {"pages": reference}
    problem.operator(**arguments, impl="torch")
    rows = reference.read(written)
    pages.write(written, torch.full_like(rows, 1e4))
    return ExpectedRows(pages, written, rows, results.get("out"))
