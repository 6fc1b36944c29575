"""compress, both implementations, against the entries of whole sequences: any split into steps,
ragged batches, drafts taken back."""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch

from quire.bench.common.bounds import bounding
from quire.kernels import compress, compressor
from quire.kernels.common import launching
from tests.kernels.oracles import compressor as reference
from tests.support.helpers import DEVICE, NAN, assert_within_budget, drawing
from tests.support.kernels.quantised import assert_quantised, poisoned_pages

# A slot that no pool has, for tokens that close nothing; its address does not wrap around to one.
NO_SLOT = 2**45
BF16, FP16, U8 = torch.bfloat16, torch.float16, torch.uint8


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences and how their tokens come.

    steps: for each step the new tokens of each sequence.
    start: position of the first token of the steps; the rows before it lie in the ring already.
    slack: rows of the ring beyond those that a window needs.
    pages: dtype of the pages, torch.uint8 for the quantised ones; index: pages of index keys.
    """

    steps: Sequence[Sequence[int]]
    ratio: int = 4
    overlap: bool = True
    start: int = 0
    slack: int = 0
    dim: int = 16
    rope_dim: int = 8
    dtype: torch.dtype = torch.float32
    pages: torch.dtype = torch.float32
    index: bool = False
    block_size: int = 3
    gate_size: float = 1.0

    @property
    def channels(self) -> int:
        return self.dim * (1 + self.overlap)

    @property
    def needed(self) -> int:
        """Rows before a token that the window which it closes pools."""
        return self.ratio * (1 + self.overlap) - 1

    @property
    def ring(self) -> int:
        return max(1, self.needed + self.slack)


class Run:
    """The tensors of a case; all that is not part of it is poison."""

    def __init__(self, case, seed=0):
        self.case = case
        generator, normal = drawing(seed)
        num_seqs, c = len(case.steps[0]), case.channels
        self.lengths = [case.start + sum(step[s] for step in case.steps) for s in range(num_seqs)]
        longest = max(self.lengths)
        # Rows behind the ring's reach are poison too: nothing may look at them.
        self.first = max(0, case.start - case.ring)
        self.kv = normal(num_seqs, longest - self.first, c).to(case.dtype)
        self.gate = (normal(*self.kv.shape) * case.gate_size).to(case.dtype)
        self.ape = normal(case.ratio, c)
        self.norm_weight = 1 + 0.3 * normal(case.dim)
        self.cos_sin = torch.full((longest + 1, case.rope_dim), NAN, device=DEVICE)
        starts = torch.arange(self.first // case.ratio, longest // case.ratio + 1) * case.ratio
        angle = starts[:, None] * 0.3 ** torch.arange(case.rope_dim // 2)
        self.cos_sin[starts.to(DEVICE)] = torch.cat([angle.cos(), angle.sin()], 1).to(DEVICE)

        order = torch.randperm(num_seqs + 2, generator=generator)
        self.state_index = order[:num_seqs].to(DEVICE, torch.int32)
        pool = torch.full((num_seqs + 2, case.ring + 1, 2, c + 5), NAN, device=DEVICE)
        self.state = pool[:, 1:, :, 5:]
        for s in range(num_seqs):
            for position in range(self.first, case.start):
                self.state[order[s], position % case.ring] = self.row(s, position)

        blocks = longest // case.ratio // case.block_size + 1
        self.table = torch.randperm(num_seqs * blocks + 2, generator=generator)
        self.table = self.table[: num_seqs * blocks].view(num_seqs, blocks)
        self.pages = make_pages(case, num_seqs * blocks + 2)

    def row(self, s, position):
        """Values of a token in the ring: kv, and gate + ape, in fp32."""
        i = position - self.first
        gate = self.gate[s, i].float() + self.ape[position % self.case.ratio]
        return torch.stack([self.kv[s, i].float(), gate])

    def slot(self, s, w):
        """Slot of entry w of sequence s."""
        page = self.table[s, w // self.case.block_size].item()
        return page * self.case.block_size + w % self.case.block_size

    def arguments(self, contexts, new, kv=None, gate=None):
        """Keyword arguments of a step over the tokens contexts[s] .. contexts[s] + new[s] - 1.

        kv, gate: lists of other rows than the case's.
        """
        case, total = self.case, sum(new)
        # As a model has them: side by side in one projection, with rows of other steps behind them.
        rows = torch.full((total + 2, 2, case.channels), NAN, dtype=case.dtype, device=DEVICE)
        slots = torch.full((total,), NO_SLOT, dtype=torch.int64)
        at = 0
        for s, (context, count) in enumerate(zip(contexts, new, strict=True)):
            window = slice(context - self.first, context - self.first + count)
            rows[at : at + count, 0] = self.kv[s, window] if kv is None else kv[s]
            rows[at : at + count, 1] = self.gate[s, window] if gate is None else gate[s]
            for i in range(count):
                if (context + i + 1) % case.ratio == 0:
                    slots[at + i] = self.slot(s, (context + i) // case.ratio)
            at += count
        seq_lens = [context + count for context, count in zip(contexts, new, strict=True)]
        return {
            "kv": rows[:total, 0], "gate": rows[:total, 1], "ape": self.ape, "state": self.state,
            "state_index": self.state_index,
            "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
            "cu_seqlens_q": torch.tensor([0, *accumulate(new)], dtype=torch.int32, device=DEVICE),
            "ratio": case.ratio, "overlap": case.overlap, "norm_weight": self.norm_weight,
            "eps": 1e-2, "cos_sin": self.cos_sin, "pages": self.pages,
            "slot_mapping": slots.to(DEVICE), "max_seqlen_q": max(new, default=0),
        }  # fmt: skip

    def run(self, impl):
        """All steps; returns self."""
        contexts = [self.case.start] * len(self.lengths)
        for new in self.case.steps:
            compress(**self.arguments(contexts, new), impl=impl)
            contexts = [context + count for context, count in zip(contexts, new, strict=True)]
        return self

    def made(self):
        """(sequence, entry) of every window that closed in a step."""
        first = self.case.start // self.case.ratio
        return [
            (s, w) for s, n in enumerate(self.lengths) for w in range(first, n // self.case.ratio)
        ]

    def slots(self):
        """Slots of these entries."""
        slots = [self.slot(s, w) for s, w in self.made()]
        return torch.tensor(slots, dtype=torch.int64, device=DEVICE)

    def entries(self):
        """The rows of these entries, as a reader sees them."""
        return self.pages.read(self.slots())

    def oracle(self):
        """The same rows by the oracle, with bounds."""
        case = self.case
        options = dict(ratio=case.ratio, overlap=case.overlap, norm_weight=self.norm_weight)
        options |= dict(eps=1e-2, cos_sin=self.cos_sin, first=self.first)
        rows = []
        for s, n in enumerate(self.lengths):
            tokens = s, slice(0, n - self.first)
            with bounding():
                found = reference.compress(self.kv[tokens], self.gate[tokens], self.ape, **options)
            rows += [found[w] for t, w in self.made() if t == s]
        return torch.stack(rows)

    def check_entries(self):
        """Entries within the budget, and nothing else of the pages written."""
        case = self.case
        if not self.made():
            return
        actual, exact = self.entries(), self.oracle()
        if case.pages != U8:
            assert_within_budget("entries", actual.to(case.pages), exact)
        else:
            nope = case.dim - (0 if case.index else case.rope_dim)
            group = case.dim if case.index else 64
            assert_quantised("entries", actual[:, :nope], exact[:, :nope], group)
            if not case.index:
                assert_within_budget("rope", actual[:, nope:].bfloat16(), exact[:, nope:])
        page, row = self.slots() // case.block_size, self.slots() % case.block_size
        blank = make_pages(case, self.pages.data.shape[0])
        names = ["data"] if case.pages != U8 else ["values", "scales"] + ["rope"] * (not case.index)
        for name in names:
            getattr(self.pages, name)[page, row] = getattr(blank, name)[page, row]
        torch.testing.assert_close(self.pages.data, blank.data, rtol=0, atol=0, equal_nan=True)

    def check_state(self):
        """The ring holds exactly the last rows of each sequence; no other memory was written."""
        expected = torch.full_like(self.state, NAN)
        for s, n in enumerate(self.lengths):
            for position in range(max(self.first, n - self.case.ring), n):
                expected[self.state_index[s], position % self.case.ring] = self.row(s, position)
        torch.testing.assert_close(self.state, expected, rtol=0, atol=0, equal_nan=True)


def make_pages(case, num_pages):
    rope_dim = None if case.index else case.rope_dim
    return poisoned_pages(num_pages, case.block_size, case.dim, rope_dim, case.pages)


HCA = dict(ratio=8, overlap=False)
REAL_FP8 = dict(dim=512, rope_dim=64, dtype=BF16, pages=U8)
INDEX_FP8 = dict(dim=128, rope_dim=64, dtype=BF16, pages=U8, index=True)
CASES = {
    "one-pass": Case([[21]]),
    "one-pass-hca": Case([[29]], **HCA),
    "nothing-closes": Case([[3]]),
    "no-tokens": Case([[0, 0]]),
    "ragged": Case([[5, 0, 9, 4], [1, 1, 0, 4], [7, 3, 2, 0]]),
    "ragged-hca": Case([[5, 0, 9, 4], [1, 1, 0, 4], [7, 8, 2, 0]], **HCA),
    "decode": Case([[1, 1]] * 9, start=6),
    "decode-one-launch": Case([[1, 1]] * 9, start=6, slack=1),
    "decode-hca": Case([[1, 1]] * 3, start=14, slack=1, **HCA),
    "shorter-than-the-ratio": Case([[2], [3], [1], [3], [3]], slack=5),
    "every-token-an-entry": Case([[3, 2], [1, 1]], ratio=1, overlap=False),
    "every-token-and-the-one-before": Case([[3, 2], [1, 1]], ratio=1),
    "odd-ratio": Case([[4], [7], [6]], ratio=3, dim=32),
    "the-last-of-a-million": Case([[5], [8]], start=2**20 - 13),
    "the-last-of-a-million-hca": Case([[17]], start=2**20 - 17, **HCA),
    "bf16": Case([[9], [6]], dtype=BF16, pages=BF16),
    "fp16": Case([[9], [6]], dtype=FP16, pages=FP16),
    "steep-gates": Case([[9], [6]], gate_size=1e4),
    "chunks": Case([[20, 31], [9, 3]], ratio=9, overlap=False),
    "chunks-with-overlap": Case([[23, 12], [4, 5]], ratio=5),
    "a-tile-before-the-sequence": Case([[20], [9]], ratio=9),
    "steep-gates-in-chunks": Case([[33], [14]], ratio=17, overlap=False, gate_size=1e4),
    "wide-rows-in-chunks": Case([[23], [8]], ratio=6, dim=512, rope_dim=64),
    "bf16-rows-to-fp32-pages-in-chunks": Case([[23], [8]], ratio=6, dtype=BF16),
    "index-bf16": Case([[9], [6]], dtype=BF16, pages=BF16, index=True),
    "index-fp8": Case([[9, 4], [3, 3]], block_size=64, **INDEX_FP8),
    "index-fp8-fp32-rows": Case([[9, 4], [3, 3]], **{**INDEX_FP8, "dtype": torch.float32}),
    "index-fp8-narrow": Case([[9, 4], [3, 3]], dim=32, rope_dim=16, pages=U8, index=True),
    "latent-fp8": Case([[9], [3]], block_size=64, **REAL_FP8),
    "latent-fp8-fp32-rows": Case([[9], [3]], **{**REAL_FP8, "dtype": torch.float32}),
    "latent-fp8-p2": Case([[9], [3]], block_size=2, **REAL_FP8),
    "real-hca": Case([[1], [2]], ratio=128, overlap=False, start=126, slack=3, block_size=2, **REAL_FP8),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_compress(impl, name, monkeypatch):
    if "ragged" in name:  # more sequences than a program looks at at once
        monkeypatch.setattr(compressor, "BLOCK_SEQS", 2)
    run = Run(CASES[name]).run(impl)
    run.check_state()
    run.check_entries()


@pytest.mark.parametrize("overlap, ratio", [(True, 2), (False, 3), (True, 5), (False, 9)])
def test_any_cut_gives_the_same_bits(impl, overlap, ratio):
    """Steps of 0 to 2 * ratio + 1 tokens, in one launch and in two: bit for bit the one pass."""
    counts = list(range(2 * ratio + 2))
    total = sum(counts)
    base = Case([[total]], overlap=overlap, ratio=ratio)
    whole = Run(base).run(impl).entries()
    assert whole.shape[0] == total // ratio
    few = [1, 1, 3, 1]
    for slack, cut in ((0, counts), (2 * ratio + 2, counts[::-1]), (1, [*few, total - sum(few)])):
        case = dataclasses.replace(base, steps=[[n] for n in cut], slack=slack)
        run = Run(case).run(impl)
        assert run.entries().equal(whole), cut
        run.check_state()


@pytest.mark.parametrize(
    "shape", [dict(slack=3), dict(slack=4), dict(slack=3, ratio=5, overlap=False)]
)
def test_rejected_drafts_leave_no_trace(impl, shape):
    """Each step has a token and 3 drafts, 0 to 3 of them wrong; a slack of 4 makes it one launch."""
    case = Case([[16, 19]], **shape)
    run = Run(case)
    contexts, done = [0, 0], 0
    while contexts != run.lengths:
        new = [min(4, n - context) for n, context in zip(run.lengths, contexts, strict=True)]
        # A draft is wrong where the sequence rejects it, and everything after it.
        accepted = [min(n, 1 + (done + s) % 4) for s, n in enumerate(new)]
        rows = {"kv": [], "gate": []}
        for s in range(2):
            for name, full in (("kv", run.kv), ("gate", run.gate)):
                part = full[s, contexts[s] : contexts[s] + new[s]].clone()
                part[accepted[s] :] = 1e3
                rows[name].append(part)
        compress(**run.arguments(contexts, new, **rows), impl=impl)
        contexts = [context + count for context, count in zip(contexts, accepted, strict=True)]
        done += 1
    run.check_entries()
    for s, n in enumerate(run.lengths):
        for position in range(n - case.needed, n):
            assert run.state[run.state_index[s], position % case.ring].equal(run.row(s, position))


def test_values_of_several_sizes(impl):
    """A gate of -inf, also on the only token of a window 0; an index key has one scale, also where
    half of its channels are much smaller."""
    run = Run(Case([[10]]))
    run.gate[0, 2] = -torch.inf
    run.gate[0, 0, :16] = -torch.inf
    run.run(impl).check_entries()
    run = Run(Case([[9]], block_size=64, **INDEX_FP8))
    run.kv.unflatten(-1, (4, 64))[:, :, ::2] *= 32
    run.run(impl).check_entries()


def test_padding_rows(impl):
    """Sequences of length 0 with one token, with none, and with more than a window; their states do
    not exist."""
    run = Run(Case([[9, 8]]))
    arguments = run.arguments([0, 0], [9, 8])

    def padded(rows, value):
        pad = torch.full((6, *rows.shape[1:]), value, dtype=rows.dtype, device=DEVICE)
        return torch.cat([pad[:1], rows[:9], pad, rows[9:]])

    for name, value in (("kv", NAN), ("gate", NAN), ("slot_mapping", NO_SLOT)):
        arguments[name] = padded(arguments[name], value)

    def int32(*values):
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    index = run.state_index.tolist()
    arguments["state_index"] = int32(2**30, index[0], -(2**30), 2**30, index[1])
    arguments["seq_lens"] = int32(0, 9, 0, 0, 8)
    arguments["cu_seqlens_q"] = int32(0, 1, 10, 10, 16, 24)
    compress(**arguments, impl=impl)
    run.check_state()
    run.check_entries()


@pytest.mark.parametrize("slack, new, count", [(0, 1, 2), (1, 1, 1), (3, 4, 2), (4, 4, 1)])
def test_decode_is_one_launch(slack, new, count, monkeypatch):
    """If the ring has a row more than a window and the step need."""
    grids = []
    monkeypatch.setattr(launching, "launch", lambda kernel, grid, **arguments: grids.append(grid))
    run = Run(Case([[new, new]], start=9, slack=slack))
    compress(**run.arguments([9, 9], [new, new]), impl="triton")
    assert len(grids) == count
