"""A model of integers: its next token is a hash of all tokens that its cache shows it, exact in any batch.

One dense and one window group; a page row holds token and position. So a wrong page, a stale row or a lost token changes the output, and
outputs can be compared bit by bit, thousands of them in seconds.
"""

from types import SimpleNamespace

import numpy as np
import torch

from quire.kvcore import GroupSpec
from quire.models.engine.memory import ModelCache

VOCAB = 64
BLOCK = 16
WINDOW = 24
PAGE_BYTES = 512  # BLOCK rows of token and position, of two groups
PRIME = 2_147_483_647


class ToyPool:
    """pages: per group [num_pages, BLOCK, 2] int64: token, position. tensors: the same memory as bytes, which a host tier copies."""

    def __init__(self, num_pages):
        self.pages = [np.full((num_pages, BLOCK, 2), -1) for _ in range(2)]
        rows = [p.view(np.uint8).reshape(num_pages, -1) for p in self.pages]
        self.tensors = [torch.from_numpy(r) for r in rows]

    def poison(self, free):
        for pages in self.pages:
            pages[free] = -1


class ToyModel(torch.nn.Module):
    """Called as the engine calls a model."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, max_positions=2048):
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=VOCAB,
            activation_size=1,
            max_position_embeddings=max_positions,
            eos_token_ids=(1,),
        )
        # Few values: outputs run into loops now and then, which is what drafts of n-grams need.
        self.scores = torch.randn(97, VOCAB, generator=torch.Generator().manual_seed(0))

    def make_cache(self, **_):
        groups = [
            GroupSpec("dense", "dense", BLOCK, 64),
            GroupSpec("window", "window", BLOCK, 64, sliding_window=WINDOW),
        ]
        return ModelCache(groups, PAGE_BYTES, ToyPool)

    def forward(self, input_ids, positions, attn, pool, *, logits_rows=None, impl=None):
        ids, where = input_ids.numpy(), positions.numpy()
        cu, hidden = attn.cu_seqlens_q.tolist(), np.zeros(len(ids), dtype=np.int64)
        for s, length in enumerate(attn.seq_lens.tolist()):
            rows = slice(cu[s], cu[s + 1])
            if length == 0:
                continue  # padding
            context = length - (rows.stop - rows.start)
            seen = []
            for group, low in ((0, 0), (1, max(0, context - WINDOW + 1))):
                old = np.arange(low, context)
                table = attn.block_tables[group][s].numpy()
                token, position = pool.pages[group][table[old // BLOCK % len(table)], old % BLOCK].T
                assert (position == old).all(), "a row of another position"
                seen.append(np.concatenate([token, ids[rows]]))
            assert (where[rows] == np.arange(context, length)).all()
            hidden[rows] = hidden_of_rows(*seen, length - context)
        for group in range(2):
            slots = attn.slot_mappings[group].numpy()
            kept = slots >= 0
            rows = pool.pages[group].reshape(-1, 2)
            rows[slots[kept]] = np.stack([ids, where], axis=1)[kept]
        hidden = torch.from_numpy(hidden)
        return self.scores[hidden if logits_rows is None else hidden[logits_rows]]


def hidden_of(tokens, window, end):
    """State of the last of ``tokens`` (all of a sequence); ``window`` ends at the sequence's end, ``end`` + 1 <= 0 rows behind it.

    Mostly the last token, so that outputs run into loops, which drafts of n-grams can guess; now and then all of them.
    """
    window = window[: len(window) + 1 + end][-WINDOW:]
    weight = np.arange(len(tokens)) * 31 + 7
    everything = int((tokens * weight).sum()) * 40_503 % PRIME + int((window * 3 + 1).sum())
    return (int(tokens[-1]) * 5 + (everything if everything % 9 == 0 else 0)) % 97


def hidden_of_rows(tokens, window, count):
    """``hidden_of`` the last ``count`` of ``tokens``, all at once; ``window`` ends where they do."""
    everything = np.cumsum(tokens * (np.arange(len(tokens)) * 31 + 7))[-count:] * 40_503 % PRIME
    ends = np.arange(len(window) - count, len(window)) + 1
    sums = np.cumsum(np.concatenate([[0], window * 3 + 1]))
    everything += sums[ends] - sums[np.maximum(ends - WINDOW, 0)]
    return (tokens[-count:] * 5 + np.where(everything % 9 == 0, everything, 0)) % 97


def plain_logits(model, tokens):
    """Logits [VOCAB] after a whole sequence, from the definition."""
    tokens = np.asarray(tokens)
    return model.scores[hidden_of(tokens, tokens, -1)]


def finish(engine):
    """Outputs of an engine's requests, in the order in which they end."""
    outputs = []
    while engine.has_work:
        outputs += engine.step().finished
        engine.kv.check_invariants()
    return outputs
