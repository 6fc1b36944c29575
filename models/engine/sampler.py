"""Logits to the next tokens of every request.

A token is drawn by inversion: the first id whose cumulative probability exceeds u, a hash of seed
and position. So a request draws the same tokens in any batch, after any preemption, and with drafts
under "strict". A request has 1 + its drafts rows of logits (`quire.models.engine.speculative`).

Source: transformers ``generation/logits_process`` for the filters and their order; SplitMix64
    (Steele et al. 2014) for the hash; Leviathan et al. (arXiv 2211.17192) for rejection sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels import sample_tokens
from quire.kvcore.device import Staging, known_ids

from .outputs import TokenLogprobs
from .request import Request, SamplingParams

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Purposes of the numbers of one position (`uniform`): the next token, whether a draft is accepted,
# its replacement, and the draft itself.
TOKEN, ACCEPT, RESAMPLE, DRAFT = range(4)


class Sampled:
    """Tokens of one step, on their way to the host, which goes on meanwhile.

    Args:
        device_ids: [num_rows] int64, `NO_TOKEN` for a row with NaN or +inf, or of -inf alone.
        packed: [num_rows, n] float64: the id, then log-probabilities where any row wants some.
        wanted: number of likeliest tokens of each row, or None; empty where no row wants any.
        drafts: [n] int64 that go to the host in the same copy.

    Attributes:
        ids, drafts, logprobs: on the host, after `wait`; logprobs is None if no row wants any.
    """

    def __init__(
        self, device_ids: Tensor, packed: Tensor, wanted: Sequence[int | None], drafts: Tensor
    ) -> None:
        self.device_ids = device_ids.clamp_min(0)
        self._wanted, self._width = wanted, packed.shape[1]
        flat = packed.flatten()
        self._host = torch.cat([flat, drafts.double()]) if len(drafts) else flat
        self._arrived: torch.cuda.Event | None = None
        if flat.is_cuda:
            values = self._host
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self.ids: list[int] = []
        self.drafts: list[int] = []
        self.logprobs: list[TokenLogprobs | None] | None = None

    def wait(self) -> None:
        """Wait for the copy to the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        packed, width = self._host.tolist(), self._width
        end = len(self.device_ids) * width
        self.ids = list(map(int, packed[:end:width]))
        self.drafts = list(map(int, packed[end:]))
        if width == 1:
            return
        most, self.logprobs = (width - 2) // 2, []
        for start, n in zip(range(0, end, width), self._wanted, strict=True):
            row = packed[start : start + width]
            top = zip(map(int, row[2 + most :]), row[2 : 2 + most], strict=True)
            self.logprobs.append(None if n is None else TokenLogprobs(row[1], tuple(top)[:n]))


class Sampler:
    """Draw the next tokens of a step; ids and what goes with them reach the host in one copy.

    Args:
        sampled: [n] int64, ids that placeholders stand for (`BatchBuilder.sampled`).
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        sampled: Tensor,
        *,
        rejection_sample_method: str = "strict",
        impl: str | None = None,
    ) -> None:
        self._rejects = rejection_sample_method == "standard"
        self._impl = impl
        self._staging, self._sampled = Staging(device), sampled
        if torch.device(device).type == "cuda" or impl == "triton":  # compile now
            logits = torch.zeros(1, vocab_size, device=device)
            [given] = draw_columns([SamplingParams(temperature=1.0)], [np.zeros(1)], self._staging)
            sample_tokens(logits, impl=impl)
            sample_tokens(logits, **given, impl=impl)
            if self._rejects:
                sample_tokens(logits, **given, probs=torch.empty_like(logits), impl=impl)

    def __call__(
        self,
        logits: Tensor,
        requests: Sequence[Request],
        num_rows: Sequence[int],
        drafts: Tensor,
    ) -> Sampled:
        """Sample all rows: the token of each follows the drafts before it.

        Args:
            logits: [sum(num_rows), vocab_size] fp32, the rows of one request one after another.
            requests, num_rows: requests that get tokens, and for each 1 + its verified drafts.
            drafts: [n] int64 that go to the host in the same copy.
        """
        is_plain, given = True, []
        for request in requests:
            p = request.params
            given.append(p)
            if p.temperature or p.repetition_penalty != 1 or p.logprobs is not None:
                is_plain = False
        if is_plain:
            ids = sample_tokens(logits, impl=self._impl)
            return Sampled(ids, ids[:, None].double(), (), drafts)
        params = [p for p, count in zip(given, num_rows, strict=True) for _ in range(count)]
        raw = logits
        if any(p.repetition_penalty != 1 for p in params):
            logits = self._penalized(logits, requests, num_rows)
        if not any(p.temperature > 0 for p in params):
            ids = sample_tokens(logits, impl=self._impl)
        else:
            [columns] = draw_columns(params, [_draws(requests, num_rows)], self._staging)
            rejects = self._rejects and len(params) > len(requests)
            probs = torch.empty_like(logits) if rejects else None
            ids = sample_tokens(logits, **columns, probs=probs, impl=self._impl)
            if probs is not None:
                ids = torch.where(ids < 0, ids, self._reject(ids, probs, requests, num_rows))
        wanted = [p.logprobs for p in params]
        if all(n is None for n in wanted):
            return Sampled(ids, ids[:, None].double(), wanted, drafts)
        return Sampled(ids, _with_logprobs(ids, raw, wanted), wanted, drafts)

    def score_prompts(self, logits: Tensor, rows: Sequence[tuple[Request, range]]) -> Sampled:
        """Log-probabilities of prompt tokens, each the one behind its row.

        Args:
            logits: [num_rows, vocab_size] fp32.
            rows: of each request its rows, one request after another.
        """
        next_ids = [r.prompt_token_ids[part.start + 1 : part.stop + 1] for r, part in rows]
        [ids] = self._staging.send([np.concatenate(next_ids).astype(np.int64)])
        wanted = [r.params.prompt_logprobs for r, part in rows for _ in part]
        return Sampled(ids, _with_logprobs(ids, logits, wanted), wanted, ids[:0])

    def _penalized(
        self, logits: Tensor, requests: Sequence[Request], num_rows: Sequence[int]
    ) -> Tensor:
        """Divide positive logits of the tokens before each row by the penalty, multiply others.

        Source: CTRL (arXiv 1909.05858) 4.1, as in transformers.
        """
        tokens, rows, penalties, row = [], [], [], 0
        for request, count in zip(requests, num_rows, strict=True):
            if request.params.repetition_penalty != 1:
                known = request.num_tokens + request.num_output_placeholders
                for i in range(count):  # drafts come behind the tokens: each row has one more
                    tokens.append(request.buffer[: known + i])
                    rows.append(row + i)
                    penalties.append(request.params.repetition_penalty)
            row += count
        lengths = np.array([len(ids) for ids in tokens])
        penalty = np.array(penalties, dtype=np.float32)
        arrays = [np.concatenate(tokens), lengths, np.array(rows), penalty]
        ids, counts, *each = self._staging.send(arrays)
        index, factor = (x.repeat_interleave(counts, output_size=len(ids)) for x in each)
        ids = known_ids(ids.long(), self._sampled)
        seen = logits[index, ids]
        # A token that comes twice gets the same value twice.
        seen = torch.where(seen > 0, seen / factor, seen * factor)
        return logits.index_put((index, ids), seen)

    def _reject(
        self,
        drawn: Tensor,
        mass: Tensor,
        requests: Sequence[Request],
        num_rows: Sequence[int],
    ) -> Tensor:
        """Replace tokens ``drawn`` [num_rows] by `rejection_sample` in the rows before a draft.

        mass: [num_rows, vocab_size], probabilities of each row.
        """
        rows, drafts, given, row = [], [], [], 0
        for request, count in zip(requests, num_rows, strict=True):
            if count > 1 and request.params.temperature > 0:
                rows += range(row, row + count - 1)
                drafts.append(request.drafts[: count - 1])
                given.append(request.draft_probs)
            row += count
        if not rows:
            return drawn
        u = [_draws(requests, num_rows, purpose)[rows] for purpose in (ACCEPT, RESAMPLE)]
        arrays = np.array(rows), np.concatenate(drafts).astype(np.int64), *u
        index, tokens, *u = self._staging.send(arrays)
        tokens, target = known_ids(tokens, self._sampled), mass[index]
        probs = torch.zeros_like(target).scatter_(1, tokens[:, None], 1.0)  # of drafts not drawn
        if any(one is not None for one in given):
            parts = zip(probs.split([len(d) for d in drafts]), given, strict=True)
            probs = torch.cat([p if one is None else one[: len(p)] for p, one in parts])
        stay = rejection_sample(target, tokens, probs, *u, self._impl)
        return drawn.index_copy(0, index, stay)


def _with_logprobs(ids: Tensor, logits: Tensor, wanted: Sequence[int | None]) -> Tensor:
    """`Sampled.packed` of ids [num_rows] with the log-probabilities that rows want."""
    most = min(max(n for n in wanted if n is not None), logits.shape[1])
    scores = logits.log_softmax(dim=-1)
    best, best_ids = scores.topk(most, dim=-1)
    own = scores.gather(1, ids.clamp_min(0)[:, None])
    return torch.cat([ids[:, None].double(), own, best, best_ids.double()], dim=1)


def _draws(
    requests: Sequence[Request], num_rows: Sequence[int], purpose: int = TOKEN
) -> np.ndarray:
    """[sum(num_rows)] float64 numbers, by the request's seed and the row's place in the output."""
    counts = np.asarray(num_rows)
    first = np.repeat([r.num_output + r.num_output_placeholders for r in requests], counts)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    seeds = [r.seed for r, count in zip(requests, num_rows, strict=True) for _ in range(count)]
    return uniform(seeds, first + within, purpose)


def draw_columns(
    params: Sequence[SamplingParams], numbers: Sequence[np.ndarray], staging: Staging
) -> list[dict[str, Tensor]]:
    """Keyword arguments of ``sample_tokens``, [num_rows] tensors, for each of several draws.

    numbers: [num_rows] float64 in [0, 1) of each draw.
    """
    temperature = np.array([p.temperature for p in params], dtype="f4")
    # A temperature that fp32 rounds to 0 is not greedy.
    drawn = np.array([p.temperature > 0 for p in params], dtype=bool)
    filters = {
        "temperature": np.where(drawn, np.maximum(temperature, np.float32(1e-30)), 0),
        "top_k": np.array([p.top_k for p in params], dtype="i4"),
        "top_p": np.array([p.top_p for p in params], dtype="f4"),
        "min_p": np.array([p.min_p for p in params], dtype="f4"),
    }
    sent = staging.send([*filters.values(), *numbers])
    columns = dict(zip(filters, sent, strict=False))
    return [{**columns, "u": u} for u in sent[len(filters) :]]


def draw(mass: Tensor, u: Tensor, impl: str | None = None) -> Tensor:
    """Draw one index a row by inversion: [num_rows] int64, -1 for a row with NaN.

    Args:
        mass: [num_rows, n] fp32 >= 0, each row with a positive sum (not necessarily 1).
        u: [num_rows] float64 in [0, 1).
    """
    ones = mass.new_ones(len(mass))
    return sample_tokens(
        mass.log(),
        temperature=ones,
        top_k=torch.zeros_like(ones, dtype=torch.int32),
        top_p=ones,
        min_p=torch.zeros_like(ones),
        u=u,
        impl=impl,
    )


def rejection_sample(
    target: Tensor,
    drafts: Tensor,
    probs: Tensor,
    u_accept: Tensor,
    u_draw: Tensor,
    impl: str | None = None,
) -> Tensor:
    """Accept or replace drafts [num_rows], so that tokens have the target's distribution.

    Draft x of row i is accepted if u_accept < p(x) / q(x); else another token is drawn from
    max(p - q, 0), normalized.

    Args:
        target: [num_rows, vocab_size] fp32, p of each row.
        probs: [num_rows, vocab_size] fp32, distribution q of each draft: 1 at one not drawn.
        u_accept, u_draw: [num_rows] float64 in [0, 1), independent.
    """
    p, q = (x.gather(1, drafts[:, None]).squeeze(1).double() for x in (target, probs))
    rest = (target - probs).clamp_min(0)
    # Where p = q nothing is left over: what rounding rejects is drawn from p itself.
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)
    return torch.where(u_accept * q < p, drafts, draw(rest, u_draw, impl))


def uniform(seeds: Sequence[int], positions: Sequence[int], purpose: int = TOKEN) -> np.ndarray:
    """[n] float64 multiples of 2^-32 in [0, 1) that depend on (seed, position, purpose) alone."""
    with np.errstate(over="ignore"):
        x = _mix(np.array([s % 2**64 for s in seeds], dtype=np.uint64))
        x = _mix(x + np.asarray(positions, dtype=np.uint64) * GOLDEN)
        x = _mix(x ^ np.uint64(purpose))
    return (x >> np.uint64(32)).astype(np.float64) * 2.0**-32


def derived_seed(seed: int, sample: int) -> int:
    """Seed of one sample of a request; sample 0 has the request's own."""
    return seed if sample == 0 else (seed + sample * 0xD1B54A32D192ED03) % 2**64


def _mix(x: np.ndarray) -> np.ndarray:
    """The output function of SplitMix64."""
    x = x + GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
